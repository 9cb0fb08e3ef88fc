"""Host to device.

Law of this file: a small upload goes onto the caller's own stream, through a slot that is filled before the
call returns. A large one is submitted by a staging thread to a leased copy stream, where its memory is
allocated, too: memory of the caller's stream could only be written behind that stream's work.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .._engine import Engine
from .._operation import Operation
from .._runtime import Runtime
from ..drivers.base import Event, Stream
from .jobs import Job, give_slots, in_slot, submit_slot_copy, take_slots
from .plan import Plan, neutral
from .staging import same_order

__all__ = ["Upload", "UploadInto"]


class Upload(Job):
    """One ``to_device`` call."""

    def __init__(
        self,
        runtime: Runtime,
        plan: Plan[Any],
        operation: Operation[Any],
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(runtime, plan, operation)
        self.device = device
        self.dtype = dtype

    def start(self, engine: Engine | None) -> None:
        caller = engine.driver.current() if engine is not None else None
        if engine is None:
            self.note_callers_stream(self.device)
        if engine is not None and caller is not None and self.small:
            with neutral(), engine.driver.relaxed():
                try:
                    if self._start_small(engine, caller):
                        return
                except BaseException as error:
                    self.fail(engine, error)
                    return
        self.in_thread(engine, partial(self._run_large, engine, caller))

    def _start_small(self, engine: Engine, stream: Stream) -> bool:
        sources = self.plan.sources()
        slots = take_slots(engine, sources)
        if slots is None:
            return False
        release = partial(give_slots, engine, slots)
        with self.custody(engine, stream, (slots, sources), release):
            moved = []
            free = iter(slots)
            for source in sources:
                there = torch.empty_like(source, device=engine.device)
                if source.numel():
                    slot = next(free)
                    in_slot(slot, there).copy_(source)
                    submit_slot_copy(engine, stream, there, slot, up=True)
                moved.append(there if self.dtype is None else there.to(self.dtype))
            finish = partial(self._finish, engine, moved, [], {stream.raw})
            self.land(engine, stream, finish, (slots, sources), release)
        return True

    def _run_large(self, known: Engine | None, caller: Stream | None) -> None:
        engine = known or self.runtime.engine_blocking(self.device)
        caller = caller or self.callers_stream(engine)
        with self.lane(engine, engine.uploads) as lane:
            moved_movers = self._move_movers(engine, caller)
            moved = []
            with engine.driver.on(lane.stream):
                for source in self.plan.sources():
                    there = torch.empty_like(source, device=engine.device)
                    lane.upload(there, source)
                    moved.append(there if self.dtype is None else there.to(self.dtype))
            for tensor in moved:
                engine.driver.keep(tensor, caller)
            if moved_movers:
                engine.driver.order(lane.stream, caller)
            homes = {caller.raw, lane.stream.raw}
            self.land_lane(engine, lane, partial(self._finish, engine, moved, moved_movers, homes))

    def _move_movers(self, engine: Engine, caller: Stream) -> list[Any]:
        # On the caller's stream: what such an object allocates, nobody can find to mark it as used there.
        options: dict[str, Any] = {} if self.dtype is None else {"dtype": self.dtype}
        with engine.driver.on(caller):
            return self.move_movers(lambda mover: mover.to(engine.device, **options))

    def _finish(
        self, engine: Engine, moved: list[torch.Tensor], moved_movers: list[Any], homes: set[Any]
    ) -> Any:
        self.operation.moved(engine.driver, moved, homes)
        with neutral():
            return self.plan.rebuild(moved, moved_movers)


class UploadInto(Job):
    """One ``copy_`` of a host tensor into ``dst`` on a device, after what the caller's stream holds."""

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
        try:
            if self.small:
                with neutral(), engine.driver.relaxed():
                    if self._start_small(engine, caller):
                        return
            ready = engine.driver.record(caller)
        except BaseException as error:
            self.fail(engine, error)
            return
        self._start_large(engine, caller, ready)

    def _run_first(self) -> None:
        engine = self.runtime.engine_blocking(self.dst.device)
        caller = self.callers_stream(engine)
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
        return torch.empty_like(source, device=self.dst.device)

    def _settle(self, landing: torch.Tensor) -> None:
        """On the device: into ``dst``'s shape, strides and dtype."""
        if landing is not self.dst:
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
            self._settle(landing)
            self.land(engine, stream, lambda: self.dst, (keep, landing), release)
        return True

    def _run_large(self, engine: Engine) -> None:
        (source,) = self.plan.sources()
        with self.lane(engine, engine.uploads) as lane:
            lane.held.append(self.dst)
            with engine.driver.on(lane.stream):
                landing = self._landing(source)
                lane.upload(landing, source)
                self._settle(landing)
            self.land_lane(engine, lane, lambda: self.dst)
