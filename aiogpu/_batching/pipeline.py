"""One batch from its items to its results: collate, upload, compute, download, split.

Law of this file: everything runs in the batch's own task, on its own stream; what may take long runs in a
thread. No step waits on the host for the device, except a download of the results, which is one, and, once
the function has been called, the upload of what may be the callers' own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import torch

from .._engine import SLOT_BYTES, Engine
from .._operation import Operation
from .._run_sync import run_sync
from ..transfers.api import to_device, to_host
from .collate import cut, describe, stack
from .lane import Lane, UserError, reported, without_grad

__all__ = ["Pipeline"]

#: Bytes up to which items are stacked on the loop's thread: some 50 µs, less than a hop to a thread.
_AT_ONCE = 256 * 1024


class Pipeline:
    """How a batcher's batches are computed.

    ``collate``, ``split``: the user's hooks, or ``None``. ``download``: results are host tensors.
    """

    def __init__(
        self,
        lane: Lane,
        engine: Engine,
        collate: Callable[[list[Any]], Any] | None,
        split: Callable[[Any], Sequence[Any]] | None,
        *,
        download: bool,
        threads: int,
    ) -> None:
        self.lane = lane
        self.engine = engine
        self.collate = collate
        self.split = split
        self.download = download and not engine.driver.eager
        # Of our own, so that users' calls of run_sync cannot hold up batches.
        self.limiter = anyio.CapacityLimiter(threads)

    async def run(self, items: list[Any], nbytes: int, wanted: Callable[[], bool]) -> tuple[list[Any], Any]:
        """The results of ``items``, in order, and the output that they are parts of.

        ``wanted()``: does anybody still wait for them? From any thread.
        ``nbytes``: how many of theirs are not on the device (see :func:`collate.describe`). Raises
        ``UserError`` for what users' functions raise.
        """
        size = len(items)
        batch, upload = await self._collated(items, nbytes)
        items.clear()
        output = await self.lane.call(batch, wanted)
        del batch
        if upload is not None:
            await upload
        if self.download:
            output = await to_host(output)
        if self.split is None:
            results = cut(output, size)
        else:
            split = self.split
            results = await self._in_thread(lambda: list(split(output)), "split")
        if len(results) != size:
            raise ValueError(
                f"split() returned {len(results)} results for a batch of {size}: one for each item is needed"
            )
        return results, output

    # -- in ----------------------------------------------------------------------------------------

    async def _collated(self, items: list[Any], nbytes: int) -> tuple[Any, Operation[Any] | None]:
        """The batch, on the device; and an upload that may still read memory of callers, who may write
        there once they have their results."""
        upload = not self.engine.driver.eager
        device = self.engine.device
        if self.collate is not None:
            collate = self.collate
            batch = await self._in_thread(lambda: collate(list(items)), "collate")
            if not upload or not describe(batch, device)[1]:
                return batch, None
            operation = to_device(batch, device)
            return await operation.ordered(), operation
        if nbytes <= _AT_ONCE:
            with without_grad():
                batch = stack(items)
            upload = upload and nbytes > 0
        elif not upload:
            batch = await self._in_thread(lambda: stack(items), "stacking the items")
        elif len(items) == 1 and type(items[0]) is torch.Tensor:
            # Alone, it is uploaded from where it is.
            operation = to_device(items[0].detach().unsqueeze(0), device)
            return await operation.ordered(), operation
        else:
            batch = await self._in_thread(lambda: stack(items, self._page_locked), "stacking the items")
        return (await to_device(batch, device).ordered() if upload else batch), None

    def _page_locked(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory from which the device copies without another copy on the host, while the budget lasts."""
        numel = 1
        for side in shape:
            numel *= side
        # Torch's pinned allocator rounds up to a power of two.
        nbytes = 1 << max(0, numel * dtype.itemsize - 1).bit_length()
        if nbytes <= SLOT_BYTES or not self.engine.results.claim(nbytes):
            return None
        strides = torch.empty(shape, dtype=dtype, device="meta").stride()
        host = self.engine.driver.result_memory(shape, strides, dtype)
        if host is None:
            self.engine.results.give_back(nbytes)
        else:
            self.engine.results.track(host, nbytes)
        return host

    async def _in_thread(self, fn: Callable[[], Any], what: str) -> Any:
        """``fn()`` in a worker thread. Raises ``UserError`` for what it raises."""

        def attempt() -> Any:
            try:
                with without_grad():
                    return fn()
            except Exception as error:
                return UserError(reported(error, f"{what} of {self.lane.where}"))

        outcome = await run_sync(attempt, limiter=self.limiter)
        if isinstance(outcome, UserError):
            raise outcome
        return outcome
