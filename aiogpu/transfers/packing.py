"""Many small tensors as a few large ones: one copy for up to a mebibyte of them.

Law of this file: a packed plan carries the same bytes as the plan that it stands for, and gives the same
result. It runs on staging threads, in pieces that are done within a fraction of a millisecond or release the
GIL: the event loop needs it, too.

What a copy costs does not depend on its size below some 100 KB, and 10 000 of them cost 10 000 times that. So
small leaves are laid one after the other in *slabs*, on the device for a download and in host memory for
an upload; a slab is copied as one tensor, and the leaves of the result are cut out of it where it arrives.

They share its memory then. Copies of their own would take an allocation and a launch for each leaf, which is
most of what packing saves, so that is left to those who need it, with ``clone()``. In return slabs are
small: whoever keeps one leaf keeps 1 MiB, half of what torch's allocator takes from the driver for a lone
small tensor (CUDACachingAllocator: kSmallBuffer, 2 MiB). The leaves are no views of one another in
autograd's eyes, and each has a version counter of its own: writing one in place neither disturbs nor
outdates its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from .plan import STRIDE, Plan, breathe

__all__ = ["ALIGNMENT", "SLAB_BYTES", "Packed", "packed"]

T = TypeVar("T")

#: Bytes of one slab, about. What is larger is not small.
SLAB_BYTES = 1024 * 1024

#: Bytes on a multiple of which each leaf begins: what cudaMalloc promises, so that no kernel that asks for
#: aligned memory (vectorised loads, TMA, compiled code that was specialised on it) is refused or slow.
ALIGNMENT = 256


class _Slab:
    """Some leaves of one dtype, one after the other."""

    __slots__ = ("alike", "leaves", "numel", "unit", "where")

    def __init__(self, unit: int) -> None:
        self.where: list[int] = []
        self.leaves: list[torch.Tensor] = []
        #: Elements that a leaf's place is a multiple of.
        self.unit = unit
        self.numel = 0
        #: All leaves are of one shape.
        self.alike = True

    def gather(self) -> torch.Tensor:
        """The leaves' bytes as one row, on their device; on the current stream."""
        if not self.alike:
            row: torch.Tensor = _flatten_dense_tensors(self._spaced())
            return row
        first = self.leaves[0]
        row = first.new_zeros(self.numel) if first.numel() % self.unit else first.new_empty(self.numel)
        torch.stack(self.leaves, out=self._table(row))
        return row

    def cut(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The leaves of the result, whose memory is that of ``row``; in the order of :attr:`where`."""
        views: Iterable[torch.Tensor]
        if self.alike:
            views = self._table(row).unbind(0)
        else:
            spaced = self._spaced()
            views = _unflatten_dense_tensors(row, spaced)
            if len(spaced) > len(self.leaves):
                ours = set(map(id, self.leaves))
                views = [view for view, part in zip(views, spaced, strict=True) if id(part) in ours]
        # Not views: one made under no_grad may not be written in place where gradients are wanted.
        return [view.data for view in views]

    def _table(self, row: torch.Tensor) -> torch.Tensor:
        """The row as a stack of leaves of one shape, without what is between them."""
        count, shape = len(self.leaves), self.leaves[0].shape
        return row.view(count, -1)[:, : shape.numel()].view(count, *shape)

    def _spaced(self) -> list[torch.Tensor]:
        """The leaves, with padding in between."""
        spaced: list[torch.Tensor] = []
        blanks: dict[int, torch.Tensor] = {}
        for leaf in self.leaves:
            spaced.append(leaf)
            gap = -leaf.numel() % self.unit
            if gap:
                if gap not in blanks:
                    blanks[gap] = leaf.new_zeros(gap)
                spaced.append(blanks[gap])
        return spaced


class Packed(Plan[T]):
    """A plan with slabs in the place of ``whole``'s small leaves, followed by the other leaves.

    In :attr:`plain` a slab is a tensor without data (on "meta"): :meth:`gather` lays it out.
    """

    in_slabs = True

    def __init__(
        self, whole: Plan[T], slabs: list[_Slab], rest: list[int], sources: list[torch.Tensor]
    ) -> None:
        self._whole = whole
        self._slabs = slabs
        self._rest = rest
        self._sources = sources
        first = [sources[slab.where[0]] for slab in slabs]
        self.plain = [
            torch.empty(slab.numel, dtype=leaf.dtype, device="meta")
            for slab, leaf in zip(slabs, first, strict=True)
        ]
        self.plain += [sources[index] for index in rest]
        self.dtypes = [whole.dtype_of(index) for index in (*(slab.where[0] for slab in slabs), *rest)]
        self.movers = whole.movers
        # Arrays that are among the sources are tensors by now.
        self.arrays = whole.arrays if len(sources) == len(whole.plain) else []
        self.wraps = whole.wraps
        self._tree = whole._tree

    def gather(self, index: int, source: torch.Tensor) -> torch.Tensor:
        return self._slabs[index].gather() if index < len(self._slabs) else source

    def rebuild(self, moved: Sequence[torch.Tensor], movers: Sequence[Any]) -> T:
        leaves: list[Any] = [None] * len(self._sources)
        for slab, row in zip(self._slabs, moved, strict=False):
            for index, leaf in zip(slab.where, slab.cut(row), strict=True):
                leaves[index] = leaf
            breathe()
        for index, leaf in zip(self._rest, moved[len(self._slabs) :], strict=False):
            leaves[index] = leaf
        return self._whole.rebuild([*leaves, *moved[len(self.plain) :]], movers)


def packed(plan: Plan[T], sources: list[torch.Tensor], device: torch.device, limit: int) -> Plan[T]:
    """``plan`` with its leaves of up to ``limit`` bytes on ``device`` packed; ``plan`` itself if nothing is
    gained.

    ``sources``: the plan's plain tensors, or these and its arrays.
    """
    if isinstance(plan, Packed):
        return plan  # it is a second try
    slabs: list[_Slab] = []
    rest: list[int] = []
    filling: dict[Any, _Slab] = {}
    for start in range(0, len(sources), STRIDE):
        for index, leaf in enumerate(sources[start : start + STRIDE], start):
            nbytes = leaf.nbytes
            if not 0 < nbytes <= limit or not leaf.is_contiguous() or leaf.device != device:
                rest.append(index)
                continue
            dtype, shape = leaf.dtype, leaf.shape
            wanted = plan.dtype_of(index)
            slab = filling.get((dtype, wanted))
            if slab is None or slab.numel * dtype.itemsize + nbytes > SLAB_BYTES:
                smaller = dtype.itemsize if wanted is None else min(dtype.itemsize, wanted.itemsize)
                slab = filling[dtype, wanted] = _Slab(ALIGNMENT // smaller)
                slabs.append(slab)
            elif slab.alike and shape != slab.leaves[0].shape:
                slab.alike = False
            slab.where.append(index)
            slab.leaves.append(leaf)
            slab.numel += -(-shape.numel() // slab.unit) * slab.unit
        breathe()
    alone = [slab.where[0] for slab in slabs if len(slab.where) == 1]
    slabs = [slab for slab in slabs if len(slab.where) > 1]
    return Packed(plan, slabs, [*rest, *alone], sources) if slabs else plan
