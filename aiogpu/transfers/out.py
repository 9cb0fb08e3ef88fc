"""``to_host(data, out=...)``: which destination belongs to which source.

Law of this file: by place, never by order. Two dicts of equal shapes in another order would otherwise be
mixed up without a word. Everything is checked before any work.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

from .arrays import as_tensor, is_array, special_layout
from .parts import RAW
from .plan import Plan
from .tree import Tree, flatten

__all__ = ["destinations"]

_NESTING = (
    "to_host(out=...) takes tensors in the same nesting as data, each once: plain tensors or numpy arrays in "
    "dicts, lists, tuples, dataclasses and registered classes"
)


def destinations(
    tree: Tree[Any], plan: Plan[Any], out: Any, dtype: torch.dtype | None
) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """One host tensor for each source of ``plan``, and what makes the result of them: ``out`` itself."""
    into = flatten(out, verb="to_host(out=...)", name="out")
    leaves: list[Any] = [*tree.tensors, *tree.arrays]
    for leaf in tree.tensors:
        _check_source(leaf)
    # Something shared has several places, exponentially many if it is containers that are: hence islice.
    sources, targets = (list(islice(t.places(), len(leaves) + 1)) for t in (tree, into))
    once = all(len(leaves) == len(found) == len({id(x) for _, x in found}) for found in (sources, targets))
    if not once or plan.movers or into.movers or dict(sources).keys() != dict(targets).keys():
        raise ValueError(_NESTING)
    places, there = {id(leaf): place for place, leaf in sources}, dict(targets)
    hosts = []
    for leaf in leaves:
        host = _writable(there[places[id(leaf)]])
        _check(host, leaf if isinstance(leaf, torch.Tensor) else as_tensor(leaf), dtype)
        hosts.append(host.view(RAW[host.dtype]) if host.dtype in RAW else host)
    return hosts, lambda *_: out


def _check_source(leaf: torch.Tensor) -> None:
    if (layout := special_layout(leaf)) is not None:
        raise ValueError(
            f"to_host(out=...) cannot copy a {layout} tensor into others: leave `out` away, or pass its parts"
        )


def _check(host: torch.Tensor, source: torch.Tensor, dtype: torch.dtype | None) -> None:
    wanted = dtype or source.dtype
    if host.device.type != "cpu" or host.shape != source.shape or host.dtype != wanted:
        raise ValueError(
            f"out has a {host.dtype} tensor of shape {tuple(host.shape)} on {host.device} where data "
            f"gives {wanted}, {tuple(source.shape)}: it must be a CPU tensor of that shape and dtype"
        )
    if host.numel() and any(
        size > 1 and stride == 0 for size, stride in zip(host.shape, host.stride(), strict=True)
    ):
        raise ValueError("out has a tensor whose elements share memory: use out.clone()")


def _writable(leaf: Any) -> torch.Tensor:
    if not is_array(leaf):
        plain: torch.Tensor = leaf.detach()
        return plain
    address, read_only = leaf.__array_interface__["data"]
    if read_only:
        raise ValueError("out has a read-only numpy array: pass a writable copy")
    tensor = as_tensor(leaf)
    if tensor.numel() and tensor.data_ptr() != address:
        raise ValueError("out has a numpy array that torch cannot view: use a C-contiguous, native one")
    return tensor
