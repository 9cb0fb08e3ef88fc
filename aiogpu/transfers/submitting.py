"""Submissions of several threads to one stream, made by one of them at a time, for all.

Law of this file: what was given is submitted, or given up, by a thread that is still in :meth:`add` when its
own call began: once all calls have returned, nothing is left. Nobody waits for anybody.

A call of CUDA's lets go of the GIL, and to get it again takes 50 to 100 µs where a dozen threads want it. So
a thread that finds another one submitting leaves its copy to that one, which takes all that have come
meanwhile in one call (flat combining: Hendler, Incze, Shavit and Tzafrir, SPAA 2010). With a call each,
twelve copy threads spent as long in the queue for the GIL as they took to copy (H200 machine, 64 MB: 1.1 ms
to copy a segment, 1.2 ms to submit it).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Submissions"]

T = TypeVar("T")


class Submissions(Generic[T]):
    """What is to be submitted, and whether a thread is about it."""

    def __init__(self) -> None:
        # Re-entrant, as all our locks: a garbage collection may run code that starts a transfer.
        self._lock = threading.RLock()
        self._items: list[T] = []
        self._busy = False

    def add(self, item: T, submit: Callable[[list[T]], None], give_up: Callable[[list[T]], None]) -> None:
        """Have ``item`` submitted, by this thread or by the one that does it now.

        ``submit(items)`` is called by one thread at a time. If it raises, its items are its own affair, and
        ``give_up(items)`` gets those that others have left to it meanwhile.
        """
        with self._lock:
            self._items.append(item)
            if self._busy:
                return  # it looks once more, under the lock, before it is no longer busy
            self._busy = True
        while (items := self._next()) is not None:
            try:
                submit(items)
            except BaseException:
                with self._lock:
                    left, self._items = self._items, []
                    self._busy = False
                give_up(left)
                raise

    def _next(self) -> list[T] | None:
        with self._lock:
            if not self._items:
                self._busy = False
                return None
            items, self._items = self._items, []
            return items
