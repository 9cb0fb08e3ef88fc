"""What does a step of a task cost beyond a plain coroutine's? Runs on the CPU, too.

A coroutine yields to the loop many times, decorated with `aiogpu.task` and not. The loop's own work is
the same for both and drops out of the difference.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from functools import partial

import torch

import aiogpu
from _harness import main, p50, run
from _report import Row, at_most

STEPS, QUICK_STEPS = 20_000, 5_000
ROUNDS = 9
STATES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "no torch state changed": contextlib.nullcontext,
    "inside no_grad()": torch.no_grad,
    "inside inference_mode()": torch.inference_mode,
}


class Yield:
    """What `asyncio.sleep(0)` awaits, without the coroutine around it."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def plain(steps: int, state: Callable[[], contextlib.AbstractContextManager[object]]) -> float:
    """Seconds per step."""
    pause = Yield()
    with state():
        start = time.perf_counter()
        for _ in range(steps):
            await pause
        return (time.perf_counter() - start) / steps


task = aiogpu.task(plain)


def measure(quick: bool) -> list[Row]:
    steps = QUICK_STEPS if quick else STEPS
    rows = []
    for name, state in STATES.items():
        without, within = run(partial(compete, steps, state))
        detail = {"coroutine µs": without, "task µs": within}
        rows.append(at_most("a task's step − a coroutine's", name, within - without, "µs", 2.5, **detail))
    return rows


async def compete(
    steps: int, state: Callable[[], contextlib.AbstractContextManager[object]]
) -> tuple[float, float]:
    """µs per step of a plain coroutine and of a task, in turns."""
    async with aiogpu.Runtime():
        await warm_up(steps)
        rounds = [(await plain(steps, state), await task(steps, state)) for _ in range(ROUNDS)]
    without, within = zip(*rounds, strict=True)
    return p50(without) * 1e6, p50(within) * 1e6


async def warm_up(steps: int) -> None:
    await plain(steps // 10, contextlib.nullcontext)
    await task(steps // 10, contextlib.nullcontext)


if __name__ == "__main__":
    main("step", measure, needs_gpu=False)
