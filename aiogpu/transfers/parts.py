"""What a tensor is made of: strided tensors that can be copied, and the way back.

Law of this file: metadata only.  Nothing here reads or copies elements, so all of it may run on the event
loop; the exception is :func:`spread`, which says so.  What comes back has the class, the layout and the flags
of what went in (coalesced, quantizer, ragged structure, requires grad), whatever the class overrides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd import forward_ad

__all__ = [
    "RAW",
    "Parts",
    "Rewrap",
    "components",
    "core",
    "explode",
    "has_tangent",
    "is_ordinary",
    "spread",
    "widened",
]

Rewrap: TypeAlias = Callable[[Sequence[torch.Tensor]], torch.Tensor]

#: Formats that torch can neither convert nor, on every device, copy; as integers of their size they can be.
RAW: dict[torch.dtype, torch.dtype] = {
    getattr(torch, name): torch.uint8
    for name in (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        *("bits1x8", "bits2x4", "bits4x2", "bits8", "float4_e2m1fn_x2"),
        *("qint8", "quint8", "quint4x2", "quint2x4"),
    )
    if hasattr(torch, name)
} | {torch.bits16: torch.int16, torch.qint32: torch.int32}


class Parts(NamedTuple):
    """A tensor taken apart by :func:`explode`."""

    plain: list[torch.Tensor]
    """Strided tensors of class ``torch.Tensor`` that do not require grad; they hold all elements."""
    dtypes: list[torch.dtype | None]
    """What each is to be converted to before `rewrap`; None: not at all (indices, scales)."""
    rewrap: Rewrap
    """Makes the like of the tensor of the moved `plain`."""
    computes: bool = False
    """It may run kernels, or code of the class's."""


def is_ordinary(x: torch.Tensor) -> bool:
    """Is `x` a plain tensor that is its own and only part, and nothing to refuse?"""
    return (
        type(x) is torch.Tensor
        and x.layout is torch.strided
        and x.dtype not in RAW  # nor quantized, then
        and not (x.requires_grad or x.is_nested or x.is_meta or x._is_zerotensor())
        and (forward_ad._current_level < 0 or not has_tangent(x))
    )


def has_tangent(x: torch.Tensor) -> bool:
    """Is it a dual tensor of forward-mode autograd? ``copy_`` would hand its tangent on to staging memory,
    under ``no_grad``, too, and from there to whatever is copied through that next."""
    if forward_ad._current_level < 0 or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return False
    strided = x.layout is torch.strided and not x.is_nested
    return strided and forward_ad.unpack_dual(x).tangent is not None


def explode(x: torch.Tensor, dtype: torch.dtype | None = None) -> Parts | None:
    """`x`, which was not refused, as plain tensors, and how to make its like of their moved copies.

    The like has the class of `x`; a leaf that requires grad gives such a leaf and a Parameter a Parameter,
    with the attributes set on it (shallow).  With `dtype` its elements are converted to that.  A wrapper
    subclass gets the size of `x` and its strides, dense ones if those of `x` are not.  None: only its own
    `.to` can move it, as it keeps its data in a way of its own (`__torch_dispatch__` without
    `__tensor_flatten__`), or is such a wrapper and to be converted.
    """
    with torch._C.DisableTorchFunction():
        if type(x) is torch.Tensor:  # its attributes are lost, as with `.to`
            return _with_class(x, dtype, lambda like: like)
        if hasattr(x, "__tensor_flatten__"):
            return _wrapper(x, dtype)
        return None if _has_dispatch(type(x)) else _subclass(x, dtype)


def components(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that `x` keeps its data in; empty if it has memory of its own."""
    if hasattr(x, "__tensor_flatten__"):
        inner = (getattr(x, name) for name in x.__tensor_flatten__()[0])
        return [part for part in inner if isinstance(part, torch.Tensor)]
    if _has_dispatch(type(x)):
        return [part for part in vars(x).values() if isinstance(part, torch.Tensor)]
    if x.layout is torch.strided and not (x.is_nested or x.is_quantized):
        return []
    take_apart = _layout_of(x)
    return [] if take_apart is None else take_apart(x.detach(), None).plain


# -- Classes -----------------------------------------------------------------------------------------------


def _with_class(
    x: torch.Tensor, dtype: torch.dtype | None, dress: Callable[[torch.Tensor], torch.Tensor]
) -> Parts:
    """The parts of a tensor without dispatch of its own; `dress` makes its class of a plain tensor."""
    grad = x.requires_grad and x.is_leaf
    take_apart = _layout_of(x)
    assert take_apart is not None, "refused"
    bare = type(x) is torch.Tensor and not (x.requires_grad or has_tangent(x))
    parts = take_apart(x if bare else x.detach(), dtype)

    def rewrap(moved: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return _with_grad(dress(parts.rewrap(moved)), grad)

    return Parts(parts.plain, parts.dtypes, rewrap, parts.computes)


def _subclass(x: torch.Tensor, dtype: torch.dtype | None) -> Parts:
    cls, attributes = type(x), dict(vars(x))

    def dress(plain: torch.Tensor) -> torch.Tensor:
        # As torch.nn.Parameter does it; what `as_subclass` gives is a view in autograd's eyes.
        like = torch.Tensor._make_subclass(cls, plain)
        vars(like).update(attributes)
        return like

    return _with_class(x, dtype, dress)


def _wrapper(x: Any, dtype: torch.dtype | None) -> Parts | None:
    cls, grad, is_parameter = type(x), x.requires_grad and x.is_leaf, isinstance(x, torch.nn.Parameter)
    ragged = x.layout is torch.jagged
    if not ragged and dtype not in (None, x.dtype):
        return None  # which of its tensors to convert, it alone knows
    size, stride = x.size(), None if ragged else _stride_to_be(x)
    names, context = x.__tensor_flatten__()
    parts = Parts([], [], _only)
    inner: dict[str, tuple[slice, Rewrap]] = {}
    others: dict[str, Any] = {}  # a wrapper may also name things that are no tensors
    for name in names:
        part = getattr(x, name)
        if not isinstance(part, torch.Tensor):
            others[name] = part
        elif (exploded := explode(part, dtype if ragged and name == "_values" else None)) is None:
            return None
        else:
            start = len(parts.plain)
            parts.plain.extend(exploded.plain)
            parts.dtypes.extend(exploded.dtypes)
            inner[name] = slice(start, len(parts.plain)), exploded.rewrap
    if ragged:
        context = {**context, "requires_grad": False}  # what `_with_grad` decides

    def rewrap(moved: Sequence[torch.Tensor]) -> torch.Tensor:
        made = others | {name: rewrap_part(moved[where]) for name, (where, rewrap_part) in inner.items()}
        later = {}
        if ragged:
            _keep_ragged_size(x, made)
            # The constructor would import torch._dynamo for them, seconds on the loop's thread.
            later = {name: made.pop(name) for name in _KNOWN_LENGTHS if name in made}
        with torch._C.DisableTorchFunction():
            like = _with_grad(cls.__tensor_unflatten__(made, context, size, stride), grad)
        for name, value in later.items():
            setattr(like, name, value)
        if is_parameter:
            vars(like)["_is_param"] = True  # torch.nn.Parameter's mark on tensors of custom classes
        return like

    return Parts(parts.plain, parts.dtypes, rewrap, computes=True)


_KNOWN_LENGTHS = ("_min_seqlen_tensor", "_max_seqlen_tensor")


def _keep_ragged_size(x: Any, made: dict[str, Any]) -> None:
    """The symbol that stands for the ragged size belongs to the offsets (or lengths): the moved ones get the
    same, as with `.to`, so that `x` and its copy, and two tensors of one structure, have equal shapes."""
    from torch.nested._internal import nested_tensor  # loaded, since `x` is there

    name = "_offsets" if x._lengths is None else "_lengths"
    symbols = nested_tensor._tensor_symint_registry
    symbols[made[name]] = symbols[getattr(x, name)]


def _stride_to_be(x: torch.Tensor) -> tuple[int, ...]:
    """The strides of a copy: those of `x` where it is dense, else dense ones in the same order."""
    blank = torch.empty_strided(x.size(), x.stride(), device="meta")
    return torch.empty_like(blank).stride()


def _has_dispatch(cls: type[torch.Tensor]) -> bool:
    # Bound anew at each access where it is a method, hence compared with what plain tensors have.
    return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _with_grad(x: torch.Tensor, grad: bool) -> torch.Tensor:
    # As with `.to`: what was converted to an integer dtype cannot require grad any more.
    return x.requires_grad_() if grad and (x.is_floating_point() or x.is_complex()) else x


# -- Layouts: each takes a tensor that does not require grad -----------------------------------------------


def _layout_of(x: torch.Tensor) -> Callable[[torch.Tensor, torch.dtype | None], Parts] | None:
    """How to take `x` apart; None: nobody but torch's own kernels can (mkldnn)."""
    if x.layout is torch.strided:
        if x.is_nested:
            return _nested
        if x.is_quantized:
            return _quantized
        return _raw if x.dtype in RAW else _strided
    return _sparse_coo if x.layout is torch.sparse_coo else _COMPRESSED.get(x.layout)


def _only(moved: Sequence[torch.Tensor]) -> torch.Tensor:
    (plain,) = moved
    return plain


def _strided(x: torch.Tensor, dtype: torch.dtype | None) -> Parts:
    return Parts([x], [dtype], _only)


def _raw(x: torch.Tensor, _: torch.dtype | None) -> Parts:
    own = x.dtype
    return Parts([x.view(RAW[own])], [None], lambda moved: _only(moved).view(own))


def _sparse_coo(x: torch.Tensor, dtype: torch.dtype | None) -> Parts:
    size, coalesced = x.size(), x.is_coalesced()

    def assemble(moved: Sequence[torch.Tensor]) -> torch.Tensor:
        indices, values = moved
        # They are those of a tensor; checking them again would wait for the device.
        return torch.sparse_coo_tensor(indices, values, size, is_coalesced=coalesced, check_invariants=False)

    return Parts([x._indices(), x._values()], [None, dtype], assemble)


def _compressed(compressed: str, plain: str) -> Callable[[torch.Tensor, torch.dtype | None], Parts]:
    def take_apart(x: torch.Tensor, dtype: torch.dtype | None) -> Parts:
        size, layout = x.size(), x.layout

        def assemble(moved: Sequence[torch.Tensor]) -> torch.Tensor:
            indices, positions, values = moved
            return torch.sparse_compressed_tensor(
                indices, positions, values, size, layout=layout, check_invariants=False
            )

        indices = [getattr(x, compressed)(), getattr(x, plain)()]
        return Parts([*indices, x.values()], [None, None, dtype], assemble)

    return take_apart


_ROWS, _COLUMNS = _compressed("crow_indices", "col_indices"), _compressed("ccol_indices", "row_indices")
_COMPRESSED = {
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


def _nested(x: torch.Tensor, dtype: torch.dtype | None) -> Parts:
    """Of the strided kind: one buffer with places in it, whose books are tensors in host memory."""
    sizes, strides = x._nested_tensor_size(), x._nested_tensor_strides()
    offsets = x._nested_tensor_storage_offsets()
    first, last = 0, 0
    if x.numel():
        first = int(offsets.min())
        last = int((offsets + ((sizes - 1) * strides).sum(1))[sizes.prod(1) > 0].max()) + 1
    buffer = torch.empty(0, dtype=x.dtype, device=x.device).set_(
        x.untyped_storage(), first, (last - first,), (1,)
    )

    def assemble(moved: Sequence[torch.Tensor]) -> torch.Tensor:
        # Its kernels take the whole storage for the buffer.
        alone = _alone(_only(moved))
        like = torch._nested_view_from_buffer(alone, sizes, strides, offsets - first)
        return torch.Tensor._make_subclass(torch.Tensor, like)  # no view in autograd's eyes

    return Parts([buffer], [dtype], assemble, computes=True)


def _alone(x: torch.Tensor) -> torch.Tensor:
    """A dense row that fills its storage."""
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()


def _quantized(x: torch.Tensor, _: torch.dtype | None) -> Parts:
    """Its integers; a quantizer of one scale is kept as numbers, one of many moves along as tensors."""
    own, size = x.dtype, x.size()
    plain = torch.empty(0, dtype=RAW[own], device=x.device)
    plain.set_(x.untyped_storage(), x.storage_offset(), size, x.stride())
    if x.qscheme() is torch.per_tensor_affine:
        scale, zero_point = x.q_scale(), x.q_zero_point()

        def blank(device: torch.device, books: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch._empty_affine_quantized(
                (0,), scale=scale, zero_point=zero_point, dtype=own, device=device
            )

        quantizer = []
    else:
        axis = x.q_per_channel_axis()
        empty = [size[dim] if dim == axis else 0 for dim in range(len(size))]

        def blank(device: torch.device, books: Sequence[torch.Tensor]) -> torch.Tensor:
            scales, zero_points = books
            return torch._empty_per_channel_affine_quantized(
                empty, scales=scales, zero_points=zero_points, axis=axis, dtype=own, device=device
            )

        quantizer = [x.q_per_channel_scales(), x.q_per_channel_zero_points()]

    def assemble(moved: Sequence[torch.Tensor]) -> torch.Tensor:
        data, *books = moved
        like = blank(data.device, books)
        return like.set_(data.untyped_storage(), data.storage_offset(), size, data.stride())  # as torch.load

    return Parts([plain, *quantizer], [None] * (1 + len(quantizer)), assemble)


# -- Elements that several places share --------------------------------------------------------------------


def core(x: torch.Tensor) -> torch.Tensor:
    """The elements that a strided tensor really has, each once: what needs to be copied of it.

    Of an expanded view what it expands, of overlapping windows the row they slide over; otherwise `x`.
    """
    if x.is_contiguous() or not x.numel():
        return x
    thin = _thin(x)
    span = 1 + sum((size - 1) * stride for size, stride in zip(thin.shape, thin.stride(), strict=True))
    if span < thin.numel() and not (x.is_conj() or x.is_neg()):
        return thin.as_strided((span,), (1,), thin.storage_offset())
    return thin


def widened(core_: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse, wherever `core_` is now; `like` is what it is the core of.  A view."""
    if core_.shape == like.shape:
        return core_
    thin = _thin(like)
    if core_.shape != thin.shape:
        core_ = core_.as_strided(thin.shape, thin.stride(), core_.storage_offset())
    return core_.expand(like.shape)


def spread(core_: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same with memory for every element, as `.to` gives it: allocates, and runs kernels, unless `core_`
    is that already."""
    if core_.shape == like.shape:
        return core_
    full = torch.empty_like(like, dtype=core_.dtype, device=core_.device)
    return full.copy_(widened(core_, like))


def _thin(x: torch.Tensor) -> torch.Tensor:
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x
