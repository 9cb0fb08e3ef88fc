"""The staging ring: page-locked chunks that all large transfers share, a segment's time each.

Law of this file: *a thread that waits for a chunk holds none.* It takes a chunk for one segment, and submits
it or gives it back before it asks again. A submitted chunk is in flight, which is the ring's: whoever's turn
it is takes the first one that the device is done with, whoever had filled it. So nobody can wait in a circle.
Look at any chunk while somebody waits. It is free: then the first in the queue takes it. Or in flight: then
the device will be done with it, and the first in the queue looks. Or in the hands of a thread that copies
memory and waits for nothing but its own work on the device: that thread will submit it or give it back.

Turns: one chunk each, in the order of asking; which transfer's segments are asked for is settled before, by
the crew. Transfers that need no more than one chunk in all (*short*) have a queue of their own, which is
served every second time: a short one waits for a chunk or two, never for a transfer, and a long one never
starves.

The chunk that was given back last is taken first: its memory may still be in the caches.

How many chunks there are depends on what was transferred, not on who was faster: at first each that is taken
is a new one, until there are as many as a transfer can use at once. After that a transfer with something in
flight waits, and only one that has nothing yet makes the ring grow.
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
_SOONEST, _LATEST = 0.00005, 0.0004


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
        #: Chunks that a transfer was expected to use at once, since the last :meth:`trim`.
        self.expected = 0
        #: How often somebody had to wait for a turn.
        self.waits = 0
        self._driver = driver
        self._memory = memory
        # Re-entrant, as all our locks: a garbage collection may give chunks back in this very thread.
        self._lock = threading.RLock()
        self._free: list[torch.Tensor] = []
        #: What the device uses, until the event: of each owner in the order of its stream.
        self._flights: dict[object, deque[tuple[Event, list[torch.Tensor]]]] = {}
        self._short: deque[_Ticket] = deque()
        self._long: deque[_Ticket] = deque()
        self._short_was_last = False
        self._called: _Ticket | None = None
        # One at a time: page-locking holds up the launches of all threads.
        self._growing = threading.RLock()

    # -- taking ------------------------------------------------------------------------------------

    def expect(self, count: int) -> None:
        """Somebody is about to use up to ``count`` chunks at once."""
        self.expected = max(self.expected, min(count, self.limit))

    def take(
        self, owner: object, *, short: bool = False, grow: bool = True, give_up: Callable[[], bool]
    ) -> torch.Tensor | None:
        """The next chunk, when it is this thread's turn. It holds none. Worker threads only.

        ``grow``: a new one may be page-locked. ``None`` when no page-locked memory is to be had at all, and
        when ``give_up()`` says that waiting has become pointless.
        """
        if grow and self.count < self.expected:
            grow = self._give_one_more(self.expected)
        with self._lock:
            if not self.wanted:
                if not self._free:
                    self._look()
                if self._free:
                    return self._free.pop()
            ticket = _Ticket(short)
            queue = self._short if short else self._long
            queue.append(ticket)
        try:
            self._wait_for_turn(ticket, owner, grow, give_up)
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

    def _wait_for_turn(self, ticket: _Ticket, owner: object, grow: bool, give_up: Callable[[], bool]) -> None:
        pause = _SOONEST
        waited = False
        while True:
            with self._lock:
                self._look()
                self._serve()
                if ticket.chunk is not None:
                    return
                first = self._first() is ticket
                grows = first and grow and self.count < self.limit and owner not in self._flights
                hopeless = self.count == 0 and not (grow and self.limit)
                look_again = first and bool(self._flights)
            if hopeless or (not grows and give_up()):
                return
            if grows:
                grow = self._give_one_more(self.limit)  # else wait for what there is
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
        for owner, flights in tuple(self._flights.items()):
            while missing > 0 and flights and self._driver.query(flights[0][0]):
                missing -= self._land(flights)
            if not flights:
                del self._flights[owner]

    def _give_one_more(self, limit: int) -> bool:
        """Page-lock another chunk while there are fewer than ``limit``. May take milliseconds. False when the
        system gives no more."""
        with self._growing:
            with self._lock:
                if self.count >= limit:
                    return True
                self.count += 1
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

    def fly(self, owner: object, event: Event, chunks: list[torch.Tensor]) -> None:
        """The owner has submitted ``chunks`` to its one stream; the device is done with them at ``event``."""
        with self._lock:
            if not self._flights and (first := self._first()) is not None:
                first.call()  # there is something to look at again
            self._flights.setdefault(owner, deque()).append((event, chunks))

    def give(self, chunk: torch.Tensor) -> None:
        """Neither the device nor the holder uses ``chunk`` any more. Any thread."""
        with self._lock:
            self._free.append(chunk)
            self._serve()

    def lose(self, count: int) -> None:
        """Nobody can tell any more when the device is done with ``count`` chunks: others take their place."""
        with self._lock:
            self.count -= count
            self._serve()

    def land(self, owner: object) -> None:
        """The device has finished everything that ``owner`` submitted. Any thread."""
        with self._lock:
            flights = self._flights.pop(owner, None)
            while flights:
                self._land(flights)
            self._serve()

    def _land(self, flights: deque[tuple[Event, list[torch.Tensor]]]) -> int:
        event, chunks = flights.popleft()
        self._driver.recycle(event)
        self._free += chunks
        return len(chunks)

    # -- ahead of use and after --------------------------------------------------------------------

    def reserve(self, nbytes: int | None = None) -> int:
        """Page-lock chunks until there are ``nbytes`` of them (``None``: all); returns how many bytes there
        are. Worker threads only."""
        wanted = self.limit if nbytes is None else min(self.limit, -(-nbytes // max(1, self.nbytes)))
        with self._driver.relaxed():  # not every thread of ours belongs to an engine
            while self.count < wanted and self._give_one_more(wanted):
                pass
        return self.allocated_bytes

    def trim(self) -> int:
        """Give all free chunks back to the system; returns how many bytes that were. Worker threads only."""
        with self._driver.relaxed():
            with self._lock:
                for owner, flights in tuple(self._flights.items()):
                    while flights and self._driver.query(flights[0][0]):
                        self._land(flights)
                    if not flights:
                        del self._flights[owner]
                self._serve()  # those who wait come first
                freed, self._free = self._free, []
                self.expected = 0
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
