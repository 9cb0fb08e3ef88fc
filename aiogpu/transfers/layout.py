"""How a tensor's elements lie in memory, and how to go through them in another tensor's order.

Law of this file: views and arithmetic only; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["flat", "is_dense", "pairs", "same_order"]


def is_dense(tensor: torch.Tensor) -> bool:
    """Do the elements fill one piece of memory, without gaps or overlaps, in whatever order?"""
    if tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as one row, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def same_order(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two tensors have equal elements at equal places of their memory?"""
    sizes_matter = [i for i, size in enumerate(a.shape) if size != 1]
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and is_dense(a)
        and is_dense(b)
        and all(a.stride(i) == b.stride(i) for i in sizes_matter)
    )


def pairs(host: torch.Tensor, there: torch.Tensor, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors' equal elements, at most ``count`` at a time, in the order of dense ``there``'s memory.

    ``there`` comes in rows; so does ``host`` if it lies in memory as ``there`` does, else in views of any
    strides.
    """
    row, start = flat(there), 0
    for view in _in_order_of(there, host, count):
        end = start + view.numel()
        yield view, row[start:end]
        start = end


def _in_order_of(there: torch.Tensor, host: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    if same_order(host, there):
        yield from flat(host).split(count)
    else:
        order = sorted(range(there.dim()), key=there.stride, reverse=True)
        yield from _row_major(host.permute(order), count)


def _row_major(tensor: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    if tensor.numel() <= count:
        yield tensor
        return
    row = tensor.numel() // tensor.size(0)
    if row <= count:
        yield from tensor.split(count // row)
    else:
        for part in tensor:
            yield from _row_major(part, count)
