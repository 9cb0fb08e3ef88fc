"""How large a batch may be now, and up to which size it is padded.

Law of this file: the limit falls when memory runs out and comes back by itself; it is never above what the
user allowed nor below what can be computed at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

__all__ = ["BatchSizes"]

#: Batches that must succeed under a lowered limit before it is doubled: memory that was short for a moment
#: comes back soon, and each attempt at a size that does not fit costs one failed batch.
RECOVERY = 32


class BatchSizes:
    """The limit, lowered for a while after running out of memory, and the preferred sizes.

    ``sizes``: batches are padded up to one of these (one shape each for compiled models and graphs).
    """

    def __init__(self, maximum: int, sizes: Iterable[int] | None = None) -> None:
        if isinstance(maximum, bool) or not isinstance(maximum, int) or maximum < 1:
            raise ValueError(f"max_batch_size is a number of items, 1 or more, not {maximum!r}")
        self.maximum = maximum
        self.limit = maximum
        self._sizes = None if sizes is None else _checked(sizes, maximum)
        self._good = 0

    @property
    def lowered(self) -> bool:
        return self.limit < self.maximum

    def padded(self, count: int) -> int:
        """The size that a batch of ``count`` items is computed with."""
        if self._sizes is None:
            return count
        return self._sizes[bisect_left(self._sizes, count)]

    def out_of_memory(self, count: int) -> bool:
        """A batch of ``count`` items did not fit: lower the limit. Is it worth trying again under it?"""
        self._good = 0
        size = self.padded(count)
        self.limit = max(1, min(self.limit, self._below(size)))
        return self.padded(min(count, self.limit)) < size

    def succeeded(self) -> None:
        """A batch fitted."""
        if self.limit < self.maximum:
            self._good += 1
            if self._good >= RECOVERY:
                self._good = 0
                # Not above the maximum, which padded() has no size for.
                self.limit = self.padded(min(self.maximum, self.limit * 2))

    def _below(self, size: int) -> int:
        """The next lower limit: half, or the next smaller preferred size."""
        if self._sizes is None:
            return size // 2
        index = bisect_left(self._sizes, size)
        return self._sizes[index - 1] if index > 0 else size


def _checked(sizes: Iterable[int], maximum: int) -> list[int]:
    found = sorted(set(sizes))
    if not found or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in found):
        raise ValueError(f"sizes are numbers of items, 1 or more, not {found!r}")
    if found[-1] != maximum:
        raise ValueError(
            f"the largest of sizes must be max_batch_size, {maximum}, not {found[-1]}: a larger one would "
            "never be used, and a batch between the two could not be padded"
        )
    return found
