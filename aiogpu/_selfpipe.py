"""The way from a driver's callback straight into a sleeping event loop: a pipe that the loop reads.

Law of this file: *one byte is in the stream's buffer, or in the pipe.* A host callback is a C function of
one pointer. ``fflush`` is one: it writes what the buffer of a C stream holds, so that the loop's selector
returns; no thread of ours stands in between, nobody wants the GIL (the self-pipe trick, with the C library's
own write). Once the byte is in the pipe, further callbacks write nothing, and need not: the loop is about to
read, and it loads the next byte *before* it looks at what has completed. What completes after that look finds
the byte loaded; what completed earlier is seen by it.

As every notification it is a hint. Nobody minds one too many, from a callback that was late, say.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from ._loops import Door

__all__ = ["SelfPipe", "open_pipe"]


class SelfPipe:
    """A pipe with a C stream at its write end. Never closed: a callback may come at any time."""

    def __init__(self) -> None:
        libc: Any = ctypes.CDLL(None)  # functions of a CDLL release the GIL around the call
        libc.fdopen.restype = ctypes.c_void_p
        self._purge = getattr(libc, "__fpurge")  # as an attribute the class would mangle it
        self.fd, write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(write, False)
        stream = libc.fdopen(write, b"w")
        if not stream:
            os.close(self.fd)
            os.close(write)
            raise OSError("fdopen failed")
        #: For a driver: the host callback and its argument.
        self.function = ctypes.cast(libc.fflush, ctypes.c_void_p).value or 0
        self.argument: int = stream
        self._libc = libc
        self._stream = ctypes.c_void_p(stream)
        # This makes the buffer, so that nothing is allocated on a driver's thread. It is libc's: one of ours
        # would be gone when libc writes out all streams at exit.
        self._load()

    def post(self) -> None:
        """Wake the loop. From any thread, with or without Python."""
        self._libc.fflush(self._stream)

    def take(self) -> None:
        """The loop is awake, and about to look."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 64)
        self._load()

    def reset(self) -> None:
        """For the next loop."""
        self.post()
        self.take()

    def purge(self) -> None:
        """In the child of a fork: its end of the process must not write into whatever has the number then."""
        self._purge(self._stream)

    def _load(self) -> None:
        self._libc.fputc(ord("!"), self._stream)


_all: list[SelfPipe] = []
_idle: list[SelfPipe] = []


def open_pipe(door: Door, awake: Callable[[], object]) -> tuple[SelfPipe | None, Callable[[], None]]:
    """A pipe that calls ``awake()`` on the loop's thread when somebody posts, and what ends that.

    ``None`` where this system or this loop has no such thing.
    """
    pipe = _take_or_make()
    if pipe is None:
        return None, _nothing

    def readable() -> None:
        pipe.take()
        awake()

    mine = [pipe]

    def over() -> None:
        with contextlib.suppress(IndexError):  # the second time
            _idle.append(mine.pop())

    try:
        return pipe, door.on_readable(pipe.fd, readable, over)
    except NotImplementedError:
        over()
        return None, _nothing


def _take_or_make() -> SelfPipe | None:
    try:
        pipe = _idle.pop()
        pipe.reset()
        return pipe
    except IndexError:
        pass
    if sys.platform != "linux":
        return None
    try:
        pipe = SelfPipe()
    except (OSError, AttributeError):  # no descriptors left, an unusual libc
        return None
    _all.append(pipe)
    return pipe


def _nothing() -> None:
    pass


def _after_fork_in_child() -> None:
    """The parent's loops read these."""
    for pipe in _all:
        pipe.purge()
    _all.clear()
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
