"""Containers: how each is opened, and put together again around other parts.

Law of this file: a container is what its builtin base is, plus its attributes.  None of the class's own code
runs, neither to take it apart nor to put it together (`__init__`, `__new__`, `__post_init__`, `__iter__`,
`__setitem__`); where somebody registered functions for it, those run and nothing else.  Nothing here changes
what it was given.

Records are classes that say what their fields are: dataclasses, and those of attrs and pydantic.
Everything in the instance is kept: fields, private attributes, what a cached property has stored.
"""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from . import registry

__all__ = [
    "ATOMS",
    "LIST",
    "Attribute",
    "Kind",
    "Opened",
    "attributes",
    "kind_of",
    "moves_itself",
    "registered",
]

#: Nothing is in these, and they are most of what data holds.  Exact types: a subclass may have attributes.
ATOMS: frozenset[type] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type),
        *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
        *(torch.dtype, torch.device, torch.layout, torch.Size),
    }
)


class Opened(NamedTuple):
    keys: Sequence[Any]
    """A key for each of `contents`."""
    contents: list[Any]
    context: Any = None


class Kind(NamedTuple):
    """One way of being a container."""

    open: Callable[[Any], Opened]
    close: Callable[[Any, Opened, list[Any]], Any]
    """Takes the source, what it was opened into, and the new contents; gives a new instance of the source's
    very type.  It is asked for its class and what never changes: its contents may be others by now."""
    has_attributes: bool = True
    label: Callable[[Any, Any], str] = lambda source, key: (
        f"[{key!r}]" if type(key) in (str, int) else "[...]"
    )
    """How a user would write the way from the source to the part with this key."""


# -- Builtin bases -----------------------------------------------------------------------------------------


def _blank(base: Any, cls: Any) -> Any:
    try:
        return base.__new__(cls)
    except TypeError:  # another extension type among the bases insists on its own
        return cls.__new__(cls)


def _close_dict(source: Any, opened: Opened, parts: list[Any]) -> Any:
    new = _blank(dict, type(source))
    dict.update(new, zip(opened.keys, parts, strict=True))
    return new


def _close_ordered(source: Any, opened: Opened, parts: list[Any]) -> Any:
    new = _blank(dict, type(source))
    for key, part in zip(opened.keys, parts, strict=True):
        OrderedDict.__setitem__(new, key, part)  # its `update` would ask the subclass's `__setitem__`
    return new


def _close_list(source: Any, opened: Opened, parts: list[Any]) -> Any:
    new = _blank(list, type(source))
    list.extend(new, parts)
    return new


def _close_tuple(source: Any, opened: Opened, parts: list[Any]) -> Any:
    cls = type(source)
    # Struct sequences, such as torch.return_types.max, allow no other constructor than their own.
    return cls(parts) if hasattr(cls, "n_sequence_fields") else tuple.__new__(cls, parts)


def _close_deque(source: Any, opened: Opened, parts: list[Any]) -> Any:
    new = _blank(deque, type(source))
    deque.__init__(new, parts, deque.maxlen.__get__(source))
    return new


def _close_set(source: Any, opened: Opened, parts: list[Any]) -> Any:
    new = _blank(set, type(source))
    set.update(new, parts)  # asks the parts for their hash; a tensor's is its identity
    return new


def _tuple_label(source: Any, key: Any) -> str:
    names = getattr(type(source), "_fields", None)
    return f"[{key}]" if names is None else f".{names[key]}"


_DICT = Kind(lambda x: Opened([*dict.keys(x)], [*dict.values(x)]), _close_dict)
LIST = Kind(lambda x: Opened(range(list.__len__(x)), list.copy(x)), _close_list)
_ATTRIBUTES_ONLY = Kind(lambda x: Opened((), []), lambda source, opened, parts: _blank(object, type(source)))
_KINDS: dict[type, Kind] = {
    dict: _DICT,
    defaultdict: _DICT,  # its factory is an attribute
    OrderedDict: Kind(lambda x: Opened([*OrderedDict.keys(x)], [*OrderedDict.values(x)]), _close_ordered),
    list: LIST,
    tuple: Kind(
        lambda x: Opened(range(tuple.__len__(x)), [*tuple.__iter__(x)]), _close_tuple, label=_tuple_label
    ),
    deque: Kind(lambda x: Opened(range(deque.__len__(x)), [*deque.__iter__(x)]), _close_deque),
    set: Kind(lambda x: Opened(range(set.__len__(x)), [*set.__iter__(x)]), _close_set),
    frozenset: Kind(
        lambda x: Opened(range(frozenset.__len__(x)), [*frozenset.__iter__(x)]),
        lambda source, opened, parts: frozenset.__new__(type(source), parts),
    ),
    UserDict: _ATTRIBUTES_ONLY,
    UserList: _ATTRIBUTES_ONLY,
    types.SimpleNamespace: _ATTRIBUTES_ONLY,
}
_BARE = (dict, list, tuple, OrderedDict, set, frozenset, deque)  # exactly these have no attributes

#: What attrs and pydantic leave in their classes.
_MARKS = ("__attrs_attrs__", "__pydantic_fields__")


def _is_record(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or any(hasattr(cls, mark) for mark in _MARKS)


# -- Registered classes ------------------------------------------------------------------------------------


def _registered_kind(
    take_apart: Callable[[Any], tuple[Any, Any]],
    put_together: Callable[[list[Any], Any], Any],
    label: Callable[[Any, Any], str],
) -> Kind:
    def open_(x: Any) -> Opened:
        children, context = take_apart(x)
        return Opened(range(len(children)), list(children), context)

    def close(source: Any, opened: Opened, parts: list[Any]) -> Any:
        return put_together(parts, opened.context)

    return Kind(open_, close, has_attributes=False, label=label)


def registered(cls: type) -> Kind | None:
    """The kind of a class that was given to `aiogpu.register`."""
    entry = registry.find(cls)
    if entry is None:
        return None
    return _registered_kind(entry.open, entry.close, lambda source, key: f"<child {key}>")


def _in_pytree(cls: type, kind: Kind | None) -> Kind | None:
    """The kind of a class that was registered with `torch.utils._pytree`."""
    node = getattr(pytree, "SUPPORTED_NODES", {}).get(cls)
    if node is None:
        return None
    if kind is not None and str(getattr(node.flatten_fn, "__module__", "")).startswith("torch."):
        # Torch's own functions, for builtin containers and by `register_dataclass`: they say that it is one,
        # and would construct it anew (run its `__post_init__`, lose what is no argument of `__init__`).
        return None

    def label(source: Any, key: Any) -> str:
        try:
            return str(node.flatten_with_keys_fn(source)[0][key][0])
        except Exception:  # many have none
            return f"<child {key}>"

    return _registered_kind(node.flatten_fn, node.unflatten_fn, label)


# -- What a class is ---------------------------------------------------------------------------------------


def moves_itself(cls: type) -> bool:
    """Has it a `.to`?

    Asked of the class: an instance with a `__getattr__` (a mock, a dict with attribute access) may answer to
    any name.  A class that is itself the leaf is a value.
    """
    return callable(getattr(cls, "to", None)) and not issubclass(cls, type)


def kind_of(cls: type) -> Kind | None:
    """How instances of `cls`, which `aiogpu.register` does not know, are containers; None: not at all."""
    kind = next((_KINDS[base] for base in cls.__mro__ if base in _KINDS), None)
    if kind is None and _is_record(cls):
        kind = _ATTRIBUTES_ONLY
    return _in_pytree(cls, kind) or kind


class Attribute(NamedTuple):
    put: Callable[[Any, str, Any], None]
    name: str
    value: Any


def _put_in_dict(x: Any, name: str, value: Any) -> None:
    x.__dict__[name] = value  # past properties of the same name


def attributes(x: object) -> list[Attribute]:
    """What is kept in the instance beside its contents.

    `object.__getstate__` knows about slots (inherited, mangled, unset) and is asked past any override.  Slots
    are put past the `__setattr__` of a frozen dataclass.
    """
    if type(x) in _BARE:
        return []
    state: Any = object.__getstate__(x)
    own, slots = state if type(state) is tuple else (state, None)
    found = [Attribute(_put_in_dict, name, value) for name, value in list((own or {}).items())]
    found += [Attribute(object.__setattr__, name, value) for name, value in (slots or {}).items()]
    if isinstance(x, defaultdict):
        found.append(Attribute(object.__setattr__, "default_factory", x.default_factory))
    return found
