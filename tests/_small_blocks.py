"""Devices with small staging blocks, so that small tensors take every path of a transfer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from aiogpu import _engine
from aiogpu._engine import Engine, EngineSettings
from aiogpu.drivers.cpu import CpuDriver
from aiogpu.testing import VirtualDevice, installed
from aiogpu.transfers import jobs

__all__ = ["CHUNK", "SLOT", "small_blocks", "small_cpu", "small_virtual"]

#: Bytes of a slot and of a chunk.
SLOT, CHUNK = 256, 1024


@contextmanager
def small_blocks() -> Iterator[None]:
    """Engines made in this block have slots of SLOT and chunks of CHUNK bytes."""
    with (
        mock.patch.object(_engine, "SLOT_BYTES", SLOT),
        mock.patch.object(_engine, "CHUNK_BYTES", CHUNK),
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


@contextmanager
def small_cpu() -> Iterator[Engine]:
    """The CPU's driver with small blocks."""
    with small_blocks(), installed(CpuDriver(), EngineSettings(staging_bytes=8 * CHUNK)) as engine:
        yield engine
