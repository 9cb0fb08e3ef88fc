"""Completions in, wake-ups out: what the reactor asks, when it arms, and whom it wakes."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiogpu
from aiogpu import _reactor
from aiogpu._engine import Engine
from aiogpu._reactor import Point, Reactor
from aiogpu.drivers.base import Stream

MODES = ["prompt", "never", "early", "twice", "late"]


async def opened() -> tuple[Reactor, Engine]:
    runtime = aiogpu.current_runtime()
    engine = await runtime.engine(None)
    return runtime.reactor, engine


def watch(reactor: Reactor, engine: Engine, stream: Stream, into: list[Any], name: Any = None) -> Point:
    """Record a point on ``stream``; when it is over, ``(name, error, thread)`` is added to ``into``."""
    event = engine.driver.record(stream)

    def over(error: BaseException | None) -> None:
        into.append((name, error, threading.get_ident()))

    return reactor.watch(engine, stream, event, over)


# -- poll while busy, arm when idle ------------------------------------------------------------------


def test_work_that_completes_while_the_loop_is_busy_needs_no_notification(run, auto_vd):
    async def main():
        for number in range(200):
            assert (await aiogpu.to_host(torch.tensor([number]))).item() == number
        return aiogpu.stats()

    stats = run(main)
    assert stats.notifications == auto_vd.armed == 0
    assert stats.looks >= 200


def test_a_loop_that_goes_idle_arms_once_for_each_stream(run, vd, until):
    async def main():
        reactor, engine = await opened()
        over: list[Any] = []
        for number, stream in enumerate(engine.compute.streams()[:3]):
            for _ in range(5):
                watch(reactor, engine, stream, over, number)
        await until(lambda: reactor.sleeping)
        assert vd.armed == reactor.notifications == 3
        looks = reactor.looks
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        assert reactor.looks - looks <= 1, "a sleeping reactor polls"  # one for a watchdog's turn
        vd.run_all()
        await until(lambda: len(over) == 15)

    run(main)


def test_only_the_heads_of_streams_are_asked(run, vd, until, monkeypatch):
    async def main():
        reactor, engine = await opened()
        over: list[Any] = []
        first, second = engine.compute.streams()[:2]
        points = [watch(reactor, engine, stream, over) for stream in (first, second) for _ in range(100)]
        asked: list[Any] = []
        query = vd.query
        monkeypatch.setattr(vd, "query", lambda event: asked.append(event) or query(event))
        looks = reactor.looks
        await until(lambda: reactor.looks > looks and reactor.sleeping)
        heads = {id(points[0].event), id(points[100].event)}
        assert {id(event) for event in asked} == heads
        vd.run_all()
        await until(lambda: len(over) == 200)

    run(main)


def test_only_a_stream_whose_head_has_changed_is_armed_again(run, vd, until):
    async def main():
        reactor, engine = await opened()
        over: list[Any] = []
        moved, still = engine.compute.streams()[:2]
        watch(reactor, engine, moved, over, "first")
        with vd.on(moved):
            gate = vd.latch()
        watch(reactor, engine, moved, over, "second")
        with vd.on(still):
            latch = vd.latch()
        watch(reactor, engine, still, over, "still")
        await until(lambda: reactor.sleeping)
        assert vd.armed == 2
        vd.run_all()
        await until(lambda: over and reactor.sleeping)
        assert [name for name, _, _ in over] == ["first"]
        assert vd.armed == 3
        gate.release()
        latch.release()
        vd.run_all()
        await until(lambda: len(over) == 3)

    run(main)


def test_a_new_point_makes_a_sleeping_reactor_busy_again(run, vd, until):
    async def main():
        reactor, engine = await opened()
        over: list[Any] = []
        held, stream = engine.compute.streams()[:2]
        latch = vd.latch(held)
        watch(reactor, engine, held, over, "held")
        await until(lambda: reactor.sleeping)
        armed = vd.armed
        event = engine.driver.record(stream)
        vd.run_all()
        reactor.watch(engine, stream, event, lambda _: over.append(("new", None, 0)))
        await until(lambda: over)
        assert over[0][0] == "new"
        assert vd.armed == armed, "it was complete: nothing had to be armed for it"
        latch.release()
        vd.run_all()
        await until(lambda: len(over) == 2)

    run(main)


def test_infinite_spin_never_arms(run, vd):
    async def main():
        async with aiogpu.Runtime(spin=math.inf) as runtime:
            operation = aiogpu.to_device(torch.ones(3))
            looks = runtime.reactor.looks
            for _ in range(300):
                await anyio.lowlevel.checkpoint()
            assert runtime.reactor.looks - looks >= 100
            assert not operation.done()
            assert vd.armed == 0
            vd.run_all()
            assert (await operation).sum() == 3

    run(main)


def test_zero_spin_arms_at_the_first_look(run, vd, until):
    async def main():
        async with aiogpu.Runtime(spin=0) as runtime:
            operation = aiogpu.to_device(torch.ones(3))
            await until(lambda: vd.armed)
            assert runtime.reactor.looks <= 2  # the watchdog may have had its turn
            assert runtime.reactor.sleeping
            vd.run_all()
            await operation

    run(main)


# -- a wake-up is a hint -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_results_are_right_however_notifications_come(run, vd, moving, fast_watchdog, mode):
    """C31, C38: never, early, twice, or for points that are long over."""
    vd.notifications = mode

    @aiogpu.task
    async def double(number):
        x = await aiogpu.to_device(torch.full((4,), number))
        y = torch.zeros_like(x)
        vd.launch(lambda: y.copy_(x * 2), reads=[x], writes=[y])
        return (await aiogpu.to_host(y)).tolist()

    async def main():
        for start in range(0, 15, 3):
            numbers = range(start, start + 3)
            assert await aiogpu.gather(*map(double, numbers)) == tuple([2 * n] * 4 for n in numbers)

    with moving(vd):
        run(main)


def test_an_early_notification_resolves_nothing(run, vd, until):
    vd.notifications = "early"

    async def main():
        async with aiogpu.Runtime(spin=0) as runtime:
            operation = aiogpu.to_device(torch.ones(3))
            looks = runtime.reactor.looks
            await until(lambda: runtime.reactor.looks >= looks + 2)
            assert vd.armed >= 1
            assert not operation.done()
            vd.run_all()
            await operation

    run(main)


def test_a_late_notification_of_an_old_point_resolves_no_newer_one(run, vd, until):
    """C38: the hint says nothing about who it was for."""
    vd.notifications = "late"

    async def main():
        reactor, engine = await opened()
        over: list[Any] = []
        stream = engine.compute.streams()[0]
        watch(reactor, engine, stream, over, "old")
        await until(lambda: reactor.sleeping)
        vd.run_all()
        reactor.wake()
        await until(lambda: len(over) == 1)
        latch = vd.latch(stream)
        watch(reactor, engine, stream, over, "new")
        await until(lambda: reactor.sleeping)
        looks = reactor.looks
        vd.deliver()
        await until(lambda: reactor.looks > looks)
        assert [name for name, _, _ in over] == ["old"]
        latch.release()
        vd.run_all()
        vd.deliver()
        await until(lambda: len(over) == 2)

    run(main)


def test_the_watchdog_finds_what_nobody_announces(run, vd, moving):
    vd.notifications = "never"

    async def main():
        async with aiogpu.Runtime(spin=0):
            with anyio.fail_after(3):  # two periods, and a busy machine
                assert (await aiogpu.to_device(torch.ones(3))).sum() == 3

    with moving(vd):
        run(main)


def test_a_point_is_finished_once(run, vd, until):
    async def main():
        reactor, engine = await opened()
        over: list[Any] = []
        point = watch(reactor, engine, engine.compute.streams()[0], over)
        vd.run_all()
        await until(lambda: over)
        point.finish(None)
        point.finish(RuntimeError("a late error"))
        assert len(over) == 1
        assert engine.leaked == []

    run(main)


def test_events_are_recycled_only_when_complete(run, vd, moving, monkeypatch):
    early: list[Any] = []
    monkeypatch.setattr(vd, "recycle", lambda event: event.done or early.append(event))

    async def main():
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(aiogpu.synchronize)
        await aiogpu.to_host(torch.ones(10))

    with moving(vd):
        run(main)
    assert early == []


def test_what_was_armed_is_disarmed_once_and_only_when_seen_complete(run, vd, moving, monkeypatch):
    """A notification stream that is used again too early would hold one waiter behind another's event."""
    armed: list[Any] = []
    disarmed: list[Any] = []
    arm = vd.arm

    def arming(event, signal):
        arm(event, signal)
        armed.append(event)
        return event

    def disarming(token):
        assert token.done
        disarmed.append(token)

    monkeypatch.setattr(vd, "arm", arming)
    monkeypatch.setattr(vd, "disarm", disarming)

    async def main():
        async with aiogpu.Runtime(spin=0):
            for _ in range(20):
                await aiogpu.gather(aiogpu.synchronize(), aiogpu.to_device(torch.ones(3)))

    with moving(vd):
        run(main)
    assert armed
    assert {id(token) for token in armed} == {id(token) for token in disarmed}
    assert len(armed) == len(disarmed)


def test_many_wake_ups_make_one_post(run, vd, monkeypatch):
    async def main():
        reactor, engine = await opened()
        over: list[Any] = []
        latch = vd.latch(engine.compute.streams()[0])
        watch(reactor, engine, engine.compute.streams()[0], over)
        posts: list[Any] = []
        post = reactor.door.post
        monkeypatch.setattr(reactor.door, "post", lambda fn: posts.append(fn) or post(fn))

        def storm():
            for _ in range(1000):
                reactor.wake()

        thread = threading.Thread(target=storm)
        thread.start()
        thread.join()  # the loop stands still meanwhile, so none of them has been answered
        assert 1 <= len(posts) <= 2  # the watchdog may have had its turn
        latch.release()
        vd.run_all()
        while not over:
            await anyio.lowlevel.checkpoint()

    run(main)


# -- the loop's turn ---------------------------------------------------------------------------------


def test_a_flood_of_completions_is_resolved_in_bounded_batches(run, vd, until, monkeypatch):
    async def main():
        reactor, engine = await opened()
        over: list[Any] = []
        stream = engine.compute.streams()[0]
        for _ in range(1000):
            watch(reactor, engine, stream, over)
        # A clock on which every look at it costs a millisecond: twice a look's budget.
        clock = iter(range(10**9))
        monkeypatch.setattr(_reactor, "perf_counter", lambda: next(clock) * 1e-3)
        vd.run_all()
        reactor.wake()
        looks, turns = reactor.looks, 0
        while len(over) < 1000:
            await anyio.lowlevel.checkpoint()
            turns += 1
        assert reactor.looks - looks >= 1000 // _reactor._BATCH, "a look went beyond its budget"
        assert turns >= 4, "others did not get their turn in between"

    run(main)


def test_completions_of_one_stream_are_told_in_order(run, vd, until):
    async def main():
        reactor, engine = await opened()
        over: list[Any] = []
        for number in range(300):
            watch(reactor, engine, engine.compute.streams()[0], over, number)
        vd.run_all()
        await until(lambda: len(over) == 300)
        assert [name for name, _, _ in over] == list(range(300))

    run(main)


def test_a_blocked_loop_does_not_delay_queued_device_work(run, vd, moving):
    """C33: nothing on the device waits for Python's event loop."""

    async def main():
        ran = threading.Event()
        operations = [aiogpu.to_device(torch.ones(8)) for _ in range(10)]
        vd.launch(ran.set)
        assert ran.wait(5), "the device stood still while the loop was blocked"
        for operation in operations:
            await operation

    with moving(vd):
        run(main)


# -- how many notifications --------------------------------------------------------------------------


def test_a_transfer_in_many_chunks_asks_for_one_notification(run, vd, moving):
    """C33: a callback in the middle of a pipeline is a round trip."""

    async def main():
        source = torch.arange(5 * 2**20)  # 40 MiB: five chunks
        async with aiogpu.Runtime(spin=0):
            assert torch.equal(await aiogpu.to_device(source), source)

    with moving(vd):
        run(main)
    assert vd.log.count(("copy", vd.log[-2][1])) >= 5
    assert vd.armed <= 1


def test_many_waiters_for_one_operation_share_one_notification(run, vd, until):
    async def main():
        async with aiogpu.Runtime(spin=0) as runtime:
            operation = aiogpu.to_device(torch.ones(3))
            got: list[Any] = []

            async def wait():
                got.append(await operation)

            async with anyio.create_task_group() as group:
                for _ in range(50):
                    group.start_soon(wait)
                await until(lambda: runtime.reactor.sleeping)
                assert vd.armed == 1
                vd.run_all()
            assert len(got) == 50

    run(main)


# -- whose thread ------------------------------------------------------------------------------------


def test_callbacks_run_on_the_loops_thread_not_on_the_drivers(run, vd, moving, until):
    """C34: user code and destructors never run on the thread that moves the device."""

    async def main(mover):
        reactor, engine = await opened()
        over: list[Any] = []
        streams = engine.compute.streams()
        for stream in streams:
            watch(reactor, engine, stream, over)
        await until(lambda: len(over) == len(streams))
        assert {thread for _, _, thread in over} == {threading.get_ident()}
        assert threading.get_ident() != mover.thread.ident

    with moving(vd) as mover:
        run(main, mover)


def test_buffers_are_dropped_on_the_loops_thread(run, vd, moving, until):
    class Buffer:
        def __del__(self):
            dropped.append(threading.get_ident())

    dropped: list[int] = []

    async def main():
        reactor, engine = await opened()
        stream = engine.compute.streams()[0]
        reactor.watch(engine, stream, engine.driver.record(stream), None, Buffer())
        await until(lambda: dropped)
        assert dropped == [threading.get_ident()]

    with moving(vd):
        run(main)


def test_a_callback_may_start_transfers(run, vd, moving, until):
    """C34: calling the device from a completion must not deadlock."""

    async def main():
        reactor, engine = await opened()
        stream = engine.compute.streams()[0]
        started: list[Any] = []

        def again(_):
            started.append(aiogpu.to_device(torch.ones(4)))
            started.append(aiogpu.to_host(torch.ones(40_000)))

        reactor.watch(engine, stream, engine.driver.record(stream), again)
        await until(lambda: started)
        assert (await started[0]).sum() == 4
        assert (await started[1]).sum() == 40_000

    with moving(vd):
        run(main)


def test_a_done_callback_of_an_asyncio_task_runs_on_the_loops_thread(run_asyncio, vd, moving):
    async def main():
        threads: list[int] = []
        task = asyncio.ensure_future(aiogpu.synchronize())
        task.add_done_callback(lambda _: threads.append(threading.get_ident()))
        await task
        await asyncio.sleep(0)
        assert threads == [threading.get_ident()]

    with moving(vd):
        run_asyncio(main)


# -- several loops -----------------------------------------------------------------------------------


def _in_threads(run: Any, mains: list[Any]) -> list[BaseException | None]:
    """Run each on an event loop in a thread of its own."""
    errors: list[BaseException | None] = [None] * len(mains)

    def body(index: int) -> None:
        try:
            run(mains[index])
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=body, args=(index,)) for index in range(len(mains))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors


@pytest.mark.parametrize("size", [64, 50_000], ids=["small", "large"])
@pytest.mark.parametrize("moved", ["virtual", "cpu"])
def test_four_loops_in_four_threads_share_one_device(run, moving, request, size, moved):
    """C37, C49: each is awakened in its own loop, and gets its own data."""

    def main_of(seed):
        async def there_and_back(number):
            source = torch.full((size,), seed * 1000 + number)
            back = await aiogpu.to_host(await aiogpu.to_device(source))
            assert torch.equal(back, source)

        async def main():
            thread = threading.get_ident()
            async with anyio.create_task_group() as group:
                for number in range(16):
                    group.start_soon(there_and_back, number)
            assert threading.get_ident() == thread
            assert aiogpu.stats().pending == 0

        return main

    mains = [main_of(seed) for seed in range(4)]
    if moved == "virtual":
        with moving(request.getfixturevalue("vd")):
            assert _in_threads(run, mains) == [None] * 4
    else:
        assert _in_threads(run, mains) == [None] * 4


def test_sixty_four_transfers_on_one_loop_do_not_mix(run, anydevice):
    """C49."""

    async def there_and_back(number):
        source = torch.randn(257, generator=torch.Generator().manual_seed(number))
        return torch.equal(source, await aiogpu.to_host(await aiogpu.to_device(source)))

    async def main():
        assert all(await aiogpu.amap(there_and_back, range(64)))

    run(main)


def test_an_operation_can_be_awaited_in_another_loop(run, vd, until):
    """C37: the waiter is settled in its own loop."""
    operations: list[Any] = []
    started, waiting, finished = threading.Event(), threading.Event(), threading.Event()

    async def owner():
        operations.append(aiogpu.to_device(torch.ones(5)))
        started.set()
        await until(waiting.is_set)
        vd.run_all()
        assert (await operations[0]).sum() == 5
        await until(finished.is_set)

    async def guest():
        await until(started.is_set)
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            await until(lambda: operations[0]._waiters)
            waiting.set()

    async def wait():
        thread = threading.get_ident()
        assert (await operations[0]).sum() == 5
        assert threading.get_ident() == thread
        finished.set()

    assert _in_threads(run, [owner, guest]) == [None, None]
