"""Does the ten-thousandth pending operation cost what the hundredth does? Runs on the CPU, too.

On a GPU: N tasks wait behind one closed gate, spread over 32 streams. The gate opens, and what is timed
is the drain, from the first task that runs again to the last. On the CPU, where nothing can be held
back, N copies are started and then awaited; there is no target for that.
"""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Awaitable, Callable

import torch

import aiogpu
from _harness import cycles, main, p50, run
from _report import Row, at_most

FEW, MANY = 100, 10_000
STREAMS = 32  # 10 000 waits on 8 streams would exceed the 1020 commands that a stream accepts
REPEATS, QUICK_REPEATS = {FEW: 25, MANY: 4}, {FEW: 9, MANY: 2}
HOLD_S = {FEW: 0.03, MANY: 1.0}  # how long the gate stays closed: longer than N tasks need to start
TRACED, TRACED_HOLD_S = 2_000, 1.0
BYTES = "bytes per pending operation"


def measure(quick: bool) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    drain, repeats = (drain_gpu if on_gpu else drain_cpu), (QUICK_REPEATS if quick else REPEATS)
    us = run(lambda: in_turns(drain, repeats), limit_s=90)
    question = "cost per completion" if on_gpu else "cost per completion (copies on the CPU)"
    rows = [Row(question, f"{n:,} pending", of, "µs") for n, of in us.items()]
    growth, between = us[MANY] / us[FEW], f"{MANY:,} pending / {FEW:,}"
    rows.append(
        at_most(question, between, growth, "×", 1.3) if on_gpu else Row(question, between, growth, "×")
    )
    return rows + run(lambda: footprint(on_gpu))


async def in_turns(drain: Callable[[int], Awaitable[float]], repeats: dict[int, int]) -> dict[int, float]:
    """µs per completion for each N."""
    async with aiogpu.Runtime(streams=STREAMS):
        await drain(FEW)
        return {n: p50([await drain(n) for _ in range(repeat)]) for n, repeat in repeats.items()}


# On the GPU


async def drain_gpu(n: int) -> float:
    hold_s = HOLD_S[n]
    for _ in range(4):
        arrivals: list[float] = []
        gate = close_gate(hold_s)
        waiting = [asyncio.create_task(waiter(gate, arrivals)) for _ in range(n)]
        await asyncio.sleep(0)  # every task takes its first step
        held = not gate.query() and not arrivals
        await asyncio.gather(*waiting)
        if held:
            return (arrivals[-1] - arrivals[0]) / (n - 1) * 1e6
        hold_s *= 2
    raise RuntimeError(f"{n} tasks did not start within {hold_s / 2} s")


def close_gate(hold_s: float) -> torch.cuda.Event:
    gate, stream = torch.cuda.Event(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles(hold_s * 1e6))
        gate.record()
    return gate


@aiogpu.task
async def waiter(gate: torch.cuda.Event, arrivals: list[float]) -> None:
    torch.cuda.current_stream().wait_event(gate)
    await aiogpu.synchronize()
    arrivals.append(time.perf_counter())


# On the CPU


async def drain_cpu(n: int) -> float:
    source = torch.zeros(16)
    start = time.perf_counter()
    for operation in [aiogpu.to_host(source) for _ in range(n)]:
        await operation
    return (time.perf_counter() - start) / n * 1e6


# Memory


async def footprint(on_gpu: bool) -> list[Row]:
    """Python's memory per wait, the coroutine and asyncio's task around it included."""
    async with aiogpu.Runtime(streams=STREAMS):
        wait, name = (gpu_wait(), "a task in synchronize()") if on_gpu else (cpu_wait, "to_host()")
        return [
            Row(BYTES, name, await traced(wait), "bytes"),
            Row(BYTES, "for comparison: an asyncio task in sleep()", await traced(plain_wait), "bytes"),
        ]


def plain_wait() -> Awaitable[object]:
    return asyncio.create_task(asyncio.sleep(0.5))


def cpu_wait() -> Awaitable[object]:
    return aiogpu.to_host(torch.zeros(16))


def gpu_wait() -> Callable[[], Awaitable[object]]:
    gate = close_gate(TRACED_HOLD_S)
    return lambda: asyncio.create_task(waiter(gate, []))


async def traced(start: Callable[[], Awaitable[object]]) -> float:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        waiting = [start() for _ in range(TRACED)]
        await asyncio.sleep(0)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for one in waiting:
        await one
    return (after - before) / TRACED


if __name__ == "__main__":
    main("pending", measure, needs_gpu=False)
