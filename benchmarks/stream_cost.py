"""What does a wait cost the stream that is waited for?

GPU time per 20 µs kernel while somebody awaits each of them. The kernels are queued behind a long one,
so that the stream never starves and only the GPU's own time is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import torch

import aiogpu
from _contenders import Enqueue, callbacks, surroundings
from _harness import cycles, main, p50, run
from _report import Row, at_most

KERNELS = 150  # a callback takes several of the 1020 commands that a stream accepts
CHUNKS, QUICK_CHUNKS = 7, 3
KERNEL_US = 20
HOLDS_US = (15_000, 60_000, 240_000)  # longer than it takes to queue a chunk, or the next one
QUESTION = f"GPU time per {KERNEL_US} µs kernel"

Each = Callable[[int], None]


def nothing(i: int) -> None:
    pass


async def nobody() -> None:
    pass


@dataclass(frozen=True)
class Way:
    each: Each = nothing  # after each launch
    wait: Callable[[], Awaitable[None]] = nobody  # by somebody else, once all are queued
    runtime: dict[str, float] | None = None


def measure(quick: bool) -> list[Row]:
    stream = torch.cuda.Stream()
    took: dict[str, list[float | None]] = {name: [] for name in ways(stream)}
    for _ in range(QUICK_CHUNKS if quick else CHUNKS):
        for name, way in ways(stream).items():
            took[name].append(run(partial(chunk, way, stream)))
    us = {name: p50(samples) for name, samples in took.items() if None not in samples}
    return [Row(QUESTION, name, of, "µs") for name, of in us.items()] + [
        at_most(QUESTION, f"{name} − no await", us[name] - us["no await"], "µs", 3)
        for name in us
        if "aiogpu" in name
    ]


def ways(stream: torch.cuda.Stream) -> dict[str, Way]:
    events = [torch.cuda.Event() for _ in range(KERNELS)]

    def record(i: int) -> None:
        events[i].record(stream)

    async def wait() -> None:
        for event in events:
            await aiogpu.synchronize(event)

    ours = {
        "awaited, aiogpu": Way(record, wait, {}),
        # A kernel is over before the default spin is: only without it does every wait need a callback.
        "awaited, aiogpu, spin=0": Way(record, wait, {"spin": 0.0}),
    }
    theirs = {f"{name}, inline": inline(stream, enqueue) for name, enqueue in callbacks().items()}
    return {"no await": Way(), "event recorded, no await": Way(record)} | ours | theirs


def inline(stream: torch.cuda.Stream, enqueue: Enqueue) -> Way:
    arrived: list[int] = []

    def each(i: int) -> None:
        if i == 0:
            arrived.clear()
        loop = asyncio.get_running_loop()
        enqueue(stream.cuda_stream, lambda: loop.call_soon_threadsafe(arrived.append, i))

    async def wait() -> None:
        while len(arrived) < KERNELS:
            await asyncio.sleep(0.001)

    return Way(each, wait)


async def chunk(way: Way, stream: torch.cuda.Stream) -> float | None:
    """GPU µs per kernel; None when the host could not queue them ahead of the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    async with surroundings(way.runtime):
        for hold_us in HOLDS_US:
            queue(way.each, stream, start, end, hold_us)
            starved = start.query()
            await asyncio.create_task(way.wait())
            while not end.query():
                await asyncio.sleep(0.001)
            if not starved:
                return start.elapsed_time(end) * 1e3 / KERNELS
    print(f"left out: queueing {KERNELS} kernels this way took longer than {HOLDS_US[-1]} µs")
    return None


def queue(
    each: Each, stream: torch.cuda.Stream, start: torch.cuda.Event, end: torch.cuda.Event, hold_us: int
) -> None:
    kernel = cycles(KERNEL_US)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles(hold_us))
        start.record()
        for i in range(KERNELS):
            torch.cuda._sleep(kernel)
            each(i)
        end.record()


if __name__ == "__main__":
    main("stream_cost", measure)
