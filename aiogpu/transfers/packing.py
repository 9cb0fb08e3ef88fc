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

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch

from .plan import Plan, breathe
from .segments import Made

__all__ = ["ALIGNMENT", "SLAB_BYTES", "STRIDE", "Packed", "packed"]

T = TypeVar("T")

#: Bytes of one slab, at most. What is larger is not small.
SLAB_BYTES = 1024 * 1024

#: Bytes on a multiple of which each leaf begins: what cudaMalloc promises, so that no kernel that asks for
#: aligned memory (vectorised loads, TMA, compiled code that was specialised on it) is refused or slow.
ALIGNMENT = 256

#: Runs of leaves between two chances for others to take the GIL. In a long one torch lets go of it.
STRIDE = 64


class _Run(NamedTuple):
    """Leaves of one shape, side by side in a slab."""

    where: Sequence[int]
    """Their numbers among the sources."""
    shape: torch.Size
    start: int
    """The first one's place in the slab, in elements."""
    step: int
    """From each to the next."""

    def table(self, row: torch.Tensor) -> torch.Tensor:
        """The part of ``row``, the slab, that is theirs: a stack of them, without what is between them."""
        strides = torch.empty(self.shape, device="meta").stride()
        size, start = (len(self.where), *self.shape), row.storage_offset() + self.start
        return row.as_strided(size, (self.step, *strides), start)


class _Slab:
    """Leaves of one dtype, one after the other."""

    __slots__ = ("numel", "padded", "runs")

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self.numel = 0
        #: There is something between the leaves.
        self.padded = False

    def gather(self, sources: list[torch.Tensor], row: torch.Tensor) -> None:
        """The leaves' bytes into ``row``, which is where they are; on the current stream."""
        if self.padded:
            row.zero_()
        for count, run in enumerate(self.runs, 1):
            _stack(_picked(sources, run.where), run.table(row))
            if count % STRIDE == 0:
                breathe()

    def cut(self, row: torch.Tensor, leaves: list[Any]) -> None:
        """Put the leaves of the result, whose memory is that of ``row``, to their places among ``leaves``."""
        for count, run in enumerate(self.runs, 1):
            with _no_views():
                views = run.table(row).unbind(0)
            if type(run.where) is range:
                leaves[run.where.start : run.where.stop] = views
            else:
                for index, view in zip(run.where, views, strict=True):
                    leaves[index] = view
            if count % STRIDE == 0:
                breathe()


def _picked(sources: list[torch.Tensor], where: Sequence[int]) -> list[torch.Tensor]:
    if type(where) is range:
        return sources[where.start : where.stop]
    return [sources[index] for index in where]


def _stack(leaves: list[torch.Tensor], table: torch.Tensor) -> None:
    """``torch.stack(leaves, out=table)``, faster: ``cat`` makes no view of each leaf, as ``stack`` does on a
    GPU; and into a table with gaps both would copy leaf by leaf on the CPU."""
    if table.dim() == 1:
        table.copy_(torch.stack(leaves))
    elif table.is_contiguous():
        torch.cat(leaves, out=table.flatten(0, 1))
    else:
        table.copy_(torch.cat(leaves).reshape(table.shape))


def _no_views() -> Any:
    """A block in which parts of a tensor are no views in autograd's eyes, as ``.data`` is none: those made
    under no_grad may not be written in place where gradients are wanted, and share a version counter.

    Without the dispatch key that makes them so (``ADInplaceOrView``): ``.data`` of each would take as long
    again. Nothing may be written in it, which would not be counted.
    """
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))


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
        first = [slab.runs[0].where[0] for slab in slabs]
        self.plain = [
            torch.empty(slab.numel, dtype=sources[index].dtype, device="meta")
            for slab, index in zip(slabs, first, strict=True)
        ]
        self.plain += [sources[index] for index in rest]
        self.dtypes = [whole.dtype_of(index) for index in (*first, *rest)]
        self.movers = whole.movers
        # Arrays that are among the sources are tensors by now.
        self.arrays = whole.arrays if len(sources) == len(whole.plain) else []
        self.wraps = whole.wraps
        self._tree = whole._tree

    @property
    def slabs(self) -> list[torch.Tensor]:
        """Those in :attr:`plain`."""
        return self.plain[: len(self._slabs)]

    def gather(self, index: int, source: torch.Tensor) -> torch.Tensor:
        if index >= len(self._slabs):
            return source
        slab = self._slabs[index]
        row = self._sources[slab.runs[0].where[0]].new_empty(slab.numel)
        slab.gather(self._sources, row)
        return row

    def made(self, there: Sequence[torch.Tensor]) -> Made:
        """The slabs as rows that can be made anywhere, and their places on the device."""
        return _Slabs(self, there)

    def rebuild(self, moved: Sequence[torch.Tensor], movers: Sequence[Any]) -> T:
        leaves: list[Any] = [None] * len(self._sources)
        for slab, row in zip(self._slabs, moved, strict=False):
            slab.cut(row, leaves)
        for index, leaf in zip(self._rest, moved[len(self._slabs) :], strict=False):
            leaves[index] = leaf
        return self._whole.rebuild([*leaves, *moved[len(self.plain) :]], movers)


class _Slabs(Made):
    def __init__(self, plan: Packed[Any], there: Sequence[torch.Tensor]) -> None:
        self.count = len(there)
        self._plan = plan
        self._there = there

    def there(self, index: int) -> torch.Tensor:
        return self._there[index]

    def fill(self, index: int, row: torch.Tensor) -> None:
        self._plan._slabs[index].gather(self._plan._sources, row)

    def host(self, index: int) -> torch.Tensor:
        return self._plan.gather(index, self._there[index])


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
    for count, (like, found) in enumerate(plan.alike(sources).groups.items(), 1):
        where: Sequence[int] = found[0] if len(found) == 1 else [*chain.from_iterable(found)]
        if not 0 < like.nbytes <= limit or not like.contiguous or like.device != device:
            rest += where
            continue
        size, wanted = like.dtype.itemsize, like.wanted
        smaller = size if wanted is None else min(size, wanted.itemsize)
        unit = ALIGNMENT // smaller  # elements that a leaf's place is a multiple of
        numel = like.shape.numel()
        step = -(-numel // unit) * unit
        while where:
            slab = filling.get((like.dtype, wanted))
            room = 0 if slab is None else (SLAB_BYTES // size - slab.numel) // step
            if slab is None or not room:
                slab = filling[like.dtype, wanted] = _Slab()
                slabs.append(slab)
                room = SLAB_BYTES // size // step
            run = _Run(where[:room], like.shape, slab.numel, step)
            slab.runs.append(run)
            slab.numel += len(run.where) * step
            slab.padded |= step > numel
            where = where[room:]
        if count % STRIDE == 0:
            breathe()
    rest += [slab.runs[0].where[0] for slab in slabs if _alone(slab)]
    slabs = [slab for slab in slabs if not _alone(slab)]
    return Packed(plan, slabs, rest, sources) if slabs else plan


def _alone(slab: _Slab) -> bool:
    """Is there one leaf in it, which may just as well go by itself?"""
    return len(slab.runs) == 1 and len(slab.runs[0].where) == 1
