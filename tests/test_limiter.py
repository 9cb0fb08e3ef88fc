"""Limiter: tokens come back when the device is done, once, whatever happens; in order; nobody starves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from _kernels import cell, go, read, write
from _small_blocks import CHUNK, small_virtual

import aiogpu
from aiogpu import Limiter
from aiogpu.testing import VirtualFault


def borrowed(limiter: Limiter) -> int:
    return limiter.statistics().borrowed


def waiting(limiter: Limiter) -> int:
    return limiter.statistics().waiting


@contextlib.asynccontextmanager
async def held(limiter: Limiter, nbytes: int | None = None):
    """A slot whose tokens come back at the end of the block, in that very tick: no device is asked."""
    slot = limiter.slot(nbytes)
    await slot.__aenter__()
    yield
    give_back(slot)


def give_back(slot: Any) -> None:
    slot._outstanding = 1
    slot._one_over()


# -- when tokens come back -----------------------------------------------------------------------------


def test_a_token_comes_back_when_the_device_is_done(run, vd, until):
    """C67: leaving the block is not the end of its work."""
    limiter, x = Limiter(operations=1), cell()

    @aiogpu.task
    async def block():
        async with limiter.slot():
            write(vd, x, 1)

    async def main():
        await block()
        assert borrowed(limiter) == 1
        async with anyio.create_task_group() as group:
            group.start_soon(block)
            await until(lambda: waiting(limiter) == 1)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert (borrowed(limiter), waiting(limiter)) == (1, 1)
            vd.run_all()
            await until(lambda: waiting(limiter) == 0)
        vd.run_all()
        await until(lambda: borrowed(limiter) == 0)

    run(main)


@pytest.mark.parametrize("how", ["exception", "cancellation", "closed"])
def test_also_after_whatever_ends_the_block(run, vd, until, how):
    limiter, x = Limiter(bytes=10), cell()
    inside = []

    @aiogpu.task
    async def block():
        async with limiter.slot(10):
            write(vd, x, 1)
            inside.append(True)
            if how == "exception":
                raise ZeroDivisionError
            await anyio.sleep_forever()

    async def main():
        if how == "exception":
            with pytest.raises(ZeroDivisionError):
                await block()
        elif how == "cancellation":
            async with anyio.create_task_group() as group:
                group.start_soon(block)
                await until(lambda: inside)
                group.cancel_scope.cancel()
        else:
            await closed_inside(block())
        assert limiter.statistics().borrowed_bytes == 10
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert borrowed(limiter) == 1
        vd.run_all()
        await until(lambda: borrowed(limiter) == 0)

    async def closed_inside(coroutine):
        # As the garbage collector does with a task that nobody holds any more: driven by hand until it is
        # in the block, then closed.
        while not inside:
            coroutine.send(None)
            await anyio.lowlevel.checkpoint()
        coroutine.close()

    if how == "closed" and run.is_trio:
        pytest.skip("trio's coroutines cannot be driven by hand")
    run(main)


def test_a_transfer_that_was_started_in_the_block_counts(run, until):
    """It is on a copy stream of its own; the task's stream says nothing about it."""
    limiter = Limiter(operations=1)
    with small_virtual(auto=False) as (device, _):

        @aiogpu.task
        async def main():
            before = aiogpu.to_device(torch.ones(CHUNK))
            async with limiter.slot():
                inside = aiogpu.to_device(torch.ones(CHUNK))
                # Everything moves but the copies into the second one, which are still to be submitted.
            await until(lambda: "copy" in [name for name, _ in device.log])
            assert borrowed(limiter) == 1
            while not (before.done() and inside.done()):
                assert borrowed(limiter) == 1 or inside.done()
                device.run_all()
                await anyio.lowlevel.checkpoint()
            await until(lambda: borrowed(limiter) == 0)
            await before
            await inside

        go(run, device, main)


def test_transfers_from_before_the_block_do_not_count(run, until):
    limiter = Limiter(operations=1)
    with small_virtual(auto=False) as (device, _):

        @aiogpu.task
        async def main():
            before = aiogpu.to_device(torch.ones(CHUNK))
            await until(lambda: "copy" in [name for name, _ in device.log])
            async with limiter.slot():
                pass
            while borrowed(limiter):  # the block's own stream moves, the copy does not
                for stream in device.movable():
                    if stream.native.kind != "copy":
                        device.step(stream)
                await anyio.lowlevel.checkpoint()
            assert not before.done()
            while not before.done():
                device.run_all()
                await anyio.lowlevel.checkpoint()
            await before

        go(run, device, main)


def test_the_work_of_children_counts(run, vd, until):
    limiter, x = Limiter(operations=1), cell()
    seen: list[float] = []

    @aiogpu.task
    async def child():
        write(vd, x, 1)

    @aiogpu.task
    async def block():
        async with limiter.slot():
            async with anyio.create_task_group() as group:
                group.start_soon(child)

    @aiogpu.task
    async def next_one():
        async with limiter.slot():
            read(vd, x, seen)  # the race detector complains unless the host has seen the child's end

    async def main():
        await block()
        async with anyio.create_task_group() as group:
            group.start_soon(next_one)
            await until(lambda: waiting(limiter) == 1)
            assert seen == []
            vd.run_all()
            await until(lambda: waiting(limiter) == 0)
            vd.run_all()

    go(run, vd, main)
    assert seen == [1]


def test_outside_of_tasks_the_ambient_stream_counts(run, vd, until):
    limiter, x = Limiter(operations=1), cell()

    async def main():
        async with limiter.slot():
            write(vd, x, 1)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert borrowed(limiter) == 1
        vd.run_all()
        await until(lambda: borrowed(limiter) == 0)

    run(main)


def test_the_end_of_the_loop_costs_no_token(run, vd, short_grace, abandoned, fast_watchdog, blocking_until):
    """C36: the loop closes while the device works; nobody is left to look, but the notifier."""
    limiter, x = Limiter(operations=1), cell()

    @aiogpu.task
    async def block():
        async with limiter.slot():
            write(vd, x, 1)

    async def main():
        async with aiogpu.Runtime():
            await block()

    run(main)
    assert borrowed(limiter) == 1
    vd.run_all()
    blocking_until(lambda: borrowed(limiter) == 0)
    assert abandoned


def test_a_lost_device_gives_the_tokens_back(run, vd, until, fast_watchdog):
    """Those who wait for one shall meet the device's error themselves, at once."""
    limiter, x = Limiter(operations=1), cell()

    @aiogpu.task
    async def block():
        async with limiter.slot():
            write(vd, x, 1)

    async def main():
        await block()
        async with anyio.create_task_group() as group:
            group.start_soon(refused)
            await until(lambda: waiting(limiter) == 1)
            vd.fault()
        await until(lambda: borrowed(limiter) == 0)

    async def refused():
        with pytest.raises((aiogpu.DeviceLostError, VirtualFault)):
            await block()

    run(main)


# -- order and capacity --------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"operations": 4}, {"bytes": 4 * 100}], ids=["operations", "bytes"])
def test_a_hundred_requests_under_a_limit_that_fits_four(run, vd, moving, limits):
    """C67: all finish, and never are more than four on the device."""
    limiter = Limiter(**limits)
    on_device = peak = 0
    lock = threading.Lock()

    def change(by: int) -> None:
        nonlocal on_device, peak
        with lock:
            on_device += by
            peak = max(peak, on_device)

    @aiogpu.task
    async def request():
        async with limiter.slot(100 if "bytes" in limits else None):
            change(1)
            for _ in range(3):
                vd.launch(lambda: None)
            vd.launch(lambda: change(-1))

    async def main():
        async with anyio.create_task_group() as group:
            for _ in range(100):
                group.start_soon(request)
        await aiogpu.synchronize("cpu")

    with moving(vd):
        run(main)
    assert on_device == 0
    assert peak == 4


def test_requests_are_served_in_the_order_of_their_arrival(run, until):
    limiter, served = Limiter(bytes=10), []

    async def request(number: int, nbytes: int) -> None:
        async with held(limiter, nbytes):
            served.append(number)
            await anyio.lowlevel.checkpoint()

    async def main():
        async with anyio.create_task_group() as group:
            async with held(limiter, 6):
                # Every second one is large: those between would fit, and do not overtake.
                for number in range(10):
                    group.start_soon(request, number, 2 if number % 2 else 10)
                    await until(lambda: waiting(limiter) == number + 1)  # noqa: B023
                assert served == []
        assert served == list(range(10))

    run(main)


def test_small_requests_do_not_starve_a_large_one(run, until):
    limiter, large_had_its_turn = Limiter(bytes=10), anyio.Event()

    async def small() -> None:
        while not large_had_its_turn.is_set():
            async with held(limiter, 1):
                await anyio.lowlevel.checkpoint()

    async def main():
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(small)
            await until(lambda: borrowed(limiter) > 0)
            async with held(limiter, 10):
                assert borrowed(limiter) == 1  # whether all of the others wait again is the loop's affair
                large_had_its_turn.set()

    run(main)


def test_a_slot_that_is_free_is_a_checkpoint_all_the_same(run):
    """A cancellation is noticed there, and the token is given back."""
    limiter = Limiter(operations=1)

    async def main():
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with limiter.slot():
                pytest.fail("not cancelled")
        assert scope.cancelled_caught
        assert borrowed(limiter) == 0

    run(main)


# -- cancellation --------------------------------------------------------------------------------------


def test_a_cancelled_waiter_takes_no_token_with_it(run, until):
    limiter = Limiter(bytes=10)

    async def main():
        async with anyio.create_task_group() as group:
            async with held(limiter, 5):
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as others:
                        others.start_soon(enter, limiter, 10)
                        await until(lambda: waiting(limiter) == 1)
                        group.start_soon(enter, limiter, 5)  # fits, but stands behind
                        await until(lambda: waiting(limiter) == 2)
                        scope.cancel()
                await until(lambda: waiting(limiter) == 0)
        assert limiter.statistics().borrowed_bytes == 0

    run(main)


async def enter(limiter: Limiter, nbytes: int | None = None) -> None:
    async with held(limiter, nbytes):
        pass


@pytest.mark.parametrize("native", [False, True], ids=["scope", "asyncio's cancel"])
def test_a_token_granted_in_the_tick_of_the_cancellation_is_given_back(run, until, native):
    limiter = Limiter(operations=1)

    async def main():
        slot = limiter.slot()
        await slot.__aenter__()
        if native:
            task = asyncio.ensure_future(stay(limiter))
            await until(lambda: waiting(limiter) == 1)
            give_back(slot)
            assert (borrowed(limiter), waiting(limiter)) == (1, 0)  # granted, and not resumed yet
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(stay, limiter)
                await until(lambda: waiting(limiter) == 1)
                give_back(slot)
                assert (borrowed(limiter), waiting(limiter)) == (1, 0)
                group.cancel_scope.cancel()
        assert borrowed(limiter) == 0
        await enter(limiter)

    if native and run.is_trio:
        pytest.skip("trio has scopes only")
    run(main)


async def stay(limiter: Limiter) -> None:
    slot = limiter.slot()
    await slot.__aenter__()
    try:
        await anyio.sleep_forever()
    finally:
        give_back(slot)


def test_hundreds_of_random_cancellations_lose_nothing(run, anydevice, until):
    limiter, chance = Limiter(operations=3, bytes=100), random.Random(5)

    @aiogpu.task
    async def request(nbytes: int, steps: int) -> None:
        async with limiter.slot(nbytes):
            assert limiter.statistics().borrowed_bytes <= 100
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()

    async def cancelled_after(ticks: int) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(request, chance.randrange(101), chance.randrange(4))
            for _ in range(ticks):
                await anyio.lowlevel.checkpoint()
            if chance.random() < 0.7:
                group.cancel_scope.cancel()

    async def main():
        async with anyio.create_task_group() as group:
            for _ in range(300):
                group.start_soon(cancelled_after, chance.randrange(40))
        await until(lambda: borrowed(limiter) == 0)
        assert limiter.statistics().borrowed_bytes == waiting(limiter) == 0

    run(main)


# -- several loops -------------------------------------------------------------------------------------


def test_loops_in_several_threads_share_one(run, anydevice):
    """C37: it is made outside of any loop, and belongs to none."""
    limiter = Limiter(operations=2)
    inside, peak, served = set(), 0, []
    lock = threading.Lock()

    @aiogpu.task
    async def request(name: tuple[int, int]) -> None:
        nonlocal peak
        async with limiter.slot():
            with lock:
                inside.add(name)
                peak = max(peak, len(inside))
            await anyio.lowlevel.checkpoint()
            with lock:
                inside.discard(name)
                served.append(name)

    async def requests(thread: int) -> None:
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(request, (thread, number))

    threads = [threading.Thread(target=run, args=(requests, number)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(served) == 60
    assert peak <= 2
    assert borrowed(limiter) == waiting(limiter) == 0


def test_a_waiter_whose_loop_is_gone_is_passed_over(run):
    """A loop closed in cold blood, with a coroutine that nobody finishes: no token for it, and none twice."""
    limiter = Limiter(operations=1)
    slot = limiter.slot()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)

    async def begin() -> asyncio.Task[None]:
        await slot.__aenter__()
        task = asyncio.ensure_future(stay(limiter))
        while not waiting(limiter):
            await asyncio.sleep(0)
        return task

    task = loop.run_until_complete(begin())
    loop.close()
    give_back(slot)  # granted to nobody
    assert borrowed(limiter) == waiting(limiter) == 0
    del task
    gc.collect()  # the coroutine is closed only now
    assert borrowed(limiter) == 0
    run(enter, limiter)
    assert borrowed(limiter) == 0


# -- misuse --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "says", "make"),
    [
        (ValueError, "something to limit", lambda: Limiter()),
        (ValueError, "operations must be at least 1", lambda: Limiter(0)),
        (ValueError, "bytes must be at least 1", lambda: Limiter(bytes=0)),
        (TypeError, "operations is a whole number", lambda: Limiter(2.5)),
        (TypeError, "operations is a whole number", lambda: Limiter(True)),
        (TypeError, "nbytes is a whole number", lambda: Limiter(bytes=9).slot("9")),
        (ValueError, "nbytes must be at least 0", lambda: Limiter(1).slot(-1)),
        (ValueError, r"counts bytes: .*slot\(nbytes\)", lambda: Limiter(bytes=9).slot()),
        (ValueError, "can never be had .* split the work", lambda: Limiter(bytes=9).slot(10)),
    ],
)
def test_what_cannot_work_is_refused_before_any_waiting(error, says, make):
    with pytest.raises(error, match=says):
        make()


def test_numbers_of_other_libraries_count_as_well():
    numpy = pytest.importorskip("numpy")
    limiter = Limiter(bytes=numpy.int64(9))
    assert limiter.slot(numpy.int32(9)).nbytes == 9


def test_wrong_ways_to_use_one_say_the_right_one(run_asyncio):
    limiter = Limiter(1)

    async def main():
        with pytest.raises(TypeError, match=r"async with limiter.slot\(\)"):
            async with limiter:
                pass
        with pytest.raises(TypeError, match=r"async with limiter.slot\(\): await aiogpu.run_sync"):
            await aiogpu.run_sync(print, limiter=limiter)
        slot = limiter.slot()
        async with slot:
            with pytest.raises(RuntimeError, match="entered once"):
                await slot.__aenter__()

    run_asyncio(main)


def test_it_stays_out_of_captures(run_asyncio, vd, until):
    limiter = Limiter(1)

    async def main():
        vd.is_capturing = True
        submitted = vd.submitted
        with pytest.raises(aiogpu.CaptureError, match="around the capture"):
            async with limiter.slot():
                pass
        assert borrowed(limiter) == 0
        vd.is_capturing = False
        with pytest.raises(aiogpu.CaptureError, match="behind the capture"):
            async with limiter.slot():
                vd.is_capturing = True
        vd.is_capturing = False
        assert borrowed(limiter) == 0
        assert vd.submitted == submitted

    run_asyncio(main)


def test_it_tells_what_it_has_given_out(run_asyncio, until):
    limiter = Limiter(operations=2, bytes=100)

    async def main():
        async with anyio.create_task_group() as group:
            async with held(limiter, 60):
                group.start_soon(enter, limiter, 50)
                await until(lambda: waiting(limiter) == 1)
                assert repr(limiter) == "<Limiter, 1 of 2 operations, 60 of 100 bytes borrowed, 1 waiting>"
                assert limiter.statistics().waiting_bytes == 50
        assert repr(limiter.slot(3)).startswith("<Slot of 3 bytes of <Limiter")

    run_asyncio(main)
