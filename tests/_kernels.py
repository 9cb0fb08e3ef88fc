"""Kernels for tests on the virtual device: what they touch is checked for order at their submission."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import torch

from aiogpu.testing import VirtualDevice

__all__ = ["cell", "go", "read", "write"]


def cell() -> torch.Tensor:
    """Memory of its own, zero."""
    return torch.zeros(1)


def write(device: VirtualDevice, x: torch.Tensor, value: float) -> None:
    """A kernel on the current stream that sets ``x``."""
    device.launch(lambda: x.fill_(value), writes=[x], name="write")


def read(device: VirtualDevice, x: torch.Tensor, into: list[float] | None = None) -> None:
    """A kernel on the current stream that reads ``x``; what it finds is appended to ``into``."""
    device.launch(lambda: into.append(x.item()) if into is not None else None, reads=[x], name="read")


def go(run: Any, device: VirtualDevice, fn: Callable[[], Awaitable[Any]]) -> Any:
    """Run ``fn`` while the device stands still; then everything it has submitted."""

    async def main() -> Any:
        try:
            return await fn()
        finally:
            device.run_all()

    return run(main)
