"""When callers' patience ends.

Law of this file: one timer for all. A cancel scope for each call would cost as much as everything else that
the batcher does for it.
"""

from __future__ import annotations

import heapq
import math

from .entry import Entry, State

__all__ = ["Deadlines"]


class Deadlines:
    """The calls with a timeout, the earliest first. Calls that are over stay as shells for a while."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry]] = []
        self._clean_at = 128

    def add(self, deadline: float, entry: Entry) -> bool:
        """Is it the earliest one now? ``entry`` is in the queue already."""
        heapq.heappush(self._heap, (deadline, entry.number, entry))
        if len(self._heap) >= self._clean_at:
            # At most as many shells as calls, and a few; each push pays for one look.
            self._heap = [item for item in self._heap if item[2].state is not State.OVER]
            heapq.heapify(self._heap)
            self._clean_at = 2 * len(self._heap) + 128
        return self._heap[0][2] is entry

    def next(self) -> float:
        """The earliest deadline of a call that is not over; ``inf`` when there is none."""
        while self._heap and self._heap[0][2].state is State.OVER:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def expired(self, now: float) -> list[Entry]:
        """Take out the calls whose time is over."""
        out = []
        while self.next() <= now:
            out.append(heapq.heappop(self._heap)[2])
        return out
