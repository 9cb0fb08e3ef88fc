"""A hundred large matrix products, and a loop that never stands still.

    python examples/never_blocks.py [--size N] [--repeats N]

The products are queued on a stream of the task's own. `await aiogpu.synchronize()` waits for them
without holding up anybody: the heartbeat beside it goes on. Then the same with
`torch.cuda.synchronize()`, during which the loop serves nobody.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter

import torch

import aiogpu
from _show import heartbeat, milliseconds, percentile, print_table

Work = Callable[[torch.device, int, int], Awaitable[None]]


def multiply(device: torch.device, size: int, repeats: int) -> None:
    """Queues the products; on a GPU it returns long before they are done."""
    a = torch.rand(size, size, device=device)
    b = torch.rand(size, size, device=device)
    product = torch.empty_like(a)
    for _ in range(repeats):
        torch.mm(a, b, out=product)


@aiogpu.task
async def awaited(device: torch.device, size: int, repeats: int) -> None:
    # Off the loop thread: the first product loads cuBLAS, and on the CPU it is here that they run.
    await aiogpu.run_sync(multiply, device, size, repeats)
    await aiogpu.synchronize()


async def blocking(device: torch.device, size: int, repeats: int) -> None:
    multiply(device, size, repeats)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def measure(work: Work, device: torch.device, size: int, repeats: int) -> tuple[float, list[float]]:
    """Seconds in all, and the gaps between heartbeats meanwhile."""
    async with heartbeat() as gaps:
        start = perf_counter()
        await work(device, size, repeats)
        return perf_counter() - start, gaps


async def main(device: torch.device, size: int, repeats: int) -> None:
    async with aiogpu.Runtime(device):
        await awaited(device, size, 1)  # warm-up: contexts, libraries, memory
        measured = [await measure(work, device, size, repeats) for work in (awaited, blocking)]
    print_table(
        f"{repeats} products of {size} x {size} on {device}",
        ["", "aiogpu", "blocking"],
        [
            ["all products", *(milliseconds(total) for total, _ in measured)],
            ["heartbeats", *(f"{len(gaps):,}" for _, gaps in measured)],
            ["gap p50", *(milliseconds(percentile(gaps, 50)) for _, gaps in measured)],
            ["gap p99", *(milliseconds(percentile(gaps, 99)) for _, gaps in measured)],
            ["gap max", *(milliseconds(max(gaps)) for _, gaps in measured)],
        ],
    )
    if device.type == "cpu":
        print("On the CPU nothing can overlap: the products take the cores that the loop runs on.")


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="A hundred large products beside a heartbeat.")
    parser.add_argument("--size", type=int, default=10_000 if cuda else 1_000)
    parser.add_argument("--repeats", type=int, default=100, help="how many products")
    args = parser.parse_args()
    asyncio.run(main(torch.device("cuda" if cuda else "cpu"), args.size, args.repeats))
