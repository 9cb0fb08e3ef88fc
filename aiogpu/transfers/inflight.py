"""Bytes of transfers in flight, bounded: what does not fit waits in a queue, and no coroutine with it.

Law of this file: transfers start in the order of their calls, nobody overtakes, and each byte is counted from
the start of its transfer until the transfer is over. A transfer that is larger than the limit goes alone.
Starting never blocks and never raises: what cannot be started has failed, and makes room for the next.

No transfer in flight ever waits for one in the queue (what is ordered behind a transfer on the device was
submitted after it), so the queue always moves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

__all__ = ["InFlight"]


class Transfer(Protocol):
    """What the queue needs of an operation."""

    def when_over(self, callback: Callable[[], object]) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class InFlight:
    """At most ``limit`` bytes of transfers in flight; ``None``: any number. From any thread."""

    def __init__(self, limit: int | None = None) -> None:
        self.nbytes = 0
        self._limit = limit
        self._count = 0
        self._queue: deque[tuple[Transfer, int, Callable[[], None]]] = deque()
        self._starting = False
        #: Transfers that have ended.
        self._ended = 0
        # Re-entrant, as all our locks: a garbage collection may run code that starts a transfer.
        self._lock = threading.RLock()

    @property
    def waiting(self) -> int:
        """Transfers in the queue."""
        return len(self._queue)

    def admit(self, transfer: Transfer, nbytes: int, start: Callable[[], None]) -> None:
        """Call ``start()``, which gets ``transfer`` under way, once there is room: now, or from whichever
        thread makes room."""
        self._queue.append((transfer, nbytes, start))
        self._start_what_fits()

    def resize(self, limit: int | None) -> None:
        self._limit = limit
        self._start_what_fits()

    def _fits(self, nbytes: int) -> bool:
        return self._limit is None or self._count == 0 or self.nbytes + nbytes <= self._limit

    def _start_what_fits(self) -> None:
        while (entry := self._next()) is not None:
            transfer, nbytes, start = entry
            try:
                transfer.when_over(partial(self._over, nbytes))
                start()
            except BaseException as error:  # the interpreter is exiting, or has no thread to give
                transfer.fail(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                del entry, transfer, start
                with self._lock:
                    self._starting = False

    def _next(self) -> tuple[Transfer, int, Callable[[], None]] | None:
        # One thread starts transfers at a time, so that they start in order. Whoever comes meanwhile, also
        # from inside a start, may leave: the lock is taken again behind each start, and sees what changed.
        with self._lock:
            while self._queue and not self._starting:
                # Taken before anything is called: a garbage collection in there may start a transfer, in this
                # very thread, and the lock does not keep that out. It leaves its transfer in the queue.
                self._starting = True
                ended = self._ended
                if self._fits(self._queue[0][1]):
                    entry = self._queue.popleft()
                    self._count += 1
                    self.nbytes += entry[1]
                    return entry
                self._starting = False
                if ended == self._ended:  # else one has ended meanwhile, and found somebody at it
                    break
            return None

    def _over(self, nbytes: int) -> None:
        with self._lock:
            self._count -= 1
            self.nbytes -= nbytes
            self._ended += 1
        self._start_what_fits()
