"""The batcher: single calls computed together, when, how, and who gets what."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import re
import threading
import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import numpy
import pytest
import torch
from _batches import Box, Clock, Held, HeldInThread, calling, lists, ones

import aiogpu
from aiogpu._batching import handing, pipeline

# -- when a batch starts ---------------------------------------------------------------------------


@pytest.mark.usefixtures("anydevice")
def test_concurrent_calls_become_one_call_and_each_gets_its_own_result(run):
    sizes = []

    def double(x):
        sizes.append(len(x))
        return x * 2

    async def main():
        async with calling(aiogpu.Batcher(double, max_batch_size=32)) as calls:
            for i in range(32):
                calls.start(i, item=ones(i, 3))
        return calls.results

    results = run(main)
    assert sizes == [32]
    assert all(torch.equal(results[i], ones(2 * i, 3)) for i in range(32))


def test_a_lone_call_waits_for_nobody(run):
    async def main():
        async with aiogpu.Batcher(torch.sin, max_batch_size=32) as batcher:
            return await batcher(ones(1)), batcher.stats()

    result, stats = run(main)
    assert torch.equal(result, torch.sin(ones(1)))
    assert (stats.batches, stats.items) == (1, 1)


def test_while_batches_are_under_way_the_next_one_fills(run, until):
    async def main():
        held = Held()
        async with calling(lists(held, max_batch_size=8, in_flight=2)) as calls:
            await calls.started("a")
            await until(lambda: len(held.batches) == 1)
            await calls.started("b")
            await until(lambda: len(held.batches) == 2)
            await calls.started("c", "d", "e")
            await anyio.wait_all_tasks_blocked()
            assert len(held.batches) == 2
            assert calls.batcher.stats().running == 2
            assert calls.batcher.stats().waiting == 3
            held.let_go(0)
            await until(lambda: len(held.batches) == 3)
            held.let_go()
        return held.batches

    assert run(main) == [["a"], ["b"], ["c", "d", "e"]]


def taking(seconds: float, batcher: aiogpu.Batcher) -> None:
    """Let the batcher believe that a batch takes so long."""
    assert batcher._service is not None
    batcher._service.batches.forecast.typical = seconds


def test_a_batch_that_is_not_full_is_put_together_when_the_one_before_is_nearly_done(run, until, monkeypatch):
    """Earlier it would gain nothing, and whoever calls meanwhile would miss it."""

    async def main():
        held, clock = HeldInThread(), Clock(monkeypatch)
        async with calling(lists(held, max_batch_size=8, in_flight=2)) as calls:
            try:
                taking(1000, calls.batcher)
                await calls.started("a")
                await until(lambda: held.batches == [["a"]])
                await calls.started("b", "c")
                await anyio.wait_all_tasks_blocked()
                assert calls.batcher.stats().running == 1
                clock.advance(calls.batcher, 800)
                await calls.started("d")
                await anyio.wait_all_tasks_blocked()
                assert calls.batcher.stats().running == 1
                clock.advance(calls.batcher, 100)
                await until(lambda: calls.batcher.stats().running == 2)
            finally:
                held.go.set()
        return held.batches

    assert run(main) == [["a"], ["b", "c", "d"]]


def test_it_is_put_together_by_the_clock_without_another_call(run, until):
    async def main():
        held = HeldInThread()
        async with calling(lists(held, max_batch_size=8, in_flight=2)) as calls:
            try:
                taking(0.05, calls.batcher)
                await calls.started("a")
                await until(lambda: held.batches == [["a"]])
                await calls.started("b")
                await until(lambda: calls.batcher.stats().running == 2)
            finally:
                held.go.set()
        return held.batches

    assert run(main) == [["a"], ["b"]]


@pytest.mark.parametrize(
    "how", ["full", "costs enough", "the end", "the one before is done", "collating takes longer"]
)
def test_nothing_is_held_back_for_longer_than_it_can_grow(run, until, how):
    async def main():
        held = HeldInThread()
        settings = {"cost": lambda item: 5, "max_cost": 10} if how == "costs enough" else {}
        async with contextlib.AsyncExitStack() as stack:
            async with calling(lists(held, max_batch_size=3, in_flight=2, **settings)) as calls:
                try:
                    taking(1000, calls.batcher)
                    await calls.started("a")
                    await until(lambda: held.batches == [["a"]])
                    await calls.started("b", "c")
                    if how == "full":
                        await calls.started("d")
                    if how == "collating takes longer":  # or downloading, or splitting: beside the function
                        calls.batcher._service.batches.pipeline.beside = 900.0
                        calls.batcher._service.kick()
                    if how == "the end":
                        stack.callback(held.go.set)
                        calls.group.start_soon(calls.batcher.__aexit__, None, None, None)
                    if how == "the one before is done":
                        held.go.set()
                    else:
                        await until(lambda: calls.batcher.stats().running == 2)
                finally:
                    held.go.set()
        return len(held.batches), calls.results

    batches, results = run(main)
    assert batches == 2
    assert sorted(results) == (["a", "b", "c", "d"] if how == "full" else ["a", "b", "c"])


def test_an_asynchronous_function_orders_its_own_batches_and_none_is_held_back(run, until):
    async def main():
        held = Held()
        async with calling(lists(held, max_batch_size=8, in_flight=2)) as calls:
            taking(1000, calls.batcher)
            await calls.started("a")
            await until(lambda: len(held.batches) == 1)
            await calls.started("b")
            await until(lambda: len(held.batches) == 2)
            held.let_go()

    run(main)


def test_a_full_batch_does_not_wait_for_max_delay(run):
    async def main():
        held = Held()
        held.let_go()
        async with calling(lists(held, max_batch_size=4, max_delay=1000, in_flight=1)) as calls:
            await calls.started(*range(8))
        return held.batches

    assert run(main) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_last_partial_batch_is_flushed_when_max_delay_is_over(run, until, monkeypatch):
    async def main():
        held, clock = Held(), Clock(monkeypatch)
        held.let_go()
        async with calling(lists(held, max_batch_size=4, max_delay=500)) as calls:
            await calls.started(*range(6))
            await until(lambda: len(calls.results) == 4)
            await anyio.wait_all_tasks_blocked()
            assert len(held.batches) == 1
            clock.advance(calls.batcher, 501)
            await until(lambda: len(calls.results) == 6)
        return held.batches

    assert run(main) == [[0, 1, 2, 3], [4, 5]]


def test_an_alarm_that_a_full_batch_has_overtaken_still_serves_the_next_call(run, until):
    """Full and delay race: the alarm was set for a call that has left with a full batch since."""

    async def main():
        held = Held()
        held.let_go()
        async with calling(lists(held, max_batch_size=2, max_delay=0.03)) as calls:
            await calls.started("a")
            await anyio.wait_all_tasks_blocked()  # the alarm for "a" is set
            await calls.started("b")  # full: both go
            await until(lambda: len(calls.results) == 2)
            await calls.started("c")  # no alarm of its own yet
            await until(lambda: len(calls.results) == 3)
        return [name for batch in held.batches for name in batch]

    assert run(main) == ["a", "b", "c"]


def test_no_call_is_forgotten_however_full_and_delay_fall_together(run):
    async def main():
        held = Held()
        held.let_go()
        async with calling(lists(held, max_batch_size=3, max_delay=0.0005, in_flight=1)) as calls:
            for i in range(300):
                calls.start(i)
                if i % 7 == 0:
                    await anyio.sleep(0.0005 if i % 2 else 0)
        return calls.results

    assert run(main) == {i: i for i in range(300)}


# -- the thread ------------------------------------------------------------------------------------


def test_a_thousand_calls_of_many_tasks_see_one_thread(run):
    """C61: compiled models with CUDA graphs are tied to the thread that they first ran in."""
    threads = set()

    def fn(x):
        threads.add(threading.current_thread())
        return x

    async def main():
        async with calling(aiogpu.Batcher(fn, max_batch_size=16)) as calls:
            for i in range(1000):
                calls.start(i, item=i)
                if i % 50 == 0:
                    await anyio.lowlevel.checkpoint()
        assert len(calls.results) == 1000

    run(main)
    (thread,) = threads
    assert thread is not threading.current_thread()
    thread.join(10)
    assert not thread.is_alive()  # it has ended with the batcher


def test_the_loop_stays_free_while_the_function_runs(run, until):
    """C43: beside a forward pass that does not return, everything else goes on."""

    async def main():
        held = HeldInThread()
        async with calling(aiogpu.Batcher(held, max_batch_size=4)) as calls:
            calls.start(1)
            await until(lambda: held.batches)
            beats = 0
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
                beats += 1
            assert beats == 50
            assert not calls.results
            held.go.set()
        assert calls.results == {1: 1}

    run(main)


def test_batches_are_computed_though_the_loops_own_threads_are_all_taken(run_asyncio):
    """C44: asyncio's default pool and anyio's limiter are full of calls that wait."""

    async def main():
        go = threading.Event()
        asyncio.get_running_loop().set_default_executor(
            __import__("concurrent.futures").futures.ThreadPoolExecutor(2)
        )
        anyio.to_thread.current_default_thread_limiter().total_tokens = 1
        stuck = [asyncio.create_task(asyncio.to_thread(go.wait, 20)) for _ in range(4)]
        stuck.append(asyncio.create_task(anyio.to_thread.run_sync(go.wait, 20)))
        await asyncio.sleep(0)
        try:
            async with aiogpu.Batcher(torch.neg, max_batch_size=4) as batcher:
                assert await batcher(3) == -3
        finally:
            go.set()
            await asyncio.gather(*stuck)

    run_asyncio(main)


def test_batches_are_computed_though_every_run_sync_is_taken(run, until):
    """Users' blocking calls cannot hold up a batch, its collate or its split either."""

    async def main():
        go, began = threading.Event(), []

        def block():
            began.append(1)
            go.wait(20)

        async with aiogpu.Runtime(workers=2), anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(aiogpu.run_sync, block)
            await until(lambda: len(began) == 2)
            async with lists(lambda items: items, max_batch_size=4) as batcher:
                assert await batcher("x") == "x"
            go.set()

    run(main)


def test_an_async_function_may_run_in_flight_times_at_once(run, until):
    async def main():
        held = Held()
        async with calling(lists(held, max_batch_size=1, in_flight=3)) as calls:
            calls.start(*range(5))
            await until(lambda: len(held.batches) == 3)
            await anyio.wait_all_tasks_blocked()
            assert len(held.batches) == 3
            held.let_go()
        assert calls.results == {i: i for i in range(5)}

    run(main)


def test_the_function_is_called_without_grad_and_with_the_batchers_context_variables(run):
    where: ContextVar[str] = ContextVar("where", default="nowhere")
    seen = []

    def fn(x):
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), where.get()))
        return x

    async def main():
        where.set("where the batcher was entered")
        async with aiogpu.Batcher(fn, max_batch_size=4) as batcher:
            where.set("where it was called")
            with torch.inference_mode():
                result = await batcher(torch.ones(2, requires_grad=True))
            assert not result.requires_grad

    run(main)
    assert seen == [(False, False, "where the batcher was entered")]


def test_what_an_async_function_sets_of_its_context_stays_with_its_batch(run, anydevice):
    """Batches one after the other run in one task of the event loop."""
    mark: ContextVar[str] = ContextVar("mark", default="none")
    seen = []

    async def fn(x):
        seen.append(mark.get())
        mark.set("left behind")
        await anyio.lowlevel.checkpoint()
        assert mark.get() == "left behind"
        return x

    async def main():
        async with aiogpu.Batcher(fn, max_batch_size=4) as batcher:
            for _ in range(3):
                await batcher(torch.ones(2))

    run(main)
    assert seen == ["none"] * 3


def test_a_function_that_cancels_its_own_task_hurts_no_later_batch(run_asyncio, anydevice):
    """Also when the cancellation strikes only after its batch has had its results."""
    seen = []

    async def fn(x):
        task = asyncio.current_task()
        assert task is not None
        seen.append(task.cancelling())
        task.cancel()
        if len(seen) % 2:
            with contextlib.suppress(asyncio.CancelledError):
                await anyio.lowlevel.checkpoint()
            raise KeyError("on purpose")
        return x

    async def main():
        async with aiogpu.Batcher(fn, max_batch_size=1) as batcher:
            for number in range(12):
                # Where the batch is waited for, the cancellation may strike it, too.
                with anyio.fail_after(10), contextlib.suppress(KeyError, RuntimeError):
                    await batcher(torch.ones(2))
                for _ in range(number // 2):  # the next call comes with the cancellation, or after it
                    await anyio.lowlevel.checkpoint()

    run_asyncio(main)
    assert seen == [0] * 12


# -- results do not keep the loop ------------------------------------------------------------------


def test_the_loop_has_its_turns_between_the_callers_of_a_large_batch(run, monkeypatch):
    """A portion of 16 at first, then as many as fit into 2 ms: 4 at least, where each needs a millisecond."""
    clock = [0.0]
    monkeypatch.setattr(handing, "perf_counter", lambda: clock[0])

    async def main():
        turns, woken = [0], []

        async def tick() -> None:
            while len(woken) < 64:
                turns[0] += 1
                await anyio.lowlevel.checkpoint()

        async def call(batcher) -> None:
            await batcher(torch.ones(2))
            clock[0] += 0.001
            woken.append(turns[0])

        async with aiogpu.Batcher(torch.sin, max_batch_size=64, max_queue_per_client=64) as batcher:
            async with anyio.create_task_group() as group:
                for _ in range(64):
                    group.start_soon(call, batcher)
                group.start_soon(tick)
            assert batcher.stats().batches == 1
        return [woken.count(turn) for turn in sorted(set(woken))], anyio.get_current_task()

    portions, task = run(main)
    assert sum(portions) == 64
    in_trio = "Trio" in repr(task)  # which runs what is ready in no order
    assert len(portions) >= (2 if in_trio else 4)
    assert max(portions) <= (60 if in_trio else 24), "two portions at most between two turns of others"


def test_a_loop_that_is_busy_with_something_else_keeps_nobodys_result_back(run, monkeypatch):
    """Only what those who were woken do makes portions small, and whatever does, nobody waits for long."""
    clock = [0.0]
    monkeypatch.setattr(handing, "perf_counter", lambda: clock[0])

    async def main():
        turns, woken, first_out = [0], [], []

        async def tick() -> None:
            while len(woken) < 256:
                turns[0] += 1
                clock[0] += 0.05
                await anyio.lowlevel.checkpoint()

        async def call(batcher) -> None:
            await batcher(torch.ones(2))
            first_out[:] = first_out or [turns[0]]
            woken.append(turns[0])

        async with aiogpu.Batcher(torch.sin, max_batch_size=256, max_queue_per_client=256) as batcher:
            async with anyio.create_task_group() as group:
                for _ in range(256):
                    group.start_soon(call, batcher)
                group.start_soon(tick)
        return max(woken) - first_out[0], anyio.get_current_task()

    turns, task = run(main)
    # In trio nobody knows what of a turn was whose: a floor holds.
    assert turns <= (24 if "Trio" in repr(task) else 6)


@pytest.mark.parametrize("how", ["left", "cancelled"])
def test_whoever_has_a_result_gets_it_although_the_batcher_is_being_left(run, monkeypatch, how):
    """While the results of a large batch are handed out, in portions of 16, 8, and then 4."""
    seen = []
    monkeypatch.setattr(handing, "perf_counter", lambda: 0.01 * len(seen))

    async def main():
        async def call(batcher) -> None:
            seen.append(float((await batcher(torch.ones(2))).sum()))
            if len(seen) == 1 and how == "cancelled":
                scope.cancel()  # of the batcher's task, when the first portion has gone out

        batcher = aiogpu.Batcher(lambda x: x * 2, max_batch_size=64, max_queue_per_client=64)
        async with anyio.create_task_group() as group:
            with anyio.CancelScope() as scope:
                async with batcher:
                    for _ in range(64):
                        group.start_soon(call, batcher)
                    while batcher.stats().calls < 64:
                        await anyio.lowlevel.checkpoint()
                    if how == "cancelled":
                        await anyio.sleep_forever()
                assert len(seen) > 48, "the block was left before the results were handed out"

    run(main)
    assert seen == [4.0] * 64


# -- what goes in and out --------------------------------------------------------------------------


class Point(NamedTuple):
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Item:
    image: Any
    weight: float
    tags: dict[str, int]


@pytest.mark.usefixtures("anydevice")
def test_any_nesting_goes_in_stacked_and_comes_out_cut(run):
    seen = []

    def fn(batch):
        seen.append(batch)
        return {"twice": batch.image * 2, "item": batch, "none": None, "pair": (batch.weight, ["a", "b"])}

    async def main():
        async with calling(aiogpu.Batcher(fn, max_batch_size=2, max_delay=1000)) as calls:
            for i in range(2):
                await calls.started(i, item=Item(numpy.full((2, 3), i, "f4"), i / 2, {"n": i}))
        return calls.results

    results = run(main)
    (batch,) = seen
    assert type(batch) is Item
    assert batch.image.shape == (2, 2, 3)
    assert torch.equal(batch.weight, torch.tensor([0.0, 0.5]))
    assert torch.equal(batch.tags["n"], torch.tensor([0, 1]))
    for i in range(2):
        assert torch.equal(results[i]["twice"], ones(2 * i, 2, 3))
        assert results[i]["item"].tags["n"] == i
        assert results[i]["none"] is None
        assert results[i]["pair"] == (i / 2, "ab"[i])


def test_what_cannot_be_stacked_becomes_a_list(run):
    async def main():
        async with calling(
            aiogpu.Batcher(lambda p: Point(-p.x, [*map(str.upper, p.name)]), max_batch_size=2)
        ) as calls:
            calls.start("a", item=Point(ones(1), "a"))
            calls.start("b", item=Point(ones(2), "b"))
        return calls.results

    results = run(main)
    assert type(results["a"]) is Point
    assert (results["a"].name, results["b"].name) == ("A", "B")
    assert torch.equal(results["b"].x, -ones(2))


def test_items_of_different_shapes_cannot_spoil_each_others_batch(run, until):
    """Not even a hostile one: whoever sends an odd shape is alone with it."""
    shapes = []

    async def main():
        held = Held()

        async def fn(x):
            shapes.append(tuple(x.shape))
            await held(x)
            if x.shape[-1] == 5:
                raise ValueError("five")
            return x

        async with calling(aiogpu.Batcher(fn, max_batch_size=8, in_flight=1)) as calls:
            await calls.started("first", item=ones(0, 1))
            await until(lambda: shapes)
            for key, n in enumerate([3, 4, 3, 5, 4]):
                await calls.started(key, item=ones(n, n))
            await calls.started("int", item=torch.ones(3, dtype=torch.int32))
            held.let_go()
        return calls

    calls = run(main)
    assert shapes == [(1, 1), (2, 3), (2, 4), (1, 5), (1, 3)]
    assert set(calls.errors) == {3}
    assert torch.equal(calls.results[2], ones(3, 3))
    assert calls.results["int"].dtype == torch.int32


def test_results_are_views_of_one_output(run):
    async def main():
        async with calling(aiogpu.Batcher(torch.neg, max_batch_size=2)) as calls:
            calls.start(0, item=ones(1))
            calls.start(1, item=ones(2))
        return calls.results

    results = run(main)
    assert results[0].untyped_storage().data_ptr() == results[1].untyped_storage().data_ptr()


@pytest.mark.usefixtures("anydevice")
def test_the_function_may_write_into_its_batch_without_touching_the_callers_items(run):
    async def main():
        item, large = ones(1), ones(1, 400_000)
        async with aiogpu.Batcher(lambda x: x.add_(1), max_batch_size=2) as batcher:
            assert torch.equal(await batcher(item), ones(2))
            assert torch.equal(await batcher(large), ones(2, 400_000))
        assert torch.equal(item, ones(1))
        assert torch.equal(large, ones(1, 400_000))

    run(main)


@pytest.mark.usefixtures("anydevice")
def test_large_items_are_stacked_in_a_thread_and_right(run):
    """Large ones take another way: off the loop, into page-locked memory."""

    async def main():
        async with calling(aiogpu.Batcher(lambda x: x + 1, max_batch_size=4)) as calls:
            for i in range(4):
                calls.start(i, item=ones(i, 100_000))
        assert calls.batcher.stats().batches == 1
        return calls.results

    results = run(main)
    assert all(torch.equal(results[i], ones(i + 1, 100_000)) for i in range(4))


@pytest.mark.usefixtures("anydevice")
def test_collate_and_split_pad_items_of_different_lengths(run):
    """The how-to's example."""

    def pad(items):
        return torch.nn.utils.rnn.pad_sequence(items, batch_first=True), [len(item) for item in items]

    def fn(batch):
        padded, lengths = batch
        return padded * 10, lengths

    def unpad(output):
        return [row[:n] for row, n in zip(*output, strict=True)]

    async def main():
        batcher = aiogpu.Batcher(fn, max_batch_size=8, collate=pad, split=unpad)
        async with calling(batcher) as calls:
            for i in range(1, 5):
                calls.start(i, item=ones(i, i))
        assert batcher.stats().batches == 1
        return calls.results

    results = run(main)
    assert all(torch.equal(results[i], ones(10 * i, i)) for i in range(1, 5))


def test_a_batch_that_is_large_only_with_its_padding_is_not_stacked_on_the_loops_thread(run, monkeypatch):
    threads = []
    real = pipeline.stack

    def stack(*args):
        threads.append(threading.get_ident())
        return real(*args)

    monkeypatch.setattr(pipeline, "stack", stack)

    async def main():
        async with aiogpu.Batcher(lambda x: x[:, 0], max_batch_size=64, sizes=(64,)) as batcher:
            await batcher(torch.zeros(5000))

    run(main)
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_batches_are_padded_to_a_preferred_size_and_the_padding_is_dropped(run, until):
    shapes = []

    async def main():
        held = Held()

        async def fn(x):
            shapes.append(len(x))
            await held(x)
            return x * 2

        async with calling(aiogpu.Batcher(fn, max_batch_size=8, sizes=(1, 4, 8), in_flight=1)) as calls:
            await calls.started("one", item=ones(1))
            await until(lambda: shapes)
            for i in range(3):
                await calls.started(i, item=ones(i))
            held.let_go(0)
            await until(lambda: len(shapes) == 2)
            for i in range(3, 8):
                await calls.started(i, item=ones(i))
            held.let_go()
        assert calls.batcher.stats().padded == 1 + 3
        return calls.results

    results = run(main)
    assert shapes == [1, 4, 8]
    assert all(torch.equal(results[i], ones(2 * i)) for i in range(8))


def test_costs_of_a_batch_sum_up_to_max_cost(run, until):
    async def main():
        held = Held()
        batcher = lists(held, max_batch_size=8, cost=len, max_cost=5, in_flight=1)
        async with calling(batcher) as calls:
            await calls.started("-")
            await until(lambda: held.batches)
            # "ddd" does not fit behind "cc": it ends the batch, and nobody overtakes it.
            await calls.started("a", "bb", "cc", "ddd", "e", "fffff", "")
            held.let_go()
            with pytest.raises(ValueError, match="max_cost is 5"):
                await batcher("xxxxxx")
        return held.batches

    assert run(main) == [["-"], ["a", "bb", "cc"], ["ddd", "e"], ["fffff", ""]]


def test_a_batch_that_costs_enough_is_full(run):
    async def main():
        held = Held()
        held.let_go()
        async with calling(lists(held, max_batch_size=8, cost=len, max_cost=4, max_delay=1000)) as calls:
            await calls.started("aa", "bb")
        return held.batches

    assert run(main) == [["aa", "bb"]]


# -- who goes first --------------------------------------------------------------------------------


def test_urgent_calls_go_first_and_equal_ones_in_their_order(run, until):
    async def main():
        held = Held()
        async with calling(lists(held, max_batch_size=2, in_flight=1)) as calls:
            await calls.started("first")
            await until(lambda: held.batches)
            await calls.started("slow 1", "slow 2", "slow 3", priority=5)
            await calls.started("plain 1", "plain 2")
            await calls.started("urgent", priority=-1)
            held.let_go()
        return [name for batch in held.batches for name in batch]

    assert run(main) == ["first", "urgent", "plain 1", "plain 2", "slow 1", "slow 2", "slow 3"]


def test_time_that_really_passes_ends_a_call(run):
    """The other tests move the clock by hand; this one waits for the dispatcher's own timer."""

    async def main():
        held = Held()
        async with lists(held, max_batch_size=1) as batcher:
            with pytest.raises(TimeoutError):
                await batcher("x", timeout=0.005)
            held.let_go()

    run(main)


def test_the_least_urgent_call_is_not_starved(run, until):
    """A stream of urgent calls that never ends passes it over 15 times, not for ever."""

    async def main():
        held = Held()
        async with calling(lists(held, max_batch_size=1, in_flight=1)) as calls:
            await calls.started("first")
            await until(lambda: held.batches)
            await calls.started("patient", priority=100)
            for i in range(25):
                await calls.started(i)
            held.let_go()
        return [name for batch in held.batches for name in batch]

    order = run(main)
    assert order.index("patient") == 1 + 15
    order.remove("patient")
    assert order == ["first", *range(25)]


def test_clients_are_served_in_turns(run, until):
    """A client with many calls cannot make the others wait for all of them."""

    async def main():
        held = Held()
        async with calling(lists(held, max_batch_size=2, in_flight=1)) as calls:
            await calls.started("first")
            await until(lambda: held.batches)
            await calls.started("a1", "a2", "a3", "a4", client="a")
            await calls.started("b1", client="b")
            await calls.started("c1", "c2", client="c")
            held.let_go()
        return [name for batch in held.batches for name in batch]

    assert run(main) == ["first", "a1", "b1", "c1", "a2", "c2", "a3", "a4"]


def test_one_client_cannot_fill_the_queue(run, until):
    async def main():
        held = Held()
        batcher = lists(held, max_batch_size=1, in_flight=1, max_queue=8, max_queue_per_client=3)
        async with calling(batcher) as calls:
            await calls.started("first")
            await until(lambda: held.batches)
            await calls.started(*"abcde", client="greedy")
            assert sorted(calls.errors) == ["d", "e"]
            assert isinstance(calls.errors["d"], aiogpu.OverloadedError)
            assert "this client" in str(calls.errors["d"])
            await calls.started("other", client="modest")
            await calls.started("nobody's")
            held.let_go()
        assert {"other", "nobody's", "a", "b", "c"} < set(calls.results)

    run(main)


# -- time and room ---------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once_with_a_hint(run, until):
    async def main():
        held = Held()
        batcher = lists(held, max_batch_size=1, in_flight=1, max_queue=2)
        async with calling(batcher) as calls:
            await calls.started("running", "a")
            await until(lambda: held.batches)
            await calls.started("b")
            assert batcher.stats().waiting == 2
            with pytest.raises(aiogpu.OverloadedError, match="max_queue") as caught:
                await batcher("refused")
            assert caught.value.retry_after > 0
            calls.cancel("a")
            await until(lambda: batcher.stats().waiting == 1)
            await calls.started("c")  # there is room again
            held.let_go()
        assert set(calls.results) == {"running", "b", "c"}
        assert batcher.stats().refused == 1

    run(main)


def test_a_call_out_of_time_leaves_and_hurts_nobody(run, until, monkeypatch):
    async def main():
        held, clock = Held(), Clock(monkeypatch)
        async with calling(lists(held, max_batch_size=4, in_flight=1)) as calls:
            await calls.started("running", timeout=500)
            await until(lambda: held.batches)
            await calls.started("waiting", timeout=400)
            await calls.started("neighbour", timeout=1000)
            clock.advance(calls.batcher, 501)
            await until(lambda: len(calls.errors) == 2)
            held.let_go()
        assert {type(error) for error in calls.errors.values()} == {TimeoutError}
        assert calls.results == {"neighbour": "neighbour"}
        assert held.batches == [["running"], ["neighbour"]]
        assert calls.batcher.stats().timeouts == 2

    run(main)


def test_a_call_that_would_not_make_it_in_time_is_refused_at_once(run, until):
    async def main():
        held = Held()
        batcher = lists(held, max_batch_size=1, in_flight=1)
        async with calling(batcher) as calls:
            service = batcher._service
            service.batches.forecast.note(0.0, 10.0)  # a batch takes 10 s
            await calls.started("idle", timeout=5.0)  # would start at once: the forecast may be wrong
            await until(lambda: held.batches)
            with pytest.raises(aiogpu.OverloadedError, match=r"predicted wait of (20|19)") as caught:
                await batcher("x", timeout=12.0)
            assert caught.value.retry_after == pytest.approx(8.0, abs=1.0)
            await calls.started("patient", timeout=30.0)
            with pytest.raises(aiogpu.OverloadedError):
                await batcher("y", timeout=25.0)
            await calls.started("urgent", timeout=25.0, priority=-1)  # nobody is before it
            held.let_go()
        assert set(calls.results) == {"idle", "patient", "urgent"}

    run(main)


def test_a_wrong_forecast_does_not_shut_everybody_out(run):
    """The first batch compiles for ten seconds: then nobody with a timeout would ever come in."""

    async def main():
        async with lists(lambda items: items, max_batch_size=1) as batcher:
            batcher._service.batches.forecast.note(0.0, 10.0)
            for i in range(5):
                assert await batcher(i, timeout=5.0) == i
            return batcher._service.batches.forecast.typical

    assert run(main) < 1.0


# -- lifetime --------------------------------------------------------------------------------------


def test_leaving_drains(run, until):
    async def main():
        held = Held()
        batcher = lists(held, max_batch_size=2, in_flight=1, max_delay=1000)
        left = []
        async with anyio.create_task_group() as group:
            results = []

            async def caller(i):
                results.append(await batcher(i))

            async def serve():
                async with batcher:
                    for i in range(5):
                        group.start_soon(caller, i)
                    await until(lambda: batcher.stats().calls == 5)
                left.append(True)

            group.start_soon(serve)
            await until(lambda: held.batches)
            await until(lambda: batcher.closed)
            with pytest.raises(aiogpu.ClosedError):
                await batcher("late")
            assert not left
            held.let_go()
        assert left
        assert sorted(results) == [0, 1, 2, 3, 4]  # the last one although its batch was never full

    run(main)


def test_leaving_with_an_exception_closes_and_keeps_the_exception(run, until):
    async def main():
        held = Held()
        batcher = lists(held, max_batch_size=1, in_flight=1)
        errors = {}

        async def caller(key):
            with pytest.raises(aiogpu.ClosedError) as caught:
                await batcher(key)
            errors[key] = caught.value

        async with anyio.create_task_group() as group:

            async def serve():
                async with batcher:
                    group.start_soon(caller, "running")
                    await until(lambda: held.batches)
                    group.start_soon(caller, "waiting")
                    await until(lambda: batcher.stats().waiting)
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):  # itself, not a group around it
                await serve()
        assert set(errors) == {"running", "waiting"}
        assert errors["running"] is not errors["waiting"]
        with pytest.raises(aiogpu.ClosedError):
            await batcher("late")

    run(main)


def test_a_function_that_does_not_return_does_not_hold_up_a_cancelled_end(run, until):
    async def main():
        held = HeldInThread()
        batcher = aiogpu.Batcher(held, max_batch_size=1)
        failed = []

        async def caller():
            with pytest.raises(aiogpu.ClosedError):
                await batcher(1)
            failed.append(True)

        async with anyio.create_task_group() as group:
            with anyio.CancelScope() as scope:
                async with batcher:
                    group.start_soon(caller)
                    await until(lambda: held.batches)
                    scope.cancel()
                    await anyio.sleep_forever()
            assert scope.cancelled_caught
        assert failed
        held.go.set()

    run(main)


def test_close_ends_the_waiting_calls_and_lets_the_running_ones_finish(run, until):
    async def main():
        held = Held()
        async with calling(lists(held, max_batch_size=1, in_flight=1)) as calls:
            await calls.started("running")
            await until(lambda: held.batches)
            await calls.started("waiting")
            calls.batcher.close()
            assert calls.batcher.closed
            await until(lambda: calls.errors)
            held.let_go()
        assert calls.results == {"running": "running"}
        assert isinstance(calls.errors["waiting"], aiogpu.ClosedError)
        assert isinstance(calls.errors["waiting"], anyio.ClosedResourceError)  # what anyio's users catch

    run(main)


def test_it_may_be_left_in_another_task_than_it_was_entered_in(run):
    """As fixtures and some servers' lifespans do it: each end in a task of its own."""

    async def main():
        batcher = lists(lambda items: items, max_batch_size=2)
        async with anyio.create_task_group() as group:
            group.start_soon(batcher.__aenter__)
        assert await batcher("a") == "a"
        async with anyio.create_task_group() as group:
            group.start_soon(batcher.__aexit__, None, None, None)
        with pytest.raises(aiogpu.ClosedError):
            await batcher("late")

    run(main)


def test_an_async_generator_may_hold_it(run):
    """Event loops close generators in tasks of theirs."""

    async def fixture():
        async with lists(lambda items: items, max_batch_size=2) as batcher:
            yield batcher

    async def main():
        generator = fixture()
        batcher = await anext(generator)
        assert await batcher("a") == "a"
        async with anyio.create_task_group() as group:
            group.start_soon(generator.aclose)
        assert batcher.closed

    run(main)


def test_whoever_cancels_all_tasks_of_the_loop_leaves_no_caller_behind(run_asyncio, abandoned):
    async def main():
        held = Held()
        async with lists(held, max_batch_size=1, in_flight=1) as batcher:
            before = asyncio.all_tasks()
            calls = [asyncio.create_task(batcher(i)) for i in range(2)]
            while not held.batches:
                await asyncio.sleep(0)
            for task in asyncio.all_tasks() - before - set(calls):
                task.cancel()
            for task in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(task, aiogpu.ClosedError | RuntimeError)
            with pytest.raises(aiogpu.ClosedError):
                await batcher("late")

    run_asyncio(main)


def test_it_serves_one_loop_and_is_entered_once(run):
    batcher = aiogpu.Batcher(torch.neg, max_batch_size=1)

    async def elsewhere():
        with pytest.raises(RuntimeError, match="serves one loop"):
            await batcher(1)

    async def main():
        with pytest.raises(RuntimeError, match="has not been entered"):
            await batcher(1)
        async with batcher:
            await aiogpu.run_sync(asyncio.run, elsewhere())
            with pytest.raises(RuntimeError, match="entered once"):
                await batcher.__aenter__()
            assert await batcher(1) == -1

    run(main)


def test_calls_from_inside_tasks_and_a_batcher_entered_in_one(run):
    @aiogpu.task
    async def caller(batcher, i):
        return await batcher(ones(i))

    @aiogpu.task
    async def main():
        async with aiogpu.Batcher(torch.neg, max_batch_size=4) as batcher:
            return await aiogpu.gather(*(caller(batcher, i) for i in range(4)))

    assert all(torch.equal(y, -ones(i)) for i, y in enumerate(run(main)))


def test_nothing_is_left_of_a_batcher_and_its_calls(run):
    """No cycle, no registry, no cached context keeps a model, an item or a result alive."""

    class Model:
        def __call__(self, x):
            return x

    async def main():
        model, item = Model(), torch.ones(3)
        dead = [weakref.ref(model), weakref.ref(item)]
        async with aiogpu.Batcher(model, max_batch_size=4) as batcher:
            result = await batcher(item)
            dead += [weakref.ref(result)]
            del item, result
            await anyio.sleep(0.01)
            gc.collect()
            assert [ref() for ref in dead[1:]] == [None, None]
        del model, batcher
        gc.collect()
        assert dead[0]() is None

    run(main)


# -- what is told ----------------------------------------------------------------------------------


def test_statistics_add_up(run, until):
    async def main():
        held = Held()
        batcher = lists(held, max_batch_size=2, in_flight=1, max_queue=3)
        async with calling(batcher) as calls:
            await calls.started("running")
            await until(lambda: held.batches)
            await calls.started("a", "b", "c", "refused")
            calls.cancel("c")
            await until(lambda: "c" in calls.errors)
            await calls.started("late", timeout=0.001)
            await until(lambda: "late" in calls.errors)
            stats = batcher.stats()
            assert (stats.waiting, stats.running) == (2, 1)
            assert stats.predicted_wait >= 0
            held.let_go()
        stats = batcher.stats()
        assert (stats.waiting, stats.running, stats.limit) == (0, 0, 2)
        assert (stats.ok, stats.cancelled, stats.refused, stats.timeouts) == (3, 1, 1, 1)
        over = stats.ok + stats.errors + stats.timeouts + stats.cancelled + stats.refused + stats.closed
        assert over == stats.calls == 6
        assert (stats.batches, stats.items) == (2, 3)
        assert stats.wait_seconds > 0
        assert stats.compute_seconds > 0

    run(main)


def test_observers_hear_of_every_call_and_batch_and_cannot_hurt(run, abandoned):
    from aiogpu._batching.observing import live_batchers, observers

    heard: list[Any] = []

    def broken(event):
        raise ValueError("a broken exporter")

    async def main():
        batcher = lists(lambda items: items, max_batch_size=4, sizes=(4,), name="mine", observer=heard.append)
        observers.append(broken)
        try:
            async with batcher:
                assert batcher in live_batchers()
                assert await batcher("x") == "x"
        finally:
            observers.remove(broken)
        assert batcher not in live_batchers()

    run(main)
    batch, call = heard
    assert isinstance(batch, aiogpu.BatchEnded)
    assert (batch.batcher, batch.size, batch.padded, batch.outcome) == ("mine", 1, 3, "ok")
    assert isinstance(call, aiogpu.CallEnded)
    assert (call.batcher, call.outcome) == ("mine", "ok")
    assert 0 <= call.wait_seconds <= call.total_seconds
    assert len(abandoned) == 2
    assert "observer" in abandoned[0]


def test_gauges_do_not_leak_when_callers_disconnect(run, until):
    """What is now is asked for, not counted up and down."""

    async def main():
        held = Held()
        async with calling(lists(held, max_batch_size=4, in_flight=1)) as calls:
            await calls.started("running")
            await until(lambda: held.batches)
            for round_ in range(20):
                keys = [(round_, i) for i in range(10)]
                await calls.started(*keys, client=round_)
                for key in keys:
                    calls.cancel(key)
                await until(lambda keys=keys: set(keys) <= set(calls.errors))
                assert calls.batcher.stats().waiting == 0
            queue = calls.batcher._queue
            assert not queue._groups
            assert not queue._levels
            assert not queue._clients
            held.let_go()
        stats = calls.batcher.stats()
        assert (stats.waiting, stats.running, stats.cancelled, stats.ok) == (0, 0, 200, 1)

    run(main)


def test_repr_tells_what_is_going_on(run, until):
    async def main():
        held = Held()
        batcher = lists(held, max_batch_size=1, in_flight=1, name="mine")
        assert repr(batcher) == "<Batcher mine, not entered, 0 waiting, 0 batches running>"
        async with calling(batcher) as calls:
            await calls.started("a")
            await until(lambda: held.batches)
            await calls.started("b")
            assert repr(batcher) == "<Batcher mine, open, 1 waiting, 1 batches running>"
            held.let_go()
        assert "closed" in repr(batcher)

    run(main)


# -- the how-to page -------------------------------------------------------------------------------


def test_the_how_to_pages_examples_do_what_it_says(run):
    page = (Path(aiogpu.__file__).parent.parent / "docs" / "how-to" / "batching.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(block, "batching.md", "exec"), names)

    async def main():
        assert len(await names["main"]()) == 10
        rows = await names["of_any_length"]([ones(1, n) for n in (1, 3, 2)])
        assert [row.tolist() for row in rows] == [[1], [1, 2, 3], [1, 2]]
        assert (await names["compiled"](torch.rand(64))).shape == (10,)
        async with lists(lambda items: items, max_batch_size=1) as batcher:
            assert await names["answer"](batcher, "x", "10.0.0.1") == (200, "x")
            assert await names["answer"](_Refusing(), "x", "") == (429, {"Retry-After": "3"})

    run(main)


class _Refusing:
    async def __call__(self, *_, **__):
        raise aiogpu.OverloadedError("full", 2.6)


# -- misuse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"fn": 3}, TypeError, "fn=...) takes a function"),
        ({"split": "x"}, TypeError, "split=...) takes a function"),
        ({"max_batch_size": 0}, ValueError, "max_batch_size"),
        ({"max_batch_size": 2.5}, ValueError, "max_batch_size"),
        ({"max_delay": -1}, ValueError, "max_delay must be at least 0"),
        ({"max_queue": 0}, ValueError, "max_queue must be at least 1"),
        ({"max_queue_per_client": 0}, ValueError, "max_queue_per_client"),
        ({"in_flight": 0}, ValueError, "in_flight must be at least 1"),
        ({"cost": len}, ValueError, "belong together"),
        ({"max_cost": 3}, ValueError, "belong together"),
        ({"sizes": (1, 2)}, ValueError, "largest of sizes must be max_batch_size, 4, not 2"),
        ({"sizes": (0, 4)}, ValueError, "1 or more"),
        ({"device": "tpu"}, ValueError, "is not a device"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, error, match):
    with pytest.raises(error, match=re.escape(match)):
        aiogpu.Batcher(**{"fn": torch.neg, "max_batch_size": 4, **settings})


def test_arguments_that_cannot_be_meant_are_refused(run):
    async def main():
        async with aiogpu.Batcher(torch.neg, max_batch_size=4) as batcher:
            for options, error in (
                ({"priority": 1.5}, TypeError),
                ({"priority": True}, TypeError),
                ({"timeout": -1}, ValueError),
                ({"timeout": "1"}, TypeError),
                ({"client": []}, TypeError),
            ):
                with pytest.raises(error):
                    await batcher(1, **options)
            assert await batcher(1) == -1
        assert batcher.stats().errors == 5

    run(main)


def test_a_function_that_returns_a_coroutine_is_told_so(run):
    async def fn(x):
        return x

    async def main():
        async with aiogpu.Batcher(lambda x: fn(x), max_batch_size=4) as batcher:
            with pytest.raises(TypeError, match="pass the `async def` function itself"):
                await batcher(1)

    run(main)


def test_something_that_is_no_container_passes_as_it_is(run):
    async def main():
        box = Box(1)
        async with aiogpu.Batcher(lambda boxes: boxes, max_batch_size=4) as batcher:
            assert await batcher(box) is box

    run(main)
