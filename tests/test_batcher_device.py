"""The batcher on a device that stands still: order between callers and batches, and who waits for whom."""

from __future__ import annotations

import contextlib
import gc
import threading
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import torch
from _batches import Box, Calls, calling, lists, ones
from _kernels import cell, go, read, write

import aiogpu
from aiogpu import _engine
from aiogpu._batching.pipeline import Load
from aiogpu._workers import WorkerPool
from aiogpu.testing import RaceError


def test_a_batch_reads_items_behind_their_callers_and_callers_read_results_behind_the_batch(run, vd, until):
    """Nothing has run on the device when the results are handed out: only the order is there."""
    seen: list[float] = []

    def double(boxes):
        results = []
        for box in boxes:
            y = cell()
            vd.launch(lambda x=box.inside, y=y: y.copy_(2 * x), reads=[box.inside], writes=[y], name="double")
            results.append(Box(y))
        return results

    @aiogpu.task
    async def caller(batcher, i):
        x = cell()
        write(vd, x, i)
        result = await batcher(Box(x))
        read(vd, result.inside, seen)

    async def main():
        async with lists(double, max_batch_size=4, max_delay=1000) as batcher:
            await anyio.lowlevel.checkpoint()
            # A batcher's end waits for the device; the callers do not.
            async with anyio.create_task_group() as group:
                for i in range(4):
                    group.start_soon(caller, batcher, i)
            assert seen == []
            assert batcher.stats().running == 1
            await until(lambda: vd.run_all() or batcher.stats().running == 0)

    go(run, vd, main)
    assert sorted(seen) == [0, 2, 4, 6]


@pytest.mark.parametrize("side", ["items", "results"])
def test_without_the_edge_it_would_be_a_race(run, vd, side, monkeypatch):
    """The checker would have seen it: the test above can fail."""
    from aiogpu._batching import entry

    if side == "items":
        monkeypatch.setattr(entry.Entry, "value", lambda self: self.item._value)
    else:
        monkeypatch.setattr(entry.Handoff, "take", lambda self: self._value)
    x, y = cell(), cell()

    def fn(boxes):
        if side == "items":
            read(vd, x)
        write(vd, y, 1)
        return boxes

    @aiogpu.task
    async def caller(batcher):
        if side == "items":
            write(vd, x, 1)
        await batcher(Box(x))
        if side == "results":
            read(vd, y)

    async def main():
        async with lists(fn, max_batch_size=1) as batcher:
            try:
                await caller(batcher)
            finally:
                vd.run_all()

    with pytest.raises(RaceError):
        go(run, vd, main)


def test_a_caller_outside_of_tasks_gets_a_finished_result(run, vd, until):
    y = cell()

    def fn(boxes):
        vd.launch(lambda: y.fill_(7), writes=[y])
        return boxes

    async def main():
        async with calling(lists(fn, max_batch_size=1)) as calls:
            await calls.started("a", item=Box(y))
            await until(lambda: any(name == "kernel" for name, _ in vd.log))
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert not calls.results
            await until(lambda: vd.run_all() or calls.results)
            assert y.item() == 7

    go(run, vd, main)


def test_batches_of_a_synchronous_function_are_in_order_on_the_device(run, vd, until):
    """A model with state (a cache, buffers, a CUDA graph's memory) is not overwritten by the next batch."""
    state, seen = cell(), []

    def fn(boxes):
        read(vd, state, seen)
        write(vd, state, boxes[0].inside)
        return boxes

    @aiogpu.task
    async def caller(batcher, i):
        await batcher(Box(i))

    async def main():
        async with lists(fn, max_batch_size=1, in_flight=3) as batcher:
            for i in range(1, 4):
                await caller(batcher, i)
            assert batcher.stats().running == 3
            await until(lambda: vd.run_all() or batcher.stats().running == 0)

    go(run, vd, main)
    assert seen == [0, 1, 2]


def test_no_more_batches_are_under_way_than_the_device_shall_have(run, vd, until):
    """Results are handed out before the device has computed them; the next batch waits for that."""
    calls_of_fn = []

    def fn(boxes):
        calls_of_fn.append(len(boxes))
        vd.launch()
        return boxes

    @aiogpu.task
    async def caller(batcher):
        await batcher(Box(0))

    async def main():
        async with lists(fn, max_batch_size=1, in_flight=2) as batcher:
            await caller(batcher)
            await caller(batcher)
            async with anyio.create_task_group() as group:
                group.start_soon(caller, batcher)
                for _ in range(20):
                    await anyio.lowlevel.checkpoint()
                assert (batcher.stats().running, batcher.stats().waiting) == (2, 1)
                assert len(calls_of_fn) == 2
                await until(lambda: vd.run_all() or len(calls_of_fn) == 3)
            await until(lambda: vd.run_all() or batcher.stats().running == 0)

    go(run, vd, main)


@pytest.mark.parametrize("collate", [list, None], ids=["collate passes it on", "alone"])
def test_an_item_that_is_uploaded_from_where_it_is_may_be_written_when_the_call_has_returned(
    run, vd, until, collate
):
    """Page-locked memory is read by the device itself, and perhaps much later than the results are ready."""
    item = vd.pin(torch.zeros(100_000))
    batches = []

    async def called(items):
        batches.append(len(items))
        return items

    @aiogpu.task
    async def caller(batcher):
        result = await batcher(item)
        item.fill_(7)
        return await aiogpu.to_host(result)

    async def main():
        results = []

        async def keep(batcher):
            results.append(await caller(batcher))

        async with aiogpu.Batcher(called, max_batch_size=1, collate=collate, split=collate) as batcher:
            async with anyio.create_task_group() as group:
                group.start_soon(keep, batcher)
                await until(lambda: batches)
                for _ in range(50):  # a result that is there has come by now
                    await anyio.lowlevel.checkpoint()
                await until(lambda: vd.run_all() or results)
        assert not results[0].any()

    go(run, vd, main)


@pytest.mark.parametrize("to_host", [False, True])
def test_a_lone_call_costs_one_hop_one_copy_each_way_and_one_event(run, auto_vd, monkeypatch, to_host):
    """All of it is submitted by the thread that calls the function, and nobody waits in between."""
    jobs = []
    submit = WorkerPool.submit
    monkeypatch.setattr(WorkerPool, "submit", lambda self, job: jobs.append(1) or submit(self, job))

    async def main():
        async with aiogpu.Batcher(torch.Tensor.contiguous, max_batch_size=8, to_host=to_host) as batcher:
            item = ones(1, 64)
            await batcher(item)  # starts the server and its thread
            jobs.clear()
            auto_vd.log.clear()
            assert torch.equal(await batcher(item), item)
            return [name for name, _ in auto_vd.log]

    log = run(main)
    assert len(jobs) == 1
    assert [name for name in log if name in ("copy", "record", "wait")] == ["copy"] * (1 + to_host) + [
        "record"
    ]


@pytest.mark.usefixtures("auto_vd")
@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_small_batches_beside_each_other_use_no_memory_of_each_others(run, asynchronous, to_host):
    """The device's checker sees each use of slots and of batches' memory."""

    def fn(x):
        return {"y": x["a"] * 2 + x["b"].unsqueeze(1), "b": x["b"]}

    async def afn(x):
        return fn(x)

    async def main():
        function = afn if asynchronous else fn
        async with aiogpu.Batcher(function, max_batch_size=4, in_flight=3, to_host=to_host) as batcher:

            async def call(i):
                result = await batcher({"a": ones(i, 300), "b": i})
                y = result["y"] if to_host else await aiogpu.to_host(result["y"])
                assert torch.equal(y, ones(3 * i, 300))

            in_task = aiogpu.task(call)
            await aiogpu.gather(*((call if i % 2 else in_task)(i) for i in range(200)))

    run(main)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("how", ["well", "badly", "cancelled"])
def test_what_a_small_batch_is_uploaded_from_is_kept_until_the_device_is_done(
    run, vd, until, engine, how, asynchronous
):
    """Whatever becomes of the function and of its callers: the slot's memory is another batch's at once."""
    called, go_on = [], threading.Event()

    def fn(x):
        called.append(len(x))
        if how == "badly":
            raise ValueError
        if how == "cancelled":
            assert go_on.wait(20)
        return x

    async def afn(x):
        called.append(len(x))
        if how == "badly":
            raise ValueError
        if how == "cancelled":
            await anyio.sleep_forever()
        return x

    async def main():
        slots = engine().slots

        async def call(batcher):
            with contextlib.suppress(ValueError, aiogpu.ClosedError):
                await batcher(ones(1))

        async with anyio.create_task_group() as group:
            with contextlib.suppress(LookupError):
                async with aiogpu.Batcher(afn if asynchronous else fn, max_batch_size=1) as batcher:
                    group.start_soon(call, batcher)
                    await until(lambda: called)
                    if how == "cancelled":
                        raise LookupError
                    for _ in range(50):
                        await anyio.lowlevel.checkpoint()
                        assert slots.used_bytes == slots.nbytes
                    await until(lambda: vd.run_all() or batcher.stats().ok + batcher.stats().errors)
            go_on.set()
            for _ in range(50):
                assert slots.used_bytes == slots.nbytes or how != "cancelled"
                await anyio.lowlevel.checkpoint()
            await until(lambda: vd.run_all() or not slots.used_bytes)

    go(run, vd, main)


def copies(vd) -> int:
    return sum(name == "copy" for name, _ in vd.log)


def test_a_batch_is_uploaded_once_and_downloaded_once(run, auto_vd):
    def fn(x):
        y = torch.empty_like(x)
        auto_vd.launch(lambda: y.copy_(x + 1), reads=[x], writes=[y])
        return y

    async def main():
        async with aiogpu.Batcher(fn, max_batch_size=8, max_delay=1000, to_host=True) as batcher:
            async with anyio.create_task_group() as group:
                await anyio.lowlevel.checkpoint()
                calls = Calls(batcher, group)
                for i in range(8):
                    await calls.started(i, item=ones(i))
        return calls.results

    results = run(main)
    assert copies(auto_vd) == 2
    assert all(torch.equal(results[i], ones(i + 1)) for i in range(8))


@pytest.mark.parametrize("callers", [1, 16], ids=["alone", "more than streams"])
def test_the_upload_of_the_next_batch_does_not_wait_for_the_computation_of_this_one(run, vd, until, callers):
    """That is what ``in_flight`` is for. Callers hold a stream each, and share them when there are many."""
    latches = []

    def fn(x):
        latches.append(vd.latch())
        return x

    @aiogpu.task
    async def caller(batcher, i):
        y = await batcher(np.full(2, i, dtype=np.float32))
        return y.tolist()

    def copied() -> int:
        """Copies that the device has made: the log says what was submitted."""
        return copies(vd) - sum(command.name == "copy" for queue in vd._queues for command in queue.commands)

    async def main():
        results = []

        async def keep(batcher, i):
            results.append(await caller(batcher, i))

        async with aiogpu.Batcher(
            fn, max_batch_size=callers, max_delay=1000, in_flight=2, to_host=True
        ) as batcher:
            async with anyio.create_task_group() as group:
                for i in range(callers):
                    group.start_soon(keep, batcher, i)
                await until(lambda: latches)
                vd.run_all()  # the first one stands at its latch
                before = copied()
                assert before >= 1
                for i in range(callers):
                    group.start_soon(keep, batcher, callers + i)
                await until(lambda: len(latches) == 2)
                await until(lambda: vd.run_all() or copied() > before)
                assert results == []
                for latch in latches:
                    latch.release()
                await until(lambda: vd.run_all() or len(results) == 2 * callers)
        assert sorted(results) == [[i, i] for i in range(2 * callers)]

    go(run, vd, main)


def test_callers_cancelled_while_the_device_works_leave_the_others_results_right(run, vd, until):
    """C70: what a cancelled call's work still uses is not reused under the others."""
    latches = []

    def fn(x):
        latches.append(vd.latch())
        y = torch.empty_like(x)
        vd.launch(lambda: y.copy_(x * 2), reads=[x], writes=[y])
        return y

    async def main():
        batcher = aiogpu.Batcher(fn, max_batch_size=8, max_delay=1000, to_host=True)
        async with calling(batcher) as calls:
            for i in range(8):
                await calls.started(i, item=ones(i, 3))
            await until(lambda: latches)
            for i in range(0, 8, 2):
                calls.cancel(i)
            await until(lambda: len(calls.errors) == 4)
            latches[0].release()
            await until(lambda: vd.run_all() or len(calls.results) == 4)
        assert all(torch.equal(calls.results[i], ones(2 * i, 3)) for i in range(1, 8, 2))

    go(run, vd, main)


def test_a_call_inside_a_graph_capture_is_refused_before_it_changes_anything(run, vd):
    @aiogpu.task
    async def caller(batcher):
        vd.is_capturing = True
        try:
            with pytest.raises(aiogpu.CaptureError):
                await batcher(ones(1))
        finally:
            vd.is_capturing = False
        assert batcher.stats().waiting == 0

    async def main():
        async with aiogpu.Batcher(torch.neg, max_batch_size=1) as batcher:
            await caller(batcher)

    go(run, vd, main)


def test_a_slot_whose_loop_has_gone_is_kept_until_the_device_is_done(vd, blocking_until):
    """A batch nobody has heard of: its loop was closed while the function ran, its coroutine collected."""
    engine = _engine.make_engine(vd.device)
    free = len(engine.slots._free)
    load = Load(SimpleNamespace(engine=engine), [torch.ones(4)], 16, lambda: False, lambda _: None)  # type: ignore[arg-type]
    assert load.shuttle is not None
    assert load.shuttle.open()
    latch = vd.latch()
    load.stream = engine.driver.current()
    load.shuttle.up([torch.ones(4)])
    load.submitted()
    del load
    gc.collect()
    assert len(engine.slots._free) == free - 1, "the device still reads it"
    latch.release()
    vd.run_all()
    blocking_until(lambda: len(engine.slots._free) == free)
