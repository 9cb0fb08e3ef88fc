"""Waiting for work that was submitted to a stream, without blocking.

Law of this file: "submitted so far" is fixed at the call. A user's event may be recorded anew while we wait,
so it is never asked itself: a stream of ours waits for it as it is now, and an event of ours follows.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any

import torch

from ._engine import Engine, normalize
from ._errors import CaptureError
from ._loops import DoorClosed
from ._runtime import Runtime, current_runtime
from ._streams import Lease
from ._tasks import current_task
from .drivers.base import Stream

__all__ = ["synchronize"]


async def synchronize(target: Any = None) -> None:
    """Wait until submitted work has finished, while other coroutines run.

    Parameters
    ----------
    target:
        ``None``: everything that this task has submitted so far: its current stream, and the transfers
        that it has started. A ``torch.cuda.Stream``: what it holds now. A ``torch.cuda.Event``: as
        recorded now; one that was never recorded is complete. A device (``torch.device``, ``"cuda:1"``,
        an index): everything on it, by whoever.

    Raises
    ------
    TypeError
        For anything else. Integers are devices, never handles: wrap a raw stream handle in
        ``torch.cuda.ExternalStream``.
    DeviceError, DeviceLostError
        What the device reports; earlier work may be the cause.
    CaptureError
        Inside a CUDA-graph capture.
    """
    if target is None:
        task = current_task()
        if task is not None:
            await _reach(task.runtime, task.engine)
            if task.operations:
                for operation in list(task.operations):
                    await operation._finished(task.runtime.reactor.door)
        else:
            runtime = current_runtime()
            await _reach(runtime, runtime.engine_now(None) or await runtime.engine(None))
        return
    runtime = current_runtime()
    if isinstance(target, torch.device | str | int) and not isinstance(target, bool):
        engine = await runtime.engine(normalize(target))
        _refuse_capture(engine)
        await _device(runtime, engine)
    elif isinstance(target, torch.cuda.Event):
        await _event(runtime, target)
    elif isinstance(target, torch.Stream | torch.cuda.Stream):
        engine = await runtime.engine(normalize(target.device))
        _refuse_capture(engine)
        await _reach(runtime, engine, engine.driver.adopt(target))
    else:
        raise TypeError(
            f"synchronize() takes nothing, a torch.cuda.Stream, a torch.cuda.Event or a device, not a "
            f"{type(target).__name__}. To wait for a transfer, await its operation"
        )


def _reach(runtime: Runtime, engine: Engine, stream: Stream | None = None) -> Awaitable[None]:
    """What to await until ``stream`` (default: the current one) has finished what it holds now."""
    if engine.lost is not None:
        engine.check()
    driver = engine.driver
    if driver.capturing():
        _refuse_capture(engine)
    if stream is None:
        stream = driver.current()
    reactor = runtime.reactor
    door = reactor.door
    try:
        event = driver.record(stream)
    except Exception as error:
        engine.rethrow(error)
    waiter = door.waiter()
    reactor.watch(engine, stream, event, None, None, waiter)
    return door.park(waiter)


async def _event(runtime: Runtime, event: torch.cuda.Event) -> None:
    device = event.device  # None until it is recorded for the first time
    if device is None:
        await runtime.reactor.door.checkpoint()
        return
    engine = await runtime.engine(normalize(device))
    _refuse_capture(engine)
    door = runtime.reactor.door
    waiter = door.waiter()
    lease: Lease = engine.sides.lease()
    point = None
    try:
        engine.driver.wait(lease.stream, event)
        ours = engine.driver.record(lease.stream)
        point = runtime.reactor.watch(engine, lease.stream, ours, waiter=waiter)
    except Exception as error:
        engine.rethrow(error)
    finally:
        lease.release(point)
    await door.park(waiter)


async def _device(runtime: Runtime, engine: Engine) -> None:
    """On a worker thread: nothing else covers streams that we have never seen."""
    door = runtime.reactor.door
    waiter = door.waiter()
    settle = door.settler(waiter)

    def job() -> None:
        error: BaseException | None = None
        try:
            engine.driver.synchronize_device()
        except BaseException as raised:
            error = engine.fault(raised)
        try:
            door.post(partial(settle, error))
        except DoorClosed:
            pass

    engine.workers.submit(job)
    await door.park(waiter)


def _refuse_capture(engine: Engine) -> None:
    if engine.driver.capturing():
        raise CaptureError(
            "aiogpu.synchronize() was called while the current stream is being captured into a CUDA graph: "
            "synchronize before the capture, or after a replay"
        )
