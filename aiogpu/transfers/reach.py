"""Every tensor that data reaches: what must be kept alive, and marked as used.

Law of this file: metadata only; it runs on the event loop. It goes where `tree` goes and further, into what
moves itself, and never raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .containers import ATOMS, attributes, kind_of, moves_itself, registered
from .parts import components

__all__ = ["tensors_of"]


def tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Every tensor whose memory `data` reaches, each once: for `record_stream` and lifetimes.

    Goes through what `flatten` takes apart, and also through modules (parameters and buffers), the attributes
    of objects with a `.to`, and gradients.  Tensors without memory of their own (sparse, nested, wrapper
    subclasses) are represented by their components.  Never raises: what cannot be looked into is left out.
    """
    cls = type(data)
    if cls in ATOMS:
        return iter(())
    if cls is torch.Tensor and _is_whole(data) and _grad(data) is None:
        return iter((data,))
    with torch._C.DisableTorchFunction():
        return iter(_reach(data))  # at once: nobody changes data, or this thread's state, between two items


def _is_whole(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and not (x.is_nested or x.is_quantized)


def _grad(x: torch.Tensor) -> torch.Tensor | None:
    return x.grad if x.is_leaf or x.retains_grad else None  # asking any other non-leaf warns


def _reach(data: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is given out twice
    todo = [data]
    while todo:
        x = todo.pop()
        if type(x) in ATOMS or id(x) in seen:
            continue
        seen[id(x)] = x
        if type(x) is torch.Tensor and not x.requires_grad and _is_whole(x) and x.grad is None:
            found.append(x)
            continue
        try:
            todo.extend(reversed(_inside(x, found)))
        except Exception:  # a user's `__tensor_flatten__`, a dict that another thread changes, a dead proxy
            continue
    return found


def _inside(x: Any, found: list[torch.Tensor]) -> list[Any]:
    """What is directly in `x`.  A tensor that has memory of its own goes to `found`."""
    cls = type(x)
    if isinstance(x, torch.Tensor):
        plain = cls in (torch.Tensor, torch.nn.Parameter) and _is_whole(x)
        inside: list[Any] = [] if plain else list(components(x))
        if not inside:
            found.append(x)
        return inside if (grad := _grad(x)) is None else [*inside, grad]
    if (kind := registered(cls)) is not None:
        return kind.open(x).contents
    if isinstance(x, torch.nn.Module):
        if isinstance(x, torch.jit.ScriptModule):  # keeps them in C++
            return [*x.parameters(), *x.buffers()]
        return [*x._parameters.values(), *x._buffers.values(), *x._modules.values()]
    kind = kind_of(cls)
    if kind is None and not moves_itself(cls):
        return []
    contents = kind.open(x).contents if kind is not None else []
    if kind is not None and not kind.has_attributes:
        return contents
    return [*contents, *(attribute.value for attribute in attributes(x))]
