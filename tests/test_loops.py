"""The door into asyncio, uvloop and trio: park, wake, soon, post, and what happens after the end."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiogpu
from aiogpu import _loops
from aiogpu._loops import DoorClosed, open_door

ROOT = Path(__file__).parent.parent

# -- which loop --------------------------------------------------------------------------------------


def test_outside_of_a_loop_there_is_no_token_and_no_door():
    assert _loops.current_token() is None
    with pytest.raises(RuntimeError, match=r"trio\.run\(main\) or anyio\.run\(main\)"):
        open_door()


def test_the_token_is_the_loops_own_and_the_same_in_every_task(run):
    async def main():
        tokens: list[Any] = []

        async def note():
            tokens.append(_loops.current_token())

        async with anyio.create_task_group() as group:
            group.start_soon(note)
            group.start_soon(note)
        assert tokens[0] is tokens[1] is _loops.current_token() is open_door().token
        return tokens[0]

    assert run(main) is not run(main)
    assert _loops.current_token() is None


def test_a_worker_thread_of_a_loop_is_not_in_the_loop(run):
    async def main():
        assert await anyio.to_thread.run_sync(_loops.current_token) is None

    run(main)


# -- park and settle -----------------------------------------------------------------------------------


def test_a_parked_coroutine_continues_when_it_is_settled(run):
    async def main():
        door = open_door()
        waiter = door.waiter()
        door.soon(lambda: door.settle(waiter, None))
        await door.park(waiter)

    run(main)


def test_settling_before_the_park_is_not_lost(run):
    async def main():
        door = open_door()
        waiter = door.waiter()
        door.settle(waiter, None)
        await door.park(waiter)

    run(main)


@pytest.mark.parametrize("early", [True, False])
def test_an_error_is_raised_where_it_is_parked(run, early):
    async def main():
        door = open_door()
        waiter = door.waiter()
        if early:
            door.settle(waiter, KeyError("mine"))
        else:
            door.soon(lambda: door.settle(waiter, KeyError("mine")))
        with pytest.raises(KeyError, match="mine"):
            await door.park(waiter)

    run(main)


def test_only_the_first_settling_counts(run):
    async def main():
        door = open_door()
        waiter = door.waiter()
        door.settle(waiter, None)
        door.settle(waiter, KeyError("too late"))
        door.settle(waiter, None)
        await door.park(waiter)
        door.settle(waiter, KeyError("much too late"))
        await anyio.lowlevel.checkpoint()

    run(main)


def test_a_park_is_cancelled_at_once_and_a_late_settling_does_nothing(run):
    """C48: level cancellation and deadlines are honoured."""

    async def main():
        door = open_door()
        waiter = door.waiter()
        with anyio.move_on_after(0.01) as scope:
            await door.park(waiter)
        assert scope.cancelled_caught
        door.settle(waiter, None)
        door.settle(door.waiter(), None)  # nobody ever parked there
        await anyio.lowlevel.checkpoint()

    run(main)


def test_a_settling_and_a_cancellation_in_one_tick_lose_neither_others_nor_the_cancellation(run):
    async def main():
        door = open_door()
        ended: list[str] = []

        async def wait(waiter, name):
            try:
                await door.park(waiter)
            finally:
                ended.append(name)

        one, two = door.waiter(), door.waiter()
        async with anyio.create_task_group() as group:
            async with anyio.create_task_group() as inner:
                inner.start_soon(wait, one, "one")
                group.start_soon(wait, two, "two")
                for _ in range(3):
                    await anyio.lowlevel.checkpoint()
                door.settle(one, None)
                inner.cancel_scope.cancel()
            assert ended == ["one"]
            door.settle(two, None)
        assert ended == ["one", "two"]

    run(main)


# -- soon and post -------------------------------------------------------------------------------------


def test_soon_runs_in_order_on_the_loops_thread_and_not_at_once(run, until):
    async def main():
        door = open_door()
        ran: list[Any] = []
        for number in range(5):
            door.soon(lambda number=number: ran.append((number, threading.get_ident())))
        assert ran == []
        await until(lambda: len(ran) == 5)
        assert ran == [(number, threading.get_ident()) for number in range(5)]

    run(main)


def test_what_soon_calls_may_call_soon(run, until):
    """The reactor polls like that: every round lets others run in between."""

    async def main():
        door = open_door()
        rounds = 0

        def again():
            nonlocal rounds
            rounds += 1
            if rounds < 50:
                door.soon(again)

        door.soon(again)
        turns = 0
        while rounds < 50:
            turns += 1
            await anyio.lowlevel.checkpoint()
        assert turns >= 25, "the loop stood still while the reactor polled"

    run(main)


def test_post_comes_from_any_thread(run, until):
    async def main():
        door = open_door()
        ran: list[int] = []
        threads = [
            threading.Thread(target=door.post, args=(lambda: ran.append(threading.get_ident()),))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        await until(lambda: len(ran) == 8)
        assert set(ran) == {threading.get_ident()}
        for thread in threads:
            thread.join()

    run(main)


def test_a_post_wakes_a_loop_that_sleeps(run):
    async def main():
        door = open_door()
        waiter = door.waiter()
        timer = threading.Timer(0.01, lambda: door.post(lambda: door.settle(waiter, None)))
        timer.start()
        with anyio.fail_after(5):
            await door.park(waiter)
        timer.join()

    run(main)


def test_callbacks_run_outside_of_every_tasks_context(run, until):
    """A poll that was scheduled by a task would keep its context, and all in it, alive for ever."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")

    async def main():
        door = open_door()
        variable.set("a request's data")
        seen: list[str] = []
        door.soon(lambda: seen.append(variable.get()))
        await until(lambda: len(seen) == 1)
        assert seen == ["none"]

    run(main)


def test_a_checkpoint_lets_others_run_and_notices_a_cancellation(run):
    async def main():
        door = open_door()
        ran: list[int] = []

        async def other():
            ran.append(1)

        async with anyio.create_task_group() as group:
            group.start_soon(other)
            await door.checkpoint()
            await door.checkpoint()
            assert ran == [1]
        with anyio.CancelScope() as scope:
            scope.cancel()
            await door.checkpoint()
            pytest.fail("not a checkpoint")
        assert scope.cancelled_caught

    run(main)


# -- the end -------------------------------------------------------------------------------------------


def test_posting_to_a_loop_that_is_gone_raises_door_closed_and_nothing_else(run):
    """C36."""
    doors = []

    async def main():
        doors.append(open_door())

    run(main)
    for _ in range(3):
        with pytest.raises(DoorClosed):
            doors[0].post(lambda: pytest.fail("ran after the end"))


def test_cleanup_runs_when_the_loop_ends_and_may_await(run):
    ran: list[str] = []
    doors = []

    async def cleanup():
        await anyio.lowlevel.checkpoint()
        ran.append("cleanup")

    async def main():
        doors.append(open_door())
        doors[0].on_close(cleanup)
        ran.append("main")

    run.bare(main)
    assert ran == ["main", "cleanup"]


def test_cleanup_may_wait_through_the_door(run):
    """It drains: what it waits for is announced by posts and polls."""
    ran: list[str] = []

    async def main():
        door = open_door()

        async def cleanup():
            waiter = door.waiter()
            thread = threading.Thread(
                target=door.post, args=(lambda: door.soon(lambda: door.settle(waiter, None)),)
            )
            thread.start()
            await door.park(waiter)
            thread.join()
            ran.append("cleanup")

        door.on_close(cleanup)

    run.bare(main)
    assert ran == ["cleanup"]


def test_cleanup_runs_also_when_the_program_fails(run):
    ran: list[int] = []
    doors = []

    async def cleanup():
        ran.append(1)

    async def main():
        doors.append(open_door())
        doors[0].on_close(cleanup)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run.bare(main)
    assert ran == [1]


def test_closed_tells(run):
    doors = []

    async def main():
        door = open_door()
        doors.append(door)
        assert not door.closed
        await anyio.lowlevel.checkpoint()

    run.bare(main)
    assert doors[0].closed


# -- loops of other kinds ------------------------------------------------------------------------------


def test_eager_tasks_work(auto_vd):
    """C21: a task that runs its first step inside create_task()."""
    if not hasattr(asyncio, "eager_task_factory"):
        pytest.skip("Python 3.12 and later")

    @aiogpu.task
    async def double(number):
        x = await aiogpu.to_device(torch.full((3,), number))
        y = torch.zeros_like(x)
        auto_vd.launch(lambda: y.copy_(x * 2), reads=[x], writes=[y])
        return (await aiogpu.to_host(y)).tolist()

    async def main():
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        tasks = [asyncio.create_task(double(number)) for number in range(10)]
        assert await asyncio.gather(*tasks) == [[2 * n] * 3 for n in range(10)]

    asyncio.run(main())


def test_asyncios_debug_mode_finds_nothing(auto_vd):
    """It checks that `call_soon` is called from the loop's own thread."""

    async def main():
        await aiogpu.to_device(torch.ones(3))
        await aiogpu.to_host(torch.ones(100_000))
        assert await aiogpu.run_sync(lambda: 3) == 3

    asyncio.run(main(), debug=True)


@pytest.mark.parametrize("library", ["nest_asyncio", "trio guest"])
def test_loops_inside_loops(library):
    """C47: in a process of its own, as nest_asyncio patches the library for good."""
    if library == "nest_asyncio":
        pytest.importorskip("nest_asyncio")
        body = """
            import asyncio, nest_asyncio, torch, aiogpu
            nest_asyncio.apply()
            async def inner():
                return (await aiogpu.to_host(await aiogpu.to_device(torch.ones(100_000)))).sum()
            async def main():
                await aiogpu.to_device(torch.ones(3))
                assert asyncio.run(inner()) == 100_000
                assert asyncio.get_event_loop().run_until_complete(inner()) == 100_000
                assert await inner() == 100_000
            asyncio.run(main())
        """
    else:
        body = """
            import asyncio, torch, trio, aiogpu
            async def inner():
                return (await aiogpu.to_host(await aiogpu.to_device(torch.ones(100_000)))).sum()
            async def host():
                loop, done = asyncio.get_running_loop(), asyncio.Event()
                outcomes = []
                trio.lowlevel.start_guest_run(
                    inner,
                    run_sync_soon_threadsafe=loop.call_soon_threadsafe,
                    done_callback=lambda outcome: (outcomes.append(outcome), done.set()),
                )
                assert await inner() == 100_000
                await done.wait()
                assert outcomes[0].unwrap() == 100_000
            asyncio.run(host())
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception" not in done.stderr, done.stderr


@pytest.mark.parametrize("found", [(), ("lowlevel",)])
def test_trio_that_another_thread_is_importing_right_now_runs_no_loop(monkeypatch, found):
    half = types.ModuleType("trio")
    for name in found:
        setattr(half, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "trio", half)
    assert _loops.current_token() is None
