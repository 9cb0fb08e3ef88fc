"""Host to device.

Law of this file: a small upload goes onto the caller's own stream, through a slot that is filled before the
call returns. A large one is submitted by a staging thread to a leased copy stream, where its memory is
allocated, too: memory of the caller's stream could only be written behind that stream's work. Only where
nothing is to be allocated nor staged does the call submit it itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .._engine import Engine
from .._operation import Operation
from .._runtime import Runtime, starter
from ..drivers.base import Event, Stream
from .jobs import SMALL_LEAVES, Job, give_slots, in_slot, submit_slot_copy, take_slots
from .packing import Packed
from .parts import core, is_ordinary, widened
from .peers import Origins, device_of
from .plan import Plan, Walking, neutral
from .staging import Lane, is_dense, same_order
from .tree import tensors_of

__all__ = ["Upload", "UploadInto"]

_HOST = torch.device("cpu")


class Upload(Job):
    """One ``to_device`` call."""

    repeatable = True

    def __init__(
        self,
        runtime: Runtime,
        plan: Plan[Any],
        operation: Operation[Any],
        device: torch.device | None,
        dtype: torch.dtype | None,
        walking: Walking[Any] | None = None,
    ) -> None:
        super().__init__(runtime, plan, operation, walking)
        self.device = device
        self.dtype = dtype

    def start(self, engine: Engine | None) -> None:
        caller = engine.driver.current() if engine is not None else None
        if engine is None:
            self.note_callers_stream(self.device)
        on_thread = partial(self._run_large, engine, caller)
        try:
            self.origins = Origins(self.runtime, self.plan.plain, engine)
            if engine is not None and caller is not None and self._fits_here(engine):
                with neutral(), engine.driver.relaxed():
                    if self._start_small(engine, caller):
                        return
        except BaseException as error:
            self.break_off(engine, error, on_thread)
            return
        if self.walking is not None:
            self.walk_first(engine, self.walking, partial(self._start_large, engine, on_thread))
        else:
            self._start_large(engine, on_thread)

    def _start_large(self, engine: Engine | None, on_thread: Callable[[], None]) -> None:
        if self.walking is not None:
            self.origins.check(self.plan.devices)
        if self.origins and engine is not None and engine.driver.eager:
            # Its copies run on threads, which know no streams: they start when there is something to copy.
            starter().submit(partial(self._start_ready, engine, on_thread))
        else:
            self.in_thread(engine, on_thread, waits=engine is None or not self._only_submits(engine))

    def _only_submits(self, engine: Engine) -> bool:
        """Everything is in page-locked memory as it is wanted there."""
        plan = self.plan
        if plan.leaves > SMALL_LEAVES or plan.movers or plan.arrays or self.origins or engine.driver.eager:
            return False
        pinned = engine.driver.is_pinned
        return all(is_ordinary(source) and is_dense(source) and pinned(source) for source in plan.plain)

    def _fits_here(self, engine: Engine) -> bool:
        """May it be submitted on the caller's thread?"""
        origins = self.origins
        if engine.driver.eager:
            return self.small_converted and not origins
        return self.small and (not origins or origins.known_to(engine.device))

    def _start_ready(self, engine: Engine, on_thread: Callable[[], None]) -> None:
        def start(error: BaseException | None) -> None:
            if error is not None:
                self.operation.fail(error)
            else:
                self.in_thread(engine, on_thread)

        try:
            self.origins.when_ready(start, self)
        except BaseException as error:
            self.fail(engine, error)

    def _source(self, engine: Engine, index: int, source: torch.Tensor) -> torch.Tensor:
        """What to copy. Where kernels do not wait for copies (the CPU), conversions come first."""
        source = self.plan.gather(index, source)
        return self.plan.settle(index, source, source) if engine.driver.eager else source

    def _settled(self, engine: Engine, index: int, there: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return there if engine.driver.eager else self.plan.settle(index, there, source)

    def _start_small(self, engine: Engine, stream: Stream) -> bool:
        sources = [self._source(engine, *each) for each in enumerate(self.plan.sources())]
        slots = take_slots(engine, [source for source in sources if source not in self.origins])
        if slots is None:
            return False
        release = partial(give_slots, engine, slots)
        with self.custody(engine, stream, (slots, sources), release):
            moved = []
            free = iter(slots)
            self.origins.follow(engine.driver, stream)
            for index, source in enumerate(sources):
                there = source if self._is_here(engine, source) else room_for(source, engine.device)
                if source in self.origins:
                    self._copy_across(engine, stream, there, source)
                elif source.numel():
                    slot = next(free)
                    in_slot(slot, there).copy_(source)
                    submit_slot_copy(engine, stream, there, slot, up=True)
                moved.append(self._settled(engine, index, there, source))
            finish, value = self._result(engine, moved, [], {stream.raw})
            self.land(engine, stream, finish, (slots, sources), release, value)
        return True

    def _run_large(self, known: Engine | None, caller: Stream | None) -> None:
        engine = known or self.runtime.engine_blocking(self.device)
        caller = caller or self.callers_stream(engine)
        # One that waits for a source on another device, or for the caller's stream, may hold others up: not
        # among the uploads' streams.
        pool = engine.downloads if self.origins or self.plan.movers else engine.uploads
        with self.lane(engine, pool, self.origins.leave) as lane:
            moved_movers = self._move_movers(engine, caller)
            moved: list[torch.Tensor] = []
            there_already: list[int] = []
            staged: list[tuple[torch.Tensor, torch.Tensor]] = []
            arriving: list[tuple[int, torch.Tensor]] = []
            self.pack(self.plan.sources, _HOST)
            with engine.driver.on(lane.stream):
                moved += self._slabs_moved(engine, lane)
                for index, source in enumerate(self.plan.sources()[len(moved) :], len(moved)):
                    source = self._source(engine, index, source)
                    if source in self.origins and not engine.driver.eager:
                        there_already.append(index)
                        moved.append(source)
                        continue
                    real = source if engine.driver.eager else core(source)
                    moved.append(room_for(real, engine.device))
                    staged.append((moved[index], real))
                    arriving.append((index, source))
                lane.upload_all(staged)
                for index, source in arriving:
                    moved[index] = self._settled(engine, index, moved[index], source)
                if there_already:
                    # Last: until now this thread may have waited for chunks, and so for this stream.
                    with self.origins.entered(engine, lane.stream):
                        for index in there_already:
                            moved[index] = self._moved_across(engine, lane, index, moved[index])
                if moved_movers:
                    engine.driver.order(lane.stream, caller)
                homes = {caller.raw, lane.stream.raw}
                finish, value = self._result(engine, moved, moved_movers, homes)
            for tensor in self.operation._moved:
                engine.driver.keep(tensor, caller)
            self.land_lane(engine, lane, finish, value)

    def _slabs_moved(self, engine: Engine, lane: Lane) -> list[torch.Tensor]:
        """A packed plan's slabs, gathered by the copy threads on the way."""
        if not isinstance(self.plan, Packed) or engine.driver.eager:
            return []
        slabs = self.plan.slabs
        there = [room_for(slab, engine.device) for slab in slabs]
        lane.upload_made(self.plan.made(there))
        return [self._settled(engine, i, *pair) for i, pair in enumerate(zip(there, slabs, strict=True))]

    @staticmethod
    def _is_here(engine: Engine, source: torch.Tensor) -> bool:
        """It is on the target, and to be converted there."""
        return engine.device.type != "cpu" and device_of(source) == engine.device

    def _copy_across(self, engine: Engine, stream: Stream, there: torch.Tensor, source: torch.Tensor) -> None:
        if there is not source and source.numel():
            engine.driver.copy(there, source, stream)

    def _moved_across(self, engine: Engine, lane: Lane, index: int, source: torch.Tensor) -> torch.Tensor:
        there = source if self._is_here(engine, source) else room_for(source, engine.device)
        lane.held += (there, source)
        self._copy_across(engine, lane.stream, there, source)
        return self._settled(engine, index, there, source)

    def _move_movers(self, engine: Engine, caller: Stream) -> list[Any]:
        if not self.plan.movers:
            return []
        # On the caller's stream: what such an object allocates, nobody can find to mark it as used there.
        options: dict[str, Any] = {} if self.dtype is None else {"dtype": self.dtype}
        with engine.driver.on(caller):
            return self.move_movers(lambda mover: mover.to(engine.device, **options))

    def _result(
        self, engine: Engine, moved: list[torch.Tensor], moved_movers: list[Any], homes: set[Any]
    ) -> tuple[Callable[[], Any] | None, Any]:
        """For :meth:`land`: the result, or what makes it once the copies have landed, where nothing that is
        computed would wait for them."""
        if not engine.driver.eager:
            return None, self._value(engine, moved, moved_movers, homes)

        def make() -> Any:
            with neutral():
                return self._value(engine, moved, moved_movers, homes)

        return make, None

    def _value(
        self, engine: Engine, moved: list[torch.Tensor], moved_movers: list[Any], homes: set[Any]
    ) -> Any:
        """The result, around memory that the device has yet to fill. What a subclass of users' computes when
        it is put together is computed behind the copies: the current stream is theirs."""
        value = self.plan.rebuild(moved, moved_movers)
        # What these have computed, or allocated, is new memory, too.
        if (self.plan.wraps or moved_movers) and not engine.driver.eager:
            moved = [*moved, *(t for t in tensors_of(value) if t.device == engine.device)]
        self.operation.moved(engine.driver, moved, homes)
        return value


class UploadInto(Job):
    """One ``copy_`` of a host tensor into ``dst`` on a device, after what the caller's stream holds."""

    repeatable = True

    def __init__(
        self, runtime: Runtime, plan: Plan[Any], operation: Operation[Any], dst: torch.Tensor
    ) -> None:
        super().__init__(runtime, plan, operation)
        self.dst = dst

    def start(self, engine: Engine | None) -> None:
        if engine is None:
            self.note_callers_stream(self.dst.device)
            self.in_thread(None, self._run_first)
            return
        caller = engine.driver.current()
        behind = partial(self._start_behind, engine, caller)
        try:
            if self.small:
                with neutral(), engine.driver.relaxed():
                    if self._start_small(engine, caller):
                        return
            ready = engine.driver.record(caller)
            with neutral(), engine.driver.relaxed():
                at_once = self.may_go_at_once(engine) and self._lies_as_wanted(engine)
        except BaseException as error:
            self.break_off(engine, error, behind)
            return
        if at_once:
            self.at_once(engine, partial(self._run_at_once, engine, ready), behind)
        else:
            self._start_large(engine, caller, ready)

    def _run_first(self) -> None:
        engine = self.runtime.engine_blocking(self.dst.device)
        self._start_behind(engine, self.callers_stream(engine))

    def _start_behind(self, engine: Engine, caller: Stream) -> None:
        self._start_large(engine, caller, engine.driver.record(caller))

    def _start_large(self, engine: Engine, caller: Stream, ready: Event) -> None:
        # A staging thread waits for its chunks, so it must not start before the chunks can move.
        def start(error: BaseException | None) -> None:
            if error is not None:
                self.operation.fail(error)
            else:
                self.in_thread(engine, partial(self._run_large, engine))

        self.runtime.watch(engine, caller, ready, start, self)

    def _landing(self, source: torch.Tensor) -> torch.Tensor:
        """Where the bytes go first: ``dst`` itself if it takes them as they are, else new memory."""
        if same_order(self.dst, source):
            return self.dst
        return room_for(source, self.dst.device)

    def _settle(self, engine: Engine, stream: Stream, landing: torch.Tensor) -> None:
        """On the device: into ``dst``'s shape, strides and dtype."""
        if landing is self.dst:
            return
        if engine.driver.eager:  # a kernel would not wait for the copy
            engine.driver.copy(self.dst, landing, stream)
        else:
            with torch.inference_mode(self.dst.is_inference()), torch.no_grad():
                self.dst.copy_(landing)

    def _start_small(self, engine: Engine, stream: Stream) -> bool:
        (source,) = self.plan.sources()
        slots = take_slots(engine, [source])
        if slots is None:
            return False
        keep = (slots, source, self.dst)
        release = partial(give_slots, engine, slots)
        with self.custody(engine, stream, keep, release):
            landing = self._landing(source)
            for slot in slots:
                in_slot(slot, landing).copy_(source)
                submit_slot_copy(engine, stream, landing, slot, up=True)
            self._settle(engine, stream, landing)
            self.land(engine, stream, None, (keep, landing), release, self.dst)
        return True

    def _lies_as_wanted(self, engine: Engine) -> bool:
        """In page-locked memory, element by element as in ``dst``, which runs no code of users'."""
        (source,) = self.plan.sources()
        plain = is_ordinary(source) and type(self.dst) is torch.Tensor
        return plain and same_order(self.dst, source) and engine.driver.is_pinned(source)

    def _run_at_once(self, engine: Engine, ready: Event) -> None:
        # Not among the uploads' streams: it waits for the caller's.
        with self.lane(engine, engine.downloads) as lane:
            engine.driver.wait(lane.stream, ready)
            engine.driver.recycle(ready)
            lane.upload(self.dst, self.plan.plain[0])
            self.land_lane(engine, lane, None, self.dst)

    def _run_large(self, engine: Engine) -> None:
        (source,) = self.plan.sources()
        with self.lane(engine, engine.uploads) as lane:
            lane.held.append(self.dst)
            with engine.driver.on(lane.stream):
                real = core(source)
                landing = self._landing(real)
                lane.upload(landing, real)
                if landing is not self.dst:
                    landing = widened(landing, source)
                self._settle(engine, lane.stream, landing)
            self.land_lane(engine, lane, None, self.dst)


def room_for(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory on the device for a copy of ``source``, dense, in its order."""
    return torch.empty_like(source, device=device)
