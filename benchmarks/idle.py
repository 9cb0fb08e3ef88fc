"""What does waiting cost? CPU time of the process while 16 coroutines wait for 2 s kernels."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import torch

from _contenders import AIOGPU, POLL, TO_THREAD, Contender, contenders, surroundings
from _harness import cycles, main, run, times
from _report import Row, at_most

COROUTINES = 16
KERNEL_S, QUICK_KERNEL_S = 2.0, 0.8
SETTLED_S = 0.2  # launches and first polls are not waiting
QUESTION = f"{COROUTINES} coroutines wait: CPU of one core"


def measure(quick: bool) -> list[Row]:
    kernel_s = QUICK_KERNEL_S if quick else KERNEL_S
    busy = {
        contender.name: run(partial(share_of_a_core, contender, kernel_s))
        for contender in map(with_a_stream_each, contenders())
        if contender.name in (AIOGPU, TO_THREAD, POLL)
    }
    ours = at_most(QUESTION, AIOGPU, busy.pop(AIOGPU), "%", 3)
    return [ours, *(Row(QUESTION, name, share, "%") for name, share in busy.items())]


def with_a_stream_each(contender: Contender) -> Contender:
    """All kernels at the same time, for everybody."""
    if contender.runtime is None:
        return contender
    return Contender(contender.name, contender.worker, contender.runtime | {"streams": COROUTINES})


async def share_of_a_core(contender: Contender, kernel_s: float) -> float:
    async with surroundings(contender.runtime):
        waiting = [asyncio.create_task(once(contender, kernel_s)) for _ in range(COROUTINES)]
        await asyncio.sleep(SETTLED_S)
        cpu, start = time.process_time(), time.perf_counter()
        await asyncio.gather(*waiting)
        return (time.process_time() - cpu) / (time.perf_counter() - start) * 100


async def once(contender: Contender, kernel_s: float) -> None:
    await contender.worker(cycles(kernel_s * 1e6), times(1), torch.cuda.Stream())


if __name__ == "__main__":
    main("idle", measure)
