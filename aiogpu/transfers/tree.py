"""The walk over users' data: taken apart into leaves, put together again around moved ones.

Law of this file: one walk serves moving, recording and errors, so that no leaf can be missed.  What a
container is, `containers` knows; this file never asks an object anything itself, and changes nothing it was
given.  It copies no data, so it may run on the event loop; what cannot be moved is refused here, before any
work.

Leaves are tensors, numpy arrays and *movers*: modules and other objects whose class has a `.to`.  What
somebody registered comes first, then movers (so that a dict subclass with a `.to` moves itself), then
containers.  Everything else passes by identity, and so does a container in which there is nothing to move.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from .alike import Alike, ordinary, runs
from .arrays import as_tensor, is_array, refusal
from .containers import ATOMS, LIST, Kind, attributes, kind_of, moves_itself, registered
from .parts import RAW, Rewrap, explode, is_ordinary
from .reach import tensors_of
from .strangers import tensors_stay_behind, warn_of, warn_of_keys

if TYPE_CHECKING:
    from .arrays import Array

__all__ = ["Rewrap", "Tree", "as_tensor", "explode", "flatten", "tensors_of"]

T = TypeVar("T")


class _Node:
    """One container: a snapshot of what is in it, and which parts are to be replaced.

    A snapshot, for the user may change the container while its tensors are on their way.
    """

    __slots__ = (
        "attributes",
        "kind",
        "opened",
        "parts",
        "position",
        "runs",
        "seen",
        "source",
        "todo",
        "uniform",
    )

    def __init__(self, source: Any, kind: Kind, position: int = 0) -> None:
        self.source = source
        self.kind = kind
        self.position = position  # in the container around it
        self.opened = opened = kind.open(source)
        self.attributes = attributes(source) if kind.has_attributes else []
        self.parts = opened.contents + [attribute.value for attribute in self.attributes]
        self.todo = iter(self.parts)
        self.seen = 0  # how many of them
        self.uniform = True  # no container among those
        # What goes in where: a position among the parts, a value, as in `_Walk.met`, and for how many parts
        # from there on the values count upwards.
        self.runs: list[tuple[int, int, int]] = []

    def build(self, leaves: Sequence[Any], built: list[Any]) -> Any:
        parts, size = self.parts.copy(), len(self.opened.contents)
        for position, value, count in self.runs:
            if count > 1:
                parts[position : position + count] = leaves[value : value + count]
            else:
                parts[position] = leaves[value] if value >= 0 else built[~value]
        new = self.kind.close(self.source, self.opened, parts[:size])
        for attribute, part in zip(self.attributes, parts[size:], strict=True):
            attribute.put(new, attribute.name, part)
        return new

    def key(self, position: int) -> tuple[str, Any]:
        """Names the part, the same in all containers of one kind."""
        size = len(self.opened.contents)
        if position >= size:
            return "attribute", self.attributes[position - size].name
        return "content", self.opened.keys[position]

    def label(self, position: int) -> str:
        what, key = self.key(position)
        return f".{key}" if what == "attribute" else self.kind.label(self.source, key)


_TENSOR, _ARRAY, _MOVER = range(3)


class Tree(Generic[T]):
    """Data taken apart by `flatten`; `rebuild` puts it together around the moved leaves.

    The recipe is a straight line: each container is made of leaves and of containers made before it.  So
    depth does not matter, and what appears twice is moved once and appears twice.
    """

    __slots__ = (
        "_data",
        "_nodes",
        "_order",
        "_root",
        "alike",
        "arrays",
        "dtype",
        "movers",
        "odd",
        "registered",
        "tensors",
    )

    def __init__(self, data: T, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        """What tensors and arrays are to be converted to."""
        self.tensors: list[torch.Tensor] = []
        """Each tensor once, in order of first appearance."""
        self.odd: set[int] = set()
        """Indices of those that have to be taken apart, or made whole again, by `explode`."""
        self.arrays: list[Array] = []
        """Each numpy array once; `as_tensor` makes a tensor of it, in a worker thread, for it may copy."""
        self.movers: list[Any] = []
        """Each module, and each object with a `.to` of its own, once."""
        self.alike = Alike()
        """The first ones of the tensors, as many as have been looked at for this, sorted; see `sort`."""
        self.registered = False
        """Functions that somebody registered make some of the containers."""
        self._data = data
        self._order: list[int] = []  # which sort each leaf is; empty while all are tensors
        self._nodes: list[_Node] = []
        self._root: _Node | None = None  # a list around the data; None: the data is a tensor

    @property
    def devices(self) -> set[torch.device]:
        """Where the tensors are."""
        return self.alike.devices | {tensor.device for tensor in self.tensors[self.alike.count :]}

    def sort(self) -> bool:
        """Let `alike` have all tensors; false if that cannot be: some are odd."""
        if not self.odd:
            rest = self.tensors[self.alike.count :]
            self.alike.extend(runs(rest, [self.dtype] * len(rest)))
        return not self.odd

    def rebuild(self, moved: Sequence[Any], moved_movers: Sequence[Any]) -> T:
        """The data around what has become of `[*tensors, *arrays]` and of `movers`.  May be called again."""
        split = len(self.tensors)
        if len(moved) != split + len(self.arrays) or len(moved_movers) != len(self.movers):
            raise ValueError("rebuild() takes one moved leaf for each of tensors, arrays and movers")
        if self._root is None:
            only: T = moved[0]
            return only
        if not self._root.runs:
            return self._data
        leaves = moved
        if self._order:
            sorts = iter(moved[:split]), iter(moved[split:]), iter(moved_movers)
            leaves = [next(sorts[sort]) for sort in self._order]
        built: list[Any] = []
        for node in self._nodes:
            built.append(node.build(leaves, built))
        whole: T = self._root.build(leaves, built)[0]
        return whole

    def places(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Where each tensor, array and mover is: its way from the top, and itself, as often as it appears."""
        if self._root is None:
            yield (), self.tensors[0]
            return
        sorts = iter(self.tensors), iter(self.arrays), iter(self.movers)
        leaves = [next(sorts[sort]) for sort in self._order] if self._order else self.tensors
        todo: list[tuple[tuple[Any, ...], _Node]] = [((), self._root)]
        while todo:
            path, node = todo.pop()
            for first, value, count in node.runs:
                for more in range(count):
                    way = () if node is self._root else (*path, node.key(first + more))
                    if value >= 0:
                        yield way, leaves[value + more]
                    else:
                        todo.append((way, self._nodes[~value]))


def flatten(data: T, *, verb: str, dtype: torch.dtype | None = None, name: str = "data") -> Tree[T]:
    """Takes `data` apart.  `verb` is the public call that asks, and the name under which errors speak.

    Raises TypeError or ValueError for what cannot be moved, or not be converted to `dtype`, and for data that
    contains itself, naming the place in the data and the way out.  Warns, once per type, of an object that
    holds tensors but cannot be taken apart.
    """
    tree, more = flatten_some(data, verb=verb, dtype=dtype, name=name, parts=sys.maxsize)
    assert more is None
    return tree


def flatten_some(
    data: T, *, verb: str, dtype: torch.dtype | None = None, name: str = "data", parts: int
) -> tuple[Tree[T], Callable[[int], bool] | None]:
    """Begins to take `data` apart, as far as about `parts` parts.

    Returns the tree, and what goes on with it: a function of a number of parts that returns whether the tree
    is complete; None if it is already.  Until then the containers must not be changed.
    """
    tree, lone = Tree(data, dtype), cast(Any, data)
    if type(lone) is torch.Tensor and dtype is None:  # by far the most frequent
        with torch._C.DisableTorchFunction():
            if is_ordinary(lone):
                tree.tensors.append(lone)
                return tree, None
    walk = _Walk(tree, verb, name)
    return tree, None if walk.run(parts) else walk.run


def _call(verb: str) -> str:
    return verb if verb.endswith(")") else f"{verb}()"


#: In `_Walk.met`: not met yet; on the stack; passes by identity.
_NEW, _OPEN, _AS_IT_IS = object(), object(), object()

#: Strangers of one type that are looked into in one walk: there may be very many of them.
_STRANGERS = 8

#: So many parts, or more, are looked at together, if they are all ordinary tensors.
_TOGETHER = 16


class _Walk:
    """Depth first, with a stack of its own: Python's recursion limit is no limit for data."""

    def __init__(self, tree: Tree[Any], verb: str, name: str) -> None:
        self.tree = tree
        self.verb = verb
        self.name = name
        root = tree._root = _Node([tree._data], LIST)
        self.stack = [root]
        # What an ordinary tensor can always be converted to.
        self.simple = tree.dtype is None or tree.dtype not in RAW
        # id of an object -> what stands for it: the number of a leaf, in order of first appearance, ~ the
        # number of a container, or a marker.
        self.met: dict[int, Any] = {}
        self.closed: list[_Node] = []  # keeps what was met alive, so that no id is given out twice
        self.kinds: dict[type, Kind | None] = {}
        self.strangers: dict[type, int] = {}

    def run(self, parts: int) -> bool:
        """Go on by about so many parts; true when there are no more."""
        self.parts = parts
        with torch._C.DisableTorchFunction():  # subclasses and modes have no say in layout or requires_grad
            return self._go_on()

    def _go_on(self) -> bool:
        while True:
            node = self.stack[-1]
            seen = node.seen
            met_a_container = self._descend(node)
            self.parts -= node.seen - seen
            if not met_a_container:
                if node.seen < len(node.parts):
                    return False
                self.stack.pop()
                if not self.stack:
                    return True
                self._close(node)
            elif self.parts <= 0:
                return False

    def _descend(self, node: _Node) -> bool:
        """Goes through the parts not looked at yet; true when it met a container and put it on the stack."""
        begin, node.seen = node.seen, min(len(node.parts), node.seen + self.parts)
        if node.uniform and node.seen - begin >= _TOGETHER and self._take_together(node, begin):
            return False
        met, found = self.met, node.runs
        tensors, simple, order = self.tree.tensors, self.simple, self.tree._order
        for position, part in enumerate(islice(node.todo, node.seen - begin), begin):
            cls = type(part)
            if cls in ATOMS:
                continue
            value = met.get(id(part), _NEW)
            if value is _NEW:
                if cls is torch.Tensor and simple and not order and is_ordinary(part):
                    # As `_meet` has it, without its calls: data may be ten thousand tensors.
                    value = met[id(part)] = len(tensors)
                    tensors.append(part)
                else:
                    value = self._meet(part, position)
            if type(value) is int:
                found.append((position, value, 1))
            elif value is _OPEN:
                if self.stack[-1] is not node:
                    node.seen, node.uniform = position + 1, False
                    return True
                name = type(part).__name__
                raise ValueError(
                    f"{_call(self.verb)}: {self._path(position)} is a {name} that contains itself"
                )
        return False

    def _take_together(self, node: _Node, begin: int) -> bool:
        """The same for parts that are all ordinary tensors, met for the first time; false if they are not."""
        tree, parts = self.tree, node.parts[begin : node.seen]
        if not self.simple or (found := ordinary(parts, tree.dtype)) is None:
            return False
        first = len(tree._order or tree.tensors)
        met = dict(zip(map(id, parts), range(first, first + len(parts)), strict=True))
        if len(met) < len(parts) or not self.met.keys().isdisjoint(met.keys()):
            return False
        if tree.sort():
            tree.alike.extend(found)
        self.met.update(met)
        tree.tensors.extend(parts)
        if tree._order:
            tree._order.extend([_TENSOR] * len(parts))
        node.runs.append((begin, first, len(parts)))
        node.todo.__setstate__(node.seen)  # type: ignore[attr-defined]  # they are behind us
        return True

    def _meet(self, x: Any, position: int) -> Any:
        """Meets an object for the first time.  A container is opened, and goes on the stack."""
        cls, tree, value = type(x), self.tree, _AS_IT_IS
        if isinstance(x, torch.Tensor):
            value = self._tensor(x, position)
        elif (kind := registered(cls)) is not None:
            value = self._enter(x, kind, position)
        elif is_array(x):
            self._refuse(x, position)
            tree.arrays.append(x)
            value = self._leaf(_ARRAY)
        elif moves_itself(cls):
            if isinstance(x, torch.UntypedStorage | torch.TypedStorage):
                raise TypeError(
                    f"{_call(self.verb)}: {self._path(position)} is a storage, which has no dtype; "
                    "pass a tensor, `torch.tensor([], dtype=torch.uint8).set_(x)`"
                )
            tree.movers.append(x)
            value = self._leaf(_MOVER)
        elif (kind := self._kind(cls)) is not None:
            value = self._enter(x, kind, position)
        elif self._is_news(cls) and tensors_stay_behind(x):
            warn_of(x, _call(self.verb), self._path(position))
        self.met[id(x)] = value
        return value

    def _tensor(self, x: torch.Tensor, position: int) -> int:
        tree = self.tree
        ordinary = is_ordinary(x)
        if not ordinary or tree.dtype is not None:  # which may be one that nothing can be converted to
            self._refuse(x, position)
        if not ordinary:
            tree.odd.add(len(tree.tensors))
        tree.tensors.append(x)
        return self._leaf(_TENSOR)

    def _leaf(self, sort: int) -> int:
        """The number of a leaf that was just put with its sort."""
        tree, order = self.tree, self.tree._order
        if order or sort != _TENSOR:
            if not order:
                order.extend([_TENSOR] * len(tree.tensors))
            order.append(sort)
            return len(order) - 1
        return len(tree.tensors) - 1

    def _refuse(self, x: Any, position: int) -> None:
        if (refused := refusal(x, self.verb, self.tree.dtype)) is not None:
            error, why = refused
            raise error(f"{_call(self.verb)}: {self._path(position)} {why}")

    def _kind(self, cls: type) -> Kind | None:
        if cls not in self.kinds:
            self.kinds[cls] = kind_of(cls)
        return self.kinds[cls]

    def _enter(self, x: Any, kind: Kind, position: int) -> Any:
        try:
            node = _Node(x, kind, position)
        except Exception as error:  # a registered function
            error.add_note(f"when {_call(self.verb)} took {self._path(position)} apart")
            raise
        keys = node.opened.keys
        if type(keys) is list and keys and isinstance(keys[0], torch.Tensor):
            warn_of_keys(_call(self.verb), self._path(position))
        self.stack.append(node)
        return _OPEN

    def _is_news(self, cls: type) -> bool:
        count = self.strangers[cls] = self.strangers.get(cls, 0) + 1
        return count <= _STRANGERS

    def _close(self, node: _Node) -> None:
        value: Any = _AS_IT_IS
        if node.runs:
            value = ~len(self.tree._nodes)
            self.tree.registered = self.tree.registered or not node.kind.has_attributes
            self.tree._nodes.append(node)
            around = self.stack[-1]
            around.runs.append((node.position, value, 1))
        self.met[id(node.source)] = value
        self.closed.append(node)

    def _path(self, position: int) -> str:
        """Where the walk stands, as the user would write it; of a deep place the last steps."""
        positions = [*(node.position for node in self.stack[2:]), position]
        labels = [node.label(place) for node, place in zip(self.stack[1:], positions, strict=False)]
        return self.name + "..." * (len(labels) > 8) + "".join(labels[-8:])
