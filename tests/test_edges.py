"""Fork and join: a child starts after its parent, and the parent goes on after its child, however it was
started, awaited and ended.

The virtual device does not move before a test says so, so that the host never *sees* anything complete: the
only order between two kernels is the one that streams and events give. Its race detector raises RaceError at
the submission of a kernel that touches memory without such an order.
"""

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

# -- fork and join -----------------------------------------------------------------------------------


@every_way
def test_a_child_forks_from_its_parent_and_is_joined_by_it(run, vd, way):
    x, y, seen = cell(), cell(), []

    @aiogpu.task
    async def child(x):
        read(vd, x, seen)
        write(vd, y, 2)

    @aiogpu.task
    async def parent():
        write(vd, x, 1)
        await way(child, x)
        read(vd, y, seen)
        write(vd, x, 3)  # the child has read it before

    go(run, vd, parent)
    assert seen == [1, 2]


@every_way
def test_a_child_that_suspends_is_joined_after_its_last_step(run, vd, way):
    y, seen = cell(), []

    @aiogpu.task
    async def child():
        await anyio.lowlevel.checkpoint()
        write(vd, y, 1)
        await anyio.lowlevel.checkpoint()
        write(vd, y, 2)
        await anyio.lowlevel.checkpoint()

    @aiogpu.task
    async def parent():
        await way(child)
        read(vd, y, seen)

    go(run, vd, parent)
    assert seen == [2]


@every_way
def test_a_child_that_fails_is_joined_like_any_other(run, vd, way):
    x, y, seen = cell(), cell(), []

    @aiogpu.task
    async def child():
        read(vd, x, seen)
        await anyio.lowlevel.checkpoint()
        write(vd, y, 1)
        raise KeyError("on purpose")

    @aiogpu.task
    async def parent():
        write(vd, x, 5)
        with pytest.raises((KeyError, ExceptionGroup)):
            await way(child)
        read(vd, y, seen)
        write(vd, x, 6)

    go(run, vd, parent)
    assert seen == [5, 1]


@every_way
def test_a_result_is_in_order_and_its_memory_is_marked_for_the_parents_stream(run, vd, way, monkeypatch):
    kept: list[tuple[int, Any]] = []
    monkeypatch.setattr(vd, "keep", lambda tensor, stream: kept.append((tensor.data_ptr(), stream.raw)))
    seen: list[float] = []

    @aiogpu.task
    async def child():
        y = cell()
        write(vd, y, 4)
        return {"y": [y]}

    @aiogpu.task
    async def parent():
        y = (await way(child))["y"][0]
        assert (y.data_ptr(), vd.current().raw) in kept
        read(vd, y, seen)

    go(run, vd, parent)
    assert seen == [4]


@every_way
def test_a_deep_tree_is_joined_from_its_leaves_to_its_root(run, vd, way):
    cells = [cell() for _ in range(2**4)]
    seen: list[float] = []

    @aiogpu.task
    async def node(index):
        if index < 8:
            await way(node, 2 * index)
            await way(node, 2 * index + 1)
            for below in (2 * index, 2 * index + 1):
                read(vd, cells[below])
        write(vd, cells[index], index)

    @aiogpu.task
    async def root():
        await way(node, 1)
        for each in cells[1:]:
            read(vd, each, seen)

    go(run, vd, root)
    assert seen == list(range(1, 16))


def test_siblings_are_not_ordered_by_anything(run, vd):
    """The detector would see a missing edge: this is the control for all the tests above."""
    x = cell()

    @aiogpu.task
    async def child():
        write(vd, x, 1)

    @aiogpu.task
    async def parent():
        with pytest.raises(ExceptionGroup) as caught:
            await aiogpu.gather(child(), child())
        assert caught.group_contains(RaceError)

    go(run, vd, parent)


def test_a_parent_that_goes_on_is_not_ordered_after_a_child_that_runs(run, vd):
    x = cell()

    @aiogpu.task
    async def child(written, go_on):
        write(vd, x, 1)
        written.set()
        await go_on.wait()

    @aiogpu.task
    async def parent():
        written, go_on = anyio.Event(), anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(child, written, go_on)
            await written.wait()
            with pytest.raises(RaceError):
                read(vd, x)
            go_on.set()
        read(vd, x)

    go(run, vd, parent)


# -- ends of other kinds -----------------------------------------------------------------------------


def test_a_cancelled_child_is_joined(run, vd):
    y, seen = cell(), []

    @aiogpu.task
    async def child(started):
        write(vd, y, 7)
        started.set()
        await anyio.sleep_forever()

    @aiogpu.task
    async def parent():
        started = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(child, started)
            await started.wait()
            group.cancel_scope.cancel()
        read(vd, y, seen)

    go(run, vd, parent)
    assert seen == [7]


def test_a_child_cancelled_natively_by_asyncio_is_joined(run_asyncio, vd):
    y, seen = cell(), []

    @aiogpu.task
    async def child():
        write(vd, y, 7)
        try:
            await asyncio.sleep(60)
        finally:
            write(vd, y, 8)  # cleanup is still on the child's stream

    @aiogpu.task
    async def parent():
        task = asyncio.create_task(child())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        read(vd, y, seen)

    go(run_asyncio, vd, parent)
    assert seen == [8]


def test_a_timeout_joins_what_it_has_cut_off(run, vd):
    y, seen = cell(), []

    @aiogpu.task
    async def child():
        write(vd, y, 9)
        await anyio.sleep_forever()

    @aiogpu.task
    async def parent():
        with anyio.move_on_after(0.001) as scope:
            await child()
        assert scope.cancelled_caught
        read(vd, y, seen)

    go(run, vd, parent)
    assert seen == [9]


def test_a_child_that_outlives_its_parent_is_joined_by_the_grandparent(run, vd):
    y, seen = cell(), []

    @aiogpu.task
    async def child(go_on):
        await go_on.wait()
        write(vd, y, 3)

    @aiogpu.task
    async def parent(group, go_on):
        group.start_soon(child, go_on)
        await anyio.lowlevel.checkpoint()

    @aiogpu.task
    async def grandparent():
        go_on = anyio.Event()
        async with anyio.create_task_group() as group:
            await parent(group, go_on)
            go_on.set()
        read(vd, y, seen)

    go(run, vd, grandparent)
    assert seen == [3]


def test_a_child_whose_first_step_comes_after_its_parents_end_still_forks_from_it(run_asyncio, vd):
    x, seen = cell(), []

    @aiogpu.task
    async def child():
        read(vd, x, seen)

    @aiogpu.task
    async def parent():
        write(vd, x, 6)
        return {"child": asyncio.ensure_future(child())}  # no step before this task has ended

    async def main():
        await (await parent())["child"]

    go(run_asyncio, vd, main)
    assert seen == [6]


def test_a_child_that_outlives_every_ancestor_ends_in_peace(run_asyncio, vd):
    y, seen = cell(), []

    @aiogpu.task
    async def child(go_on):
        await go_on.wait()
        write(vd, y, 3)
        await asyncio.sleep(0)
        read(vd, y, seen)

    @aiogpu.task
    async def parent(go_on):
        task = asyncio.ensure_future(child(go_on))
        await asyncio.sleep(0)
        return [task]

    async def main():
        go_on = asyncio.Event()
        (task,) = await parent(go_on)
        go_on.set()
        await task
        read(vd, y, seen)  # plain code, on the default stream: legacy semantics order it

    go(run_asyncio, vd, main)
    assert seen == [3, 3]


# -- started() ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_between", [False, True], ids=["directly", "through a plain coroutine"])
def test_what_started_hands_over_is_in_order(run, vd, in_between):
    y, z, seen = cell(), cell(), []
    go_on: list[anyio.Event] = []

    @aiogpu.task
    async def server(*, task_status):
        write(vd, y, 1)
        task_status.started([y])
        write(vd, z, 2)
        await go_on[0].wait()

    async def plain(*, task_status):
        await server(task_status=task_status)

    @aiogpu.task
    async def parent():
        go_on.append(anyio.Event())
        async with anyio.create_task_group() as group:
            (ready,) = await group.start(plain if in_between else server)
            assert ready is y
            read(vd, ready, seen)
            with pytest.raises(RaceError):
                read(vd, z)  # after started(): not handed over
            go_on[0].set()
        read(vd, z, seen)

    go(run, vd, parent)
    assert seen == [1, 2]


def test_what_started_hands_over_is_in_order_in_trios_nursery(vd):
    import trio

    y, seen = cell(), []

    @aiogpu.task
    async def server(*, task_status):
        write(vd, y, 1)
        task_status.started(y)
        await trio.lowlevel.checkpoint()

    @aiogpu.task
    async def parent():
        async with trio.open_nursery() as nursery:
            read(vd, await nursery.start(server), seen)

    async def main():
        await parent()
        vd.run_all()

    trio.run(main)
    assert seen == [1]


# -- the ambient stream ------------------------------------------------------------------------------


def test_plain_code_and_root_tasks_order_each_other(run, vd):
    x, y, seen = cell(), cell(), []

    @aiogpu.task
    async def root():
        read(vd, x, seen)
        write(vd, y, 2)

    async def main():
        write(vd, x, 1)
        await root()
        read(vd, y, seen)

    go(run, vd, main)
    assert seen == [1, 2]


def test_an_undecorated_coroutine_spawned_by_a_task_is_slow_not_wrong(run, vd):
    """It runs on the thread's ambient stream, and loses overlap, but never the order."""
    x, y, seen = cell(), cell(), []

    async def undecorated():
        assert vd.is_default(vd.current())
        read(vd, x, seen)
        write(vd, y, 2)

    @aiogpu.task
    async def parent():
        write(vd, x, 1)
        async with anyio.create_task_group() as group:
            group.start_soon(undecorated)
        read(vd, y, seen)

    go(run, vd, parent)
    assert seen == [1, 2]


def test_an_undecorated_coroutine_awaited_by_a_task_runs_on_its_stream(run, vd):
    async def undecorated():
        return vd.current()

    @aiogpu.task
    async def parent():
        assert (await undecorated()).raw is vd.current().raw

    go(run, vd, parent)


def test_a_root_started_under_a_foreign_stream_forks_from_it_and_is_joined_by_it(run, vd):
    x, seen = cell(), []
    side = vd.open_stream("copy")  # non-blocking: legacy semantics do not help

    @aiogpu.task
    async def root():
        read(vd, x, seen)

    async def main():
        with vd.on(side):
            write(vd, x, 1)
            # By hand, as torch.cuda.stream() around a plain await would be.
            step = root()
            with pytest.raises(StopIteration):
                step.send(None)
            write(vd, x, 2)  # the root is joined by the stream around it

    go(run, vd, main)
    assert seen == [1]


# -- transfers ---------------------------------------------------------------------------------------


def test_a_download_comes_after_what_its_caller_has_submitted(run, vd, moving):
    x = torch.zeros(4)

    @aiogpu.task
    async def main():
        write(vd, x, 3)
        operation = aiogpu.to_host(x)
        with moving(vd):
            assert torch.equal(await operation, torch.full((4,), 3.0))

    go(run, vd, main)


def test_an_upload_that_nobody_awaits_ends_before_its_task(run, vd, moving, recwarn):
    host, dst = torch.ones(4), torch.zeros(4)

    @aiogpu.task
    async def child():
        operation = aiogpu.copy_(dst, host)
        return {"operation": operation}

    @aiogpu.task
    async def parent():
        held = await child()
        assert held["operation"].done()
        assert torch.equal(dst, host)
        await held["operation"]

    async def main():
        with moving(vd):
            await parent()

    go(run, vd, main)


# -- more tasks than streams -------------------------------------------------------------------------


def test_two_hundred_tasks_share_the_streams_in_order(run, vd, engine):
    """C23: sharing costs overlap, never correctness; and it is counted."""
    cells = [cell() for _ in range(200)]
    seen: list[float] = []

    @aiogpu.task
    async def child(index):
        write(vd, cells[index], index)
        await anyio.lowlevel.checkpoint()
        read(vd, cells[index])
        return vd.current().raw

    @aiogpu.task
    async def parent():
        streams = await aiogpu.gather(*(child(i) for i in range(200)))
        for each in cells:
            read(vd, each, seen)
        return streams

    async def main():
        streams = await parent()
        stats = aiogpu.stats()
        limit = engine().settings.streams
        assert len(set(streams)) == limit
        assert stats.leases == 201
        assert stats.shared >= 201 - limit - 1

    go(run, vd, main)
    assert seen == list(range(200))


def test_tasks_that_wait_for_each_others_work_on_shared_streams_do_not_deadlock(run, vd):
    @aiogpu.task
    async def node(depth):
        vd.launch()
        if depth:
            await aiogpu.gather(*(node(depth - 1) for _ in range(3)))
        vd.launch()

    go(run, vd, lambda: node(4))
    assert vd.idle
