"""One leaf: whether it can be moved, and what to do instead; numpy arrays as tensors.

Law of this file: nothing here moves or writes data.  `refusal` looks at metadata only and may run on the
event loop; `as_tensor` may copy and belongs in a worker thread.  numpy is never imported, only recognised
where somebody else has imported it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from .parts import RAW, components, has_tangent

if TYPE_CHECKING:
    import numpy
    from typing_extensions import TypeIs

    Array: TypeAlias = numpy.ndarray[Any, Any]

Refusal: TypeAlias = tuple[type[Exception], str]

__all__ = ["Refusal", "as_tensor", "is_array", "refusal", "special_layout"]

# -- What is refused: reasons are the ends of sentences that begin with the leaf's name --------------------

#: The calls that take every layout; the others write into, or read elements of, one piece of memory.
_ANY_LAYOUT = ("to_device", "to_host")
_WAYS_OUT = {
    "to_host": "`await aiogpu.run_sync(x.cpu)`",
    "to_host(out=...)": "plain tensors, or leave `out` away",
    "copy_": "`await aiogpu.run_sync(dst.copy_, src)`",
    "item": "`(await aiogpu.to_host(x)).to_dense().item()`",
}  # for any other verb: x.to, device

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
_GUEST = 2  # `dtype.isbuiltin` of user-defined dtypes, whose kind says nothing of their format

# The formats that package ml_dtypes adds to numpy (for JAX), under torch's names; packed ones are not alike.
_GUESTS = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")


def refusal(x: torch.Tensor | Array, verb: str, dtype: torch.dtype | None = None) -> Refusal | None:
    """Why the leaf `x` cannot be moved, or not be converted to `dtype`, and what to do instead."""
    refused = _tensor_refusal(x, verb) if isinstance(x, torch.Tensor) else _array_refusal(x)
    return refused if dtype is None or refused is not None else _conversion_refusal(x, dtype)


def _tensor_refusal(x: torch.Tensor, verb: str) -> Refusal | None:
    way_out = _WAYS_OUT.get(verb, "`await aiogpu.run_sync(x.to, device)`")
    if x.is_meta:
        return ValueError, "is a meta tensor, which holds no data; use `torch.empty_like(x, device=device)`"
    if is_lazy(x):
        return ValueError, f"is an {type(x).__name__}, which holds no data before its module's first forward"
    if x._is_zerotensor():
        return (
            ValueError,
            "is one of autograd's zero tensors, which have no memory; use `torch.zeros(x.shape)`",
        )
    if x.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return TypeError, "is a torch._mkldnn tensor, whose format only oneDNN knows; use `x.to_dense()`"
    if x.is_quantized and x.dtype in _PACKED:
        return TypeError, f"is a quantized tensor of several {x.dtype} a byte; use `x.dequantize()`"
    if verb not in _ANY_LAYOUT and (layout := special_layout(x)) is not None:
        return TypeError, f"is a {layout} tensor, which {verb} does not take; use {way_out}"
    if verb in ("copy_", "item") and (integers := RAW.get(x.dtype)) is not None:
        return TypeError, f"is a {x.dtype} tensor, which has no kernels; use `.view({integers})` of it"
    if verb == "to_device" and x.requires_grad and not x.is_leaf:
        return ValueError, (
            "requires grad and is not a leaf, so that a copy made outside autograd would cut its graph; "
            f"pass `x.detach()` if that is meant, or use {way_out} to stay in the graph"
        )
    if verb == "to_device" and has_tangent(x):
        return ValueError, (
            "has a tangent (forward-mode autograd), which a copy made outside autograd would lose; pass "
            f"`x.detach()` if that is meant, or use {way_out} to keep it"
        )
    return None


_PACKED = (torch.quint4x2, torch.quint2x4)


def special_layout(x: torch.Tensor) -> str | None:
    """The name of a layout that is no single piece of memory with elements in it; None: it is one."""
    if x.is_nested:
        return "nested"
    if x.is_quantized:
        return "quantized"
    if components(x):
        return type(x).__name__ if x.layout is torch.strided else str(x.layout)  # torch.sparse_csr
    return None


def _conversion_refusal(x: torch.Tensor | Array, dtype: torch.dtype) -> Refusal | None:
    own = x.dtype if isinstance(x, torch.Tensor) else None
    if own == dtype or not (dtype in RAW or own in RAW):
        return None
    quantized = isinstance(x, torch.Tensor) and x.is_quantized
    instead = "pass `x.dequantize()`" if quantized else "leave dtype= away"
    return TypeError, f"is of dtype {x.dtype}, which torch cannot convert to {dtype}; {instead}"


def _array_refusal(x: Array) -> Refusal | None:
    if _torch_dtype(x) is None:
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


def _torch_dtype(x: Array) -> torch.dtype | None:
    dtype = x.dtype
    name = _DTYPES.get(f"{dtype.kind}{dtype.itemsize}")
    if dtype.isbuiltin == _GUEST:
        name = dtype.name if dtype.type.__module__ == "ml_dtypes" and dtype.name in _GUESTS else None
    return None if name is None else getattr(torch, name, None)


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
    if array.dtype.isbuiltin == _GUEST:
        guest = _torch_dtype(array)
        assert guest is not None, "refused"
        return as_tensor(array.view(f"u{array.itemsize}")).view(guest)
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
