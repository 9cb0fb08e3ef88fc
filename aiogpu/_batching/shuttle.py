"""A small batch's way to the device and back: through one page-locked slot, on the current stream.

Law of this file: it submits and never waits; whatever the device still uses hangs on :attr:`Shuttle.keep`. A
slot is given back with its last reference, so whoever keeps the shuttle until the device is done keeps it
right, on whatever way a batch ends.

This is what ``to_device`` and ``to_host`` do with something small, without their handles: a batch's rows are
stacked straight into the slot, by whatever thread computes the batch, and nobody ever awaits its transfers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._engine import Engine
from ..transfers.parts import is_ordinary
from ..transfers.tree import flatten
from .collate import ALIGNMENT

__all__ = ["Shuttle"]


class _Slot:
    """A page-locked slot of the engine's, and how far it is filled."""

    __slots__ = ("_block", "_engine", "_used")

    def __init__(self, engine: Engine, block: torch.Tensor) -> None:
        self._engine = engine
        self._block = block
        self._used = 0

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next part of it, as a tensor."""
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        self._used = start + math.prod(shape) * dtype.itemsize
        return self._block[start : self._used].view(dtype).view(shape)

    def __del__(self) -> None:
        self._engine.slots.give(self._block)


class Shuttle:
    """For one batch. Its calls belong on the thread, and the stream, that computes the batch."""

    __slots__ = ("_engine", "keep")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: What the device uses until all that was submitted here has finished.
        self.keep: list[Any] = []

    def open(self) -> bool:
        """Is there a slot for the way in? To be asked first."""
        return self._slot() is not None

    def up(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """``rows``, stacked, on the device. All of a batch's columns together must fit into one slot."""
        first = rows[0]
        device = self._engine.device
        if first.device == device and device.type != "cpu":
            return torch.stack(tuple(rows))
        slot: _Slot = self.keep[0]
        host = slot.room((len(rows), *first.shape), first.dtype)
        torch.stack(tuple(rows), out=host)
        there = torch.empty(host.shape, dtype=first.dtype, device=device)
        # The function may let go of it before the device has filled it.
        self.keep.append(there)
        self._copy(there, host)
        return there

    def down(self, output: Any) -> tuple[Any, Callable[[], None]] | None:
        """Start downloading ``output``: the like of it in host memory, and what fills that in the end.

        ``None`` for what is too large for a slot, or no plain tensors of the device: for ``to_host``.
        """
        try:
            tree = flatten(output, verb="to_host")
        except (TypeError, ValueError):
            return None  # to_host says why
        if tree.arrays or tree.movers or tree.registered or not all(map(self._is_plain, tree.tensors)):
            return None
        nbytes = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tree.tensors)
        if nbytes > self._engine.slots.nbytes or (slot := self._slot()) is None:
            return None
        landed: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in tree.tensors:
            source = tensor.contiguous()
            self.keep.append(source)
            host = slot.room(source.shape, source.dtype)
            self._copy(host, source)
            landed.append((torch.empty(source.shape, dtype=source.dtype, device="cpu"), host))

        def fill() -> None:
            for result, host in landed:
                result.copy_(host)

        return tree.rebuild([result for result, _ in landed], []), fill

    def _slot(self) -> _Slot | None:
        block = self._engine.slots.take_free()
        if block is None:
            return None
        slot = _Slot(self._engine, block)
        self.keep.append(slot)
        return slot

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if src.numel():
            driver = self._engine.driver
            driver.copy(dst, src, driver.current())

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        here = tensor.device == self._engine.device
        return here and is_ordinary(tensor) and not (tensor.is_conj() or tensor.is_neg())
