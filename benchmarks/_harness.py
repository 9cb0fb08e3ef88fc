"""What every script needs: arguments, a kernel of known length, a heartbeat, bounded event loops.

Nothing here may hang: an asyncio run has a time limit, and a watchdog in C ends the process with all
stacks if even the interpreter stands still (a Python host callback can bring that about).
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import functools
import gc
import math
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

# aiogpu sets this when it starts CUDA. Here the calibration starts CUDA, and every contender shall have it.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

from _report import Row, record, show, write_json

R = TypeVar("R")

NO_GPU = "needs a CUDA GPU; skipped"


def main(
    name: str, measure: Callable[[bool], list[Row]], *, needs_gpu: bool = True, limit_s: float = 120
) -> None:
    """A script's body: `measure(quick)` gives the rows; prints them and, with --json, writes them."""
    arguments = _arguments(name)
    skipped = NO_GPU if needs_gpu and not torch.cuda.is_available() else ""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    # For all contenders: torch's half a million objects make a full collection take 100 ms, and whoever
    # happens to be measured then would look bad. Servers do the same before they serve.
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    rows = [] if skipped else measure(arguments.quick)
    seconds = time.perf_counter() - start
    faulthandler.cancel_dump_traceback_later()
    if skipped:
        print(f"{name}: {skipped}")
    else:
        show(f"{name} ({seconds:.0f} s{', quick' if arguments.quick else ''})", rows)
    if arguments.json:
        write_json(
            arguments.json, record(name, rows, quick=arguments.quick, seconds=seconds, skipped=skipped)
        )


def _arguments(name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the rows, machine and versions there"
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples: for a look, not for a verdict")
    return parser.parse_args()


# Event loops


def loops() -> list[str]:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return ["asyncio"]
    return ["asyncio", "uvloop"]


def run(body: Callable[[], Awaitable[R]], *, loop: str = "asyncio", limit_s: float = 60) -> R:
    """`body` on a fresh event loop, for at most `limit_s` seconds."""

    async def bounded() -> R:
        async with asyncio.timeout(limit_s):
            return await body()

    with asyncio.Runner(loop_factory=_factory(loop)) as runner:
        return runner.run(bounded())


def _factory(loop: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if loop == "asyncio":
        return None
    import uvloop

    return uvloop.new_event_loop


class Heartbeat:
    """`async with Heartbeat() as pulse`: how late the loop ran a coroutine that was due every `tick` seconds.

    `lags` are seconds beyond the tick. asyncio's own timers are late by up to a millisecond, so an idle loop
    shows about that much.
    """

    def __init__(self, tick: float = 0.002) -> None:
        self.lags: list[float] = []
        self._tick = tick
        self._due = math.inf

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A loop that stood still until now has not beaten yet: that gap counts most of all.
        self.lags.append(max(0.0, time.perf_counter() - self._due))
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _beat(self) -> None:
        while True:
            self._due = time.perf_counter() + self._tick
            await asyncio.sleep(self._tick)
            self.lags.append(max(0.0, time.perf_counter() - self._due))


# Numbers


def percentile(samples: Iterable[float], percent: float) -> float:
    """Nearest rank: a value that was measured, never one in between."""
    ranked = sorted(samples)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


def p50(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def times(n: int) -> Callable[[], bool]:
    """A loop condition that is true `n` times."""
    left = iter(range(n))
    return lambda: next(left, None) is not None


def until(deadline: float) -> Callable[[], bool]:
    return lambda: time.perf_counter() < deadline


# The device


def cycles(us: float) -> int:
    """What `torch.cuda._sleep` needs to keep one multiprocessor busy for `us` microseconds on this GPU."""
    return round(us * _cycles_per_us())


@functools.cache
def _cycles_per_us() -> float:
    _elapsed_us(100_000_000)  # the clock rises under load
    short, long = 2_000_000, 12_000_000
    # The slope leaves out what a launch costs; the median what another tenant of the machine does.
    return statistics.median((long - short) / (_elapsed_us(long) - _elapsed_us(short)) for _ in range(7))


def _elapsed_us(cycles: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
