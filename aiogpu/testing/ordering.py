"""The conformance suite's vocabulary, and the half of it that is about order.

Law of this file: what cannot be said in the contract's verbs, such as holding a stream, is a hook; a
test holds a stream, submits, and sees that what must wait waits, and what must not does not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from .._notifier import PosixSignal, ThreadSignal, _make_signal
from ..drivers.base import Driver, Event, Stream, StreamKind

__all__ = ["KINDS", "LIMIT", "Ordering"]

#: Seconds after which something that should have happened counts as missing.
LIMIT = 10.0

KINDS: tuple[StreamKind, ...] = ("compute", "copy")

# A driver thread may post a semaphore for as long as the process lives.
_immortal: list[PosixSignal | ThreadSignal] = []


class Ordering:
    """Order within a stream, between streams, and with the default stream."""

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
