"""The awaitable handle: its states as a table, its waiters, and what it says about itself."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import threading
import warnings
import weakref
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiogpu
from aiogpu._operation import TRANSITIONS, Happening, Operation, State

FINAL = {State.DONE, State.FAILED}

#: How an operation gets into each state.
ROADS: dict[State, list[Happening]] = {
    State.QUEUED: [],
    State.IN_FLIGHT: [Happening.SUBMIT],
    State.DONE: [Happening.SUBMIT, Happening.COMPLETE],
    State.FAILED: [Happening.SUBMIT, Happening.FAIL],
}


def happen(operation: Operation[Any], happening: Happening) -> None:
    if happening is Happening.SUBMIT:
        operation.submitted()
    elif happening is Happening.COMPLETE:
        operation.complete("late" if operation.done() else "value")
    else:
        operation.fail(ValueError("late" if operation.done() else "broken"))


def made() -> Operation[Any]:
    operation: Operation[Any] = Operation("test", aiogpu.current_runtime().reactor)
    operation._awaited = True
    return operation


# -- the table ---------------------------------------------------------------------------------------


def test_the_table_has_an_answer_for_everything_that_can_happen():
    for state, happening in itertools.product(State, Happening):
        if state in FINAL:
            assert (state, happening) not in TRANSITIONS, "a final state is final"
        elif (state, happening) != (State.IN_FLIGHT, Happening.SUBMIT):
            assert (state, happening) in TRANSITIONS
    assert set(TRANSITIONS.values()) == {State.IN_FLIGHT, State.DONE, State.FAILED}


@pytest.mark.parametrize(
    ("state", "happening"),
    [pytest.param(s, h, id=f"{s.name}-{h.name}") for s, h in itertools.product(State, Happening)],
)
def test_an_operation_lives_by_the_table(run_asyncio, state, happening):
    async def main():
        operation = made()
        for step in ROADS[state]:
            happen(operation, step)
        assert operation._state is state
        if state in FINAL:  # late and doubled completions are ignored
            happen(operation, happening)
            assert operation._state is state
        elif (state, happening) in TRANSITIONS:
            happen(operation, happening)
            assert operation._state is TRANSITIONS[state, happening]
        else:
            with pytest.raises(KeyError):
                happen(operation, happening)
        assert operation.done() == (operation._state in FINAL)
        if operation._state is State.DONE:
            assert await operation == "value"
        elif operation._state is State.FAILED:
            with pytest.raises(ValueError, match="broken"):
                await operation
        else:
            operation.complete("the end")
        assert operation not in aiogpu.current_runtime().reactor.operations

    run_asyncio(main)


@pytest.mark.parametrize("last", [Happening.COMPLETE, Happening.FAIL], ids=lambda h: h.name)
def test_waiters_see_the_first_outcome_only(run, last):
    async def main():
        operation = made()
        seen: list[Any] = []

        async def wait():
            seen.append(await operation)

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            operation.complete("value")
            happen(operation, last)
        assert seen == ["value"] * 5

    run(main)


# -- waiting -----------------------------------------------------------------------------------------


def test_many_tasks_many_times(run, vd, until):
    async def main():
        operation = aiogpu.to_device(torch.arange(3))
        seen: list[Any] = []

        async def wait():
            first = await operation
            assert first is await operation
            seen.append(first)

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(wait)
            await until(lambda: len(operation._waiters) == 20)
            assert not seen
            vd.run_all()
        assert len(seen) == 20
        assert all(x is seen[0] for x in seen)

    run(main)


def test_many_waiters_in_many_loops(run, vd, until):
    """C37: every waiter wakes in its own loop, on its own thread."""
    shared: list[Any] = []
    waiting = [threading.Event() for _ in range(3)]
    results: list[Any] = []
    finished = threading.Event()

    def guest(index):
        async def wait():
            thread = threading.get_ident()
            value = await shared[0]
            assert threading.get_ident() == thread
            results.append(value)

        async def main():
            async with anyio.create_task_group() as group:
                before = len(shared[0]._waiters)
                for _ in range(4):
                    group.start_soon(wait)
                await until(lambda: len(shared[0]._waiters) >= before + 4)
                waiting[index].set()

        run(main)

    async def main():
        shared.append(aiogpu.to_device(torch.ones(7)))
        threads = [threading.Thread(target=guest, args=(index,)) for index in range(3)]
        for index, thread in enumerate(threads):
            thread.start()
            await until(waiting[index].is_set)
        vd.run_all()
        value = await shared[0]
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join, 10)
            assert not thread.is_alive()
        assert len(results) == 12
        assert all(result is value for result in results)
        finished.set()

    run(main)


def test_await_is_a_checkpoint_also_when_done(run, auto_vd):
    async def main():
        operation = aiogpu.to_device(torch.ones(1))
        await operation
        assert operation.done()
        others: list[int] = []

        async def other():
            others.append(1)

        async with anyio.create_task_group() as group:
            group.start_soon(other)
            await operation
            await operation
            assert others == [1]

    run(main)


def test_await_of_a_done_operation_notices_a_cancellation(run, auto_vd):
    async def main():
        operation = aiogpu.to_device(torch.ones(1))
        await operation
        with anyio.CancelScope() as scope:
            scope.cancel()
            await operation
            pytest.fail("the await of a finished operation is not a checkpoint")
        assert scope.cancelled_caught

    run(main)


def test_the_call_is_no_checkpoint_and_starts_the_transfer(run, auto_vd):
    async def main():
        with anyio.CancelScope() as scope:  # noqa: ASYNC100
            scope.cancel()
            operation = aiogpu.to_device(torch.ones(1))
            assert not inspect.iscoroutine(operation)
            assert ("copy", 0) in auto_vd.log
        assert not scope.cancelled_caught
        await operation

    run(main)


def test_done_means_finished_on_the_device(run, vd, until):
    async def main():
        latch = vd.latch()
        operation = aiogpu.to_device(torch.ones(1))
        vd.run_all()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert not operation.done()
        latch.release()
        vd.run_all()
        await until(operation.done)
        await operation

    run(main)


def test_operations_work_with_the_ways_of_asyncio(run_asyncio, auto_vd):
    async def main():
        make = lambda: aiogpu.to_device(torch.ones(2))  # noqa: E731
        first, second = await asyncio.gather(make(), make())
        assert first.sum() == second.sum() == 2
        assert (await asyncio.wait_for(make(), 5)).sum() == 2
        done, _ = await asyncio.wait([asyncio.ensure_future(make())])
        assert done.pop().result().sum() == 2
        assert (await asyncio.shield(make())).sum() == 2

    run_asyncio(main)


# -- cancellation and custody --------------------------------------------------------------------------


def test_a_cancelled_wait_ends_at_once_and_the_buffers_stay(run, vd, until):
    """C70, C03: the wait ends, custody goes on until the device is done."""

    async def main():
        source = torch.arange(50_000)  # large: staged, on a copy stream
        reference = weakref.ref(source)
        operation = aiogpu.to_device(source)
        del source
        await until(lambda: any(name == "copy" for name, _ in vd.log))
        with anyio.move_on_after(0) as scope:
            await operation
        assert scope.cancelled_caught
        assert not operation.done()
        gc.collect()
        assert reference() is not None, "the source was let go while the device may read it"
        assert aiogpu.stats().staging_bytes_in_use > 0
        vd.run_all()
        await until(operation.done)
        assert torch.equal(await operation, torch.arange(50_000))

    run(main)


def test_a_dropped_handle_keeps_the_buffers_until_the_device_is_done(run, vd, until):
    """C03: also when the caller never awaits and drops everything."""

    async def main():
        latch = vd.latch()
        source = torch.arange(1000)
        reference = weakref.ref(source)
        operation = aiogpu.to_host(source)
        operation._awaited = True
        del source, operation
        gc.collect()
        assert reference() is not None
        latch.release()
        vd.run_all()
        await until(lambda: aiogpu.stats().pending == 0)
        gc.collect()
        assert reference() is None, "kept for longer than the device needed it"

    run(main)


def test_staging_memory_in_flight_is_not_handed_out_again(run, vd, until, engine):
    """C03: a slot comes back only after its event."""

    async def main():
        latch = vd.latch()
        operations = [aiogpu.to_device(torch.full((16,), n)) for n in range(20)]
        with anyio.move_on_after(0):
            await operations[0]
        assert engine().slots.used_bytes == 20 * engine().slots.nbytes
        more = [aiogpu.to_device(torch.full((16,), -n)) for n in range(1, 21)]
        latch.release()
        vd.run_all()
        for number, operation in enumerate(operations):
            assert (await operation).tolist() == [number] * 16
        for number, operation in enumerate(more, 1):
            assert (await operation).tolist() == [-number] * 16

    run(main)


def test_cancelling_one_waiter_leaves_the_others(run, vd, until):
    async def main():
        operation = aiogpu.to_device(torch.ones(2))
        scopes = [anyio.CancelScope() for _ in range(4)]
        got: list[int] = []

        async def wait(index):
            with scopes[index]:
                await operation
                got.append(index)

        async with anyio.create_task_group() as group:
            for index in range(4):
                group.start_soon(wait, index)
            await until(lambda: len(operation._waiters) == 4)
            scopes[1].cancel()
            scopes[2].cancel()
            await until(lambda: len(operation._waiters) == 2)
            vd.run_all()
        assert sorted(got) == [0, 3]

    run(main)


def test_a_completion_after_the_cancellation_is_ignored(run_asyncio, vd):
    async def main():
        operation = aiogpu.to_device(torch.ones(2))
        task = asyncio.ensure_future(operation)
        await asyncio.sleep(0)
        task.cancel()
        operation.complete("both in one tick")
        with pytest.raises(asyncio.CancelledError):
            await task
        vd.run_all()
        while aiogpu.stats().pending:
            await asyncio.sleep(0)

    run_asyncio(main)


@pytest.mark.parametrize("size", [8, 50_000], ids=["small", "large"])
def test_five_hundred_random_cancellations_spoil_no_other_transfer(run, vd, moving, size):
    """C70: cancelled transfers beside surviving ones of the same size, memory reused at once."""
    choose = torch.Generator().manual_seed(7)
    count = 250 if size == 8 else 60

    async def main():
        async def one(number):
            source = torch.full((size,), number)
            operation = aiogpu.to_device(source)
            if torch.rand((), generator=choose) < 0.5:
                with anyio.move_on_after(0):
                    await operation
                return
            result = await operation
            assert result.tolist() == [number] * size if size < 100 else bool((result == number).all())

        await aiogpu.amap(one, range(count), limit=16)

    with moving(vd):
        run(main)


# -- failures ----------------------------------------------------------------------------------------


def test_each_waiter_gets_an_exception_of_its_own(run, vd, until):
    async def main():
        operation = made()
        caught: list[BaseException] = []

        async def wait():
            try:
                await operation
            except ValueError as error:
                caught.append(error)

        cause = KeyError("the cause")
        failure = ValueError("broken", 42)
        failure.__cause__ = cause
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(wait)
            await until(lambda: len(operation._waiters) == 3)
            operation.fail(failure)
        await wait()
        assert len({id(error) for error in [*caught, failure]}) == 5
        assert all(error.args == ("broken", 42) for error in caught)
        assert all(error.__cause__ is cause for error in caught)
        assert failure.__traceback__ is None, "a waiter's frames hang on the shared exception"

    run(main)


def test_an_exception_that_cannot_be_copied_is_raised_all_the_same(run_asyncio):
    class Awkward(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} {two}")

    async def main():
        operation = made()
        operation.fail(Awkward(1, 2))
        for _ in range(2):
            with pytest.raises(Awkward, match="1 2"):
                await operation

    run_asyncio(main)


# -- what it says ------------------------------------------------------------------------------------


def test_repr_tells_what_how_much_in_which_state_since_when_and_from_where(run, vd):
    async def main():
        operation = aiogpu.to_device(torch.zeros(512, dtype=torch.float32))
        line = inspect.currentframe().f_lineno - 1
        text = repr(operation)
        assert "to_device" in text
        assert "2.0 KiB" in text
        assert "in flight" in text
        assert " ms old" in text
        assert f"{__file__}:{line}" in text
        vd.run_all()
        await operation
        assert "done" in repr(operation)
        failed = made()
        assert "queued" in repr(failed)
        failed.fail(ValueError())
        assert "failed" in repr(failed)

    run(main)


@pytest.mark.parametrize("verb", ["to_device", "to_host", "copy_", "item"])
def test_one_that_was_never_awaited_warns_with_the_line_that_started_it(run, auto_vd, verb, until):
    one = torch.ones(1)
    start = {
        "to_device": lambda: aiogpu.to_device(one),
        "to_host": lambda: aiogpu.to_host(one),
        "copy_": lambda: aiogpu.copy_(one, one + 1),
        "item": lambda: aiogpu.item(one),
    }[verb]

    async def main():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            operation = start()
            await until(operation.done)
            del operation
            gc.collect()
        (warning,) = caught
        assert warning.category is RuntimeWarning
        assert f"aiogpu.{verb}(...) was never awaited" in str(warning.message)
        assert (warning.filename, warning.lineno) == (__file__, start.__code__.co_firstlineno)

    run(main)


def test_a_failure_that_nobody_awaited_is_in_the_warning(run_asyncio):
    async def main():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            operation = made()
            operation._awaited = False
            operation.fail(ValueError("lost in the dark"))
            del operation
            gc.collect()
        assert "lost in the dark" in str(caught[0].message)

    run_asyncio(main)


def test_an_awaited_one_does_not_warn(run, auto_vd, until):
    async def main():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await aiogpu.to_device(torch.ones(1))
            with anyio.move_on_after(0):
                await aiogpu.to_device(torch.ones(1))
            await until(lambda: aiogpu.stats().pending == 0)
            gc.collect()
        assert caught == []

    run(main)


# -- typing ------------------------------------------------------------------------------------------


def test_outside_of_an_event_loop_the_error_says_what_to_write():
    with pytest.raises(RuntimeError, match=r"asyncio\.run\(main\(\)\)"):
        aiogpu.to_device(torch.ones(1))
