"""Copy threads: host memory copied and touched by several threads at once, a piece each.

Law of this file: whoever asks, helps. A piece waits for nothing, and the thread that waits for its pieces
takes them itself as long as there are any. So a batch gets done without any help, too: on two cores, with all
copy threads busy elsewhere, at the end of the interpreter. No circle of waiting can pass through here.

The pieces are libc's ``memmove`` and ``memset`` with the GIL released, not torch's parallel ``copy_``: that
obeys ``torch.set_num_threads`` and ``OMP_NUM_THREADS``, which are the whole process's (servers set them to
1), and OpenMP makes a team of threads for *each* thread that calls it. One ``memmove`` is also faster than
one thread's ``copy_`` (10.3 against 8.7 GB/s on an EPYC).
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import torch

from .._workers import WorkerPool

__all__ = ["Batch", "Crew", "Part", "Piece", "copying", "touching"]

Piece = Callable[[], object]

#: Pieces that a copy thread does for one transfer before it looks who else is waiting.
_TURN = 8

#: Torch copies fewer elements than this on the calling thread (ATen's ``GRAIN_SIZE``).
_GRAIN = 32768


def copying(dst: torch.Tensor, src: torch.Tensor, nbytes: int) -> list[Piece]:
    """``dst.copy_(src)`` in pieces of ``nbytes``; both rows of memory without gaps, of one dtype."""
    to, start, end = dst.data_ptr(), src.data_ptr(), src.numel() * src.element_size()
    keep = (dst, src)  # until the last piece is done: addresses keep nothing
    return [partial(_move, keep, to + at, start + at, min(nbytes, end - at)) for at in range(0, end, nbytes)]


def touching(block: torch.Tensor, nbytes: int) -> list[Piece]:
    """Every page of ``block`` written, in pieces of ``nbytes``: page faults taken in parallel."""
    start, end = block.data_ptr(), block.numel() * block.element_size()
    return [partial(_clear, block, start + at, min(nbytes, end - at)) for at in range(0, end, nbytes)]


def _move(keep: object, to: int, start: int, nbytes: int) -> None:
    ctypes.memmove(to, start, nbytes)


def _clear(keep: object, start: int, nbytes: int) -> None:
    ctypes.memset(start, 0, nbytes)


class Part:
    """Some pieces that are waited for together."""

    __slots__ = ("_gate", "_left", "_lock", "error")

    def __init__(self, pieces: int) -> None:
        self.error: BaseException | None = None
        self._left = pieces
        self._lock = threading.Lock()
        self._gate = threading.Lock()  # open once nothing is left
        if pieces:
            self._gate.acquire()

    @property
    def done(self) -> bool:
        return self._left == 0

    def block(self) -> None:
        """Until other threads have done what is left."""
        with self._gate:
            pass

    def run(self, piece: Piece) -> None:
        try:
            piece()
        except BaseException as error:
            self.error = error
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._gate.release()


class Crew:
    """``threads`` that copy at the same time, the asking one counted."""

    def __init__(self, threads: int, enter_thread: Callable[[], None]) -> None:
        self.threads = max(1, threads)
        self._pool = WorkerPool("copy", self.threads - 1, enter_thread)
        # Torch's own copies between different orders of memory run on one thread, so that there is one
        # OpenMP team for all of them.
        self._reordering = WorkerPool("reorder", 1, enter_thread)

    def batch(self) -> Batch:
        return Batch(self)

    def each(self, pieces: Iterable[Piece]) -> None:
        """Do all ``pieces``; returns when they are done."""
        batch = Batch(self)
        batch.wait(batch.add(pieces))

    def reorder(self, dst: torch.Tensor, src: torch.Tensor) -> Part:
        """``dst.copy_(src)`` between any strides, with as many threads as torch thinks right."""
        part = Part(1)
        job = partial(part.run, partial(_copy, dst, src))
        if src.numel() < _GRAIN or not self.call(job, self._reordering):
            job()
        return part

    def call(self, job: Callable[[], None], pool: WorkerPool | None = None) -> bool:
        """Give ``job`` to a copy thread; False at the end of the interpreter, when there are none."""
        try:
            (pool or self._pool).submit(job)
        except RuntimeError:
            return False
        return True

    def close(self, timeout: float) -> bool:
        """End the threads; what is asked for later, the asking thread does alone."""
        copying, reordering = self._pool.close(timeout), self._reordering.close(timeout)
        return copying and reordering


class Batch:
    """One transfer's pieces, done in the order in which they were added."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._pieces: deque[tuple[Part, Piece]] = deque()
        self._lock = threading.Lock()
        self._helpers = 0

    def add(self, pieces: Iterable[Piece]) -> Part:
        pieces = list(pieces)
        part = Part(len(pieces))
        self._pieces.extend((part, piece) for piece in pieces)
        # After the pieces: a helper that leaves looks once more under this lock, so either it sees
        # them or it is no longer counted here.
        with self._lock:
            wanted = min(self._crew.threads - 1, len(self._pieces) - 1)  # this thread takes one itself
            more = max(0, wanted - self._helpers)
            self._helpers += more
        for _ in range(more):
            if not self._crew.call(self._help):
                self._leave()
        return part

    def wait(self, part: Part) -> None:
        """Return when ``part`` is done, having helped. Raises what a piece of it has raised."""
        while not part.done and self._one():
            pass
        part.block()
        if part.error is not None:
            raise part.error

    def _one(self) -> bool:
        try:
            part, piece = self._pieces.popleft()
        except IndexError:
            return False
        part.run(piece)
        return True

    def _help(self) -> None:
        for _ in range(_TURN):
            if not self._one():
                with self._lock:
                    if not self._pieces:
                        self._helpers -= 1
                        return
        # Somebody else's pieces may be waiting for this thread: to the end of the queue.
        if not self._crew.call(self._help):
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._helpers -= 1


def _copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    with torch.inference_mode(dst.is_inference()), torch.no_grad():
        dst.copy_(src)
