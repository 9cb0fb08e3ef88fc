"""A value on its way from one task to another, with its stream order.

Law of this file: the sender's current stream is recorded when the value is handed over, and whoever takes
it is ordered after that point, no more. ``share`` orders after everything instead, because it cannot know
who made the tensors; here somebody said so.

Channels, async-generator tasks and batches are made of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Generic, TypeVar

import torch

from ._engine import Engine, find_engine
from ._errors import CaptureError
from ._reactor import Point
from ._runtime import current_runtime
from ._tasks import Task, _current, current_task
from .drivers.base import Driver
from .transfers.tree import tensors_of

__all__ = ["Handoff"]

T = TypeVar("T")


class Handoff(Generic[T]):
    """``value``, as of the current streams now; :meth:`take` it, any number of times, where it is used.

    The tensors are kept alive, and their memory from reuse, until every taker is done with them.
    Raises ``CaptureError`` while the current stream is being captured into a graph.

    ``behind``: not as of now, but as of these points, on compute streams, perhaps none any more.
    """

    __slots__ = ("_homes", "_points", "_tensors", "_value")

    def __init__(self, value: T, *, behind: Sequence[Point] | None = None) -> None:
        self._value = value
        self._homes: list[tuple[Driver, list[torch.Tensor]]] | None = None
        self._tensors = [tensor for tensor in tensors_of(value) if tensor.device.type != "meta"]
        #: What takers are ordered after, and whether their default stream is so by itself.
        self._points: list[tuple[Point, bool]] = []
        if behind is not None:
            self._points += [(point, True) for point in behind]
            return
        above = _task_above()
        for engine in _engines(self._tensors):
            if engine.driver.capturing():
                raise CaptureError(
                    "tensors cannot be handed to another task from a stream that is being captured into "
                    "a CUDA graph: send them after the capture"
                )
            try:
                self._mark(engine, above if above is not None and above.engine is engine else None)
            except Exception as error:
                engine.rethrow(error)

    def _mark(self, engine: Engine, above: Task | None) -> None:
        driver = engine.driver
        streams = [driver.current()]
        if above is not None:
            # Undecorated code of a task: what it hands over may come from a child of the task, whose
            # end only the task's own stream is ordered after, or will be at its next step.
            streams.append(driver.adopt(above.raw))
            self._points += [(point, True) for point in tuple(above.ended) if not point.done]
        compute = {stream.raw for stream in engine.compute.streams()} if driver.legacy_orders else set()
        for stream in streams:
            # The legacy default stream orders all compute streams after itself. An event on it would be
            # a barrier over all of them.
            if not (driver.legacy_orders and driver.is_default(stream)):
                event = driver.record(stream)
                point = current_runtime().watch(engine, stream, event, keep=self._tensors)
                self._points.append((point, stream.raw in compute))

    def take(self) -> T:
        """The value; the current streams are ordered after it, and keep its memory."""
        for point, orders_default in self._points:
            driver = point.engine.driver
            # None once it is done, in whatever thread. A recycled event that has been recorded anew
            # orders too much, never too little.
            event = point.event
            if event is not None:
                here = driver.current()
                # A compute stream orders the default stream after itself; a wait there would be a barrier.
                if not (orders_default and driver.legacy_orders and driver.is_default(here)):
                    try:
                        driver.wait(here, event)
                    except Exception as error:
                        point.engine.rethrow(error)
        for driver, tensors in self._at_home():
            here = driver.current()
            if not (driver.legacy_orders and driver.is_default(here)):
                for tensor in tensors:
                    driver.keep(tensor, here)
        return self._value

    def _at_home(self) -> list[tuple[Driver, list[torch.Tensor]]]:
        """The tensors of each device that has streams. Found once: batches have many takers."""
        homes = self._homes
        if homes is None:
            devices = {tensor.device for tensor in self._tensors}
            engines = [find_engine(device) for device in devices]
            homes = [
                (engine.driver, [tensor for tensor in self._tensors if tensor.device == engine.device])
                for engine in engines
                if engine is not None and not engine.driver.eager
            ]
            if None not in engines:  # else one may be made before somebody else takes it
                self._homes = homes
        return homes


def _task_above() -> Task | None:
    """The task whose undecorated code is running: it is there, but this is no step of it."""
    task = _current.get()
    while task is not None and task.end is not None:
        task = task.parent
    return None if task is None or task.running == get_ident() or task.driver.eager else task


def _engines(tensors: list[torch.Tensor]) -> list[Engine]:
    """Whose streams an edge is needed on: the tensors' devices, and the current task's, since a value
    without tensors may be the word that a shared buffer is ready. The CPU needs none."""
    task = current_task()
    engines = {}
    for device in {tensor.device for tensor in tensors}:
        engine = find_engine(device)
        if engine is not None and not engine.driver.eager:
            engines[device] = engine
    if task is not None and not task.engine.driver.eager:
        engines.setdefault(task.engine.device, task.engine)
    return list(engines.values())
