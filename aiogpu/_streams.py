"""Streams: opened ahead, leased newest first, shared in order when there are not enough.

Law of this file: a lease is given back when its holder has *submitted* its last work; the stream counts as
idle only when the device has finished it. A stream that is shared runs its users' work in the order of
submission, which costs overlap and never correctness: no stream waits for anything that was submitted
later, so sharing cannot deadlock.

Newest first, because a stream's memory caches are its own: the allocator keeps free blocks per stream,
and cuBLAS a workspace of 32 MiB. Few warm streams beat many cold ones.
"""

from __future__ import annotations

import threading

from ._reactor import Point
from .drivers.base import Driver, Stream, StreamKind

__all__ = ["Lease", "StreamPool"]


class _Slot:
    __slots__ = ("stream", "tail", "users")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.users = 0
        self.tail: Point | None = None  # the last work of the last user; idle once it is done

    @property
    def idle(self) -> bool:
        return self.users == 0 and (self.tail is None or self.tail.done)


class Lease:
    """The right to use ``stream`` until every holder has called :meth:`release`."""

    __slots__ = ("_holders", "_pool", "_slot", "stream")

    def __init__(self, pool: StreamPool, slot: _Slot) -> None:
        self._pool = pool
        self._slot = slot
        self._holders = 1
        self.stream = slot.stream

    def hold(self) -> None:
        """One more holder: a thread that goes on launching after its task has ended."""
        with self._pool._lock:
            self._holders += 1

    def release(self, tail: Point | None) -> None:
        """Give the stream back; it is busy until ``tail`` is done."""
        with self._pool._lock:
            self._holders -= 1
            if tail is not None:
                self._slot.tail = tail
            if self._holders == 0:
                self._slot.users -= 1


class StreamPool:
    """``limit`` streams of one kind for each priority."""

    def __init__(self, driver: Driver, kind: StreamKind, limit: int) -> None:
        self.limit = limit
        self.leases = 0
        self.shared = 0
        self._driver = driver
        self._kind = kind
        self._slots: dict[int, list[_Slot]] = {}
        # Re-entrant, as all our locks: a garbage collection at any allocation may close a suspended task,
        # which gives its lease back in this very thread.
        self._lock = threading.RLock()

    def is_open(self, priority: int) -> bool:
        """Can streams of this priority be leased?"""
        return priority in self._slots

    def open(self, priority: int = 0) -> None:
        """Open the streams of one priority. May wait for the device: not on a loop's thread."""
        with self._lock:
            if priority not in self._slots:
                opened = [_Slot(self._driver.open_stream(self._kind, priority)) for _ in range(self.limit)]
                self._slots[priority] = opened

    def lease(self, priority: int = 0) -> Lease:
        """A stream of an open priority: the newest idle one, else of the least shared the oldest."""
        with self._lock:
            slots = self._slots[priority]  # leased longest ago first
            slot = next((s for s in reversed(slots) if s.idle), None)
            if slot is None:
                slot = min(slots, key=lambda s: s.users)
                self.shared += slot.users > 0
            if slots[-1] is not slot:
                slots.remove(slot)
                slots.append(slot)
            slot.users += 1
            self.leases += 1
            return Lease(self, slot)

    def idle(self, priority: int = 0) -> int:
        """How many streams of an open priority have nothing on them, as of now."""
        with self._lock:
            return sum(slot.idle for slot in self._slots[priority])

    @property
    def opened(self) -> int:
        return sum(len(slots) for slots in self._slots.values())

    @property
    def in_use(self) -> int:
        return sum(slot.users for slots in self._slots.values() for slot in slots)

    def streams(self) -> list[Stream]:
        with self._lock:
            return [slot.stream for slots in self._slots.values() for slot in slots]
