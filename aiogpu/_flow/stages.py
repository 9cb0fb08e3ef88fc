"""One stage of a pipeline while it runs: items from one buffer, through a function, into the next.

Law of this file: a stage holds a bounded number of items, in the making or finished and not yet taken, and
takes the next one only when there is room for what becomes of it. It always closes its buffer, so that
nobody downstream waits for ever; failures travel downstream behind the items before them.

A stage has *lanes*, coroutines that do the same. Host lanes run on the thread's ambient stream and lease
nothing; device lanes are aiogpu tasks, each with a stream of its own for as long as the pipeline runs, forked
from the consumer once, at the start: a task per item would wait for all that the consumer has submitted.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import anyio
import anyio.lowlevel

from .._decorator import task
from .._handoff import Handoff
from .._tasks import _current
from .recipes import Recipe, is_async
from .reorder import Entry, ReorderBuffer
from .runahead import RunAhead
from .threads import in_thread, is_cancellation

__all__ = ["Each", "Flow", "Meter", "Stage"]


@dataclass
class Meter:
    """What a stage has done, and where its time went: seconds, of all lanes together."""

    items: int = 0
    busy: float = 0.0
    input: float = 0.0
    output: float = 0.0


class _Stopwatch:
    def __init__(self) -> None:
        self._since = perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = perf_counter()
        took, self._since = now - self._since, now
        return took


class Stage(abc.ABC):
    """A running stage. ``waiting``: finished items that may wait for the next stage; ``None``: no limit,
    because the source counts them."""

    def __init__(
        self,
        recipe: Recipe,
        inbox: ReorderBuffer[Any],
        *,
        waiting: int | None = None,
        on_take: Callable[[], object] | None = None,
    ) -> None:
        self.recipe = recipe
        self.inbox = inbox
        self.meter = Meter()
        self._room = anyio.Semaphore(recipe.lanes + waiting) if waiting is not None else None
        self.outbox: ReorderBuffer[Any] = ReorderBuffer(
            ordered=recipe.ordered, on_take=on_take if self._room is None else self._room.release
        )
        self._failure: BaseException | None = None  # of the input, or of a lane as a whole
        self._over = False

    async def run(self) -> None:
        """Until the input ends, or something fails."""
        lane = self._lane
        if self.recipe.device_lanes:
            lane = task(device=self.recipe.device)(lane)
        try:
            async with anyio.create_task_group() as lanes:
                for _ in range(self.recipe.lanes):
                    lanes.start_soon(self._guard, lane)
        finally:
            # After the lanes have ended: behind all that they have reserved.
            self.outbox.close(self._failure)
            self._failure = None
            self.inbox.abandon()

    async def _guard(self, lane: Callable[[], Awaitable[None]]) -> None:
        if not self.recipe.device_lanes:
            # What is called here is nobody's child: a decorated function's result would be ordered for the
            # consumer's stream, not for ours. A task without a parent returns finished results.
            _current.set(None)
        try:
            await lane()
        except BaseException as error:
            if is_cancellation(error, self.recipe.name):
                raise
            self._failure = self._failure or self.blame(error, self.meter.items)

    def blame(self, error: BaseException, index: int) -> BaseException:
        """``error``, which says now where it comes from. Its type stays: users catch it by that."""
        note = f"aiogpu: {self.recipe.name}, item {index}"
        if not any(n.startswith("aiogpu: ") for n in getattr(error, "__notes__", ())):
            error.add_note(note)
        return error

    @abc.abstractmethod
    async def _lane(self) -> None: ...

    async def _enter(self) -> None:
        """Wait until there is room for one more result."""
        if self._room is not None:
            await self._room.acquire()
        else:
            await anyio.lowlevel.checkpoint()

    def _leave(self) -> None:
        """There will be no result for this room."""
        if self._room is not None:
            self._room.release()

    async def _next(self) -> Entry[Any] | None:
        """The next item, unless the stage is over; then everybody who shares the input learns of it."""
        entry = await self.inbox.take() if not self._over else None
        if entry is None:
            self._over = True
        elif entry.error is not None:
            self._over, self._failure = True, entry.error
            return None
        return entry


class Each(Stage):
    """One result for each item."""

    async def _lane(self) -> None:
        clock, meter = _Stopwatch(), self.meter
        ahead = RunAhead(self.recipe.run_ahead) if self.recipe.run_ahead is not None else None
        call = self._caller()
        while True:
            await self._enter()
            meter.output += clock.lap()
            entry = await self._next()
            meter.input += clock.lap()
            if entry is None:
                self._leave()
                return
            # In the same step as the taking, so that results are reserved in the order of the items.
            out = self.outbox.reserve(entry.index)
            out.state = entry.state
            try:
                if ahead is not None:
                    await ahead.room()
                value = await call(entry)
                out.fill(Handoff(value) if self.recipe.hands_over else value)
                del value
                if ahead is not None:
                    ahead.mark()
            except BaseException as error:
                if is_cancellation(error, self.recipe.name):
                    raise
                self._over = True
                if not out.filled:
                    out.fail(self.blame(error, entry.index))
                else:
                    self._failure = self.blame(error, entry.index)
                return
            finally:
                meter.busy += clock.lap()
                del entry, out
            meter.items += 1

    def _caller(self) -> Callable[[Entry[Any]], Awaitable[Any]]:
        fn = self.recipe.fn
        if is_async(fn):
            return lambda entry: fn(entry.take())
        return partial(_in_thread, fn, self.recipe.name, anyio.CapacityLimiter(1))


async def _in_thread(
    fn: Callable[[Any], Any], name: str, limiter: anyio.CapacityLimiter, entry: Entry[Any]
) -> Any:
    value = await in_thread(fn, entry.take(), what=name, limiter=limiter)
    # A lambda around a coroutine function cannot be told from others before it is called.
    return await value if inspect.isawaitable(value) else value


class Flow(Stage):
    """Any number of results from any number of items: an async generator function of the user's."""

    async def _lane(self) -> None:
        clock, meter = _Stopwatch(), self.meter
        taken = -1
        broken: list[BaseException] = []

        async def items() -> AsyncGenerator[Any, None]:
            nonlocal taken
            while True:
                meter.busy += clock.lap()
                entry = await self._next()
                meter.input += clock.lap()
                if entry is None:
                    break
                taken += 1
                value = entry.take()
                del entry
                yield value
                del value
            # Raised where the user's code can see it, and clean up, or make something else of it.
            failure, self._failure = self._failure, None
            if failure is not None:
                broken.append(failure)
                raise failure

        try:
            async with aclosing(items()) as inputs, aclosing(self.recipe.fn(inputs)) as results:
                await self._enter()
                meter.output += clock.lap()
                async for value in results:
                    out = Handoff(value) if self.recipe.hands_over else value
                    self.outbox.reserve().fill(out)
                    del value, out
                    meter.items += 1
                    meter.busy += clock.lap()
                    await self._enter()
                    meter.output += clock.lap()
                meter.busy += clock.lap()
        except BaseException as error:
            if is_cancellation(error, self.recipe.name):
                raise
            self._failure = error if error in broken else self.blame(error, max(taken, 0))
        finally:
            self._over = True
            broken.clear()
