"""Copy threads: the segments of all transfers, done by several threads at once, a segment each.

Law of this file: whoever asks, helps, and the others take turns between those who ask: one segment of each,
round and round. A batch gets done without any help, too: on one core, with all copy threads busy
elsewhere, at the end of the interpreter.

A segment is large (megabytes) and all of it is done by the thread that takes it, from the chunk to the
submission: a hand-over between threads costs 50 to 100 µs, and each time a thread comes back from a copy it
has to get the GIL, for which 16 threads with half a megabyte each stand in a queue (13 GB/s; 8 threads with
2 MB each: 31).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from .._workers import WorkerPool

__all__ = ["Crew"]

#: Does the segment with this number.
Step = Callable[[int], object]


class _Batch:
    """Segments that are waited for together. Its fields change under the crew's lock."""

    __slots__ = ("busy", "count", "error", "gate", "next", "step")

    def __init__(self, count: int, step: Step) -> None:
        self.count = count
        self.step = step
        #: The segment that is taken next.
        self.next = 0
        #: Segments that somebody is doing.
        self.busy = 0
        self.error: BaseException | None = None
        self.gate = threading.Lock()  # open once there is nothing to do nor being done
        self.gate.acquire()


class Crew:
    """``threads`` that do segments at the same time, the asking one counted; they run under ``no_grad``."""

    def __init__(self, threads: int, enter_thread: Callable[[], None], name: str = "copy") -> None:
        self.threads = max(1, threads)

        def enter() -> None:
            torch.set_grad_enabled(False)  # this thread's, for good
            enter_thread()

        self._pool = WorkerPool(name, self.threads - 1, enter)
        # Re-entrant, as all our locks: a garbage collection may run code that starts a transfer.
        self._lock = threading.RLock()
        self._batches: deque[_Batch] = deque()
        self._helpers = 0

    def run(self, count: int, step: Step, *, help: bool = True) -> None:
        """Do ``step(0)`` to ``step(count - 1)``; returns when all are done.

        What one raises is raised here, when none of them runs any more; those that nobody has begun by then
        are left out. The caller must be a worker thread under ``no_grad``. Without ``help`` it only waits, if
        the crew has threads of its own.
        """
        if count == 1 and help:
            step(0)
        elif count:
            batch = _Batch(count, step)
            helped = self._ask(batch, count - help)
            if help or not helped:
                self._do_all(batch)
            self._wait_for(batch)

    def close(self, timeout: float) -> bool:
        """End the threads; what is asked for later, the asking thread does alone."""
        return self._pool.close(timeout)

    def _ask(self, batch: _Batch, wanted: int) -> bool:
        """Have up to ``wanted`` other threads help; is anybody there?"""
        with self._lock:
            self._batches.append(batch)
            # Counted under the lock under which a helper leaves: so either it sees the batch, or it is
            # no longer counted here.
            more = min(self.threads - 1 - self._helpers, wanted)
            self._helpers += more
        for left in range(more, 0, -1):
            try:
                self._pool.submit(self._help)
            except RuntimeError:  # the end of the interpreter
                with self._lock:
                    self._helpers -= left
                break
        return self._helpers > 0

    def _help(self) -> None:
        """What a copy thread does until there is nothing to do."""
        while (turn := self._turn()) is not None:
            self._do(*turn)
            del turn  # while it waits for another turn, it must not hold the last one's tensors

    def _turn(self) -> tuple[_Batch, int] | None:
        with self._lock:
            while self._batches:
                batch = self._batches.popleft()
                index = self._take(batch)
                if index is not None:
                    self._batches.append(batch)  # behind the others
                    return batch, index
            self._helpers -= 1
            return None

    def _do_all(self, batch: _Batch) -> None:
        while (index := self._take(batch)) is not None:
            self._do(batch, index)

    def _take(self, batch: _Batch) -> int | None:
        with self._lock:
            index = batch.next
            if index == batch.count:
                return None
            batch.next += 1
            batch.busy += 1
            return index

    def _do(self, batch: _Batch, index: int) -> None:
        error = None
        try:
            batch.step(index)
        except BaseException as raised:
            error = raised
        with self._lock:
            if error is not None:
                batch.next = batch.count
                batch.error = batch.error or error
            batch.busy -= 1
            if not batch.busy and batch.next == batch.count:  # becomes true once: nothing is taken any more
                batch.gate.release()
        del error  # its frames have this one in them

    def _wait_for(self, batch: _Batch) -> None:
        batch.gate.acquire()
        with self._lock:
            if batch in self._batches:
                self._batches.remove(batch)
        error, batch.error = batch.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error, batch
