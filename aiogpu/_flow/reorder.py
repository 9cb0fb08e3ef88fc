"""Between two stages: entries that are reserved in order, filled in any order, and taken in order again.

Law of this file: nothing is lost and nothing overtakes. An entry leaves the buffer in the step in which its
taker runs on, so a taker that is cancelled leaves it there; a failure is an entry like any other, and the
last one that is taken. Everything runs on the loop's thread, and nothing here waits for room: whoever
reserves has the right to (see ``stages`` and ``sources``).

CPUs have the same thing, under the same name, to retire instructions in program order that were executed in
any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import anyio

from .._handoff import Handoff

__all__ = ["Entry", "ReorderBuffer"]

T = TypeVar("T")


class Entry(Generic[T]):
    """One item, or the failure that stands in its place."""

    __slots__ = ("_buffer", "_value", "error", "filled", "index", "state")

    def __init__(self, buffer: ReorderBuffer[T], index: int) -> None:
        self._buffer = buffer
        self._value: Any = None
        self.error: BaseException | None = None
        self.filled = False
        #: Number of the item, from 0.
        self.index = index
        #: What the source's ``state_dict()`` was when it had made the item.
        self.state: Any = None

    def fill(self, value: T | Handoff[T]) -> None:
        """The item is there, perhaps with the stream order in which it was made."""
        self._value = value
        self._fill()

    def fail(self, error: BaseException) -> None:
        """There is no such item, and none after it."""
        if isinstance(error, StopIteration | StopAsyncIteration):
            # It would end the consumer's loop as if all were well. Generators make the same of it.
            named = RuntimeError(f"{type(error).__name__} was raised where no iteration ends")
            named.__notes__ = [*getattr(error, "__notes__", ())]
            named.__cause__, error = error, named
        self.error = error
        self._fill()

    def _fill(self) -> None:
        self.filled = True
        self._buffer._filled(self)

    def take(self) -> T:
        """The item, for the current streams; the entry lets go of it."""
        value, self._value = self._value, None
        return cast(T, value.take() if isinstance(value, Handoff) else value)


class ReorderBuffer(Generic[T]):
    """Entries in the order of their reservation, or, ``ordered=False``, of their completion.

    ``on_take`` is called whenever an item has left: there is room for another one.
    """

    def __init__(self, *, ordered: bool = True, on_take: Callable[[], object] | None = None) -> None:
        self._ordered = ordered
        self._on_take = on_take
        self._entries: deque[Entry[T]] = deque()
        self._reserved = 0
        self._closed = False
        self._takers: deque[anyio.Event] = deque()

    # -- in ----------------------------------------------------------------------------------------

    def reserve(self, index: int | None = None) -> Entry[T]:
        """A place behind all present ones. ``index``: the item's number, if it has one already."""
        entry = Entry(self, self._reserved if index is None else index)
        self._reserved += 1
        if self._ordered and not self._closed:
            self._entries.append(entry)
        return entry

    def _filled(self, entry: Entry[T]) -> None:
        if not self._ordered and not self._closed:
            self._entries.append(entry)
        if self._ready:
            self._wake()

    def close(self, error: BaseException | None = None) -> None:
        """Nothing more comes; or, behind everything that is there, the failure ``error``."""
        if self._closed:
            return
        if error is not None:
            self.reserve().fail(error)
        self._closed = True
        self._wake()

    # -- out ---------------------------------------------------------------------------------------

    @property
    def _ready(self) -> bool:
        return bool(self._entries) and self._entries[0].filled

    @property
    def ready(self) -> int:
        """How many items lie here, filled."""
        return sum(entry.filled for entry in self._entries)

    async def take(self) -> Entry[T] | None:
        """The next entry, filled; ``None`` after the last. No checkpoint when one is there already."""
        while not self._ready:
            if self._closed and not self._entries:
                self._wake()  # others may be waiting for the end, too
                return None
            await self._wait()
        entry = self._entries.popleft()
        if entry.error is not None:
            self.abandon()  # what has overtaken the failed one
        elif self._on_take is not None:
            self._on_take()
        if self._ready or self._closed:
            self._wake()
        return entry

    def abandon(self, error: BaseException | None = None) -> None:
        """Let go of what is here and of what may still come: nothing does, or the failure ``error``."""
        self._entries.clear()
        self._closed = False
        self.close(error)

    async def _wait(self) -> None:
        event = anyio.Event()
        self._takers.append(event)
        try:
            await event.wait()
        except BaseException:
            if event.is_set():
                self._wake()  # woken and cancelled in one tick: somebody else may have it
            else:
                self._takers.remove(event)
            raise

    def _wake(self) -> None:
        if self._takers:
            self._takers.popleft().set()
