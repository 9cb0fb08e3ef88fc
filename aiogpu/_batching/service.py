"""Batches under way: when the next one starts, and what happens when it fails.

Law of this file: the dispatcher runs nothing of the user's, so nothing of the user's can end it. Every change
that can make a batch due (a call, a free place, the end) *kicks* it, after the change; it looks at the
whole state, in one step on the loop's thread, and starts what is due, each batch in a child task that raises
nothing. Between its look and its parking nothing can happen, so no kick is lost; one too many is harmless.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Coroutine
from functools import partial
from time import perf_counter
from typing import Any

import anyio
import anyio.abc
import torch

from .._decorator import task
from .._engine import Engine
from .._errors import bare, fresh
from .._handoff import Handoff
from .._loops import Door
from .._synchronize import synchronize
from .deadlines import Deadlines
from .entry import Entry, State
from .forecast import Forecast
from .lane import UserError
from .observing import BatchEnded, Observer, observers, tell
from .pipeline import Pipeline
from .sizes import BatchSizes
from .waiting import WaitingCalls

__all__ = ["Phase", "Service"]

log = logging.getLogger("aiogpu")


class Phase(enum.Enum):
    OPEN = "open"
    DRAINING = "draining"  # no new calls; those that wait are computed
    CLOSED = "closed"  # no new calls; nobody waits any more


class _Batch:
    """Calls that left the queue together, at ``start``."""

    def __init__(self, entries: list[Entry], start: float) -> None:
        self.entries = entries
        self.start = start


class _Server:
    """A child task that serves one batch after the other: starting one costs as much as a small batch."""

    __slots__ = ("batch", "waiter")

    def __init__(self, batch: _Batch) -> None:
        self.batch = batch
        self.waiter: Any = None  # where it waits for the next one


class Service:
    """One entered batcher: its queue, and the batches that are computed.

    ``max_delay``: seconds that a call may wait for its batch to become full; ``None``: not at all.
    ``in_flight``: batches at once. ``isolate``: split a failed batch until the bad item is alone.
    """

    def __init__(
        self,
        name: str,
        queue: WaitingCalls,
        sizes: BatchSizes,
        pipeline: Pipeline,
        engine: Engine,
        door: Door,
        group: anyio.abc.TaskGroup,
        own_observers: list[Observer],
        *,
        max_delay: float | None,
        in_flight: int,
        isolate: bool,
    ) -> None:
        self.name = name
        self.queue = queue
        self.sizes = sizes
        self.pipeline = pipeline
        self.engine = engine
        self.door = door
        self.group = group
        self.observers = own_observers
        self.max_delay = max_delay
        self.in_flight = in_flight
        self.isolate = isolate
        self.phase = Phase.OPEN
        self.forecast = Forecast()
        #: Batches that have started and are not over. Their number is what ``in_flight`` bounds.
        self.running: set[_Batch] = set()
        self.batches = self.items = self.padded = 0
        self.compute_seconds = 0.0
        self._parked: Any = door.waiter()  # where the dispatcher waits for a kick
        #: It will look at the calls that wait when ``max_delay`` is over: more of them need not kick it.
        self._looks_again = False
        #: Batches that ran out of memory beside others, and where each waits until it is alone.
        self._short: dict[_Batch, Any] = {}
        self._deadlines = Deadlines()
        self._empty: Any = None  # where the end waits
        self._idle: list[_Server] = []
        # On the urgent streams, since the callers, often more than there are streams, fill the others: there
        # a batch would share one with the batch before it, or with callers who wait for that.
        on_stream = task(device=engine.device, priority=-1)
        self._on_stream: Callable[[_Batch], Coroutine[Any, Any, bool]] = on_stream(self._compute)

    # -- calls -------------------------------------------------------------------------------------

    def submit(self, entry: Entry, timeout: float | None) -> None:
        """One more call waits, for ``timeout`` seconds at most."""
        self.queue.put(entry)
        if timeout is not None and self._deadlines.add(entry.born + timeout, entry):
            self.kick()
            return
        # Without a free place, the end of a batch kicks; when it will look again, it does.
        if len(self.running) < self.places and (
            not self._looks_again or self.queue.full(entry.signature, self.sizes.limit)
        ):
            self.kick()

    def leave(self, entry: Entry) -> None:
        """Its caller has gone. In a batch, its place is computed, and the result dropped."""
        waiting = entry.state is State.WAITING
        entry.leave()
        if waiting:
            self.queue.drop(entry)

    @property
    def places(self) -> int:
        """Batches that may be under way now; one while memory is short."""
        return 1 if self.sizes.lowered or self._short else self.in_flight

    def predicted_wait(self, priority: int, client: Any, cost: float) -> float:
        """Seconds in which a call made now would have its result; 0 if it would start at once."""
        if not self.running and not self.queue:
            return 0.0
        calls = self.queue.ahead(priority, client) + 1
        batches = math.ceil(calls / self.sizes.limit)
        if self.queue.max_cost < math.inf:
            batches = max(batches, math.ceil((self.queue.cost + cost) / self.queue.max_cost))
        start = min((batch.start for batch in self.running), default=math.inf)
        elapsed = self.forecast.elapsed(start, perf_counter())
        return self.forecast.wait(len(self.running), batches, elapsed)

    def wait_now(self) -> float:
        """:meth:`predicted_wait` of an ordinary call, roughly. From any thread."""
        waiting = len(self.queue)
        if not self.running and not waiting:
            return 0.0
        return self.forecast.wait(len(self.running), math.ceil((waiting + 1) / self.sizes.limit))

    # -- starting ----------------------------------------------------------------------------------

    def kick(self) -> None:
        """Something has changed: the dispatcher shall look whether a batch is due.

        In the next iteration of the loop: calls that are made in one shall be in one batch.
        """
        if not self.door.closed:
            self.door.settle(self._parked, None)

    async def dispatch(self) -> None:
        """Start batches when they are due, until cancelled."""
        try:
            while True:
                self._parked = self.door.waiter()
                delay = self._look()
                if delay is None:
                    await self.door.park(self._parked)
                else:
                    with anyio.move_on_after(delay):
                        await self.door.park(self._parked)
        finally:
            # By a scope around the block, too, which may be left much later: until then nobody would
            # serve those who wait, nor those who call.
            if not self.door.closed:
                self.abort()

    def _look(self) -> float | None:
        """Do what is due now; in how many seconds there is more to do if nothing else changes."""
        due = math.inf
        now = perf_counter()
        try:
            self._expire(now)
            due = self._start_due(now)
        except Exception as error:  # a mistake of ours: whoever waits shall not wait for ever
            log.exception("aiogpu: %s could not start a batch", self.name)
            self._fail_waiting(error)
        self._looks_again = due < math.inf
        if self._empty is not None and not self.queue and not self.running:
            self.door.settle(self._empty, None)
        due = min(due, self._deadlines.next())
        return None if due == math.inf else max(0.0, due - now)

    def _expire(self, now: float) -> None:
        for entry in self._deadlines.expired(now):
            if entry.state is State.WAITING:
                self.queue.drop(entry)
            waited = f"{now - entry.born:.3g} s"
            entry.expire(self.door, TimeoutError(f"{self.name} had no result after {waited}"))

    def _start_due(self, now: float) -> float:
        """Start batches; when the next one will be due, as far as time alone decides."""
        at_once = self.max_delay is None or self.phase is not Phase.OPEN
        while self.queue and len(self.running) < self.places:
            before = math.inf if at_once else now - (self.max_delay or 0.0)
            entries = self.queue.take(self.sizes.limit, now, before)
            if not entries:
                return self.queue.oldest_born() + (self.max_delay or 0.0)
            self._start(_Batch(entries, now))
        return math.inf

    def _start(self, batch: _Batch) -> None:
        self.running.add(batch)
        if self._idle:
            server = self._idle.pop()
            server.batch = batch
            self.door.settle(server.waiter, None)
            return
        try:
            self.group.start_soon(self._serve_on, _Server(batch), name=f"{self.name}: batches")
        except BaseException as error:
            self.running.discard(batch)
            self._fail(batch.entries, error)
            raise

    # -- computing ---------------------------------------------------------------------------------

    async def _serve_on(self, server: _Server) -> None:
        """A server's life: until a batch of its fails.

        Not longer: a function that has failed may have cancelled the task that it ran in.
        """
        while await self._serve(server.batch):
            # Between the batch's end and the parking nothing can happen: the dispatcher finds both, or none.
            server.waiter = self.door.waiter()
            self._idle.append(server)
            try:
                await self.door.park(server.waiter)
            except GeneratorExit:
                raise
            except BaseException:  # the scope around the batcher, or a late shot of what ``fn`` has done
                if server in self._idle:
                    self._idle.remove(server)
                else:  # a batch came in the same tick
                    self._start(server.batch)
                return

    async def _serve(self, batch: _Batch) -> bool:
        """Did nothing fail? It must raise nothing itself: that would end all others.

        Not even a cancellation: it may be one that ``fn`` has raised by itself (it awaited something that
        was cancelled). If it is ours, this task is over all the same.
        """
        try:
            return await self._on_stream(batch)
        except (KeyboardInterrupt, SystemExit) as error:
            self._fail(batch.entries, RuntimeError(f"the batch function raised {type(error).__name__}"))
            self.close()
            raise
        except Exception as error:
            self._fail(batch.entries, self.engine.blame(error))
        except BaseException as error:
            if not self.door.closed:  # else the garbage collector ends this task, its loop is gone
                ending = anyio.current_effective_deadline() == -math.inf  # the scope around the batcher
                self._fail(batch.entries, self.closed_error() if ending else _cancelled(error))
        finally:
            self.running.discard(batch)
            if self.engine.lost is not None:
                self._fail_waiting(self.engine.lost)
            if not self.door.closed:
                self._let_one_go_on()
            self.kick()
        return False

    async def _compute(self, batch: _Batch) -> bool:
        """In a task of its own, on a stream of its own. Did nothing fail?"""
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
                    if again and company and isinstance(failure, torch.OutOfMemoryError):
                        await self._alone(batch)
                    todo += again
        return well

    @property
    def _company(self) -> bool:
        """Is more than one batch computed now?"""
        return len(self.running) - len(self._short) > 1

    async def _alone(self, batch: _Batch) -> None:
        """Wait until no other batch is computed: theirs may be the memory that was missing.

        Those who wait here are not computed, and when nobody else is, the first of them goes on.
        """
        waiter = self._short[batch] = self.door.waiter()
        try:
            self._let_one_go_on()
            await self.door.park(waiter)
        finally:
            self._short.pop(batch, None)

    def _let_one_go_on(self) -> None:
        if self._short and len(self._short) == len(self.running):
            self.door.settle(self._short.pop(next(iter(self._short))), None)

    async def _attempt(self, part: list[Entry]) -> BaseException | None:
        """Compute ``part`` as one batch; its calls have their outcome then. Or what went wrong.

        Returned, not raised: within an ``except`` block the error would keep the memory that the next
        attempt needs.
        """
        start = perf_counter()
        size = self.sizes.padded(len(part))
        failure: BaseException | None = None
        try:
            await self._results(part, size)
        except UserError as error:
            failure = self.engine.blame(error.error)
        except Exception as error:
            failure = bare(fresh(self.engine.blame(error)))
        end = perf_counter()
        self.batches += 1
        self.items += len(part)
        self.padded += size - len(part)
        self.compute_seconds += end - start
        if failure is None:
            self.sizes.succeeded()
            self.forecast.note(start, end)
        if self.observers or observers:
            outcome = "ok" if failure is None else "error"
            tell(self.observers, BatchEnded, self.name, len(part), size - len(part), end - start, outcome)
        return failure

    async def _results(self, part: list[Entry], size: int) -> None:
        items = [entry.value() for entry in part]
        items += items[-1:] * (size - len(part))
        nbytes = sum(entry.nbytes for entry in part) + part[-1].nbytes * (size - len(part))
        results, output = await self.pipeline.run(items, nbytes, partial(_wanted, part))
        finished = self.engine.driver.eager or self.pipeline.download
        shared: Handoff[Any] | None = None
        if not finished and self.pipeline.split is None:
            shared = Handoff(output)  # the results are views of it
        later = []
        for entry, result in zip(part, results, strict=False):  # padded ones come last
            handoff = shared if finished or shared is not None else Handoff(result)
            if finished or entry.follows:
                entry.succeed(self.door, result, handoff)
            else:
                later.append((entry, result, handoff))
        del results, output, shared
        if not finished:
            # The batch is under way until the device is done with it, whoever has its results already.
            await synchronize()
        for entry, result, handoff in later:
            entry.succeed(self.door, result, handoff)

    def _after_failure(self, part: list[Entry], failure: BaseException, company: bool) -> list[list[Entry]]:
        """What to try next, the last one first; or the calls have failed. ``company``: another batch was
        computed beside it."""
        if self.engine.lost is None and self.phase is not Phase.CLOSED:
            if isinstance(failure, torch.OutOfMemoryError):
                if self.sizes.out_of_memory(len(part)) or company:
                    return [part]  # in pieces of the new limit, and alone
            elif self.isolate and len(part) > 1:
                middle = len(part) // 2
                return [part[middle:], part[:middle]]
        self._fail(part, failure)
        return []

    # -- ends --------------------------------------------------------------------------------------

    def _fail(self, entries: list[Entry], error: BaseException) -> None:
        bare(error)
        for entry in entries:
            entry.fail(self.door, error)

    def _fail_waiting(self, error: BaseException) -> None:
        self._fail(self.queue.clear(), error)

    def closed_error(self) -> anyio.ClosedResourceError:
        """For calls that come too late."""
        return anyio.ClosedResourceError(f"{self.name} is closed, or being closed")

    async def drain(self) -> None:
        """Take no more calls, and wait until all have had their outcome."""
        if self.phase is Phase.OPEN:
            self.phase = Phase.DRAINING
        # A kick, not a look: the last call may be on its way out in this very iteration.
        self._empty = self.door.waiter()
        self.kick()
        await self.door.park(self._empty)

    def close(self) -> None:
        """Take no more calls; those that wait fail."""
        self.phase = Phase.CLOSED
        self._fail_waiting(self.closed_error())

    def abort(self) -> None:
        """:meth:`close`; and those that are computed fail, too.

        Here, not in their child tasks: one that is cancelled before its first step never gets to run.
        """
        self.close()
        for batch in self.running:
            self._fail(batch.entries, self.closed_error())
        self.pipeline.lane.close()


def _wanted(part: list[Entry]) -> bool:
    return any(entry.state is State.RUNNING for entry in part)


def _cancelled(error: BaseException) -> RuntimeError:
    return RuntimeError(
        f"the batch ended with {type(error).__name__}: either the batch function awaited something that "
        "was cancelled, or the task that has entered the Batcher was"
    )
