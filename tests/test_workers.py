"""Own threads: the pool itself, and `run_sync` on it."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import threading
import traceback
import weakref
from collections import deque
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

import aiogpu
from aiogpu import _workers
from aiogpu._workers import StagingThreads, WorkerPool

# -- the pool ----------------------------------------------------------------------------------------


@pytest.fixture
def pool():
    entered: list[int] = []
    pool = WorkerPool("test", 2, lambda: entered.append(threading.get_ident()))
    pool.entered = entered  # type: ignore[attr-defined]
    yield pool
    assert pool.close(5)


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiogpu-test")]


def test_threads_start_when_needed_and_no_more_than_the_limit(pool):
    assert names() == []
    gate = threading.Event()
    done = threading.Semaphore(0)

    def job():
        gate.wait(5)
        done.release()

    for _ in range(10):
        pool.submit(job)
    assert len(names()) == 2
    gate.set()
    for _ in range(10):
        assert done.acquire(timeout=5)
    assert len(pool.entered) == 2, "each thread is set up once"
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("aiogpu-test"))


def test_while_a_thread_is_being_started_others_may_submit_and_so_may_a_garbage_collection(
    pool, monkeypatch, blocking_until
):
    """Starting waits for the new thread, in which a collection may run code that submits: without a lock."""
    done: list[str] = []
    start = threading.Thread.start

    def started(thread):
        if thread.name.startswith("aiogpu-test"):
            monkeypatch.setattr(threading.Thread, "start", start)
            other = threading.Thread(target=pool.submit, args=(lambda: done.append("other thread"),))
            other.start()
            other.join(10)
            assert not other.is_alive(), "it waits for the thread that starts one"
            for _ in range(3):
                pool.submit(lambda: done.append("collection"))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    pool.submit(lambda: done.append("first"))
    blocking_until(lambda: len(done) == 5)
    assert len(names()) <= 2, "more threads than the limit"


def test_a_job_that_a_garbage_collection_brings_between_two_steps_is_not_left_beside_an_idle_thread(
    pool, blocking_until
):
    """The jobs seem to be gone when one is taken out, and one has come when the thread is idle again."""
    gate = threading.Event()
    for _ in range(2):
        pool.submit(lambda: gate.wait(10))
    gate.set()
    blocking_until(lambda: len(pool._idle) == 2)  # as many as there may be: none will be started

    class Jobs(deque):  # type: ignore[type-arg]
        surprising = True

        def popleft(self) -> Any:
            if self.surprising:
                self.surprising = False
                raise IndexError
            return super().popleft()

    pool._jobs = Jobs()
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(10)


def test_at_the_end_of_the_interpreter_jobs_that_nobody_has_begun_are_dropped(pool):
    gate = threading.Event()
    done: list[int] = []
    for number in range(10):
        pool.submit(lambda number=number: (gate.wait(10), done.append(number)))
    assert not pool.close(0.0)
    pool.drop()
    gate.set()
    assert pool.close(10)
    assert len(done) == 2, "those that had begun"


def test_an_idle_thread_is_used_again(pool, blocking_until):
    for _ in range(20):
        done = threading.Event()
        pool.submit(done.set)
        assert done.wait(5)
        blocking_until(lambda: len(pool._idle) == 1)
    assert len(names()) == 1


def test_a_job_never_waits_behind_a_busy_thread_while_another_may_start(pool):
    """Two jobs that need each other must run at the same time."""
    for _ in range(50):
        both = threading.Barrier(2, timeout=5)
        over = threading.Semaphore(0)
        for _ in range(2):
            pool.submit(lambda both=both, over=over: (both.wait(), over.release()))
        assert over.acquire(timeout=5)
        assert over.acquire(timeout=5)


def test_an_idle_worker_does_not_hold_its_last_job(pool, blocking_until):
    class Held:
        def __call__(self):
            done.set()

    done = threading.Event()
    job = Held()
    reference = weakref.ref(job)
    pool.submit(job)
    del job
    assert done.wait(5)
    blocking_until(lambda: reference() is None)


def test_a_closed_pool_says_so():
    pool = WorkerPool("test", 1, lambda: None)
    assert pool.close(1)
    with pytest.raises(RuntimeError, match="interpreter is exiting"):
        pool.submit(lambda: None)


def test_closing_waits_for_jobs_but_not_for_ever():
    pool = WorkerPool("test", 1, lambda: None)
    gate, started = threading.Event(), threading.Event()
    pool.submit(lambda: (started.set(), gate.wait(10)))
    assert started.wait(5)
    assert not pool.close(0.01)
    gate.set()
    assert pool.close(5)


def test_jobs_that_were_queued_before_the_end_still_run():
    pool = WorkerPool("test", 1, lambda: None)
    ran: list[int] = []
    for number in range(20):
        pool.submit(lambda number=number: ran.append(number))
    assert pool.close(5)
    assert ran == list(range(20))


def test_every_pool_is_known_to_the_end_of_the_interpreter():
    pool = WorkerPool("test", 1, lambda: None)
    assert pool in _workers._pools
    pool.close(1)


def test_short_transfers_never_queue_behind_long_ones():
    threads = StagingThreads(2, 100, lambda: None)
    gate, done = threading.Event(), threading.Semaphore(0)
    for nbytes in (101, 10**12, float("inf"), 101):
        threads.submit(lambda: gate.wait(10), nbytes)
    for nbytes in (0, 100, 50):
        threads.submit(done.release, nbytes)
    for _ in range(3):
        assert done.acquire(timeout=5), "it waits for a thread that a long one has"
    gate.set()
    assert threads.close(5)
    with pytest.raises(RuntimeError, match="interpreter is exiting"):
        threads.submit(lambda: None)


def test_a_module_moves_on_the_threads_for_long_transfers(run_asyncio, auto_vd):
    """What an object moves that moves itself, nobody knows."""
    names: list[str] = []

    class Model(torch.nn.Module):
        def to(self, *args, **kwargs):
            names.append(threading.current_thread().name)
            return self

    async def main():
        await aiogpu.to_device(Model())

    run_asyncio(main)
    assert "staging-long" in names[0]


# -- run_sync ----------------------------------------------------------------------------------------


def test_it_runs_in_one_of_our_threads_and_returns_what_the_function_returns(run, anydevice):
    async def main():
        name, total = await aiogpu.run_sync(lambda a, b: (threading.current_thread().name, a + b), 1, 2)
        assert name.startswith("aiogpu-worker")
        assert total == 3

    run(main)


def test_it_sees_the_tasks_stream(run, auto_vd):
    """C25, C27: work that it submits is on the stream as if it had been submitted here."""

    @aiogpu.task
    async def task():
        here = auto_vd.current()
        assert await aiogpu.run_sync(auto_vd.current) is here
        assert auto_vd.current() is here
        x = torch.zeros(3)
        auto_vd.launch(lambda: x.fill_(1), writes=[x])
        await aiogpu.run_sync(lambda: auto_vd.launch(lambda: x.add_(1), writes=[x]))
        auto_vd.launch(lambda: x.mul_(3), writes=[x])
        assert (await aiogpu.to_host(x)).tolist() == [6.0] * 3

    run(task)


def test_it_sees_the_callers_modes_and_context_and_changes_neither(run, anydevice):
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")

    def look():
        seen = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), variable.get())
        torch.set_grad_enabled(True)
        variable.set("changed in the thread")
        return seen

    @aiogpu.task
    async def task():
        variable.set("caller")
        with torch.no_grad():
            assert await aiogpu.run_sync(look) == (False, False, "caller")
            assert not torch.is_grad_enabled()
        with torch.inference_mode():
            assert (await aiogpu.run_sync(look))[1]
        assert variable.get() == "caller"
        # The same threads again, without modes.
        assert await aiogpu.run_sync(torch.is_grad_enabled)
        assert not await aiogpu.run_sync(torch.is_inference_mode_enabled)

    run(task)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, StopIteration])
def test_whatever_the_function_raises_reaches_the_awaiting_task(run, anydevice, kind):
    """C40: BaseException, too; with its traceback, and the lane is usable afterwards."""

    def broken():
        raise kind("mine")

    @aiogpu.task
    async def task():
        caught = None
        try:
            await aiogpu.run_sync(broken)
        except BaseException as error:
            caught = error
        # PEP 479: a coroutine cannot raise StopIteration; it becomes a RuntimeError with that cause.
        if kind is StopIteration and isinstance(caught, RuntimeError):
            caught = caught.__cause__
        assert isinstance(caught, kind)
        assert "broken" in [frame.name for frame in traceback.extract_tb(caught.__traceback__)]
        assert await aiogpu.run_sync(lambda: 5) == 5

    run(task)


def test_neither_function_nor_arguments_outlive_the_call(run, anydevice, until):
    """C66: also when it failed and the exception is kept."""

    def fail(tensor):
        raise torch.OutOfMemoryError("no memory")

    async def main():
        tensor = torch.ones(10)
        reference = weakref.ref(tensor)
        kept = None
        try:
            await aiogpu.run_sync(fail, tensor)
        except torch.OutOfMemoryError as error:
            kept = error.with_traceback(None)
        del tensor
        gc.collect()
        await until(lambda: reference() is None)
        assert isinstance(kept, torch.OutOfMemoryError)

    run(main)


def test_it_does_not_use_the_loops_shared_threads(run_asyncio, anydevice):
    """C44: with the default pool fully blocked, aiogpu goes on, and the other way round."""
    gate = threading.Event()

    async def main():
        loop = asyncio.get_running_loop()
        blocked = [loop.run_in_executor(None, gate.wait, 10) for _ in range(40)]
        try:
            assert await aiogpu.run_sync(lambda: 1) == 1
            assert (await aiogpu.to_device(torch.ones(100_000))).sum() == 100_000
        finally:
            gate.set()
        await asyncio.gather(*blocked)
        gate.clear()
        ours = [asyncio.ensure_future(aiogpu.run_sync(gate.wait, 10)) for _ in range(40)]
        try:
            assert await asyncio.to_thread(lambda: 1) == 1
            assert await anyio.to_thread.run_sync(lambda: 1) == 1
        finally:
            gate.set()
        await asyncio.gather(*ours)

    run_asyncio(main)


def test_blocked_user_code_does_not_starve_staging(run, vd, moving):
    gate = threading.Event()

    async def main():
        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(aiogpu.run_sync, gate.wait, 10)
            try:
                source = torch.ones(100_000)
                assert (await aiogpu.to_host(await aiogpu.to_device(source))).sum() == 100_000
            finally:
                gate.set()

    with moving(vd):
        run(main)


@pytest.mark.parametrize("value", [None, 5, "text"])
def test_what_is_not_callable_is_refused(run_asyncio, value):
    async def main():
        with pytest.raises(TypeError, match="takes a function"):
            await aiogpu.run_sync(value)

    run_asyncio(main)


# -- limits and cancellation -----------------------------------------------------------------------------


def test_no_more_run_at_once_than_the_runtime_allows(run, anydevice):
    running, most, lock = 0, 0, threading.Lock()

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.002)  # long enough for others to start
        with lock:
            running -= 1

    async def main():
        async with aiogpu.Runtime(workers=3):
            await aiogpu.gather(*(aiogpu.run_sync(work) for _ in range(20)))
        assert 1 <= most <= 3

    run(main)


def test_a_queued_call_is_withdrawn_and_holds_nothing(run, anydevice, until):
    """C46: a cancelled call leaves nothing in any queue."""
    gate = threading.Event()
    ran: list[int] = []

    async def main():
        limiter = anyio.CapacityLimiter(1)
        references = []

        async def call(number):
            tensor = torch.ones(10)
            references.append(weakref.ref(tensor))
            await aiogpu.run_sync(lambda: ran.append(int(tensor[0]) + number), limiter=limiter)

        async with anyio.create_task_group() as outer:
            outer.start_soon(lambda: aiogpu.run_sync(gate.wait, 10, limiter=limiter))
            await until(lambda: limiter.borrowed_tokens == 1)
            async with anyio.create_task_group() as group:
                for number in range(100):
                    group.start_soon(call, number)
                await until(lambda: limiter.statistics().tasks_waiting == 100)
                group.cancel_scope.cancel()
            gc.collect()
            assert not any(reference() is not None for reference in references)
            gate.set()
        assert ran == []
        assert limiter.borrowed_tokens == 0

    run(main)


@pytest.mark.parametrize("how", ["scope", "task"])
def test_a_running_call_is_waited_for(run, anydevice, until, how):
    gate, started = threading.Event(), threading.Event()
    if how == "task" and run.is_trio:
        pytest.skip("only asyncio has a native Task.cancel")

    def work():
        started.set()
        assert gate.wait(10)
        ended.append(1)

    ended: list[int] = []

    async def main():
        async def call():
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await aiogpu.run_sync(work)
            seen.append(list(ended))

        scopes: list[Any] = []
        seen: list[Any] = []
        async with anyio.create_task_group() as group:
            if how == "scope":
                group.start_soon(call)
                await until(started.is_set)
                scopes[0].cancel()
            else:
                task = asyncio.ensure_future(aiogpu.run_sync(work))
                await until(started.is_set)
                task.cancel()
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert ended == []
            gate.set()
            if how == "task":
                with pytest.raises(asyncio.CancelledError):
                    await task
                seen.append(list(ended))
        assert seen == [[1]], "the cancelled caller went on before the function had returned"

    run(main)


def test_an_abandoned_call_keeps_token_and_stream_until_it_returns(run, auto_vd, until, engine):
    gate, started = threading.Event(), threading.Event()

    def work():
        started.set()
        assert gate.wait(10)

    async def main():
        limiter = anyio.CapacityLimiter(1)

        @aiogpu.task
        async def task():
            await aiogpu.run_sync(work, abandon_on_cancel=True, limiter=limiter)

        async with anyio.create_task_group() as group:
            group.start_soon(task)
            await until(started.is_set)
            group.cancel_scope.cancel()
        assert limiter.borrowed_tokens == 1
        assert engine().compute.in_use == 1, "its stream was given away while it may still launch"
        gate.set()
        await until(lambda: limiter.borrowed_tokens == 0 and engine().compute.in_use == 0)

    run(main)


def test_a_loop_may_end_while_an_abandoned_call_runs(run, auto_vd, until, blocking_until, engine):
    """C36: the return of the function finds no loop, and that is no error."""
    gate, started = threading.Event(), threading.Event()

    def work():
        started.set()
        assert gate.wait(10)

    @aiogpu.task
    async def task():
        await aiogpu.run_sync(work, abandon_on_cancel=True)

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(task)
            await until(started.is_set)
            group.cancel_scope.cancel()

    run.bare(main)
    assert started.is_set()
    gate.set()
    blocking_until(lambda: engine().compute.in_use == 0)


def test_a_token_that_was_granted_in_the_tick_of_the_cancellation_comes_back(run, anydevice, until):
    async def once():
        limiter = anyio.CapacityLimiter(1)
        gate = threading.Event()
        async with anyio.create_task_group() as outer:
            outer.start_soon(lambda: aiogpu.run_sync(gate.wait, 10, limiter=limiter))
            await until(lambda: limiter.borrowed_tokens == 1)
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: aiogpu.run_sync(lambda: None, limiter=limiter))
                await until(lambda: limiter.statistics().tasks_waiting == 1)
                gate.set()
                await until(lambda: limiter.statistics().tasks_waiting == 0)
                group.cancel_scope.cancel()
        assert limiter.borrowed_tokens == 0

    async def main():
        for _ in range(20):
            await once()

    run(main)


def test_frames_of_aiogpu_hold_no_arguments_while_the_function_runs(run_asyncio, anydevice):
    """What the function lets go of is free, although its caller still waits."""

    def consume(box):
        tensor = box.pop()
        reference = weakref.ref(tensor)
        del tensor
        gc.collect()
        return reference() is None

    async def main():
        assert await aiogpu.run_sync(consume, [torch.ones(3)])

    run_asyncio(main)
    assert sys.exc_info() == (None, None, None)


def test_a_thread_that_cannot_be_started_is_done_without(monkeypatch):
    """A limit of the system: jobs queue for the threads that there are, and the end joins those only."""
    pool = WorkerPool("test", 2, lambda: None)
    start = threading.Thread.start
    refused = []

    def refuse(thread):
        refused.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(lambda: None)
    monkeypatch.setattr(threading.Thread, "start", start)
    gate, done = threading.Event(), threading.Event()
    pool.submit(gate.wait)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool.submit(done.set)
    assert len(refused) == 3
    gate.set()
    assert done.wait(10)
    monkeypatch.undo()
    assert pool.close(10)
