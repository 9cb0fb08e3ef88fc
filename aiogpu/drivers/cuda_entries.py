"""The CUDA driver's own entries, for what torch does not offer, and a thread's state that goes with them.

Law of this file: raw handles and ``cuda.bindings`` appear here alone (``cuda`` passes handles through).
Every entry is a C function that releases the GIL, but for the one that only swaps a thread's own number.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["RELAXED", "Entries", "Relaxed"]

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Entries:
    """The driver entries that torch does not offer, as C functions."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        def entry(name: str, *arguments: Any, kind: Any = ctypes.CFUNCTYPE) -> Any:
            error, pointer, *_ = driver.cuGetProcAddress(name.encode(), 12000, 0)
            if int(error) != 0 or not int(pointer):
                raise RuntimeError(f"the CUDA driver has no entry {name} (error {int(error)})")
            return kind(ctypes.c_int, *arguments)(int(pointer))

        pointer = ctypes.c_void_p
        self.launch_host_func = entry("cuLaunchHostFunc", pointer, pointer, pointer)
        self.create_stream = entry("cuStreamCreateWithPriority", pointer, ctypes.c_uint, ctypes.c_int)
        # Twice around every look of a loop, and it waits for nothing: who lets go of the GIL for it may have
        # to wait until it comes back.
        self.exchange_mode = entry("cuThreadExchangeStreamCaptureMode", pointer, kind=ctypes.PYFUNCTYPE)
        self._brackets: list[Relaxed] = []
        # Not torch's cudaHostRegister: a failed one would stay behind as the runtime's "last error", which
        # torch reports at this thread's next kernel.
        self.register = entry("cuMemHostRegister", pointer, ctypes.c_size_t, ctypes.c_uint)
        self.unregister = entry("cuMemHostUnregister", pointer)
        self._current_context = entry("cuCtxGetCurrent", pointer)
        self._push_context = entry("cuCtxPushCurrent", pointer)
        self._pop_context = entry("cuCtxPopCurrent", pointer)
        self._context = ctypes.c_void_p()  # the device's primary one: torch has just made it current
        self._current_context(ctypes.byref(self._context))

    def relaxed(self) -> Relaxed:
        """A bracket for one ``with`` block."""
        try:
            return self._brackets.pop()
        except IndexError:
            return Relaxed(self.exchange_mode, self._brackets)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Raw driver calls need a current context. A thread has one once a call of the CUDA runtime's has
        given it one, which setting the device does not: not where the device was that one before."""
        self._push_context(self._context)
        try:
            yield
        finally:
            self._pop_context(ctypes.byref(ctypes.c_void_p()))


class Relaxed:
    """The calling thread's capture mode is relaxed within the block.

    One event query or pinned allocation anywhere in the process kills a capture that another thread
    runs in CUDA's global mode (torch's default), unless the querying thread is in relaxed mode.
    """

    __slots__ = ("_address", "_exchange", "_idle", "_mode")

    def __init__(self, exchange: Callable[[Any], int], idle: list[Relaxed]) -> None:
        self._exchange = exchange
        self._idle = idle
        self._mode = ctypes.c_int(RELAXED)
        self._address = ctypes.addressof(self._mode)

    def __enter__(self) -> None:
        self._exchange(self._address)

    def __exit__(self, *_: object) -> None:
        self._exchange(self._address)
        self._mode.value = RELAXED  # what the block has made of it is not the next one's
        self._idle.append(self)
