"""One entered batcher: who waits, who serves, and when.

Law of this file: servers, at most ``in_flight``, each take a batch that is due, see it through and take the
next. What one of them meets ends that one, and another takes its place: nothing of the user's can end the
batcher. Every change that can make a batch due (a call, a free place, time, the end) *kicks* it, after the
change: an idle server is woken, or one is started, unless one is on its way already. It looks at the whole
state in one step on the loop's thread, and between its look and its parking nothing can happen, so no kick is
lost; one too many is harmless.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any

import anyio
import anyio.abc

from .._decorator import task
from .._errors import ClosedError
from .computing import Batch, Batches
from .deadlines import Deadlines
from .entry import Entry, State
from .waiting import WaitingCalls

__all__ = ["Phase", "Service"]

log = logging.getLogger("aiogpu")


#: Seconds, at least, by which a batch is started before the one in front of it should be done, besides what
#: batches take before and after the function. An eighth of what a batch takes, where that is more: they do
#: not all take the same.
_LEAD = 0.002


class Phase(enum.Enum):
    OPEN = "open"
    DRAINING = "draining"  # no new calls; those that wait are computed
    CLOSED = "closed"  # no new calls; nobody waits any more


class Service:
    """Its queue, and the servers that compute what is in it.

    ``max_delay``: seconds that a call may wait for its batch to become full; ``None``: not at all.
    ``in_flight``: batches at once.
    """

    def __init__(
        self,
        name: str,
        queue: WaitingCalls,
        batches: Batches,
        *,
        max_delay: float | None,
        in_flight: int,
    ) -> None:
        self.name = name
        self.queue = queue
        self.batches = batches
        batches.handing.emptied = self._tell_if_empty
        self.engine = batches.engine
        self.door = batches.door
        self.max_delay = max_delay
        self.in_flight = in_flight
        self.phase = Phase.OPEN
        self._deadlines = Deadlines()
        self._group: anyio.abc.TaskGroup | None = None
        self._servers = 0
        self._idle: list[Any] = []  # where idle servers wait
        self._looking = False  # one has been woken, and has not looked yet
        self._alarm = math.inf  # when time alone will have changed something
        self._clock: Any = self.door.waiter()  # where the clock waits for an earlier alarm
        self._empty: Any = None  # where the end waits
        # On the urgent streams, since the callers, often more than there are streams, fill the others: there
        # a batch would share one with the batch before it, or with callers who wait for that.
        on_stream = task(device=self.engine.device, priority=-1)
        # A synchronous function runs with torch modes of its own in a thread of its own, so all batches of a
        # server can be computed by one task, on one stream. What an asynchronous one leaves behind in its
        # task must not reach the next batch.
        own_task = batches.pipeline.lane.is_async
        # What users wait for by themselves (``max_delay``), or order by themselves, is left to them.
        self._binds_late = max_delay is None and not own_task
        self._compute: Callable[[Batch], Coroutine[Any, Any, bool]] = (
            on_stream(batches.compute) if own_task else batches.compute
        )
        self._serve: Callable[[], Coroutine[Any, Any, None]] = (
            self._take_turns if own_task else on_stream(self._take_turns)
        )

    # -- calls -------------------------------------------------------------------------------------

    def submit(self, entry: Entry, timeout: float | None) -> None:
        """One more call waits, for ``timeout`` seconds at most."""
        self.queue.put(entry)
        if timeout is not None and self._deadlines.add(entry.born + timeout, entry):
            self._wake_at(entry.born + timeout)
        if not self._looking:
            if self.max_delay is None or self.queue.full(entry.signature, self.batches.sizes.limit):
                self.kick()
            else:
                self._wake_at(entry.born + self.max_delay)

    def leave(self, entry: Entry) -> None:
        """Its caller has gone. In a batch, its place is computed, and the result dropped."""
        waiting = entry.state is State.WAITING
        entry.leave()
        if waiting:
            self.queue.drop(entry)

    @property
    def places(self) -> int:
        """Batches that may be under way now; one while memory is short."""
        return 1 if self.batches.sizes.lowered or self.batches.short else self.in_flight

    def predicted_wait(self, priority: int, client: Any, cost: float) -> float:
        """Seconds in which a call made now would have its result; 0 if it would start at once."""
        running, forecast = self.batches.running, self.batches.forecast
        if not running and not self.queue:
            return 0.0
        calls = self.queue.ahead(priority, client) + 1
        batches = math.ceil(calls / self.batches.sizes.limit)
        if self.queue.max_cost < math.inf:
            batches = max(batches, math.ceil((self.queue.cost + cost) / self.queue.max_cost))
        start = min((batch.start for batch in running), default=math.inf)
        return forecast.wait(len(running), batches, forecast.elapsed(start, perf_counter()))

    def longest_wait(self, cost: float = 0.0) -> float:
        """:meth:`predicted_wait`, at most: that of a call that everybody goes before. From any thread."""
        running, waiting = len(self.batches.running), len(self.queue)
        if not running and not waiting:
            return 0.0
        batches = math.ceil((waiting + 1) / self.batches.sizes.limit)
        if self.queue.max_cost < math.inf:
            batches = max(batches, math.ceil((self.queue.cost + cost) / self.queue.max_cost))
        return self.batches.forecast.wait(running, batches)

    # -- servers -----------------------------------------------------------------------------------

    def kick(self) -> None:
        """Something has changed: a server shall look whether a batch is due.

        In the next iteration of the loop: calls that are made in one shall be in one batch.
        """
        if self._looking or self.door.closed or not self._may_start():
            return
        if self._idle:
            self._looking = True
            self.door.settle(self._idle.pop(), None)
        elif self._group is not None and self._servers < self.in_flight:
            self._looking = True
            self._servers += 1
            self._group.start_soon(self._server, name=f"{self.name}: batches")

    async def _server(self) -> None:
        """A server's life. It raises nothing: that would end all others."""
        try:
            await self._serve()
        except GeneratorExit:
            raise
        except Exception as error:  # it found no stream: its device is lost, say
            self.batches.fail(self.queue.clear(), self.engine.blame(error))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            pass  # cancelled: the batcher is being left, or a late shot of what ``fn`` has done
        finally:
            self._servers -= 1
            self._looking = False  # if it was this one, another shall look
            if not self.door.closed:
                self.kick()
                self._tell_if_empty()

    async def _take_turns(self) -> None:
        """Serve one batch after the other, until one fails.

        Not longer: a function that has failed may have cancelled the task that it ran in.
        """
        while True:
            batch = self._next()
            if batch is None:
                # Between the look and the parking nothing can happen.
                waiter = self.door.waiter()
                self._idle.append(waiter)
                try:
                    await self.door.park(waiter)
                finally:
                    if waiter in self._idle:
                        self._idle.remove(waiter)
            elif not await self._see_through(batch):
                return
            batch = None  # it holds what its callers may want to be rid of

    def _next(self) -> Batch | None:
        """The batch that is due now, started."""
        self._looking = False
        batch = None
        try:
            if self._may_start():
                batch = self._due(perf_counter())
        except Exception as error:  # a mistake of ours: whoever waits shall not wait for ever
            log.exception("aiogpu: %s could not start a batch", self.name)
            self.batches.fail(self.queue.clear(), error)
        if batch is not None:
            self.batches.running.add(batch)
            self.kick()  # there may be more
        else:
            self._tell_if_empty()
        return batch

    def _may_start(self) -> bool:
        """Is it time for one more batch, if there is one?

        One that is not full is put together as late as that does no harm. Until the device is nearly done
        with what it has, starting it would gain nothing, and whoever calls meanwhile would miss it: wait for
        the rest of this batch, all of that one, and then his own. If it is too early, the clock looks again.
        """
        queue, running = self.queue, len(self.batches.running)
        if not queue or running >= self.places:
            return False
        if not (running and self._binds_late and self.phase is Phase.OPEN):
            return True
        if len(queue) >= self.batches.sizes.limit or queue.cost >= queue.max_cost:
            return True
        forecast = self.batches.forecast
        now = perf_counter()
        first = min(batch.start for batch in self.batches.running)
        lead = max(_LEAD, forecast.typical / 8) + self.batches.pipeline.beside
        left = forecast.wait(running, 0, forecast.elapsed(first, now)) - lead
        if left > 0.0:
            self._wake_at(now + left)
        return left <= 0.0

    def _due(self, now: float) -> Batch | None:
        delay = self.max_delay if self.phase is Phase.OPEN else None
        before = math.inf if delay is None else now - delay
        entries = self.queue.take(self.batches.sizes.limit, now, before)
        if entries:
            return Batch(entries, now)
        self._wake_at(self.queue.oldest_born() + (delay or 0.0))
        return None

    async def _see_through(self, batch: Batch) -> bool:
        """Did nothing fail? It must raise nothing itself.

        Not even a cancellation: it may be one that ``fn`` has raised by itself (it awaited something that
        was cancelled). If it is ours, this task is over all the same.
        """
        try:
            return await self._compute(batch)
        except (KeyboardInterrupt, SystemExit) as error:
            # The program shall end: whoever called passes it on, as if he had called the function himself.
            heard = any(entry.state is State.RUNNING for entry in batch.entries)
            self.batches.fail(batch.entries, error)
            self.close()
            if not heard:
                raise
        except Exception as error:
            self.batches.fail(batch.entries, self.engine.blame(error))
        except BaseException as error:
            if not self.door.closed:  # else the garbage collector ends this task, its loop is gone
                self.batches.fail(batch.entries, _cancelled(error))
        finally:
            self.batches.over(batch)
            if self.engine.lost is not None:
                self.batches.fail(self.queue.clear(), self.engine.lost)
        return False

    # -- time --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with anyio.create_task_group() as self._group:
                self.kick()
                await self._keep_time()
        finally:
            # By whoever cancels all tasks of a loop, too: nobody else would serve those who wait, or call.
            if not self.door.closed:
                self.abort()

    async def _keep_time(self) -> None:
        while True:
            self._clock = self.door.waiter()
            now = perf_counter()
            if self._alarm <= now:
                self._alarm = math.inf
                self.look(now)
            if self._alarm == math.inf:
                await self.door.park(self._clock)
            else:
                with anyio.move_on_after(max(0.0, self._alarm - now)):
                    await self.door.park(self._clock)

    def _wake_at(self, when: float) -> None:
        if when < self._alarm:
            self._alarm = when
            self.door.settle(self._clock, None)

    def look(self, now: float) -> None:
        """Time has passed: end those whose time is over, and see whether a batch is due."""
        for entry in self._deadlines.expired(now):
            if entry.state is State.WAITING:
                self.queue.drop(entry)
            waited = f"{now - entry.born:.3g} s"
            entry.expire(self.door, TimeoutError(f"{self.name} had no result after {waited}"))
        self._alarm = min(self._alarm, self._deadlines.next())
        self.kick()
        self._tell_if_empty()

    # -- ends --------------------------------------------------------------------------------------

    def _tell_if_empty(self) -> None:
        if self._empty is not None and not self._at_work:
            self.door.settle(self._empty, None)

    @property
    def _at_work(self) -> bool:
        return bool(self.queue or self.batches.running or self.batches.handing)

    def closed_error(self) -> ClosedError:
        """For calls that come too late."""
        return ClosedError(f"{self.name} is closed, or being closed")

    async def drain(self) -> None:
        """Take no more calls, and wait until all have had their outcome."""
        if self.phase is Phase.OPEN:
            self.phase = Phase.DRAINING
        self.kick()
        if self._at_work:
            self._empty = self.door.waiter()
            await self.door.park(self._empty)

    def close(self) -> None:
        """Take no more calls; those that wait fail."""
        self.phase = Phase.CLOSED
        self.batches.closed = True
        self.batches.fail(self.queue.clear(), self.closed_error())

    def abort(self) -> None:
        """:meth:`close`; and those that are computed fail, too.

        Here, not in the servers: one that is cancelled before its first step never gets to run.
        """
        self.close()
        for batch in self.batches.running:
            self.batches.fail(batch.entries, self.closed_error())
        self.batches.pipeline.lane.close()
        if self._empty is not None:
            self.door.settle(self._empty, None)


def _cancelled(error: BaseException) -> RuntimeError:
    return RuntimeError(
        f"the batch ended with {type(error).__name__}: the batch function awaited something that was "
        "cancelled, or cancelled the task that it ran in"
    )
