"""pipeline: stages that overlap, bounded, and failures that say where they come from."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from _clockwork import timed
from _kernels import go, read, write

import aiogpu

LIMIT = 20.0
LINES = Path(__file__).read_text().splitlines()


def vectors(count: int) -> Any:
    for number in range(count):
        yield torch.full((8,), float(number))


async def avectors(count: int) -> Any:
    for number in range(count):
        await anyio.lowlevel.checkpoint()
        yield torch.full((8,), float(number))


async def collect(results: Any) -> list[Any]:
    return [result async for result in results]


async def put_into(got: list[Any], items: Any) -> None:
    async for item in items:
        got.append(item)


def firsts(results: list[torch.Tensor]) -> list[float]:
    return [float(result.flatten()[0]) for result in results]


# -- what comes out ------------------------------------------------------------------------------------


def test_a_chain_of_all_stages(run, anydevice):
    async def twice(x):
        await anyio.lowlevel.checkpoint()
        return x * 2

    async def without_the_second(batches):
        count = 0
        async for batch in batches:
            count += 1
            if count != 2:
                yield batch

    @aiogpu.task
    async def main():
        async with (
            aiogpu.pipeline(vectors(10))
            .map(lambda x: x + 1, concurrency=3)
            .map(twice, concurrency=2)
            .batch(4)
            .to_device()
            .map_gpu(torch.neg)
            .then(without_the_second)
            .to_host()
        ) as results:
            return await collect(results)

    assert [batch[:, 0].tolist() for batch in run(main)] == [[-2, -4, -6, -8], [-18, -20]]


@pytest.mark.parametrize("source", [vectors, avectors, lambda count: list(vectors(count))])
def test_without_stages_it_is_its_source(run, anydevice, source):
    async def main():
        async with aiogpu.pipeline(source(5)) as results:
            return firsts(await collect(results))

    assert run(main) == [0, 1, 2, 3, 4]


def test_a_pipeline_feeds_another_and_a_prefetch_feeds_a_pipeline(run, anydevice):
    async def main():
        inner = aiogpu.prefetch(aiogpu.pipeline(vectors(6)).map(lambda x: x + 1), device="cpu")
        async with aiogpu.pipeline(inner).map_gpu(lambda x: x * 10).to_host() as results:
            return firsts(await collect(results))

    assert run(main) == [10, 20, 30, 40, 50, 60]


def test_it_is_a_description_that_can_be_run_again_and_extended(run, anydevice):
    async def main():
        plus = aiogpu.pipeline(list(vectors(3))).map(lambda x: x + 1)
        times = plus.map(lambda x: x * 10)
        for _ in range(2):
            async with plus as results:
                assert firsts(await collect(results)) == [1, 2, 3]
                with pytest.raises(RuntimeError, match="running already"):
                    await plus.__aenter__()
            async with times as results:
                assert firsts(await collect(results)) == [10, 20, 30]

    run(main)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"size": 3}, [[0, 1, 2], [3, 4, 5], [6]]),
        ({"size": 3, "drop_last": True}, [[0, 1, 2], [3, 4, 5]]),
        ({"size": 7}, [[0, 1, 2, 3, 4, 5, 6]]),
        ({"size": 1}, [[0], [1], [2], [3], [4], [5], [6]]),
        ({"size": 4, "collate": sum}, [6, 15]),
    ],
)
def test_batches(run, anydevice, arguments, expected):
    async def main():
        async with aiogpu.pipeline(range(7)).batch(**arguments) as results:
            return [x.tolist() if isinstance(x, torch.Tensor) else x for x in await collect(results)]

    assert run(main) == expected


def test_batches_are_collated_as_torch_does_it(run_asyncio, anydevice):
    async def main():
        source = [{"x": torch.full((2, 3), i), "y": i, "name": f"n{i}"} for i in range(4)]
        async with aiogpu.pipeline(source).batch(4) as results:
            (batch,) = await collect(results)
        assert batch["x"].shape == (4, 2, 3)
        assert batch["y"].tolist() == [0, 1, 2, 3]
        assert batch["name"] == ["n0", "n1", "n2", "n3"]

    run_asyncio(main)


def test_a_lambda_around_a_coroutine_function_is_awaited(run, anydevice):
    async def fetch(key, x):
        await anyio.lowlevel.checkpoint()
        return x * key

    async def main():
        async with aiogpu.pipeline(range(4)).map(lambda x: fetch(10, x), concurrency=2) as results:
            return await collect(results)

    assert run(main) == [0, 10, 20, 30]


# -- concurrency ---------------------------------------------------------------------------------------


def test_a_stage_works_on_as_many_items_as_it_may_and_no_more(run, anydevice):
    async def main():
        together = threading.Barrier(4)
        lock = threading.Lock()
        now = most = 0

        def work(x):
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            together.wait(LIMIT)
            with lock:
                now -= 1
            return x

        async with aiogpu.pipeline(range(16)).map(work, concurrency=4) as results:
            assert await collect(results) == list(range(16))
        assert most == 4

    run(main)


@pytest.mark.parametrize("ordered", [True, False])
def test_in_order_or_as_completed(run, anydevice, ordered):
    async def main():
        first_may_go = anyio.Event()

        async def work(x):
            if x == 0:
                await first_may_go.wait()
            elif x == 2:
                first_may_go.set()
            else:
                await anyio.lowlevel.checkpoint()
            return x

        async with aiogpu.pipeline(range(5)).map(work, concurrency=3, ordered=ordered) as results:
            return await collect(results)

    got = run(main)
    assert sorted(got) == [0, 1, 2, 3, 4]
    assert (got == sorted(got)) is ordered


@pytest.mark.parametrize("buffer", [0, 1, 3])
def test_a_consumer_that_stands_still_stops_everything_behind_it(run, anydevice, until, buffer):
    """Each stage holds ``concurrency + buffer`` items, and the source as many as a stage of one."""
    made = []

    def source():
        for number in range(100):
            made.append(number)
            yield number

    async def main():
        chain = aiogpu.pipeline(source(), buffer=buffer).map(lambda x: x, concurrency=2)
        async with chain.map(lambda x: x) as results:
            bound = (1 + buffer) + (2 + buffer) + (1 + buffer)
            await until(lambda: len(made) == bound)
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            assert len(made) == bound
            assert await anext(results) == 0
            await until(lambda: len(made) == bound + 1)
            assert await collect(results) == list(range(1, 100))

    run(main)


def test_items_are_let_go_of_when_they_have_passed(run, anydevice, until):
    alive: weakref.WeakSet[Item] = weakref.WeakSet()

    def source():
        for _ in range(20):
            item = Item()
            alive.add(item)
            yield item
            del item

    async def main():
        async with (
            aiogpu.pipeline(source(), buffer=0).map(lambda x: x).to_device().map_gpu(lambda x: x) as results
        ):
            async for item in results:
                del item
                assert len(alive) <= 1 + 1 + 2 + 1 + 1
            await until(lambda: not alive)

    gc.disable()
    try:
        run(main)
    finally:
        gc.enable()


class Item:
    """Something that passes by identity, and whose life can be watched."""


# -- overlap -------------------------------------------------------------------------------------------


def three_stages(vd: Any, count: int) -> Any:
    async def compute(x):
        y = torch.empty_like(x)
        vd.launch(lambda: y.copy_(x * 2), duration=1.0, reads=[x], writes=[y])
        return y

    return aiogpu.pipeline(avectors(count)).to_device().map_gpu(compute).to_host()


def test_upload_compute_and_download_of_different_items_overlap(run, vd):
    """C19: each takes a second; one after the other, twenty items would take sixty."""
    vd.copy_seconds, vd.races = 1.0, False  # memory is used again
    got = []

    async def program():
        async with three_stages(vd, 20) as results:
            async for result in results:
                got.append(float(result[0]))

    async def main():
        return await timed(vd, program, tick=0.25)

    assert run(main) <= 20 * 1.15
    assert got == [2.0 * number for number in range(20)]


def test_the_slowest_stage_sets_the_pace_and_the_statistics_say_which_it_is(run, vd):
    vd.copy_seconds, vd.races = 0.25, False

    async def program():
        async with three_stages(vd, 20) as results:
            await collect(results)

    async def main():
        return await timed(vd, program, tick=0.25)

    assert run(main) <= 20 * 1.15


# -- order and memory ----------------------------------------------------------------------------------


def test_each_stage_is_ordered_after_the_one_before_it(run, vd, moving):
    """The race detector looks at every access: up, two computing stages, a stage of the user's, down."""
    held = list(vectors(12))  # memory that is used again would look like a race

    async def add(x):
        y = torch.zeros_like(x)
        held.extend([x, y])
        vd.launch(lambda: y.copy_(x + 1), reads=[x], writes=[y])
        return y

    async def again(items):
        async for x in items:
            yield await add(x)

    @aiogpu.task
    async def main():
        chain = aiogpu.pipeline(held[:]).to_device().map_gpu(add).map_gpu(add, concurrency=2)
        async with chain.then(again).to_host() as results:
            return firsts(await collect(results))

    with moving(vd):
        assert run(main) == [number + 3 for number in range(12)]


def test_the_consumer_is_ordered_after_the_last_stage(run, vd, moving):
    seen: list[float] = []

    held = list(vectors(6))

    async def compute(x):
        y = torch.zeros(1)
        vd.launch(lambda: y.copy_(x[:1] * 2), reads=[x], writes=[y])
        held.extend([x, y])
        return y

    @aiogpu.task
    async def main():
        async with aiogpu.pipeline(held[:]).to_device().map_gpu(compute) as results:
            async for y in results:
                read(vd, y, seen)
        await aiogpu.synchronize()

    with moving(vd):
        run(main)
    assert seen == [0, 2, 4, 6, 8, 10]


def test_results_of_tasks_in_a_host_stage_are_safe_on_the_next_stages_stream(run, vd):
    """A decorated function's result is otherwise ordered for its parent, and the stages are not that.

    The device moves only when nothing else can happen, so nothing is in order by chance.
    """
    held = []

    @aiogpu.task
    async def produce(number):
        x = torch.zeros(1)
        write(vd, x, number)
        held.append(x)
        return x

    async def compute(x):
        y = torch.zeros(1)
        vd.launch(lambda: y.copy_(x * 2), reads=[x], writes=[y])
        held.append(y)
        return y

    @aiogpu.task
    async def program():
        stages = aiogpu.pipeline(aiter_of(range(8))).map(produce)
        async with stages.map_gpu(compute).to_host() as results:
            assert firsts(await collect(results)) == [2.0 * number for number in range(8)]

    async def main():
        await timed(vd, program, tick=1.0)

    run(main)


async def aiter_of(items: Any) -> Any:
    for item in items:
        yield item


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_map_gpu_does_not_run_ahead_of_the_device(run, vd, until, kind):
    """C63: nothing ends on the device, and only so much is launched."""
    launched = []

    def launch(x):
        vd.launch()
        launched.append(x)
        return x

    async def alaunch(x):
        return launch(x)

    async def main():
        stage = launch if kind == "sync" else alaunch
        async with aiogpu.pipeline(range(30), buffer=20).map_gpu(stage, run_ahead=3):
            await until(lambda: len(launched) == 4)
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            assert len(launched) == 4

    go(run, vd, main)


def test_launches_of_map_gpu_come_from_worker_threads_on_its_own_stream(run, vd, moving):
    streams, threads = set(), set()

    def compute(x):
        streams.add(vd.current().raw)
        threads.add(threading.get_ident())
        return x

    @aiogpu.task
    async def main():
        async with aiogpu.pipeline(vectors(5)).map_gpu(compute) as results:
            await collect(results)
            streams.add(vd.current().raw)

    with moving(vd):
        run(main)
    assert len(streams) == 2
    assert threading.get_ident() not in threads


# -- failures ------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def fails_at_5(x: torch.Tensor) -> torch.Tensor:
    if x[0] == 5:
        raise Broken("on purpose")
    return x


async def afails_at_5(x: torch.Tensor) -> torch.Tensor:
    await anyio.lowlevel.checkpoint()
    return fails_at_5(x)


async def flow_fails_at_5(items: Any) -> Any:
    async for x in items:
        yield fails_at_5(x)


def source_fails_at_5() -> Any:
    for x in vectors(100):
        yield fails_at_5(x)


async def asource_fails_at_5() -> Any:
    for x in vectors(100):
        await anyio.lowlevel.checkpoint()
        yield fails_at_5(x)


FAILING = {
    "source": (lambda: aiogpu.pipeline(source_fails_at_5()), r"stage 0, the source, a generator, declared"),
    "asource": (
        lambda: aiogpu.pipeline(asource_fails_at_5()),
        "stage 0, the source, a async_generator, declared",
    ),
    "map": (
        lambda: aiogpu.pipeline(vectors(100)).map(fails_at_5, concurrency=3),
        r"stage 1, map\(fails_at_5\), declared",
    ),
    "amap": (
        lambda: aiogpu.pipeline(vectors(100)).to_device().map(afails_at_5),
        r"stage 2, map\(afails_at_5\), declared",
    ),
    "gpu": (
        lambda: aiogpu.pipeline(vectors(100)).map_gpu(fails_at_5, name="model").to_host(),
        r"stage 1, map_gpu\(model\), declared",
    ),
    "flow": (
        lambda: aiogpu.pipeline(vectors(100)).then(flow_fails_at_5).map(lambda x: x),
        r"stage 1, then\(flow_fails_at_5\), declared",
    ),
}


@pytest.mark.parametrize("which", FAILING)
def test_a_failure_keeps_its_type_names_its_stage_and_item_and_comes_in_its_place(run, anydevice, which):
    make, where = FAILING[which]

    async def main():
        got = []
        async with make() as results:
            with pytest.raises(Broken, match="on purpose") as caught:
                await put_into(got, results)
            assert await collect(results) == []
        assert firsts(got) == [0, 1, 2, 3, 4]
        (note,) = caught.value.__notes__
        assert re.fullmatch(rf"aiogpu: pipeline {where} at .*test_pipelines.py:\d+, item 5", note), note
        line = int(re.search(r":(\d+), item", note)[1])  # type: ignore[index]
        assert "aiogpu.pipeline(" in LINES[line - 1]

    run(main)


def test_items_that_do_not_fit_into_one_batch_say_which(run, anydevice):
    """Batches of changing structure."""

    def source():
        yield from [torch.zeros(3)] * 5
        yield torch.zeros(4)

    async def main():
        async with aiogpu.pipeline(source()).batch(2) as results:
            assert (await anext(results)).shape == (2, 3)
            assert (await anext(results)).shape == (2, 3)
            with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size") as caught:
                await anext(results)
        assert "stage 1, batch(2)" in caught.value.__notes__[-1]
        assert caught.value.__notes__[-1].endswith("item 5")
        assert "batch of 2 items" in caught.value.__notes__[0]

    run(main)


def test_what_cannot_be_uploaded_says_which(run, anydevice):
    async def main():
        source = [torch.zeros(3), torch.zeros(3, device="meta")]
        async with aiogpu.pipeline(source).to_device() as results:
            await anext(results)
            with pytest.raises((TypeError, ValueError), match="meta") as caught:
                await anext(results)
        assert "stage 1, to_device()" in caught.value.__notes__[-1]
        assert caught.value.__notes__[-1].endswith("item 1")

    run(main)


def test_a_users_stage_may_clean_up_after_an_error_of_an_earlier_one(run, anydevice):
    cleaned = []

    async def careful(items):
        try:
            async for item in items:
                yield item
        except Broken:
            cleaned.append("seen")
            raise
        finally:
            cleaned.append("finally")

    async def main():
        async with aiogpu.pipeline(vectors(9)).map(fails_at_5).then(careful) as results:
            with pytest.raises(Broken) as caught:
                await collect(results)
        assert len(caught.value.__notes__) == 1
        assert "stage 1, map(fails_at_5)" in caught.value.__notes__[0]

    run(main)
    assert cleaned == ["seen", "finally"]


def test_a_users_stage_may_replace_or_end_on_an_error(run, anydevice):
    async def forgiving(items):
        try:
            async for item in items:
                yield item
        except Broken:
            yield torch.full((8,), -1.0)

    async def main():
        async with aiogpu.pipeline(vectors(9)).map(fails_at_5).then(forgiving) as results:
            return firsts(await collect(results))

    assert run(main) == [0, 1, 2, 3, 4, -1]


def test_a_users_stage_may_end_early(run, anydevice):
    async def first_three(items):
        count = 0
        async for item in items:
            yield item
            count += 1
            if count == 3:
                return

    async def main():
        async with aiogpu.pipeline(vectors(10_000)).then(first_three).to_host() as results:
            return firsts(await collect(results))

    assert run(main) == [0, 1, 2]


def test_a_function_that_cancels_itself_is_a_failure_not_a_hang(run_asyncio, anydevice):
    async def cancels(x):
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async def main():
        async with aiogpu.pipeline(vectors(5)).map(cancels).map(lambda x: x).to_device() as results:
            with pytest.raises(asyncio.CancelledError) as caught:
                await anext(results)
        assert "stage 1, map(" in caught.value.__notes__[0]

    run_asyncio(main)


def test_after_a_failure_nothing_is_running_even_before_the_block_is_left(run, anydevice, until):
    closed = []

    def source():
        try:
            yield from vectors(10_000)
        finally:
            closed.append(True)

    async def main():
        async with aiogpu.pipeline(source()).map(fails_at_5).to_device() as results:
            with pytest.raises(Broken):
                await collect(results)
            await until(lambda: closed)

    run(main)


def test_a_failing_stage_with_others_at_work_waits_for_the_items_before(run, anydevice):
    async def main():
        may_go = anyio.Event()

        async def work(x):
            if x == 0:
                await may_go.wait()
            if x == 1:
                may_go.set()
                raise Broken("on purpose")
            return x

        got = []
        async with aiogpu.pipeline(range(10)).map(work, concurrency=2) as results:
            with pytest.raises(Broken):
                await put_into(got, results)
        assert got == [0]

    run(main)


def test_as_completed_a_sources_failure_still_comes_behind_the_items_before_it(run, anydevice, until):
    async def main():
        failed, may_go = [], anyio.Event()

        async def source():
            yield 0
            failed.append(True)
            raise Broken("on purpose")

        async def work(x):
            await may_go.wait()
            return x

        async with aiogpu.pipeline(source()).map(work, concurrency=2, ordered=False) as results:
            await until(lambda: failed)
            for _ in range(30):
                await anyio.lowlevel.checkpoint()
            may_go.set()
            assert await anext(results) == 0
            with pytest.raises(Broken):
                await anext(results)

    run(main)


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (
            lambda: aiogpu.pipeline(None),
            TypeError,
            "any sync or async iterable as its source, not a NoneType",
        ),
        (lambda: aiogpu.pipeline(vectors), TypeError, r"call it, pipeline\(vectors"),
        (lambda: aiogpu.pipeline([], buffer=-1), ValueError, "buffer must be at least 0"),
        (lambda: aiogpu.pipeline([]).map(3), TypeError, r"map\(\) takes a function as its fn, not a int"),
        (lambda: aiogpu.pipeline([]).map(len, concurrency=0), ValueError, "concurrency must be at least 1"),
        (lambda: aiogpu.pipeline([]).batch(0), ValueError, "size must be at least 1"),
        (lambda: aiogpu.pipeline([]).batch(2, collate=3), TypeError, "a function as its collate"),
        (lambda: aiogpu.pipeline([]).to_device("mars"), ValueError, "is not a device"),
        (lambda: aiogpu.pipeline([]).map_gpu(None), TypeError, r"map_gpu\(\) takes a function"),
        (lambda: aiogpu.pipeline([]).map_gpu(len, run_ahead=-1), ValueError, "run_ahead"),
        (lambda: aiogpu.pipeline([]).then(len), TypeError, "an async generator function of the items"),
        (lambda: aiogpu.pipeline([]).then(afails_at_5), TypeError, r"use map\(\) or map_gpu\(\)"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_call(build, error, match):
    with pytest.raises(error, match=match):
        build()


# -- leaving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["break", "exception", "cancelled"])
def test_leaving_ends_every_stage(run, anydevice, until, how):
    ended = []
    error = Broken("from the block")

    def source():
        try:
            yield from vectors(10_000)
        finally:
            ended.append("source")

    async def stage(items):
        try:
            async for item in items:
                yield item
        finally:
            ended.append("stage")

    async def work(x):
        try:
            await anyio.lowlevel.checkpoint()
            if x[0] == 7:
                await anyio.sleep_forever()
            return x
        except anyio.get_cancelled_exc_class():
            ended.append("work")
            raise

    async def consume():
        chain = aiogpu.pipeline(source()).map(work).then(stage).to_device().map_gpu(lambda x: x)
        async with chain.to_host() as results:
            async for result in results:
                if result[0] == 3:
                    await until(lambda: results.stats()[1].items == 7)
                    if how == "break":
                        break
                    if how == "exception":
                        raise error
                    await anyio.sleep_forever()

    async def main():
        if how == "exception":
            with pytest.raises(Broken) as caught:
                await consume()
            assert caught.value is error
        elif how == "cancelled":
            async with anyio.create_task_group() as group:
                group.start_soon(consume)
                for _ in range(50):
                    await anyio.lowlevel.checkpoint()
                await until(lambda: True)
                group.cancel_scope.cancel()
        else:
            await consume()

    run(main)
    assert "source" in ended or how == "cancelled"
    if how != "cancelled":
        assert sorted(ended) == ["source", "stage", "work"]


def test_a_block_that_takes_nothing_can_be_left(run, anydevice):
    async def main():
        async with aiogpu.pipeline(vectors(100)).map(lambda x: x).to_device().to_host():
            pass

    run(main)


def test_a_function_that_does_not_return_is_named(run, anydevice, until, short_grace, abandoned):
    running, release = threading.Event(), threading.Event()

    def stuck(x):
        running.set()
        assert release.wait(LIMIT)

    async def main():
        async with aiogpu.pipeline(range(3)).map(stuck):
            await until(running.is_set)
        release.set()

    run(main)
    (line,) = abandoned
    assert re.match(
        r"aiogpu: pipeline stage 1, map\(.*stuck\), declared at .*:\d+ had not returned 0.1 s", line
    )


# -- statistics ----------------------------------------------------------------------------------------


def test_statistics_tell_what_each_stage_has_done(run, anydevice):
    async def main():
        chain = aiogpu.pipeline(vectors(12)).map(lambda x: x, concurrency=2).batch(4).to_device()
        async with chain.map_gpu(torch.neg, name="model").to_host() as results:
            await collect(results)
            stats = results.stats()
        assert [s.name for s in stats] == [
            "source(generator)",
            "map(test_statistics_tell_what_each_stage_has_done.<locals>.main.<locals>.<lambda>)",
            "batch(4)",
            "to_device()",
            "map_gpu(model)",
            "to_host()",
        ]
        assert [s.items for s in stats] == [12, 12, 3, 3, 3, 3]
        assert [s.concurrency for s in stats] == [1, 2, 1, 2, 1, 2]
        assert all(re.search(r"test_pipelines.py:\d+$", s.declared) for s in stats)
        for s in stats:
            assert min(s.busy_seconds, s.input_seconds, s.output_seconds) >= 0
            assert 0 <= s.utilization <= 1
            assert s.waiting == 0

    run(main)


def test_the_busy_stage_is_told_from_those_that_wait_for_it(run_asyncio, anydevice, until):
    async def main():
        busy, release = threading.Event(), threading.Event()

        def slow(x):
            busy.set()
            assert release.wait(LIMIT)
            return x

        async with aiogpu.pipeline(range(9)).map(lambda x: x).map(slow).map(lambda x: x) as results:
            await until(busy.is_set)
            await until(lambda: results.stats()[1].waiting == 2)
            release.set()
            await collect(results)
            _, before, slow_stage, after = results.stats()
        assert slow_stage.busy_seconds > 0
        assert before.output_seconds > 0
        assert after.input_seconds > 0

    run_asyncio(main)


@pytest.mark.parametrize("rich", [True, False])
def test_the_table_needs_no_rich_but_uses_it(run_asyncio, anydevice, capsys, monkeypatch, rich):
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)

    async def main():
        async with aiogpu.pipeline(vectors(3)).map(abs, name="absolute").to_device() as results:
            await collect(results)
            results.print_stats()

    run_asyncio(main)
    printed = capsys.readouterr().out
    assert "map(absolute)" in printed
    assert "to_device()" in printed
    assert ("┏" in printed) is rich
