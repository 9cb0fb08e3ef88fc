"""What the consumer has of a running pipeline: its results, and the end of everything behind them.

Law of this file: the block's own exception is never replaced or wrapped, and when the block has been left
nothing of it is running. Nothing behind the block raises into it, except through ``__anext__``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from time import perf_counter
from typing import Any, Generic, Self, TypeVar

import anyio
import anyio.lowlevel

from .._engine import Engine
from .._loops import current_token
from .._runtime import current_runtime
from .reorder import Entry, ReorderBuffer
from .runahead import RunAhead
from .threads import log

__all__ = ["Crew", "Outlet"]

T = TypeVar("T")


class Crew:
    """Coroutines that run beside an ``async with`` block, from its start to its end.

    In a task of the loop's own. A task group of the block's task could be left in that task only, and so a
    block inside of an async generator, or a fixture, could not: event loops close those in tasks of theirs.
    """

    def __init__(
        self,
        members: Sequence[Callable[[], Coroutine[Any, Any, None]]],
        lost: Callable[[BaseException], object],
    ) -> None:
        self._members = members
        #: Told why, when they have ended without being dismissed and without having come to their end.
        self._lost = lost
        self._scope = anyio.CancelScope()
        self._failure: BaseException | None = RuntimeError(
            "what runs behind this block was cancelled, and not by leaving it: has somebody cancelled all "
            "tasks of the event loop (`asyncio.all_tasks()`)?"
        )

    def start(self) -> None:
        self._over = anyio.Event()
        self._door = current_runtime().reactor.door
        self._door.spawn(self._work, copy_context(), self._ended)

    @property
    def over(self) -> bool:
        """Has everything that they did come to its end?"""
        return self._over.is_set()

    async def _work(self) -> None:
        try:
            with self._scope:
                async with anyio.create_task_group() as group:
                    for member in self._members:
                        group.start_soon(member)
            self._failure = None
        except Exception as error:
            self._failure = error
            log.error("aiogpu: what runs behind a block has failed", exc_info=error)

    def _ended(self) -> None:
        # Also when it was cancelled before it began.
        self._members = ()
        self._over.set()
        if self._failure is not None:
            self._lost(self._failure)

    def dismiss(self) -> None:
        """Let them end."""
        self._scope.cancel()

    async def end(self) -> None:
        """They are gone when this returns."""
        if current_token() is not self._door.token:
            return  # the loop was closed in the middle of the block, and went down with them
        self.dismiss()
        # Shielded: the block may end because it is being cancelled, and they need a moment to clean up.
        # What they wait for is bounded (see ``threads``). No scope shields from asyncio's own ``cancel``.
        cancellation: BaseException | None = None
        with anyio.CancelScope(shield=True):
            while not self._over.is_set():
                try:
                    await self._over.wait()
                except anyio.get_cancelled_exc_class() as error:
                    cancellation = error
        if cancellation is not None:
            raise cancellation


class Outlet(Generic[T]):
    """An async iterator over what arrives in ``buffer``. Several tasks may share it."""

    def __init__(
        self,
        buffer: ReorderBuffer[T],
        members: Sequence[Callable[[], Coroutine[Any, Any, None]]],
        ahead: RunAhead | None,
        engine: Callable[[], Engine | None],
    ) -> None:
        self._buffer = buffer
        self._crew = Crew(members, buffer.abandon)
        self._ahead = ahead
        self._engine = engine
        self._handed_out = 0
        self._marked = 0
        self._last: Entry[T] | None = None
        self._data_wait = 0.0
        self._device_wait = 0.0
        #: ``perf_counter()`` when the last item had been handed out.
        self._ended: float | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        # Decided before anything is taken: a cancellation here loses no item.
        await anyio.lowlevel.checkpoint()
        await self._keep_pace()
        start = perf_counter()
        try:
            entry = await self._buffer.take()
        finally:
            self._data_wait += perf_counter() - start
        if entry is None or entry.error is not None:
            self._ended = self._ended or perf_counter()
        if entry is None:
            raise StopAsyncIteration
        if entry.error is not None:
            self._crew.dismiss()
            try:
                raise entry.error
            finally:
                del entry  # no cycle through the traceback
        self._handed_out += 1
        self._last = entry
        return entry.take()

    async def leave(self) -> None:
        """The block is being left. Whoever still waits for an item learns that none comes."""
        self._ended = self._ended or perf_counter()
        try:
            await self._crew.end()
        finally:
            self._buffer.abandon()

    async def _keep_pace(self) -> None:
        """Do not let the host get too far ahead of the device."""
        if self._ahead is None:
            return
        if self._marked < self._handed_out:
            self._marked = self._handed_out  # once for each item, also where a wait is cancelled and repeated
            self._ahead.mark(self._engine())
        start = perf_counter()
        try:
            await self._ahead.room()
        finally:
            self._device_wait += perf_counter() - start
