"""aiogpu's own threads: for blocking code of users, and for staging copies.

Law of this file: threads of ours, not the loop's shared pool, so that neither starves the other; daemons,
so that a function which never returns cannot keep the interpreter; each set to the engine's device and
to relaxed capture mode once, and scrubbed of leaked torch modes by whoever runs jobs on it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

__all__ = ["StagingThreads", "WorkerPool"]

log = logging.getLogger("aiogpu")

Job = Callable[[], object]


class _Worker:
    """A thread, and the gate at which it waits for its next job; ``None``: the end."""

    __slots__ = ("gate", "job")

    def __init__(self) -> None:
        self.job: Job | None = None
        self.gate = threading.Lock()
        self.gate.acquire()

    def go(self, job: Job | None) -> None:
        self.job = job
        self.gate.release()


class WorkerPool:
    """Up to ``limit`` threads, started as needed, newest idle first; further jobs queue.

    Each thread waits at a gate of its own: several that are woken one after the other wake up at the same
    time. Those that share a queue wake each other in turn, which takes 0.1 ms for each of them.

    Jobs must not raise: a job reports its outcome itself.
    """

    def __init__(self, name: str, limit: int, enter_thread: Callable[[], None]) -> None:
        self.limit = limit
        self._name = name
        self._enter_thread = enter_thread
        # Re-entrant, as all our locks: a garbage collection may run code that submits something. It may come
        # between any two steps under the lock, so each of them leaves things in order.
        self._lock = threading.RLock()
        self._jobs: deque[Job] = deque()
        self._idle: list[_Worker] = []
        self._closed = False
        #: Threads that there are, or that somebody is starting.
        self._count = 0
        self._threads: list[threading.Thread] = []
        _close_at_exit(self)

    def submit(self, job: Job) -> None:
        """Run ``job`` on a thread of ours, soon. Raises ``RuntimeError`` once closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("aiogpu's worker threads have ended: the interpreter is exiting")
            self._jobs.append(job)
            self._hand_out()
            # Nothing is called, nor allocated, between the comparison and the addition: no collection comes
            # between them, and there are never more threads than the limit.
            start = bool(self._jobs) and self._count < self.limit
            self._count += start
        if start:
            # Outside of the lock: it waits for the new thread, in which a garbage collection may submit.
            self._start(job)

    def _hand_out(self) -> None:
        """Under the lock: jobs to idle threads."""
        while self._jobs:
            try:
                worker = self._idle.pop()
            except IndexError:
                return  # all are busy: whoever is done next looks here again
            try:
                job = self._jobs.popleft()
            except IndexError:
                self._idle.append(worker)
                continue  # a collection may have brought one between the two steps
            worker.go(job)

    def _start(self, job: Job) -> None:
        name = f"aiogpu-{self._name}-{self._count}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
            with self._lock:
                self._threads.append(thread)
        except RuntimeError:  # the system has no more: those that there are do without it
            with self._lock:
                self._count -= 1
                if not self._count and job in self._jobs:
                    self._jobs.remove(job)
                    raise

    def _run(self) -> None:
        try:
            self._enter_thread()
        except Exception:  # a lost device: the jobs meet the same error, and report it
            log.exception("aiogpu: a worker thread could not be set to its device")
        worker = _Worker()
        while True:
            with self._lock:
                self._idle.append(worker)
                self._hand_out()
                if self._closed:
                    self._end_idle()
            worker.gate.acquire()
            job, worker.job = worker.job, None
            if job is None:
                return
            job()
            del job  # while it waits, a worker must not hold the last job's tensors

    def _end_idle(self) -> None:
        """Under the lock, closed: what idle threads wait for will not come."""
        while self._idle:
            self._idle.pop().go(None)

    def drop(self) -> None:
        """Forget the jobs that nobody has begun. For the end of the interpreter: nobody hears of them."""
        with self._lock:
            dropped, self._jobs = self._jobs, deque()
        del dropped

    def close(self, timeout: float) -> bool:
        """End the threads once their jobs have; False when some were still busy after ``timeout`` s."""
        with self._lock:
            self._closed = True
            self._end_idle()
            threads = list(self._threads)
        deadline = time.monotonic() + timeout
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


class StagingThreads:
    """Threads that carry out transfers, up to ``limit`` of short ones and as many of long ones at once.

    They submit and wait; the copying itself is shared out to others (``transfers.crew``). So there may be
    more of them than cores, and the short ones have threads of their own: none ever queues behind a long
    one. Those that only submit, and wait for nobody, have two threads each: with more they would take the GIL
    from each other at every call of CUDA's, which lets go of it.

    ``short_bytes``: a transfer of up to so many bytes is short.
    """

    def __init__(self, limit: int, short_bytes: int, enter_thread: Callable[[], None]) -> None:
        self._short_bytes = short_bytes
        self._pools = {
            (waits, short): WorkerPool(name + "-long" * (not short), limit if waits else 2, enter_thread)
            for waits, name in ((True, "staging"), (False, "submitting"))
            for short in (True, False)
        }

    def submit(self, job: Job, nbytes: float = 0, *, waits: bool = True) -> None:
        """Run ``job``, the transfer of ``nbytes`` in all. Raises ``RuntimeError`` once closed."""
        self._pools[waits, nbytes <= self._short_bytes].submit(job)

    def close(self, timeout: float) -> bool:
        """End the threads once their jobs have; False when some were still busy after ``timeout`` s."""
        deadline = time.monotonic() + timeout
        closed = [pool.close(max(0.0, deadline - time.monotonic())) for pool in self._pools.values()]
        return all(closed)


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


# The child of a fork has none of the threads, and perhaps a lock that one of them held.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)


def _close_at_exit(pool: WorkerPool) -> None:
    if not _pools:
        # A daemon thread that comes back from C++ code into a finalised interpreter is ended in the
        # middle of destructors that must not throw, which aborts the process. So they end first.
        atexit.register(_close_all)
    _pools.add(pool)


def _close_all() -> None:
    pools = list(_pools)
    for seconds in (3.0, 1.0):
        deadline = time.monotonic() + seconds
        busy = [pool for pool in pools if not pool.close(max(0.0, deadline - time.monotonic()))]
        for pool in busy:
            pool.drop()  # what nobody has begun: a thread that is still at work then is ended in the middle
        if not busy:
            return
