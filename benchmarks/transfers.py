"""How fast are copies between host and GPU, from 4 B to 1 GB, and does the loop stay free meanwhile?

Every way copies the same bytes; all take turns within one size. A time is that of one transfer, from the call
to the moment at which the data may be used (the blocking ways end with a synchronization). "In a row":
several (2 GB in all, but at most 32) are started and then awaited, as a pipeline does it, so that waking up
counts once.

On the CPU it runs as a check of itself, with small sizes and without verdicts.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch

import aiogpu
from _harness import Heartbeat, main, p50, percentile, run
from _report import Row, at_least, at_most

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SIZES = (
    [4, 4 * KB, 64 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB, GB] if CUDA else [4, 64 * KB, MB, 16 * MB]
)

PAUSE_S = 0.01

UP, DOWN, OUT = "pageable → GPU", "GPU → host", "GPU → the caller's ordinary memory"
INTO, BACK = "pinned → GPU memory that is there", "GPU → pinned memory that is there"
PINNED, ROW_UP, ROW_DOWN = "pinned → GPU", "pinned → GPU, in a row", "GPU → host, in a row"
SMALL, MANY, LOOP, MEMORY = (
    "one small transfer",
    "10 000 × 1 KB in one dict",
    "the loop meanwhile",
    "pinned memory",
)
AIOGPU, TO, CPU, RAW = "aiogpu", ".to()", ".cpu()", "raw copy"

Way = Callable[[torch.Tensor], Any]
Times = dict[str, list[float]]  # seconds of each way


def measure(quick: bool) -> list[Row]:
    return run(partial(compete, quick), limit_s=130)


async def compete(quick: bool) -> list[Row]:
    rows: list[Row] = []
    async with aiogpu.Runtime() as runtime:
        await runtime.reserve()
        for nbytes in SIZES[:-1] if quick else SIZES:
            rows += await one_size(nbytes, 0.12 if quick else 0.25)
            await runtime.trim()  # what one size has page-locked is not the next one's
            await runtime.reserve()
        rows += await many_small(2 if quick else 5)
        rows += await heartbeat(2 if quick else 6)
        rows += await memory(200 if quick else 1000)
    if spdl() is None:
        print("SPDL's transfer_tensor is left out: spdl is not installed or finds no GPU")
    return rows


# Sizes


async def one_size(nbytes: int, budget_s: float) -> list[Row]:
    host = torch.ones(nbytes, dtype=torch.uint8)
    there = host.to(DEVICE, copy=True)
    rows: list[Row] = []
    times: dict[str, Times] = {}
    for question, ways, source in questions(host, there):
        times[question] = await in_turns(ways, source, budget_s)
        rows += [speed(question, name, nbytes, took) for name, took in times[question].items()]
    return rows + verdicts(nbytes, times)


def questions(host: torch.Tensor, there: torch.Tensor) -> Iterator[tuple[str, dict[str, Way], torch.Tensor]]:
    yield UP, {**uploads(), AIOGPU: aiogpu.to_device}, host
    yield DOWN, {**downloads(), AIOGPU: aiogpu.to_host}, there
    out = torch.zeros_like(host)
    yield OUT, {"copy_": out.copy_, AIOGPU: partial(aiogpu.to_host, out=out)}, there
    if CUDA:
        pinned = host.pin_memory()
        yield PINNED, {RAW: finished(to_device_soon), AIOGPU: aiogpu.to_device}, pinned
        slot = torch.empty_like(there)
        yield INTO, into(slot), pinned
        yield BACK, into(host.pin_memory()), there
        count = max(2, min(32 if CUDA else 8, 2 * GB // max(1, host.nbytes)))
        yield ROW_UP, {RAW: row_up(count), AIOGPU: in_a_row(aiogpu.to_device, count)}, pinned
        yield ROW_DOWN, {RAW: row_down(count, pinned), AIOGPU: in_a_row(aiogpu.to_host, count)}, there


async def in_turns(ways: dict[str, Way], source: torch.Tensor, budget_s: float) -> Times:
    """Each way's seconds per transfer, in turns, for `budget_s` seconds a way or three turns.

    In another order each turn, with a pause before each: some ways leave work behind (memory that a thread of
    theirs unlocks, say), which must not count for whoever comes next.
    """
    burst = 20 if source.nbytes <= 64 * KB else 1
    took: Times = {name: [] for name in ways}
    for way in ways.values():  # warm-up
        await timed(way, source)
        await timed(way, source)
    order = list(ways)
    shuffle = random.Random(0).shuffle
    spent = 0.0
    while min(map(len, took.values())) < 3 or spent < budget_s * len(ways):
        shuffle(order)
        for name in order:
            await asyncio.sleep(PAUSE_S)
            samples = [await timed(ways[name], source) for _ in range(burst)]
            took[name] += samples
            spent += sum(samples) + PAUSE_S
    return took


async def timed(way: Way, source: torch.Tensor) -> float:
    start = time.perf_counter()
    result = way(source)
    if isinstance(result, Awaitable):
        result = await result
    took = time.perf_counter() - start
    count = result if isinstance(result, int) else 1
    del result  # returning a large block to the system is not part of it
    return took / count


def speed(question: str, name: str, nbytes: int, took: Sequence[float]) -> Row:
    seconds = p50(took)
    detail = {"µs": seconds * 1e6, "fastest µs": min(took) * 1e6, "bytes": nbytes}
    return Row(f"{question}, {size(nbytes)}", name, nbytes / seconds / 1e9, "GB/s", detail=detail)


def size(nbytes: int) -> str:
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "KB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


# Ways


def finished(way: Way) -> Way:
    """Several threads may use their own streams; a result is usable when its device is done."""

    def call(source: torch.Tensor) -> Any:
        result = way(source)
        if CUDA:
            torch.cuda.current_stream().synchronize()
        return result

    return call


def to_device_soon(source: torch.Tensor) -> torch.Tensor:
    return source.to(DEVICE, non_blocking=True, copy=True)


def to_device(source: torch.Tensor) -> torch.Tensor:
    return source.to(DEVICE, copy=True)


def to_host(source: torch.Tensor) -> torch.Tensor:
    return source.to("cpu", copy=True)


def uploads() -> dict[str, Way]:
    ways: dict[str, Way] = {
        TO: finished(to_device),
        ".to(non_blocking)": finished(to_device_soon),
        "to_thread(.to)": partial(asyncio.to_thread, finished(to_device)),
    }
    if CUDA:
        ways["pin_memory().to()"] = finished(lambda source: to_device_soon(source.pin_memory()))
    if (found := spdl()) is not None:
        ways["SPDL transfer_tensor"] = found[0]
    return ways


def downloads() -> dict[str, Way]:
    ways: dict[str, Way] = {
        CPU: to_host,
        "to_thread(.cpu)": partial(asyncio.to_thread, to_host),
        ".to(non_blocking)": finished(lambda there: there.to("cpu", non_blocking=True, copy=True)),
    }
    if (found := spdl()) is not None and found[1] is not None:
        ways["SPDL transfer_tensor_d2h"] = found[1]
    return ways


def into(dst: torch.Tensor) -> dict[str, Way]:
    """As engines keep their buffers: both sides are there before, and stay."""

    def raw(source: torch.Tensor) -> torch.Tensor:
        return dst.copy_(source, non_blocking=True)

    return {
        RAW: finished(raw),
        "to_thread(copy_)": partial(asyncio.to_thread, dst.copy_),
        AIOGPU: partial(aiogpu.copy_, dst),
    }


def in_a_row(way: Way, count: int) -> Way:
    async def call(source: torch.Tensor) -> int:
        operations = [way(source) for _ in range(count)]
        for operation in operations:
            await operation
        return count

    return call


def row_up(count: int) -> Way:
    def call(source: torch.Tensor) -> int:
        kept = [to_device_soon(source) for _ in range(count)]
        torch.cuda.synchronize()
        return len(kept)

    return call


def row_down(count: int, pinned: torch.Tensor) -> Way:
    """The link: into memory that is page-locked already."""

    def call(source: torch.Tensor) -> int:
        for _ in range(count):
            pinned.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return count

    return call


@cache
def spdl() -> tuple[Way, Way | None] | None:
    """SPDL's upload and, where its version has one, download; they block, and end with a synchronization."""
    if not CUDA:
        return None
    try:
        io = importlib.import_module("spdl.io")
        up = getattr(io, "transfer_tensor_h2d", None) or io.transfer_tensor
        up(torch.ones(4))
    except Exception as error:
        print(f"spdl: {type(error).__name__}: {error}")
        return None
    return up, getattr(io, "transfer_tensor_d2h", None)


# Verdicts


def verdicts(nbytes: int, times: dict[str, Times]) -> list[Row]:
    def ratio(question: str, other: str) -> float:
        """How many times as fast as `other` aiogpu is."""
        return p50(times[question][other]) / p50(times[question][AIOGPU])

    name = size(nbytes)
    rows: list[Row] = []
    if nbytes <= 64 * KB:
        for question, other in ((UP, TO), (DOWN, CPU)):
            beyond = (p50(times[question][AIOGPU]) - p50(times[question][other])) * 1e6
            rows.append(promise(at_most, f"{SMALL}, {name}", f"{question}, beyond {other}", beyond, "µs", 25))
    if not CUDA:
        return rows
    bound = {64 * MB: 3.0, 256 * MB: 4.0, GB: 5.0}.get(nbytes)
    if bound is not None:
        rows.append(at_least(f"{UP}, {name}", f"aiogpu / {TO}", ratio(UP, TO), "×", bound))
        rows.append(at_least(f"{DOWN}, {name}", f"aiogpu / {CPU}", ratio(DOWN, CPU), "×", 15))
        rows.append(at_least(f"{OUT}, {name}", "aiogpu / copy_", ratio(OUT, "copy_"), "×", 2))
        rows.append(at_least(f"{ROW_DOWN}, {name}", "aiogpu / the link", ratio(ROW_DOWN, RAW), "×", 0.9))
    if nbytes >= 16 * MB:
        rows.append(at_least(f"{ROW_UP}, {name}", "aiogpu / raw", ratio(ROW_UP, RAW), "×", 0.97))
    if nbytes == GB:
        link = p50(times[ROW_UP][RAW]) / p50(times[UP][AIOGPU])
        rows.append(at_least(f"{UP}, {name}", "aiogpu / the pinned link", link, "×", 0.85))
    return rows


def promise(
    judge: Callable[..., Row], question: str, contender: str, value: float, unit: str, bound: float
) -> Row:
    """A verdict where there is a GPU; without one, a number."""
    if CUDA:
        return judge(question, contender, value, unit, bound)
    return Row(question, contender, value, unit)


async def many_small(rounds: int) -> list[Row]:
    batch = {f"{index}": torch.ones(KB, dtype=torch.uint8) for index in range(10_000)}
    loop = finished(lambda source: {name: to_device(tensor) for name, tensor in source.items()})
    ways: dict[str, Way] = {"a loop of .to()": loop, AIOGPU: aiogpu.to_device}
    took: Times = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, way in ways.items():
            took[name].append(await timed(way, batch))  # type: ignore[arg-type]
            await asyncio.sleep(0)
    ms = {name: p50(samples[1:]) * 1e3 for name, samples in took.items()}
    rows = [Row(MANY, name, value, "ms") for name, value in ms.items()]
    times = ms["a loop of .to()"] / ms[AIOGPU]
    return [*rows, promise(at_least, MANY, "aiogpu / a loop of .to()", times, "×", 5)]


async def heartbeat(rounds: int) -> list[Row]:
    """How late the loop ran while aiogpu copied, all directions, after warm-up."""
    host = torch.ones(GB if CUDA else 16 * MB, dtype=torch.uint8)
    lags: list[float] = []
    for number in range(1 + rounds):
        async with Heartbeat() as pulse:
            there = await aiogpu.to_device(host)
            back = await aiogpu.to_host(there)
            await aiogpu.to_host(there, out=host)
        if number:
            lags += pulse.lags
        del there, back
    p99, largest = percentile(lags, 99) * 1e3, max(lags) * 1e3
    return [
        promise(at_most, LOOP, "aiogpu, p99 lag", p99, "ms", 1),
        Row(LOOP, "aiogpu, largest lag", largest, "ms", detail={"beats": len(lags)}),
    ]


async def memory(transfers: int) -> list[Row]:
    """What is page-locked while 200 transfers are under way, and how often after that."""
    host = torch.ones(9 * MB if CUDA else 300 * KB, dtype=torch.uint8)
    settings = aiogpu.current_runtime().settings
    cap = settings.staging_bytes + settings.pinned_bytes + 8 * MB
    most = 0

    async def there_and_back(_: int = 0) -> None:
        nonlocal most
        back = await aiogpu.to_host(await aiogpu.to_device(host))
        stats = aiogpu.stats()
        most = max(most, stats.staging_bytes + stats.result_bytes + stats.result_cache_bytes)
        del back

    await aiogpu.amap(there_and_back, range(200), limit=200)
    before = aiogpu.stats().staging_allocations
    for _ in range(transfers // 2):
        await there_and_back()
    allocations = aiogpu.stats().staging_allocations - before
    return [
        at_most(MEMORY, "200 transfers at once, most at any time", most / MB, "MB", cap / MB),
        at_most(MEMORY, f"allocations in {transfers} transfers", allocations, "", 0),
    ]


if __name__ == "__main__":
    main("transfers", measure, needs_gpu=False, limit_s=145)
