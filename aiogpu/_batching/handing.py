"""Results on their way to those who called: not all of a large batch in one turn of the loop.

Law of this file: in the order of completion, and nobody is kept longer than the loop needs to get to him. All
callers of a batch of 64, woken at once, go on one after the other before the loop looks at its sockets again:
40 ms, where each of them writes an HTTP response. So a portion wakes as many as go on within about
:data:`TURN` seconds, and the next one follows in the loop's next turn; what else is ready gets its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from .._handoff import Handoff
from .._loops import Door
from .entry import Entry

__all__ = ["TURN", "HandingOut"]

#: Seconds of the loop's time that a portion should take.
TURN = 0.002
#: Callers in the first portion, and in the smallest.
_FIRST, _LEAST = 16, 4
#: The turns in which all who wait are through, whatever a turn takes: no queue may grow here.
_TURNS = 8


class HandingOut:
    """For one batcher, on its loop's thread. ``emptied()`` is called when the last result has been given."""

    def __init__(self, door: Door) -> None:
        self.emptied: Callable[[], object] = lambda: None
        self._door = door
        self._waiting: deque[tuple[Entry, Any, Handoff[Any] | None]] = deque()
        self._portion = _FIRST
        #: When those of the last portion went on, or were woken, if another follows in the next turn.
        self._turn: float | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def give(self, results: list[tuple[Entry, Any, Handoff[Any] | None]]) -> None:
        """A batch's, or some of them: a portion now, what is left in the next turns."""
        self._waiting += results
        if self._turn is None:
            self._give(self._portion)

    def _next(self) -> None:
        assert self._turn is not None
        took = perf_counter() - self._turn
        # By a factor of two at most: one slow turn may be somebody else's doing.
        better = self._portion * (2.0 if took <= 0 else min(2.0, max(0.5, TURN / took)))
        self._portion = max(_LEAST, min(1 << 16, round(better)))
        self._give(self._portion)

    def _begin(self) -> None:
        self._turn = perf_counter()

    def _give(self, count: int) -> None:
        waiting, door = self._waiting, self._door
        count = max(count, -(-len(waiting) // _TURNS))
        if len(waiting) > count and door.looks_in_a_turn:
            door.soon(self._begin)  # right before those whom this portion wakes: only their time counts
        while waiting and count:
            entry, result, handoff = waiting.popleft()
            entry.succeed(door, result, handoff)
            count -= 1
        if waiting:
            self._turn = perf_counter()
            door.soon(self._next)
        elif self._turn is not None:
            self._turn = None
            self.emptied()
