"""One copy lane's work: tensors between host and device, in page-locked chunks where need be.

Law of this file: it runs on worker threads, under ``no_grad`` and outside inference mode. A transfer is cut
into segments. Whichever thread takes one does all of it, with one chunk, and while it has the chunk it waits
for nothing but its own segment on the device. Whatever the device may still use stays in :attr:`Lane.held`
or in the ring; and no method is left, whatever it raises, while another thread still reads or writes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._engine import Engine
from .._reactor import Point
from ..drivers.base import Stream
from .layout import flat, is_dense, same_order
from .release import is_large
from .segments import Cutter, Made, Rows, Segments, Views, segment_bytes
from .submitting import Submissions

__all__ = ["Lane", "flat", "is_dense", "same_order"]

#: Chunks of a transfer that the device has while each copy thread has one.
_IN_FLIGHT = 6

#: The device's part of a segment, the row in the chunk with what belongs there, and the chunk.
_Filled = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

#: Torch copies fewer elements than this on the calling thread (ATen's ``GRAIN_SIZE``).
_GRAIN = 32768


class Lane:
    """A copy stream, and what one transfer has to do with it."""

    def __init__(self, engine: Engine, stream: Stream) -> None:
        self.engine = engine
        self.driver = engine.driver
        self.stream = stream
        #: Everything that the device may use until the transfer's last event, but for the ring's chunks.
        self.held: list[Any] = []
        #: That event, once all is submitted.
        self.tail: Point | None = None
        self._ring = engine.chunks
        self._moved = 0
        self._failures = engine.memory.failures
        #: Chunks of segments that broke off: the device may have been given them.
        self._broken: list[torch.Tensor] = []
        self._filled: Submissions[_Filled] = Submissions()

    # -- up ----------------------------------------------------------------------------------------

    def upload(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Submit ``dst.copy_(src)``; ``dst`` on the device, of ``src``'s shape and dtype, and dense."""
        self.upload_all([(dst, src)])

    def upload_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The same for several ``(dst, src)`` at once: tensors that are no longer than a segment are copied
        side by side, too."""
        staged = []
        for dst, src in pairs:
            self.held += (dst, src)
            if src.numel() == 0:
                continue
            alike = same_order(dst, src)
            if alike and self.driver.is_pinned(src):
                self.driver.copy(*_plainly(dst, src), self.stream)
            else:
                staged.append((src, dst, alike))
        if staged:
            self._through_chunks(staged, self._up)

    def upload_made(self, rows: Made) -> None:
        """Submit the uploads of rows that the copy threads make, side by side, and in chunks if they fit."""
        there = [rows.there(index) for index in range(rows.count)]
        self.held += there
        if max(row.nbytes for row in there) > self._ring.nbytes:
            self.upload_all([(row, rows.host(index)) for index, row in enumerate(there)])
            return
        self._moved += sum(row.nbytes for row in there)
        short = self._moved <= self._ring.nbytes
        self._ring.expect(min(rows.count, self.engine.crew.threads + _IN_FLIGHT))
        self.engine.crew.run(rows.count, lambda index: self._up(rows, index, short))

    def _up(self, segments: Made, index: int, short: bool) -> None:
        chunk = self._take(short)
        if chunk is None:  # none to be had: the driver stages it, and this thread waits for it
            host = segments.host(index)
            self.held.append(host)
            self.driver.copy(segments.there(index), host, self.stream)
            return
        try:
            row = segments.row(index, chunk)
            segments.fill(index, row)  # as soon as can be: other threads wait for the GIL to get here
            there = segments.there(index)
        except BaseException:
            self._broken.append(chunk)
            raise
        self._filled.add((there, row, chunk), self._submit, self._give_up)

    def _submit(self, filled: list[_Filled]) -> None:
        chunks = [chunk for _, _, chunk in filled]
        try:
            self.driver.copy_all([(there, row) for there, row, _ in filled], self.stream)
            event = self.driver.record(self.stream)
        except BaseException:
            self._broken += chunks
            raise
        self._ring.fly(self, event, chunks)

    def _give_up(self, filled: list[_Filled]) -> None:
        self._broken += [chunk for _, _, chunk in filled]

    # -- down --------------------------------------------------------------------------------------

    def download(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Submit ``dst.copy_(src)`` into page-locked, dense ``dst`` of ``src``'s order."""
        self.held += (dst, src)
        if src.numel():
            self.driver.copy(*_plainly(dst, src), self.stream)

    def download_through_chunks(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """``dst.copy_(src)`` into ordinary memory; *finished* on return. Blocks this worker thread."""
        self.download_all_through_chunks([(dst, src)])

    def download_all_through_chunks(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The same for several ``(dst, src)``.

        Host memory is written only once the segment's copy has been waited for: that one into ordinary
        memory has finished when its call returns is a habit of drivers, not a promise. Fresh memory gets its
        pages from many copy threads at once: one alone takes page faults at 2 GB/s.
        """
        for dst, src in pairs:
            self.held += (dst, src)
        some = [(dst, src) for dst, src in pairs if src.numel()]
        if some:
            self._through_chunks([(dst, src, same_order(dst, src)) for dst, src in some], self._down)
        for dst, _ in some:
            if not dst.is_inference():  # autograd does not see what copy threads write
                torch.autograd.graph.increment_version(dst)

    def _down(self, segments: Segments, index: int, short: bool) -> None:
        there = segments.there(index)
        chunk = self._take(short)
        row = torch.empty_like(there, device="cpu") if chunk is None else segments.row(index, chunk)
        try:
            self.driver.copy_and_wait(row, there, self.stream)
            segments.empty(index, row)
        except BaseException:
            if chunk is None:
                self.held.append(row)
            else:
                self._broken.append(chunk)
            raise
        if chunk is not None:
            self._ring.give(chunk)

    # -- both --------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """The transfer's last event has completed: its chunks are free."""
        self._ring.land(self)
        while self._broken:
            self._ring.give(self._broken.pop())
        held, self.held = self.held, []
        if is_large(held):  # this is the loop's thread, or another that must not stand still
            self.engine.let_go(held)

    def lose(self) -> None:
        """Nobody can tell when the device is done: this object is kept for ever, and the ring does without
        its chunks. Those in flight have events of their own."""
        self._ring.lose(len(self._broken))

    def _through_chunks(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor, bool]],
        do: Callable[[Segments, int, bool], None],
    ) -> None:
        """All segments of ``(host, there, alike in memory?)`` done, by as many threads as are to be had."""
        nbytes = sum(there.nbytes for _, there, _ in pairs)
        self._moved += nbytes
        short = self._moved <= self._ring.nbytes  # the transfer needs no more than one chunk so far
        cutter = Cutter(nbytes, self._ring.nbytes, self.engine.crew.threads)
        rows = _turns(Rows(host, there, cutter) for host, there, alike in pairs if alike)
        most = segment_bytes(nbytes, self._ring.nbytes)
        views = _turns(Views(host, there, most) for host, there, alike in pairs if not alike)
        if rows:
            self._ring.expect(min(len(rows), self.engine.crew.threads + _IN_FLIGHT))
            self.engine.crew.run(len(rows), lambda turn: do(*rows[turn], short))
        if views:
            # One thread for all of this that is not little, so that there is one OpenMP team.
            little = all(segments.there(index).numel() < _GRAIN for segments, index in views)
            self._ring.expect(min(len(views), 1 + _IN_FLIGHT))
            self.engine.reordering.run(len(views), lambda turn: do(*views[turn], short), help=little)

    def _take(self, short: bool) -> torch.Tensor | None:
        # New ones are asked for as long as nobody has been refused one since this transfer began.
        grow = self.engine.memory.failures == self._failures
        return self._ring.take(self, short=short, grow=grow, give_up=self._has_failed)

    def _has_failed(self) -> bool:
        # A segment has broken off: this transfer itself may have the chunk that a thread of its waits for.
        return self.engine.lost is not None or bool(self._broken)


def _turns(parts: Iterable[Segments]) -> list[tuple[Segments, int]]:
    return [(part, index) for part in parts for index in range(part.count)]


def _plainly(dst: torch.Tensor, src: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that lie in memory alike, so that torch copies them as they are."""
    if dst.is_contiguous() and src.is_contiguous():
        return dst, src
    return flat(dst), flat(src)
