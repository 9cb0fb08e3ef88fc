"""Torch's thread-local modes are task-local: kept over every await, and never visible to anybody else."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import anyio
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import aiogpu

pytestmark = pytest.mark.usefixtures("anydevice")


class CountCalls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class CountOps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def modes() -> dict[str, Any]:
    """Everything of the thread that a task can change."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast nesting": nesting,
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default device": torch.get_default_device(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
    }


#: A mode, and what it changes in :func:`modes`.
MODES: list[Any] = [
    pytest.param(torch.no_grad, {"grad": False}, id="no_grad"),
    pytest.param(torch.inference_mode, {"grad": False, "inference": True}, id="inference_mode"),
    pytest.param(
        lambda: torch.autocast("cpu", torch.float16),
        {"autocast": True, "autocast dtype": torch.float16, "autocast nesting": 1},
        id="autocast",
    ),
    pytest.param(
        lambda: torch.device("meta"),
        {"default device": torch.device("meta"), "function modes": 1},
        id="device",
    ),
    pytest.param(CountCalls, {"function modes": 1}, id="function mode"),
    pytest.param(CountOps, {"dispatch modes": 1}, id="dispatch mode"),
    pytest.param(
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        {"saved-tensor hooks": True},
        id="saved-tensor hooks",
    ),
]
each_mode = pytest.mark.parametrize(("mode", "changes"), MODES)
Mode = Callable[[], AbstractContextManager[Any]]

PLAIN = modes()
#: Inside a task, autocast's cache is off: it is shared by the whole process.
INSIDE = {**PLAIN, "autocast cache": False}


@pytest.fixture(autouse=True)
def _thread_is_as_before():
    assert modes() == PLAIN
    yield
    assert modes() == PLAIN


# -- over awaits -------------------------------------------------------------------------------------


@each_mode
def test_a_mode_is_there_after_every_await_and_gone_for_everybody_else(run, mode: Mode, changes):
    """C51: interleaved with a task without modes, a plain coroutine, and itself."""
    rounds = 5

    @aiogpu.task
    async def with_mode():
        with mode():
            for _ in range(rounds):
                assert modes() == {**INSIDE, **changes}
                await anyio.lowlevel.checkpoint()
            assert modes() == {**INSIDE, **changes}
        assert modes() == INSIDE
        await anyio.lowlevel.checkpoint()
        assert modes() == INSIDE

    @aiogpu.task
    async def without():
        for _ in range(rounds):
            assert modes() == INSIDE
            await anyio.lowlevel.checkpoint()

    async def undecorated():
        for _ in range(rounds):
            assert modes() == PLAIN
            await anyio.lowlevel.checkpoint()

    async def main():
        await aiogpu.gather(with_mode(), without(), undecorated(), with_mode(), undecorated())

    run(main)


def test_modes_nest_and_are_left_in_any_order_of_tasks(run):
    """Tasks that enter in one order and leave in another: what a thread-local stack cannot bear."""

    @aiogpu.task
    async def task(modes_of_it, entered, leave):
        with modes_of_it[0](), modes_of_it[1]():
            entered.set()
            await leave.wait()
            now = modes()
        assert modes() == INSIDE
        return now

    async def main():
        pairs = [
            (torch.no_grad, torch.enable_grad),
            (torch.inference_mode, torch.no_grad),
            (lambda: torch.device("meta"), CountCalls),
            (lambda: torch.autocast("cpu"), torch.no_grad),
        ]
        results: dict[int, Any] = {}
        leaves = [anyio.Event() for _ in pairs]

        async def keep(index, entered):
            results[index] = await task(pairs[index], entered, leaves[index])

        async with anyio.create_task_group() as group:
            for index in range(len(pairs)):
                entered = anyio.Event()
                group.start_soon(keep, index, entered)
                await entered.wait()
            for index in (1, 3, 0, 2):
                leaves[index].set()
                while index not in results:
                    await anyio.lowlevel.checkpoint()
        assert [results[0]["grad"], results[1]["inference"], results[1]["grad"]] == [True, True, False]
        assert [results[2]["function modes"], results[3]["autocast"], results[3]["grad"]] == [2, True, False]

    run(main)


@each_mode
def test_the_loops_callbacks_never_see_a_mode(run_asyncio, mode: Mode, changes):
    seen = []

    @aiogpu.task
    async def task():
        loop = asyncio.get_running_loop()
        with mode():
            loop.call_soon(lambda: seen.append(modes()))
            future = loop.create_future()
            future.add_done_callback(lambda _: seen.append(modes()))
            future.set_result(None)
            await future
            await asyncio.sleep(0)

    run_asyncio(task)
    assert seen == [PLAIN, PLAIN]


@each_mode
def test_a_spawned_undecorated_coroutine_never_sees_a_mode_and_an_awaited_one_does(run, mode: Mode, changes):
    async def undecorated():
        before = modes()
        await anyio.lowlevel.checkpoint()
        return before, modes()

    @aiogpu.task
    async def task():
        spawned: list[Any] = []

        async def keep():
            spawned.extend(await undecorated())

        with mode():
            async with anyio.create_task_group() as group:
                group.start_soon(keep)
            assert spawned == [PLAIN, PLAIN]
            assert await undecorated() == ({**INSIDE, **changes},) * 2

    run(task)


@each_mode
def test_a_plainly_awaited_child_starts_with_its_parents_modes_and_gives_none_back(run, mode: Mode, changes):
    """As a plain await of a plain coroutine does; but what the child sets stays with the child."""

    @aiogpu.task
    async def child():
        inherited = modes()
        await anyio.lowlevel.checkpoint()
        assert modes() == inherited
        torch.set_grad_enabled(True)
        await anyio.lowlevel.checkpoint()
        return inherited

    @aiogpu.task
    async def parent():
        with mode():
            assert await child() == {**INSIDE, **changes}
            assert modes() == {**INSIDE, **changes}

    run(parent)


def test_a_mode_set_without_a_block_stays_with_its_task(run):
    @aiogpu.task
    async def sets():
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        await anyio.lowlevel.checkpoint()
        assert not torch.is_grad_enabled()
        return torch.ones(1).device

    async def main():
        assert (await sets()).type == "meta"
        assert modes() == PLAIN

    run(main)


def test_modes_that_change_over_awaits_are_followed(run):
    @aiogpu.task
    async def task():
        for on in (False, True, False, False, True):
            torch.set_grad_enabled(on)
            await anyio.lowlevel.checkpoint()
            assert torch.is_grad_enabled() is on
        with torch.inference_mode():
            await anyio.lowlevel.checkpoint()
            with torch.inference_mode(False):
                await anyio.lowlevel.checkpoint()
                assert not torch.is_inference_mode_enabled()
                assert torch.is_grad_enabled()
            await anyio.lowlevel.checkpoint()
            assert torch.is_inference_mode_enabled()

    run(task)


def test_training_over_awaits_records_a_graph_that_inference_beside_it_does_not_cut(run):
    @aiogpu.task
    async def trains():
        w = torch.ones(2, requires_grad=True)
        y = w * 3
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
            y = y + w
        y.sum().backward()
        return w.grad.tolist()

    @aiogpu.task
    async def infers():
        with torch.inference_mode():
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
                assert torch.ones(1).is_inference()

    async def main():
        results = await aiogpu.gather(infers(), trains(), infers())
        assert results[1] == [13.0, 13.0]

    run(main)


# -- ends of every kind ------------------------------------------------------------------------------


@each_mode
def test_a_task_that_fails_leaves_no_mode_behind(run, mode: Mode, changes):
    """C53."""

    @aiogpu.task
    async def fails():
        with mode():
            await anyio.lowlevel.checkpoint()
            raise KeyError("on purpose")

    @aiogpu.task
    async def leaks():
        mode().__enter__()
        await anyio.lowlevel.checkpoint()
        raise KeyError("on purpose")

    async def main():
        for fn in (fails, leaks):
            with pytest.raises(KeyError):
                await fn()
            assert modes() == PLAIN

    run(main)


@each_mode
def test_a_task_that_is_cancelled_cleans_up_under_its_modes_and_leaves_none(run, mode: Mode, changes):
    inside, seen = [], []

    @aiogpu.task
    async def task():
        with mode():
            inside.append(True)
            try:
                await anyio.sleep_forever()
            finally:
                seen.append(modes())

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(task)
            while not inside:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        assert modes() == PLAIN

    run(main)
    assert seen == [{**INSIDE, **changes}]


@each_mode
def test_a_suspended_task_that_is_collected_cleans_up_under_its_modes_and_leaves_none(mode: Mode, changes):
    """Guards that are dropped without their state in place would leave their modes on for good."""
    seen = []

    @aiogpu.task
    async def task():
        with mode():
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                seen.append(modes())

    async def main():
        await aiogpu.synchronize()  # the device is ready: the first step runs
        coroutine = task()
        coroutine.send(None)
        assert modes() == PLAIN
        del coroutine
        gc.collect()
        assert modes() == PLAIN

    asyncio.run(main())
    assert seen == [{**INSIDE, **changes}]


def test_a_suspended_task_that_is_closed_after_its_loop_leaves_nothing():
    seen = []

    @aiogpu.task
    async def task():
        with torch.no_grad(), torch.autocast("cpu"):
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    async def main():
        await aiogpu.synchronize()  # the device is ready: the first step runs
        coroutine = task()
        coroutine.send(None)
        return coroutine

    asyncio.run(main()).close()
    assert seen == [(False, True)]


def test_a_suspended_task_that_is_closed_by_another_thread_leaves_nothing_there(run_asyncio):
    import threading

    seen = []

    @aiogpu.task
    async def task():
        with torch.inference_mode(), torch.device("meta"):
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                seen.append((torch.is_inference_mode_enabled(), torch.ones(1).device.type))

    async def main():
        await aiogpu.synchronize()  # the device is ready: the first step runs
        coroutine = task()
        coroutine.send(None)

        def close():
            before = modes()
            coroutine.close()
            seen.append(modes() == before)

        thread = threading.Thread(target=close)
        thread.start()
        thread.join()

    run_asyncio(main)
    assert seen == [(True, "meta"), True]


# -- run_sync ----------------------------------------------------------------------------------------


@each_mode
def test_a_worker_thread_has_the_callers_modes(run, mode: Mode, changes):
    """C50: grad mode, autocast and the rest reach the function, captured at the call."""

    @aiogpu.task
    async def task():
        with mode():
            assert await aiogpu.run_sync(modes) == {**INSIDE, **changes}
        assert await aiogpu.run_sync(modes) == INSIDE

    run(task)


@each_mode
def test_what_a_function_leaves_on_reaches_neither_its_caller_nor_the_next_one(run, mode: Mode, changes):
    """C53: workers are scrubbed; one job's leak is not the next job's problem."""

    def leaks():
        mode().__enter__()

    def leaks_and_fails():
        mode().__enter__()
        raise KeyError("on purpose")

    @aiogpu.task
    async def task():
        await aiogpu.run_sync(leaks)
        with pytest.raises(KeyError):
            await aiogpu.run_sync(leaks_and_fails)
        assert modes() == INSIDE
        for _ in range(5):
            assert await aiogpu.run_sync(modes) == INSIDE

    run(task)


def test_run_sync_outside_of_a_task_carries_the_threads_modes(run):
    async def main():
        assert (await aiogpu.run_sync(modes))["grad"] is True
        with torch.no_grad():  # no other coroutine runs that could see it
            assert (await aiogpu.run_sync(modes))["grad"] is False

    run(main)
