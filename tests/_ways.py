"""Every way of starting a child and awaiting it, on each event loop that has it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from conftest import LOOPS

import aiogpu

__all__ = ["every_way"]

Child = Callable[..., Awaitable[Any]]
Way = Callable[..., Awaitable[Any]]


async def plain_await(child: Child, *args: Any) -> Any:
    return await child(*args)


async def two_coroutines_in_between(child: Child, *args: Any) -> Any:
    async def inner() -> Any:
        return await child(*args)

    async def outer() -> Any:
        await anyio.lowlevel.checkpoint()
        return await inner()

    return await outer()


async def aiogpus_gather(child: Child, *args: Any) -> Any:
    async def other() -> None:
        await anyio.lowlevel.checkpoint()

    return (await aiogpu.gather(child(*args), other()))[0]


async def amap(child: Child, *args: Any) -> Any:
    return (await aiogpu.amap(lambda arguments: child(*arguments), [args]))[0]


async def anyios_task_group(child: Child, *args: Any) -> Any:
    results = []

    async def keep() -> None:
        results.append(await child(*args))

    async with anyio.create_task_group() as group:
        group.start_soon(keep)
    return results[0]


async def anyios_fail_after(child: Child, *args: Any) -> Any:
    with anyio.fail_after(60):
        return await child(*args)


async def asyncios_gather(child: Child, *args: Any) -> Any:
    return (await asyncio.gather(child(*args), asyncio.sleep(0)))[0]


async def create_task(child: Child, *args: Any) -> Any:
    task = asyncio.create_task(child(*args))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return await task


async def create_task_that_has_long_ended(child: Child, *args: Any) -> Any:
    task = asyncio.create_task(child(*args))  # type: ignore[arg-type]
    while not task.done():
        await asyncio.sleep(0)
    return task.result()


async def asyncios_task_group(child: Child, *args: Any) -> Any:
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(child(*args))  # type: ignore[arg-type]
    except ExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    return task.result()


async def wait_for(child: Child, *args: Any) -> Any:
    return await asyncio.wait_for(child(*args), 60)


async def shield(child: Child, *args: Any) -> Any:
    return await asyncio.shield(child(*args))


async def asyncios_timeout(child: Child, *args: Any) -> Any:
    async with asyncio.timeout(60):
        return await child(*args)


async def asyncios_wait(child: Child, *args: Any) -> Any:
    done, _ = await asyncio.wait([asyncio.ensure_future(child(*args))])
    return done.pop().result()


async def as_completed(child: Child, *args: Any) -> Any:
    for each in asyncio.as_completed([child(*args)]):
        return await each


async def eager_task(child: Child, *args: Any) -> Any:
    loop = asyncio.get_running_loop()
    return await asyncio.eager_task_factory(loop, child(*args))  # type: ignore[attr-defined,unused-ignore]


async def trios_nursery(child: Child, *args: Any) -> Any:
    import trio

    results = []

    async def keep() -> None:
        results.append(await child(*args))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep)
    return results[0]


ANYWHERE: list[Way] = [
    plain_await,
    two_coroutines_in_between,
    aiogpus_gather,
    amap,
    anyios_task_group,
    anyios_fail_after,
]
ON_ASYNCIO: list[Way] = [
    asyncios_gather,
    create_task,
    create_task_that_has_long_ended,
    asyncios_task_group,
    wait_for,
    shield,
    asyncios_timeout,
    asyncios_wait,
    as_completed,
]
if sys.version_info >= (3, 12):
    ON_ASYNCIO.append(eager_task)
ON_TRIO: list[Way] = [trios_nursery]

#: Each way of starting a child, on each event loop that has it.
every_way = pytest.mark.parametrize(
    ("run", "way"),
    [
        pytest.param(loop, way, id=f"{loop}-{way.__name__}")
        for loop in LOOPS
        for way in [*ANYWHERE, *(ON_TRIO if loop == "trio" else ON_ASYNCIO)]
    ],
    indirect=["run"],
)
