"""prefetch and pipeline on a GPU: overlap, order, memory, and how far the host runs ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import aiogpu

from ._tools import ON_GPU, Slow, asynchronous, heartbeat, unsanitized
from .conftest import Loop

pytestmark = ON_GPU

MIB = 1 << 20


def numbered(count: int, nbytes: int, *, pinned: bool = False) -> Iterator[torch.Tensor]:
    for number in range(count):
        yield torch.full((nbytes // 4,), number, dtype=torch.int32, pin_memory=pinned)


def all_equal(x: torch.Tensor, value: int) -> torch.Tensor:
    """On the device, without a synchronisation: how many elements differ."""
    return (x != value).sum()


# -- no wrong value ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [4096, 2 * MIB])
@pytest.mark.parametrize("how", ["task", "plain"])
def test_every_batch_is_whole_while_the_consumers_kernels_are_slow(
    run: Loop, slow: Slow, nbytes: int, how: str
) -> None:
    """Memory of batches that were dropped is used for later uploads, and must not be while a kernel that was
    launched before still reads it."""
    count = 60

    async def consume() -> int:
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        number = 0
        async with aiogpu.prefetch(numbered(count, nbytes), device="cuda", run_ahead=3) as batches:
            async for batch in batches:
                slow(2)
                wrong += all_equal(batch, number)
                number += 1
                del batch
        assert number == count
        return int(await aiogpu.item(wrong))

    assert run(aiogpu.task(consume) if how == "task" else consume) == 0


def test_every_result_of_a_pipeline_is_right(run: Loop, slow: Slow) -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        slow(1)
        return x * 3

    async def shifted(items: Any) -> Any:
        async for x in items:
            slow(1)
            yield x + 1

    @aiogpu.task
    async def main() -> list[tuple[int, int]]:
        chain = (
            aiogpu.pipeline(numbered(60, MIB)).to_device().map_gpu(compute).map_gpu(compute, concurrency=2)
        )
        async with chain.then(shifted).to_host() as results:
            return [(int(low), int(high)) async for low, high in map_extremes(results)]

    assert run(main) == [(9 * number + 1, 9 * number + 1) for number in range(60)]


async def map_extremes(results: Any) -> Any:
    async for result in results:
        yield torch.aminmax(result)


# -- overlap -------------------------------------------------------------------------------------------


@pytest.mark.timing
@asynchronous
@unsanitized
def test_upload_compute_and_download_overlap(run_asyncio: Loop, slow: Slow) -> None:
    """C19: three stages of about T each take less than 2 T per batch (one after the other 3 T)."""
    host = [torch.ones(64 * MIB, pin_memory=True) for _ in range(4)]  # 256 MiB: about 5 ms each way

    @aiogpu.task
    async def alone() -> float:
        took = []
        for _ in range(5):
            start = time.perf_counter()
            there = await aiogpu.to_device(host[0], "cuda")
            middle = time.perf_counter()
            await aiogpu.to_host(there)
            took.append(max(middle - start, time.perf_counter() - middle))
        return sorted(took)[2]

    async def together(T: float) -> float:
        def compute(x: torch.Tensor) -> torch.Tensor:
            slow(T * 1e3)
            return x

        source = (host[number % 4] for number in range(26))
        async with aiogpu.pipeline(source).to_device("cuda").map_gpu(compute).to_host() as results:
            for _ in range(6):
                await anext(results)
            start = time.perf_counter()
            for _ in range(20):
                await anext(results)
            return (time.perf_counter() - start) / 20

    T = run_asyncio(alone)
    ratio = run_asyncio(together, T) / T
    assert ratio < 2.0, f"{ratio:.2f} T per batch"


@pytest.mark.timing
@asynchronous
@unsanitized
def test_pageable_batches_are_uploaded_beside_the_compute(run_asyncio: Loop, slow: Slow) -> None:
    """The plain loop takes the sum of upload and compute; this takes about the longer of both."""
    data = [torch.ones(16 * MIB) for _ in range(4)]  # 64 MiB, pageable
    step_ms = 8.0

    @aiogpu.task
    async def train(steps: int) -> float:
        start = time.perf_counter()
        source = (data[number % 4] for number in range(steps))
        async with aiogpu.prefetch(source, device="cuda") as batches:
            async for _ in batches:
                slow(step_ms)
        await aiogpu.synchronize()
        return (time.perf_counter() - start) / steps

    async def main() -> float:
        await train(5)
        return await train(30)

    per_step = run_asyncio(main) * 1e3
    assert per_step < 1.5 * step_ms, f"{per_step:.1f} ms per step of {step_ms} ms"


# -- bounds --------------------------------------------------------------------------------------------


@pytest.mark.timing
@asynchronous
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_launching_never_blocks_and_the_loop_stays_free(
    run_asyncio: Loop, slow: Slow, run_ahead: int
) -> None:
    """A stream takes about 1020 launches: 100 per step, and without a bound the eleventh step would block."""

    @aiogpu.task
    async def consume() -> tuple[float, float]:
        x = torch.zeros(8, device="cuda")
        longest = 0.0
        async with heartbeat() as pulse, aiogpu.prefetch(range(40), run_ahead=run_ahead) as batches:
            async for _ in batches:
                start = time.perf_counter()
                slow(15)
                for _ in range(100):
                    x += 1
                longest = max(longest, time.perf_counter() - start)
        await aiogpu.synchronize()
        return longest * 1e3, pulse.largest

    longest, lag = run_asyncio(consume)
    assert longest < 12, f"launching blocked for {longest:.1f} ms"
    assert lag < 20, f"the loop stood still for {lag:.1f} ms"


@asynchronous
@unsanitized
def test_device_memory_is_bounded_while_the_host_runs_ahead(run_asyncio: Loop, slow: Slow) -> None:
    """C63, C64: peak allocated at most depth + 2 batches; after warm-up hardly anything is allocated."""
    nbytes, depth, run_ahead = 4 * MIB, 2, 2
    data = torch.ones(nbytes // 4)

    @aiogpu.task
    async def consume(steps: int) -> None:
        source = (data for _ in range(steps))
        async with aiogpu.prefetch(source, depth=depth, device="cuda", run_ahead=run_ahead) as batches:
            async for batch in batches:
                slow(0.2)
                batch.add_(1)
                del batch
        await aiogpu.synchronize()

    async def main() -> tuple[int, int, int]:
        await consume(100)
        before = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        await consume(1000)
        after = torch.cuda.memory_stats()
        calls = after["num_device_alloc"] + after["num_device_free"]
        calls -= before["num_device_alloc"] + before["num_device_free"]
        base = before["allocated_bytes.all.current"]
        active = before["active_bytes.all.current"]
        return (
            after["allocated_bytes.all.peak"] - base,
            after["active_bytes.all.peak"] - active,
            calls,
        )

    allocated, active, calls = run_asyncio(main)
    assert allocated <= (depth + 2) * nbytes
    assert active <= (depth + 1 + run_ahead + 1) * nbytes  # one more: freed, and the allocator has not looked
    assert calls <= 2, "more than a block that the warm-up did not happen to need"


def test_a_dataloader_with_pinned_memory_feeds_the_gpu(run: Loop) -> None:
    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((1000,), index)

    loader = torch.utils.data.DataLoader(Data(), batch_size=8, pin_memory=True)

    @aiogpu.task
    async def main() -> list[int]:
        async with aiogpu.prefetch(loader, device="cuda") as batches:
            return [int(await aiogpu.item(batch.sum())) async for batch in batches]

    assert run(main) == [1000 * sum(range(8 * n, 8 * n + 8)) for n in range(8)]
