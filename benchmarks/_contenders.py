"""The ways to wait for the GPU that the scripts compare, each written as a careful user would.

A worker launches a kernel and waits for it, again and again while `more()`, and returns the seconds each
round took. `stream` is the stream of its own that it launches on; None: the thread's current one, which
is fair where one coroutine has the thread to itself (`with torch.cuda.stream(...)` costs 9 µs). aiogpu's
task brings its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

import aiogpu

More = Callable[[], bool]
Worker = Callable[[int, More, torch.cuda.Stream | None], Awaitable[list[float]]]
# (raw stream handle, what to call once the work before it is done)
Enqueue = Callable[[int, Callable[[], object]], None]

BLOCKING = "blocking synchronize()"
AIOGPU = "aiogpu"
AIOGPU_SPIN = "aiogpu, spin=inf"
TO_THREAD = "to_thread"
POLL = "poll loop"
CALLBACK = "Python callback"


@dataclass(frozen=True)
class Contender:
    name: str
    worker: Worker
    runtime: dict[str, Any] | None = None  # settings of the aiogpu.Runtime around it; None: none


@contextlib.asynccontextmanager
async def surroundings(runtime: dict[str, Any] | None) -> AsyncIterator[None]:
    if runtime is None:
        yield
    else:
        async with aiogpu.Runtime(**runtime):
            yield


def contenders() -> list[Contender]:
    ours = [
        Contender(AIOGPU, aiogpu_worker, {}),
        Contender(AIOGPU_SPIN, aiogpu_worker, {"spin": math.inf}),
    ]
    theirs = [
        Contender(BLOCKING, by_event(block)),
        Contender(TO_THREAD, by_event(in_thread, sleeping=True)),
        Contender(POLL, by_event(poll)),
    ]
    return ours + theirs + [Contender(name, by_callback(enqueue)) for name, enqueue in callbacks().items()]


@aiogpu.task
async def aiogpu_worker(cycles: int, more: More, stream: torch.cuda.Stream | None = None) -> list[float]:
    took = []
    while more():
        start = time.perf_counter()
        torch.cuda._sleep(cycles)
        await aiogpu.synchronize()
        took.append(time.perf_counter() - start)
    return took


def by_event(wait: Callable[[torch.cuda.Event], Awaitable[None]], *, sleeping: bool = False) -> Worker:
    """`sleeping`: a thread that waits for the event sleeps instead of spinning."""

    async def worker(cycles: int, more: More, stream: torch.cuda.Stream | None = None) -> list[float]:
        event = torch.cuda.Event(blocking=sleeping)
        took = []
        while more():
            start = time.perf_counter()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
                event.record()
            await wait(event)
            took.append(time.perf_counter() - start)
            if wait is block:
                await asyncio.sleep(0)  # outside the measured time: it never yields by itself
        return took

    return worker


async def block(event: torch.cuda.Event) -> None:
    event.synchronize()


async def in_thread(event: torch.cuda.Event) -> None:
    await asyncio.to_thread(event.synchronize)


async def poll(event: torch.cuda.Event) -> None:
    while not event.query():
        await asyncio.sleep(0)


def by_callback(enqueue: Enqueue) -> Worker:
    async def worker(cycles: int, more: More, stream: torch.cuda.Stream | None = None) -> list[float]:
        loop = asyncio.get_running_loop()
        took = []
        while more():
            start = time.perf_counter()
            done = loop.create_future()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
                handle = torch.cuda.current_stream().cuda_stream
            enqueue(handle, partial(loop.call_soon_threadsafe, _resolve, done))
            await done
            took.append(time.perf_counter() - start)
        return took

    return worker


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@cache
def callbacks() -> dict[str, Enqueue]:
    """Each library at hand that runs Python on the driver's callback thread."""
    found = {}
    for library, make in {"cuda.bindings": _cuda_bindings, "CuPy": _cupy}.items():
        with contextlib.suppress(ImportError):
            found[f"{CALLBACK}, {library}"] = make()
    return found


def _cuda_bindings() -> Enqueue:
    from cuda.bindings import driver

    waiting: dict[int, Callable[[], object]] = {}
    keys = itertools.count(1)  # not 0: ctypes turns a null pointer into None

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def fire(key: int) -> None:
        waiting.pop(key)()

    function = driver.CUhostFn(ctypes.cast(fire, ctypes.c_void_p).value)

    def enqueue(handle: int, call: Callable[[], object]) -> None:
        key = next(keys)
        waiting[key] = call
        (error,) = driver.cuLaunchHostFunc(handle, function, key)
        if int(error):
            raise RuntimeError(f"cuLaunchHostFunc: {error!r}")

    enqueue.keep = fire  # type: ignore[attr-defined]  # `function` holds its address only
    return enqueue


def _cupy() -> Enqueue:
    import cupy

    stream = cache(cupy.cuda.ExternalStream)

    def enqueue(handle: int, call: Callable[[], object]) -> None:
        stream(handle).launch_host_func(lambda _: call(), None)

    return enqueue
