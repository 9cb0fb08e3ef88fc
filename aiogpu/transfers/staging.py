"""One copy lane's work: tensors between host and device, in page-locked chunks where need be.

Law of this file: it runs on worker threads, under ``no_grad`` and outside inference mode. While one chunk is
with the device, copy threads fill or empty others; when a lane waits for its turn in the ring, it holds no
chunk. Whatever the device may still use stays in :attr:`Lane.held` or in the ring; and no method is left,
whatever it raises, while a copy thread still reads or writes for it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .._engine import Engine
from .._reactor import Point
from ..drivers.base import Event, Stream
from .crew import Part, copying
from .layout import flat, is_dense, pairs, same_order

__all__ = ["Cut", "Lane", "cut", "flat", "is_dense", "same_order"]

#: Bytes that one copy thread copies at a time, at least, so that its share of Python (5 µs) does not count.
PIECE_BYTES = 512 * 1024

#: Chunks of one transfer that are with the device, besides those with the copy threads, before it waits.
_WITH_DEVICE = 5


@dataclass(frozen=True)
class Cut:
    """How a transfer is cut up. ``step``: bytes copied by one command of the device; ``piece``: by one copy
    thread at a time; ``ahead``: chunks with the copy threads at once; ``share``: chunks in all."""

    step: int
    piece: int
    ahead: int
    share: int


def cut(nbytes: int, chunk: int, threads: int) -> Cut:
    """The steps grow with the transfer: the first and the last overlap with nothing, but each costs a
    submission. Enough chunks are with the copy threads to keep all of them busy."""
    step = min(chunk, max(64, chunk // 4, -(-nbytes // 16)))
    step = min(chunk, -(-step // 64) * 64)  # whole cache lines, whole elements of every dtype
    piece = max(PIECE_BYTES, step // 8 // 64 * 64)
    ahead = max(2, threads // 8 + 1)
    return Cut(step, piece, ahead, ahead + _WITH_DEVICE)


class _Load:
    """A chunk and what it carries: some elements of the user's, some of the device's."""

    __slots__ = ("chunk", "event", "host", "part", "row", "there")

    def __init__(self, chunk: torch.Tensor, host: torch.Tensor, there: torch.Tensor) -> None:
        self.chunk = chunk
        self.host = host
        self.there = there
        self.row = chunk[: there.numel() * there.element_size()].view(there.dtype)
        self.part: Part | None = None  # with the copy threads until then
        self.event: Event = None  # with the device until then


class Lane:
    """A copy stream, and the chunks that one transfer has in hand."""

    def __init__(self, engine: Engine, stream: Stream) -> None:
        self.engine = engine
        self.driver = engine.driver
        self.stream = stream
        #: Everything that the device may use until the transfer's last event, but for the ring's chunks.
        self.held: list[Any] = []
        #: That event, once all is submitted.
        self.tail: Point | None = None
        self._ring = engine.chunks
        self._crew = engine.crew
        self._batch = engine.crew.batch()
        self._moved = 0
        #: The ring's chunks that this lane has in hand: whatever breaks off, they are given back together.
        self._chunks: dict[int, torch.Tensor] = {}
        #: Page-locking one more chunk has failed. Each transfer tries once.
        self._barren = False

    # -- up ----------------------------------------------------------------------------------------

    def upload(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Submit ``dst.copy_(src)``; ``dst`` on the device, of ``src``'s shape and dtype, and dense."""
        self.held += (dst, src)
        if src.numel() == 0:
            return
        rows = same_order(dst, src)
        if rows and self.driver.is_pinned(src):
            self.driver.copy(flat(dst), flat(src), self.stream)
            return
        plan, short = self._plan(src)
        filling: deque[_Load] = deque()
        with self._waited_for(filling):
            for host, there in pairs(src, dst, plan.step // src.element_size()):
                chunk = self._chunk_to_fill(plan, short, filling)
                if chunk is None:
                    self._upload_unstaged(there, host, rows)
                    continue
                load = _Load(chunk, host, there)
                filling.append(load)
                self._fill(load, rows, plan)
                if len(filling) >= plan.ahead:
                    self._submit(filling)
            while filling:
                self._submit(filling)

    def _chunk_to_fill(self, plan: Cut, short: bool, filling: deque[_Load]) -> torch.Tensor | None:
        while filling:
            chunk = self._try_take(plan)
            if chunk is not None:
                return chunk
            self._submit(filling)  # before it waits, it holds none
        return self._take(plan, short)

    def _submit(self, filling: deque[_Load]) -> None:
        load = filling[0]
        assert load.part is not None
        self._batch.wait(load.part)
        filling.popleft()
        self.driver.copy(load.there, load.row, self.stream)
        event = self.driver.record(self.stream)
        del self._chunks[id(load.chunk)]
        self._ring.fly(self, event, load.chunk)

    def _upload_unstaged(self, there: torch.Tensor, host: torch.Tensor, rows: bool) -> None:
        """No page-locked memory to be had: the driver stages it, and this thread waits for it."""
        if not rows:
            host = flat(torch.empty(host.shape, dtype=host.dtype).copy_(host))
            self.held.append(host)
        self.driver.copy(there, host, self.stream)

    # -- down --------------------------------------------------------------------------------------

    def download(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Submit ``dst.copy_(src)`` into page-locked, dense ``dst`` of ``src``'s order."""
        self.held += (dst, src)
        if src.numel():
            self.driver.copy(flat(dst), flat(src), self.stream)

    def download_through_chunks(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """``dst.copy_(src)`` into ordinary memory; *finished* on return. Blocks this worker thread.

        Host memory is written only after the chunk's event: that a copy into ordinary memory has
        finished when its call returns is a habit of drivers, not a promise. Fresh memory gets its pages
        from many copy threads at once: one alone takes page faults at 2 GB/s.
        """
        self.held += (dst, src)
        if src.numel() == 0:
            return
        rows = same_order(dst, src)
        plan, short = self._plan(src)
        flying: deque[_Load] = deque()
        landing: deque[_Load] = deque()
        spare: list[torch.Tensor] = []
        with self._waited_for(landing):
            for host, there in pairs(dst, src, plan.step // src.element_size()):
                # What has arrived goes on at once; what has not by now waits here, so that the copy
                # threads begin before all chunks are in use.
                while flying and (len(flying) > _WITH_DEVICE or self.driver.query(flying[0].event)):
                    self._land(flying, landing, rows, plan)
                chunk = self._chunk_to_land_in(plan, short, rows, flying, landing, spare)
                load = _Load(chunk, host, there)
                self.driver.copy(load.row, there, self.stream)
                load.event = self.driver.record(self.stream)
                flying.append(load)
            while flying:
                self._land(flying, landing, rows, plan)
            while landing:
                self._clear(landing, spare)
        if not dst.is_inference():
            torch.autograd.graph.increment_version(dst)  # autograd does not see what copy threads write

    def _chunk_to_land_in(
        self,
        plan: Cut,
        short: bool,
        rows: bool,
        flying: deque[_Load],
        landing: deque[_Load],
        spare: list[torch.Tensor],
    ) -> torch.Tensor:
        while True:
            chunk = spare.pop() if spare else self._try_take(plan) if self._chunks else None
            if chunk is not None:
                return chunk
            if landing and (landing[0].part.done or not flying):  # type: ignore[union-attr]
                self._clear(landing, spare)
            elif flying:
                self._land(flying, landing, rows, plan)
            else:  # it holds none, so it may wait
                chunk = self._take(plan, short)
                if chunk is None:  # none to be had: the driver copies into ordinary memory, and blocks
                    chunk = torch.empty(plan.step, dtype=torch.uint8)
                    self.held.append(chunk)
                return chunk

    def _land(self, flying: deque[_Load], landing: deque[_Load], rows: bool, plan: Cut) -> None:
        """The oldest chunk in flight has arrived: on with its elements to where the user wants them."""
        load = flying.popleft()
        self.driver.synchronize(load.event)
        self.driver.recycle(load.event)
        landing.append(load)
        self._empty(load, rows, plan)

    def _clear(self, landing: deque[_Load], spare: list[torch.Tensor]) -> None:
        """The oldest landed chunk is empty: back to the ring, where it may be somebody else's turn."""
        load = landing[0]
        assert load.part is not None
        self._batch.wait(load.part)
        landing.popleft()
        if self._chunks.pop(id(load.chunk), None) is None:
            spare.append(load.chunk)  # not the ring's
        else:
            self._ring.give(load.chunk)

    # -- both --------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """The transfer's last event has completed: its chunks are free."""
        self._ring.land(self)
        while self._chunks:
            self._ring.give(self._chunks.popitem()[1])
        self.held.clear()

    def _plan(self, tensor: torch.Tensor) -> tuple[Cut, bool]:
        """How to cut ``tensor`` up, and whether the whole transfer is a short one so far."""
        nbytes = tensor.numel() * tensor.element_size()
        self._moved += nbytes
        return cut(nbytes, self._ring.nbytes, self._crew.threads), self._moved <= self._ring.nbytes

    def _fill(self, load: _Load, rows: bool, plan: Cut) -> None:
        """From the user's elements into the chunk. Begins; ends with ``load.part``."""
        if rows:
            load.part = self._batch.add(copying(load.row, load.host, plan.piece))
        else:
            load.part = self._crew.reorder(load.row.view(load.host.shape), load.host)

    def _empty(self, load: _Load, rows: bool, plan: Cut) -> None:
        """The way back."""
        if rows:
            load.part = self._batch.add(copying(load.host, load.row, plan.piece))
        else:
            load.part = self._crew.reorder(load.host, load.row.view(load.host.shape))

    def _try_take(self, plan: Cut) -> torch.Tensor | None:
        failures = self.engine.memory.failures
        share = 0 if self._barren else plan.share - len(self._chunks)
        return self._noted(self._ring.try_take(self, share), failures)

    def _take(self, plan: Cut, short: bool) -> torch.Tensor | None:
        failures = self.engine.memory.failures
        share = 0 if self._barren else plan.share
        chunk = self._ring.take(self, share, short=short, give_up=lambda: self.engine.lost is not None)
        return self._noted(chunk, failures)

    def _noted(self, chunk: torch.Tensor | None, failures: int) -> torch.Tensor | None:
        self._barren |= self.engine.memory.failures != failures
        if chunk is not None:
            self._chunks[id(chunk)] = chunk
        return chunk

    @contextlib.contextmanager
    def _waited_for(self, loads: deque[_Load]) -> Iterator[None]:
        """Whatever is raised in the block: no copy thread works on ``loads`` after it."""
        try:
            yield
        except BaseException:
            for load in loads:
                if load.part is not None:
                    with contextlib.suppress(BaseException):
                        self._batch.wait(load.part)
            raise
