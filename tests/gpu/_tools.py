"""Shared by the tests on a GPU: what they need, how to hold a stream, programs in processes of their own.

A test that may hang or that breaks the CUDA context runs as a program in a process of its own, with a time
limit of its own; the program says what it found on its standard output.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

#: Each launch returns when its work has finished: nothing is ever in flight.
LAUNCHES_BLOCK = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
#: Every operation of the main thread is checked for races, at about a millisecond each.
SANITIZED = os.environ.get("TORCH_CUDA_SANITIZER") == "1"


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of its parent
        return False


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


needs_cuda = pytest.mark.skipif(_gpus() < 1, reason="no CUDA GPU")
needs_two = pytest.mark.skipif(_gpus() < 2, reason=f"needs two CUDA GPUs, found {_gpus()}")
needs_bindings = pytest.mark.skipif(
    not has_module("cuda.bindings"), reason="cuda.bindings is missing: no streams and callbacks of our own"
)
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="uses glibc and POSIX signals")
needs_compiler = pytest.mark.skipif(
    not has_module("triton") or not (shutil.which("cc") or shutil.which("gcc")),
    reason="torch.compile on CUDA needs triton and a C compiler",
)
asynchronous = pytest.mark.skipif(
    LAUNCHES_BLOCK, reason="CUDA_LAUNCH_BLOCKING=1: nothing overlaps and nothing is in flight"
)
unsanitized = pytest.mark.skipif(
    SANITIZED, reason="TORCH_CUDA_SANITIZER=1: it costs the time that is measured here"
)
no_race_detector = pytest.mark.skipif(
    SANITIZED, reason="TORCH_CUDA_SANITIZER=1 does not know this kind of order (legacy stream, graphs)"
)

#: What every test module of this folder has; a longer time limit goes before it, for the first one counts.
ON_GPU = [pytest.mark.gpu, needs_cuda, pytest.mark.timeout(60)]


# -- holding streams -------------------------------------------------------------------------------


@dataclass
class Slow:
    """``slow()`` keeps the current stream busy: SLOW, which widens the window of a race."""

    cycles_per_ms: float

    def __call__(self, ms: float = 50.0) -> None:
        # With blocking launches there is no race to win; only time would be lost.
        ms = min(ms, 2.0) if LAUNCHES_BLOCK else ms
        torch.cuda._sleep(int(ms * self.cycles_per_ms))

    def on(self, streams: list[torch.cuda.Stream], ms: float = 50.0) -> None:
        for stream in streams:
            with torch.cuda.stream(stream):
                self(ms)


def measure_cycles() -> float:
    """Cycles of ``torch.cuda._sleep`` per millisecond, at the clock of a busy GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(300_000_000)  # clocks rise
    cycles = 60_000_000
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / begin.elapsed_time(end)


def mark() -> torch.cuda.Event:
    """An event after what the current stream holds now."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    return event


# -- data ------------------------------------------------------------------------------------------


async def tick(times: int = 1) -> None:
    """Let everybody else run, so many times."""
    for _ in range(times):
        await anyio.lowlevel.checkpoint()


def filled(host: torch.Tensor, value: int, what: str) -> None:
    """Every element of ``host`` is ``value``."""
    assert host.device.type == "cpu", f"{what}: on {host.device}, not in host memory"
    low, high = (int(x) for x in torch.aminmax(host))
    assert low == high == value, f"{what}: expected {value} everywhere, found values from {low} to {high}"


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes that no other seed gives."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def same_bytes(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        wrong = (found != expected).nonzero()
        pytest.fail(
            f"{what}: {len(wrong)} of {expected.numel()} elements differ, the first at "
            f"{wrong[0].tolist()}: {found[tuple(wrong[0])]} instead of {expected[tuple(wrong[0])]}"
        )


# -- the loop's pulse ------------------------------------------------------------------------------


@dataclass
class Pulse:
    """Gaps between ticks that are due every 5 ms, in milliseconds."""

    gaps: list[float] = field(default_factory=list)

    @property
    def largest(self) -> float:
        return max(self.gaps, default=0.0)


@asynccontextmanager
async def heartbeat() -> AsyncIterator[Pulse]:
    """How long does the loop stand still within this block?"""
    pulse = Pulse()

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await anyio.sleep(0.005)
            now = time.perf_counter()
            pulse.gaps.append((now - last) * 1e3)
            last = now

    gc.collect()
    gc.disable()  # a full collection of a test session's objects takes longer than what is looked for
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            await anyio.sleep(0.02)
            pulse.gaps.clear()
            yield pulse
            group.cancel_scope.cancel()
    finally:
        gc.enable()


# -- programs --------------------------------------------------------------------------------------

PRELUDE = """
import asyncio, faulthandler, os, sys, threading, time
import torch
import aiogpu

faulthandler.dump_traceback_later({limit}, exit=True)  # C code: works while somebody keeps the GIL

def calibrated():
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000_000)
    a.record(); torch.cuda._sleep(40_000_000); b.record(); b.synchronize()
    return 40_000_000 / a.elapsed_time(b)

def slow(ms):
    torch.cuda._sleep(int(ms * {cycles}))
"""


@dataclass
class Ended:
    code: int
    out: str
    err: str
    seconds: float
    at: float  # time.time() when it ended

    def __str__(self) -> str:
        return (
            f"exit code {self.code} after {self.seconds:.1f} s\n--- stdout\n{self.out[-4000:]}"
            f"\n--- stderr\n{self.err[-6000:]}"
        )


def command(body: str, *, limit: float, cycles: float) -> list[str]:
    source = PRELUDE.format(limit=limit, cycles=cycles) + textwrap.dedent(body)
    return [sys.executable, "-c", source]


def environment(**extra: str) -> dict[str, str]:
    """Faults, exits and signals are about work in flight: without what keeps launches synchronous."""
    env = {k: v for k, v in os.environ.items() if k not in ("CUDA_LAUNCH_BLOCKING", "TORCH_CUDA_SANITIZER")}
    path = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH", ""))))
    # As aiogpu sets it where it is the first to use CUDA; these programs touch CUDA before. With fewer
    # connections a stream can wait behind another stream's kernel.
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    return {**env, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **extra}


def program(body: str, *, cycles: float, limit: float = 45.0, **env: str) -> Ended:
    """Run ``body`` after :data:`PRELUDE` in a process of its own; fails when it does not end in time.

    Shortly before ``limit`` seconds it prints every thread's stack and ends with code 1.
    """
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command(body, limit=limit - 2, cycles=cycles),
            env=environment(**env),
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = f"--- stdout\n{error.stdout!r}\n--- stderr\n{error.stderr!r}"
        pytest.fail(f"the program hung for {limit} s\n{said}")
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - begin, time.time())


class Together:
    """Programs of one module, run side by side once the first result is asked for: CUDA starts slowly."""

    def __init__(self, cycles: float, at_once: int = 12) -> None:
        self._cycles = cycles
        self._waiting: dict[str, tuple[str, dict[str, str]]] = {}
        self._started: dict[str, Future[Ended]] = {}
        self._slots = threading.Semaphore(at_once)

    def add(self, name: str, body: str, **env: str) -> None:
        self._waiting[name] = (body, env)

    def __getitem__(self, name: str) -> Ended:
        while self._waiting:
            other, (body, env) = self._waiting.popitem()
            ended: Future[Ended] = Future()
            self._started[other] = ended
            # Daemons: they outlive the test that asks first, and are no leak of it.
            threading.Thread(target=self._run, args=(ended, body, env), daemon=True).start()
        return self._started[name].result()

    def _run(self, ended: Future[Ended], body: str, env: dict[str, str]) -> None:
        with self._slots:
            try:
                ended.set_result(program(body, cycles=self._cycles, limit=75.0, **env))
            except BaseException as error:
                ended.set_exception(error)


def succeeds(ended: Ended, says: str = "ALL RIGHT", code: int = 0) -> None:
    assert ended.code == code, f"expected exit code {code}\n{ended}"
    assert says in ended.out, f"the program did not say {says!r}\n{ended}"
