"""Completions in, wake-ups out: poll while busy, interrupt when idle.

Law of this file: one reactor per event loop, touched by the loop's thread only (``wake`` and ``inbox``
excepted). Points wait in one FIFO per stream; events of one stream complete in order, so only heads are
asked. A wake-up is a hint, the event's status is the truth: nothing resolves before ``query`` said so.

While points are pending, and until ``spin`` seconds after the last submission or completion, the reactor
looks once per loop iteration, and other coroutines run in between: under load no callback is ever made.
When it would go idle, it arms one notification per stream, for the head, and sleeps until one wakes the
loop (Linux does the same for network cards, under the name NAPI).

    busy  --spin seconds without progress-->  sleeping  --notification or watchdog-->  busy
    busy  --nothing pending-->  off  --a new point-->  busy
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from ._emit import emit, wakeup_observers
from ._errors import DeviceLostError, fresh
from ._loops import Door, DoorClosed
from ._selfpipe import open_pipe
from .drivers.base import Driver, Event, Signal, Stream

if TYPE_CHECKING:
    from ._engine import Engine

__all__ = ["Point", "Reactor"]

T = TypeVar("T")

#: Seconds that one look may take before the loop gets its turn again, however much has completed.
_BUDGET = 0.0005

#: Points resolved between two looks at the clock.
_BATCH = 128


class Point:
    """A moment on a stream that somebody waits for, or that buffers must outlive.

    ``callback(error)`` is called once, on the loop's thread (on the notifier's when the loop is gone).
    ``keep`` is what the device still uses; it is dropped after the callback. On a lost device it is
    never dropped: freeing memory that was recorded on a broken stream can abort the process.
    """

    __slots__ = ("callback", "done", "engine", "event", "keep", "waiter")

    def __init__(
        self,
        engine: Engine,
        event: Event,
        callback: Callable[[BaseException | None], None] | None = None,
        keep: Any = None,
        waiter: Any = None,
    ) -> None:
        self.engine = engine
        self.event = event
        self.callback = callback
        self.keep = keep
        #: A parking place of the reactor's own loop: the short way for a plain wait.
        self.waiter = waiter
        self.done = False

    def finish(self, error: BaseException | None) -> None:
        """It has completed, or its device is lost. A late or doubled completion does nothing."""
        if self.done:
            return
        self.done = True
        event, self.event = self.event, None
        callback, self.callback = self.callback, None
        if self.engine.lost is None:
            self.engine.driver.recycle(event)
        else:
            self.engine.leaked.append((event, self.keep, callback))
        self.keep = None
        if callback is not None:
            callback(None if error is None else fresh(error))

    def look(self) -> bool:
        """Ask for the truth outside of any loop (the notifier's thread does, for orphans)."""
        try:
            with self.engine.driver.relaxed():
                if not self.engine.driver.query(self.event):
                    return False
        except Exception as error:
            self.finish(self.engine.fault(error))
        else:
            self.finish(None)
        return True


class _Lane:
    """The points of one stream, in order of their submission."""

    __slots__ = ("armed", "engine", "points", "token")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.points: deque[Point] = deque()
        self.armed: Point | None = None  # whose completion the notification in flight announces
        self.token: Any = None


class Reactor:
    """What one event loop waits for on all devices."""

    def __init__(self, door: Door, spin: float) -> None:
        self.door = door
        self.spin = spin
        self.sleeping = False  # read by the notifier's thread
        self.pending = 0
        self.looks = 0
        self.notifications = 0
        #: Operations that are not over, oldest first; opaque here, named when something goes wrong.
        self.operations: dict[object, None] = {}
        self.inbox: deque[tuple[Engine, Stream, Point]] = deque()
        self._lanes: dict[Any, _Lane] = {}
        self._relaxed: Callable[[], AbstractContextManager[None]] = nullcontext
        self._busy = False
        self._submitted = False  # since the last look
        self._abandoned = False
        self._last_progress = 0.0
        self._posted = threading.Lock()  # held while a wake-up is on its way: one at a time
        self._woken_at: float | None = None  # for observers
        #: What a driver's callback writes to, where the loop can read it.
        self.pipe, self._stop_reading = open_pipe(door, self._awake)

    # -- in ----------------------------------------------------------------------------------------

    def watch(
        self,
        engine: Engine,
        stream: Stream,
        event: Event,
        callback: Callable[[BaseException | None], None] | None = None,
        keep: Any = None,
        waiter: Any = None,
    ) -> Point:
        """When ``event``, just recorded on ``stream``, completes: call ``callback``, settle ``waiter``."""
        point = Point(engine, event, callback, keep, waiter)
        self._add(engine, stream.raw, point)
        return point

    def _add(self, engine: Engine, raw: Any, point: Point) -> None:
        lane = self._lanes.get(raw)
        if lane is None:
            lane = self._lanes[raw] = _Lane(engine)
            if engine.driver.captures:
                self._relaxed = engine.driver.relaxed
        lane.points.append(point)
        self.pending += 1
        self._submitted = True
        if not self._busy:
            self._start()

    def watch_from_thread(
        self,
        engine: Engine,
        stream: Stream,
        event: Event,
        callback: Callable[[BaseException | None], None] | None = None,
        keep: Any = None,
        waiter: Any = None,
    ) -> Point:
        """The same from another thread. Without a loop any more, the notifier looks after it."""
        point = Point(engine, event, callback, keep, waiter)
        # The inbox first, the post second: whichever of a closing loop's last look and this thread
        # comes last finds the point in the inbox and takes it out, exactly once (deque.popleft).
        self.inbox.append((engine, stream, point))
        try:
            self.door.post(self._take_in)
        except DoorClosed:
            self.abandon()
        if self._abandoned:  # in the meantime: its last look may have come before our entry
            self.abandon()
        return point

    def _take_in(self) -> None:
        if self._abandoned:
            self.abandon()
        while self.inbox:
            try:
                engine, stream, point = self.inbox.popleft()
            except IndexError:
                return
            self._add(engine, stream.raw, point)

    def in_flight(self, engine: Engine) -> list[Point]:
        """The pending points of one device, as of now. From any thread."""
        found = [point for owner, _, point in _copied(self.inbox) if owner is engine]
        for lane in tuple(self._lanes.values()):
            if lane.engine is engine:
                found += _copied(lane.points)
        return found

    # -- out ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._busy = True
        self.sleeping = False
        self.door.soon(self._look)

    def _look(self) -> None:
        """One round: resolve what has completed; then look again soon, sleep, or stop."""
        self.looks += 1
        deadline = perf_counter() + _BUDGET
        progress = False
        while finished := self._resolve():
            progress = True
            if finished < _BATCH or perf_counter() > deadline:
                break
        now = perf_counter()
        if progress or self._submitted:
            self._submitted = False
            self._last_progress = now
        if self.pending == 0:
            self._busy = False
        elif now - self._last_progress < self.spin:
            self.door.soon(self._look)
        else:
            self._sleep()

    def _resolve(self) -> int:
        """Ask each stream's head, and finish what has completed: how many that were."""
        ready: list[tuple[_Lane, Point]] = []
        faults: list[tuple[_Lane, Exception]] = []
        # One bracket around all queries: leaving another thread's graph capture alone costs 1.5 µs.
        with self._relaxed():
            # A copy: a garbage collection in here may close a task, whose end makes a new lane.
            for lane in tuple(self._lanes.values()):
                points = lane.points
                if points:
                    query = lane.engine.driver.query
                    try:
                        while query(points[0].event):
                            ready.append((lane, points.popleft()))
                            if not points or len(ready) >= _BATCH:
                                break
                    except Exception as error:
                        faults.append((lane, error))
        self.pending -= len(ready)
        settle = self.door.settle
        for lane, point in ready:
            if point is lane.armed:
                self._disarm(lane)
            waiter = point.waiter
            point.finish(None)
            if waiter is not None:
                settle(waiter, None)
        for lane, fault in faults:
            self._fault(lane, fault)
        return len(ready) + len(faults)

    def _disarm(self, lane: _Lane) -> None:
        token, lane.armed, lane.token = lane.token, None, None
        lane.engine.driver.disarm(token)

    def _fault(self, lane: _Lane, cause: Exception) -> None:
        """The device reported an error: a sticky one reaches everybody who waits for the device."""
        engine = lane.engine
        # Taken before anything is resolved: the oldest are the likeliest culprits.
        # A copy at once: staging threads take theirs out meanwhile.
        oldest = [repr(operation) for operation in tuple(self.operations)[:3]]
        error = engine.fault(cause, oldest)
        if not isinstance(error, DeviceLostError):
            self._fail(lane, 1, error)  # it belongs to whoever was asked about
            return
        for other in list(self._lanes.values()):
            if other.engine is engine:
                self._fail(other, len(other.points), error)

    def _fail(self, lane: _Lane, count: int, error: BaseException) -> None:
        for _ in range(min(count, len(lane.points))):
            point = lane.points.popleft()
            self.pending -= 1
            if point is lane.armed:
                lane.armed = lane.token = None  # its notification may still come: nobody reuses it
            waiter, point.waiter = point.waiter, None
            point.finish(error)
            if waiter is not None:
                self.door.settle(waiter, fresh(error))

    # -- sleeping ----------------------------------------------------------------------------------

    def _sleep(self) -> None:
        # First say that we sleep, then arm: a notification that fires at once must find a sleeper.
        # One that fired before the arming was seen cannot be lost either: the callback is enqueued
        # behind the event and runs, at the earliest, after it was enqueued.
        self.sleeping = True
        self._busy = False
        for lane in tuple(self._lanes.values()):
            if lane.points and lane.armed is not lane.points[0]:
                self._arm(lane)

    def _arm(self, lane: _Lane) -> None:
        # A lane whose armed point is not its head has none armed: heads leave through _disarm.
        point = lane.points[0]
        try:
            token = lane.engine.driver.arm(point.event, self._signal(lane.engine))
        except Exception:
            return  # the watchdog's look will meet the same error, at a query
        if token is not None:
            self.notifications += 1
            lane.armed, lane.token = point, token

    def _signal(self, engine: Engine) -> Signal:
        """Straight into the loop. While somebody measures wake-ups, every 16th goes through the notifier's
        thread, which can tell when it began; that takes one thread's waking up more."""
        if self.pipe is None or (wakeup_observers and self.notifications % 16 == 0):
            return engine.signal
        return self.pipe

    def wake(self) -> None:
        """Somebody may have completed. From any thread; several calls make one look."""
        if self._posted.acquire(blocking=False):
            self._woken_at = perf_counter() if wakeup_observers else None
            try:
                self.door.post(self._on_wake)
            except DoorClosed:
                self._posted.release()
                self.abandon()
        elif self.door.closed:  # the post that holds the lock went down with its loop
            self.abandon()

    def _on_wake(self) -> None:
        woken_at = self._woken_at
        self._posted.release()
        if woken_at is not None:
            emit(wakeup_observers, perf_counter() - woken_at)
        self._awake()

    def _awake(self) -> None:
        self.sleeping = False
        if self.pending and not self._busy:
            self._busy = True
            self._look()

    # -- the end -----------------------------------------------------------------------------------

    def abandon(self) -> list[Point]:
        """The loop is closed, or no longer ours: hand what is still in flight to the notifier.

        Returns those points that were waited for in vain; not those that a thread has only just handed in.
        """
        if not self._abandoned:
            self._stop_reading()
        self._abandoned = True
        points: list[Point] = []
        for lane in list(self._lanes.values()):
            point, token = lane.armed, lane.token
            lane.armed = lane.token = None
            if point is not None:
                point.callback = partial(_and_disarm, lane.engine.driver, token, point.callback)
            while lane.points:
                points.append(lane.points.popleft())
        late: list[Point] = []
        while self.inbox:
            try:
                late.append(self.inbox.popleft()[2])
            except IndexError:
                break
        self.pending = 0
        self.sleeping = False
        self.orphan(points + late)
        return points

    def orphan(self, points: list[Point]) -> None:
        """Let the notifier look after ``points``. The loop may go on without us, and so its waiters."""
        for point in points:
            if point.waiter is not None:
                waiter, point.waiter = point.waiter, None
                point.callback = partial(self._settle_late, waiter, point.callback)
        if points:
            points[0].engine.notifier.adopt(points)

    @property
    def closed(self) -> bool:
        """Is the loop gone, without having told us?"""
        return self.door.closed

    def _settle_late(
        self,
        waiter: Any,
        first: Callable[[BaseException | None], None] | None,
        error: BaseException | None,
    ) -> None:
        if first is not None:
            first(error)
        try:
            self.door.post(partial(self.door.settle, waiter, error))
        except DoorClosed:
            pass  # the waiter went down with its loop


def _copied(items: deque[T]) -> list[T]:
    while True:
        try:
            return list(items)
        except RuntimeError:  # a garbage collection in here has ended a task, whose end is one more
            continue


def _and_disarm(
    driver: Driver,
    token: Any,
    callback: Callable[[BaseException | None], None] | None,
    error: BaseException | None,
) -> None:
    """An armed point that lost its reactor is over: its notification's resources may be used again."""
    if error is None:
        driver.disarm(token)
    if callback is not None:
        callback(error)
