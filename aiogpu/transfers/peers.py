"""Tensors that are on a device already: read from the target itself, or from another one.

Law of this file: a copy between devices runs behind what the current streams of *both* held at the call, and
no thread waits for it. torch orders the two streams of a copy (the destination's before and after, with
events; ``aten/native/cuda/Copy.cu``) and finds the way: directly where the devices reach each other's memory,
else through the driver's staging, strided sources through temporaries. What is left to us is which streams
these are, and that the first copy of a pair, for which CUDA maps one device's memory into the other (it
takes up to some 100 ms), is not made on a loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .._engine import Engine
from .._operation import Operation
from .._reactor import Point
from .._runtime import Runtime
from .._streams import Lease
from ..drivers.base import Driver, Event, Stream
from .jobs import Job
from .plan import Plan, neutral

__all__ = ["Origins", "PeerCopy", "device_of"]

_HOST = {torch.device("cpu")}

#: Pairs of devices between which something has been copied: from, to.
_introduced: set[tuple[torch.device, torch.device]] = set()


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where ``tensor`` is."""
    return tensor.device


class _Origin:
    """A device that sources are on, and what its current stream held at the call."""

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self.device = device
        self._runtime = runtime
        self._engine = runtime.engine_now(device)
        self._stream: Stream | None = None
        self._native: torch.cuda.Stream | None = None
        if self._engine is not None:
            self._stream = self._engine.driver.current()
            self.ready: Event = self._engine.driver.record(self._stream)
        else:  # torch has used it, or there would be no tensor on it; we have not
            self._native = torch.cuda.current_stream(device)
            self.ready = torch.cuda.Event()
            self.ready.record(self._native)

    def started(self) -> tuple[Engine, Stream]:
        """Its engine, made if need be, and what was the caller's stream. On a worker thread."""
        if self._engine is None:
            self._engine = self._runtime.engine_blocking(self.device)
        if self._stream is None:
            self._stream = self._engine.driver.adopt(self._native)
        return self._engine, self._stream


class Origins:
    """The devices that the sources of one transfer are on already. Made at the call, on the caller's thread.

    ``writes``: the transfer writes memory that was there before, so it comes after what the target's current
    stream held, too. New memory needs that only where the caller works on that stream, which may
    be what is ordered after the sources' makers (a parent after its child on another device).
    """

    def __init__(
        self,
        runtime: Runtime,
        sources: Iterable[torch.Tensor],
        target: Engine | None,
        *,
        writes: bool = False,
    ) -> None:
        devices = {device_of(source) for source in sources} - _HOST
        self._runtime = runtime
        self._all = {device: _Origin(runtime, device) for device in devices}
        self._behind: Event = None
        if self._all and target is not None and not target.driver.eager:
            here = target.driver.current()
            if writes or not (target.driver.is_default(here) and target.driver.legacy_orders):
                self._behind = target.driver.record(here)
        self._leases: list[tuple[Lease, Driver]] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def __contains__(self, source: torch.Tensor) -> bool:
        return bool(self._all) and device_of(source) in self._all

    def check(self, devices: set[torch.device]) -> None:
        """Of data that was still being looked at when this was made: is it where its beginning is?"""
        others = devices - self._all.keys() - _HOST
        if others:
            names = ", ".join(sorted(map(str, others)))
            raise ValueError(
                f"data of very many tensors has one on {names}, and none of the first ones is there: put "
                "one of that device in front, or call this once for each device"
            )

    def known_to(self, target: torch.device) -> bool:
        """Has something been copied from all of them to ``target`` before?"""
        return all(device == target or (device, target) in _introduced for device in self._all)

    def follow(self, driver: Driver, stream: Stream) -> None:
        """Order ``stream`` after what was submitted to all of them before the call."""
        for origin in self._all.values():
            driver.wait(stream, origin.ready)

    def when_ready(self, then: Callable[[BaseException | None], None], keep: Any) -> None:
        """Call ``then`` once that has finished. On a worker thread; ``then`` is called on the loop's."""
        waiting = list(self._all.values())

        def look(error: BaseException | None) -> None:
            if error is not None or not waiting:
                then(error)
            else:
                origin = waiting.pop()
                self._runtime.watch(*origin.started(), origin.ready, look, keep)

        look(None)

    @contextmanager
    def entered(self, engine: Engine, lane: Stream) -> Iterator[None]:
        """On a staging thread: within the block, a copy stream is current on each of them. It is behind what
        the caller's streams held, as ``lane`` is, the target's."""
        with ExitStack() as stack:
            self._enter(engine, lane, stack)
            yield

    def _enter(self, engine: Engine, lane: Stream, stack: ExitStack) -> None:
        if self._behind is not None:
            engine.driver.wait(lane, self._behind)
        self.follow(engine.driver, lane)
        for device, origin in self._all.items():
            if device == engine.device:
                continue
            driver = origin.started()[0].driver
            lease = origin.started()[0].downloads.lease()
            self._leases.append((lease, driver))
            driver.wait(lease.stream, origin.ready)
            if self._behind is not None:
                driver.wait(lease.stream, self._behind)
            stack.enter_context(driver.on(lease.stream))

    def leave(self, target: torch.device, tail: Point | None) -> None:
        """All is submitted; ``tail``: the target's point that is behind all copies. Or it broke off."""
        if tail is not None:
            _introduced.update((device, target) for device in self._all)
        while self._leases:
            self._leases.pop()[0].release(tail)


class PeerCopy(Job):
    """One ``copy_`` from a device to another one, behind what the current streams of both hold."""

    repeatable = True

    def __init__(
        self,
        runtime: Runtime,
        plan: Plan[Any],
        operation: Operation[Any],
        dst: torch.Tensor,
        src: torch.Tensor,
    ) -> None:
        super().__init__(runtime, plan, operation)
        self.dst = dst
        self.src = src

    def start(self, engine: Engine | None) -> None:
        try:
            self.origins = Origins(self.runtime, [self.src], engine, writes=True)
            if engine is None:  # the destination's stream, too, counts as of now
                self.target = Origins(self.runtime, [self.dst], None)
            elif self.small and self.origins.known_to(engine.device):
                with neutral(), engine.driver.relaxed():
                    self._start_small(engine, engine.driver.current())
                return
        except BaseException as error:
            self.break_off(engine, error, lambda: self._run(engine))
            return
        self.in_thread(engine, lambda: self._run(engine))

    def _start_small(self, engine: Engine, stream: Stream) -> None:
        keep = (self.dst, self.src)
        with self.custody(engine, stream, keep, _nothing):
            self.origins.follow(engine.driver, stream)
            engine.driver.copy(self.dst, self.src, stream)
            self.land(engine, stream, None, keep, _nothing, self.dst)

    def _run(self, known: Engine | None) -> None:
        engine = known or self.runtime.engine_blocking(device_of(self.dst))
        # A lane that waits for users' kernels, as downloads do.
        with self.lane(engine, engine.downloads, self.origins.leave) as lane:
            lane.held += (self.dst, self.src)
            if known is None:
                self.target.follow(engine.driver, lane.stream)
            # Streams are swapped like brackets: what is current now is so again afterwards.
            with engine.driver.on(lane.stream), self.origins.entered(engine, lane.stream):
                engine.driver.copy(self.dst, self.src, lane.stream)
                self.land_lane(engine, lane, None, self.dst)


def _nothing() -> None:
    """There is no block to give back."""
