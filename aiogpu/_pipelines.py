"""``pipeline``: stages that are written as a chain, and run side by side.

Law of this file: a pipeline is a description. Nothing happens before it is entered, and it can be entered
again; each method gives a new one. What runs is in ``_flow``, made of public names: ``run_sync``,
``to_device``, ``to_host``, ``task``. A stage that is not here is an async generator function of yours, and
:meth:`pipeline.then`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
)
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar, overload

import anyio
import torch

from ._engine import normalize
from ._flow.outlet import Outlet
from ._flow.recipes import Recipe, named, whole
from ._flow.reorder import ReorderBuffer
from ._flow.runahead import RunAhead
from ._flow.sources import check_source, open_source
from ._flow.stages import Each, Flow, Stage
from ._flow.threads import in_thread
from ._tasks import current_task
from .transfers.api import to_device, to_host

__all__ = ["StageStats", "pipeline"]

T = TypeVar("T")
R = TypeVar("R")
Device = torch.device | str | int


@dataclass(frozen=True)
class StageStats:
    """One stage of a running pipeline, the source being the first.

    ``name``: its method and function. ``declared``: the line of that. ``items``: results so far.
    ``concurrency``: items at once.
    ``busy_seconds``, ``input_seconds``, ``output_seconds``: time spent working, waiting for items, and
    waiting for room behind the stage, of all its ``concurrency`` together. ``utilization``: busy share of
    the time since the start, 0 to 1: the bottleneck is the stage where it is near 1; those before it wait
    for output, those behind it for input. ``waiting``: finished items that the next stage has not taken.
    """

    name: str
    declared: str
    items: int
    concurrency: int
    busy_seconds: float
    input_seconds: float
    output_seconds: float
    utilization: float
    waiting: int


class Results(Outlet[T]):
    """What ``async with pipeline(...) as results`` gives: an async iterator over the results."""

    def __init__(self, source: Any, recipes: tuple[Recipe, ...], buffer: int, site: str) -> None:
        self._start = perf_counter()
        self._site = site
        # One item in the making, as in a stage of one lane.
        self._source = open_source(source, 1 + buffer, self._blame)
        self._sourced: ReorderBuffer[Any] = ReorderBuffer(on_take=self._source.grant)
        self._stages: list[Stage] = []
        inbox = self._sourced
        for recipe in recipes:
            stage = (Flow if recipe.flow else Each)(recipe, inbox, waiting=buffer)
            self._stages.append(stage)
            inbox = stage.outbox
        members: list[Callable[[], Coroutine[Any, Any, None]]] = [partial(self._source.run, self._sourced)]
        members += [stage.run for stage in self._stages]
        ahead = RunAhead(RUN_AHEAD) if recipes and recipes[-1].hands_over else None
        super().__init__(inbox, members, ahead, _consumer)

    def _blame(self, error: BaseException, index: int) -> BaseException:
        where = f"pipeline stage 0, {self._source.name} declared at {self._site}"
        error.add_note(f"aiogpu: {where}, item {index}")
        return error

    def stats(self) -> list[StageStats]:
        """One entry for the source and each stage, in their order."""
        elapsed = max(1e-9, (self._ended or perf_counter()) - self._start)
        source = self._source
        found = [
            StageStats(
                name=f"source({source.kind})",
                declared=self._site,
                items=source.items,
                concurrency=1,
                busy_seconds=source.busy,
                input_seconds=0.0,
                output_seconds=source.held_back,
                utilization=min(1.0, source.busy / elapsed),
                waiting=self._sourced.ready,
            )
        ]
        for stage in self._stages:
            meter, lanes = stage.meter, stage.recipe.lanes
            found.append(
                StageStats(
                    name=stage.recipe.label,
                    declared=stage.recipe.site,
                    items=meter.items,
                    concurrency=lanes,
                    busy_seconds=meter.busy,
                    input_seconds=meter.input,
                    output_seconds=meter.output,
                    utilization=min(1.0, meter.busy / lanes / elapsed),
                    waiting=stage.outbox.ready,
                )
            )
        return found

    def print_stats(self) -> None:
        """Print :meth:`stats` as a table; a nicer one where ``rich`` is installed."""
        header = ("stage", "items", "×", "busy s", "input s", "output s", "use", "waiting")
        rows = [
            (
                s.name,
                str(s.items),
                str(s.concurrency),
                f"{s.busy_seconds:.3f}",
                f"{s.input_seconds:.3f}",
                f"{s.output_seconds:.3f}",
                f"{s.utilization:.0%}",
                str(s.waiting),
            )
            for s in self.stats()
        ]
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
            for line in (header, *rows):
                print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
            return
        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        Console().print(table)


#: Steps of the device's work that a consumer, or a `map_gpu`, may be ahead of the device.
RUN_AHEAD = 2


class pipeline(Generic[T]):
    """Stages that run side by side, each working on another item.

    ::

        async with (
            aiogpu.pipeline(paths)
            .map(decode, concurrency=8)       # worker threads, or an `async def`
            .batch(32)
            .to_device()
            .map_gpu(model)                   # on a stream of its own
            .to_host()
        ) as results:
            async for y in results:
                ...

    All stages run at the same time, each with at most ``concurrency + buffer`` items, in the making or
    finished and not yet taken by the next stage. So the slowest stage sets the pace, and memory does not
    grow. Item ``k+1`` is uploaded while ``k`` is computed and ``k-1`` is downloaded.

    A pipeline is a description: each method returns a new one, and it runs while it is entered, from the
    source's start each time. ``results.stats()`` and ``results.print_stats()`` say where the time goes.

    Parameters
    ----------
    source:
        As for :class:`aiogpu.prefetch`: any sync or async iterable.
    buffer:
        How many items more than its ``concurrency`` a stage may hold; 0 or more.

    What a stage raises is raised by ``async for`` behind the results of all items before it, and ends the
    iteration. Its type is the stage's; a note (``__notes__``) names the stage, its function, the line that
    declared it and the number of the item, counted from 0 among those that the stage was given. After the
    block nothing is running; a function in a thread that does not return within the runtime's ``grace``
    is named in a warning.
    """

    def __init__(self, source: Iterable[T] | AsyncIterable[T], *, buffer: int = 1) -> None:
        check_source(source, "pipeline")
        self._source: Any = source
        self._buffer = whole("buffer", buffer, 0)
        self._recipes: tuple[Recipe, ...] = ()
        self._device: torch.device | None = None
        self._site = _site()
        self._running: Results[T] | None = None

    # -- stages ------------------------------------------------------------------------------------

    @overload
    def map(
        self,
        fn: Callable[[T], Awaitable[R]],
        *,
        concurrency: int = ...,
        ordered: bool = ...,
        name: str | None = ...,
    ) -> pipeline[R]: ...

    @overload
    def map(
        self, fn: Callable[[T], R], *, concurrency: int = ..., ordered: bool = ..., name: str | None = ...
    ) -> pipeline[R]: ...

    def map(
        self,
        fn: Callable[[T], Any],
        *,
        concurrency: int = 1,
        ordered: bool = True,
        name: str | None = None,
    ) -> pipeline[Any]:
        """``fn(item)`` for each item: in worker threads, or, an ``async def``, awaited.

        For work on the host, ``concurrency`` items at once. Results come in the order of the items, or
        (``ordered=False``) as completed.
        """
        _check_function("map", fn)
        lanes = whole("concurrency", concurrency, 1)
        return self._then(Recipe(_label("map", name or fn), fn, lanes=lanes, ordered=ordered))

    def batch(
        self, size: int, *, collate: Callable[[list[T]], Any] | None = None, drop_last: bool = False
    ) -> pipeline[Any]:
        """``size`` items at a time, put together by ``collate`` in a worker thread.

        By default torch's own (:func:`torch.utils.data.default_collate`): tensors, arrays and numbers are
        stacked along a new first dimension, within dicts, lists and tuples. ``collate=list`` leaves them
        as they are. The last batch may be smaller; ``drop_last`` leaves it out.
        """
        size = whole("size", size, 1)
        if collate is not None:
            _check_function("batch", collate, "collate")
        label = f"batch({size})"
        fn = partial(_batches, size, collate or torch.utils.data.default_collate, drop_last, label)
        return self._then(Recipe(label, fn, flow=True))

    def to_device(self, device: Device | None = None, *, dtype: torch.dtype | None = None) -> pipeline[T]:
        """Upload each item (see :func:`aiogpu.to_device`); two are on their way at once."""
        where = None if device is None else normalize(device)

        async def upload(item: Any) -> Any:
            return await to_device(item, device, dtype=dtype)

        recipe = Recipe(f"to_device({where or ''})", upload, lanes=2, device_lanes=True, device=where)
        return self._then(recipe, where)

    @overload
    def map_gpu(
        self,
        fn: Callable[[T], Awaitable[R]],
        *,
        device: Device | None = ...,
        concurrency: int = ...,
        run_ahead: int = ...,
        name: str | None = ...,
    ) -> pipeline[R]: ...

    @overload
    def map_gpu(
        self,
        fn: Callable[[T], R],
        *,
        device: Device | None = ...,
        concurrency: int = ...,
        run_ahead: int = ...,
        name: str | None = ...,
    ) -> pipeline[R]: ...

    def map_gpu(
        self,
        fn: Callable[[T], Any],
        *,
        device: Device | None = None,
        concurrency: int = 1,
        run_ahead: int = RUN_AHEAD,
        name: str | None = None,
    ) -> pipeline[Any]:
        """``fn(item)`` on a stream of its own: a model, launched from a worker thread, or an ``async def``.

        The next stage gets the result as soon as its work is enqueued, and is ordered after it on the
        device. At most ``run_ahead`` items' work is unfinished when the next one is started, so that
        launching never blocks. ``concurrency``: that many streams. ``device``: default, where the items
        were uploaded to.
        """
        _check_function("map_gpu", fn)
        recipe = Recipe(
            _label("map_gpu", name or fn),
            fn,
            lanes=whole("concurrency", concurrency, 1),
            device_lanes=True,
            device=self._device if device is None else normalize(device),
            run_ahead=whole("run_ahead", run_ahead, 0),
        )
        return self._then(recipe, recipe.device)

    def to_host(self, *, dtype: torch.dtype | None = None) -> pipeline[T]:
        """Download each item (see :func:`aiogpu.to_host`); two are on their way at once."""

        async def download(item: Any) -> Any:
            return await to_host(item, dtype=dtype)

        recipe = Recipe(
            "to_host()", download, lanes=2, device_lanes=True, device=self._device, hands_over=False
        )
        return self._then(recipe)

    def then(
        self, fn: Callable[[AsyncIterator[T]], AsyncGenerator[R, None]], *, name: str | None = None
    ) -> pipeline[R]:
        """A stage of your own: an async generator function of the items, which yields the results.

        ::

            async def without_blanks(pages):
                async for page in pages:
                    if page.any():
                        yield page

        It runs as one aiogpu task, on a stream of its own. An error of an earlier stage is raised by its
        ``async for``.
        """
        inner = fn.func if isinstance(fn, partial) else fn
        if not inspect.isasyncgenfunction(inspect.unwrap(inner) if callable(inner) else inner):
            raise TypeError(
                "then() takes an async generator function of the items (an `async def` with `yield`), not "
                f"{named(fn)}; for a function of one item use map() or map_gpu()"
            )
        recipe = Recipe(
            _label("then", name or fn),
            fn,
            device_lanes=True,
            device=self._device,
            flow=True,
        )
        return self._then(recipe)

    def _then(self, recipe: Recipe, device: torch.device | None = None) -> pipeline[Any]:
        recipe = replace(recipe, place=f"pipeline stage {len(self._recipes) + 1}", site=_site())
        new: pipeline[Any] = object.__new__(pipeline)
        new.__dict__.update(self.__dict__)
        new._recipes = (*self._recipes, recipe)
        new._running = None
        new._device = device or self._device
        return new

    # -- running -----------------------------------------------------------------------------------

    def __aiter__(self) -> NoReturn:
        raise TypeError("enter it first: `async with pipeline as results:`, `async for item in results:`")

    async def __aenter__(self) -> Results[T]:
        if self._running is not None:
            raise RuntimeError("this pipeline is running already: leave its block first, or make another one")
        results: Results[T] = Results(self._source, self._recipes, self._buffer, self._site)
        results._crew.start()
        self._running = results
        return results

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        results, self._running = self._running, None
        assert results is not None
        await results.leave()


def _consumer() -> Any:
    task = current_task()
    return task.engine if task is not None else None


async def _batches(
    size: int,
    collate: Callable[[list[Any]], Any],
    drop_last: bool,
    name: str,
    items: AsyncIterator[Any],
) -> AsyncGenerator[Any, None]:
    limiter = anyio.CapacityLimiter(1)
    gathered: list[Any] = []
    async for item in items:
        gathered.append(item)
        del item
        if len(gathered) == size:
            yield await _collated(collate, gathered, name, limiter)
    if gathered and not drop_last:
        yield await _collated(collate, gathered, name, limiter)


async def _collated(
    collate: Callable[[list[Any]], Any], gathered: list[Any], name: str, limiter: anyio.CapacityLimiter
) -> Any:
    items, count = gathered.copy(), len(gathered)
    gathered.clear()
    try:
        return await in_thread(collate, items, what=name, limiter=limiter)
    except Exception as error:
        error.add_note(f"while putting together a batch of {count} items, the last of which is the one named")
        raise


# -- names -----------------------------------------------------------------------------------------


def _check_function(verb: str, fn: Any, argument: str = "fn") -> None:
    if not callable(fn):
        raise TypeError(f"{verb}() takes a function as its {argument}, not a {type(fn).__name__}")


def _label(verb: str, what: Any) -> str:
    return f"{verb}({named(what)})"


def _site() -> str:
    """The line outside this file that is declaring something."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
