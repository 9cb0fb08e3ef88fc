"""``await op.ordered()``: usable on the current stream as soon as the work is enqueued, with no host wait.

On the virtual device, which stands still unless told to move: what returns there has not waited for it, and a
kernel that is not ordered after the copy raises at its submission.
"""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from _kernels import go, read, write

import aiogpu
from aiogpu._operation import TRANSITIONS, Happening, Operation, State
from aiogpu.testing import RaceError

SIZES = {"small": 8, "large": 50_000}
sized = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


def source(size: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((size,), value)


@contextmanager
def staging_held(engine: Any) -> Iterator[Callable[[], None]]:
    """Within the block no staging thread takes up a transfer, or until what it yields is called."""
    submit = engine.staging.submit
    held: list[Any] = []
    engine.staging.submit = lambda *job, **how: held.append((job, how))

    def release() -> None:
        engine.staging.submit = submit
        while held:
            job, how = held.pop(0)
            submit(*job, **how)

    try:
        yield release
    finally:
        release()


# -- the promise -------------------------------------------------------------------------------------------


@sized
def test_it_returns_before_the_device_has_moved_and_the_value_is_right_behind_it(run, vd, size):
    @aiogpu.task
    async def main():
        operation = aiogpu.to_device(source(size, 7.0))
        x = await operation.ordered()
        assert not operation.done()
        read(vd, x[:1], seen)

    seen: list[float] = []
    go(run, vd, main)
    assert seen == [7.0]


@sized
def test_another_tasks_stream_is_ordered_after_it_too(run, vd, size):
    """The operation is started on one stream and used on another."""

    @aiogpu.task
    async def user(operation: Any):
        read(vd, (await operation.ordered())[:1], seen)

    @aiogpu.task
    async def main():
        operation = aiogpu.to_device(source(size, 3.0))
        await aiogpu.gather(*(user(operation) for _ in range(3)))
        assert not operation.done()
        vd.run_all()  # its own stream is not ordered after it: a task's end would wait for the device

    seen: list[float] = []
    go(run, vd, main)
    assert seen == [3.0] * 3


def test_without_it_the_same_kernel_is_a_race(run, vd, until):
    """What the tests above rely on."""

    @aiogpu.task
    async def main():
        operation = aiogpu.to_device(source(50_000))
        operation._awaited = True
        await until(lambda: operation._state is State.IN_FLIGHT)
        with pytest.raises(RaceError):
            read(vd, operation._value)
        vd.run_all()

    go(run, vd, main)


@sized
def test_copy_in_place_is_usable_on_the_current_stream(run, vd, size):
    @aiogpu.task
    async def main():
        target = torch.zeros(size)
        write(vd, target, 5.0)
        operation = aiogpu.copy_(target, source(size, 2.0))
        if size == SIZES["large"]:  # a large one is handed over when what is before it has finished
            vd.run_all()
        assert await operation.ordered() is target
        assert not operation.done()
        read(vd, target[:1], seen)

    seen: list[float] = []
    go(run, vd, main)
    assert seen == [2.0]


def test_containers_come_whole(run, vd):
    @aiogpu.task
    async def main():
        data = {"x": source(3), "y": [source(50_000, 4.0)], "label": 5}
        there = await aiogpu.to_device(data).ordered()
        assert there.keys() == data.keys()
        assert there["label"] == 5
        read(vd, there["x"])
        read(vd, there["y"][0][:1], seen)

    seen: list[float] = []
    go(run, vd, main)
    assert seen == [4.0]


def test_leaves_that_require_grad_come_so(run, vd):
    async def main():
        parameter = torch.nn.Parameter(source(50_000))
        there = await aiogpu.to_device(parameter).ordered()
        assert isinstance(there, torch.nn.Parameter)
        assert there.requires_grad
        assert there.is_leaf

    go(run, vd, main)


@sized
def test_the_memory_is_kept_for_the_stream_that_uses_it(run, vd, size, monkeypatch):
    """It was allocated on another stream: freed there, it would be overwritten under our kernels."""
    kept: list[Any] = []
    monkeypatch.setattr(vd, "keep", lambda tensor, stream: kept.append((tensor, stream)))

    @aiogpu.task
    async def user(operation: Any):
        x = await operation.ordered()
        assert any(tensor is x and stream is vd.current() for tensor, stream in kept)

    @aiogpu.task
    async def main():
        await user(aiogpu.to_device(source(size)))
        vd.run_all()

    go(run, vd, main)


def test_on_the_cpu_it_is_finished(run):
    """Compute runs at once on the calling thread there: nothing else could be right."""

    async def main():
        for size in SIZES.values():
            operation = aiogpu.to_device(source(size * 20, 2.0), "cpu")
            x = await operation.ordered()
            assert bool((x == 2.0).all())

    run(main)


def test_a_small_one_takes_one_checkpoint_and_no_more(run, vd):
    async def main():
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            await anyio.lowlevel.checkpoint()
            before = ticks
            for _ in range(20):
                await aiogpu.to_device(source(8)).ordered()
            assert ticks - before <= 21
            group.cancel_scope.cancel()

    go(run, vd, main)


# -- host values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [aiogpu.to_host, aiogpu.item], ids=["to_host", "item"])
def test_a_host_value_is_refused_at_once_with_what_to_write(run, vd, start):
    async def main():
        operation = start(torch.ones(1))
        with pytest.raises(TypeError, match=r"write `await op` instead"):
            operation.ordered()
        vd.run_all()
        await operation

    run(main)


def test_a_refused_one_still_counts_as_never_awaited(run, auto_vd, until):
    async def main():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            operation = aiogpu.to_host(torch.ones(1))
            with pytest.raises(TypeError):
                operation.ordered()
            await until(operation.done)
            del operation
            gc.collect()
        assert "never awaited" in str(caught[0].message)

    run(main)


# -- waiters -----------------------------------------------------------------------------------------------

ROADS: dict[State, list[Happening]] = {
    State.QUEUED: [],
    State.IN_FLIGHT: [Happening.SUBMIT],
    State.DONE: [Happening.SUBMIT, Happening.COMPLETE],
    State.FAILED: [Happening.SUBMIT, Happening.FAIL],
}


def happen(operation: Operation[Any], happening: Happening) -> None:
    if happening is Happening.SUBMIT:
        engine = aiogpu._engine.find_engine(torch.device("cpu"))
        stream = engine.uploads.streams()[0]
        event = engine.driver.record(stream)
        operation.submitted("value", (stream, aiogpu.current_runtime().watch(engine, stream, event)))
    elif happening is Happening.COMPLETE:
        operation.complete("value")
    else:
        operation.fail(ValueError("broken"))


@pytest.mark.parametrize(
    ("state", "happening"),
    [pytest.param(s, h, id=f"{s.name}-{h.name}") for s, h in itertools.product(State, Happening)],
)
def test_waiters_for_the_order_wake_by_the_table(run_asyncio, vd, state, happening):
    """The product of states and events: who waits for the order is woken by the first that leaves QUEUED."""

    async def main():
        operation: Operation[Any] = Operation("test", aiogpu.current_runtime().reactor)
        outcomes: list[Any] = []

        async def wait() -> None:
            try:
                outcomes.append(await operation.ordered())
            except ValueError as error:
                outcomes.append(str(error))

        async with anyio.create_task_group() as group:
            for step in ROADS[state]:
                happen(operation, step)
            group.start_soon(wait)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            early = {State.QUEUED: [], State.FAILED: ["broken"]}.get(state, ["value"])
            assert outcomes == early
            if (state, happening) in TRANSITIONS or operation.done():
                happen(operation, happening)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            late = ["broken"] if happening is Happening.FAIL else ["value"]
            assert outcomes == (early or late)
        if not operation.done():
            operation.complete("value")
        assert not operation._waiters

    go(run_asyncio, vd, main)


def test_many_tasks_many_times_and_finished_ones_beside_them(run, vd, until, engine):
    async def main():
        seen: list[Any] = []
        with staging_held(engine()) as release:
            operation = aiogpu.to_device(source(50_000))

            async def early() -> None:
                first = await operation.ordered()
                assert first is await operation.ordered()
                seen.append(first)

            async def late() -> None:
                seen.append(await operation)
                assert operation.done()

            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(early)
                    group.start_soon(late)
                await until(lambda: len(operation._waiters) == 10)
                assert not seen
                release()
                await until(lambda: len(seen) == 5)
                assert not operation.done()
                vd.run_all()
        assert len(seen) == 10
        assert all(x is seen[0] for x in seen)

    run(main)


def test_waiters_in_other_loops_wake_in_theirs(run, vd, until):
    shared: list[Any] = []
    results: list[Any] = []

    def guest() -> None:
        async def main() -> None:
            thread = threading.get_ident()
            results.append(await shared[0].ordered())
            assert threading.get_ident() == thread

        run(main)

    async def main():
        shared.append(aiogpu.to_device(source(50_000)))
        threads = [threading.Thread(target=guest) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join, 10)
        assert not shared[0].done()
        vd.run_all()
        value = await shared[0]
        assert len(results) == 3
        assert all(result is value for result in results)

    run(main)


@sized
def test_after_the_end_it_is_the_value_and_adds_no_edge(run, auto_vd, size):
    async def main():
        operation = aiogpu.to_device(source(size, 6.0))
        x = await operation
        waits = auto_vd.log.count(("wait", 0))
        assert await operation.ordered() is x
        assert auto_vd.log.count(("wait", 0)) == waits

    run(main)


def test_on_the_stream_of_a_small_copy_itself_no_edge_is_needed(run, vd):
    @aiogpu.task
    async def main():
        await aiogpu.to_device(source(8)).ordered()
        assert not [name for name, _ in vd.log if name == "wait"]

    go(run, vd, main)


@sized
def test_each_waiter_gets_an_exception_of_its_own(run, auto_vd, size):
    async def main():
        auto_vd.fail_submit(1, MemoryError("no more"))
        operation = aiogpu.to_device(source(size))
        caught = []
        for early in (True, True, False):
            with pytest.raises(MemoryError, match="no more") as info:
                await (operation.ordered() if early else operation)
            caught.append(info.value)
        assert len(set(map(id, caught))) == 3

    run(main)


def test_a_cancelled_wait_leaves_the_transfer_alone(run, vd, until, engine):
    async def main():
        with staging_held(engine()):
            operation = aiogpu.to_device(source(50_000, 8.0))
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(operation.ordered)
                    await until(lambda: operation._waiters)
                    scope.cancel()
            assert scope.cancelled_caught
            assert not operation._waiters
        x = await operation.ordered()
        vd.run_all()
        await operation
        assert x[0] == 8.0

    run(main)


def test_it_notices_a_cancellation_also_when_nothing_is_left_to_wait_for(run, vd):
    async def main():
        operation = aiogpu.to_device(source(8))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await operation.ordered()
            pytest.fail("ordered() is no checkpoint")
        assert scope.cancelled_caught

    go(run, vd, main)


def test_custody_goes_on_after_it_until_the_device_is_done(run, vd, until):
    """Source and staging memory stay, also when the handle is dropped at once."""

    async def main():
        x = source(50_000)
        reference = weakref.ref(x)
        there = await aiogpu.to_device(x).ordered()
        del x
        gc.collect()
        assert reference() is not None
        assert aiogpu.stats().staging_bytes_in_use > 0
        vd.run_all()
        await until(lambda: aiogpu.stats().pending == 0)
        gc.collect()
        await until(lambda: reference() is None)  # the staging thread may still be on its way out
        assert there[-1] == 1

    run(main)


def test_it_counts_as_awaited(run, vd, until):
    async def main():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await aiogpu.to_device(source(8)).ordered()
            vd.run_all()
            await until(lambda: aiogpu.stats().pending == 0)
            gc.collect()
        assert caught == []

    run(main)


def test_a_capture_is_refused_before_the_stream_is_touched(run, vd):
    async def main():
        operation = aiogpu.to_device(source(50_000))
        await operation.ordered()
        vd.is_capturing = True
        submitted = vd.submitted
        with pytest.raises(aiogpu.CaptureError, match="before the capture"):
            await operation.ordered()
        assert vd.submitted == submitted
        vd.is_capturing = False

    go(run, vd, main)


def test_a_lost_device_fails_it(run, vd):
    async def main():
        operation = aiogpu.to_device(source(50_000))
        await operation.ordered()
        vd.fault()
        with pytest.raises(aiogpu.DeviceLostError):
            await operation
        with pytest.raises(aiogpu.DeviceLostError):
            await operation.ordered()

    run(main)


# -- tasks -------------------------------------------------------------------------------------------------


@sized
def test_a_tasks_end_is_ordered_after_it_on_the_device_and_nobody_waits_on_the_host(run, vd, size):
    @aiogpu.task
    async def child():
        return await aiogpu.to_device(source(size, 9.0)).ordered()

    @aiogpu.task
    async def parent():
        x = await child()  # returns, though the device stands still
        read(vd, x[:1], seen)

    seen: list[float] = []
    go(run, vd, parent)
    assert seen == [9.0]


def test_ordered_on_another_stream_the_tasks_end_still_waits_for_it(run, vd, until):
    """Where a block's stream leads nobody knows: the end is ordered after the transfer on the host."""
    ended = False

    @aiogpu.task
    async def child():
        with aiogpu.stream():
            await aiogpu.to_device(source(50_000)).ordered()

    @aiogpu.task
    async def parent():
        nonlocal ended
        await child()
        ended = True

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(parent)
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
            assert not ended
            await until(lambda: aiogpu.stats().pending)
            while not ended:
                vd.run_all()
                await anyio.lowlevel.checkpoint()

    go(run, vd, main)


# -- debug mode --------------------------------------------------------------------------------------------


def test_debug_mode_sees_a_source_written_before_the_work_was_enqueued(run, vd):
    async def main():
        async with aiogpu.Runtime(debug=True):
            x = source(50_000)
            operation = aiogpu.to_device(x)
            x.add_(1)
            with pytest.raises(RuntimeError, match="written in place"):
                await operation.ordered()
            vd.run_all()

    run(main)


def test_debug_mode_sees_a_source_written_after_it_and_before_the_end(run, vd):
    async def main():
        async with aiogpu.Runtime(debug=True):
            x = source(50_000)
            operation = aiogpu.to_device(x)
            await operation.ordered()
            x.add_(1)
            vd.run_all()
            with pytest.raises(RuntimeError, match="written in place"):
                await operation

    run(main)


def test_debug_mode_warns_of_it_where_nobody_awaits_the_end(run, vd, until):
    async def main():
        async with aiogpu.Runtime(debug=True):
            x = source(50_000)
            operation = aiogpu.to_device(x)
            await operation.ordered()
            x.add_(1)
            vd.run_all()
            await until(operation.done)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                del operation
                gc.collect()
            assert "written in place before it was done()" in str(caught[0].message)

    run(main)


def test_debug_mode_lets_a_source_be_written_once_it_is_done(run, vd, until):
    """Also for those who await it later, or again."""

    async def main():
        async with aiogpu.Runtime(debug=True):
            x = source(50_000)
            operation = aiogpu.to_device(x)
            await operation.ordered()
            vd.run_all()
            await until(operation.done)
            x.add_(1)
            await operation
            await operation
            await operation.ordered()

    run(main)
