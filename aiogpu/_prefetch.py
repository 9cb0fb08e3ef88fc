"""``prefetch``: the next batches are loaded, transformed and uploaded while this one is computed.

Law of this file: every batch exactly once, and its memory counted from before it is made until it is handed
over. All the work is done by the rooms in ``_flow``; here is what a user sees of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar, overload

import torch

from ._engine import Engine, find_engine, normalize
from ._flow.outlet import Outlet
from ._flow.recipes import Recipe, named, whole
from ._flow.reorder import ReorderBuffer
from ._flow.runahead import RunAhead
from ._flow.sources import check_source, open_source
from ._flow.stages import Each
from ._tasks import current_task
from .transfers.api import to_device

__all__ = ["PrefetchStats", "prefetch"]

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class PrefetchStats:
    """Counters of one ``async with prefetch(...)`` block.

    ``batches``: handed over so far. ``ready``: batches that wait for the consumer now; ``begun``: those
    that are being made now, from the source's ``next`` to the end of the upload; both together at most
    ``depth``. ``source_seconds``: spent in the source. ``held_back_seconds``: the source waited because
    ``depth`` batches were there. ``data_wait_seconds``: the consumer waited for a batch: if this grows, the
    loading is too slow. ``device_wait_seconds``: the consumer was held back because the device had not
    finished earlier batches: if this grows, the device is the bottleneck, as it should be.
    """

    batches: int
    ready: int
    begun: int
    depth: int
    source_seconds: float
    held_back_seconds: float
    data_wait_seconds: float
    device_wait_seconds: float


class Batches(Outlet[T]):
    """What ``async with prefetch(...) as batches`` gives: an async iterator over the batches."""

    def __init__(
        self,
        settings: prefetch[T],
        source: Iterable[Any] | AsyncIterable[Any],
        recipes: list[Recipe],
    ) -> None:
        self._depth = settings._depth
        self._stateful = settings._stateful
        device = settings._device
        self._source = open_source(source, self._depth, _blame_source, stateful=self._stateful)
        # One count for everything: the source's credits come back when a batch is handed over.
        grant = self._source.grant
        buffer: ReorderBuffer[Any] = ReorderBuffer(on_take=None if recipes else grant)
        members: list[Callable[[], Coroutine[Any, Any, None]]] = [partial(self._source.run, buffer)]
        for recipe in recipes:
            stage = Each(recipe, buffer, on_take=grant if recipe is recipes[-1] else None)
            members.append(stage.run)
            buffer = stage.outbox
        super().__init__(buffer, members, RunAhead(settings._run_ahead), partial(_engine, device))

    def stats(self) -> PrefetchStats:
        """Counters, up to now."""
        ready = self._buffer.ready
        return PrefetchStats(
            batches=self._handed_out,
            ready=ready,
            begun=0 if self._crew.over else self._source.begun - self._handed_out - ready,
            depth=self._depth,
            source_seconds=self._source.busy,
            held_back_seconds=self._source.held_back,
            data_wait_seconds=self._data_wait,
            device_wait_seconds=self._device_wait,
        )

    def state_dict(self) -> Any:
        """The source's ``state_dict()`` as it was right after the batch that was handed over last.

        The source itself is ahead of the consumer, and so is its own ``state_dict()``. A checkpoint with
        this one goes on, after ``source.load_state_dict(...)``, with the batch that comes next here.

        Raises ``RuntimeError`` without ``stateful=True``, and before the first batch.
        """
        if not self._stateful:
            raise RuntimeError(
                "the source's state after each batch is not known: write prefetch(..., stateful=True)"
            )
        if self._last is None:
            raise RuntimeError(
                "no batch has been handed over yet: until then the state to save is the source's own, as it "
                "was before the block"
            )
        return self._last.state


_ENTER = (
    "a prefetch() is entered before it is iterated, so that leaving ends what it has begun: "
    "`async with aiogpu.prefetch(source) as batches:`, then `async for batch in batches:`"
)


class prefetch(Generic[T]):
    """Load, transform and upload the next batches while this one is used.

    ::

        async with aiogpu.prefetch(loader, device="cuda", transform=augment) as batches:
            async for x, y in batches:
                await train_step(x, y)

    Parameters
    ----------
    source:
        Any sync or async iterable: a ``DataLoader``, a generator, a webdataset, an SPDL pipeline, another
        ``prefetch``. A sync one, or one of both kinds, lives in one thread of its own, where all its
        ``next`` calls and its ``close`` are made; an async one in one task. What wants to be entered
        (``with``, ``async with``; SPDL's ``auto_stop``) is entered there, unless it is an iterator, which
        its owner has opened.
    depth:
        How many batches may exist beside the one that the consumer has; 1 or more. A batch counts from
        the moment before the source's ``next`` until it is handed over. While it is uploaded it takes
        its bytes on the host and on the device, before that on the host, afterwards on the device.
    device:
        Where batches are uploaded to (see :func:`aiogpu.to_device`); ``None``: not at all.
    transform:
        Applied to each batch before the upload: a function, called in worker threads, or an ``async
        def``, awaited.
    workers:
        How many transforms run at once; default, and at most, ``depth``.
    ordered:
        Batches come in the order of the source, or (``False``) as their transforms complete.
    run_ahead:
        How many batches' device work may be unfinished when another batch is handed over, so that
        launching never blocks (a stream takes about 1020 launches) and device memory is bounded: by
        ``depth + 1 + run_ahead`` batches, and what the consumer makes of ``1 + run_ahead`` of them. The
        work counts that the consumer's stream has when it asks for the next batch. It applies inside of
        tasks, and with a ``device`` outside of them, too.
    stateful:
        Take ``source.state_dict()`` after each batch, for :meth:`Batches.state_dict`: needed for an exact
        resume (``StatefulDataLoader``), because the source is ahead of the consumer. It is copied, in
        the source's thread.

    Every batch comes exactly once, the last included. What the source or the transform raises is raised by
    ``async for`` in that batch's place, and ends the iteration; a note on it names the batch. Leaving the
    block, however, closes the source and lets go of what was made ahead; a call of its ``next``, or a
    transform, that is running is waited for, at most the runtime's ``grace``, then named in a warning.

    Raises
    ------
    TypeError, ValueError
        At the call: a source that cannot be iterated, a ``depth`` below 1, ...
    """

    @overload
    def __init__(
        self: prefetch[T],
        source: Iterable[T] | AsyncIterable[T],
        *,
        depth: int = ...,
        device: torch.device | str | int | None = ...,
        transform: None = ...,
        workers: int | None = ...,
        ordered: bool = ...,
        run_ahead: int = ...,
        stateful: bool = ...,
    ) -> None: ...

    @overload
    def __init__(
        self: prefetch[T],
        source: Iterable[S] | AsyncIterable[S],
        *,
        depth: int = ...,
        device: torch.device | str | int | None = ...,
        transform: Callable[[S], Awaitable[T]],
        workers: int | None = ...,
        ordered: bool = ...,
        run_ahead: int = ...,
        stateful: bool = ...,
    ) -> None: ...

    @overload
    def __init__(
        self: prefetch[T],
        source: Iterable[S] | AsyncIterable[S],
        *,
        depth: int = ...,
        device: torch.device | str | int | None = ...,
        transform: Callable[[S], T],
        workers: int | None = ...,
        ordered: bool = ...,
        run_ahead: int = ...,
        stateful: bool = ...,
    ) -> None: ...

    def __init__(
        self,
        source: Iterable[Any] | AsyncIterable[Any],
        *,
        depth: int = 2,
        device: torch.device | str | int | None = None,
        transform: Callable[[Any], Any] | None = None,
        workers: int | None = None,
        ordered: bool = True,
        run_ahead: int = 2,
        stateful: bool = False,
    ) -> None:
        check_source(source, "prefetch")
        self._source = source
        self._depth = whole("depth", depth, 1)
        self._device = None if device is None else normalize(device)
        self._run_ahead = whole("run_ahead", run_ahead, 0)
        self._stateful = stateful
        if transform is not None and not callable(transform):
            raise TypeError(f"transform is a function of one batch, not a {type(transform).__name__}")
        lanes = min(self._depth, whole("workers", workers if workers is not None else self._depth, 1))
        if stateful and not callable(getattr(source, "state_dict", None)):
            raise TypeError(
                f"stateful=True needs a source with a state_dict(), not a {type(source).__name__}"
            )
        if stateful and not ordered:
            raise ValueError("stateful=True needs ordered=True: no state tells which of several came first")
        self._recipes: list[Recipe] = []
        if transform is not None:
            self._recipes.append(_transform(transform, lanes, ordered))
        if self._device is not None:
            self._recipes.append(_upload(self._device, min(2, self._depth), ordered))
        self._running: Batches[T] | None = None

    def __aiter__(self) -> NoReturn:
        raise TypeError(_ENTER)

    async def __aenter__(self) -> Batches[T]:
        if self._running is not None:
            raise RuntimeError("this prefetch() is running already: make another one for another block")
        batches: Batches[T] = Batches(self, self._source, self._recipes)
        batches._crew.start()
        self._running = batches
        return batches

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        batches, self._running = self._running, None
        assert batches is not None
        await batches.leave()


def _blame_source(error: BaseException, index: int) -> BaseException:
    error.add_note(f"aiogpu: prefetch, the source, item {index}")
    return error


def _transform(fn: Callable[[Any], Any], lanes: int, ordered: bool) -> Recipe:
    label = f"transform={named(fn)}"
    return Recipe(label, fn, lanes=lanes, ordered=ordered, place="prefetch")


def _upload(device: torch.device, lanes: int, ordered: bool) -> Recipe:
    async def upload(batch: Any) -> Any:
        return await to_device(batch, device)

    return Recipe(
        f"upload to {device}",
        upload,
        lanes=lanes,
        ordered=ordered,
        device_lanes=True,
        device=device,
        place="prefetch",
    )


def _engine(device: torch.device | None) -> Engine | None:
    """Whose current stream says how far the consumer has got."""
    if device is not None:
        return find_engine(device)
    task = current_task()
    return task.engine if task is not None else None
