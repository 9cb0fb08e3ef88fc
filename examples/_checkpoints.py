"""Checkpoints that are exact for the step they name, written while training goes on.

Law of this file: the snapshot is taken on the device, in stream order, before the optimizer can write again;
it comes down into page-locked memory and goes to disk from there, beside the next steps. A checkpoint appears
under its name only when it is complete, and is read back with `weights_only=True`.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import torch
from torch.utils import _pytree as pytree

import aiogpu

State = dict[str, Any]
Write = Callable[[State, Path], None]


def snapshot(state: State) -> State:
    """Copies of all tensors where they are, submitted to the current stream: later writes come after them.

    A copy within the device is over fifty times faster than the way to the host, for which training need not
    wait then. It takes the memory of the state once more while the checkpoint is under way.
    """
    with torch.no_grad():
        copied: State = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), state)
    return copied


def write_plain(state: State, path: Path) -> None:
    """`torch.save`, under the final name only once it is whole."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_distributed(state: State, path: Path) -> None:
    """`torch.distributed.checkpoint.async_save`; its future is waited for here, in a worker thread."""
    import torch.distributed.checkpoint as dcp

    partial = path.with_suffix(".partial")
    with warnings.catch_warnings():
        # One process without a process group is what we mean.
        warnings.filterwarnings("ignore", message=".*torch.distributed is (unavailable|disabled).*")
        dcp.async_save(state, checkpoint_id=str(partial)).result()
    if path.exists():  # of the same step: a folder can take the place of an empty one only
        shutil.rmtree(path)
    partial.replace(path)


class Checkpoints:
    """A folder of checkpoints `step-00000042.pt` (or `.dcp`), at most one of them being written at a time."""

    def __init__(self, folder: Path, *, distributed: bool = False, keep: int = 2) -> None:
        self.folder = folder
        self._write: Write = write_distributed if distributed else write_plain
        self._suffix = ".dcp" if distributed else ".pt"
        self._keep = keep
        self._turn = anyio.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}{self._suffix}"

    @aiogpu.task
    async def save(self, step: int, state: State, numbers: torch.Tensor | None = None) -> Path | None:
        """Write a :func:`snapshot`. Run it in a task group; only one is written at a time, in order.

        `numbers`: the step's loss and the like. Unless all of them are finite, there is nothing to save.
        """
        async with self._turn:
            on_host, numbers = await aiogpu.to_host((state, numbers))
            del state
            if numbers is not None and not numbers.isfinite().all():
                return None
            path = self.path(step)
            await aiogpu.run_sync(self._write, on_host, path)
            await aiogpu.run_sync(self._forget_old)
            return path

    def latest(self) -> Path | None:
        found = sorted(p for p in self.folder.iterdir() if re.fullmatch(r"step-\d{8}\.(pt|dcp)", p.name))
        return found[-1] if found else None

    def _forget_old(self) -> None:
        found = sorted(p for p in self.folder.iterdir() if p.suffix == self._suffix)
        for path in found[: -self._keep]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def read(path: Path, like: State) -> State:
    """A checkpoint as `State` on the CPU; `like` gives the structure that a `.dcp` folder is read into."""
    if path.suffix == ".pt":
        state: State = torch.load(path, map_location="cpu", weights_only=True)
        return state
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is (unavailable|disabled).*")
        dcp.load(like, checkpoint_id=str(path))
    return like
