"""The walk over users' data: taken apart into leaves, put together again around moved ones.

Law of this file: one walk serves moving, recording and errors, so that no leaf can be missed.  It sees a
container as its builtin base does, plus its attributes; it runs none of the class's own code, neither to
take it apart nor to put it together (`__init__`, `__new__`, `__post_init__`, `__iter__`, `__setitem__`), and
changes nothing it was given.  It copies no data, so it may run on the event loop; what cannot be moved is
refused here, before any work.

Leaves are tensors, numpy arrays and *movers*: modules and other objects whose class has a `.to`.  They are
looked for before containers, so a dict subclass with a `.to` moves itself.  Everything else passes by
identity, and so does a container in which there is nothing to move.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import types
import warnings
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from .arrays import Rewrap, as_tensor, components, explode, is_array, refusal

if TYPE_CHECKING:
    from .arrays import Array

__all__ = ["Rewrap", "Tree", "as_tensor", "explode", "flatten", "tensors_of"]

T = TypeVar("T")

# -- Containers: a row for each builtin base ---------------------------------------------------------------


class _Kind(NamedTuple):
    open: Callable[[Any], tuple[Sequence[Any], list[Any]]]
    """The parts, and a key for each."""
    close: Callable[[type, Sequence[Any], list[Any]], Any]
    """A new instance of that very type with these parts, its attributes not set yet."""


def _blank(base: Any, cls: Any) -> Any:
    try:
        return base.__new__(cls)
    except TypeError:  # another extension type among the bases insists on its own
        return cls.__new__(cls)


def _close_dict(cls: type, keys: Sequence[Any], parts: list[Any]) -> Any:
    new = _blank(dict, cls)
    dict.update(new, zip(keys, parts, strict=True))
    return new


def _close_ordered(cls: type, keys: Sequence[Any], parts: list[Any]) -> Any:
    new = _blank(dict, cls)
    for key, part in zip(keys, parts, strict=True):
        OrderedDict.__setitem__(new, key, part)  # its `update` would ask the subclass's `__setitem__`
    return new


def _close_list(cls: type, keys: Sequence[Any], parts: list[Any]) -> Any:
    new = _blank(list, cls)
    list.extend(new, parts)
    return new


def _close_tuple(cls: type, keys: Sequence[Any], parts: list[Any]) -> Any:
    # Struct sequences, such as torch.return_types.max, allow no other constructor than their own.
    return cls(parts) if hasattr(cls, "n_sequence_fields") else tuple.__new__(cls, parts)


_DICT = _Kind(lambda x: (list(dict.keys(x)), list(dict.values(x))), _close_dict)
_ATTRIBUTES_ONLY = _Kind(lambda x: ((), []), lambda cls, keys, parts: _blank(object, cls))
_KINDS: dict[type, _Kind] = {
    dict: _DICT,
    defaultdict: _DICT,  # its factory is an attribute
    OrderedDict: _Kind(lambda x: (list(OrderedDict.keys(x)), list(OrderedDict.values(x))), _close_ordered),
    list: _Kind(lambda x: (range(list.__len__(x)), list.copy(x)), _close_list),
    tuple: _Kind(lambda x: (range(tuple.__len__(x)), [*tuple.__iter__(x)]), _close_tuple),
    UserDict: _ATTRIBUTES_ONLY,
    UserList: _ATTRIBUTES_ONLY,
}
_BAGS = (set, frozenset, deque)  # not rebuilt, but looked into

# Nothing is in these, and they are most of what data holds.  Exact types: a subclass may have attributes.
_ATOMS: frozenset[type] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type),
        *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
        *(torch.dtype, torch.device, torch.layout, torch.Size),
    }
)


def _kind_of(cls: type) -> _Kind | None:
    for base in cls.__mro__:
        if base in _KINDS:
            return _KINDS[base]
    return _ATTRIBUTES_ONLY if dataclasses.is_dataclass(cls) else None


def _moves_itself(cls: type) -> bool:
    # Asked of the class: an instance with a `__getattr__` (a mock, a dict with attribute access) may answer
    # to any name.  A class that is itself the leaf is a value.
    return callable(getattr(cls, "to", None)) and not issubclass(cls, type)


class _Attribute(NamedTuple):
    put: Callable[[Any, str, Any], None]
    name: str
    value: Any


def _put_in_dict(x: Any, name: str, value: Any) -> None:
    x.__dict__[name] = value  # past properties of the same name


def _attributes(x: object) -> list[_Attribute]:
    """What is kept in the instance beside its contents.

    `object.__getstate__` knows about slots (inherited, mangled, unset) and is asked past any override.  Slots
    are put past the `__setattr__` of a frozen dataclass.
    """
    if type(x) in (dict, list, tuple, OrderedDict):
        return []
    state: Any = object.__getstate__(x)
    own, slots = state if type(state) is tuple else (state, None)
    found = [_Attribute(_put_in_dict, name, value) for name, value in list((own or {}).items())]
    found += [_Attribute(object.__setattr__, name, value) for name, value in (slots or {}).items()]
    if isinstance(x, defaultdict):
        found.append(_Attribute(object.__setattr__, "default_factory", x.default_factory))
    return found


# -- Flatten and rebuild -----------------------------------------------------------------------------------


class _Node:
    """One container: a snapshot of what is in it, and which parts are to be replaced.

    A snapshot, for the user may change the container while its tensors are on their way.
    """

    __slots__ = ("attributes", "keys", "kind", "parts", "position", "source", "swaps", "todo")

    def __init__(self, source: Any, kind: _Kind, position: int = 0) -> None:
        self.source = source
        self.kind = kind
        self.position = position  # in the container around it
        self.keys, contents = kind.open(source)
        self.attributes = _attributes(source)
        self.parts = contents + [attribute.value for attribute in self.attributes]
        self.todo = enumerate(self.parts)
        self.swaps: list[tuple[int, int]] = []  # (position among the parts, index of the value that goes in)

    def build(self, values: list[Any]) -> Any:
        parts, size = self.parts.copy(), len(self.keys)
        for position, index in self.swaps:
            parts[position] = values[index]
        new = self.kind.close(type(self.source), self.keys, parts[:size])
        for attribute, value in zip(self.attributes, parts[size:], strict=True):
            attribute.put(new, attribute.name, value)
        return new

    def label(self, position: int) -> str:
        size = len(self.keys)
        if position >= size:
            return f".{self.attributes[position - size].name}"
        key = self.keys[position]
        return f"[{key!r}]" if type(key) in (str, int) else "[...]"


_TENSOR, _ARRAY, _MOVER = range(3)  # steps that take the next moved leaf of their sort


class Tree(Generic[T]):
    """Data taken apart by `flatten`; `rebuild` puts it together around the moved leaves.

    The recipe is a straight line of steps; each yields one value, the next leaf or a container made of
    earlier values.  So depth does not matter, and what appears twice is moved once and appears twice.
    """

    __slots__ = ("_data", "_result", "_steps", "arrays", "movers", "tensors")

    def __init__(self, data: T) -> None:
        self.tensors: list[torch.Tensor] = []
        """Each tensor once, in order of first appearance."""
        self.arrays: list[Array] = []
        """Each numpy array once; `as_tensor` makes a tensor of it, in a worker thread, for it may copy."""
        self.movers: list[Any] = []
        """Each module, and each object with a `.to` of its own, once."""
        self._data = data
        self._steps: list[int | _Node] = []
        self._result: int | None = None  # index of the value that is the whole; None: nothing to move

    def rebuild(self, moved: Sequence[Any], moved_movers: Sequence[Any]) -> T:
        """The data around what has become of `[*tensors, *arrays]` and of `movers`.  May be called again."""
        split = len(self.tensors)
        if len(moved) != split + len(self.arrays) or len(moved_movers) != len(self.movers):
            raise ValueError("rebuild() takes one moved leaf for each of tensors, arrays and movers")
        if self._result is None:
            return self._data
        leaves = iter(moved[:split]), iter(moved[split:]), iter(moved_movers)
        values: list[Any] = []
        for step in self._steps:
            values.append(step.build(values) if isinstance(step, _Node) else next(leaves[step]))
        whole: T = values[self._result]
        return whole


def flatten(data: T, *, verb: str) -> Tree[T]:
    """Takes `data` apart.  `verb` is the public call that asks, and the name under which errors speak.

    Raises TypeError or ValueError for what cannot be moved (layouts, dtypes, tensors without data; for
    "to_device" tensors inside an autograd graph) and for data that contains itself, naming the place in the
    data and the way out.  Warns, once per type, of an object that holds tensors but cannot be taken apart.
    """
    walk = _Walk(Tree(data), verb)
    with torch._C.DisableTorchFunction():  # subclasses and modes have no say in layout or requires_grad
        walk.run()
    return walk.tree


class _Walk(Generic[T]):
    """Depth first, with a stack of its own: Python's recursion limit is no limit for data."""

    def __init__(self, tree: Tree[T], verb: str) -> None:
        self.tree = tree
        self.verb = verb
        self.stack = [_Node([tree._data], _KINDS[list])]  # in a list, so that a lone leaf is no special case
        self.met: dict[int, int | None] = {}  # id of an object -> index of its value; None: by identity
        self.open: set[int] = set()  # ids of the containers on the stack
        self.closed: list[_Node] = []  # keeps what was met alive, so that no id is given out twice

    def run(self) -> None:
        while True:
            node = self.stack[-1]
            if self._descend(node):
                continue
            self.stack.pop()
            if not self.stack:
                self.tree._result = node.swaps[0][1] if node.swaps else None
                return
            self._close(node)

    def _descend(self, node: _Node) -> bool:
        """Goes through the parts not looked at yet; true when it met a container and put it on the stack."""
        for position, part in node.todo:
            if type(part) in _ATOMS:
                continue
            key = id(part)
            if key in self.open:
                name = type(part).__name__
                raise ValueError(f"{self.verb}(): {self._path(position)} is a {name} that contains itself")
            if key not in self.met and (kind := self._leaf(part, position)) is not None:
                self.open.add(key)
                self.stack.append(_Node(part, kind, position))
                return True
            index = self.met[key]
            if index is not None:
                node.swaps.append((position, index))
        return False

    def _leaf(self, x: Any, position: int) -> _Kind | None:
        """Meets a leaf; what is none is left to the caller, with the way to open it."""
        tree, index = self.tree, None
        if isinstance(x, torch.Tensor):
            index = self._take(_TENSOR, tree.tensors, x, position)
        elif is_array(x):
            index = self._take(_ARRAY, tree.arrays, x, position)
        elif _moves_itself(type(x)):
            tree.movers.append(x)
            index = self._step(_MOVER)
        elif (kind := _kind_of(type(x))) is not None:
            return kind
        else:
            _warn_if_tensors_stay_behind(x, self.verb)
        self.met[id(x)] = index
        return None

    def _take(self, step: int, leaves: list[Any], x: Any, position: int) -> int:
        if (refused := refusal(x, self.verb)) is not None:
            error, why = refused
            raise error(f"{self.verb}(): {self._path(position)} {why}")
        leaves.append(x)
        return self._step(step)

    def _step(self, step: int | _Node) -> int:
        self.tree._steps.append(step)
        return len(self.tree._steps) - 1

    def _close(self, node: _Node) -> None:
        index = self._step(node) if node.swaps else None
        if index is not None:
            self.stack[-1].swaps.append((node.position, index))
        self.met[id(node.source)] = index
        self.open.remove(id(node.source))
        self.closed.append(node)

    def _path(self, position: int) -> str:
        """Where the walk stands, as the user would write it; of a deep place the last steps."""
        positions = [*(node.position for node in self.stack[2:]), position]
        labels = [node.label(place) for node, place in zip(self.stack[1:], positions, strict=False)]
        return "data" + "..." * (len(labels) > 8) + "".join(labels[-8:])


# -- Objects that hold tensors, but are neither leaves nor containers --------------------------------------

_warned: weakref.WeakSet[type] = weakref.WeakSet()
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _warn_if_tensors_stay_behind(x: object, verb: str) -> None:
    cls = type(x)
    if cls in _warned or not any(isinstance(y, torch.Tensor) or is_array(y) for y in _sample(x)):
        return
    warnings.warn(
        f"{verb}(): a {cls.__module__}.{cls.__qualname__} holds tensors, but is handed through as it is, "
        "and they stay where they are; give it a `.to(device)` method, make it a dataclass, or pass a dict",
        UserWarning,
        stacklevel=_outside(),
    )
    _warned.add(cls)  # after the warning: where warnings are errors, every call is one


def _sample(x: object) -> Iterator[Any]:
    """A look at what an object holds; bounded, for it runs on the event loop."""
    if isinstance(x, _BAGS):
        yield from islice(x, 32)
    if isinstance(x, type | types.ModuleType):
        return
    for _, _, value in _attributes(x):
        yield value
        if type(value) in (list, tuple, *_BAGS):
            yield from islice(value, 1)
        elif type(value) is dict:
            yield from islice(value.values(), 1)


def _outside() -> int:
    """The stack level, seen from our caller, of the first frame that is not aiogpu's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


# -- Everything that data reaches --------------------------------------------------------------------------


def tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Every tensor whose memory `data` reaches, each once: for `record_stream` and lifetimes.

    Goes through what `flatten` takes apart, and also through sets and deques, modules (parameters and
    buffers), the attributes of objects with a `.to`, and gradients.  Tensors without memory of their own
    (sparse, nested, wrapper subclasses) are represented by their components.  Never raises: what cannot be
    looked into is left out.
    """
    cls = type(data)
    if cls in _ATOMS:
        return iter(())
    if cls is torch.Tensor and _is_whole(data) and _grad(data) is None:
        return iter((data,))
    with torch._C.DisableTorchFunction():
        return iter(_reach(data))  # at once: nobody changes data, or this thread's state, between two items


def _is_whole(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested


def _grad(x: torch.Tensor) -> torch.Tensor | None:
    return x.grad if x.is_leaf or x.retains_grad else None  # asking any other non-leaf warns


def _reach(data: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is given out twice
    todo = [data]
    while todo:
        x = todo.pop()
        if type(x) in _ATOMS or id(x) in seen:
            continue
        seen[id(x)] = x
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
    if isinstance(x, torch.nn.Module):
        if isinstance(x, torch.jit.ScriptModule):  # keeps them in C++
            return [*x.parameters(), *x.buffers()]
        return [*x._parameters.values(), *x._buffers.values(), *x._modules.values()]
    if isinstance(x, _BAGS):
        return list(x)
    kind = _kind_of(cls)
    if kind is None and not _moves_itself(cls):
        return []
    contents = kind.open(x)[1] if kind is not None else []
    return [*contents, *(attribute.value for attribute in _attributes(x))]
