"""Inside a task: another stream for a block, what is current, and tensors that are shared.

Law of this file: every change of stream is a fork or a join, made with events, so that no block needs to know
what the other stream is doing.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

import torch

from ._engine import Engine, find_engine, normalize
from ._errors import CaptureError
from ._reactor import Point
from ._runtime import current_runtime
from ._streams import Lease
from ._tasks import current_task
from .drivers.base import Stream
from .transfers.tree import tensors_of

__all__ = ["current_stream", "device", "share", "stream"]

T = TypeVar("T")


class stream:
    """A block of a task on another stream: forked at its start, joined at its end.

    ::

        with aiogpu.stream():
            y = f(x)                # beside what follows the block's start on the task's own stream
            await aiogpu.synchronize()

    Parameters
    ----------
    stream:
        A ``torch.cuda.Stream``; default: one is leased for the block.
    device, priority:
        Of the leased stream; default: the task's device, and 0 (lower is more urgent).

    Memory that the block uses must outlive it, or be marked with :func:`share` inside it.

    Raises
    ------
    RuntimeError
        Outside of a task.
    CaptureError
        Inside a CUDA-graph capture.
    """

    def __init__(
        self,
        stream: torch.Stream | None = None,
        *,
        device: torch.device | str | int | None = None,
        priority: int = 0,
    ) -> None:
        if stream is not None and not hasattr(stream, "stream_id"):
            raise TypeError(
                f"stream() takes a torch.cuda.Stream, not {stream!r}; a raw handle goes through "
                "torch.cuda.ExternalStream(handle)"
            )
        self._native = stream
        self._wanted = None if device is None else normalize(device)
        self._priority = priority
        self._lease: Lease | None = None
        self._saved: Any = None

    def __enter__(self) -> Any:
        task = current_task()
        if task is None:
            raise RuntimeError(
                "aiogpu.stream() works inside a task only, which restores the stream after every await: "
                "decorate the coroutine function with @aiogpu.task. Outside of tasks, and without an "
                "await in the block, use torch.cuda.stream()"
            )
        if self._saved is not None:
            raise RuntimeError("this aiogpu.stream() block is already entered: make one for each block")
        self._engine = engine = self._find(task.engine)
        driver = engine.driver
        if driver.capturing():
            raise CaptureError("aiogpu.stream() cannot fork a stream that is being captured into a graph")
        self._before = driver.current()
        self._task = task
        if self._native is None and not engine.compute.is_open(self._priority):
            engine.compute.open(self._priority)  # 0 and -1 are; a block cannot await the others
        if self._native is not None:
            self._stream = driver.adopt(self._native)
        else:
            self._lease = engine.compute.lease(self._priority)
            self._stream = self._lease.stream
        try:
            driver.order(self._stream, self._before)
        except BaseException as error:
            self._release(None)
            engine.rethrow(error)
        self._saved = driver.swap(self._stream.raw)
        return self._stream.native

    def _release(self, tail: Point | None) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release(tail)

    def _find(self, engine: Engine) -> Engine:
        wanted = self._wanted
        if wanted is None and self._native is not None and self._native.device.type == "cuda":
            wanted = normalize(self._native.device)
        if wanted is None or wanted == engine.device:
            return engine
        found = find_engine(wanted)
        if found is None:
            raise RuntimeError(
                f"{wanted} has not been used through aiogpu yet, and starting it takes time: "
                f"`await aiogpu.synchronize({str(wanted)!r})` first, or use @aiogpu.task(device=...)"
            )
        return found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        driver = self._engine.driver
        driver.restore(self._saved)
        self._saved = None
        tail = None
        try:
            driver.order(self._before, self._stream)
            if self._lease is not None:
                event = driver.record(self._stream)
                tail = self._task.runtime.watch(self._engine, self._stream, event)
        except BaseException as raised:
            if error is None:
                self._engine.rethrow(raised)
        finally:
            self._release(tail)


def current_stream(device: torch.device | str | int | None = None) -> Any:
    """Torch's current stream: a ``torch.cuda.Stream``, or the CPU's placeholder."""
    where = globals()["device"]() if device is None else normalize(device)
    if where.type == "cuda":
        return torch.cuda.current_stream(where)
    return torch.cpu.current_stream()


def device() -> torch.device:
    """The current device: the task's; outside of tasks torch's current CUDA device, else the CPU."""
    task = current_task()
    if task is not None and task.engine.device.type != "cuda":
        return task.engine.device
    if torch.cuda.is_initialized() or torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def share(x: T) -> T:
    """Use tensors that another task made and that did not come as argument, result or channel item.

    ::

        cache = aiogpu.share(self.cache)          # a list that other tasks fill

    Orders the current stream after all of the device's compute streams as they are now, and keeps the
    tensors' memory from being reused before the current stream is done with it. Returns ``x``.

    Raises ``RuntimeError`` outside of an event loop, ``CaptureError`` inside a graph capture.
    """
    task = current_task()
    engine = task.engine if task is not None else current_runtime().engine_now(None)
    if engine is None or engine.driver.eager:
        return x  # nothing has been submitted through aiogpu yet, or work is done when it is submitted
    if engine.driver.capturing():
        raise CaptureError("aiogpu.share() cannot add edges to a stream that is being captured into a graph")
    driver = engine.driver
    here = driver.current()
    others: list[Stream] = engine.compute.streams()
    for other in others:
        driver.order(here, other)
    if not driver.is_default(here) or not driver.legacy_orders:
        for tensor in tensors_of(x):
            driver.keep(tensor, here)
    return x
