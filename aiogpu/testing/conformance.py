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

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ..drivers.base import Driver, Event, StreamKind
from .ordering import KINDS, LIMIT, Ordering

__all__ = ["DriverConformance"]


class DriverConformance(Ordering):
    """Inherit, give a ``driver`` fixture and :meth:`hold`, and run it with pytest."""

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

    @pytest.mark.parametrize("inference", [False, True])
    def test_a_copy_that_is_waited_for_is_finished_with_all_that_was_in_front_of_it(
        self, driver: Driver, inference: bool
    ) -> None:
        values = torch.arange(1 << 18)
        up, down = self.here(driver, values), self.here(driver, torch.zeros_like(values))
        stream = driver.open_stream("copy")
        with torch.inference_mode(inference):
            on_device = self.there(driver, torch.zeros_like(values))

        def work() -> torch.Tensor:
            driver.enter_thread()
            for _ in range(4):
                driver.copy(on_device, up, stream)
            driver.copy_and_wait(down, on_device, stream)
            return down.clone()

        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(work)
            deadline = time.monotonic() + LIMIT
            while not found.done() and time.monotonic() < deadline:
                self.settle(driver)
            assert torch.equal(found.result(LIMIT), values)

    @pytest.mark.parametrize("inference", [False, True])
    def test_copies_that_are_submitted_together_are_all_made_in_their_order(
        self, driver: Driver, inference: bool
    ) -> None:
        sources = [self.here(driver, torch.full((size,), size, dtype=torch.uint8)) for size in (8, 100)]
        sources.append(self.here(driver, torch.full((10,), 0.5)))
        with torch.inference_mode(inference):
            targets = [torch.zeros_like(source, device=driver.device) for source in sources]
        driver.synchronize_device()
        stream = driver.open_stream("copy")
        again = self.here(driver, torch.full((8,), 9, dtype=torch.uint8))
        driver.copy_all([*zip(targets, sources, strict=True), (targets[0], again)], stream)
        assert self.finished(driver, driver.record(stream))
        sources[0] = again
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target.cpu(), source)

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
