"""Batches under way: each until all its calls have had their outcome, whatever fails.

Law of this file: a batch's results are handed out on the loop's thread, from the very callback that learns
of them; of a failure each call has an error of its own. What failed is computed again only where that can
help: in halves when memory ran out, alone when others had the memory, in halves again to find the bad item.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from .._engine import Engine
from .._errors import bare, fresh, is_out_of_memory
from .._handoff import Handoff
from .._reactor import Point
from .._runtime import Runtime
from .._tasks import current_task
from .entry import Entry, State
from .forecast import Forecast
from .handing import HandingOut
from .lane import UserError, without_grad
from .observing import BatchEnded, Observer, observers, tell
from .pipeline import Load, Pipeline
from .sizes import BatchSizes

__all__ = ["Batch", "Batches"]

log = logging.getLogger("aiogpu")


class Batch:
    """Calls that left the queue together, at ``start``."""

    __slots__ = ("entries", "start")

    def __init__(self, entries: list[Entry], start: float) -> None:
        self.entries = entries
        self.start = start


class Batches:
    """Those of one batcher. ``isolate``: split a failed batch until the bad item is alone."""

    def __init__(
        self,
        name: str,
        sizes: BatchSizes,
        pipeline: Pipeline,
        runtime: Runtime,
        own_observers: list[Observer],
        *,
        isolate: bool,
    ) -> None:
        self.name = name
        self.sizes = sizes
        self.pipeline = pipeline
        self.engine: Engine = pipeline.engine
        self.runtime = runtime
        self.door = runtime.reactor.door
        self.observers = own_observers
        self.isolate = isolate
        self.forecast = Forecast()
        self.handing = HandingOut(self.door)
        #: Nothing is computed a second time any more.
        self.closed = False
        #: Batches that have started and are not over. Their number is what ``in_flight`` bounds.
        self.running: set[Batch] = set()
        #: Batches that ran out of memory beside others, and where each waits until it is alone.
        self.short: dict[Batch, Any] = {}
        self.count = self.items = self.padded = 0
        self.seconds = 0.0

    def over(self, batch: Batch) -> None:
        """All its calls have had their outcome."""
        self.running.discard(batch)
        if not self.door.closed:
            self._let_one_go_on()

    def fail(self, entries: list[Entry], error: BaseException) -> None:
        bare(error)
        for entry in entries:
            entry.fail(self.door, error)

    # -- attempts ----------------------------------------------------------------------------------

    async def compute(self, batch: Batch) -> bool:
        """In an aiogpu task, on the batch's stream. Did nothing fail?"""
        todo = [batch.entries]
        well = True
        while todo:
            # Those whose callers have left, before it started, are not computed.
            part = [entry for entry in todo.pop() if entry.state is State.RUNNING]
            if len(part) > self.sizes.limit:  # memory has run out since it was formed
                todo.append(part[self.sizes.limit :])
                del part[self.sizes.limit :]
            if part:
                company = self._company
                failure = await self._attempt(part)
                if failure is not None:
                    well = False
                    company = company or self._company
                    again = self._after_failure(part, failure, company)
                    if again and company and is_out_of_memory(failure):
                        await self._alone(batch)
                    todo += again
        return well

    @property
    def _company(self) -> bool:
        """Is more than one batch computed now?"""
        return len(self.running) - len(self.short) > 1

    async def _alone(self, batch: Batch) -> None:
        """Wait until no other batch is computed: theirs may be the memory that was missing.

        Those who wait here are not computed, and when nobody else is, the first of them goes on.
        """
        waiter = self.short[batch] = self.door.waiter()
        try:
            self._let_one_go_on()
            await self.door.park(waiter)
        finally:
            self.short.pop(batch, None)

    def _let_one_go_on(self) -> None:
        if self.short and len(self.short) == len(self.running):
            self.door.settle(self.short.pop(next(iter(self.short))), None)

    def _after_failure(self, part: list[Entry], failure: BaseException, company: bool) -> list[list[Entry]]:
        """What to try next, the last one first; or the calls have failed. ``company``: another batch was
        computed beside it."""
        if self.engine.lost is None and not self.closed:
            if is_out_of_memory(failure):
                if self.sizes.out_of_memory(len(part)) or company:
                    return [part]  # in pieces of the new limit, and alone
            elif self.isolate and len(part) > 1:
                middle = len(part) // 2
                return [part[middle:], part[:middle]]
        self.fail(part, failure)
        return []

    async def _attempt(self, part: list[Entry]) -> BaseException | None:
        """Compute ``part`` as one batch; its calls have their outcome then. Or what went wrong.

        Returned, not raised: within an ``except`` block the error would keep the memory that the next
        attempt needs.
        """
        start = perf_counter()
        size = self.sizes.padded(len(part))
        failure: BaseException | None = None
        try:
            await self._results(part, size, start)
        except UserError as error:
            failure = self.engine.blame(error.error)
        except Exception as error:
            failure = bare(fresh(self.engine.blame(error)))
        if failure is not None:
            self._note(len(part), size, start, "error")
        return failure

    def _note(self, count: int, size: int, start: float, outcome: str) -> None:
        """An attempt that began at ``start`` is over, on the device too."""
        end = perf_counter()
        self.count += 1
        self.items += count
        self.padded += size - count
        self.seconds += end - start
        if outcome == "ok":
            self.sizes.succeeded()
            self.forecast.note(start, end)
        if self.observers or observers:
            tell(self.observers, BatchEnded, self.name, count, size - count, end - start, outcome)

    async def _results(self, part: list[Entry], size: int, start: float) -> None:
        """Returns when the device is done, too: until then the batch is under way."""
        if not self.pipeline.lane.is_async:  # whose batches are tasks, which fork by themselves
            _follow_parent()
        items = [entry.value() for entry in part]
        items += items[-1:] * (size - len(part))
        nbytes = max(entry.nbytes for entry in part) * size
        way_out = _WayOut(self, part, partial(self._note, len(part), size, start, "ok"))
        await self.pipeline.run(Load(self.pipeline, items, nbytes, way_out.wanted, way_out.landed))
        if way_out.waiter is not None:
            await self.door.park(way_out.waiter)


class _WayOut:
    """How the results of ``part`` come to its callers."""

    def __init__(self, batches: Batches, part: list[Entry], over: Callable[[], None]) -> None:
        self._batches = batches
        self._part = part
        self._over = over
        #: Where to wait until the device is done, if it was not yet.
        self.waiter: Any = None

    def wanted(self) -> bool:
        """Does anybody still wait? From any thread."""
        return any(entry.state is State.RUNNING for entry in self._part)

    def landed(self, load: Load) -> None:
        """See :class:`Load`. Raises nothing: it is called where nobody could do anything about it."""
        try:
            self._landed(load)
        except Exception as error:
            log.exception("aiogpu: %s could not hand out its results", self._batches.name)
            self._batches.fail(self._part, error)

    def _landed(self, load: Load) -> None:
        batches, event = self._batches, load.event
        driver = batches.engine.driver
        load.event = None
        if load.shuttle is None:  # work is done when it is submitted
            if load.ready:
                self._hand_out(load, _unordered, everybody=True)
        elif event is not None:
            if _is_done(batches.engine, event):  # the usual case for what computes for less than a hop
                driver.recycle(event)
                if load.ready:
                    self._hand_out(load, partial(_behind, []), everybody=True)
                return
            callback = partial(self._completed, load) if load.ready else None
            waiter = batches.door.waiter() if load.ready else None
            assert load.stream is not None
            keep = (load.shuttle.keep, load.output)
            point = batches.runtime.watch(batches.engine, load.stream, event, callback, keep, waiter)
            self.waiter = waiter
            if load.ready and load.fill is None and not load.elsewhere:
                # Who has a stream goes on behind the batch, on the device.
                self._hand_out(load, partial(_behind, [point]), everybody=False)

    def _completed(self, load: Load, error: BaseException | None) -> None:
        # With an error, whoever waits at `waiter` gets it, and the calls from there.
        if error is None and not self._batches.door.closed:
            try:
                self._hand_out(load, partial(_behind, []), everybody=True)
            except Exception as raised:
                log.exception("aiogpu: %s could not hand out its results", self._batches.name)
                self._batches.fail(self._part, raised)

    def _hand_out(
        self, load: Load, handing: Callable[[Any], Handoff[Any] | None], *, everybody: bool
    ) -> None:
        if load.fill is not None:
            with without_grad():
                load.fill()
            handing = _unordered
        pipeline = self._batches.pipeline
        if pipeline.download:
            handing = _unordered
        if everybody:
            self._over()  # first: whoever has a result may ask how many batches there were
        # Cut from the output, they are parts of one.
        shared = handing(load.output) if pipeline.split is None else None
        assert load.results is not None
        self._batches.handing.give(
            [
                (entry, result, shared if pipeline.split is None else handing(result))
                for entry, result in zip(self._part, load.results, strict=False)  # padded ones come last
                if (everybody or entry.follows) and entry.state is State.RUNNING
            ]
        )


def _follow_parent() -> None:
    """Whoever has entered the batcher, in a task, may have changed the model since the last batch."""
    task = current_task()
    if task is not None and (parent := task.living_parent()) is not None:
        task.fork(parent)


def _unordered(_: Any) -> None:
    """Complete, in host memory or on a device that has no streams: nothing to order."""


def _behind(points: list[Point], value: Any) -> Handoff[Any]:
    return Handoff(value, behind=points)


def _is_done(engine: Engine, event: Any) -> bool:
    try:
        with engine.driver.relaxed():
            return engine.driver.query(event)
    except Exception:
        return False  # the reactor shall meet it
