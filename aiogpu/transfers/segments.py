"""Segments: how a transfer is cut up, and what the host copies of each.

Law of this file: nothing here knows of devices, chunks or turns. All methods may be called for different
segments at once; the tensors are held by the caller.
"""

from __future__ import annotations

from typing import Protocol

import torch

from .hostcopy import file_of, move
from .layout import flat, pairs

__all__ = ["Made", "Rows", "Segments", "Views", "segment_bytes"]


def segment_bytes(nbytes: int, chunk: int) -> int:
    """Bytes of the segments of a transfer of ``nbytes`` in all, at most.

    They grow with the transfer, up to a chunk: the first and the last overlap with nothing, but each costs
    a submission with the GIL held. A quarter of a chunk (2 MiB) is done sooner by one thread than by two.
    """
    most = chunk // 4 if nbytes <= 4 * chunk else chunk // 2 if nbytes <= 64 * chunk else chunk
    return max(64, most // 64 * 64)


def _alike(nbytes: int, most: int) -> int:
    """The same for one tensor, in segments of one size: whole cache lines, whole elements of every dtype."""
    count = -(-nbytes // most)
    return -(-nbytes // count // 64) * 64


class Made(Protocol):
    """Rows that are made on the host, one after the other, for as many on the device."""

    count: int

    def there(self, index: int) -> torch.Tensor:
        """The device's elements of segment ``index``, as a row."""

    def fill(self, index: int, row: torch.Tensor) -> None:
        """From the host's elements into ``row``, which is like :meth:`there`."""

    def host(self, index: int) -> torch.Tensor:
        """The host's elements as a row: themselves, or a copy."""


class Segments(Made, Protocol):
    """Equal elements of a tensor on the host and of one on the device, some at a time."""

    def empty(self, index: int, row: torch.Tensor) -> None:
        """The way back from :meth:`fill`."""


class Rows:
    """Both tensors lie in memory alike: bytes, copied with the GIL released."""

    def __init__(self, host: torch.Tensor, there: torch.Tensor, most: int) -> None:
        self._there = flat(there).view(torch.uint8)
        self._host = host
        self._address = host.data_ptr()
        self._file = file_of(host)
        self._nbytes = _alike(self._there.numel(), most)
        self.count = -(-self._there.numel() // self._nbytes)

    def there(self, index: int) -> torch.Tensor:
        start = index * self._nbytes
        return self._there[start : start + self._nbytes]

    def fill(self, index: int, row: torch.Tensor) -> None:
        start = index * self._nbytes
        if self._file is None:
            move(row.data_ptr(), self._address + start, row.numel())
        else:
            self._file.read(row.data_ptr(), start, row.numel())

    def empty(self, index: int, row: torch.Tensor) -> None:
        move(self._address + index * self._nbytes, row.data_ptr(), row.numel())

    def host(self, index: int) -> torch.Tensor:
        start = index * self._nbytes
        return flat(self._host).view(torch.uint8)[start : start + self._nbytes]


class Views:
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
