"""Streams: whose is current, which work overlaps, and what orders it where nobody said so."""

from __future__ import annotations

import asyncio
import time
import warnings

import anyio
import pytest
import torch

import aiogpu
from aiogpu._engine import Engine

from ._tools import (
    ON_GPU,
    Slow,
    asynchronous,
    filled,
    mark,
    needs_bindings,
    no_race_detector,
    same_bytes,
    tick,
    unsanitized,
)
from .conftest import Loop

pytestmark = ON_GPU

MIB = 1 << 20


# -- whose stream is current -----------------------------------------------------------------------


def test_every_task_sees_its_own_stream_after_every_await_and_nobody_elses(run: Loop, slow: Slow) -> None:
    """C21: tasks side by side, an undecorated coroutine between them."""
    seen: dict[int, set[int]] = {}
    plain: set[int] = set()

    @aiogpu.task
    async def task(index: int) -> None:
        mine = seen.setdefault(index, set())
        for step in range(30):
            mine.add(torch.cuda.current_stream().cuda_stream)
            if step % 3 == 0:
                slow(0.1)
                await aiogpu.synchronize()
            elif step % 3 == 1:
                await aiogpu.to_device(torch.zeros(3))
            else:
                await tick()

    async def undecorated() -> None:
        for _ in range(60):
            plain.add(torch.cuda.current_stream().cuda_stream)
            await tick()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for index in range(6):
                group.start_soon(task, index)
            group.start_soon(undecorated)

    run(main)
    handles = [next(iter(streams)) for streams in seen.values()]
    assert all(len(streams) == 1 for streams in seen.values()), f"a task changed its stream: {seen}"
    assert len(set(handles)) == 6, f"six tasks at once share streams: {handles}"
    assert plain == {torch.cuda.default_stream().cuda_stream}, f"undecorated code saw {plain}"


def test_callbacks_of_the_loop_see_the_default_stream(slow: Slow) -> None:
    """C21 with ``call_soon``, scheduled from inside a task."""
    seen: list[int] = []

    @aiogpu.task
    async def main() -> None:
        for _ in range(10):
            asyncio.get_running_loop().call_soon(lambda: seen.append(torch.cuda.current_stream().cuda_stream))
            slow(0.1)
            await aiogpu.synchronize()

    asyncio.run(main())
    assert len(seen) == 10
    assert set(seen) == {torch.cuda.default_stream().cuda_stream}


def test_two_hundred_tasks_on_eight_streams_are_right_and_end(run: Loop, slow: Slow, engine: Engine) -> None:
    """C23: beyond the pool streams are shared, in order, and counted."""
    shared = engine.compute.shared

    @aiogpu.task
    async def task(index: int) -> int:
        x = torch.full((1000,), index, device="cuda")
        slow(0.2)
        await aiogpu.synchronize()
        x += await aiogpu.to_device(torch.full((1000,), 1))
        return int(await aiogpu.item(x.sum()))

    async def main() -> None:
        totals = await aiogpu.gather(*[task(index) for index in range(200)])
        assert totals == tuple(1000 * (index + 1) for index in range(200))

    run(main)
    assert engine.compute.shared > shared, "no stream was shared: nothing was tested"
    assert engine.compute.opened <= 2 * engine.settings.streams, "more streams than the limit (per priority)"


@needs_bindings
def test_streams_that_shall_be_distinct_are(run_asyncio: Loop, engine: Engine) -> None:
    """C23: torch hands out 32 streams and then the same ones again; ours are as many as there are."""
    pools = {"compute": engine.compute, "uploads": engine.uploads, "downloads": engine.downloads}
    for pool in (*pools.values(), engine.sides):
        pool.open(pool.limit)
    streams = [stream for pool in (*pools.values(), engine.sides) for stream in pool.streams()]
    handles = [stream.native.cuda_stream for stream in streams]
    assert len(set(handles)) == len(handles), f"{len(handles) - len(set(handles))} handles occur twice"
    assert not {0, 1, 2} & set(handles), "one of them is a special stream"


def test_priority_is_that_of_the_stream(run: Loop) -> None:
    """As in torch: lower is more urgent."""

    async def priority() -> int:
        await tick()
        return torch.cuda.current_stream().priority

    async def main() -> None:
        assert await aiogpu.task(priority)() == 0
        assert await aiogpu.task(priority=-1)(priority)() == -1

        @aiogpu.task
        async def block() -> int:
            with aiogpu.stream(priority=-1):
                return await priority()

        assert await block() == -1

    run(main)


# -- order -----------------------------------------------------------------------------------------


@no_race_detector
def test_work_on_the_default_stream_comes_before_the_task_that_uses_it(run_asyncio: Loop, slow: Slow) -> None:
    """C25: 20 times five children; they read what 50 ms of slow work precedes."""

    @aiogpu.task
    async def child(x: torch.Tensor) -> int:
        return int(await aiogpu.item(await aiogpu.run_sync(x.sum)))

    async def main() -> None:
        for repeat in range(1, 21):
            tensors = [torch.zeros(1000 + i, dtype=torch.int64, device="cuda") for i in range(5)]
            slow()
            for i, x in enumerate(tensors):
                x.fill_(repeat * 10 + i)
            sums = await aiogpu.gather(*map(child, tensors))
            assert sums == tuple((1000 + i) * (repeat * 10 + i) for i in range(5)), f"repeat {repeat}: {sums}"

    run_asyncio(main)


def test_work_on_the_surrounding_stream_comes_before_the_task_that_uses_it(run: Loop, slow: Slow) -> None:
    """C25 where the code around the task has chosen a (non-blocking) stream of torch's."""

    @aiogpu.task
    async def child(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    async def main() -> None:
        side = torch.cuda.Stream()
        for repeat in range(10):
            with torch.cuda.stream(side):
                x = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
                slow()
                x.fill_(repeat)
                y = await child(x)
                filled(await aiogpu.to_host(y), repeat + 1, f"repeat {repeat}")

    run(main)


def test_a_childs_slow_work_comes_before_the_parent_that_awaited_it(run: Loop, slow: Slow) -> None:
    """Law 6 with real streams, for each way of starting and awaiting a child."""

    @aiogpu.task
    async def child(x: torch.Tensor, value: int) -> torch.Tensor:
        slow()
        x.fill_(value)
        return x * 2

    @aiogpu.task
    async def main() -> None:
        for value in range(1, 6):
            x = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
            y = await child(x, value)
            filled(await aiogpu.to_host(x + y), 3 * value, "a plain await")
            x = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
            (y,) = await aiogpu.gather(child(x, value))
            filled(await aiogpu.to_host(x + y), 3 * value, "gather")
            x = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
            async with anyio.create_task_group() as group:
                group.start_soon(child, x, value)
            filled(await aiogpu.to_host(x + x), 2 * value, "a task group")

    run(main)


@needs_bindings
@no_race_detector
def test_an_undecorated_coroutine_reads_a_tasks_data_right(run: Loop, slow: Slow) -> None:
    """Law 7: on the default stream, behind the tasks' streams: slow, not wrong. Five runs of five."""
    results: list[torch.Tensor] = []

    async def undecorated(x: torch.Tensor) -> None:
        assert torch.cuda.current_stream() == torch.cuda.default_stream(), "not on the ambient stream"
        results.append((x + 1).cpu())

    @aiogpu.task
    async def main(value: int) -> None:
        x = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
        await aiogpu.synchronize()
        slow()
        x.fill_(value)
        async with anyio.create_task_group() as group:
            group.start_soon(undecorated, x)

    for value in range(5):
        run(main, value)
        filled(results[-1], value + 1, f"run {value}")


# -- overlap ---------------------------------------------------------------------------------------


@pytest.mark.timing
@asynchronous
@unsanitized
def test_two_kernels_of_50_ms_in_two_tasks_take_50_ms(run: Loop, slow: Slow) -> None:
    @aiogpu.task
    async def task() -> None:
        slow(50)
        await aiogpu.synchronize()

    async def main() -> float:
        await aiogpu.gather(task(), task())
        begin = time.perf_counter()
        await aiogpu.gather(task(), task())
        return time.perf_counter() - begin

    took = min(run(main) for _ in range(2))
    assert 0.045 < took < 0.080, f"two kernels of 50 ms took {took * 1e3:.1f} ms"


@asynchronous
@unsanitized
@needs_bindings
def test_no_call_of_ours_puts_anything_on_the_legacy_stream(
    run_asyncio: Loop, slow: Slow, engine: Engine
) -> None:
    """Anything there waits for every task's stream: here for a kernel of 1 s, beside which all this ends."""
    host, large = torch.ones(100), torch.ones(MIB)

    @aiogpu.task
    async def child(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        await aiogpu.synchronize()
        return x + 1, {"y": x * 2}

    @aiogpu.task
    async def everything() -> torch.Tensor:
        x = await aiogpu.to_device(host)
        y = await aiogpu.to_device({"large": large, "list": [large, 3]})
        await aiogpu.to_host(x)
        await aiogpu.to_host(y)
        await aiogpu.to_host(x, dtype=torch.float16)
        await aiogpu.copy_(x, host)
        await aiogpu.copy_(y["large"], large)
        assert await aiogpu.item(x.sum()) == 100
        z, more = await child(x)
        results = await aiogpu.gather(*[child(z) for _ in range(3)])
        await aiogpu.run_sync(torch.matmul, z.view(10, 10), more["y"].view(10, 10))
        with aiogpu.stream():
            z = z + results[0][0]
            await aiogpu.synchronize()
        event = mark()
        await aiogpu.synchronize(event)
        await aiogpu.synchronize(torch.cuda.current_stream())
        return z

    @aiogpu.task
    async def long(ready: anyio.Event) -> torch.cuda.Event:
        slow(1000)
        ready.set()
        return mark()

    async def main() -> None:
        for _ in range(3):  # memory, libraries, page-locked results
            await everything()
        ready = anyio.Event()
        end = await long(ready)
        for _ in range(5):
            result = await everything()
            del result
        assert not end.query(), "five rounds of every call ended only after another task's kernel of 1 s"
        await aiogpu.synchronize("cuda")

    run_asyncio(main)


# -- waiting for what others made ------------------------------------------------------------------


@asynchronous
def test_an_event_is_awaited_as_it_was_recorded_at_the_call(run: Loop, slow: Slow, engine: Engine) -> None:
    """C26: recorded anew, behind longer work, while it is awaited: the wait ends with the first record."""

    async def wait(event: torch.cuda.Event) -> None:
        await aiogpu.synchronize(event)
        assert first.query(), "the wait ended before the work that the event followed"
        assert not second.query(), "the wait ended only after the second record"
        ended.append(True)

    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    ended: list[bool] = []

    async def main() -> None:
        nonlocal first, second
        event = torch.cuda.Event()
        with torch.cuda.stream(one):
            slow(100)
            event.record(one)
            first = mark()
        async with anyio.create_task_group() as group:
            group.start_soon(wait, event)
            await anyio.wait_all_tasks_blocked()
            with torch.cuda.stream(two):
                slow(600)
                event.record(two)
                second = mark()

    first = second = torch.cuda.Event()
    run(main)
    assert ended == [True]
    torch.cuda.synchronize()


@asynchronous
def test_streams_of_every_origin_can_be_awaited(run: Loop, slow: Slow) -> None:
    """C26: torch's own, a raw handle wrapped, the default stream; each wait ends after its work."""

    async def main() -> None:
        own = torch.cuda.Stream()
        for stream in (own, torch.cuda.ExternalStream(own.cuda_stream), torch.cuda.default_stream()):
            with torch.cuda.stream(stream):
                slow()
                end = mark()
            await aiogpu.synchronize(stream)
            assert end.query(), f"the wait for {stream} ended before its work"

    run(main)


@asynchronous
def test_an_integer_is_a_device_and_never_a_handle(run: Loop, slow: Slow) -> None:
    """C26: awaiting device 0 covers streams that aiogpu has never seen; a handle is refused."""

    async def main() -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            slow()
            end = mark()
        await aiogpu.synchronize(torch.cuda.current_device())
        assert end.query(), "the wait for the device ended before the work of one of its streams"
        for handle in (side.cuda_stream, 1 << 40):  # the low byte of the second is that of device 0
            with pytest.raises((ValueError, RuntimeError, TypeError)):
                await aiogpu.synchronize(handle)

    run(main)


def test_an_event_that_was_never_recorded_is_complete(run: Loop) -> None:
    async def main() -> None:
        await aiogpu.synchronize(torch.cuda.Event())

    run(main)


@asynchronous
def test_a_cupy_stream_is_awaited_through_its_handle(run: Loop, slow: Slow) -> None:
    """C26: CuPy's memset on CuPy's stream, behind slow work; complete when the await returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cupy = pytest.importorskip("cupy", reason="cupy is not installed", exc_type=ImportError)
        theirs = cupy.cuda.Stream(non_blocking=True)

    async def main() -> None:
        stream = torch.cuda.ExternalStream(theirs.ptr)
        x = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            slow()
        cupy.cuda.runtime.memsetAsync(x.data_ptr(), 7, MIB, theirs.ptr)
        assert not theirs.done
        await aiogpu.synchronize(stream)
        assert theirs.done, "the wait ended before CuPy's work"
        filled(await aiogpu.to_host(x), 7, "CuPy's memset")

    run(main)


def test_a_block_on_a_users_stream_is_forked_and_joined(run: Loop, slow: Slow) -> None:
    @aiogpu.task
    async def main() -> None:
        side = torch.cuda.Stream()
        for value in range(1, 6):
            x = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
            slow(20)
            x.fill_(value)
            with aiogpu.stream(side):
                assert torch.cuda.current_stream() == side
                y = aiogpu.share(x) + 1
                await tick()
                assert torch.cuda.current_stream() == side
                slow(20)
                y += 1
            z = aiogpu.share(y) + 1
            same_bytes(await aiogpu.to_host(z), torch.full((MIB,), value + 3, dtype=torch.uint8), "joined")

    run(main)
