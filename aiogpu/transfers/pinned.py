"""Page-locked blocks for staging: bounded, reused, never allocated on a loop's thread.

Law of this file: a block belongs to one transfer until the device is done with it. Whoever takes a block
while holding none may wait for one; whoever holds one never waits (it reuses its own), so that transfers
cannot wait for each other in a circle.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable

import torch

__all__ = ["BlockPool", "Budget"]


class BlockPool:
    """Up to ``limit`` blocks of ``nbytes`` bytes each, allocated with ``allocate(nbytes)``."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], nbytes: int, limit: int) -> None:
        self.nbytes = nbytes
        self.limit = limit
        self.count = 0
        self._allocate = allocate
        self._free: list[torch.Tensor] = []
        self._returned = threading.Condition()
        self._warned = False

    def reserve(self, count: int) -> None:
        """Allocate ``count`` blocks ahead of use, as one piece. Worker threads only."""
        count = min(count, self.limit - self.count)
        if count > 0:
            arena = self._try_allocate(count * self.nbytes)
            if arena is not None:
                with self._returned:
                    self.count += count
                    self._free.extend(arena.split(self.nbytes))

    def take_free(self) -> torch.Tensor | None:
        """A block that is free right now, or ``None``. Any thread."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def take(self, *, wait: bool, give_up: Callable[[], bool]) -> torch.Tensor | None:
        """A free block, or a new one while the limit allows, or (``wait``) the next one returned.

        Worker threads only. ``None`` without ``wait``, and when no page-locked memory is to be had
        or ``give_up()`` says that waiting has become pointless.
        """
        block = self.take_free()
        if block is not None:
            return block
        with self._returned:
            grow = self.count < self.limit
            self.count += grow
        if grow:
            block = self._try_allocate(self.nbytes)
            if block is None:
                with self._returned:
                    self.count -= 1
                    wait = wait and self.count > 0
            else:
                return block
        while wait and not give_up():
            with self._returned:
                self._returned.wait_for(lambda: bool(self._free), timeout=0.5)
            block = self.take_free()
            if block is not None:
                return block
        return None

    def give(self, block: torch.Tensor) -> None:
        """The device is done with ``block``. Any thread."""
        with self._returned:
            self._free.append(block)
            self._returned.notify()

    def trim(self) -> int:
        """Let go of all free blocks; returns how many bytes that were."""
        with self._returned:
            freed, self._free = self._free, []
            self.count -= len(freed)
        return len(freed) * self.nbytes

    @property
    def allocated_bytes(self) -> int:
        return self.count * self.nbytes

    @property
    def used_bytes(self) -> int:
        return (self.count - len(self._free)) * self.nbytes

    def _try_allocate(self, nbytes: int) -> torch.Tensor | None:
        try:
            return self._allocate(nbytes)
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                message = (
                    f"aiogpu could not page-lock {nbytes} bytes ({error}); transfers go on through "
                    "ordinary memory, slower. Raise the limit on locked memory (ulimit -l), or lower "
                    "AIOGPU_STAGING_BYTES."
                )
                warnings.warn(message, RuntimeWarning, stacklevel=2)
            return None


class Budget:
    """Counts the page-locked bytes of results for as long as users hold them.

    Torch's pinned allocator has statistics, but they count what it keeps for reuse as well.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = 0
        self._lock = threading.RLock()
        # What was let go. A tensor may be collected in any thread at any point, also by the garbage
        # collector while this thread holds the lock: so its callback appends, and takes no lock.
        self._returned: deque[int] = deque()

    def claim(self, nbytes: int) -> bool:
        """Take ``nbytes`` if they fit; pair with :meth:`track` or :meth:`give_back`."""
        with self._lock:
            if self._settled() + nbytes > self.limit:
                return False
            self._held += nbytes
            return True

    def track(self, tensor: torch.Tensor, nbytes: int) -> None:
        """Give back ``nbytes`` when the last view of ``tensor``'s memory is gone."""
        weakref.finalize(tensor.untyped_storage(), self._returned.append, nbytes).atexit = False

    def give_back(self, nbytes: int) -> None:
        self._returned.append(nbytes)

    @property
    def held(self) -> int:
        """Bytes of results that users hold."""
        with self._lock:
            return self._settled()

    def _settled(self) -> int:
        while self._returned:
            self._held -= self._returned.popleft()
        return self._held
