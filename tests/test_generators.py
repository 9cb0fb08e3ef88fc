"""Async generators as tasks: what Python promises of them, with streams and torch state of their own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from _kernels import cell, go, read, write
from conftest import Run
from hypothesis import given, settings
from hypothesis import strategies as st

import aiogpu
from aiogpu._tasks import Task
from aiogpu.testing import RaceError, VirtualDevice, virtual_device

tick = anyio.lowlevel.checkpoint


# -- what it looks like ------------------------------------------------------------------------------


async def plain(a, b=2, *, c: int = 3) -> AsyncIterator[int]:
    """Its docstring."""
    yield a
    yield b
    yield c


def test_it_stays_an_async_generator_function():
    made = aiogpu.task(plain)
    assert inspect.isasyncgenfunction(made)
    assert inspect.isfunction(made)
    assert not inspect.iscoroutinefunction(made)
    assert inspect.signature(made) == inspect.signature(plain)
    assert (made.__name__, made.__qualname__, made.__doc__) == ("plain", "plain", "Its docstring.")
    assert inspect.isasyncgenfunction(aiogpu.task(device="cpu", priority=-1)(plain))


def test_its_calls_are_async_generators(run, anydevice):
    class Source:
        @aiogpu.task
        async def method(self, n):
            yield self, n

        @staticmethod
        @aiogpu.task
        async def static(n):
            yield n

    async def main():
        source = Source()
        assert inspect.isasyncgenfunction(source.method)
        generator = source.method(1)
        assert isinstance(generator, AsyncGenerator)
        assert [item async for item in generator] == [(source, 1)]
        assert [item async for item in Source.static(2)] == [2]
        assert [item async for item in aiogpu.task(plain)(1, c=5)] == [1, 2, 5]

    run(main)


def test_wrong_arguments_are_refused_at_the_call():
    with pytest.raises(TypeError, match="positional argument"):
        aiogpu.task(plain)()


def test_its_repr_tells_its_state(run_asyncio, anydevice):
    async def main():
        states = []

        @aiogpu.task
        async def numbers():
            states.append(repr(generator))
            yield 1

        generator = numbers()
        states.append(repr(generator))
        await anext(generator)
        states.append(repr(generator))
        await generator.aclose()
        states.append(repr(generator))
        name = numbers.__qualname__
        assert states == [
            f"<TaskGenerator {name}, {state}>" for state in ("not started", "running", "suspended", "ended")
        ]
        assert generator.ag_frame is None
        assert generator.__qualname__ == name

    run_asyncio(main)


def test_frameworks_can_use_it_as_a_context_manager(run, anydevice):
    """contextlib, and with it FastAPI's dependencies and lifespans."""

    async def main():
        @contextlib.asynccontextmanager
        @aiogpu.task
        async def resource():
            with torch.no_grad():
                try:
                    yield torch.is_grad_enabled()
                except ValueError as error:
                    log.append((str(error), torch.is_grad_enabled()))

        log: list[Any] = []
        async with resource() as inside:
            assert inside is False
            assert torch.is_grad_enabled()
            raise ValueError("in the block")
        assert log == [("in the block", False)]

    run(main)


# -- the protocol, against a plain generator -------------------------------------------------------------


class Odd(Exception):
    pass


CALLS = [
    "next",
    "send",
    "send nothing",
    "throw",
    "throw class",
    "throw nonsense",
    "exit",
    "close",
]


async def obliging(log: list[Any]):
    """Notes what happens to it; catches one exception and goes on."""
    try:
        log.append(("sent", (yield 1)))
        await tick()
        log.append(("sent", (yield 2)))
        try:
            yield 3
        except Odd as error:
            log.append(("caught", repr(error)))
            await tick()
            yield 4
        yield 5
    finally:
        log.append("finally")
        await tick()
        log.append("over")


async def stubborn(log: list[Any]):
    while len(log) < 4:
        try:
            log.append((yield len(log)))
        except (Odd, TypeError) as error:
            log.append(repr(error))
    raise Odd("enough")


async def play(make: Any, script: list[str]) -> list[Any]:
    """What each call of the script comes to, and what the generator has noted."""
    log: list[Any] = []
    generator = make(log)
    calls = {
        "next": lambda: anext(generator),
        "send": lambda: generator.asend("value"),
        "send nothing": lambda: generator.asend(None),
        "throw": lambda: generator.athrow(Odd("thrown")),
        "throw class": lambda: generator.athrow(Odd),
        "throw nonsense": lambda: generator.athrow("nonsense"),
        "exit": lambda: generator.athrow(GeneratorExit()),
        "close": lambda: generator.aclose(),
    }
    outcomes: list[Any] = []
    for each in script:
        try:
            outcomes.append(await calls[each]())
        except BaseException as error:
            outcomes.append(repr(error))
        outcomes.append(len(log))
    await generator.aclose()
    return [outcomes, log]


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(st.sampled_from(CALLS), max_size=8),
    source=st.sampled_from([obliging, stubborn]),
    loop=st.sampled_from(["asyncio", "trio"]),
    virtual=st.booleans(),
)
def test_whatever_is_done_to_it_comes_to_what_python_makes_of_a_plain_one(script, source, loop, virtual):
    async def main():
        expected = await play(source, script)
        assert await play(aiogpu.task(source), script) == expected
        assert await aiogpu.task(play)(aiogpu.task(source), script) == expected

    with virtual_device() if virtual else contextlib.nullcontext():
        Run(loop)(main)


def test_what_cannot_be_thrown_is_refused_and_changes_nothing(run, anydevice):
    async def main():
        @aiogpu.task
        async def numbers():
            with torch.no_grad():
                for i in range(3):
                    assert aiogpu._tasks.current_task() is not None
                    yield i, torch.is_grad_enabled()

        generator = numbers()
        assert await anext(generator) == (0, False)
        with pytest.raises(TypeError, match="exceptions must be"):
            await generator.athrow("nonsense")
        assert await anext(generator) == (1, False)
        assert torch.is_grad_enabled()
        await generator.aclose()

    run(main)


def test_anything_can_be_sent(run, auto_vd):
    """Also what cannot be compared."""
    numpy = pytest.importorskip("numpy")

    @aiogpu.task
    async def main():
        @aiogpu.task
        async def echo():
            sent = None
            while True:
                sent = yield sent

        generator = echo()
        await anext(generator)
        for value in (numpy.ones(3), torch.ones(3), None, {"x": [torch.ones(1)]}, object()):
            assert await generator.asend(value) is value
        await generator.aclose()

    run(main)


def test_a_second_consumer_at_the_same_time_is_refused(run, anydevice):
    async def main():
        @aiogpu.task
        async def slow():
            waiting.set()
            await may_go.wait()
            yield 1

        waiting, may_go = anyio.Event(), anyio.Event()
        generator = slow()
        async with anyio.create_task_group() as group:
            group.start_soon(anext, generator)
            await waiting.wait()
            for method in (generator.__anext__, generator.aclose):
                with pytest.raises(RuntimeError, match="asynchronous generator is already running"):
                    await method()
            may_go.set()
        await generator.aclose()

    run(main)


# -- order ---------------------------------------------------------------------------------------------


def produce(vd: VirtualDevice, x: torch.Tensor, n: int) -> Any:
    """A generator that writes one buffer again and again."""

    @aiogpu.task
    async def numbers():
        for i in range(n):
            write(vd, x, i + 1)
            yield x
        write(vd, x, 100)

    return numbers


async def consume_three(vd, seen):
    x = cell()
    async for item in produce(vd, x, 3)():
        read(vd, item, seen)
    read(vd, x, seen)


def test_items_are_read_after_they_were_written_and_before_they_are_again(run, vd):
    seen: list[float] = []
    go(run, vd, lambda: aiogpu.task(consume_three)(vd, seen))
    assert seen == [1, 2, 3, 100]


@pytest.mark.parametrize("edge", ["yielded", "fork", "_join_parent"])
def test_without_any_one_of_the_edges_the_same_is_a_race(run, vd, monkeypatch, edge):
    """The control: the race detector sees what is missing."""
    monkeypatch.setattr(Task, edge, lambda self, *args, **kwargs: None)
    with pytest.raises(RaceError):
        go(run, vd, lambda: aiogpu.task(consume_three)(vd, []))


def test_sent_tensors_are_read_after_they_were_written(run, vd):
    seen: list[float] = []
    kept: list[Any] = []
    vd.keep = lambda tensor, stream: kept.append((tensor, stream))

    @aiogpu.task
    async def main():
        @aiogpu.task
        async def sums():
            nonlocal inside
            inside = vd.current()
            sent = None
            while True:
                sent = yield sent
                read(vd, sent, seen)
                write(vd, sent, seen[-1] if seen else 0)

        inside: Any = None
        generator = sums()
        await anext(generator)
        x = cell()
        for i in range(3):
            write(vd, x, i)
            assert await generator.asend(x) is x
            read(vd, x)
        await generator.aclose()
        assert {stream for tensor, stream in kept if tensor is x} == {inside, vd.current()}

    go(run, vd, main)
    assert seen == [0, 1, 2]


def test_the_memory_of_items_is_kept_for_whoever_gets_them(run, vd):
    kept: list[Any] = []
    vd.keep = lambda tensor, stream: kept.append((tensor, stream))
    made = []

    @aiogpu.task
    async def tensors():
        for _ in range(2):
            made.append(cell())
            yield {"x": [made[-1]]}

    @aiogpu.task
    async def one(generator):
        await anext(generator)
        return vd.current()

    @aiogpu.task
    async def main():
        generator = tensors()
        streams = [await one(generator), await one(generator)]
        await generator.aclose()
        return streams

    streams = go(run, vd, main)
    for x, stream in zip(made, streams, strict=True):
        assert [s for tensor, s in kept if tensor is x] == [stream]


@pytest.mark.parametrize("goes_on", [True, False])
def test_each_item_may_be_asked_for_by_another_task(run, vd, goes_on):
    """Siblings, of which none is ordered after another but through the generator; they may have ended."""
    seen: list[float] = []
    x = cell()
    turns = 0

    @aiogpu.task
    async def one(generator, turn):
        nonlocal turns
        while turns < turn:
            await tick()
        read(vd, await anext(generator), seen)
        write(vd, x, 50)
        turns += 1
        while goes_on and turns < 3:
            await tick()

    @aiogpu.task
    async def main():
        generator = produce(vd, x, 3)()
        await aiogpu.gather(*(one(generator, turn) for turn in range(3)))
        await generator.aclose()
        read(vd, x, seen)

    go(run, vd, main)
    assert seen == [1, 2, 3, 50]


def test_an_undecorated_consumer_within_a_task_is_ordered_too(run, vd):
    seen: list[float] = []

    @aiogpu.task
    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(consume_three, vd, seen)

    go(run, vd, main)
    assert seen == [1, 2, 3, 100]


def test_an_undecorated_consumer_gets_finished_items(run, vd, moving):
    """It may use them anywhere, on streams of its own, too."""

    async def main():
        @aiogpu.task
        async def numbers():
            for i in range(4):
                x = cell()
                vd.launch(lambda x=x, i=i: x.fill_(i), writes=[x], duration=1.0)
                yield x

        assert [x.item() async for x in numbers()] == [0, 1, 2, 3]

    with moving(vd):
        run(main)


def test_a_cancelled_wait_for_a_finished_item_is_raised_at_the_yield(run, vd, engine):
    log = []

    @aiogpu.task
    async def numbers():
        latches.append(vd.latch())
        try:
            yield cell()
        except BaseException as error:
            log.append(isinstance(error, anyio.get_cancelled_exc_class()))
            raise

    latches: list[Any] = []

    async def main():
        generator = numbers()
        async with anyio.create_task_group() as group:
            group.start_soon(anext, generator)
            while not latches:
                await tick()
            vd.run_all()
            await tick()
            group.cancel_scope.cancel()
        assert log == [True]
        assert engine().compute.in_use == 0
        latches[0].release()
        with pytest.raises(StopAsyncIteration):
            await anext(generator)

    go(run, vd, main)


def test_a_block_on_another_stream_may_contain_yields(run, vd):
    seen: list[float] = []

    @aiogpu.task
    async def main():
        @aiogpu.task
        async def numbers():
            x, y = cell(), cell()
            write(vd, y, 7)
            with aiogpu.stream():
                for i in range(3):
                    write(vd, x, i)
                    yield x, y
            read(vd, x, seen)

        outside = vd.current()
        async for x, y in numbers():
            assert vd.current() is outside
            read(vd, x, seen)
            write(vd, x, 10)
            write(vd, y, 8)
        assert vd.current() is outside

    go(run, vd, main)
    assert seen == [0, 1, 2, 10]


def test_the_end_is_behind_transfers_that_the_generator_did_not_await(run, vd, moving):
    async def main():
        @aiogpu.task
        async def numbers():
            operation = aiogpu.to_device(torch.ones(8))
            operation._awaited = True
            operations.append(operation)
            yield 1

        operations: list[Any] = []
        async for _ in numbers():
            pass
        assert operations[0].done()

    with moving(vd):
        run(main)


# -- state ---------------------------------------------------------------------------------------------


MODES = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "inference_mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")),
    "device": (lambda: torch.device("meta"), lambda: torch.empty(0).device),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_around_a_yield_stays_inside(run, anydevice, mode):
    enter, ask = MODES[mode]
    outside = ask()

    async def main():
        @aiogpu.task
        async def numbers():
            with enter():
                inside = ask()
                assert inside != outside
                for i in range(3):
                    await tick()
                    assert ask() == inside
                    yield i
                    assert ask() == inside

        async for _ in numbers():
            assert ask() == outside
            await tick()
            assert ask() == outside
        async for _ in numbers():
            break
        assert ask() == outside

    run(main)
    run(aiogpu.task(main))
    assert ask() == outside


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_around_a_step_is_not_seen_inside(run, anydevice, mode):
    enter, ask = MODES[mode]
    outside = ask()

    async def main():
        @aiogpu.task
        async def numbers():
            for i in range(3):
                assert ask() == outside
                yield i

        generator = numbers()
        await anext(generator)
        with enter():
            await anext(generator)
            await generator.aclose()

    run(aiogpu.task(main))


# -- its end ---------------------------------------------------------------------------------------------


class Noting:
    """A generator function whose cleanup awaits, and notes where it ran."""

    def __init__(self, device: VirtualDevice | None = None) -> None:
        self.log: list[str] = []
        self.device = device
        self.streams: set[Any] = set()

    @aiogpu.task
    async def numbers(self):
        with torch.no_grad():
            try:
                self._look()
                for i in range(10):
                    yield i
                    await tick()
            finally:
                self._look()
                self.log.append("begins" if not torch.is_grad_enabled() else "begins without its modes")
                await anyio.sleep(0.001)
                self._look()
                assert await aiogpu.item(torch.ones(1)) == 1
                self.log.append("ends" if not torch.is_grad_enabled() else "ends without its modes")
                assert len(self.streams) <= 1

    def _look(self) -> None:
        if self.device is not None:
            self.streams.add(self.device.current())


async def take_one(noting: Noting) -> int:
    async for item in noting.numbers():
        return item
    raise AssertionError


def test_after_a_break_nothing_is_left_once_the_task_has_ended(run, auto_vd, engine):
    async def main():
        noting = Noting(auto_vd)
        assert await aiogpu.task(take_one)(noting) == 0
        assert noting.log == ["begins", "ends"]
        assert engine().compute.in_use == 0

    run(main)


def test_one_that_came_as_an_argument_is_closed_although_the_device_is_not_done(run, vd, engine):
    """Arguments are kept until the device has reached the task's end; a generator is none of those."""

    @aiogpu.task
    async def numbers():
        try:
            yield 1
        finally:
            await tick()
            log.append("closed")

    @aiogpu.task
    async def first(generator, *, other):
        latches.append(vd.latch())
        async for _ in generator:
            async for _ in other:
                return

    log: list[str] = []
    latches: list[Any] = []

    async def main():
        await first(numbers(), other=numbers())
        assert log == ["closed", "closed"]
        assert engine().compute.in_use == 0
        latches[0].release()

    go(run, vd, main)


def test_after_a_break_it_is_closed_although_the_task_goes_on(run, anydevice, engine, until):
    @aiogpu.task
    async def main():
        noting = Noting()
        for n in range(1, 4):
            await take_one(noting)
            await until(lambda n=n: noting.log == ["begins", "ends"] * n)
            assert engine().compute.in_use == 1
            assert not aiogpu._tasks.current_task().left

    run(main)


def test_after_a_break_in_undecorated_code_it_is_closed(run, anydevice, engine, until):
    async def main():
        noting = Noting()
        await take_one(noting)
        await until(lambda: noting.log == ["begins", "ends"])
        await until(lambda: engine().compute.in_use == 0)

    run(main)


def test_after_a_break_right_before_the_end_of_the_loop_it_is_closed(run, anydevice, engine):
    """asyncio's ``run`` cancels what the cleanup waits for, like everything that still runs then."""
    noting = Noting()
    run.bare(take_one, noting)
    assert noting.log == ["begins", "ends"] or (noting.log == ["begins"] and not run.is_trio)
    assert engine().compute.in_use == 0


def test_what_is_still_held_at_the_end_of_the_loop_is_closed(run, anydevice, engine):
    """Its cleanup awaits operations of the runtime, which closes after it."""
    noting = Noting()
    held = []

    async def main():
        for _ in range(2):
            held.append(noting.numbers())
            await anext(held[-1])

    run.bare(main)
    assert noting.log == ["begins", "ends"] * 2
    assert engine().compute.in_use == 0


def test_leaving_a_runtime_closes_what_was_left_before(run, anydevice, engine):
    noting = Noting()

    async def main():
        async with aiogpu.Runtime():
            await take_one(noting)
        assert noting.log == ["begins", "ends"]
        assert engine().compute.in_use == 0

    run(main)


def test_one_that_the_task_made_and_handed_out_goes_on(run, vd):
    seen: list[float] = []
    x = cell()

    @aiogpu.task
    async def opened():
        generator = produce(vd, x, 3)()
        read(vd, await anext(generator), seen)
        return generator

    @aiogpu.task
    async def main():
        async for item in await opened():
            read(vd, item, seen)

    go(run, vd, main)
    assert seen == [1, 2, 3]


def test_a_generator_closes_the_one_that_it_iterates(run, anydevice, engine):
    @aiogpu.task
    async def doubled(noting):
        with torch.inference_mode():
            async for item in noting.numbers():
                assert torch.is_inference_mode_enabled()
                yield 2 * item

    @aiogpu.task
    async def main(noting):
        async for item in doubled(noting):
            assert not torch.is_inference_mode_enabled()
            if item == 4:
                break

    async def outer():
        noting = Noting()
        assert [item async for item in doubled(noting)] == list(range(0, 20, 2))
        assert noting.log == ["begins", "ends"]
        await main(noting)
        assert noting.log == ["begins", "ends"] * 2
        assert engine().compute.in_use == 0

    run(outer)


def test_one_in_a_cycle_is_closed_by_the_garbage_collector(run, anydevice, engine, until):
    async def main():
        noting = Noting()
        noting.generator = noting.numbers()
        log = noting.log
        await anext(noting.generator)
        del noting
        await tick()
        assert engine().compute.in_use == 1
        gc.collect()
        await until(lambda: log == ["begins", "ends"])
        await until(lambda: engine().compute.in_use == 0)

    run(main)


def test_one_that_another_thread_drops_is_closed_on_its_loop(run, anydevice, engine, until):
    async def main():
        noting = Noting()
        box = [noting.numbers()]
        await anext(box[0])
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        await until(lambda: noting.log == ["begins", "ends"])
        await until(lambda: engine().compute.in_use == 0)

    run(main)


def test_without_a_loop_any_more_the_cleanup_runs_to_its_first_wait(anydevice, engine, abandoned):
    noting = Noting()
    held = []
    loop = asyncio.new_event_loop()

    async def main():
        held.append(noting.numbers())
        await anext(held[0])

    loop.run_until_complete(main())
    loop.close()  # without shutdown_asyncgens
    assert engine().compute.in_use == 1
    held.clear()
    assert noting.log == ["begins"]
    assert torch.is_grad_enabled()
    assert engine().compute.in_use == 0


def test_a_loop_that_is_closed_before_it_could_close_generators_leaves_no_lease(anydevice, engine, abandoned):
    noting = Noting()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(take_one(noting))
    loop.close()
    aiogpu._runtime._forget_closed_loops()
    assert noting.log == ["begins"]
    assert engine().compute.in_use == 0


def test_one_that_was_never_started_needs_no_end(run, anydevice, engine):
    async def main():
        noting = Noting()
        noting.numbers()
        await noting.numbers().aclose()
        gc.collect()
        await tick()
        assert noting.log == []
        assert engine().compute.in_use == 0

    run(main)


def test_an_error_in_the_cleanup_of_one_that_was_left_is_logged(run, anydevice, abandoned):
    @aiogpu.task
    async def numbers():
        try:
            yield 1
        finally:
            raise Odd("in the cleanup")

    @aiogpu.task
    async def main():
        async for _ in numbers():
            break

    run(main)
    assert len(abandoned) == 1
    assert "numbers" in abandoned[0]
    assert "aclosing" in abandoned[0]


def test_a_task_that_is_cancelled_cancels_the_cleanup_that_it_waits_for(run, anydevice, engine):
    log = []

    @aiogpu.task
    async def numbers():
        try:
            yield 1
        finally:
            log.append("begins")
            try:
                await anyio.sleep_forever()
            finally:
                log.append("cancelled")

    @aiogpu.task
    async def main(goes_on):
        async for _ in numbers():
            break
        if goes_on:
            while not log:
                await tick()

    async def outer():
        for goes_on in (False, True):
            log.clear()
            async with anyio.create_task_group() as group:
                group.start_soon(main, goes_on)
                while not log:
                    await tick()
                for _ in range(3):
                    await tick()
                assert log == ["begins"]
                group.cancel_scope.cancel()
            assert log == ["begins", "cancelled"]
            assert engine().compute.in_use == 0

    run(outer)


def test_a_cancelled_task_closes_what_it_iterated(run, anydevice, engine):
    log = []

    @aiogpu.task
    async def numbers():
        try:
            yield 1
        finally:
            log.append("closed")

    @aiogpu.task
    async def main():
        async for _ in numbers():
            log.append("iterates")
            await anyio.sleep_forever()

    async def outer():
        async with anyio.create_task_group() as group:
            group.start_soon(main)
            while not log:
                await tick()
            group.cancel_scope.cancel()
        assert log == ["iterates", "closed"]
        assert engine().compute.in_use == 0

    run(outer)


def test_a_cancellation_inside_is_seen_there_and_ends_it(run, anydevice, engine):
    log = []

    @aiogpu.task
    async def numbers():
        with torch.no_grad():
            try:
                yield 1
                log.append("waits")
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                log.append(torch.is_grad_enabled())
                raise

    async def consume(generator):
        async for _ in generator:
            pass

    async def main():
        generator = numbers()
        async with anyio.create_task_group() as group:
            group.start_soon(consume, generator)
            while not log:
                await tick()
            group.cancel_scope.cancel()
        assert log == ["waits", False]
        assert engine().compute.in_use == 0
        with pytest.raises(StopAsyncIteration):
            await anext(generator)

    run(main)


def test_a_consumer_that_is_closed_inside_of_a_step_ends_it(run_asyncio, anydevice, engine):
    """As when the loop is gone: GeneratorExit arrives where the generator waits."""

    @aiogpu.task
    async def numbers():
        try:
            await anyio.sleep_forever()
            yield 1
        finally:
            log.append("closed")

    log: list[str] = []

    async def main():
        await aiogpu.synchronize()  # the device is started
        generator = numbers()
        coroutine = aiogpu.task(anext_of)(generator)
        task = asyncio.ensure_future(asyncio.sleep(0))
        coroutine.send(None)
        coroutine.close()
        await task
        assert log == ["closed"]
        assert engine().compute.in_use == 0

    async def anext_of(generator):
        return await anext(generator)

    run_asyncio(main)


def test_arguments_are_kept_until_the_end_has_been_reached(run, vd, until):
    import weakref

    @aiogpu.task
    async def reads(boxes):
        x = boxes[0]
        boxes.clear()
        vd.launch(lambda: None, reads=[x], duration=1.0)
        del x
        yield 1

    async def main():
        x = torch.ones(1)
        alive = weakref.ref(x)
        generator = reads([x])
        del x
        async for _ in generator:
            pass
        gc.collect()
        assert alive() is not None
        vd.run_all()
        await until(lambda: alive() is None)

    go(run, vd, main)


def test_a_lost_device_is_seen_inside_and_outside(run, vd, engine):
    log = []

    @aiogpu.task
    async def numbers():
        try:
            while True:
                yield 1
        except aiogpu.DeviceLostError:
            log.append("inside")
            raise

    async def main():
        generator = numbers()
        await anext(generator)
        vd.fault()
        with pytest.raises(aiogpu.DeviceLostError):
            await aiogpu.synchronize()
        with pytest.raises(aiogpu.DeviceLostError):
            await anext(generator)
        assert log == ["inside"]
        assert engine().compute.in_use == 0

    run(main)


def test_inside_a_capture_it_is_refused_and_goes_on_after_it(run, vd):
    async def main():
        generator = produce(vd, cell(), 3)()
        await anext(generator)
        vd.is_capturing = True
        try:
            before = vd.submitted
            with pytest.raises(aiogpu.CaptureError, match="before or after the capture"):
                await anext(generator)
            assert vd.submitted == before
        finally:
            vd.is_capturing = False
        await anext(generator)
        await generator.aclose()

    go(run, vd, aiogpu.task(main))


def test_the_interpreter_ends_without_a_word_whatever_is_still_open():
    """Loops that ended well, were closed without their shutdown, or just stopped; an exit in the middle."""
    program = """
import asyncio, sys, trio, torch, aiogpu

@aiogpu.task
async def numbers(name):
    try:
        while True:
            yield torch.ones(1)
    finally:
        print(name, end=" ")
        await aiogpu.item(torch.ones(1))
        print("closed", end=" ")

held = []

async def main(name):
    held.append(numbers(name))
    await anext(held[-1])
    if name == "exit":
        sys.exit(0)

trio.run(main, "trio")
asyncio.run(main("asyncio"))
stopped, closed = asyncio.new_event_loop(), asyncio.new_event_loop()
stopped.run_until_complete(main("stopped"))
closed.run_until_complete(main("closed"))
closed.close()
print("and", end=" ")
asyncio.run(main("exit"))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:unclosed event loop", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("trio closed asyncio closed and exit closed")
