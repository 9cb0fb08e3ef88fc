"""Do copies hide behind compute?

Four pinned 9999 × 9999 float32 matrices: copy a and b, then c and d beside a @ b. The ideal is two
copies + max(two copies, matmul), each measured alone in the same run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import torch

import aiogpu
from _harness import main, p50, run
from _report import Row, at_most

SIZE = 9999
ROUNDS, QUICK_ROUNDS, WARM_UP = 8, 3, 2
QUESTION = f"4 copies of {SIZE}² float32 and one matmul"
AIOGPU, TWO_COPIES, MATMUL = "aiogpu", "two copies alone", "matmul alone"

Tensors = Sequence[torch.Tensor]


def measure(quick: bool) -> list[Row]:
    host = [pinned() for _ in "abcd"]
    ms = run(lambda: compete(host, QUICK_ROUNDS if quick else ROUNDS))
    ideal = ms[TWO_COPIES] + max(ms[TWO_COPIES], ms[MATMUL])
    return [
        *(Row(QUESTION, name, of, "ms") for name, of in ms.items()),
        Row(QUESTION, "ideal: two copies + max(two copies, matmul)", ideal, "ms"),
        at_most(QUESTION, "aiogpu / ideal", ms[AIOGPU] / ideal, "×", 1.05),
    ]


def pinned() -> torch.Tensor:
    matrix = torch.empty(SIZE, SIZE, pin_memory=True)
    return matrix.copy_(torch.randn(SIZE, SIZE, device="cuda"))  # much faster than the CPU's generator


async def compete(host: Tensors, rounds: int) -> dict[str, float]:
    """Median ms of each way, in turns."""
    ways = by_hand(host)
    took: dict[str, list[float]] = {name: [] for name in [*ways, AIOGPU]}
    async with aiogpu.Runtime():
        for _ in range(WARM_UP + rounds):
            for name, way in ways.items():
                took[name].append(seconds(way))
            took[AIOGPU].append(await job(*host))
            await asyncio.sleep(0)
    return {name: p50(samples[WARM_UP:]) * 1e3 for name, samples in took.items()}


@aiogpu.task
async def job(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> float:
    """The job as a user writes it; seconds until everything is on the device and multiplied."""
    start = time.perf_counter()
    x, y = await aiogpu.gather(aiogpu.to_device(a), aiogpu.to_device(b))
    later = aiogpu.to_device(c), aiogpu.to_device(d)
    product = x @ y
    await aiogpu.gather(*later)
    await aiogpu.synchronize()
    took = time.perf_counter() - start
    del product  # held until here, as a user would
    return took


def by_hand(host: Tensors) -> dict[str, Callable[[], None]]:
    """The parts alone, one after the other, and overlapped with an event; into memory allocated before."""
    device = [matrix.cuda() for matrix in host]
    product = torch.empty_like(device[0])
    copying, computing, ready = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()

    def copy(which: slice) -> None:
        with torch.cuda.stream(copying):
            for source, target in zip(host[which], device[which], strict=True):
                target.copy_(source, non_blocking=True)

    def multiply() -> None:
        with torch.cuda.stream(computing):
            torch.mm(device[0], device[1], out=product)

    def serial() -> None:
        copy(slice(4))
        copying.synchronize()
        multiply()

    def overlapped() -> None:
        copy(slice(2))
        ready.record(copying)
        copy(slice(2, 4))
        computing.wait_event(ready)
        multiply()

    return {
        TWO_COPIES: lambda: copy(slice(2)),
        MATMUL: multiply,
        "one after the other": serial,
        "two streams and an event by hand": overlapped,
    }


def seconds(way: Callable[[], None]) -> float:
    start = time.perf_counter()
    way()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main("overlap", measure)
