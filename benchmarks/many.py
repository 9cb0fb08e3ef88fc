"""How many awaits per second, for how much CPU, and does the loop stay free?

64 and 512 coroutines each launch a 20 µs kernel and wait for it, over and over, on asyncio and uvloop.
The hand-written contenders have a stream from torch's pool and a reused event per coroutine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch.cuda import Stream

from _contenders import AIOGPU, CALLBACK, POLL, TO_THREAD, Contender, More, contenders, surroundings
from _harness import Heartbeat, cycles, loops, main, p50, percentile, run, times, until
from _report import Row, at_least, at_most

COROUTINES = (64, 512)
KERNEL_US = 20
ROUNDS, SECONDS = 3, 0.5
QUICK_ROUNDS, QUICK_SECONDS = 1, 0.15


@dataclass(frozen=True)
class Cell:
    rate: float  # awaits per second
    cpu_us: float  # process CPU time per await, all threads
    lags: list[float]  # seconds


def measure(quick: bool) -> list[Row]:
    rounds, seconds = (QUICK_ROUNDS, QUICK_SECONDS) if quick else (ROUNDS, SECONDS)
    rows = []
    for loop in loops():
        for n in COROUTINES:
            rows += compete(n, loop, rounds, seconds)
    return rows


def compete(n: int, loop: str, rounds: int, seconds: float) -> list[Row]:
    question = f"{n} coroutines × {KERNEL_US} µs, {loop}"
    cells: dict[str, list[Cell]] = {contender.name: [] for contender in contenders()}
    for _ in range(rounds):
        for contender in contenders():
            cells[contender.name].append(run(partial(cell, contender, n, seconds), loop=loop))
    summary = {name: summarise(of) for name, of in cells.items()}
    return [number(question, name, of) for name, of in summary.items()] + verdicts(question, summary)


async def cell(contender: Contender, n: int, seconds: float) -> Cell:
    streams = [Stream() for _ in range(n)]  # torch has 32, then gives the same ones again
    async with surroundings(contender.runtime):
        await everybody(contender, streams, lambda: times(2))
        async with Heartbeat() as pulse:
            cpu, start = time.process_time(), time.perf_counter()
            took = await everybody(contender, streams, lambda: until(start + seconds))
            cpu, wall = time.process_time() - cpu, time.perf_counter() - start
    awaits = sum(map(len, took))
    return Cell(awaits / wall, cpu / awaits * 1e6, pulse.lags)


async def everybody(
    contender: Contender, streams: Sequence[Stream], more: Callable[[], More]
) -> list[list[float]]:
    return await asyncio.gather(*(contender.worker(cycles(KERNEL_US), more(), stream) for stream in streams))


def summarise(cells: list[Cell]) -> Cell:
    lags = [lag for cell in cells for lag in cell.lags]
    return Cell(p50([cell.rate for cell in cells]), p50([cell.cpu_us for cell in cells]), lags)


def number(question: str, name: str, cell: Cell) -> Row:
    detail = {
        "CPU µs per await": cell.cpu_us,
        "lag p99 ms": percentile(cell.lags, 99) * 1e3,
        "largest ms": max(cell.lags) * 1e3,
    }
    return Row(question, name, cell.rate, "awaits/s", detail=detail)


def verdicts(question: str, cells: dict[str, Cell]) -> list[Row]:
    ours, threads = cells[AIOGPU], cells[TO_THREAD]
    rows = [
        at_least(question, f"{AIOGPU} / {POLL}", ours.rate / cells[POLL].rate, "×", 1.8),
        at_least(question, f"{AIOGPU} / {TO_THREAD}", ours.rate / threads.rate, "×", 6),
        at_most(question, f"{AIOGPU} / {TO_THREAD}, CPU per await", ours.cpu_us / threads.cpu_us, "×", 1 / 6),
    ]
    best = max(
        (name for name in cells if name.startswith(CALLBACK)), key=lambda name: cells[name].rate, default=None
    )
    if best:
        rows.append(at_least(question, f"{AIOGPU} / {best}", ours.rate / cells[best].rate, "×", 3))
    return rows


if __name__ == "__main__":
    main("many", measure)
