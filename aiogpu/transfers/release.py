"""Letting go of large host memory: not on the loop's thread, and without the GIL.

Law of this file: it only drops references. Whoever else holds a tensor notices nothing; if nobody does, the
system takes its pages back, 10 ms for 64 MiB that a data loader's process had put into shared memory. Torch
lets go of the GIL while it frees memory of its own, but not for shared memory, and every thread would stand
still. So the pages go in two steps that release it: out of this process's tables first (what is in a shared
file stays there, and whoever still reads it has them back at the next access), and out of the file when the
last descriptor is closed, which is one of ours then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import torch

from ..drivers.hostmem import forget_pages

__all__ = ["is_large", "let_go"]

#: Bytes that take the system about a millisecond to take back.
LARGE = 8 * 1024 * 1024


def is_large(values: Iterable[Any]) -> bool:
    """Is there a host tensor among ``values`` that takes long to free?"""
    return any(
        isinstance(x, torch.Tensor)
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and x.numel() * x.element_size() >= LARGE
        for x in values
    )


def let_go(values: list[Any]) -> None:
    """Empty ``values``. Worker threads only."""
    descriptors = [fd for x in values if is_large([x]) and (fd := _unmapped(x)) is not None]
    values.clear()  # mostly the last references
    for descriptor in descriptors:
        os.close(descriptor)


def _unmapped(tensor: torch.Tensor) -> int | None:
    """Take shared memory out of the process's tables: a descriptor of its file, else ``None``."""
    with contextlib.suppress(RuntimeError, OSError, AttributeError, NotImplementedError):
        storage: Any = tensor.untyped_storage()
        # Not `_share_fd_cpu_`, which moves what has no descriptor (the sharing strategy "file_system") into
        # new memory, from under whoever holds an array of it. Here that is -1, which dup() refuses.
        if storage.is_shared():
            descriptor = os.dup(storage._get_shared_fd())
            forget_pages(storage.data_ptr(), storage.nbytes())
            return descriptor
    return None
