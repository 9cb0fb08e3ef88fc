"""Classes whose instances users have told us how to take apart.

Law of this file: an entry holds for exactly its class.  A subclass may hold more than its base knows of, and
would come back as its base.  Looking up takes no lock: entries are put and removed whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

__all__ = ["Entry", "Registration", "find", "register"]

T = TypeVar("T")

Flatten = Callable[[T], tuple[Sequence[Any], Any]]
Unflatten = Callable[[Sequence[Any], Any], T]


class Entry(NamedTuple):
    cls: type
    flatten: Callable[[Any], Any]
    unflatten: Callable[[list[Any], Any], Any]

    def open(self, x: Any) -> tuple[list[Any], Any]:
        """`x`'s children and the rest of it."""
        flat = self.flatten(x)
        if type(flat) is not tuple or len(flat) != 2 or not isinstance(flat[0], list | tuple):
            raise TypeError(
                f"flatten of aiogpu.register({self.cls.__qualname__}, ...) must return (children, context), "
                f"where children is a list or tuple; it returned {_briefly(flat)}"
            )
        children, context = flat
        return list(children), context

    def close(self, children: list[Any], context: Any) -> Any:
        new = self.unflatten(children, context)
        if not isinstance(new, self.cls):
            raise TypeError(
                f"unflatten of aiogpu.register({self.cls.__qualname__}, ...) must return a "
                f"{self.cls.__qualname__}; it returned {_briefly(new)}"
            )
        return new


_entries: dict[type, Entry] = {}
_lock = threading.Lock()


class Registration(Generic[T]):
    """What :func:`register` returns; ``with`` it, the entry holds until the block ends."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def remove(self) -> None:
        """Forget the class again; what is on its way still comes back by this entry. Can be repeated."""
        with _lock:
            if _entries.get(self._entry.cls) is self._entry:
                del _entries[self._entry.cls]

    def __enter__(self) -> Registration[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        cls = self._entry.cls
        state = "registered" if _entries.get(cls) is self._entry else "removed"
        return f"<Registration of {cls.__module__}.{cls.__qualname__}, {state}>"


def register(cls: type[T], flatten: Flatten[T], unflatten: Unflatten[T]) -> Registration[T]:
    """Make a class of yours a container: its tensors are found, moved, and put into a new instance.

    ::

        aiogpu.register(
            Graph,
            lambda graph: ([graph.nodes, graph.edges], graph.name),
            lambda children, name: Graph(*children, name=name),
        )
        graph = await aiogpu.to_device(graph)

    Everything that goes through data knows the class from then on: ``to_device`` and ``to_host``, ``share``,
    arguments and results of tasks, channels.

    Parameters
    ----------
    cls:
        Instances of exactly this class; register subclasses on their own. An entry comes before a ``.to`` of
        the class, before what its base is (a dict, a dataclass), and before ``torch.utils._pytree``, whose
        registrations are honoured, too (``register_pytree_node`` and ``torch.export.register_dataclass``).
    flatten:
        Takes an instance, returns ``(children, context)``: a list or tuple of whatever may hold tensors
        (tensors, arrays, containers, ``None``), and anything that ``unflatten`` needs besides.
    unflatten:
        Takes the children, moved, as a list in the same order, and the context; returns a new instance.

        Both are called on the event loop's thread, or, for large data, on one of aiogpu's own, and must
        neither block nor wait for the device. ``flatten`` may also be called only to see which tensors there
        are; ``unflatten`` only if there was something to move, and possibly before the copies have arrived:
        it may compute with them, on the current stream, but not read their values.

    Returns
    -------
    Registration
        ``registration.remove()``, or the end of a ``with`` block around it, takes it back.

    Raises
    ------
    TypeError
        For what is not a class, or functions that cannot be called; later, where it is used, for functions
        that do not return what they should.
    ValueError
        For classes that have a meaning already: tensors, arrays, Python's own types, and classes that are
        registered (remove that first).
    """
    if not isinstance(cls, type):
        raise TypeError(f"register() takes a class, not {_briefly(cls)}")
    for name, function in (("flatten", flatten), ("unflatten", unflatten)):
        if not callable(function):
            raise TypeError(f"register() takes a function as {name}, not {_briefly(function)}")
    if issubclass(cls, torch.Tensor) or cls.__module__ in ("builtins", "collections", "numpy"):
        raise ValueError(
            f"register(): {cls.__qualname__} has a meaning of its own in data; give your class "
            "`__tensor_flatten__` if it is a tensor, or make it a class of its own"
        )
    entry = Entry(cls, flatten, unflatten)
    with _lock:
        if cls in _entries:
            raise ValueError(
                f"register(): {cls.__qualname__} is registered already; keep what register() returned, and "
                "call its `remove()` first"
            )
        _entries[cls] = entry
    return Registration(entry)


def find(cls: type) -> Entry | None:
    """The entry of exactly `cls`."""
    return _entries.get(cls)


def _briefly(x: object) -> str:
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}, ({', '.join(type(part).__name__ for part in x[:4])})"
    return "None" if x is None else f"a {type(x).__name__}"
