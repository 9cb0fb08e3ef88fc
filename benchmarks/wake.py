"""How soon after its kernel does a coroutine run again?

One coroutine launches a kernel of 50 µs, 1 ms or 10 ms and waits for it. Reported is what the round took
beyond the kernel. Contenders take turns in short blocks, so that a drifting clock hits all of them
alike.
"""

from __future__ import annotations

from functools import partial

import torch

from _contenders import (
    AIOGPU,
    AIOGPU_SPIN,
    BLOCKING,
    CALLBACK,
    TO_THREAD,
    Contender,
    contenders,
    surroundings,
)
from _harness import cycles, main, p50, percentile, run, times
from _report import Row, at_least, at_most

WARM_UP = 5
# kernel in µs: samples per block, blocks
PLAN = {50: (200, 10), 1_000: (40, 10), 10_000: (12, 8)}
QUICK = {50: (100, 3), 1_000: (20, 2), 10_000: (5, 2)}

Samples = dict[str, list[float]]  # contender: seconds of each round


def measure(quick: bool) -> list[Row]:
    rows = []
    for us, (samples, blocks) in (QUICK if quick else PLAN).items():
        took = compete(us, samples, blocks)
        rows += numbers(us, took)
        rows += verdicts(us, took)
    return rows


def compete(us: int, samples: int, blocks: int) -> Samples:
    took: Samples = {contender.name: [] for contender in contenders()}
    stream = torch.cuda.Stream()
    for _ in range(blocks):
        for contender in contenders():
            # One coroutine, one stream: set once around the block, so that nobody pays for switching.
            with torch.cuda.stream(stream):
                took[contender.name] += run(partial(block, contender, us, samples))
    return took


async def block(contender: Contender, us: int, samples: int) -> list[float]:
    async with surroundings(contender.runtime):
        await contender.worker(cycles(us), times(WARM_UP), None)
        return await contender.worker(cycles(us), times(samples), None)


def numbers(us: int, took: Samples) -> list[Row]:
    return [
        Row(title(us), name, beyond(us, samples), "µs", detail={"p99 µs": percentile(samples, 99) * 1e6 - us})
        for name, samples in took.items()
    ]


def verdicts(us: int, took: Samples) -> list[Row]:
    over = {name: beyond(us, samples) for name, samples in took.items()}
    if us > 50:
        total = (us + over[AIOGPU]) / (us + over[TO_THREAD])
        late = over[AIOGPU_SPIN] - over[BLOCKING]
        return [
            at_most(title(us), f"{AIOGPU} / {TO_THREAD}, whole round", total, "×", 1.02),
            at_most(title(us), f"{AIOGPU_SPIN} − {BLOCKING}", late, "µs", 20),
        ]
    rows = [
        at_most(title(us), f"{AIOGPU} − {BLOCKING}", over[AIOGPU] - over[BLOCKING], "µs", 15),
        at_least(title(us), f"{TO_THREAD} / {AIOGPU}", over[TO_THREAD] / over[AIOGPU], "×", 2),
    ]
    best = min((name for name in over if name.startswith(CALLBACK)), key=over.__getitem__, default=None)
    if best:
        rows.append(at_least(title(us), f"{best} / {AIOGPU}", over[best] / over[AIOGPU], "×", 2))
    return rows


def title(us: int) -> str:
    return f"{us:,} µs kernel: p50 beyond it"


def beyond(us: int, samples: list[float]) -> float:
    return p50(samples) * 1e6 - us


if __name__ == "__main__":
    main("wake", measure)
