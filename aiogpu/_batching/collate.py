"""Items to a batch, and a batch's output to results, when the user gives no hooks for it.

Law of this file: it is pure. It looks at shapes and stacks or cuts; it knows nothing of streams, threads
or callers. Stacking mixes only what :func:`describe` gave the same signature, so that no item can spoil
its neighbours' batch; cutting returns views and never asks a tensor for its values.

Containers are walked as ``torch.utils.data.default_collate`` does it (dict, list, tuple, NamedTuple,
dataclass). Unlike there, what is no tensor, array or number becomes the list of the items' values, and so
does a list of such; floats become torch's default dtype.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from ..transfers.arrays import as_tensor, is_array
from ..transfers.parts import RAW

__all__ = ["ALIGNMENT", "Column", "cut", "describe", "stack"]

#: Stacks the tensors of one column, for example somewhere else.
Column = Callable[[Sequence[torch.Tensor]], torch.Tensor]

#: Bytes: no dtype is larger, so what begins at a multiple of it can be of any.
ALIGNMENT = 16

_INT64 = torch.iinfo(torch.int64)


def describe(item: Any, device: torch.device) -> tuple[Hashable, float]:
    """``(signature, bytes that are not on device)``. Items of one signature can be stacked.

    What is in host memory counts also where that is the device; each tensor as a multiple of
    :data:`ALIGNMENT`, so that so many bytes for each item hold all columns one after the other. The number
    is 0 only when there is nothing to upload, and ``inf`` for what only ``to_device`` can move.
    """
    cls = type(item)
    if isinstance(item, torch.Tensor):
        return (cls, item.shape, item.dtype, item.device, item.layout), _bytes(item, device)
    if is_array(item):
        return (cls, item.shape, item.dtype.str), _aligned(item.nbytes)
    if cls in (bool, int, float):
        # An integer of any size may come from a client's JSON: one that no dtype holds fails for itself.
        return (cls, cls is not int or _INT64.min <= item <= _INT64.max), ALIGNMENT
    opened = _open(item)
    if opened is None:
        return (cls,), math.inf if callable(getattr(cls, "to", None)) else 0
    keys, children = opened
    described = [describe(child, device) for child in children]
    nbytes = sum(n for _, n in described)
    if _is_value(item):
        return (cls,), nbytes
    return (cls, tuple(keys), tuple(part for part, _ in described)), nbytes


def _bytes(tensor: torch.Tensor, device: torch.device) -> float:
    if not tensor.is_cpu:
        return 0 if tensor.device == device else math.inf
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return math.inf
    return math.inf if tensor.is_nested or tensor.dtype in RAW else _aligned(tensor.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT  # an empty tensor has to get there, too


# -- containers ------------------------------------------------------------------------------------


def _open(x: Any) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """The keys and children of a container, else ``None``."""
    if isinstance(x, Mapping):
        return list(x.keys()), list(x.values())
    if isinstance(x, list | tuple):
        return range(len(x)), x
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = [field.name for field in dataclasses.fields(x)]
        return names, [getattr(x, name) for name in names]
    return None


def _is_value(x: Any) -> bool:
    """A list with nothing to stack in it is not structure, but a value: in a batch it stays whole.

    So a list without tensors in a batch is a column, one entry for each item, and :func:`cut` can know it.
    """
    return isinstance(x, list) and not any(map(_stackable, x))


def _stackable(x: Any) -> bool:
    if isinstance(x, torch.Tensor) or is_array(x) or type(x) in (bool, int, float):
        return True
    opened = _open(x)
    return opened is not None and any(map(_stackable, opened[1]))


def _close(like: Any, keys: Sequence[Any], children: list[Any]) -> Any:
    """A container as ``like``, with other children."""
    cls = type(like)
    if cls is dict:
        return dict(zip(keys, children, strict=True))
    if cls is list:
        return children
    if isinstance(like, tuple):
        if hasattr(like, "_fields"):
            return cls._make(children)
        return cls(children)
    new = copy.copy(like)
    if isinstance(new, MutableMapping):
        new.update(zip(keys, children, strict=True))
    elif isinstance(new, list):
        new[:] = children
    else:
        for name, child in zip(keys, children, strict=True):
            object.__setattr__(new, name, child)  # past the guard of a frozen one
    return new


# -- in --------------------------------------------------------------------------------------------


def stack(items: Sequence[Any], column: Column | None = None) -> Any:
    """``items``, all of one signature, stacked along a new first dimension, leaf by leaf, by ``column``."""
    first = items[0]
    if isinstance(first, torch.Tensor):
        return column(items) if column else torch.stack(tuple(items))
    if is_array(first):
        return stack([as_tensor(item) for item in items], column)
    if type(first) in (bool, int, float):
        numbers = torch.tensor(items, device="cpu")  # whatever `with torch.device(...)` is around
        return column(numbers.unbind(0)) if column else numbers
    opened = _open(first)
    if opened is None or _is_value(first):
        return list(items)
    keys, _ = opened
    columns = zip(*(_children(item) for item in items), strict=True)
    return _close(first, keys, [stack(each, column) for each in columns])


def _children(item: Any) -> Sequence[Any]:
    opened = _open(item)
    assert opened is not None, "items of one signature are containers of one type"
    return opened[1]


# -- out -------------------------------------------------------------------------------------------


def cut(output: Any, size: int) -> list[Any]:
    """The results of ``size`` items: ``output`` cut along the first dimension of each tensor.

    Containers are kept around their parts. A list without any tensor in it is a column: one entry for
    each item. Any other value, such as ``None`` or a number, belongs to every result.

    Raises ``ValueError`` for what does not have ``size`` parts.
    """
    if type(output) is torch.Tensor:
        return _cut_tensor(output, size)
    return _cut(output, size)


def _cut(x: Any, size: int) -> list[Any]:
    if isinstance(x, torch.Tensor):
        return _cut_tensor(x, size)
    if is_array(x):
        _check(x.shape[:1], size, f"an array of shape {x.shape}")
        return list(x)
    opened = _open(x)
    if opened is None:
        return [x] * size
    keys, children = opened
    if isinstance(x, list) and not any(map(_has_tensors, x)):
        _check((len(x),), size, f"a list of {len(x)} values")
        return list(x)
    if not children:
        return [copy.copy(x) for _ in range(size)]
    columns = [_cut(child, size) for child in children]
    return [_close(x, keys, [column[index] for column in columns]) for index in range(size)]


def _cut_tensor(tensor: torch.Tensor, size: int) -> list[Any]:
    _check(tensor.shape[:1], size, f"a tensor of shape {tuple(tensor.shape)}")
    return list(tensor.unbind(0))


def _has_tensors(x: Any) -> bool:
    if isinstance(x, torch.Tensor) or is_array(x):
        return True
    opened = _open(x)
    return opened is not None and any(map(_has_tensors, opened[1]))


def _check(first: Sequence[int], size: int, what: str) -> None:
    if tuple(first) != (size,):
        raise ValueError(
            f"the batch function returned {what} for a batch of {size}: by default each tensor of its "
            f"output is cut along its first dimension, which must be {size}, and a list without tensors "
            "has one value for each item. Give Batcher(split=...) if the output is made otherwise"
        )
