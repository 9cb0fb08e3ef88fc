"""One copy lane's work: tensors between host and device, in page-locked chunks where need be.

Law of this file: it runs on worker threads, under ``no_grad`` and outside inference mode. A chunk is
filled while earlier ones are in flight; a transfer that holds chunks never waits for more of them, it
reuses its own oldest (see ``pinned``). Whatever the device may still use stays in :attr:`Lane.held`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from .._engine import Engine
from .._reactor import Point
from ..drivers.base import Event, Stream

__all__ = ["Lane", "flat", "is_dense", "same_order"]

#: Chunks of one transfer in flight: one being copied, one queued, one being filled.
_DEPTH = 3


def is_dense(tensor: torch.Tensor) -> bool:
    """Do the elements fill one piece of memory, without gaps or overlaps, in whatever order?"""
    if tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as one row, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def same_order(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two tensors have equal elements at equal places of their memory?"""
    sizes_matter = [i for i, size in enumerate(a.shape) if size != 1]
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and is_dense(a)
        and is_dense(b)
        and all(a.stride(i) == b.stride(i) for i in sizes_matter)
    )


class Lane:
    """A copy stream, and the chunks that one transfer has in flight on it."""

    def __init__(self, engine: Engine, stream: Stream) -> None:
        self.engine = engine
        self.driver = engine.driver
        self.stream = stream
        #: Everything that the device may use until the transfer's last event.
        self.held: list[Any] = []
        #: That event, once all is submitted.
        self.tail: Point | None = None
        #: Chunks are noted here when they are taken, and given back together: whatever breaks off.
        self._chunks: list[torch.Tensor] = []
        #: Those of them that the device is done with.
        self._idle: list[torch.Tensor] = []
        self._flying: deque[tuple[Event, torch.Tensor]] = deque()

    # -- up ----------------------------------------------------------------------------------------

    def upload(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Submit ``dst.copy_(src)``; ``dst`` on the device, of ``src``'s shape and dtype, and dense."""
        self.held += (dst, src)
        if src.numel() == 0:
            return
        if not same_order(dst, src):
            ordered = torch.empty_like(dst, device="cpu")
            ordered.copy_(src)
            src = ordered
            self.held.append(src)
        target, source = flat(dst), flat(src)
        if self.driver.is_pinned(src):
            self.driver.copy(target, source, self.stream)
            return
        step = max(1, self.engine.chunks.nbytes // src.element_size())
        for start in range(0, source.numel(), step):
            piece = source[start : start + step]
            chunk = self._chunk()
            if chunk is None:
                # No page-locked memory to be had: the driver stages it, and this thread waits for it.
                self.driver.copy(target[start : start + step], piece, self.stream)
                continue
            host = _as(chunk, piece)
            host.copy_(piece)
            self.driver.copy(target[start : start + step], host, self.stream)
            self._flying.append((self.driver.record(self.stream), chunk))

    # -- down --------------------------------------------------------------------------------------

    def download(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Submit ``dst.copy_(src)`` into page-locked, dense ``dst`` of ``src``'s order."""
        self.held += (dst, src)
        if src.numel():
            self.driver.copy(flat(dst), flat(src), self.stream)

    def download_through_chunks(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """``dst.copy_(src)`` into ordinary memory; *finished* on return. Blocks this worker thread.

        Host memory is written only after the chunk's event: that a copy into ordinary memory has
        finished when its call returns is a habit of drivers, not a promise.
        """
        self.held += (dst, src)
        if src.numel() == 0:
            return
        into = dst if same_order(dst, src) else torch.empty_like(src, device="cpu")
        target, source = flat(into), flat(src)
        step = max(1, self.engine.chunks.nbytes // src.element_size())
        landing: deque[tuple[Event, torch.Tensor, slice]] = deque()

        def land() -> torch.Tensor:
            event, chunk, where = landing.popleft()
            self.driver.synchronize(event)
            self.driver.recycle(event)
            _copy_host(target[where], _as(chunk, source[where]))
            return chunk

        for start in range(0, source.numel(), step):
            where = slice(start, min(start + step, source.numel()))
            chunk = land() if len(landing) >= _DEPTH else self._new_chunk()
            if chunk is None and landing:
                chunk = land()
            if chunk is None:  # none to be had: the driver copies into ordinary memory, and blocks
                chunk = torch.empty(self.engine.chunks.nbytes, dtype=torch.uint8)
                self.held.append(chunk)
            self.driver.copy(_as(chunk, source[where]), source[where], self.stream)
            landing.append((self.driver.record(self.stream), chunk, where))
        while landing:
            self._idle.append(land())
        if into is not dst:
            _copy_host(dst, into)

    # -- chunks ------------------------------------------------------------------------------------

    def _chunk(self) -> torch.Tensor | None:
        if len(self._flying) < _DEPTH:
            chunk = self._new_chunk()
            if chunk is not None or not self._flying:
                return chunk
        event, chunk = self._flying.popleft()
        self.driver.synchronize(event)
        self.driver.recycle(event)
        return chunk

    def _new_chunk(self) -> torch.Tensor | None:
        if self._idle:
            return self._idle.pop()
        wait = not self._chunks  # whoever holds one never waits for another
        chunk = self.engine.chunks.take(wait=wait, give_up=lambda: self.engine.lost is not None)
        if chunk is not None:
            self._chunks.append(chunk)
        return chunk

    def give_back(self) -> None:
        """The transfer's last event has completed: its chunks are free."""
        while self._flying:
            self.driver.recycle(self._flying.popleft()[0])
        self._idle.clear()
        while self._chunks:
            self.engine.chunks.give(self._chunks.pop())
        self.held.clear()


def _as(block: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first bytes of a block, as a row of ``like``'s length and dtype."""
    return block[: like.numel() * like.element_size()].view(like.dtype)


def _copy_host(dst: torch.Tensor, src: torch.Tensor) -> None:
    with torch.inference_mode(dst.is_inference()), torch.no_grad():
        dst.copy_(src)
