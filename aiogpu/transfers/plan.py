"""What one transfer has to move: users' data as plain tensors, and the way back.

Law of this file: a plan is made at the call, on the loop's thread, without copying anything.
:meth:`Plan.sources` may copy (foreign byte order) and belongs to worker threads, unless arrays are small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import torch

from .tree import Tree, as_tensor, explode

__all__ = ["Plan", "neutral"]

T = TypeVar("T")


class Plan(Generic[T]):
    """The leaves of one call: plain tensors to copy, leaves that stay, objects that move themselves.

    ``stays(leaf)``: it is where it shall be. ``detached``: results carry no autograd side (downloads).
    """

    def __init__(
        self, tree: Tree[T], stays: Callable[[torch.Tensor], bool], *, detached: bool = False
    ) -> None:
        self._tree = tree
        self._detached = detached
        #: Plain tensors to copy, in order.
        self.plain: list[torch.Tensor] = []
        #: Objects that move themselves: the tree's, and tensor subclasses with books of their own.
        self.movers: list[Any] = list(tree.movers)
        self.arrays = tree.arrays
        #: For each tensor of the tree: how it comes to be in the result.
        self._leaves: list[Callable[[Sequence[torch.Tensor], Sequence[Any]], torch.Tensor]] = []
        for tensor in tree.tensors:
            self._leaves.append(self._place(tensor, stays(tensor)))

    def _place(self, tensor: torch.Tensor, stays: bool) -> Callable[[Any, Any], torch.Tensor]:
        if stays:
            return lambda moved, movers: tensor
        exploded = explode(tensor)
        if exploded is None:
            index = len(self.movers)
            self.movers.append(tensor)
            return lambda moved, movers: cast(torch.Tensor, movers[index])
        parts, rewrap = exploded
        where = slice(len(self.plain), len(self.plain) + len(parts))
        self.plain += parts
        return lambda moved, movers: rewrap(moved[where])

    @property
    def nbytes(self) -> int:
        """Bytes to copy, of plain tensors and arrays."""
        return sum(t.numel() * t.element_size() for t in self.plain) + sum(a.nbytes for a in self.arrays)

    @property
    def largest(self) -> int:
        """Bytes of the largest leaf."""
        sizes = [t.numel() * t.element_size() for t in self.plain] + [a.nbytes for a in self.arrays]
        return max(sizes, default=0)

    def sources(self) -> list[torch.Tensor]:
        """All tensors to copy: the plain ones, then the arrays."""
        return [*self.plain, *map(as_tensor, self.arrays)]

    def rebuild(self, moved: Sequence[torch.Tensor], movers: Sequence[Any]) -> T:
        """The data around the copies of :meth:`sources` and what has become of ``movers``."""
        leaves = [place(moved, movers) for place in self._leaves]
        if self._detached:
            leaves = [leaf.detach() if leaf.requires_grad else leaf for leaf in leaves]
        arrays = moved[len(self.plain) :]
        return self._tree.rebuild([*leaves, *arrays], movers[: len(self._tree.movers)])


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """Torch's modes as transfers need them, whatever the caller has set.

    Results must be ordinary tensors (not inference tensors, without a graph), and the caller's function
    modes (``with torch.device("meta")``) must not see our calls.
    """
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        yield
