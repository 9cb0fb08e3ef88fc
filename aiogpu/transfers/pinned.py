"""Page-locked memory: where staging gets it, slots for small transfers, the budget of users' results.

Law of this file: what is page-locked is bounded and counted, and nobody waits here. Staging memory is ours:
its pages are touched by several threads, then registered, in blocks small enough that the launches of other
threads go on meanwhile. What users get comes from torch's own pinned allocator, and counts for as long as
they hold it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable

import torch

from ..drivers.base import Driver
from .crew import Crew
from .hostcopy import clear

__all__ = ["BlockPool", "Budget", "StagingMemory"]

#: Bytes that one thread touches at a time: 512 page faults, about a millisecond.
_TOUCH_BYTES = 2 * 1024 * 1024


class StagingMemory:
    """Blocks of page-locked memory, and how many there have been. Worker threads only."""

    def __init__(self, driver: Driver, crew: Crew) -> None:
        self.allocations = 0
        self.failures = 0
        self._driver = driver
        self._crew = crew
        self._warned = False

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """A block, or ``None`` (and one warning) when the system gives no page-locked memory."""
        try:
            block = self._driver.pinned(nbytes, self._touch)
        except (RuntimeError, OSError, MemoryError) as error:  # the driver says no, or there are no pages
            self.failures += 1
            self._warn(nbytes, error)
            return None
        self.allocations += 1
        return block

    def free(self, block: torch.Tensor) -> None:
        """Nobody uses ``block`` any more, the device neither."""
        self._driver.unpin(block)

    def _touch(self, block: torch.Tensor) -> None:
        start, end = block.data_ptr(), block.numel()
        self._crew.run(
            -(-end // _TOUCH_BYTES),
            lambda i: clear(start + i * _TOUCH_BYTES, min(_TOUCH_BYTES, end - i * _TOUCH_BYTES)),
        )

    def _warn(self, nbytes: int, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            message = (
                f"aiogpu could not page-lock {nbytes} bytes ({error}); transfers go on through "
                "ordinary memory, slower. Raise the limit on locked memory (ulimit -l), or lower "
                "AIOGPU_STAGING_BYTES."
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)


class BlockPool:
    """Up to ``limit`` slots of ``nbytes`` bytes each, reserved ahead: taking one never waits."""

    def __init__(self, memory: StagingMemory, nbytes: int, limit: int) -> None:
        self.nbytes = nbytes
        self.limit = limit
        self.count = 0
        self._memory = memory
        self._free: list[torch.Tensor] = []

    def reserve(self, count: int) -> None:
        """Allocate ``count`` slots, as one block. Worker threads only."""
        count = min(count, self.limit - self.count)
        if count > 0:
            block = self._memory.allocate(count * self.nbytes)
            if block is not None:
                self.count += count
                self._free.extend(block.split(self.nbytes))

    def take_free(self) -> torch.Tensor | None:
        """A slot that is free right now, or ``None``. Any thread."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give(self, slot: torch.Tensor) -> None:
        """The device is done with ``slot``. Any thread."""
        self._free.append(slot)

    @property
    def allocated_bytes(self) -> int:
        return self.count * self.nbytes

    @property
    def used_bytes(self) -> int:
        return (self.count - len(self._free)) * self.nbytes


class Budget:
    """Counts the page-locked bytes of results for as long as users hold them.

    Torch's pinned allocator keeps what users have let go of for reuse, by size. That is page-locked, too:
    before it grows beyond ``limit`` because other sizes are wanted now, ``drop_cache()`` gives it back.
    """

    def __init__(self, limit: int, drop_cache: Callable[[], object] = lambda: None) -> None:
        self.limit = limit
        #: Results that had to be in ordinary memory because the budget was spent.
        self.refused = 0
        self._drop_cache = drop_cache
        #: Blocks of each size that are held, and that torch has made for us (held or kept for reuse).
        self._held: Counter[int] = Counter()
        self._made: Counter[int] = Counter()
        self._lock = threading.RLock()
        # What was let go. A tensor may be collected in any thread at any point, also by the garbage
        # collector while this thread holds the lock: so its callback appends, and takes no lock.
        self._returned: deque[int] = deque()

    def claim(self, nbytes: int) -> bool:
        """Take ``nbytes`` if they fit; pair with :meth:`track` or :meth:`give_back`. Worker threads only."""
        with self._lock:
            self._settle()
            if _total(self._held) + nbytes > self.limit:
                self.refused += 1
                return False
            self._held[nbytes] += 1
            full = False
            if self._held[nbytes] > self._made[nbytes]:
                full = _total(self._made) + nbytes > self.limit
                if full:
                    self._made = Counter(self._held)
                else:
                    self._made[nbytes] = self._held[nbytes]
        if full:
            self._drop_cache()
        return True

    def track(self, tensor: torch.Tensor, nbytes: int) -> None:
        """Give back ``nbytes`` when the last view of ``tensor``'s memory is gone."""
        weakref.finalize(tensor.untyped_storage(), self._returned.append, nbytes).atexit = False

    def give_back(self, nbytes: int) -> None:
        self._returned.append(nbytes)

    def forget_kept(self) -> None:
        """Torch has given back what it kept for reuse."""
        with self._lock:
            self._settle()
            self._made = Counter(self._held)

    @property
    def held(self) -> int:
        """Bytes of results that users hold."""
        with self._lock:
            self._settle()
            return _total(self._held)

    @property
    def kept(self) -> int:
        """Bytes that users have let go of and torch keeps for reuse."""
        with self._lock:
            self._settle()
            return _total(self._made) - _total(self._held)

    def _settle(self) -> None:
        while self._returned:
            self._held[self._returned.popleft()] -= 1


def _total(blocks: Counter[int]) -> int:
    return sum(nbytes * count for nbytes, count in blocks.items())
