"""Running awaitables side by side: anyio's ``gather`` and ``amap``, with operations welcome.

Law of this file: structured concurrency is anyio's. Nothing here knows of streams; edges are found by the
tasks themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

import anyio

__all__ = ["amap", "gather"]

T = TypeVar("T")
R = TypeVar("R")
R1 = TypeVar("R1")
R2 = TypeVar("R2")
R3 = TypeVar("R3")
R4 = TypeVar("R4")


# Overloads that do not overlap: with a plain variadic one beside them, mypy takes two decorated tasks as Any.
@overload
async def gather() -> tuple[()]: ...
@overload
async def gather(a: Awaitable[R1], /) -> tuple[R1]: ...
@overload
async def gather(a: Awaitable[R1], b: Awaitable[R2], /) -> tuple[R1, R2]: ...
@overload
async def gather(a: Awaitable[R1], b: Awaitable[R2], c: Awaitable[R3], /) -> tuple[R1, R2, R3]: ...
@overload
async def gather(
    a: Awaitable[R1], b: Awaitable[R2], c: Awaitable[R3], d: Awaitable[R4], /
) -> tuple[R1, R2, R3, R4]: ...
@overload
async def gather(
    a: Awaitable[R],
    b: Awaitable[R],
    c: Awaitable[R],
    d: Awaitable[R],
    e: Awaitable[R],
    /,
    *rest: Awaitable[R],
) -> tuple[R, ...]: ...


async def gather(*awaitables: Awaitable[Any]) -> tuple[Any, ...]:
    """Await all of them side by side; a tuple of their results, in the order of the arguments.

    ::

        a, b = await aiogpu.gather(aiogpu.to_device(x), aiogpu.to_device(y))

    Takes coroutines, operations and other awaitables. The first failure cancels the rest; failures are
    raised as an ``ExceptionGroup``, as anyio's task groups do.
    """
    for awaitable in awaitables:
        if not inspect.isawaitable(awaitable):
            _close(awaitables)
            raise TypeError(
                f"gather() takes awaitables, not a {type(awaitable).__name__}: call the coroutine function, "
                "and pass several as gather(*list)"
            )
    results: list[Any] = [None] * len(awaitables)

    async def run(index: int, awaitable: Awaitable[Any]) -> None:
        results[index] = await awaitable

    try:
        async with anyio.create_task_group() as group:
            for index, awaitable in enumerate(awaitables):
                group.start_soon(run, index, awaitable)
    finally:
        _close(awaitables)
    return tuple(results)


async def amap(fn: Callable[[T], Awaitable[R]], items: Iterable[T], *, limit: int | None = None) -> list[R]:
    """Await ``fn(item)`` for every item, at most ``limit`` at once; results in the order of ``items``.

    ``items`` is consumed as calls are started, so a generator may be long. The first failure cancels
    the rest; failures are raised as an ``ExceptionGroup``.

    Raises ``ValueError`` for a limit below 1, ``TypeError`` for an ``fn`` that gives nothing to await.
    """
    if not callable(fn):
        raise TypeError(f"amap() takes a coroutine function and its items, not a {type(fn).__name__}")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"limit is the number of calls at once, 1 or more, not {limit!r}")
    results: dict[int, R] = {}
    jobs: Iterator[tuple[int, T]] = enumerate(items)

    async def run(index: int, item: T) -> None:
        awaitable = fn(item)
        if not hasattr(awaitable, "__await__") and not inspect.isawaitable(awaitable):
            raise TypeError(
                f"amap() takes a coroutine function, and {fn!r} returned a {type(awaitable).__name__}: for "
                "an ordinary function write `async def call(item): return await aiogpu.run_sync(fn, item)`"
            )
        results[index] = await awaitable

    async def work() -> None:
        for index, item in jobs:
            await run(index, item)

    async with anyio.create_task_group() as group:
        if limit is None:
            for index, item in jobs:
                group.start_soon(run, index, item)
        else:
            for _ in range(limit):
                group.start_soon(work)
    return [results[index] for index in range(len(results))]


def _close(awaitables: Iterable[Any]) -> None:
    """Close coroutines that never started: the failure says enough, no warning is needed."""
    for awaitable in awaitables:
        if inspect.iscoroutine(awaitable) and inspect.getcoroutinestate(awaitable) == inspect.CORO_CREATED:
            awaitable.close()
