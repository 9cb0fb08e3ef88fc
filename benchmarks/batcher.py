"""What does the batcher itself cost, for each request and for a lone one? Runs on the CPU, too.

The function returns its batch as it is, so that all there is is the batcher: queue, stacking, a hop to its
thread and back, cutting. Stacking alone is measured beside it, as is a bare future per request, which any
batcher needs. A lone request is compared with the same three steps by hand: upload, a hop to a thread for
the function, download. Contenders under load are in `serving`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

import torch

import aiogpu
from _harness import loops, main, p50, run
from _report import Row, at_most

BATCH = 32
ROUNDS, QUICK_ROUNDS = 400, 100


def same(x: torch.Tensor) -> torch.Tensor:
    return x


async def same_async(x: torch.Tensor) -> torch.Tensor:
    return x


@aiogpu.task
async def by_hand(x: torch.Tensor) -> torch.Tensor:
    there = await aiogpu.to_device(x.unsqueeze(0))
    return await aiogpu.to_host(await aiogpu.run_sync(same, there))


async def per_request(call: Callable[[torch.Tensor], Awaitable[object]], rounds: int) -> float:
    """µs per request, of rounds of BATCH concurrent ones."""
    items = [torch.ones(64) for _ in range(BATCH)]
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        await asyncio.gather(*(call(item) for item in items))
        times.append((time.perf_counter() - start) / BATCH * 1e6)
    return p50(times)


async def lone(call: Callable[[torch.Tensor], Awaitable[object]], rounds: int) -> float:
    """µs of one request when nothing else runs."""
    item = torch.ones(64)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        await call(item)
        times.append((time.perf_counter() - start) * 1e6)
    return p50(times)


async def bare_futures(rounds: int) -> float:
    waiting: list[asyncio.Future[None]] = []

    async def call(_: torch.Tensor) -> None:
        future = asyncio.get_running_loop().create_future()
        waiting.append(future)
        if len(waiting) == BATCH:
            for each in waiting:
                each.set_result(None)
            waiting.clear()
        await future

    return await per_request(call, rounds)


def stacking(rounds: int) -> float:
    items = [torch.ones(64) for _ in range(BATCH)]
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        torch.stack(items).unbind(0)
        times.append((time.perf_counter() - start) / BATCH * 1e6)
    return p50(times)


async def compete(rounds: int) -> dict[str, float]:
    found = {"bare futures": await bare_futures(rounds), "stacking": stacking(rounds)}
    async with aiogpu.Runtime():
        for name, fn in (("sync", same), ("async", same_async)):
            async with aiogpu.Batcher(fn, max_batch_size=BATCH) as batcher:
                await per_request(batcher, rounds // 10)
                found[name] = await per_request(batcher, rounds)
                found[f"{name}, timeout"] = await per_request(partial(batcher, timeout=10.0), rounds)
                found[f"{name}, lone"] = await lone(batcher, rounds)
        async with aiogpu.Batcher(same, max_batch_size=BATCH, to_host=True) as batcher:
            await lone(batcher, rounds // 10)
            found["sync, to_host, lone"] = await lone(batcher, rounds)
        await lone(by_hand, rounds // 10)
        found["by hand, lone"] = await lone(by_hand, rounds)
        found["run_sync, lone"] = await lone(partial(aiogpu.run_sync, same), rounds)
    return found


def measure(quick: bool) -> list[Row]:
    rounds = QUICK_ROUNDS if quick else ROUNDS
    rows = []
    for loop in loops():
        found = run(partial(compete, rounds), loop=loop)
        detail = {"of it futures µs": found["bare futures"], "stacking µs": found["stacking"]}
        for name in ("sync", "sync, timeout", "async"):
            question = f"per request at batch {BATCH}, {loop}"
            rows.append(at_most(question, f"Batcher, {name} function", found[name], "µs", 30.0, **detail))
        question = f"one request alone, {loop}"
        for name in ("sync, lone", "async, lone", "sync, to_host, lone", "by hand, lone", "run_sync, lone"):
            rows.append(Row(question, name, found[name], "µs"))
        ratio = found["sync, to_host, lone"] / found["by hand, lone"]
        rows.append(at_most(question, "Batcher / by hand", ratio, "×", 1.1))
    return rows


if __name__ == "__main__":
    main("batcher", measure, needs_gpu=False)
