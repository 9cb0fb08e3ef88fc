"""The staging ring: page-locked chunks that all large transfers share, a turn each.

Law of this file: *a thread that waits for a chunk holds none.* What it has filled it has submitted first,
and a submitted chunk is in flight, which is the ring's: whoever's turn it is takes the first one that the
device is done with, whoever had filled it. So nobody can wait in a circle. Look at any chunk while somebody
waits. It is free: then the first in the queue takes it. Or in flight: then the device will be done with it,
and the first in the queue looks. Or in the hands of a thread that copies memory and waits for nothing but
its own work on the device: that thread will submit it or give it back.

Turns: one chunk each, in the order of asking, so that N transfers get the N-th part of the ring each,
whatever their sizes. Those that need no more than one chunk in all (*short*) have a queue of their own,
which is served every second time: a short one waits for a chunk or two, never for a transfer, and a long
one never starves. Somebody who holds chunks gets more only while nobody waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from ..drivers.base import Driver, Event
from .pinned import StagingMemory

__all__ = ["Ring"]

#: Seconds between two looks of the first in the queue at the chunks in flight. It looks instead of blocking
#: on one event: the oldest may be on a stream that waits for a user's kernel while others are long done.
_SOONEST, _LATEST = 0.0001, 0.0005


class _Flight:
    """A chunk that the device uses until ``event``."""

    __slots__ = ("chunk", "event", "owner")

    def __init__(self, owner: object, event: Event, chunk: torch.Tensor) -> None:
        self.owner = owner
        self.event = event
        self.chunk = chunk


class _Ticket:
    """A place in the queue: ``chunk`` when it was its turn; ``gate`` is open when there is something new."""

    __slots__ = ("chunk", "gate", "short")

    def __init__(self, short: bool) -> None:
        self.short = short
        self.chunk: torch.Tensor | None = None
        self.gate = threading.Lock()
        self.gate.acquire()

    def call(self) -> None:
        """Under the ring's lock, so that nobody else opens the gate in between."""
        if self.gate.locked():
            self.gate.release()


class Ring:
    """Up to ``limit`` chunks of ``nbytes`` bytes each, page-locked when they are first needed."""

    def __init__(self, driver: Driver, memory: StagingMemory, nbytes: int, limit: int) -> None:
        self.nbytes = nbytes
        self.limit = limit
        #: Chunks that there are, or that somebody is page-locking.
        self.count = 0
        #: How often somebody had to wait for a turn.
        self.waits = 0
        self._driver = driver
        self._memory = memory
        # Re-entrant, as all our locks: a garbage collection may give chunks back in this very thread.
        self._lock = threading.RLock()
        self._free: list[torch.Tensor] = []
        self._flights: list[_Flight] = []  # oldest first
        self._short: deque[_Ticket] = deque()
        self._long: deque[_Ticket] = deque()
        self._short_was_last = False
        self._called: _Ticket | None = None

    # -- taking ------------------------------------------------------------------------------------

    def try_take(self, owner: object, share: int) -> torch.Tensor | None:
        """A chunk for somebody who may hold some: only while nobody waits. Worker threads only.

        ``share``: how many the owner may have in flight for the ring to grow for it.
        """
        with self._lock:
            if self.wanted:
                return None
            self._look()
            if self._free:
                return self._free.pop()
            if not self._may_grow(owner, share):
                return None
            self.count += 1
        self._give_new()
        with self._lock:  # somebody may have asked meanwhile
            return self._free.pop() if self._free and not self.wanted else None

    def take(
        self, owner: object, share: int, *, short: bool, give_up: Callable[[], bool]
    ) -> torch.Tensor | None:
        """The next chunk, when it is the owner's turn. The owner holds none. Worker threads only.

        ``None`` when no page-locked memory is to be had at all, and when ``give_up()`` says that waiting has
        become pointless.
        """
        ticket = _Ticket(short)
        queue = self._short if short else self._long
        with self._lock:
            queue.append(ticket)
        try:
            self._wait_for_turn(ticket, owner, share, give_up)
        except BaseException:
            if ticket.chunk is not None:
                self.give(ticket.chunk)
            raise
        finally:
            with self._lock:
                if ticket in queue:
                    queue.remove(ticket)
                    self._serve()
        return ticket.chunk

    def _wait_for_turn(self, ticket: _Ticket, owner: object, share: int, give_up: Callable[[], bool]) -> None:
        pause = _SOONEST
        waited = False
        while True:
            with self._lock:
                self._look()
                self._serve()
                if ticket.chunk is not None:
                    return
                first = self._first() is ticket
                grow = first and self._may_grow(owner, share)
                self.count += grow
                hopeless = self.count == 0 and (share == 0 or self.limit == 0)
                look_again = first and bool(self._flights)
            if hopeless or (not grow and give_up()):
                return
            if grow:
                if not self._give_new():
                    share = 0  # no more of it to be had: wait for what there is
                continue
            self.waits += not waited
            waited = True
            ticket.gate.acquire(timeout=pause if look_again else 0.5)
            pause = min(2 * pause, _LATEST) if look_again else _SOONEST

    @property
    def wanted(self) -> bool:
        """Does anybody wait?"""
        return bool(self._short or self._long)

    def _first(self) -> _Ticket | None:
        queues = (self._long, self._short) if self._short_was_last else (self._short, self._long)
        return next((queue[0] for queue in queues if queue), None)

    def _serve(self) -> None:
        """Under the lock: free chunks to those whose turn it is; whoever is next shall look for more."""
        while (first := self._first()) is not None and self._free:
            (self._short if first.short else self._long).popleft()
            self._short_was_last = first.short
            first.chunk = self._free.pop()
            first.call()
        if first is not None and first is not self._called:
            first.call()
        self._called = first

    def _look(self) -> None:
        """Under the lock, in a worker thread: is the device done with a chunk? Enough of them to serve all
        who wait, and one more."""
        missing = len(self._short) + len(self._long) + 1 - len(self._free)
        for flight in tuple(self._flights) if missing > 0 else ():
            if self._driver.query(flight.event):
                self._land(flight)
                missing -= 1
                if missing <= 0:
                    break

    def _may_grow(self, owner: object, share: int) -> bool:
        return self.count < self.limit and sum(f.owner is owner for f in self._flights) < share

    def _give_new(self) -> bool:
        """Page-lock one more chunk, for which ``count`` has a place already. May take milliseconds. False
        when the system gives no more."""
        chunk = None
        try:
            chunk = self._memory.allocate(self.nbytes)
        finally:
            with self._lock:
                if chunk is None:
                    self.count -= 1
                else:
                    self._free.append(chunk)
                self._serve()
        return chunk is not None

    # -- giving back -------------------------------------------------------------------------------

    def fly(self, owner: object, event: Event, chunk: torch.Tensor) -> None:
        """The owner has submitted ``chunk``; the device is done with it at ``event``."""
        with self._lock:
            self._flights.append(_Flight(owner, event, chunk))
            first = self._first()
            if first is not None and len(self._flights) == 1:
                first.call()  # there is something to look at again

    def give(self, chunk: torch.Tensor) -> None:
        """Neither the device nor the holder uses ``chunk`` any more. Any thread."""
        with self._lock:
            self._free.append(chunk)
            self._serve()

    def land(self, owner: object) -> None:
        """The device has finished everything that ``owner`` submitted. Any thread."""
        with self._lock:
            for flight in [flight for flight in self._flights if flight.owner is owner]:
                self._land(flight)
            self._serve()

    def _land(self, flight: _Flight) -> None:
        self._flights.remove(flight)
        self._driver.recycle(flight.event)
        self._free.append(flight.chunk)

    # -- ahead of use and after --------------------------------------------------------------------

    def reserve(self, nbytes: int | None = None) -> int:
        """Page-lock chunks until there are ``nbytes`` of them (``None``: all); returns how many bytes there
        are. Worker threads only."""
        wanted = self.limit if nbytes is None else min(self.limit, -(-nbytes // max(1, self.nbytes)))
        with self._driver.relaxed():  # not every thread of ours belongs to an engine
            while True:
                with self._lock:
                    if self.count >= wanted:
                        break
                    self.count += 1
                if not self._give_new():
                    break
        return self.allocated_bytes

    def trim(self) -> int:
        """Give all free chunks back to the system; returns how many bytes that were. Worker threads only."""
        with self._driver.relaxed():
            with self._lock:
                for flight in [flight for flight in self._flights if self._driver.query(flight.event)]:
                    self._land(flight)
                self._serve()  # those who wait come first
                freed, self._free = self._free, []
                self.count -= len(freed)
            for chunk in freed:
                self._memory.free(chunk)
        return len(freed) * self.nbytes

    @property
    def allocated_bytes(self) -> int:
        return self.count * self.nbytes

    @property
    def used_bytes(self) -> int:
        return (self.count - len(self._free)) * self.nbytes
