"""The CUDA driver: torch's streams and events, and the three things that torch does not offer.

Law of this file: everything that orders compute or copies goes through torch's own events and streams,
so that torch's sanitizer and profiler see it. The driver API is used for what torch lacks: streams of
our own (torch hands out 32 per priority, then the same ones again), the host callback, and the thread's
capture mode. Its entries are in ``cuda_entries``.

The host callback is a function of libc's (see :mod:`aiogpu._selfpipe`), enqueued through the driver's own
entry pointer: cuda-bindings before 13.5 wraps every host callback, a C function too, in a GIL
acquisition; a stream then stands still for as long as any thread holds the GIL, and a thread that
holds it while it waits for the driver's lock hangs the process.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from . import host_allocator, sanitizer
from .base import Driver, Event, Signal, Stream, StreamKind
from .cuda_entries import RELAXED, Entries
from .hostmem import cpus_near, pages

__all__ = ["CudaDriver"]

#: CUDA result codes after which every call on the context fails (CUDA driver API, "CUresult").
STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})

#: The same by text, for errors that carry no code.
STICKY_TEXT = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "launch failure",
    "launch timed out",
    "uncorrectable ECC",
    "context is destroyed",
)

# What every await calls, bound once; torch.cuda.Event's methods without their Python wrappers.
_get_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", None)
_set_stream: Any = getattr(torch._C, "_cuda_setStream", None)
_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_EventBase: Any = getattr(torch._C, "_CudaEventBase", None)
_record: Any = getattr(_EventBase, "record", None)
_wait: Any = getattr(_EventBase, "wait", None)
_query: Any = getattr(_EventBase, "query", None)

#: Notification streams opened at once: one for each stream that is waited for while its loop sleeps.
_NOTIFY_STREAMS = 32

_BLOCKING, _NON_BLOCKING = 0, 1  # CU_STREAM_DEFAULT, CU_STREAM_NON_BLOCKING
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for every device's context

#: Page-locked memory by address: registered with the process, whichever driver did it.
_registered: dict[int, torch.Tensor] = {}


class _Everywhere:
    """A thread's current device and its current stream on every device."""

    __slots__ = ("device", "raws")

    def __init__(self, device: int, raws: tuple[Any, ...]) -> None:
        self.device = device
        self.raws = raws


class CudaDriver(Driver):
    """One CUDA device. Made off the loop thread: it creates the context."""

    captures = True

    def __init__(self, device: torch.device, *, wake: str = "auto") -> None:
        if wake not in ("auto", "callback", "thread"):
            raise ValueError(f"wake is 'auto', 'callback' or 'thread', not {wake!r}")
        self.device = device
        self._index: int = device.index
        torch.cuda.init()
        torch.empty(1, device=device)  # the primary context, before any raw driver call
        self.enter_thread()
        self._events: list[torch.cuda.Event] = []
        self._known: dict[Any, Stream] = {}
        self._notify_streams: list[Stream] = []
        self._opening = threading.Lock()
        self.entries, self.missing = self._find_entries()
        self.enter_thread()  # once more: now it is known how to leave other threads' captures alone
        if wake == "callback" and self.entries is None:
            raise RuntimeError(f"host callbacks are not available: {self.missing}")
        self._waiters = _WaiterThreads(self) if wake == "thread" or not self.entries else None
        self.wake_mechanism = "waiter thread" if self._waiters else "host callback"
        self._sanitized = sanitizer.enabled()
        if self._sanitized:
            sanitizer.serialize()
        # Torch's own streams, the fallback, are non-blocking; and the sanitizer does not know legacy
        # semantics: in both cases the edges to the default stream must be made with events.
        self.legacy_orders = self.entries is not None and not self._sanitized
        self._notify_streams += [self.open_stream("copy") for _ in range(_NOTIFY_STREAMS)]
        host_allocator.register_in_pieces()
        if torch.cuda.device_count() > 1:
            self.swap = self._swap_many  # type: ignore[method-assign]
            self.restore = self._restore_many  # type: ignore[method-assign]

    @staticmethod
    def _find_entries() -> tuple[Entries | None, str]:
        try:
            return Entries(), ""
        except Exception as error:  # no cuda-python, a version that does not fit, ROCm
            return None, f"{type(error).__name__}: {error}"

    # -- the eight verbs ---------------------------------------------------------------------------

    def open_stream(self, kind: StreamKind, priority: int = 0) -> Stream:
        flags = _BLOCKING if kind == "compute" else _NON_BLOCKING
        if self.entries is None:
            native: torch.cuda.Stream = torch.cuda.Stream(self.device, priority=priority)
        else:
            handle = ctypes.c_void_p()
            with self.entries.context():
                code = self.entries.create_stream(ctypes.byref(handle), flags, priority)
            if code != 0:
                raise RuntimeError(f"cuStreamCreateWithPriority failed with CUDA error {code}")
            native = torch.cuda.ExternalStream(handle.value or 0, device=self.device)
        stream = self.adopt(native)
        self._known[stream.raw] = stream
        return stream

    def record(self, stream: Stream) -> Event:
        try:
            event = self._events.pop()
        except IndexError:
            event = torch.cuda.Event()
        _record(event, stream.native)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        _wait(event, stream.native)

    def query(self, event: Event) -> bool:
        ready: bool = _query(event)
        if ready and self._sanitized:
            event.synchronize()  # returns at once; tells the sanitizer that the host has seen it
        return ready

    def arm(self, event: Event, signal: Signal) -> Any:
        # On a stream of its own, so that the compute stream never stops for the host: an inline
        # callback stops it for about 42 µs each time. The stream is used again only after the event
        # was seen complete: a shared one would hold one waiter's notification behind another's event.
        try:
            stream = self._notify_streams.pop()
        except IndexError:
            self._more_notify_streams(signal)
            return None
        _wait(event, stream.native)
        if self._waiters is not None:
            self._waiters.arm(stream, signal)
        else:
            assert self.entries is not None
            code = self.entries.launch_host_func(
                stream.native.cuda_stream,
                signal.function,
                signal.argument,
            )
            if code != 0:
                # The watchdog looks anyway; a sticky error shows at its query.
                self._notify_streams.append(stream)
                return None
        return stream

    def disarm(self, token: Any) -> None:
        self._notify_streams.append(token)

    def _more_notify_streams(self, signal: Signal) -> None:
        """Open some more, on a thread of their own: now and then the driver lets the opening of a stream
        wait until the device is idle (seen: 500 ms, every 32 streams or so)."""

        def open_some() -> None:
            self.enter_thread()
            self._notify_streams += [self.open_stream("copy") for _ in range(_NOTIFY_STREAMS)]
            self._opening.release()
            signal.post()  # whoever went to sleep without a notification asks again

        if self._opening.acquire(blocking=False):
            threading.Thread(target=open_some, name="aiogpu-open-streams", daemon=True).start()

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream, wait: bool = False) -> None:
        saved = self.swap(stream.raw)
        try:
            if dst.is_inference():
                with torch.inference_mode():
                    dst.copy_(src, non_blocking=not wait)
            else:
                dst.copy_(src, non_blocking=not wait)
        finally:
            self.restore(saved)

    def copy_and_wait(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        # Torch waits for the stream in the same call, which lets go of the GIL once instead of three times.
        self.copy(dst, src, stream, wait=True)

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: Stream) -> None:
        if len(pairs) == 1:
            self.copy(*pairs[0], stream)
            return
        inference = any(dst.is_inference() for dst, _ in pairs)
        saved = self.swap(stream.raw)
        try:
            with torch.inference_mode() if inference else nullcontext():
                # One call of torch's lets go of the GIL once; between devices it is a loop of copy_.
                torch._foreach_copy_([dst for dst, _ in pairs], [src for _, src in pairs], non_blocking=True)
        finally:
            self.restore(saved)

    def pinned(self, nbytes: int, touch: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        if self.entries is None:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        block = pages(nbytes)
        (touch or torch.Tensor.zero_)(block)
        with self.entries.context():
            code = self.entries.register(block.data_ptr(), nbytes, _PORTABLE)
        if code != 0:
            raise RuntimeError(f"cuMemHostRegister failed with CUDA error {code}")
        # Kept until it is unregistered: memory that went back to the system registered would be taken for
        # page-locked when something else lies there.
        _registered[block.data_ptr()] = block
        return block

    def unpin(self, block: torch.Tensor) -> None:
        if _registered.pop(block.data_ptr(), None) is not None:
            assert self.entries is not None
            with self.entries.context():
                self.entries.unregister(block.data_ptr())

    def close(self) -> None:
        if self._waiters is not None:
            self._waiters.close()

    # -- the thread's current stream ---------------------------------------------------------------

    def swap(self, raw: Any) -> Any:
        saved = _get_stream(self._index)
        if saved != raw:
            _set_stream(*raw)
        return saved

    def restore(self, saved: Any) -> Any:
        raw = _get_stream(self._index)
        if raw != saved:
            _set_stream(*saved)
        return raw

    def everywhere(self) -> Any:
        return self._everywhere() if torch.cuda.device_count() > 1 else _get_stream(self._index)

    def _everywhere(self) -> _Everywhere:
        raws = tuple(map(_get_stream, range(torch.cuda.device_count())))
        return _Everywhere(torch._C._cuda_getDevice(), raws)

    def _swap_many(self, raw: Any) -> Any:
        saved = self._everywhere()
        if isinstance(raw, _Everywhere):
            self._install(raw, saved)
        else:
            _set_stream(*raw)  # makes its device current, too
        return saved

    def _restore_many(self, saved: Any) -> Any:
        now = self._everywhere()
        self._install(saved, now)
        return now

    def _install(self, wanted: _Everywhere, now: _Everywhere) -> None:
        for raw, old in zip(wanted.raws, now.raws, strict=True):
            if raw != old:
                _set_stream(*raw)
        # Not cudaSetDevice: it would make a context on a device that nobody has used.
        torch._C._cuda_maybeExchangeDevice(wanted.device)

    def current(self) -> Stream:
        raw = _get_stream(self._index)
        return self._known.get(raw) or self.adopt(raw)

    def adopt(self, native: Any) -> Stream:
        if isinstance(native, _Everywhere):
            native = native.raws[self._index]
        raw = native
        if not isinstance(native, tuple):
            raw = (native.stream_id, native.device_index, native.device_type)
        known = self._known.get(raw)
        if known is not None:
            return known
        if native is raw:
            native = torch.cuda.Stream(stream_id=raw[0], device_index=raw[1], device_type=raw[2])
        stream = Stream(self.device, raw, native)
        if raw[0] == 0:
            self._known[raw] = stream
        return stream

    def is_default(self, stream: Stream) -> bool:
        return bool(stream.raw[0] == 0)

    # -- verbs with a default ----------------------------------------------------------------------

    def recycle(self, event: Event) -> None:
        self._events.append(event)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        if tensor.device == self.device:
            tensor.record_stream(stream.native)

    def capturing(self) -> bool:
        try:
            return bool(_capturing())
        except RuntimeError as error:
            # A lost device captures nothing, and tells whoever submits to it next. Otherwise this is the
            # legacy stream, and a blocking stream is being captured: nothing may be put behind that now.
            return not self.lost(error)

    def relaxed(self) -> Any:
        if self.entries is None:
            return _NOTHING
        return self.entries.relaxed()

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)
        entries = getattr(self, "entries", None)
        if entries is not None:
            entries.exchange_mode(ctypes.byref(ctypes.c_int(RELAXED)))

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def synchronize_device(self) -> None:
        torch.cuda.synchronize(self.device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def result_memory(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        # From torch's own allocator, which knows about the copies that users make from it later.
        try:
            return torch.empty_strided(shape, stride, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError:  # no page-locked memory to be had: ordinary memory is slower, not wrong
            return None

    def empty_result_cache(self) -> int:
        with self.relaxed():  # torch asks events there
            return host_allocator.drop_cache()

    def near_cpus(self) -> frozenset[int]:
        found: Any = torch.cuda.get_device_properties(self.device)
        try:
            bus_id = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        except AttributeError:  # a torch that does not tell
            return frozenset()
        return cpus_near(bus_id)

    def lost(self, error: BaseException) -> bool:
        code = getattr(error, "error_code", None)
        if code is not None:
            return int(code) in STICKY
        return any(text in str(error) for text in STICKY_TEXT)


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NOTHING = _Nothing()


class _WaiterThreads:
    """The callback's place where there is none: a thread blocked on an event per waiting stream."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._jobs: queue.SimpleQueue[tuple[torch.cuda.Event, Signal] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0

    def arm(self, stream: Stream, signal: Signal) -> None:
        # torch.Event ignores blocking=True on CUDA; torch.cuda.Event sleeps instead of spinning.
        event = torch.cuda.Event(blocking=True)
        event.record(stream.native)
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                self._count += 1
                name = f"aiogpu-waiter-{self._count}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        self._jobs.put((event, signal))

    def _run(self) -> None:
        self._driver.enter_thread()
        while (job := self._jobs.get()) is not None:
            event, signal = job
            try:
                event.synchronize()
            except Exception:  # the fault shows to whoever queries; here only the wake-up counts
                pass
            finally:
                with self._lock:
                    self._idle += 1
                signal.post()

    def close(self) -> None:
        for _ in range(self._count):
            self._jobs.put(None)
