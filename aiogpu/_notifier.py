"""One thread that makes event loops look: when nobody has called, and where a driver cannot wake them itself.

Law of this file: a notification is a hint. It says neither who completed nor whether anything did; it
only makes loops look. Every :data:`PERIOD` seconds the thread wakes sleeping loops although nobody posted:
after a device fault callbacks may never run. Loops without a pipe (see ``_selfpipe``) are woken by it alone:
the driver posts a libc semaphore (``sem_post`` takes one pointer and returns, which is exactly a host
function's shape, so the driver thread runs C and never wants the GIL), and this thread sits in ``sem_wait``
with the GIL released.

One thread for the process rather than one per device: with hints that name nobody, a second thread
would wake the same loops.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import sys
import threading
import time
from typing import Any, Protocol

__all__ = ["Notifier", "PosixSignal", "Sleeper", "ThreadSignal"]

log = logging.getLogger("aiogpu")

#: Seconds between two looks at what nobody has announced. A fault is reported within twice this time.
PERIOD = 0.5


class Sleeper(Protocol):
    """A reactor as the notifier sees it."""

    sleeping: bool

    @property
    def closed(self) -> bool: ...

    def wake(self) -> None: ...


class Orphan(Protocol):
    """A pending point whose loop is gone: somebody must still let go of its buffers."""

    def look(self) -> bool:
        """True when it is over."""


class ThreadSignal:
    """The semaphore where libc has none (macOS, Windows); posted from Python threads only."""

    function = argument = 0

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)

    def post(self) -> None:
        self._semaphore.release()

    def wait(self, timeout: float | None) -> bool:
        return self._semaphore.acquire(timeout=timeout)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class PosixSignal:
    """A libc semaphore. ``function(argument)`` may be called by any thread, with or without Python."""

    def __init__(self) -> None:
        # CDLL functions release the GIL around the call. use_errno stays off: a timed-out wait and an
        # interrupted one are handled alike, by looking again.
        libc: Any = ctypes.CDLL(None)
        # 32 bytes in glibc on 64-bit machines; the memory must outlive every callback in flight, so
        # nobody frees it: the object is immortal (see Notifier).
        self._memory = ctypes.create_string_buffer(64)
        self.argument = ctypes.addressof(self._memory)
        self._semaphore = ctypes.c_void_p(self.argument)
        if libc.sem_init(self._semaphore, 0, 0) != 0:
            raise OSError("sem_init failed")
        self._libc = libc
        self.function = ctypes.cast(libc.sem_post, ctypes.c_void_p).value or 0
        # sem_timedwait measures the wall clock, which may jump; glibc 2.30 has the monotonic one.
        self._clockwait = getattr(libc, "sem_clockwait", None)

    def post(self) -> None:
        self._libc.sem_post(self._semaphore)

    def wait(self, timeout: float | None) -> bool:
        if timeout is None:
            return bool(self._libc.sem_wait(self._semaphore) == 0)
        clock = time.monotonic if self._clockwait else time.time
        deadline = clock() + timeout
        spec = _Timespec(int(deadline), int(deadline % 1 * 1e9))
        if self._clockwait:
            return bool(self._clockwait(self._semaphore, 1, ctypes.byref(spec)) == 0)
        return bool(self._libc.sem_timedwait(self._semaphore, ctypes.byref(spec)) == 0)


def _make_signal() -> PosixSignal | ThreadSignal:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            return PosixSignal()
    return ThreadSignal()


class Notifier:
    """The thread, the loops that it wakes, and the points whose loop is gone."""

    def __init__(self) -> None:
        self.signal = _make_signal()
        self.period = PERIOD
        self._sleepers: list[Sleeper] = []
        self._orphans: list[Orphan] = []
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def register(self, sleeper: Sleeper) -> None:
        """From now on ``sleeper`` is woken whenever it sleeps and something may have completed."""
        with self._lock:
            self._sleepers.append(sleeper)
            self._start()

    def unregister(self, sleeper: Sleeper) -> None:
        with self._lock:
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)

    def adopt(self, orphans: list[Any]) -> None:
        """Look after points until they are over: their loop cannot any more."""
        if orphans:
            with self._lock:
                self._orphans.extend(orphans)
                self._start()

    @property
    def orphans(self) -> int:
        """How many points have lost their loop and are still in flight."""
        return len(self._orphans)

    def _start(self) -> None:
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="aiogpu-notifier", daemon=True)
            self._thread.start()
            # Daemon threads that are inside C code when the interpreter goes down are killed where
            # they are. This one ends in good order instead.
            atexit.register(self.stop)
        else:
            self.signal.post()  # it may be in a wait without timeout

    def stop(self) -> None:
        """End the thread. Notifications that still come are counted by a semaphore nobody reads."""
        with self._lock:
            thread, self._thread, self._stopping = self._thread, None, True
        if thread is not None and thread.is_alive():
            self.signal.post()
            thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stopping:
            # Nothing to ask for: sleep until somebody registers, without a tick.
            busy = self._sleepers or self._orphans
            period = 0.02 if self._orphans else self.period
            self.signal.wait(period if busy else None)
            # Whatever goes wrong with one of them, the others still need this thread.
            for sleeper in list(self._sleepers):
                try:
                    if sleeper.sleeping or sleeper.closed:
                        sleeper.wake()
                except Exception:
                    log.exception("aiogpu: an event loop could not be woken")
            if self._orphans:
                self._sweep()

    def _sweep(self) -> None:
        with self._lock:
            orphans = list(self._orphans)
        over = {id(orphan) for orphan in orphans if _is_over(orphan)}
        if over:
            with self._lock:
                self._orphans = [o for o in self._orphans if id(o) not in over]


def _is_over(orphan: Orphan) -> bool:
    try:
        return orphan.look()
    except Exception:
        log.exception("aiogpu: work whose event loop has closed could not be wound up")
        return True
