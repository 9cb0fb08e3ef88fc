"""The life of one transfer after the call: on the loop's thread if small, else on a staging thread.

Law of this file: whatever the device may use is kept by the point of the transfer's last event (custody), in
success, failure and cancellation alike; the operation is resolved by that point only.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from .._engine import SLOT_BYTES, Engine
from .._operation import Operation
from .._runtime import Runtime, starter
from .._streams import StreamPool
from ..drivers.base import Event, Stream
from .plan import Plan, neutral
from .staging import Lane, flat, is_dense

__all__ = ["Job", "dense_copy", "take_slots"]

#: A batch of more leaves than this goes to a staging thread, however small they are.
SMALL_LEAVES = 16


class Job:
    """What all transfers share: the operation, the plan, the caller's stream."""

    def __init__(self, runtime: Runtime, plan: Plan[Any], operation: Operation[Any]) -> None:
        self.runtime = runtime
        self.plan = plan
        self.operation = operation
        operation._nbytes = plan.nbytes
        # User code (an object's own `.to`) sees the context variables of the call.
        self.context = contextvars.copy_context() if plan.movers else None

    @property
    def small(self) -> bool:
        plan = self.plan
        count = len(plan.plain) + len(plan.arrays)
        return not plan.movers and count <= SMALL_LEAVES and plan.largest <= SLOT_BYTES

    def in_thread(self, engine: Engine | None, work: Callable[[], None]) -> None:
        """Run ``work`` on a staging thread; what it raises, the operation fails with."""

        def job() -> None:
            try:
                with neutral():
                    work()
            except BaseException as error:
                self.fail(engine, error)

        (engine.staging if engine is not None else starter()).submit(job)

    def fail(self, engine: Engine | None, error: BaseException) -> None:
        self.operation.fail(error if engine is None else engine.blame(error))

    def move_movers(self, move: Callable[[Any], Any]) -> list[Any]:
        """Let objects move themselves, with the caller's context variables."""
        if self.context is None:
            return []
        return [self.context.run(move, mover) for mover in self.plan.movers]

    def land(
        self,
        engine: Engine,
        stream: Stream,
        event: Event,
        finish: Callable[[], Any],
        keep: Any,
        release: Callable[[], None],
    ) -> Any:
        """``event`` ends the transfer: then ``release`` its blocks and resolve it with ``finish()``."""
        self.operation.submitted()
        callback = partial(_landed, self.operation, finish, release)
        return self.runtime.watch(engine, stream, event, callback, (keep, self))

    @contextlib.contextmanager
    def lane(self, engine: Engine, pool: StreamPool) -> Iterator[Lane]:
        """A leased copy stream; released by :meth:`land_lane`, or here when the submission breaks off."""
        lane = Lane(engine, pool.lease())
        try:
            yield lane
        except BaseException:
            self._salvage(engine, lane)
            raise

    def land_lane(self, engine: Engine, lane: Lane, finish: Callable[[], Any]) -> None:
        """All is submitted to ``lane``: its end resolves the operation."""
        event = engine.driver.record(lane.stream)
        lane.release(self.land(engine, lane.stream, event, finish, lane, lane.give_back))

    def _salvage(self, engine: Engine, lane: Lane) -> None:
        """What was submitted before it broke off keeps its buffers until it has ended."""
        try:
            event = engine.driver.record(lane.stream)
        except BaseException:
            engine.leaked.append(lane)
            lane.release(None)
        else:
            callback = partial(_release_unless_lost, lane.give_back)
            lane.release(self.runtime.watch(engine, lane.stream, event, callback, lane))


def _landed(
    operation: Operation[Any],
    finish: Callable[[], Any],
    release: Callable[[], None],
    error: BaseException | None,
) -> None:
    if error is None:
        try:
            value = finish()
            release()
        except BaseException as raised:
            operation.fail(raised)
        else:
            operation.complete(value)
    else:  # on a lost device nothing is released: see Point
        operation.fail(error)


def _release_unless_lost(release: Callable[[], None], error: BaseException | None) -> None:
    if error is None:
        release()


def take_slots(engine: Engine, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """One free page-locked slot for each tensor that has bytes; ``None`` if there are not enough."""
    slots: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.numel():
            slot = engine.slots.take_free()
            if slot is None:
                for taken in slots:
                    engine.slots.give(taken)
                return None
            slots.append(slot)
    return slots


def give_slots(engine: Engine, slots: Sequence[torch.Tensor]) -> None:
    for slot in slots:
        engine.slots.give(slot)


def in_slot(slot: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The slot's first bytes, as a tensor of dense ``like``'s shape, dtype and order."""
    row = slot[: like.numel() * like.element_size()].view(like.dtype)
    return row.as_strided(like.shape, like.stride())


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of :func:`dense_copy`: the tensor's own order if it is dense, else row-major."""
    if is_dense(tensor):
        return tensor.stride()
    strides = []
    step = 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself if it is dense, else a dense, row-major copy on its device."""
    if is_dense(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def submit_slot_copy(
    engine: Engine, stream: Stream, device_side: torch.Tensor, slot: torch.Tensor, *, up: bool
) -> None:
    """One small copy between a slot and a dense device tensor."""
    host, there = flat(in_slot(slot, device_side)), flat(device_side)
    if up:
        engine.driver.copy(there, host, stream)
    else:
        engine.driver.copy(host, there, stream)
