"""The life of one transfer after the call: on the loop's thread if small, else on a staging thread.

Law of this file: whatever the device may use is kept by the point of the transfer's last event (custody), in
success, failure and cancellation alike; the operation is resolved by that point only.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from .._capacity import in_flight, when_back
from .._engine import SLOT_BYTES, Engine
from .._errors import bare
from .._operation import Operation
from .._reactor import Point
from .._runtime import Runtime, starter
from .._streams import StreamPool
from ..drivers.base import Stream
from .packing import packed
from .plan import Plan, Walking, interposed, neutral
from .staging import Lane, flat, is_dense

__all__ = ["Job", "broke_off", "dense_copy", "over", "slot_view", "take_slots"]

#: Views of each slot that are kept.
_VIEWS = 8

#: A batch of more leaves than this goes to a staging thread, however small they are, and packed.
SMALL_LEAVES = 16


class Job:
    """What all transfers share: the operation, the plan, the caller's stream."""

    #: May the whole submission be made a second time? Then it is, once, when device memory has run out.
    repeatable = False

    def __init__(
        self,
        runtime: Runtime,
        plan: Plan[Any],
        operation: Operation[Any],
        walking: Walking[Any] | None = None,
    ) -> None:
        self.runtime = runtime
        self.plan = plan
        self.operation = operation
        operation._nbytes = plan.nbytes
        #: The caller's current CUDA stream, for as long as there is no engine to ask.
        self._native: torch.cuda.Stream | None = None
        #: It has its place in the runtime's queue, or is past it.
        self._admitted = False
        #: The operation is resolved by a point in flight, not by whoever fails.
        self._in_custody = False
        #: Out of memory: what was in flight then, for which this waits before its second try.
        self._waits_for: list[Point] | None = None
        # User code (an object's own `.to`) sees the context variables of the call.
        self.context = contextvars.copy_context() if plan.movers or walking else None
        #: There is more to move than the plan says so far.
        self.walking = walking

    @property
    def small(self) -> bool:
        plan = self.plan
        few = plan.leaves <= SMALL_LEAVES and not plan.movers and self.walking is None
        return few and plan.largest <= SLOT_BYTES

    @property
    def small_converted(self) -> bool:
        """Small, also where conversions come before the slots."""
        return self.small and self.plan.largest_converted <= SLOT_BYTES

    def pack(self, sources: Callable[[], list[torch.Tensor]], device: torch.device) -> None:
        """On a staging thread: see to it that many small leaves on ``device`` are copied together."""
        if self.plan.leaves > SMALL_LEAVES:
            self.plan = packed(self.plan, sources(), device, SLOT_BYTES)

    def note_callers_stream(self, device: torch.device | None) -> None:
        """On the caller's thread, while there is no engine to ask."""
        if torch.cuda.is_initialized() and (device is None or device.type == "cuda"):
            self._native = torch.cuda.current_stream(device)

    def callers_stream(self, engine: Engine) -> Stream:
        """In a staging thread that has just made the engine: the stream that was current at the call."""
        if self._native is None:
            return engine.driver.current()
        return engine.driver.adopt(self._native)

    def in_thread(self, engine: Engine | None, work: Callable[[], None], *, waits: bool = True) -> None:
        """Run ``work`` on a staging thread, once its bytes may be in flight; what it raises, the operation
        fails with. ``waits=False``: it submits, and waits neither for chunks nor for users' code."""

        def job() -> None:
            try:
                with neutral():
                    work()
            except BaseException as error:
                self.break_off(engine, error, work)

        if engine is None:
            submit = partial(starter().submit, job)
        else:
            # Nobody knows how much an object moves that moves itself.
            nbytes = math.inf if self.plan.movers else self.operation._nbytes
            submit = partial(engine.staging.submit, job, nbytes, waits=waits)
        if self._admitted:
            submit()
        else:
            self._admitted = True
            self.runtime.inflight.admit(self.operation, self.operation._nbytes, submit)

    def may_go_at_once(self, engine: Engine) -> bool:
        """May the loop's thread submit large copies between page-locked memory and memory of the device, all
        of which is there already?

        That allocates nothing and waits for nothing, as long as there is an idle copy stream for it: one that
        is full (about 1020 commands, behind a kernel that takes long) would stop the thread inside CUDA, with
        a lock that others want. Half of these streams are left to others: what is behind this caller's kernel
        must not hold up what is not.
        """
        plan = self.plan
        few = plan.leaves <= SMALL_LEAVES and not plan.movers and not plan.arrays and self.walking is None
        bounded = self.runtime.max_inflight_bytes is not None  # it may have to wait for its turn
        free = few and not bounded and not engine.driver.eager and not interposed()
        return free and engine.downloads.idle() > engine.downloads.limit // 2

    def at_once(self, engine: Engine, work: Callable[[], None], again: Callable[[], None]) -> None:
        """Run ``work``, which submits and waits for nothing, here and now; ``again`` is what a staging thread
        does if memory runs out."""

        def job() -> None:
            try:
                with neutral(), engine.driver.relaxed():
                    work()
            except BaseException as error:
                self.break_off(engine, error, again)

        self._admitted = True
        # For its count: nothing waits there for its turn (see `may_go_at_once`). It may be another thread
        # that runs this, one that is just about to start a transfer of its own; any may.
        self.runtime.inflight.admit(self.operation, self.operation._nbytes, job)

    def break_off(self, engine: Engine | None, error: BaseException, work: Callable[[], None]) -> None:
        """The submission has met ``error``: the operation fails, or ``work`` is done on a staging thread once
        memory has come back."""
        points, self._waits_for = self._waits_for, None
        if engine is None or points is None:
            self.fail(engine, error)
            return
        bare(error)  # its frames hold what the first try had allocated
        try:
            when_back(engine, points, partial(self._again, engine, work))
        except RuntimeError:  # the interpreter is exiting
            self.fail(engine, error)

    def _again(self, engine: Engine, work: Callable[[], None]) -> None:
        try:
            engine.check()
            self.in_thread(engine, work)
        except BaseException as error:
            self.fail(engine, error)

    def _memory_to_wait_for(self, engine: Engine, error: BaseException) -> list[Point] | None:
        """What is in flight, if that may help: the first time that memory runs out. The neighbours' transfers
        and tasks go on meanwhile; if it is in vain, this transfer fails alone. An empty list, too, is
        worth a second try: what was in flight at the first one may be back by now."""
        if not self.repeatable or not isinstance(error, torch.OutOfMemoryError):
            return None
        self.repeatable = False
        return in_flight(engine)

    def walk_first(self, engine: Engine | None, walking: Walking[Any], then: Callable[[], None]) -> None:
        """Find the rest of the data on a staging thread, then go on with ``then``."""

        def job() -> None:
            try:
                with neutral():
                    self.plan = walking.finish()
                self.operation._nbytes = self.plan.nbytes
                then()
            except BaseException as error:
                self.fail(engine, error)

        try:
            (engine.staging if engine is not None else starter()).submit(job)
        except RuntimeError as error:  # the interpreter is exiting, or has no thread to give
            self.fail(engine, error)

    def fail(self, engine: Engine | None, error: BaseException) -> None:
        if self._in_custody:
            # The operation may have failed with it already, on the loop's thread, while it was still
            # being raised here: which gave it the frames back that keep the tensors alive.
            bare(error)
            return
        self.operation.fail(error if engine is None else engine.blame(error))

    def move_movers(self, move: Callable[[Any], Any]) -> list[Any]:
        """Let objects move themselves, with the caller's context variables."""
        if self.context is None:
            return []
        try:
            return [self.context.run(move, mover) for mover in self.plan.movers]
        except Exception as error:
            # Users want to see where their `.to` failed, but the frames keep tensors alive: as text.
            error.add_note("".join(traceback.format_exception(error)))
            raise

    def land(
        self,
        engine: Engine,
        stream: Stream,
        finish: Callable[[], Any] | None,
        keep: Any,
        release: Callable[[], None],
        value: Any = None,
    ) -> Point:
        """All is submitted: its end on ``stream`` frees its blocks and resolves it with ``finish()``.

        Without ``finish``: with ``value``, which streams that are ordered after the end may use at once.
        """
        event = engine.driver.record(stream)
        callback = partial(_landed, engine, self.operation, finish or (lambda: value), release)
        # Watched first: when the loop's thread is faster, it is over before it is marked as submitted.
        point = self.runtime.watch(engine, stream, event, callback, (keep, self))
        if finish is None:
            self.operation.submitted(value, (stream, point))
        else:
            self.operation.submitted()
        return point

    @contextlib.contextmanager
    def custody(
        self, engine: Engine, stream: Stream, keep: Any, release: Callable[[], None]
    ) -> Iterator[None]:
        """When the submission breaks off in the block, what the device may have of it is still kept until
        ``stream`` has passed this point. Its blocks are free, and the operation fails, only then: until
        then it may still be reading the source or writing to ``out``."""
        try:
            yield
        except BaseException as error:
            self._break_off(engine, stream, keep, release, error)
            raise

    def _break_off(
        self, engine: Engine, stream: Stream, keep: Any, release: Callable[[], None], error: BaseException
    ) -> None:
        others = self._memory_to_wait_for(engine, error)
        if others is None:
            self._in_custody = True
            broke_off(self.runtime, engine, self.operation, stream, keep, release, error)
        else:
            callback = partial(over, engine, release)
            point = _watch_broken(self.runtime, engine, stream, callback, keep)
            if point is not None:  # and for what this very try had got
                self._waits_for = [*others, point]

    @contextlib.contextmanager
    def lane(
        self,
        engine: Engine,
        pool: StreamPool,
        leave: Callable[[torch.device, Point | None], None] | None = None,
    ) -> Iterator[Lane]:
        """A leased copy stream, for one submission that ends with :meth:`land_lane`.

        ``leave(device, tail)`` is called at the end of the block, however it ends.
        """
        lease = pool.lease()
        lane = Lane(engine, lease.stream)
        try:
            yield lane
        except BaseException as error:
            self._break_off(engine, lane.stream, lane, lane.give_back, error)
            raise
        finally:
            try:
                if leave is not None:
                    leave(engine.device, lane.tail)
            finally:
                lease.release(lane.tail)

    def land_lane(
        self, engine: Engine, lane: Lane, finish: Callable[[], Any] | None, value: Any = None
    ) -> None:
        lane.tail = self.land(engine, lane.stream, finish, lane, lane.give_back, value)


def _landed(
    engine: Engine,
    operation: Operation[Any],
    finish: Callable[[], Any],
    release: Callable[[], None],
    error: BaseException | None,
) -> None:
    value = None
    if error is None and not operation.done():
        try:
            value = finish()
        except BaseException as raised:
            error = raised
    over(engine, release, error)
    if error is None:
        operation.complete(value)
    else:
        operation.fail(error)


def broke_off(
    runtime: Runtime,
    engine: Engine,
    operation: Operation[Any],
    stream: Stream,
    keep: Any,
    release: Callable[[], None],
    error: BaseException,
) -> None:
    """The submission of ``operation`` to ``stream`` has met ``error``: it fails once the device is done with
    what it may have of it."""
    blame = bare(engine.blame(error))
    callback = partial(_broken_off, engine, operation, release, blame)
    if _watch_broken(runtime, engine, stream, callback, keep) is None:
        operation.fail(blame)


def _watch_broken(
    runtime: Runtime,
    engine: Engine,
    stream: Stream,
    callback: Callable[[BaseException | None], None],
    keep: Any,
) -> Point | None:
    try:
        event = engine.driver.record(stream)
    except BaseException:  # nobody can tell any more when the device is done with it
        engine.leaked.append(keep)
        if isinstance(keep, Lane):
            keep.lose()
        return None
    return runtime.watch(engine, stream, event, callback, keep)


def _broken_off(
    engine: Engine,
    operation: Operation[Any],
    release: Callable[[], None],
    error: BaseException,
    _: BaseException | None,
) -> None:
    over(engine, release, None)
    operation.fail(error)


def over(engine: Engine, release: Callable[[], None], _: BaseException | None) -> None:
    """The device is done with it, well or badly; unless it is lost: then nothing is let go of."""
    if engine.lost is None:
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


def row_in(slot: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The slot's first bytes, as a row of ``like``'s elements."""
    return slot[: like.nbytes].view(like.dtype)


def in_slot(slot: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same as a tensor of dense ``like``'s shape and order."""
    if like.is_contiguous():
        return slot_view(slot, like)
    return row_in(slot, like).as_strided(like.shape, like.stride())


def slot_view(slot: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same for contiguous ``like``; kept for the next tensor of its shape and format (views take longer
    than small copies)."""
    try:
        views = slot._aiogpu_views  # type: ignore[attr-defined]
    except AttributeError:
        views = slot._aiogpu_views = {}  # type: ignore[attr-defined]
    key = like.dtype, like.shape
    view: torch.Tensor | None = views.get(key)
    if view is None:
        if len(views) >= _VIEWS:
            views.clear()
        assert like.nbytes <= slot.nbytes, "it would reach into the next slot"
        with torch._C._InferenceMode(False):
            # Of the storage, not of the slot: that would keep itself alive, through its own view.
            view = torch.empty(0, dtype=like.dtype, device="cpu")
            start = slot.storage_offset() // like.itemsize
            view.set_(slot.untyped_storage(), start, like.shape)  # type: ignore[call-overload]
        views[key] = view
    return view


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
    if device_side.is_contiguous():
        host, there = slot_view(slot, device_side), device_side
    else:
        host, there = row_in(slot, device_side), flat(device_side)
    if up:
        engine.driver.copy(there, host, stream)
    else:
        engine.driver.copy(host, there, stream)
