"""Objects that hold tensors, but are neither leaves nor containers: said aloud, never skipped in silence.

Law of this file: it only looks, it changes and runs nothing of theirs, and not for long, since it runs on
the event loop.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from .arrays import is_array
from .containers import ATOMS, attributes

__all__ = ["tensors_stay_behind", "warn_of", "warn_of_keys"]

_warned: weakref.WeakSet[type] = weakref.WeakSet()
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

#: Objects looked at in one stranger, and of each container in it.
_LOOKS, _LOOKS_EACH = 64, 32

_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_ROWS = (list, tuple, set, frozenset, deque, *_VIEWS)
_ITERATORS: tuple[type, ...] = (types.GeneratorType, map, filter, zip, enumerate, reversed)


def tensors_stay_behind(x: object) -> bool:
    """Does `x`, which is handed through as it is, hold tensors?  Says so only once per type."""
    cls = type(x)
    if cls in _warned or issubclass(cls, type | types.ModuleType):
        return False
    if cls in _ITERATORS:
        return True  # nobody can tell without consuming it
    todo: deque[Any] = deque(_parts(x, outermost=True))
    for _ in range(_LOOKS):
        if not todo:
            return False
        part = todo.popleft()
        if isinstance(part, torch.Tensor) or is_array(part):
            return True
        todo.extend(_parts(part))
    return False


def _parts(x: Any, *, outermost: bool = False) -> Iterator[Any]:
    cls = type(x)
    if cls in ATOMS:
        return
    if cls in _ROWS:
        yield from islice(iter(x), _LOOKS_EACH)
    elif issubclass(cls, dict):
        yield from islice(dict.values(x), _LOOKS_EACH)
    elif cls is types.MappingProxyType:
        yield from islice(x.values(), _LOOKS_EACH)
    if outermost and cls not in (*_VIEWS, types.MappingProxyType):
        yield from (value for _, _, value in islice(attributes(x), _LOOKS_EACH))


def warn_of(x: object, call: str, path: str) -> None:
    cls = type(x)
    name = f"a {cls.__module__}.{cls.__qualname__}"
    if cls in _ITERATORS:
        message = f"{call}: {path} is {name}, which is handed through unused; pass a list of what it yields"
    else:
        message = (
            f"{call}: {path} is {name} and holds tensors, but is handed through as it is, and they stay "
            "where they are; tell aiogpu about the class with `aiogpu.register`, give it a `.to(device)` "
            "method, make it a dataclass, or pass a dict"
        )
    warnings.warn(message, UserWarning, stacklevel=_outside())
    _warned.add(cls)  # after the warning: where warnings are errors, every call is one


class _Keys:
    """Stands for dicts in `_warned`."""


def warn_of_keys(call: str, path: str) -> None:
    """A dict's keys are tensors.  They are never moved: who would find the values again?"""
    if _Keys in _warned:
        return
    message = f"{call}: {path} has tensors for keys, and they stay where they are; only its values are moved"
    warnings.warn(message, UserWarning, stacklevel=_outside())
    _warned.add(_Keys)


def _outside() -> int:
    """The stack level, seen from our caller, of the first frame that is not aiogpu's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
