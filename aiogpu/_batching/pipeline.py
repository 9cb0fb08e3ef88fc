"""One batch from its items to its results: collate, upload, compute, download, split.

Law of this file: everything runs on the stream of the task that computes the batch. Where the batch is small
and nothing of the users' but ``fn`` is called, all of it is submitted in one go, by whoever calls ``fn``;
what may take long runs in a thread. No step waits on the host for the device, except a large download of the
results, which is one, and, once the function has been called, the upload of what may be the callers' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import anyio
import torch

from .._engine import SLOT_BYTES, Engine, find_engine
from .._operation import Operation
from .._reactor import Point
from .._run_sync import run_sync
from ..drivers.base import Event, Stream
from ..transfers.api import to_device, to_host
from ..transfers.tree import tensors_of
from .collate import cut, describe, stack
from .lane import Lane, UserError, reported, without_grad
from .shuttle import Shuttle

__all__ = ["Load", "Pipeline"]

#: Bytes up to which items are stacked on the loop's thread where nothing is uploaded: some 50 µs, less than
#: a hop to a thread.
_AT_ONCE = 256 * 1024


class Load:
    """One batch on its way through.

    ``wanted()``: does anybody still wait for it? From any thread. ``landed(load)`` is called on the loop's
    thread whenever something has been submitted that ends at ``event`` on ``stream``; if ``ready``, with the
    results. ``nbytes``: how many of the items' are not on the device (see :func:`collate.describe`).
    """

    def __init__(
        self,
        pipeline: Pipeline,
        items: list[Any],
        nbytes: float,
        wanted: Callable[[], bool],
        landed: Callable[[Load], None],
    ) -> None:
        self.items = items
        self.size = len(items)
        self.nbytes = nbytes
        self.wanted = wanted
        self.output: Any = None
        #: In order, once they are there; parts of ``output``, if they have been cut from it.
        self.results: list[Any] | None = None
        #: To be called before the results are handed out, when the device is done.
        self.fill: Callable[[], None] | None = None
        #: What the device uses until ``event``; ``None`` where work is done when it is submitted.
        self.shuttle: Shuttle | None = None if pipeline.engine.driver.eager else Shuttle(pipeline.engine)
        self.event: Event | None = None
        self.stream: Stream | None = (
            None  # the batch's; what ``fn`` leaves as the current one is its own affair
        )
        #: Some of the output is on another device, where ``stream`` orders nobody.
        self.elsewhere = False
        #: An upload that may still read memory of callers, who may write there once they have their results.
        self.upload: Operation[Any] | None = None
        self._pipeline = pipeline
        self._landed = landed
        self._batch: Any = None
        self._collated = False

    def __del__(self) -> None:
        # A loop that was closed in the middle of everything has never heard of what was submitted: ``landed``
        # takes the event when it watches it. The slot goes back with the last reference, so somebody else
        # must keep it until the device is done.
        if self.event is not None and self.shuttle is not None:
            engine = self._pipeline.engine
            engine.notifier.adopt([Point(engine, self.event, None, (self.shuttle.keep, self.output))])

    @property
    def ready(self) -> bool:
        """Can the results be handed out, as far as the host is concerned?"""
        return self.results is not None and self.upload is None

    def collated(self, batch: Any) -> None:
        """The items have become ``batch``, wherever it was made."""
        self._batch, self._collated = batch, True
        self.items.clear()

    # -- where the function is called, see ``lane.Job`` --------------------------------------------

    def take_batch(self) -> Any:
        self.stream = self._pipeline.engine.driver.current()
        if not self._collated:
            self.collated(stack(self.items, self.shuttle.up if self.shuttle and self.nbytes else None))
        batch, self._batch = self._batch, None
        return batch

    def computed(self, output: Any) -> None:
        pipeline = self._pipeline
        if pipeline.split is None:
            if pipeline.download and self.shuttle is not None:
                if (downloaded := self.shuttle.down(output)) is None:
                    self.output = output  # too large for it
                    return
                output, self.fill = downloaded
            self.results = cut(output, self.size)
        self.output = output

    def submitted(self) -> None:
        engine = self._pipeline.engine
        if self.shuttle is not None and self.stream is not None:
            try:
                self._follow_others(engine, self.stream)
                self.event = engine.driver.record(self.stream)
            except BaseException as error:  # nobody can tell any more when the device is done
                engine.leaked.append(self.shuttle)
                engine.rethrow(error)

    def _follow_others(self, engine: Engine, stream: Stream) -> None:
        """The end on ``stream`` is the end on other devices that the output is on, too."""
        others = {tensor.device for tensor in tensors_of(self.output) if tensor.is_cuda} - {engine.device}
        for device in others:
            self.elsewhere = True
            other = find_engine(device)
            if other is not None:
                event = other.driver.record(other.driver.current())
                engine.driver.wait(stream, event)
                other.driver.recycle(event)

    def over(self) -> None:
        self._landed(self)


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
        #: Seconds that a batch spent lately before and after the lane, where it is not done in one go:
        #: another one can be computed meanwhile.
        self.beside = 0.0
        # Of our own, so that users' calls of run_sync cannot hold up batches.
        self.limiter = anyio.CapacityLimiter(threads)

    async def run(self, load: Load) -> None:
        """See ``load`` through until its results have been handed to ``landed``.

        Raises ``UserError`` for what users' functions raise.
        """
        start = perf_counter()
        if not self._goes_at_once(load):
            load.collated(await self._collate(load))
        began = perf_counter()
        await self.lane.carry_out(load)
        if load.ready:
            self._note_beside(began - start)
            return
        ended = perf_counter()
        if load.upload is not None:
            await load.upload
            load.upload = None
        if load.results is None:
            if self.download:
                load.output = await to_host(load.output)
            if self.split is None:
                load.results = cut(load.output, load.size)
            else:
                load.results = await self._in_thread(self._splitting(load.output), "split")
            _check(load)
        load.submitted()
        self._note_beside(began - start + perf_counter() - ended)
        load.over()

    def _note_beside(self, seconds: float) -> None:
        self.beside = max(seconds, 0.8 * self.beside)

    # -- in ----------------------------------------------------------------------------------------

    def _goes_at_once(self, load: Load) -> bool:
        """Can the items be stacked, and uploaded, where the function is called?"""
        if self.collate is not None:
            return False
        if load.shuttle is None:
            return load.nbytes <= _AT_ONCE
        return load.nbytes == 0 or (load.nbytes <= SLOT_BYTES and load.shuttle.open())

    async def _collate(self, load: Load) -> Any:
        """The batch, on the device."""
        upload = load.shuttle is not None
        device = self.engine.device
        items = load.items
        if self.collate is not None:
            collate = self.collate
            batch = await self._in_thread(lambda: collate(list(items)), "collate")
            if not upload or not describe(batch, device)[1]:
                return batch
            load.upload = to_device(batch, device)
            return await load.upload.ordered()
        if not upload:
            return await self._in_thread(lambda: stack(items), "stacking the items")
        if len(items) == 1 and type(items[0]) is torch.Tensor:
            # Alone, it is uploaded from where it is.
            load.upload = to_device(items[0].detach().unsqueeze(0), device)
            return await load.upload.ordered()
        batch = await self._in_thread(lambda: stack(items, self._stacked), "stacking the items")
        return await to_device(batch, device).ordered()

    def _stacked(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """In memory from which the device copies without another copy on the host, while the budget lasts."""
        first = rows[0]
        if first.device.type != "cpu" or first.layout is not torch.strided:
            return torch.stack(tuple(rows))
        host = self._page_locked((len(rows), *first.shape), first.dtype)
        return torch.stack(tuple(rows)) if host is None else torch.stack(tuple(rows), out=host)

    def _page_locked(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
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

    # -- out ---------------------------------------------------------------------------------------

    def _splitting(self, output: Any) -> Callable[[], list[Any]]:
        split = self.split
        assert split is not None
        return lambda: list(split(output))

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


def _check(load: Load) -> None:
    count = len(load.results or ())
    if count != load.size:
        raise ValueError(
            f"split() returned {count} results for a batch of {load.size}: one for each item is needed"
        )
