"""``to_host(data, out=...)``: which destination belongs to which source.

Law of this file: by place, never by order. Two dicts of equal shapes in another order would otherwise be
mixed up without a word. Everything is checked before any work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .arrays import is_array
from .plan import Plan
from .tree import Tree, as_tensor, flatten

__all__ = ["destinations"]

Path = tuple[Any, ...]

_NESTING = (
    "to_host(out=...) takes tensors in the same nesting as data, each once: plain tensors or numpy arrays in "
    "dicts, lists, tuples and dataclasses"
)


def destinations(
    tree: Tree[Any], plan: Plan[Any], data: Any, out: Any, dtype: torch.dtype | None
) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """One host tensor for each source of ``plan``, and what makes the result of them: ``out`` itself."""
    flatten(out, verb="to_host")  # for its refusals
    sources, targets = dict(_leaves(data)), dict(_leaves(out))
    places = {id(leaf): path for path, leaf in sources.items()}
    leaves: list[Any] = [*tree.tensors, *tree.arrays]
    plain = not plan.movers and len(plan.plain) == len(tree.tensors)
    if not plain or sources.keys() != targets.keys() or len(sources) != len(leaves):
        raise ValueError(_NESTING)
    hosts = []
    for leaf in leaves:
        host = _writable(targets[places[id(leaf)]])
        _check(host, leaf if isinstance(leaf, torch.Tensor) else as_tensor(leaf), dtype)
        hosts.append(host)
    return hosts, lambda *_: out


def _leaves(data: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(data, torch.Tensor) or is_array(data):
        yield path, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _leaves(value, (*path, index))
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            yield from _leaves(getattr(data, field.name, None), (*path, field.name))


def _check(host: torch.Tensor, source: torch.Tensor, dtype: torch.dtype | None) -> None:
    wanted = dtype or source.dtype
    if host.device.type != "cpu" or host.shape != source.shape or host.dtype != wanted:
        raise ValueError(
            f"out has a {host.dtype} tensor of shape {tuple(host.shape)} on {host.device} where data "
            f"gives {wanted}, {tuple(source.shape)}: it must be a CPU tensor of that shape and dtype"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(host.shape, host.stride(), strict=True)):
        raise ValueError("out has a tensor whose elements share memory: use out.clone()")


def _writable(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    address, read_only = leaf.__array_interface__["data"]
    if read_only:
        raise ValueError("out has a read-only numpy array: pass a writable copy")
    tensor = as_tensor(leaf)
    if tensor.numel() and tensor.data_ptr() != address:
        raise ValueError("out has a numpy array that torch cannot view: use a C-contiguous, native one")
    return tensor
