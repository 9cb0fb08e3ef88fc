"""One leaf: a tensor or a numpy array, whether it can be moved, and the plain tensors it is made of.

Law of this file: nothing here moves or writes data.  `refusal`, `components` and `explode` look at metadata
only and may run on the event loop; `as_tensor` may copy and belongs in a worker thread.  numpy is never
imported, only recognised where somebody else has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    import numpy
    from typing_extensions import TypeIs

    Array: TypeAlias = numpy.ndarray[Any, Any]

Refusal: TypeAlias = tuple[type[Exception], str]
Rewrap: TypeAlias = Callable[[Sequence[torch.Tensor]], torch.Tensor]

# -- What is refused: reasons are the ends of sentences that begin with the leaf's name --------------------

_WAYS_OUT = {"to_host": "x.cpu", "copy_": "dst.copy_, src"}  # for any other verb: x.to, device

# numpy's kind and item size -> torch's name.  Not keyed by numpy's own types: `ulonglong` and `uint64` are
# two types of one format, and torch.from_numpy knows only one of them.
_DTYPES = {
    "b1": "bool",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
}
_GUEST = 2  # `dtype.isbuiltin` of user-defined dtypes (bfloat16), whose kind says nothing of their format


def refusal(x: torch.Tensor | Array, verb: str) -> Refusal | None:
    """Why the leaf `x` cannot be moved, and what to do instead."""
    return _tensor_refusal(x, verb) if isinstance(x, torch.Tensor) else _array_refusal(x)


def _tensor_refusal(x: torch.Tensor, verb: str) -> Refusal | None:
    way_out = f"`await aiogpu.run_sync({_WAYS_OUT.get(verb, 'x.to, device')})`"
    if x.is_meta:
        return ValueError, "is a meta tensor, which holds no data; use `torch.empty_like(x, device=device)`"
    if is_lazy(x):
        return ValueError, f"is an {type(x).__name__}, which holds no data before its module's first forward"
    if (layout := _layout_to_come(x)) is not None:
        return TypeError, f"is a {layout} tensor, which aiogpu does not move yet; use {way_out}"
    if verb == "to_device" and x.requires_grad and not x.is_leaf:
        return ValueError, (
            "requires grad and is not a leaf, so that a copy made outside autograd would cut its graph; "
            f"pass `x.detach()` if that is meant, or use {way_out} to stay in the graph"
        )
    return None


def _layout_to_come(x: torch.Tensor) -> str | None:
    if x.is_nested:
        return "nested"
    if x.is_quantized:
        return "quantized"
    return None if x.layout is torch.strided else str(x.layout)  # torch.sparse_csr, torch._mkldnn


def _array_refusal(x: Array) -> Refusal | None:
    name = _DTYPES.get(f"{x.dtype.kind}{x.dtype.itemsize}")
    if name is None or x.dtype.isbuiltin == _GUEST or not hasattr(torch, name):
        return TypeError, (
            f"is a numpy array of dtype {x.dtype}, which torch has no equivalent for; convert it with "
            "`x.astype(...)`, or pass `x.tolist()`, which is handed through as it is"
        )
    if _is_a("numpy.ma", "MaskedArray", x):
        return TypeError, (
            "is a numpy MaskedArray, whose mask a tensor would lose; pass `x.filled(value)`, or `x.data` and "
            "`numpy.ma.getmaskarray(x)` side by side"
        )
    return None


# -- numpy -------------------------------------------------------------------------------------------------


def is_array(x: object) -> TypeIs[Array]:
    """Is `x` a numpy array?  Scalars such as `numpy.float32(1)` are not: they pass by identity."""
    return _is_a("numpy", "ndarray", x)


def _is_a(module: str, name: str, x: object) -> bool:
    # A module that another thread is importing just now, or a stub (None), has no such class yet.
    cls = getattr(sys.modules.get(module), name, None)
    return isinstance(cls, type) and isinstance(x, cls)


def as_tensor(array: Array) -> torch.Tensor:
    """`array`, which was not refused, as a CPU tensor that must not be written to.

    Shares the array's memory, however read-only, wherever torch can express it, and keeps it alive.  Negative
    strides, foreign byte order and misaligned items cost a copy, which may be large: call this in a worker
    thread.  Broadcast dimensions stay broadcast.
    """
    if _is_shareable(array):
        return torch.from_numpy(_writable_alias(array))
    once = (slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)
    core = array[(..., *once)]  # the ellipsis keeps a 0-d array an array
    copy = core.astype(array.dtype.newbyteorder("="), order="K", subok=False, copy=True)
    return torch.from_numpy(_writable_alias(copy)).expand(array.shape)


def _is_shareable(array: Array) -> bool:
    regular = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return regular and array.dtype.isnative and array.flags.aligned


def _writable_alias(array: Array) -> Array:
    """The same memory as a plain array that numpy believes writable.

    torch.from_numpy warns of read-only arrays, and `warnings.catch_warnings` is not thread-safe.  Even asking
    for `flags.writeable` warns, for what `numpy.broadcast_arrays` returns.
    """
    alias: Array = sys.modules["numpy"].asarray(_Writable(array))
    return alias


class _Writable:
    """What numpy needs to know of an array's memory; it keeps this object, and so the array, as the owner."""

    def __init__(self, array: Array) -> None:
        interface = array.__array_interface__
        address, _read_only = interface["data"]
        self.__array_interface__ = {**interface, "data": (address, False)}
        self.array = array


# -- What a tensor is made of ------------------------------------------------------------------------------


def components(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that `x` keeps its data in; empty if it has memory of its own."""
    if hasattr(x, "__tensor_flatten__"):
        inner = (getattr(x, name) for name in x.__tensor_flatten__()[0])
        return [part for part in inner if isinstance(part, torch.Tensor)]
    if _has_dispatch(type(x)):
        return [part for part in vars(x).values() if isinstance(part, torch.Tensor)]
    if x.layout is torch.strided and not x.is_nested:
        return []
    plain = x.detach()
    if x.layout is torch.sparse_coo:
        return [plain._indices(), plain._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [plain.crow_indices(), plain.col_indices(), plain.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [plain.ccol_indices(), plain.row_indices(), plain.values()]
    return [plain.values()] if x.is_nested else []


def explode(x: torch.Tensor) -> tuple[list[torch.Tensor], Rewrap] | None:
    """`x` as plain tensors that do not require grad, and how to make its like of their moved copies.

    The like has the class of `x`; a leaf that requires grad gives such a leaf and a Parameter a Parameter,
    with the attributes set on it (shallow).  A wrapper subclass gets the size and strides of `x`: the moved
    inner tensors must have kept theirs.  None: a subclass that keeps its data in a way of its own
    (`__torch_dispatch__` without `__tensor_flatten__`), so that only its own `.to` knows how to move it.
    """
    with torch._C.DisableTorchFunction():
        if hasattr(x, "__tensor_flatten__"):
            return _explode_wrapper(x)
        return None if _has_dispatch(type(x)) else _explode_plain(x)


def _explode_plain(x: torch.Tensor) -> tuple[list[torch.Tensor], Rewrap]:
    cls, grad = type(x), x.requires_grad and x.is_leaf
    if cls is torch.Tensor:  # its attributes are lost, as with `.to`
        return [x.detach() if x.requires_grad else x], lambda moved: _with_grad(_only(moved), grad)
    attributes = dict(vars(x))

    def rewrap(moved: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            # As torch.nn.Parameter does it; what `as_subclass` gives is a view in autograd's eyes.
            like = torch.Tensor._make_subclass(cls, _only(moved))
            _with_grad(like, grad)
        vars(like).update(attributes)
        return like

    return [x.detach()], rewrap


def _explode_wrapper(x: Any) -> tuple[list[torch.Tensor], Rewrap] | None:
    cls, grad, is_parameter = type(x), x.requires_grad and x.is_leaf, isinstance(x, torch.nn.Parameter)
    size, stride = x.size(), x.stride()
    names, context = x.__tensor_flatten__()
    plain: list[torch.Tensor] = []
    inner: dict[str, tuple[slice, Rewrap]] = {}
    others: dict[str, Any] = {}  # a wrapper may also name things that are no tensors
    for name in names:
        part = getattr(x, name)
        if not isinstance(part, torch.Tensor):
            others[name] = part
        elif (exploded := explode(part)) is None:
            return None
        else:
            tensors, rewrap_part = exploded
            inner[name] = slice(len(plain), len(plain) + len(tensors)), rewrap_part
            plain += tensors

    def rewrap(moved: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = others | {name: rewrap_part(moved[where]) for name, (where, rewrap_part) in inner.items()}
        with torch._C.DisableTorchFunction():
            like = _with_grad(cls.__tensor_unflatten__(parts, context, size, stride), grad)
        if is_parameter:
            vars(like)["_is_param"] = True  # torch.nn.Parameter's mark on tensors of custom classes
        return like

    return plain, rewrap


def _has_dispatch(cls: type[torch.Tensor]) -> bool:
    # Bound anew at each access where it is a method, hence compared with what plain tensors have.
    return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _only(moved: Sequence[torch.Tensor]) -> torch.Tensor:
    (plain,) = moved
    return plain


def _with_grad(x: torch.Tensor, grad: bool) -> torch.Tensor:
    # As with `.to`: what was converted to an integer dtype cannot require grad any more.
    return x.requires_grad_() if grad and (x.is_floating_point() or x.is_complex()) else x
