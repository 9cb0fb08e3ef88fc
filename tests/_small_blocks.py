"""Devices with small staging blocks, so that small tensors take every path of a transfer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from aiogpu import _engine
from aiogpu._engine import Engine, EngineSettings
from aiogpu.drivers.cpu import CpuDriver
from aiogpu.testing import VirtualDevice, installed
from aiogpu.transfers import jobs

__all__ = ["CHUNK", "SLOT", "UnpinnedCpu", "small_blocks", "small_cpu", "small_virtual"]

#: Bytes of a slot and of a chunk.
SLOT, CHUNK = 256, 1024


@contextmanager
def small_blocks() -> Iterator[None]:
    """Engines made in this block have slots of SLOT and chunks of CHUNK bytes, and four copy threads."""
    with (
        mock.patch.object(_engine, "SLOT_BYTES", SLOT),
        mock.patch.object(_engine, "CHUNK_BYTES", CHUNK),
        mock.patch.object(_engine, "_cores", return_value=4),
        mock.patch.object(jobs, "SLOT_BYTES", SLOT),
    ):
        yield


@contextmanager
def small_virtual(
    *, pinned_bytes: int = 2**30, chunks: int = 8, **options: Any
) -> Iterator[tuple[VirtualDevice, Engine]]:
    """A virtual device with small blocks. ``pinned_bytes=0`` sends downloads through chunks."""
    device = VirtualDevice(**options)
    settings = EngineSettings(staging_bytes=chunks * CHUNK, pinned_bytes=pinned_bytes)
    with small_blocks(), installed(device, settings) as engine:
        yield device, engine


class UnpinnedCpu(CpuDriver):
    """The CPU's driver on a machine where only staging memory is page-locked, as with a GPU: real threads
    take every path of the ring."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: set[int] = set()
        #: Bytes that are page-locked now, and the most there ever were.
        self.pinned_bytes = self.peak_bytes = 0

    def pinned(self, nbytes: int, touch: Any = None) -> torch.Tensor:
        block = super().pinned(nbytes, touch)
        self._blocks.add(block.untyped_storage().data_ptr())
        self.pinned_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.pinned_bytes)
        return block

    def unpin(self, block: torch.Tensor) -> None:
        self._blocks.remove(block.untyped_storage().data_ptr())
        self.pinned_bytes -= block.nbytes

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._blocks


@contextmanager
def small_cpu(
    driver: CpuDriver | None = None, *, pinned_bytes: int = 2**30, chunks: int = 8
) -> Iterator[Engine]:
    """The CPU's driver with small blocks. ``pinned_bytes=0`` sends downloads through chunks."""
    settings = EngineSettings(staging_bytes=chunks * CHUNK, pinned_bytes=pinned_bytes)
    with small_blocks(), installed(driver or CpuDriver(), settings) as engine:
        yield engine
