"""Channels and generators on a GPU: real streams, real memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

import aiogpu
from aiogpu._engine import Engine

from ._tools import ON_GPU, Slow, asynchronous, needs_two, no_race_detector, tick
from .conftest import Loop

pytestmark = ON_GPU

N = 1 << 20


def check(x: torch.Tensor, value: float, wrong: torch.Tensor) -> None:
    """A kernel that counts elements of ``x`` that are not ``value``, without waiting for them."""
    wrong += (x != value).sum()


@pytest.mark.parametrize("max_items", [0, 2])
def test_a_receiver_reads_what_its_sender_wrote(run: Loop, slow: Slow, max_items: int) -> None:
    """The sender's kernels have not even started when the receiver's are launched. Memory is dropped by both
    sides as soon as they can, and would be overwritten by the next item if it came back early."""

    async def main() -> None:
        send, receive = aiogpu.create_channel[torch.Tensor](max_items)

        @aiogpu.task
        async def produce() -> None:
            async with send:
                for i in range(30):
                    slow(2)
                    await send.send(torch.full((N,), float(i), device="cuda"))

        @aiogpu.task
        async def consume() -> int:
            wrong = torch.zeros((), device="cuda", dtype=torch.int64)
            i = 0
            async with receive:
                async for x in receive:
                    slow(1)
                    check(x, float(i), wrong)
                    del x
                    i += 1
            assert i == 30
            return int(await aiogpu.item(wrong))

        _, wrong = await aiogpu.gather(produce(), consume())
        assert wrong == 0

    run(main)


@pytest.mark.timing
@asynchronous
@no_race_detector
def test_neither_end_waits_for_the_device(run: Loop, slow: Slow) -> None:
    async def main() -> None:
        send, receive = aiogpu.create_channel[torch.Tensor](1)

        @aiogpu.task
        async def produce() -> torch.cuda.Event:
            x = torch.zeros(8, device="cuda")
            slow(300)
            with send:
                await send.send(x)
            event = torch.cuda.Event()
            event.record()
            return event

        @aiogpu.task
        async def consume() -> torch.cuda.Event:
            with receive:
                x = await receive.receive()
            x += 1
            event = torch.cuda.Event()
            event.record()
            return event

        written, read = await aiogpu.gather(produce(), consume())
        assert not written.query()
        assert not read.query(), "the receiver ran ahead of its sender"

    run(main)


def test_items_of_a_generator_are_read_before_it_writes_them_again(run: Loop, slow: Slow) -> None:
    @aiogpu.task
    async def numbers() -> AsyncIterator[torch.Tensor]:
        x = torch.empty(N, device="cuda")
        for i in range(20):
            slow(1)
            x.fill_(i)
            yield x

    @aiogpu.task
    async def main() -> None:
        wrong = torch.zeros((), device="cuda", dtype=torch.int64)
        i = 0
        async for x in numbers():
            slow(2)
            check(x, float(i), wrong)
            i += 1
        assert i == 20
        assert await aiogpu.item(wrong) == 0

    run(main)


def test_code_without_a_task_gets_finished_items(run: Loop, slow: Slow) -> None:
    @aiogpu.task
    async def numbers() -> AsyncIterator[torch.Tensor]:
        for i in range(3):
            slow(30)
            yield torch.full((N,), float(i), device="cuda")

    async def main() -> None:
        side = torch.cuda.Stream(priority=0)
        i = 0
        async for x in numbers():
            with torch.cuda.stream(side):
                assert bool((x == i).all())
            i += 1

    run(main)


def test_after_a_break_the_stream_comes_back(run: Loop, slow: Slow, engine: Engine) -> None:
    log: list[str] = []

    @aiogpu.task
    async def numbers() -> AsyncIterator[torch.Tensor]:
        stream = torch.cuda.current_stream()
        try:
            while True:
                yield torch.ones(8, device="cuda")
        finally:
            await tick()
            assert torch.cuda.current_stream() == stream
            assert await aiogpu.item(torch.ones((), device="cuda")) == 1
            log.append("closed")

    @aiogpu.task
    async def first() -> None:
        async for _ in numbers():
            slow(20)
            break

    async def main() -> None:
        for _ in range(20):
            await first()
        assert log == ["closed"] * 20
        assert engine.compute.in_use == 0

    run(main)


@no_race_detector
def test_during_a_capture_both_refuse_and_the_capture_stays_valid(run: Loop) -> None:
    @aiogpu.task
    async def numbers() -> AsyncIterator[torch.Tensor]:
        while True:
            yield torch.ones(8, device="cuda")

    @aiogpu.task
    async def main() -> None:
        send, receive = aiogpu.create_channel[torch.Tensor](2)
        generator = numbers()
        x = await anext(generator)
        await send.send(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            for refused in (generator.__anext__, receive.receive, lambda: send.send(y)):
                with pytest.raises(aiogpu.CaptureError):
                    await refused()
        graph.replay()
        assert await aiogpu.item(y.sum()) == 16
        assert await receive.receive() is x
        await anext(generator)
        await generator.aclose()
        send.close()
        receive.close()

    run(main)


@needs_two
def test_items_cross_devices(run: Loop, slow: Slow) -> None:
    """The sender on one device, the receiver's task on another; the item's memory is the sender's."""

    async def main() -> None:
        send, receive = aiogpu.create_channel[torch.Tensor](1)

        @aiogpu.task(device="cuda:0")
        async def produce() -> None:
            with send:
                for i in range(5):
                    slow(20)
                    await send.send(torch.full((N,), float(i), device="cuda:0"))

        @aiogpu.task(device="cuda:1")
        async def consume() -> None:
            i = 0
            with receive:
                async for x in receive:
                    there = x.to("cuda:1", non_blocking=True)
                    del x
                    assert await aiogpu.item((there != i).sum()) == 0
                    i += 1

        await aiogpu.gather(produce(), consume())

    run(main)
