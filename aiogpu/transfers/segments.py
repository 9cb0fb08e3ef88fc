"""Segments: how a transfer is cut up, and what the host copies of each.

Law of this file: nothing here knows of devices, chunks or turns. All methods may be called for different
segments at once; the tensors are held by the caller.
"""

from __future__ import annotations

from typing import Protocol

import torch

from .hostcopy import file_of, move
from .layout import flat, pairs

__all__ = ["Cutter", "Made", "Rows", "Segments", "Views", "segment_bytes"]


def segment_bytes(nbytes: int, chunk: int) -> int:
    """Bytes of the segments of a transfer of ``nbytes`` in all, at most, where one thread does them.

    They grow with the transfer, up to a chunk: the first and the last overlap with nothing, but each costs
    a submission with the GIL held.
    """
    most = chunk // 4 if nbytes <= 4 * chunk else chunk // 2 if nbytes <= 64 * chunk else chunk
    return max(64, most // 64 * 64)


class Cutter:
    """Cuts the tensors of one transfer of ``nbytes``, for ``threads`` that do a segment each.

    Each segment is what every thread would get of what is left (guided self-scheduling: Polychronopoulos and
    Kuck, IEEE Transactions on Computers C-36, 1987), up to a chunk: each costs several waits for the GIL, of
    some 50 µs where others want it, too; but at the end, and where threads start one after the other, all
    should be done at about the same time. Half a chunk at least (4 MiB; of less than eight chunks in all a
    quarter), which is done sooner by one thread than by two. Whole cache lines, whole elements of every
    dtype.
    """

    def __init__(self, nbytes: int, chunk: int, threads: int) -> None:
        self._left = nbytes
        self._threads = threads
        self._most = max(64, chunk // 64 * 64)
        self._least = max(64, chunk // (2 if nbytes >= 8 * chunk else 4) // 64 * 64)

    def cut(self, nbytes: int) -> list[int]:
        """Where the segments of the next tensor, of ``nbytes``, start, and where the last one ends."""
        bounds = [0]
        while (left := nbytes - bounds[-1]) > 0:
            size = min(self._most, max(self._least, self._left // self._threads)) // 64 * 64
            if left - size < self._least // 2:  # no crumbs
                size = left if left <= self._most else -(-left // 2 // 64) * 64
            bounds.append(bounds[-1] + size)
            self._left -= size
        return bounds


class Made(Protocol):
    """Rows that are made on the host, one after the other, for as many on the device."""

    count: int

    def there(self, index: int) -> torch.Tensor:
        """The device's elements of segment ``index``, as a row."""

    def row(self, index: int, chunk: torch.Tensor) -> torch.Tensor:
        """The chunk's first bytes, as a row like :meth:`there`."""
        like = self.there(index)
        row = chunk[: like.nbytes]
        return row if like.dtype is torch.uint8 else row.view(like.dtype)

    def fill(self, index: int, row: torch.Tensor) -> None:
        """From the host's elements into ``row``."""

    def host(self, index: int) -> torch.Tensor:
        """The host's elements as a row: themselves, or a copy."""


class Segments(Made, Protocol):
    """Equal elements of a tensor on the host and of one on the device, some at a time."""

    def empty(self, index: int, row: torch.Tensor) -> None:
        """The way back from :meth:`fill`."""


class Rows(Segments):
    """Both tensors lie in memory alike: bytes, copied with the GIL released."""

    def __init__(self, host: torch.Tensor, there: torch.Tensor, cutter: Cutter) -> None:
        self._there = flat(there).view(torch.uint8)
        self._host = host
        self._address = host.data_ptr()
        self._file = file_of(host)
        self._bounds = cutter.cut(self._there.numel())
        self.count = len(self._bounds) - 1

    def there(self, index: int) -> torch.Tensor:
        return self._there[self._bounds[index] : self._bounds[index + 1]]

    def row(self, index: int, chunk: torch.Tensor) -> torch.Tensor:
        return chunk[: self._bounds[index + 1] - self._bounds[index]]

    def fill(self, index: int, row: torch.Tensor) -> None:
        start = self._bounds[index]
        if self._file is None:
            move(row.data_ptr(), self._address + start, row.numel())
        else:
            self._file.read(row.data_ptr(), start, row.numel())

    def empty(self, index: int, row: torch.Tensor) -> None:
        move(self._address + self._bounds[index], row.data_ptr(), row.numel())

    def host(self, index: int) -> torch.Tensor:
        return flat(self._host).view(torch.uint8)[self._bounds[index] : self._bounds[index + 1]]


class Views(Segments):
    """The tensors have different orders of memory: torch copies, with as many threads as it thinks right."""

    def __init__(self, host: torch.Tensor, there: torch.Tensor, most: int) -> None:
        self._pairs = list(pairs(host, there, most // there.element_size()))
        self.count = len(self._pairs)

    def there(self, index: int) -> torch.Tensor:
        return self._pairs[index][1]

    def fill(self, index: int, row: torch.Tensor) -> None:
        host, _ = self._pairs[index]
        row.view(host.shape).copy_(host)

    def empty(self, index: int, row: torch.Tensor) -> None:
        host, _ = self._pairs[index]
        with torch.inference_mode(host.is_inference()), torch.no_grad():
            host.copy_(row.view(host.shape))

    def host(self, index: int) -> torch.Tensor:
        host, _ = self._pairs[index]
        row = torch.empty(host.numel(), dtype=host.dtype)
        self.fill(index, row)
        return row
