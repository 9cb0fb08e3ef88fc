"""What every driver must do, as a pytest class.

::

    class TestMyDriver(DriverConformance):
        @pytest.fixture
        def driver(self):
            driver = MyDriver()
            yield driver
            driver.close()

        def hold(self, driver, stream):
            latch = my_latch(stream)
            return latch.release

Law of this file: it knows the contract (:mod:`aiogpu.drivers.base`) and nothing else. What cannot be said in
its verbs, such as holding a stream, is a hook of the class.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from .._notifier import PosixSignal, ThreadSignal, _make_signal
from ..drivers.base import Driver, Event, Stream, StreamKind

__all__ = ["DriverConformance"]

#: Seconds after which something that should have happened counts as missing.
LIMIT = 10.0

KINDS: tuple[StreamKind, ...] = ("compute", "copy")

# A driver thread may post a semaphore for as long as the process lives.
_immortal: list[PosixSignal | ThreadSignal] = []


class DriverConformance:
    """Inherit, give a ``driver`` fixture and :meth:`hold`, and run it with pytest."""

    # -- hooks -------------------------------------------------------------------------------------

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        raise NotImplementedError("a subclass of DriverConformance has a `driver` fixture")

    def hold(self, driver: Driver, stream: Stream) -> Callable[[], object]:
        """Make ``stream`` stand still, behind what it has; returns the function that lets it go on.

        Where a device cannot be held by hand, submit work that takes about 0.2 s and return a function
        that does nothing.
        """
        raise NotImplementedError("a subclass of DriverConformance says how to hold a stream")

    def settle(self, driver: Driver) -> None:
        """Let the device run on, for devices that move only when told to."""

    # -- words that the tests use --------------------------------------------------------------------

    def there(self, driver: Driver, host: torch.Tensor) -> torch.Tensor:
        """A copy of ``host`` on the device, finished. Not while a stream is held."""
        tensor = host.to(driver.device, copy=True)
        driver.synchronize_device()
        return tensor

    def here(self, driver: Driver, host: torch.Tensor) -> torch.Tensor:
        """A copy of ``host`` in page-locked memory."""
        block = driver.pinned(host.numel() * host.element_size())
        return block.view(host.dtype).view(host.shape).copy_(host)

    def finished(self, driver: Driver, event: Event, limit: float = LIMIT) -> bool:
        """Does ``event`` complete within ``limit`` seconds?"""
        deadline = time.monotonic() + limit
        while True:
            self.settle(driver)
            if driver.query(event):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)

    def held(self, driver: Driver, event: Event) -> bool:
        """Is ``event`` still not complete although the device may run on?"""
        self.settle(driver)
        return not driver.query(event)

    def signal(self) -> PosixSignal | ThreadSignal:
        signal = _make_signal()
        _immortal.append(signal)
        return signal

    def posted(self, driver: Driver, signal: PosixSignal | ThreadSignal, limit: float = LIMIT) -> bool:
        self.settle(driver)
        return signal.wait(limit)

    # -- streams -----------------------------------------------------------------------------------

    def test_says_which_device_it_drives_and_how_it_notifies(self, driver: Driver) -> None:
        assert isinstance(driver.device, torch.device)
        assert driver.wake_mechanism not in ("", "none")

    @pytest.mark.parametrize("kind", KINDS)
    def test_opened_streams_are_distinct(self, driver: Driver, kind: StreamKind) -> None:
        streams = [driver.open_stream(kind) for _ in range(40)]
        assert len({stream.raw for stream in streams}) == 40
        assert all(stream.device == driver.device for stream in streams)
        assert not any(driver.is_default(stream) for stream in streams)

    def test_a_thread_starts_on_the_default_stream(self, driver: Driver) -> None:
        assert driver.is_default(driver.current())

    def test_swap_and_restore_nest(self, driver: Driver) -> None:
        first, second = driver.open_stream("compute"), driver.open_stream("compute")
        outside = driver.current().raw
        saved = driver.swap(first.raw)
        assert driver.current().raw == first.raw
        inner = driver.swap(second.raw)
        assert driver.current().raw == second.raw
        assert driver.adopt(driver.restore(inner)).raw == second.raw
        assert driver.current().raw == first.raw
        assert driver.adopt(driver.restore(saved)).raw == first.raw
        assert driver.current().raw == outside

    def test_what_restore_returns_can_be_swapped_in_again(self, driver: Driver) -> None:
        stream = driver.open_stream("compute")
        saved = driver.swap(stream.raw)
        raw = driver.restore(saved)
        saved = driver.swap(raw)
        assert driver.current().raw == stream.raw
        driver.restore(saved)

    def test_the_current_stream_belongs_to_the_thread(self, driver: Driver) -> None:
        stream = driver.open_stream("compute")

        def other() -> bool:
            driver.enter_thread()
            return driver.is_default(driver.current())

        with driver.on(stream), ThreadPoolExecutor(1) as pool:
            assert pool.submit(other).result(LIMIT)
            assert driver.current().raw == stream.raw

    def test_an_error_in_an_on_block_puts_the_stream_back(self, driver: Driver) -> None:
        outside = driver.current().raw
        with pytest.raises(KeyError), driver.on(driver.open_stream("compute")):
            raise KeyError
        assert driver.current().raw == outside

    def test_a_stream_is_adopted_by_its_raw_name_and_by_itself(self, driver: Driver) -> None:
        stream = driver.open_stream("compute")
        with driver.on(stream):
            assert driver.adopt(driver.current().raw).raw == stream.raw
        assert driver.adopt(stream.raw).raw == stream.raw

    # -- order within a stream -----------------------------------------------------------------------

    @pytest.mark.parametrize("kind", KINDS)
    def test_work_of_a_stream_runs_in_the_order_of_its_submission(
        self, driver: Driver, kind: StreamKind
    ) -> None:
        values = torch.arange(16)
        chain = [self.there(driver, values)] + [
            self.there(driver, torch.zeros_like(values)) for _ in range(20)
        ]
        end = self.here(driver, torch.zeros_like(values))
        stream = driver.open_stream(kind)
        release = self.hold(driver, stream)
        for before, after in itertools.pairwise(chain):
            driver.copy(after, before, stream)
        driver.copy(end, chain[-1], stream)
        event = driver.record(stream)
        release()
        assert self.finished(driver, event)
        assert end.tolist() == values.tolist()

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_event_is_complete_only_when_all_work_before_it_has_finished(
        self, driver: Driver, kind: StreamKind
    ) -> None:
        source = self.there(driver, torch.arange(1 << 16))
        target = self.here(driver, torch.zeros(1 << 16, dtype=torch.int64))
        stream = driver.open_stream(kind)
        release = self.hold(driver, stream)
        driver.copy(target, source, stream)
        event = driver.record(stream)
        assert self.held(driver, event)
        assert target.sum() == 0, "the copy ran ahead of what holds its stream"
        release()
        assert self.finished(driver, event)
        assert torch.equal(target, torch.arange(1 << 16))

    def test_an_event_does_not_wait_for_work_after_it(self, driver: Driver) -> None:
        stream = driver.open_stream("copy")
        event = driver.record(stream)
        release = self.hold(driver, stream)
        later = driver.record(stream)
        assert self.finished(driver, event)
        assert self.held(driver, later)
        release()
        assert self.finished(driver, later)

    def test_an_event_on_an_idle_stream_completes(self, driver: Driver) -> None:
        for kind in KINDS:
            event = driver.record(driver.open_stream(kind))
            assert self.finished(driver, event)
            assert driver.query(event), "once complete, it stays complete"

    def test_recycled_events_serve_again(self, driver: Driver) -> None:
        stream = driver.open_stream("copy")
        for _ in range(200):
            event = driver.record(stream)
            assert self.finished(driver, event)
            driver.recycle(event)
        release = self.hold(driver, stream)
        event = driver.record(stream)
        assert self.held(driver, event), "an event handed out again must not remember its last life"
        release()
        assert self.finished(driver, event)

    # -- order between streams -----------------------------------------------------------------------

    def test_copy_streams_do_not_hold_up_each_other(self, driver: Driver) -> None:
        held, free = driver.open_stream("copy"), driver.open_stream("copy")
        release = self.hold(driver, held)
        behind = driver.record(held)
        assert self.finished(driver, driver.record(free))
        assert self.held(driver, behind)
        release()
        assert self.finished(driver, behind)

    def test_compute_streams_do_not_hold_up_each_other(self, driver: Driver) -> None:
        held, free = driver.open_stream("compute"), driver.open_stream("compute")
        release = self.hold(driver, held)
        behind = driver.record(held)
        assert self.finished(driver, driver.record(free))
        assert self.held(driver, behind)
        release()
        assert self.finished(driver, behind)

    def test_a_wait_orders_later_work_after_the_event(self, driver: Driver) -> None:
        values = torch.arange(64)
        first = self.there(driver, values)
        second = self.there(driver, torch.zeros_like(values))
        third = self.here(driver, torch.zeros_like(values))
        producer, consumer = driver.open_stream("compute"), driver.open_stream("copy")
        release = self.hold(driver, producer)
        driver.copy(second, first, producer)
        driver.wait(consumer, driver.record(producer))
        driver.copy(third, second, consumer)
        end = driver.record(consumer)
        assert self.held(driver, end)
        assert third.sum() == 0
        release()
        assert self.finished(driver, end)
        assert third.tolist() == values.tolist()

    def test_a_wait_does_not_hold_up_work_that_was_submitted_before_it(self, driver: Driver) -> None:
        held, stream = driver.open_stream("copy"), driver.open_stream("copy")
        release = self.hold(driver, held)
        before = driver.record(stream)
        driver.wait(stream, driver.record(held))
        after = driver.record(stream)
        assert self.finished(driver, before)
        assert self.held(driver, after)
        release()
        assert self.finished(driver, after)

    def test_recording_anew_does_not_make_a_wait_wait_longer(self, driver: Driver) -> None:
        first, consumer, other = (driver.open_stream("copy") for _ in range(3))
        event = driver.record(first)
        driver.wait(consumer, event)
        driver.recycle(event)
        release = self.hold(driver, other)
        again = driver.record(other)  # perhaps the same event
        assert self.finished(driver, driver.record(consumer))
        assert self.held(driver, again)
        release()
        assert self.finished(driver, again)

    def test_recording_anew_does_not_end_a_wait_early(self, driver: Driver) -> None:
        first, consumer, other = (driver.open_stream("copy") for _ in range(3))
        release = self.hold(driver, first)
        event = driver.record(first)
        driver.wait(consumer, event)
        driver.recycle(event)
        again = driver.record(other)  # perhaps the same event, and complete at once
        end = driver.record(consumer)
        assert self.finished(driver, again)
        assert self.held(driver, end)
        release()
        assert self.finished(driver, end)

    def test_waits_for_each_other_cannot_form_a_cycle(self, driver: Driver) -> None:
        one, two = driver.open_stream("copy"), driver.open_stream("copy")
        for _ in range(10):
            of_one, of_two = driver.record(one), driver.record(two)
            driver.wait(one, of_two)
            driver.wait(two, of_one)
        assert self.finished(driver, driver.record(one))
        assert self.finished(driver, driver.record(two))

    def test_a_stream_that_waits_for_itself_goes_on(self, driver: Driver) -> None:
        stream = driver.open_stream("compute")
        driver.wait(stream, driver.record(stream))
        driver.order(stream, stream)
        assert self.finished(driver, driver.record(stream))

    def test_order_is_an_edge(self, driver: Driver) -> None:
        before, after = driver.open_stream("compute"), driver.open_stream("copy")
        release = self.hold(driver, before)
        driver.order(after, before)
        end = driver.record(after)
        assert self.held(driver, end)
        release()
        assert self.finished(driver, end)

    def test_a_chain_of_many_streams_is_ordered(self, driver: Driver) -> None:
        values = torch.arange(8)
        links = [self.there(driver, values)] + [
            self.there(driver, torch.zeros_like(values)) for _ in range(12)
        ]
        streams = [driver.open_stream("compute") for _ in range(12)]
        release = self.hold(driver, streams[0])
        for index, stream in enumerate(streams):
            if index:
                driver.order(stream, streams[index - 1])
            driver.copy(links[index + 1], links[index], stream)
        end = driver.record(streams[-1])
        assert self.held(driver, end)
        release()
        assert self.finished(driver, end)
        assert links[-1].tolist() == values.tolist()

    # -- the default stream ------------------------------------------------------------------------

    def test_compute_streams_and_the_default_stream_order_each_other(self, driver: Driver) -> None:
        if driver.eager or not driver.legacy_orders:
            pytest.skip("tasks of this driver make the edge themselves")
        default, stream = driver.current(), driver.open_stream("compute")
        for held, behind in ((default, stream), (stream, default)):
            release = self.hold(driver, held)
            event = driver.record(behind)
            assert self.held(driver, event)
            release()
            assert self.finished(driver, event)

    def test_copy_streams_take_no_part_in_the_default_streams_order(self, driver: Driver) -> None:
        default, stream = driver.current(), driver.open_stream("copy")
        release = self.hold(driver, default)
        behind = driver.record(default)
        assert self.finished(driver, driver.record(stream))
        assert self.held(driver, behind)
        release()
        assert self.finished(driver, behind)

    # -- notifications -------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_notification_comes_when_the_event_completes(self, driver: Driver, kind: StreamKind) -> None:
        stream, signal = driver.open_stream(kind), self.signal()
        release = self.hold(driver, stream)
        event = driver.record(stream)
        token = driver.arm(event, signal)
        release()
        assert self.posted(driver, signal)
        assert self.finished(driver, event)
        driver.disarm(token)

    def test_an_event_that_is_complete_already_notifies_too(self, driver: Driver) -> None:
        event, signal = driver.record(driver.open_stream("copy")), self.signal()
        assert self.finished(driver, event)
        token = driver.arm(event, signal)
        assert self.posted(driver, signal)
        driver.disarm(token)

    def test_arming_does_not_hold_up_the_stream(self, driver: Driver) -> None:
        # Nobody reads the semaphore: a callback that waited for its reader would stop the stream.
        stream = driver.open_stream("compute")
        tokens = [driver.arm(driver.record(stream), self.signal()) for _ in range(50)]
        assert self.finished(driver, driver.record(stream))
        for token in tokens:
            driver.disarm(token)

    def test_one_events_notification_does_not_wait_for_another_stream(self, driver: Driver) -> None:
        held, free = driver.open_stream("copy"), driver.open_stream("copy")
        release = self.hold(driver, held)
        late, early = driver.record(held), driver.record(free)
        late_signal, early_signal = self.signal(), self.signal()
        tokens = [driver.arm(late, late_signal), driver.arm(early, early_signal)]
        assert self.posted(driver, early_signal)
        assert self.held(driver, late)
        release()
        assert self.posted(driver, late_signal)
        assert self.finished(driver, late)
        for token in tokens:
            driver.disarm(token)

    def test_tokens_can_be_used_again_and_again(self, driver: Driver) -> None:
        stream, signal = driver.open_stream("copy"), self.signal()
        for _ in range(50):
            event = driver.record(stream)
            token = driver.arm(event, signal)
            assert self.posted(driver, signal)
            assert self.finished(driver, event)
            driver.disarm(token)
            driver.recycle(event)

    # -- no verb blocks ------------------------------------------------------------------------------

    def test_no_verb_waits_for_the_device(self, driver: Driver) -> None:
        source = self.there(driver, torch.arange(1 << 16))
        target = self.here(driver, torch.zeros(1 << 16, dtype=torch.int64))
        stream, other = driver.open_stream("compute"), driver.open_stream("copy")
        release = self.hold(driver, stream)
        driver.copy(target, source, stream)
        event = driver.record(stream)
        driver.wait(other, event)
        driver.order(other, stream)
        token = driver.arm(event, self.signal())
        assert not driver.query(event), "the calls above came back only when the device was done"
        release()
        assert self.finished(driver, event)
        assert self.finished(driver, driver.record(other))
        driver.disarm(token)

    def test_synchronize_blocks_until_the_event_has_completed(self, driver: Driver) -> None:
        stream = driver.open_stream("copy")
        release = self.hold(driver, stream)
        event = driver.record(stream)
        self._blocks_until_released(driver, event, release, lambda: driver.synchronize(event))

    def test_synchronize_device_blocks_until_every_stream_is_done(self, driver: Driver) -> None:
        if driver.eager:
            pytest.skip("compute has finished when its call returns")
        stream = driver.open_stream("copy")
        release = self.hold(driver, stream)
        event = driver.record(stream)
        self._blocks_until_released(driver, event, release, driver.synchronize_device)

    def _blocks_until_released(
        self, driver: Driver, event: Event, release: Callable[[], object], block: Callable[[], object]
    ) -> None:
        early: list[bool] = []
        started = threading.Event()

        def wait() -> None:
            driver.enter_thread()
            started.set()
            block()
            early.append(not driver.query(event))

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            assert started.wait(LIMIT)
            assert self.held(driver, event)
        finally:
            release()
            self.settle(driver)
            thread.join(LIMIT)
        assert not thread.is_alive()
        assert early == [False]

    # -- copies and memory -----------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "dtype",
        [torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64],
        ids=lambda dtype: str(dtype).removeprefix("torch."),
    )
    def test_copies_up_and_down_are_exact(self, driver: Driver, dtype: torch.dtype) -> None:
        values = torch.arange(1000).to(dtype)
        up, down = self.here(driver, values), self.here(driver, torch.zeros_like(values))
        on_device = self.there(driver, torch.zeros_like(values))
        stream = driver.open_stream("copy")
        driver.copy(on_device, up, stream)
        driver.copy(down, on_device, stream)
        assert self.finished(driver, driver.record(stream))
        assert torch.equal(down, values)

    def test_a_copy_is_a_copy(self, driver: Driver) -> None:
        source = self.here(driver, torch.ones(100))
        on_device = self.there(driver, torch.zeros(100))
        stream = driver.open_stream("copy")
        driver.copy(on_device, source, stream)
        assert self.finished(driver, driver.record(stream))
        source.zero_()
        assert on_device.cpu().sum() == 100

    def test_inference_tensors_can_be_copied_to(self, driver: Driver) -> None:
        source = self.here(driver, torch.ones(8))
        with torch.inference_mode():
            target = torch.zeros(8, device=driver.device)
        driver.synchronize_device()
        stream = driver.open_stream("copy")
        driver.copy(target, source, stream)
        assert self.finished(driver, driver.record(stream))
        assert target.cpu().tolist() == [1.0] * 8

    def test_pinned_memory_is_bytes_that_the_device_reaches_without_staging(self, driver: Driver) -> None:
        blocks = [driver.pinned(4096) for _ in range(4)]
        for number, block in enumerate(blocks):
            assert block.device.type == "cpu"
            assert block.dtype == torch.uint8
            assert block.shape == (4096,)
            assert driver.is_pinned(block)
            block.fill_(number)
        assert [int(block[0]) for block in blocks] == [0, 1, 2, 3], "blocks overlap"
        assert all(int(block.min()) == int(block.max()) for block in blocks)

    @pytest.mark.parametrize("permute", [False, True])
    def test_result_memory_has_the_shape_and_order_of_what_it_is_for(
        self, driver: Driver, permute: bool
    ) -> None:
        like = torch.empty((3, 5, 7), dtype=torch.float16)
        if permute:
            like = torch.empty((7, 3, 5), dtype=torch.float16).permute(1, 2, 0)
        memory = driver.result_memory(like.shape, like.stride(), like.dtype)
        assert memory is not None
        assert memory.device.type == "cpu"
        assert (memory.shape, memory.dtype, memory.stride()) == (like.shape, like.dtype, like.stride())
        assert driver.is_pinned(memory) or not driver.is_pinned(torch.empty(8))

    def test_keep_takes_tensors_of_any_device(self, driver: Driver) -> None:
        stream = driver.open_stream("compute")
        driver.keep(self.there(driver, torch.ones(3)), stream)
        driver.keep(torch.ones(3), stream)  # mixed batches hold host tensors, too

    # -- the rest ------------------------------------------------------------------------------------

    def test_verbs_may_be_called_from_any_thread(self, driver: Driver) -> None:
        def work(number: int) -> Any:
            driver.enter_thread()
            values = torch.full((256,), number)
            up, down = self.here(driver, values), self.here(driver, torch.zeros_like(values))
            on_device = torch.zeros_like(values, device=driver.device)
            stream = driver.open_stream("copy")
            driver.order(stream, driver.current())
            for _ in range(30):
                driver.copy(on_device, up, stream)
                driver.copy(down, on_device, stream)
                event = driver.record(stream)
                assert self.finished(driver, event)
                assert torch.equal(down, values)
                driver.recycle(event)
            return driver.is_default(driver.current())

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(1, 9), timeout=LIMIT * 3))

    def test_nothing_is_captured_here(self, driver: Driver) -> None:
        assert not driver.capturing()
        with driver.relaxed():
            assert self.finished(driver, driver.record(driver.open_stream("copy")))

    @pytest.mark.parametrize(
        "error",
        [ValueError("a bad shape"), RuntimeError("size mismatch"), torch.OutOfMemoryError("no memory")],
    )
    def test_ordinary_errors_do_not_mean_that_the_device_is_lost(
        self, driver: Driver, error: Exception
    ) -> None:
        assert not driver.lost(error)
