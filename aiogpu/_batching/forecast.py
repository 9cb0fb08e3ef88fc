"""How long a new call would wait.

Law of this file: it predicts from what it has seen and is never sure: whoever would not have to wait at all
is let in whatever it says, so that a forecast that has become wrong meets the facts again.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

__all__ = ["Forecast"]


class Forecast:
    """The time that one batch takes, as the median of the last ones.

    Batches are computed one after the other, so what counts is for how long each held up the next: from its
    own start, or the end of the one before, to its end. The median, because the first batches of a model
    are compiled and take seconds.
    """

    def __init__(self, memory: int = 15) -> None:
        self._recent: deque[float] = deque(maxlen=memory)
        self._last_end = -math.inf
        #: Seconds per batch; 0 while nothing is known. Read from other threads, too.
        self.typical = 0.0

    def note(self, start: float, end: float) -> None:
        """A batch ran from ``start`` to ``end``, in seconds of one clock."""
        self._recent.append(end - max(start, min(self._last_end, end)))
        self._last_end = max(self._last_end, end)
        self.typical = median(self._recent)

    def wait(self, running: int, batches: int, elapsed: float = 0.0) -> float:
        """Seconds until the last of ``batches`` waiting ones is computed.

        ``running`` ones go before; the first of them started ``elapsed`` seconds ago.
        """
        return self.typical * (running + batches) - min(elapsed, self.typical)

    def elapsed(self, start: float, now: float) -> float:
        """For how long a batch that started at ``start`` has had the device to itself."""
        return max(0.0, now - max(start, self._last_end))
