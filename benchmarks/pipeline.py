"""Does a pipeline cost no more than its slowest stage?

Three questions: batches of pageable memory for every step, against the loop that people write; three stages
of the same length, up, compute and down; loading and uploading the same files as SPDL. On the CPU the
programs run, and the numbers mean nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import aiogpu
from _harness import Heartbeat, cycles, main, p50, percentile, run
from _report import Row, at_least, at_most

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MB = 1_000_000 if CUDA else 10_000  # on the CPU everything is a hundred times smaller
STEPS, QUICK_STEPS = 100, 20
COMPUTE_US = 3000.0

STEP = "one step per pageable batch of 64 MB"
STAGES = "three stages, up, compute, down, each T"
LOADING = "files of 64 MB, loaded by 4 threads and uploaded"


def measure(quick: bool) -> list[Row]:
    steps = QUICK_STEPS if quick else STEPS
    return [*step_rows(steps), *stage_rows(steps), *loading_rows(steps)]


# -- pageable batches ----------------------------------------------------------------------------------


def step_rows(steps: int) -> list[Row]:
    data = [pageable(64 * MB) for _ in range(4)]
    taken = {name: p50([way(data, steps) for _ in range(3)]) for name, way in STEP_WAYS.items()}
    lags = run(lambda: lag_of_prefetch(data, steps))
    plain, ours = taken["plain loop"], taken["aiogpu.prefetch"]
    rows = [Row(STEP, name, steps / seconds, "steps/s") for name, seconds in taken.items()]
    rows.append(at_least(STEP, "aiogpu.prefetch / plain loop", plain / ours, "×", 1.4))
    rows.append(at_most(STEP, "aiogpu.prefetch, lag p99", percentile(lags, 99) * 1e3, "ms", 2.0))
    return rows if CUDA else unjudged(rows)


def pageable(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes // 4)


def batches(data: list[torch.Tensor], steps: int) -> Iterator[torch.Tensor]:
    """Memory that was written before: making it is not what is measured."""
    return (data[step % len(data)] for step in range(steps))


def compute(x: torch.Tensor, us: float = COMPUTE_US) -> torch.Tensor:
    if CUDA:
        torch.cuda._sleep(cycles(us))
    return x.add_(1)


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def plain_loop(data: list[torch.Tensor], steps: int) -> float:
    wait()
    start = time.perf_counter()
    for batch in batches(data, steps):
        compute(batch.to(DEVICE, copy=True))
    wait()
    return time.perf_counter() - start


def pinned_loop(data: list[torch.Tensor], steps: int) -> float:
    """What DataLoader's ``pin_memory`` with ``non_blocking`` makes of it, with the pinning in the loop."""
    wait()
    start = time.perf_counter()
    for batch in batches(data, steps):
        staged = batch.pin_memory() if CUDA else batch
        compute(staged.to(DEVICE, non_blocking=True, copy=True))
    wait()
    return time.perf_counter() - start


def prefetched(data: list[torch.Tensor], steps: int) -> float:
    async def body() -> float:
        await train(data, 4)  # starts what is started once
        start = time.perf_counter()
        await train(data, steps)
        return time.perf_counter() - start

    return run(body)


@aiogpu.task
async def train(data: list[torch.Tensor], steps: int) -> None:
    async with aiogpu.prefetch(batches(data, steps), device=DEVICE) as uploaded:
        async for batch in uploaded:
            compute(batch)
    await aiogpu.synchronize()


async def lag_of_prefetch(data: list[torch.Tensor], steps: int) -> list[float]:
    await train(data, 4)
    async with Heartbeat(0.001) as pulse:
        await train(data, steps)
    return pulse.lags


STEP_WAYS: dict[str, Callable[[list[torch.Tensor], int], float]] = {
    "plain loop": plain_loop,
    "pin_memory() and non_blocking, in the loop": pinned_loop,
    "aiogpu.prefetch": prefetched,
}


# -- three stages --------------------------------------------------------------------------------------


def stage_rows(steps: int) -> list[Row]:
    # Page-locked, so that a stage is the link and nothing else; large, so that it takes milliseconds.
    size = 256 * MB // 4
    host = [torch.ones(size, pin_memory=CUDA) for _ in range(4)]
    up, down = run(lambda: copies_alone(host[0]))
    stage = max(up, down)
    us = stage * 1e6
    serial = p50([one_after_the_other(host, steps, us) for _ in range(2)]) / steps
    ours = p50([run(lambda: staged(host, steps, us)) for _ in range(3)]) / steps
    rows = [
        Row(
            STAGES,
            "T: the longer copy, alone",
            stage * 1e3,
            "ms",
            detail={"up ms": up * 1e3, "down ms": down * 1e3},
        ),
        Row(STAGES, "one after the other, per batch", serial / stage, "T"),
        at_most(STAGES, "aiogpu.pipeline, per batch", ours / stage, "T", 1.15),
    ]
    return rows if CUDA else unjudged(rows)


@aiogpu.task
async def copies_alone(x: torch.Tensor) -> tuple[float, float]:
    ups, downs = [], []
    for _ in range(8):
        start = time.perf_counter()
        there = await aiogpu.to_device(x, DEVICE)
        ups.append(time.perf_counter() - start)
        start = time.perf_counter()
        await aiogpu.to_host(there)
        downs.append(time.perf_counter() - start)
    return p50(ups[2:]), p50(downs[2:])


def one_after_the_other(host: list[torch.Tensor], steps: int, us: float) -> float:
    landing = torch.empty_like(host[0], pin_memory=CUDA)
    wait()
    start = time.perf_counter()
    for batch in batches(host, steps):
        landing.copy_(compute(batch.to(DEVICE, copy=True), us))
    wait()
    return time.perf_counter() - start


async def staged(host: list[torch.Tensor], steps: int, us: float) -> float:
    """Seconds for ``steps`` batches, after as many as fill the stages."""
    warm_up = 6
    source = batches(host, steps + warm_up)
    chain = aiogpu.pipeline(source).to_device(DEVICE).map_gpu(lambda x: compute(x, us)).to_host()
    async with chain as results:
        await take(results, warm_up)
        start = time.perf_counter()
        await take(results, steps)
        return time.perf_counter() - start


async def take(results: AsyncIterator[Any], count: int) -> None:
    for _ in range(count):
        await anext(results)


# -- loading -------------------------------------------------------------------------------------------


def loading_rows(steps: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.pt" for number in range(4)]
        for path in paths:
            torch.save(pageable(64 * MB), path)
        ours = p50([run(lambda: loaded(paths, steps)) for _ in range(3)])
        rows = [Row(LOADING, "aiogpu.pipeline", steps / ours, "batches/s")]
        try:
            from spdl.pipeline import PipelineBuilder
        except ImportError:
            print("SPDL is left out: it is not installed (pip install spdl)")
            return rows
        theirs = p50([spdl_loaded(PipelineBuilder, paths, steps) for _ in range(3)])
    rows.append(Row(LOADING, "SPDL", steps / theirs, "batches/s"))
    rows.append(at_least(LOADING, "aiogpu.pipeline / SPDL", theirs / ours, "×", 1.0))
    return rows if CUDA else unjudged(rows)


def files(paths: list[Path], steps: int) -> Iterator[Path]:
    return (paths[step % len(paths)] for step in range(steps))


def load(path: Path) -> torch.Tensor:
    return torch.load(path, weights_only=True)


async def loaded(paths: list[Path], steps: int) -> float:
    warm_up = 8
    chain = aiogpu.pipeline(files(paths, steps + warm_up)).map(load, concurrency=4).to_device(DEVICE)
    async with chain as results:
        await take(results, warm_up)
        start = time.perf_counter()
        await take(results, steps)
        return time.perf_counter() - start


def spdl_loaded(builder: Any, paths: list[Path], steps: int) -> float:
    """The same with SPDL's pipeline: its own transfer where its package for that is installed."""
    warm_up = 8
    pipeline = (
        builder()
        .add_source(files(paths, steps + warm_up))
        .pipe(load, concurrency=4, output_order="input")
        .pipe(spdl_upload())
        .add_sink(2)
        .build(num_threads=5)
    )
    with pipeline.auto_stop():
        results = iter(pipeline)
        list(islice(results, warm_up))
        start = time.perf_counter()
        for _ in islice(results, steps):
            pass
        wait()
        return time.perf_counter() - start


def spdl_upload() -> Callable[[torch.Tensor], torch.Tensor]:
    if not CUDA:
        return lambda x: x.clone()
    try:
        from spdl.io import transfer_tensor  # page-locks, and copies on a stream of its own

        return transfer_tensor  # type: ignore[no-any-return]
    except ImportError:
        stream = torch.cuda.Stream()

        def upload(x: torch.Tensor) -> torch.Tensor:
            with torch.cuda.stream(stream):
                there = x.pin_memory().to(DEVICE, non_blocking=True)
            stream.synchronize()
            return there

        return upload


def unjudged(rows: list[Row]) -> list[Row]:
    """Without a GPU there is nothing to meet."""
    return [Row(row.question, row.contender, row.value, row.unit, detail=row.detail) for row in rows]


if __name__ == "__main__":
    main("pipeline", measure, needs_gpu=False)
