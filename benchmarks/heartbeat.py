"""Does the loop keep beating while 1 GB of pageable memory goes to the GPU and comes back?

A coroutine is due every millisecond; reported is how late it ran. The very first transfer counts apart:
that is when staging memory is page-locked, which can hold up every other CUDA call of the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

import aiogpu
from _harness import Heartbeat, main, p50, percentile, run
from _report import Row, at_most

BYTES = 1 << 30
TICK_S = 0.001
WARM_UP, ROUNDS, QUICK_ROUNDS = 2, 8, 3
FIRST, LATER = "the very first 1 GB up and back", "1 GB up and back, after warm-up"

Move = Callable[[torch.Tensor], Awaitable[torch.Tensor]]


@dataclass(frozen=True)
class Trip:
    up_s: float
    down_s: float
    lags: list[float]  # seconds


def measure(quick: bool) -> list[Row]:
    return run(lambda: compete(QUICK_ROUNDS if quick else ROUNDS))


async def compete(rounds: int) -> list[Row]:
    source = torch.ones(BYTES // 4)  # pageable, and written: its pages exist
    # Nothing may use CUDA before this: starting it belongs to what is measured.
    rows = [await start_up()]
    async with aiogpu.Runtime():
        rows += first([await trip(source, up, down)])
        for _ in range(WARM_UP):
            await trip(source, up, down)
        rows += later([await trip(source, up, down) for _ in range(rounds)])
    for name, there, back in BY_HAND:
        trips = [await trip(source, there, back) for _ in range(max(1, rounds // 3))]
        rows.append(Row(LATER, f"{name}, largest lag", largest_ms(trips), "ms", detail=speed(trips)))
    return [*rows, await floor()]


async def start_up() -> Row:
    async with Heartbeat(TICK_S) as pulse, aiogpu.Runtime():
        await aiogpu.synchronize()
    return Row("CUDA starts", "aiogpu.Runtime(), largest lag", max(pulse.lags) * 1e3, "ms")


async def trip(source: torch.Tensor, up: Move, down: Move) -> Trip:
    async with Heartbeat(TICK_S) as pulse:
        start = time.perf_counter()
        there = await up(source)
        arrived = time.perf_counter()
        back = await down(there)
        end = time.perf_counter()
    if not torch.equal(back, source):
        raise RuntimeError("what came back is not what went up")
    # `there` and `back` are dropped after the heartbeat: returning 1 GB to the system is not ours.
    return Trip(arrived - start, end - arrived, pulse.lags)


async def up(source: torch.Tensor) -> torch.Tensor:
    return await aiogpu.to_device(source)


async def down(there: torch.Tensor) -> torch.Tensor:
    return await aiogpu.to_host(there)


async def up_in_thread(source: torch.Tensor) -> torch.Tensor:
    return await asyncio.to_thread(source.cuda)


async def down_in_thread(there: torch.Tensor) -> torch.Tensor:
    return await asyncio.to_thread(there.cpu)


async def up_blocking(source: torch.Tensor) -> torch.Tensor:
    return source.cuda()


async def down_blocking(there: torch.Tensor) -> torch.Tensor:
    return there.cpu()


BY_HAND = (
    ("to_thread(.cuda), to_thread(.cpu)", up_in_thread, down_in_thread),
    (".cuda() and .cpu() on the loop", up_blocking, down_blocking),
)


async def floor() -> Row:
    async with Heartbeat(TICK_S) as pulse:
        await asyncio.sleep(0.5)
    p99 = percentile(pulse.lags, 99) * 1e3
    return Row(
        "a loop with nothing to do", "largest lag", max(pulse.lags) * 1e3, "ms", detail={"p99 ms": p99}
    )


def first(trips: list[Trip]) -> list[Row]:
    return [at_most(FIRST, "aiogpu, largest lag", largest_ms(trips), "ms", 50, **speed(trips))]


def later(trips: list[Trip]) -> list[Row]:
    return [
        at_most(LATER, "aiogpu, p99 lag", p99_ms(trips), "ms", 2, **speed(trips)),
        at_most(
            LATER,
            "aiogpu, largest lag",
            largest_ms(trips),
            "ms",
            10,
            beats=sum(len(trip.lags) for trip in trips),
        ),
    ]


def p99_ms(trips: list[Trip]) -> float:
    return percentile([lag for trip in trips for lag in trip.lags], 99) * 1e3


def largest_ms(trips: list[Trip]) -> float:
    return max(lag for trip in trips for lag in trip.lags) * 1e3


def speed(trips: list[Trip]) -> dict[str, float]:
    return {
        "up GB/s": BYTES / p50([trip.up_s for trip in trips]) / 1e9,
        "down GB/s": BYTES / p50([trip.down_s for trip in trips]) / 1e9,
    }


if __name__ == "__main__":
    main("heartbeat", measure)
