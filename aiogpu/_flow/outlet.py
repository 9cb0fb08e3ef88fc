"""What the consumer has of a running pipeline: its results, and the end of everything behind them.

Law of this file: the block's own exception is never replaced or wrapped, and when the block has been left
nothing of it is running. Nothing behind the block raises into it, except through ``__anext__``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from time import perf_counter
from typing import Any, Generic, Self, TypeVar

import anyio
import anyio.lowlevel

from .._engine import Engine
from .reorder import Entry, ReorderBuffer
from .runahead import RunAhead

__all__ = ["Crew", "Outlet"]

T = TypeVar("T")


class Crew:
    """Coroutines that run beside an ``async with`` block, from its start to its end."""

    def __init__(self, members: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        self._members = members
        self._outer = anyio.create_task_group()
        self._scope = anyio.CancelScope()

    async def start(self) -> None:
        await self._outer.__aenter__()
        self._outer.start_soon(self._work)

    async def _work(self) -> None:
        # In a scope of their own: ending them must not cancel the block, whose task owns the outer group.
        with self._scope:
            async with anyio.create_task_group() as group:
                for member in self._members:
                    group.start_soon(member)

    def dismiss(self) -> None:
        """End them; they are gone when :meth:`join` returns."""
        self._scope.cancel()

    async def join(self) -> None:
        # Shielded: the block may end because it is being cancelled, and they need a moment to clean up.
        # What they wait for is bounded (see ``threads``).
        self._outer.cancel_scope.shield = True
        await self._outer.__aexit__(None, None, None)


class Outlet(Generic[T]):
    """An async iterator over what arrives in ``buffer``. Several tasks may share it."""

    def __init__(
        self,
        buffer: ReorderBuffer[T],
        crew: Crew,
        ahead: RunAhead | None,
        engine: Callable[[], Engine | None],
    ) -> None:
        self._buffer = buffer
        self._crew = crew
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
