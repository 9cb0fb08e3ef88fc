"""What every script needs: arguments, a kernel of known length, a heartbeat, bounded event loops.

Nothing here may hang: an asyncio run has a time limit, and a watchdog in C ends the process with all
stacks if even the interpreter stands still (a Python host callback can bring that about).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
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
    """`async with Heartbeat() as pulse`: how late the loop ran a callback that was due every `tick` seconds.

    `lags` are seconds beyond the moment at which it was due, one for each tick, also for those that were
    missed. A timer of the kernel's makes the loop's selector return: asyncio's own are rounded up to whole
    milliseconds, so that an idle loop would show a lag of one.
    """

    def __init__(self, tick: float = 0.002) -> None:
        self.lags: list[float] = []
        self._tick = tick
        self._due = math.inf

    async def __aenter__(self) -> Heartbeat:
        self._timer = _timerfd(self._tick)
        self._due = time.perf_counter() + self._tick
        asyncio.get_running_loop().add_reader(self._timer, self._beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A loop that stood still until now has not beaten yet: that gap counts most of all.
        self._note(time.perf_counter())
        asyncio.get_running_loop().remove_reader(self._timer)
        os.close(self._timer)

    def _beat(self) -> None:
        os.read(self._timer, 8)
        self._note(time.perf_counter())

    def _note(self, now: float) -> None:
        while self._due <= now:
            self.lags.append(now - self._due)
            self._due += self._tick
        if not self.lags:
            self.lags.append(0.0)


def _timerfd(seconds: float) -> int:
    """A descriptor that can be read every `seconds` (timerfd_create(2); Python has it from 3.13 on)."""
    libc = ctypes.CDLL(None, use_errno=True)
    monotonic, nonblocking = 1, os.O_NONBLOCK
    descriptor: int = libc.timerfd_create(monotonic, nonblocking)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    spec = (ctypes.c_long * 4)(0, int(seconds * 1e9), 0, int(seconds * 1e9))  # interval, first
    if libc.timerfd_settime(descriptor, 0, spec, None) != 0:
        raise OSError(ctypes.get_errno(), "timerfd_settime")
    return descriptor


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
