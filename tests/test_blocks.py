"""stream() blocks fork and join, share() orders: on a device that does not move before a test says so."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from _kernels import cell, go, read, write
from _ways import every_way

import aiogpu
from aiogpu.testing import RaceError

# -- stream() ----------------------------------------------------------------------------------------


def test_a_stream_block_forks_at_its_start_and_joins_at_its_end(run, vd):
    x, y, seen = cell(), cell(), []

    @aiogpu.task
    async def main():
        own = vd.current().raw
        write(vd, x, 1)
        with aiogpu.stream():
            block = vd.current().raw
            assert block is not own
            read(vd, x, seen)
            await anyio.lowlevel.checkpoint()
            assert vd.current().raw is block
            write(vd, y, 2)
        assert vd.current().raw is own
        read(vd, y, seen)

    go(run, vd, main)
    assert seen == [1, 2]


def test_a_stream_block_runs_beside_the_tasks_own_stream(run, vd):
    """Nothing but the two edges: a latch in the block does not hold what another block does."""
    done: list[str] = []

    @aiogpu.task
    async def main():
        with aiogpu.stream():
            latch = vd.latch()
            vd.launch(lambda: done.append("held"))
        async_stream = vd.open_stream("compute")
        vd.launch(lambda: done.append("beside"), stream=async_stream)
        vd.run_all()
        assert done == ["beside"]
        latch.release()
        vd.run_all()
        assert done == ["beside", "held"]

    go(run, vd, main)


def test_nested_stream_blocks_join_from_the_inside_out(run, vd):
    cells = [cell() for _ in range(3)]
    seen: list[float] = []

    @aiogpu.task
    async def main():
        with aiogpu.stream():
            write(vd, cells[0], 0)
            with aiogpu.stream():
                read(vd, cells[0])
                write(vd, cells[1], 1)
                await anyio.lowlevel.checkpoint()
                write(vd, cells[2], 2)
            read(vd, cells[1])
            await anyio.lowlevel.checkpoint()
        for each in cells:
            read(vd, each, seen)

    go(run, vd, main)
    assert seen == [0, 1, 2]


@every_way
def test_children_fork_from_the_block_they_are_started_in_and_are_joined_in_it(run, vd, way):
    x, y, seen = cell(), cell(), []

    @aiogpu.task
    async def child():
        read(vd, x, seen)
        await anyio.lowlevel.checkpoint()
        write(vd, y, 2)

    @aiogpu.task
    async def main():
        with aiogpu.stream():
            write(vd, x, 1)
            await way(child)
            read(vd, y, seen)
        write(vd, y, 3)

    go(run, vd, main)
    assert seen == [1, 2]


@every_way
def test_a_child_that_ends_in_a_nested_block_is_joined_by_all_of_them(run, vd, way):
    y, seen = cell(), []

    @aiogpu.task
    async def child():
        write(vd, y, 2)

    @aiogpu.task
    async def main():
        with aiogpu.stream():
            with aiogpu.stream():
                await way(child)
            read(vd, y, seen)
        read(vd, y, seen)

    go(run, vd, main)
    assert seen == [2, 2]


def test_a_block_that_is_left_by_an_error_is_joined_all_the_same(run, vd):
    y, seen = cell(), []

    async def block():
        with aiogpu.stream():
            write(vd, y, 1)
            await anyio.lowlevel.checkpoint()
            raise KeyError("on purpose")

    @aiogpu.task
    async def main():
        with pytest.raises(KeyError):
            await block()
        read(vd, y, seen)

    go(run, vd, main)
    assert seen == [1]


def test_a_block_on_the_users_own_stream_is_forked_and_joined(run, vd):
    x, y, seen = cell(), cell(), []
    side = vd.open_stream("copy")
    side_native = type("Native", (), {"stream_id": 1, "device": torch.device("cpu")})()
    adopt = vd.adopt
    vd.adopt = lambda native: side if native is side_native else adopt(native)  # type: ignore[method-assign]

    @aiogpu.task
    async def main():
        write(vd, x, 1)
        with aiogpu.stream(side_native):
            assert vd.current() is side
            read(vd, x, seen)
            await anyio.lowlevel.checkpoint()
            write(vd, y, 2)
        read(vd, y, seen)

    go(run, vd, main)
    assert seen == [1, 2]


# -- share() -----------------------------------------------------------------------------------------


async def pending_or_not(task):
    return await task


async def ended(task):
    while not task.done():
        await asyncio.sleep(0)
    return await task


async def through_wait(task):
    await asyncio.wait([task])
    return task.result()


async def through_asyncios_gather(task):
    return (await asyncio.gather(task))[0]


async def through_aiogpus_gather(task):
    return (await aiogpu.gather(task))[0]


async def through_another_task(task):
    return await asyncio.create_task(pending_or_not(task))


@pytest.mark.parametrize(
    "awaits",
    [
        pending_or_not,
        ended,
        through_wait,
        asyncio.shield,
        lambda task: asyncio.wait_for(task, 60),
        through_asyncios_gather,
        through_aiogpus_gather,
        through_another_task,
    ],
    ids=["await", "ended", "wait", "shield", "wait_for", "gather", "aiogpu.gather", "another task"],
)
@pytest.mark.parametrize("suspends", [False, True])
def test_share_orders_a_sibling_however_it_awaits(run_asyncio, vd, awaits, suspends):
    """A task that awaits a child of somebody else cannot be seen doing so when that child has ended."""
    seen: list[float] = []

    @aiogpu.task
    async def producer():
        y = cell()
        write(vd, y, 5)
        if suspends:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return y

    @aiogpu.task
    async def consumer(task):
        y = aiogpu.share(await awaits(task))
        read(vd, y, seen)

    @aiogpu.task
    async def parent():
        task = asyncio.create_task(producer())
        await asyncio.gather(task, consumer(task))

    go(run_asyncio, vd, parent)
    assert seen == [5]


def test_share_orders_a_list_that_another_task_fills(run, vd, monkeypatch):
    kept: list[tuple[int, Any]] = []
    monkeypatch.setattr(vd, "keep", lambda tensor, stream: kept.append((tensor.data_ptr(), stream.raw)))
    cache: list[torch.Tensor] = []
    seen: list[float] = []

    @aiogpu.task
    async def filler(filled, go_on):
        cache.append(cell())
        write(vd, cache[0], 5)
        filled.set()
        await go_on.wait()

    @aiogpu.task
    async def user(filled, go_on):
        await filled.wait()
        with pytest.raises(RaceError):
            read(vd, cache[0])
        assert aiogpu.share(cache) is cache
        read(vd, cache[0], seen)
        assert (cache[0].data_ptr(), vd.current().raw) in kept
        go_on.set()

    @aiogpu.task
    async def parent():
        filled, go_on = anyio.Event(), anyio.Event()
        await aiogpu.gather(filler(filled, go_on), user(filled, go_on))

    go(run, vd, parent)
    assert seen == [5]
