"""run_sync: anyio's rules, on threads of aiogpu's own, on the caller's stream."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from _kernels import cell, go, read, write

import aiogpu
from aiogpu.testing import RaceError


class Gate:
    """A function for a worker thread that says when it runs, and returns when it is told to."""

    def __init__(self, result: Any = None) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.calls = 0
        self.result = result

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        self.entered.set()
        assert self.leave.wait(20)
        return self.result


@pytest.fixture
def gate():
    made = Gate("result")
    yield made
    made.leave.set()  # no thread outlives its test


# -- calling -----------------------------------------------------------------------------------------


def test_arguments_result_and_the_functions_error_pass_through(run, anydevice):
    error = KeyError("on purpose")

    def fails():
        raise error

    async def main():
        assert await aiogpu.run_sync(divmod, 7, 3) == (2, 1)
        assert await aiogpu.run_sync(lambda: None) is None
        with pytest.raises(KeyError) as caught:
            await aiogpu.run_sync(fails)
        assert caught.value is error
        assert traceback.extract_tb(error.__traceback__)[-1].name == "fails"

    run(main)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, torch.OutOfMemoryError])
def test_every_kind_of_exception_reaches_the_waiter_and_the_thread_lives_on(run_asyncio, anydevice, kind):
    """C40. Within a coroutine of its own: asyncio lets SystemExit through to whoever runs the loop."""

    def fails():
        raise kind("on purpose")

    async def main():
        with pytest.raises(kind, match="on purpose"):
            await aiogpu.run_sync(fails)
        assert await aiogpu.run_sync(lambda: 1) == 1

    run_asyncio(main)


def test_stop_iteration_becomes_what_a_coroutine_makes_of_it(run, anydevice):
    """A coroutine cannot raise StopIteration: it must neither hang nor look like a return value."""

    async def main():
        with pytest.raises(RuntimeError, match="StopIteration") as caught:
            await aiogpu.run_sync(next, iter(()))
        assert isinstance(caught.value.__cause__, StopIteration)
        assert await aiogpu.run_sync(lambda: 1) == 1

    run(main)


def test_it_runs_on_one_of_aiogpus_own_threads(run, anydevice):
    async def main():
        thread = await aiogpu.run_sync(threading.current_thread)
        assert thread is not threading.current_thread()
        assert thread.name.startswith("aiogpu-worker-")
        assert thread.daemon

    run(main)


def test_a_blocked_default_executor_does_not_matter(run_asyncio, auto_vd):
    """C44: neither asyncio's pool nor anyio's tokens are on any path of ours, nor the other way round."""

    async def main():
        blocker = threading.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        asyncios = [loop.run_in_executor(None, blocker.wait, 20) for _ in range(8)]
        anyios = anyio.to_thread.current_default_thread_limiter()
        borrowed = [object() for _ in range(int(anyios.total_tokens))]
        for each in borrowed:
            await anyios.acquire_on_behalf_of(each)
        try:
            assert await aiogpu.run_sync(lambda: 1) == 1
            big = torch.ones(100_000)
            moved = await aiogpu.to_host(await aiogpu.to_device(big))
            assert torch.equal(moved, big)
        finally:
            blocker.set()
            for each in borrowed:
                anyios.release_on_behalf_of(each)
            await asyncio.gather(*asyncios)

    run_asyncio(main)


def test_pending_calls_of_ours_leave_the_loops_own_threads_free(run_asyncio, auto_vd, gate):
    async def main():
        async with asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(aiogpu.run_sync(gate))
            await asyncio.to_thread(gate.entered.wait, 10)
            assert await anyio.to_thread.run_sync(lambda: 1) == 1
            gate.leave.set()

    run_asyncio(main)


def test_a_function_may_start_a_loop_of_its_own_that_uses_aiogpu(run, auto_vd):
    async def inner():
        return await aiogpu.item(torch.tensor([3.0]))

    async def main():
        assert await aiogpu.run_sync(asyncio.run, inner()) == 3

    run(main)


# -- the stream --------------------------------------------------------------------------------------


def test_it_launches_on_the_callers_stream_in_order(run, vd):
    x, y, seen = cell(), cell(), []

    def model():
        read(vd, x, seen)
        write(vd, y, 2)
        return vd.current().raw

    @aiogpu.task
    async def task():
        write(vd, x, 1)
        assert await aiogpu.run_sync(model) is vd.current().raw
        read(vd, y, seen)
        with aiogpu.stream():
            assert await aiogpu.run_sync(model) is vd.current().raw

    go(run, vd, task)
    assert seen == [1, 2, 1]


def test_a_stream_that_the_function_chose_stays_behind(run, vd):
    other = vd.open_stream("compute")

    @aiogpu.task
    async def task():
        own = vd.current().raw
        await aiogpu.run_sync(vd.swap, other.raw)
        assert vd.current().raw is own
        assert (await aiogpu.run_sync(vd.current)).raw is own

    async def main():
        await task()
        assert vd.is_default(await aiogpu.run_sync(vd.current))

    go(run, vd, main)


def test_two_workers_of_two_tasks_race_as_the_tasks_do(run, vd):
    """The control: that worker threads launch on streams is what the detector sees."""
    x = cell()

    @aiogpu.task
    async def task():
        await aiogpu.run_sync(write, vd, x, 1)

    @aiogpu.task
    async def parent():
        with pytest.raises(ExceptionGroup) as caught:
            await aiogpu.gather(task(), task())
        assert caught.group_contains(RaceError)

    go(run, vd, parent)


# -- cancellation ------------------------------------------------------------------------------------


def test_a_running_call_is_waited_for(run, auto_vd, gate, until):
    log = []

    async def call():
        try:
            await aiogpu.run_sync(gate)
        finally:
            log.append(gate.leave.is_set())

    async def main():
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(call)
                await until(gate.entered.is_set)
                scope.cancel()
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.005)
                    assert not log
                    gate.leave.set()
        assert log == [True]

    run(main)


def test_a_cancelled_caller_sleeps_while_its_call_runs(run, auto_vd, gate, until, monkeypatch):
    """A scope delivers its cancellation again and again; whoever is not shielded from it spins."""
    waits = 0

    async def main():
        door = aiogpu.current_runtime().reactor.door
        settler = type(door).settler

        def counted(*args):
            nonlocal waits
            waits += 1
            return settler(*args)

        monkeypatch.setattr(type(door), "settler", counted)
        async with anyio.create_task_group() as group:
            group.start_soon(aiogpu.run_sync, gate)
            await until(gate.entered.is_set)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                for _ in range(50):
                    await anyio.lowlevel.checkpoint()
            gate.leave.set()

    run(main)
    assert waits <= 2


def test_a_running_call_outlasts_asyncios_own_cancellations(run_asyncio, auto_vd, gate, until):
    """``Task.cancel`` may come more than once, and no scope shields from it."""

    async def main():
        task = asyncio.create_task(aiogpu.run_sync(gate))
        await until(gate.entered.is_set)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.001)
            assert not task.done()
        gate.leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    run_asyncio(main)


def test_a_result_that_is_there_when_the_cancellation_comes_is_not_mistaken_for_one(run_asyncio, auto_vd):
    async def main():
        task = asyncio.create_task(aiogpu.run_sync(lambda: 1))
        assert await task == 1
        assert not task.cancel()

    run_asyncio(main)


def test_an_abandoned_call_returns_at_once_and_keeps_its_token_until_it_returns(run, auto_vd, gate, until):
    async def main():
        limiter = anyio.CapacityLimiter(1)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: aiogpu.run_sync(gate, abandon_on_cancel=True, limiter=limiter))
                await until(gate.entered.is_set)
                scope.cancel()
        assert not gate.leave.is_set()
        assert limiter.borrowed_tokens == 1
        gate.leave.set()
        await until(lambda: limiter.borrowed_tokens == 0)

    run(main)


def test_an_abandoned_call_keeps_its_tasks_stream_until_what_it_launched_has_ended(run, vd, gate, until):
    def launches_late():
        gate()
        vd.launch()

    @aiogpu.task
    async def task():
        await aiogpu.run_sync(launches_late, abandon_on_cancel=True)

    async def main():
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(task)
                await until(gate.entered.is_set)
                scope.cancel()
        vd.run_all()
        slots = aiogpu.current_runtime().engine_now(None).compute._slots[0]
        # The task is over, its stream is not free.
        assert [slot.users for slot in slots if not slot.idle] == [1]
        gate.leave.set()
        await until(lambda: all(slot.users == 0 for slot in slots))
        assert [slot.idle for slot in slots].count(False) == 1
        vd.run_all()
        await until(lambda: all(slot.idle for slot in slots))

    run(main)


def test_an_abandoned_call_that_fails_bothers_nobody(run, auto_vd, gate, until, recwarn):
    def fails():
        gate()
        raise KeyError("nobody waits for this")

    async def main():
        limiter = anyio.CapacityLimiter(1)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: aiogpu.run_sync(fails, abandon_on_cancel=True, limiter=limiter))
                await until(gate.entered.is_set)
                scope.cancel()
        gate.leave.set()
        await until(lambda: limiter.borrowed_tokens == 0)

    run(main)
    assert not recwarn.list


def test_queued_calls_that_are_cancelled_never_run_and_free_what_they_held(run, auto_vd, gate, until):
    """C46: a storm of cancelled calls leaves nothing in any queue, one tick later."""

    class Big(torch.Tensor):
        pass

    async def call(limiter, x):
        await aiogpu.run_sync(gate, x, limiter=limiter)

    async def main():
        limiter = anyio.CapacityLimiter(1)
        async with anyio.create_task_group() as outer:
            outer.start_soon(call, limiter, None)
            await until(gate.entered.is_set)
            alive = []
            async with anyio.create_task_group() as storm:
                for _ in range(100):
                    x = torch.ones(1).as_subclass(Big)
                    alive.append(weakref.ref(x))
                    storm.start_soon(call, limiter, x)
                    del x
                await until(lambda: limiter.statistics().tasks_waiting == 100)
                storm.cancel_scope.cancel()
            await anyio.lowlevel.checkpoint()
            gc.collect()
            assert sum(ref() is not None for ref in alive) == 0
            assert limiter.statistics().tasks_waiting == 0
            gate.leave.set()
        assert gate.calls == 1
        assert limiter.borrowed_tokens == 0

    run(main)


def test_a_call_of_a_cancelled_caller_is_not_made_though_there_is_room(run, anydevice, gate):
    async def main():
        limiter = anyio.CapacityLimiter(1)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await aiogpu.run_sync(gate, limiter=limiter)
        assert scope.cancelled_caught
        assert limiter.borrowed_tokens == 0
        assert gate.calls == 0

    run(main)


def test_a_token_granted_in_the_tick_of_the_cancellation_is_given_back(run, auto_vd, gate, until):
    async def call(limiter):
        await aiogpu.run_sync(gate, limiter=limiter)

    async def main():
        limiter = anyio.CapacityLimiter(1)
        holder = object()
        await limiter.acquire_on_behalf_of(holder)
        async with anyio.create_task_group() as group:
            group.start_soon(call, limiter)
            await until(lambda: limiter.statistics().tasks_waiting == 1)
            limiter.release_on_behalf_of(holder)  # granted ...
            group.cancel_scope.cancel()  # ... and cancelled before it could run
            gate.leave.set()
        assert limiter.borrowed_tokens == 0
        assert await aiogpu.run_sync(lambda: 1, limiter=limiter) == 1

    run(main)


# -- limits ------------------------------------------------------------------------------------------


def test_a_limiter_bounds_how_many_run_at_once(run, auto_vd):
    running, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2)

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait(10)  # two do run at once
        with lock:
            running -= 1

    async def main():
        limiter = anyio.CapacityLimiter(2)
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(lambda: aiogpu.run_sync(work, limiter=limiter))

    run(main)
    assert most == 2


def test_the_runtimes_workers_are_the_default_limit(run, auto_vd, gate, until):
    async def main():
        async with aiogpu.Runtime(workers=3):
            async with anyio.create_task_group() as group:
                for _ in range(10):
                    group.start_soon(aiogpu.run_sync, gate)
                await until(lambda: gate.calls == 3)
                await anyio.sleep(0.005)
                assert gate.calls == 3
                gate.leave.set()
            assert gate.calls == 10

    run(main)


def test_idle_threads_are_used_again(run, auto_vd, until, engine):
    async def main():
        seen = set()
        for _ in range(50):
            seen.add(await aiogpu.run_sync(threading.get_ident))
            # The next call could come before the thread has counted itself idle.
            await until(lambda: engine().workers._idle)
        assert len(seen) == 1

    run(main)


# -- what it holds -----------------------------------------------------------------------------------


def test_an_exception_leaves_no_cycle_behind(run, anydevice):
    """What its frames hold goes with the exception, not with some later garbage collection."""

    class Failure(Exception):
        pass

    def fails():
        raise Failure

    async def main():
        alive = None
        gc.collect()
        gc.disable()
        try:
            try:
                await aiogpu.run_sync(fails)
            except Failure as error:
                alive = weakref.ref(error)
            await aiogpu.run_sync(lambda: None)  # the worker has let go of its last job
            assert alive is not None
            assert alive() is None
        finally:
            gc.enable()

    run(main)


def test_nothing_holds_arguments_or_results_after_the_call(run, anydevice):
    class Big(torch.Tensor):
        pass

    async def main():
        x = torch.ones(1).as_subclass(Big)
        alive = weakref.ref(x)
        y = await aiogpu.run_sync(lambda x: x.as_subclass(Big), x)
        also = weakref.ref(y)
        del x, y
        await aiogpu.run_sync(lambda: None)  # asyncio lets go of the last future a step later
        gc.collect()
        assert (alive(), also()) == (None, None)

    run(main)


def test_a_stored_exception_keeps_no_argument_through_our_frames(run, anydevice):
    """C66."""

    class Big(torch.Tensor):
        pass

    def fails(x):
        del x
        raise torch.OutOfMemoryError("injected")

    @aiogpu.task
    async def task(x):
        call = aiogpu.run_sync(fails, x)
        del x
        await call

    async def main():
        x = torch.ones(1).as_subclass(Big)
        alive = weakref.ref(x)
        call = task(x)
        del x
        stored = None
        try:
            await call
        except torch.OutOfMemoryError as error:
            stored = error
        del call
        await aiogpu.synchronize()
        await aiogpu.run_sync(lambda: None)
        gc.collect()
        assert stored is not None
        assert alive() is None

    run(main)
