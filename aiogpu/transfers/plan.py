"""What one transfer has to move: users' data as plain tensors, and the way back.

Law of this file: a plan is made at the call, on the loop's thread, without copying anything.
:meth:`Plan.sources` may copy (foreign byte order) and belongs to worker threads, unless arrays are small;
:meth:`Plan.settle` runs kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from .alike import Alike, runs
from .parts import Rewrap, explode, spread
from .tree import Tree, as_tensor

__all__ = ["STRIDE", "Plan", "Walking", "breathe", "interposed", "neutral"]

T = TypeVar("T")


class _Mover(int):
    """Among :attr:`Plan._leaves`: the index of a mover, and not of a plain tensor."""


class Plan(Generic[T]):
    """The leaves of one call: plain tensors to copy, leaves that stay, objects that move themselves.

    ``stays(leaf)``: it is where it shall be. ``detached``: results carry no autograd side (downloads).
    """

    #: Are many small leaves copied as few large tensors (see ``packing``)?
    in_slabs = False
    #: The tree's tensors are the plain ones, all of them, and sorted.
    _simple = False

    def __init__(
        self, tree: Tree[T], stays: Callable[[torch.Tensor], bool], *, detached: bool = False
    ) -> None:
        self._tree = tree
        self._detached = detached
        #: Plain tensors to copy, in order.
        self.plain: list[torch.Tensor] = []
        #: For each of them: what it is to be converted to, on the device.
        self.dtypes: list[torch.dtype | None] = []
        #: Objects that move themselves: the tree's, and tensor subclasses with books of their own.
        self.movers: list[Any] = list(tree.movers)
        self.arrays = tree.arrays
        #: Code runs when the result is put together that may compute, and make new tensors.
        self.wraps = tree.registered
        #: For each tensor of the tree, how it comes to be in the result: the index of a copy, or of a mover,
        #: the tensor itself, or what to make of which copies.
        self._leaves: Sequence[int | _Mover | torch.Tensor | tuple[list[int], Rewrap]]
        #: Where parts are, once there are tensors to take apart: several may have one in common (ragged
        #: offsets), and have it in common again afterwards.
        self._placed: dict[tuple[int, torch.dtype | None], int] = {}
        #: The first ones of :meth:`sources`, sorted by what they have in common.
        self._alike = Alike()
        self._simple = len(tree.tensors) > _FEW and tree.sort() and self._all_move(tree, stays)
        if self._simple:
            self._alike = tree.alike
            self.plain = tree.tensors.copy()
            self.dtypes = [tree.dtype] * len(self.plain)
            self._leaves = range(len(self.plain))
        else:
            self._leaves = [*self._each(tree, stays)]

    @staticmethod
    def _all_move(tree: Tree[T], stays: Callable[[torch.Tensor], bool]) -> bool:
        # Those that are alike all stay or all move.
        return not any(stays(tree.tensors[where[0][0]]) for where in tree.alike.groups.values())

    def _each(
        self, tree: Tree[T], stays: Callable[[torch.Tensor], bool]
    ) -> Iterator[int | _Mover | torch.Tensor | tuple[list[int], Rewrap]]:
        plain, dtypes, odd, dtype = self.plain, self.dtypes, tree.odd, tree.dtype
        for index, tensor in enumerate(tree.tensors):
            if stays(tensor):
                yield tensor
            elif index in odd:
                yield self._take_apart(tensor)
            elif odd:
                yield self._place(tensor, dtype)
            else:
                plain.append(tensor)
                dtypes.append(dtype)
                yield len(plain) - 1

    def _take_apart(self, tensor: torch.Tensor) -> _Mover | tuple[list[int], Rewrap]:
        parts = explode(tensor, self._tree.dtype)
        if parts is None:
            self.movers.append(tensor)
            return _Mover(len(self.movers) - 1)
        self.wraps = self.wraps or parts.computes
        return [self._place(*part) for part in zip(parts.plain, parts.dtypes, strict=True)], parts.rewrap

    def _place(self, part: torch.Tensor, dtype: torch.dtype | None) -> int:
        key = id(part), dtype
        index = self._placed.get(key)
        if index is None:
            index = self._placed[key] = len(self.plain)
            self.plain.append(part)
            self.dtypes.append(dtype)
        return index

    @property
    def leaves(self) -> int:
        """How many tensors and arrays there are to copy."""
        return len(self.plain) + len(self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the plain tensors and arrays, each element as often as it appears."""
        plain = self._alike.nbytes if self._simple else sum(t.numel() * t.element_size() for t in self.plain)
        return plain + sum(a.nbytes for a in self.arrays)

    @property
    def largest(self) -> int:
        """Bytes of the largest leaf."""
        sizes = [t.numel() * t.element_size() for t in self.plain] + [a.nbytes for a in self.arrays]
        return max(sizes, default=0)

    @property
    def largest_converted(self) -> int:
        """The same once they have the dtypes that they are to be converted to, where these are wider."""
        sizes = [self.largest]
        leaves: list[Any] = [*self.plain, *self.arrays]
        for index, leaf in enumerate(leaves):
            if (wanted := self.dtype_of(index)) is not None:
                sizes.append(leaf.nbytes // leaf.itemsize * wanted.itemsize)
        return max(sizes)

    def dtype_of(self, index: int) -> torch.dtype | None:
        """What the copy of the source with this number is to be converted to; None: not at all."""
        return self.dtypes[index] if index < len(self.dtypes) else self._tree.dtype

    def sources(self) -> list[torch.Tensor]:
        """All tensors to copy: the plain ones, then the arrays."""
        return [*self.plain, *map(as_tensor, self.arrays)]

    @property
    def devices(self) -> set[torch.device]:
        """Where the plain tensors are."""
        return self._alike.devices if self._simple else {tensor.device for tensor in self.plain}

    def alike(self, sources: Sequence[torch.Tensor]) -> Alike:
        """``sources``, which are the plain tensors or :meth:`sources`, sorted by what they have in common."""
        alike = self._alike
        if alike.count < len(sources):
            wanted = [self.dtype_of(index) for index in range(alike.count, len(sources))]
            alike.extend(runs(sources[alike.count :], wanted))
        return alike

    def gather(self, index: int, source: torch.Tensor) -> torch.Tensor:
        """What is behind the source with this number; by kernels on the current stream, if any."""
        return source

    def settle(self, index: int, there: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """The result for the source with this number; `there` is the copy of it, or of its
        :func:`~aiogpu.transfers.parts.core`.

        Converts and spreads it out, by kernels on the current stream.
        """
        dtype = self.dtype_of(index)
        return spread(there if dtype is None else there.to(dtype), source)

    def rebuild(self, moved: Sequence[torch.Tensor], movers: Sequence[Any]) -> T:
        """The data around the copies of :meth:`sources` and what has become of ``movers``."""
        leaves = moved
        if not self._simple:
            leaves = [
                moved[leaf] if type(leaf) is int else self._make(leaf, moved, movers) for leaf in self._leaves
            ]
            if self._detached:
                leaves = [leaf.detach() if leaf.requires_grad else leaf for leaf in leaves]
            leaves += moved[len(self.plain) :]  # the arrays
        return self._tree.rebuild(leaves, movers[: len(self._tree.movers)])

    @staticmethod
    def _make(leaf: Any, moved: Sequence[torch.Tensor], movers: Sequence[Any]) -> Any:
        if type(leaf) is tuple:
            where, rewrap = leaf
            return rewrap([moved[index] for index in where])
        return movers[leaf] if type(leaf) is _Mover else leaf


class Walking(Generic[T]):
    """Data with more parts than the loop's thread has time for: begun at the call, finished on a thread."""

    def __init__(
        self,
        tree: Tree[T],
        more: Callable[[int], bool],
        make: Callable[[Tree[T]], Plan[T]],
    ) -> None:
        self._tree = tree
        self._more = more
        self._make = make

    def finish(self) -> Plan[T]:
        while not self._more(STRIDE):
            breathe()
        breathe()
        return self._make(self._tree)


#: Parts of users' data that are looked at on a staging thread between two chances for others to take the GIL.
STRIDE = 1024

#: A tree of no more tensors than this is not worth sorting.
_FEW = 16


def breathe() -> None:
    """Let other threads have the GIL: who asks for it waits up to 5 ms (sys.getswitchinterval) otherwise. Not
    zero seconds, after which this thread would have it again before the other one has woken up."""
    time.sleep(20e-6)


_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
_transforms: Any = torch._C._functorch.peek_interpreter_stack


def interposed() -> bool:
    """Does something see what this thread computes that no :class:`neutral` block switches off: a dispatch
    mode, or a transform of functorch's?"""
    return bool(_dispatch_modes()) or _transforms() is not None


class neutral:
    """A block with torch's modes as transfers need them, whatever the caller has set.

    Results must be ordinary tensors (not inference tensors, without a graph), and the caller's function
    modes (``with torch.device("meta")``) must not see our calls. Every small transfer pays for this: what is
    set already is not set again (5 µs less).
    """

    __slots__ = ("_functions", "_grad", "_inference")

    def __enter__(self) -> None:
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._inference: torch.inference_mode | None = None
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()  # leaving inference mode switches it on
        if self._grad:
            torch._C._set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        if self._grad:
            torch._C._set_grad_enabled(True)
        if self._inference is not None:
            self._inference.__exit__(*error)
        self._functions.__exit__(*error)
