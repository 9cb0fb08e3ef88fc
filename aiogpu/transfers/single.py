"""One ordinary tensor: the short way of the calls that are made most often.

Law of this file: it keeps every promise of the general way, for a fraction of its calls. What is not entirely
ordinary (a subclass, another layout, torch's modes, a conversion) it leaves alone before it has done
anything, and so it does when it runs out of memory or slots: the caller goes the general way then, which
meets the same and knows what to do.

Ordinary is a tensor whose bytes, in order, are its value. So between the slot and host memory it is bytes
that move, by ``memmove``, which knows neither grad nor inference mode. The slot of an upload is filled
within the call: its source is free afterwards.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from .._engine import Engine
from .._operation import Operation
from .._runtime import Runtime
from .._tasks import current_task
from .jobs import broke_off, over, slot_view
from .plan import interposed, neutral
from .uploads import room_for

__all__ = ["download", "is_ordinary", "own", "upload"]

#: Page-locked sources up to this much go straight onto the caller's stream: torch's allocator has blocks of
#: this size at hand (its small pool), and the copy takes 20 µs, less than a hand-over to a thread.
DIRECT_BYTES = 1024 * 1024

#: Formats whose bytes are the value: not quantized or packed, nor complex (which may be conjugated).
_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    )
)

#: With the GIL: it takes some microseconds, and another thread may keep it for milliseconds.
_memmove = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)

_HOST = torch.device("cpu")
_AS_IT_IS = nullcontext()
_function_modes: Any = torch._C._len_torch_function_stack


def is_ordinary(x: Any) -> bool:
    """May ``x`` go the short way, with torch's modes as they are now?"""
    return (
        type(x) is torch.Tensor
        and not _function_modes()  # first: they would see what is asked next
        and not interposed()
        and forward_ad._current_level < 0  # it may have a tangent
        and x.dtype in _DTYPES
        and x.layout is torch.strided
        and not x.is_nested
        and x.is_contiguous()
        and not x.is_neg()
        and 0 < x.nbytes <= DIRECT_BYTES
        and x.data_ptr() != 0  # it has memory, unlike meta tensors and autograd's zeros
    )


def own(operation: Operation[Any]) -> None:
    """The task that starts a transfer ends after it."""
    task = current_task()
    if task is not None:
        operation._owner, operation._lease = task.operations, task.lease.stream
        task.operations.add(operation)


# -- the calls: None when they have left everything alone ---------------------------------------------------


def upload(
    runtime: Runtime, engine: Engine, src: torch.Tensor, dst: torch.Tensor | None = None
) -> Operation[Any] | None:
    """``to_device(src)``, or ``copy_(dst, src)``, from host memory, onto the current stream."""
    if runtime.debug or not src.is_cpu:
        return None
    if src.requires_grad if dst is None else dst.device != engine.device or not _alike(dst, src):
        return None
    if src.requires_grad:
        src = src.detach()  # a page-locked one is copied by torch itself, in whatever grad mode there is
    nbytes, slot = src.nbytes, None
    if nbytes > engine.slots.nbytes:
        bounded = runtime.max_inflight_bytes is not None
        if bounded or not engine.driver.is_pinned(src):
            return None
    with _beside_captures(engine):
        there = _new_like(src, engine.device) if dst is None else dst
        if there is None:
            return None
        if nbytes <= engine.slots.nbytes:
            slot = engine.slots.take_free()
            if slot is None:
                return None
            _memmove(slot.data_ptr(), src.data_ptr(), nbytes)
        flight = _Upload(engine, slot, there, src)
        what = "to_device" if dst is None else "copy_"
        return flight.start(runtime, what, there, src if slot is None else slot_view(slot, src))


def download(
    runtime: Runtime,
    engine: Engine,
    src: torch.Tensor,
    what: str = "to_host",
    dst: torch.Tensor | None = None,
) -> Operation[Any] | None:
    """``to_host(src)``, ``item(src)``, or ``copy_(dst, src)`` to host memory, behind the current stream's
    work."""
    nbytes = src.nbytes
    if runtime.debug or nbytes > engine.slots.nbytes or src.device != engine.device:
        return None
    if dst is not None and not (dst.is_cpu and _alike(dst, src)):
        return None
    host = _new_like(src, _HOST) if dst is None else dst
    if host is None:
        return None
    if src.requires_grad:
        src = src.detach()
    with _beside_captures(engine):
        slot = engine.slots.take_free()
        if slot is None:
            return None
        flight = _LANDINGS[what](engine, slot, src, host)
        return flight.start(runtime, what, slot_view(slot, src), src)


def _alike(dst: torch.Tensor, src: torch.Tensor) -> bool:
    """Are the bytes of ``src`` those that ``dst`` is to have?"""
    same = dst.shape == src.shape and dst.dtype is src.dtype
    return same and is_ordinary(dst) and not (dst.is_inference() or dst.requires_grad)


def _beside_captures(engine: Engine) -> AbstractContextManager[None]:
    return engine.driver.relaxed() if engine.driver.captures else _AS_IT_IS


def _new_like(x: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    make = torch.empty_like if device is _HOST else room_for
    try:
        if torch.is_inference_mode_enabled():
            with torch._C._InferenceMode(False):  # results are ordinary tensors
                return make(x, device=device)
        return make(x, device=device)
    except Exception:  # out of memory, most likely
        return None


# -- in flight ----------------------------------------------------------------------------------------------


class _Flight:
    """One transfer in flight: the callback of its point, which keeps what the device uses until then."""

    __slots__ = ("device_side", "engine", "host_side", "operation", "slot")
    up = False

    def __init__(
        self, engine: Engine, slot: torch.Tensor | None, device_side: torch.Tensor, host_side: Any
    ) -> None:
        self.engine = engine
        self.slot = slot
        self.device_side = device_side
        self.host_side = host_side

    def start(self, runtime: Runtime, what: str, dst: torch.Tensor, src: torch.Tensor) -> Operation[Any]:
        """Submit the copy; from here on the operation tells how it went."""
        engine, up = self.engine, self.up
        driver = engine.driver
        reactor = runtime.reactor
        operation: Operation[Any] = Operation(what, reactor, to_host=not up, site=4)
        self.operation = operation
        operation._nbytes = src.nbytes
        own(operation)
        stream = driver.current()
        try:
            driver.copy(dst, src, stream)
            event = driver.record(stream)
        except BaseException as error:
            broke_off(runtime, engine, operation, stream, self, self.release, error)
            return operation
        point = reactor.watch(engine, stream, event, self)
        if up:
            if what == "to_device":
                operation.moved(driver, [dst], {stream.raw})
            operation.launched(dst, (stream, point))
        else:
            operation.launched(None, None)
        return operation

    def __call__(self, error: BaseException | None) -> None:
        """The device is done with it, well or badly."""
        value = None
        if error is None:
            try:
                value = self.land()
            except BaseException as raised:
                error = raised
        over(self.engine, self.release, error)
        if error is None:
            self.operation.complete(value)
        else:
            self.operation.fail(error)

    def land(self) -> Any:
        raise NotImplementedError

    def release(self) -> None:
        slot, self.slot = self.slot, None
        if slot is not None:
            self.engine.slots.give(slot)


class _Upload(_Flight):
    __slots__ = ()
    up = True

    def land(self) -> Any:
        return self.device_side


class _Download(_Flight):
    __slots__ = ()

    def land(self) -> Any:
        host, slot = self.host_side, self.slot
        assert slot is not None
        # No more than the slot has: by mistake, a destination may have been resized meanwhile.
        _memmove(host.data_ptr(), slot.data_ptr(), min(host.nbytes, slot.nbytes))
        return host


class _DownloadInto(_Download):
    __slots__ = ()

    def land(self) -> Any:
        torch.autograd.graph.increment_version(self.host_side)  # which does not see what memmove writes
        return super().land()


class _Number(_Download):
    __slots__ = ()

    def land(self) -> Any:
        with neutral():
            return super().land().item()


_LANDINGS = {"to_host": _Download, "copy_": _DownloadInto, "item": _Number}
