"""Host memory as the operating system sees it: pages to page-lock, and the CPUs near a device.

Law of this file: everything here is a wish. What a system does not offer is left out without a word.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import torch

__all__ = ["cpus_near", "forget_pages", "pages", "pin_thread_to"]


def pages(nbytes: int) -> torch.Tensor:
    """Fresh, untouched pages of ``nbytes`` as a row of ``uint8``, page-aligned.

    Not shared with a forked child: the device goes on using the page it knows, and with copy-on-write the
    *parent* could be the one that gets another page at its next write. Data loaders fork all the time.
    Huge pages, where the system has them, make touching and registering many times faster.
    """
    flags = getattr(mmap, "MAP_PRIVATE", None)
    memory = mmap.mmap(-1, nbytes) if flags is None else mmap.mmap(-1, nbytes, flags | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(getattr(mmap, advice))
    _mapped.add(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)


def forget_pages(address: int, nbytes: int) -> None:
    """Take a shared mapping's pages out of this process's tables, with the GIL released.

    What is in them stays in the file, and comes back at the next access.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def cpus_near(bus_id: str, root: Path = Path("/sys")) -> frozenset[int]:
    """The CPUs of this process on the memory node of a PCI device ("0000:3b:00.0"); empty: no difference.

    Linux tells the node in /sys/bus/pci/devices/<bus id>/numa_node (-1 where there is only one).
    """
    try:
        node = int((root / "bus/pci/devices" / bus_id.lower() / "numa_node").read_text())
        if node < 0:
            return frozenset()
        near = _parse((root / f"devices/system/node/node{node}/cpulist").read_text())
        allowed = os.sched_getaffinity(0)
    except (OSError, ValueError, AttributeError):
        return frozenset()
    found = near & allowed
    return frozenset() if found == allowed else frozenset(found)


def pin_thread_to(cpus: frozenset[int]) -> None:
    """Let the calling thread run on ``cpus`` only (on any when empty), where the system lets it."""
    if cpus:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setaffinity(0, cpus)


_libc: Any = ctypes.CDLL(None) if os.name == "posix" else None

#: Where a child of a fork has holes.
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Unmapping is by address, and by then something else may lie in the hole: so the child never does."""
    for memory in tuple(_mapped):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _parse(cpulist: str) -> set[int]:
    """The kernel's notation: "0-3,8,10-11"."""
    cpus: set[int] = set()
    for part in filter(None, cpulist.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
