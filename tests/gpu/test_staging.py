"""Staging memory on hardware: registered by us, known to CUDA, bounded, exact, given back."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
import torch

import aiogpu
from aiogpu._engine import Engine
from aiogpu.drivers.cuda import CudaDriver
from aiogpu.transfers.pinned import StagingMemory

from ._tools import ON_GPU, asynchronous, needs_bindings, needs_linux, pattern, same_bytes, unsanitized
from .conftest import Loop

pytestmark = ON_GPU

MIB = 1 << 20


@pytest.fixture
def driver(engine: Engine) -> CudaDriver:
    assert isinstance(engine.driver, CudaDriver)
    return engine.driver


@needs_bindings
def test_registered_memory_is_page_locked_for_cuda_and_ordinary_afterwards(
    engine: Engine, driver: CudaDriver
) -> None:
    block = StagingMemory(driver, engine.crew).allocate(8 * MIB)
    assert block is not None
    assert block.is_pinned()
    assert block[5 * MIB :].is_pinned()
    block.copy_(pattern(8 * MIB, 1))
    there = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    there.copy_(block, non_blocking=True)
    torch.cuda.synchronize()
    same_bytes(there.cpu(), pattern(8 * MIB, 1), "bytes")
    driver.unpin(block)
    assert not block.is_pinned()


@needs_bindings
def test_a_registration_that_fails_leaves_no_error_behind(driver: CudaDriver) -> None:
    """Neither for this thread's next kernel, nor for later registrations."""
    block = driver.pinned(MIB)
    with torch.cuda.device(driver.device):
        assert driver.entries is not None
        assert driver.entries.register(block.data_ptr(), MIB, 1) != 0, "the same memory twice"
    assert float(torch.ones(4, device="cuda").sum()) == 4
    torch.cuda.synchronize()
    driver.unpin(block)
    driver.unpin(driver.pinned(MIB))


@pytest.mark.parametrize("nbytes", [64 * 1024 + 1, MIB, 8 * MIB, 64 * MIB + 3, 300 * MIB])
def test_large_pageable_transfers_are_exact_both_ways(run_asyncio: Loop, engine: Engine, nbytes: int) -> None:
    source = pattern(nbytes, 3)

    async def main() -> None:
        there = await aiogpu.to_device(source)
        same_bytes(there.cpu(), source, "bytes")
        out = torch.zeros_like(source)
        await aiogpu.to_host(there, out=out)
        same_bytes(out, source, "bytes")
        strided = torch.zeros(nbytes, 2, dtype=torch.uint8)[:, 1]
        await aiogpu.copy_(strided, there)
        same_bytes(strided.contiguous(), source, "bytes")
        assert aiogpu.stats().staging_bytes_in_use == 0

    run_asyncio(main)
    assert engine.chunks.allocated_bytes <= engine.settings.staging_bytes


def test_trimming_and_reserving_again_keep_transfers_exact(run_asyncio: Loop) -> None:
    async def main() -> None:
        runtime = aiogpu.current_runtime()
        source = pattern(40 * MIB, 5)
        for _ in range(3):
            reserved = await runtime.reserve()
            assert reserved == aiogpu.stats().staging_bytes - 8 * MIB
            there = await aiogpu.to_device(source)
            same_bytes(there.cpu(), source, "bytes")
            assert await runtime.trim() >= reserved

    run_asyncio(main)


@pytest.mark.timing
@asynchronous
@unsanitized
def test_reserving_staging_memory_hardly_delays_launches(run_asyncio: Loop, engine: Engine) -> None:
    """Law 2, and the launches of every other thread: a chunk at a time, its pages touched before."""
    delays: list[float] = []
    stop = threading.Event()
    x = torch.ones(16, device="cuda")

    def launch() -> None:
        while not stop.is_set():
            start = time.perf_counter()
            x.add_(1)
            delays.append(time.perf_counter() - start)
            if len(delays) % 200 == 0:
                torch.cuda.current_stream().synchronize()

    async def main() -> None:
        await aiogpu.current_runtime().trim()
        x.add_(1)  # a kernel's first launch loads it
        torch.cuda.current_stream().synchronize()
        thread = threading.Thread(target=launch)
        thread.start()
        try:
            await aiogpu.current_runtime().reserve()
        finally:
            stop.set()
            thread.join()

    run_asyncio(main)
    assert len(delays) > 100
    assert max(delays) < 0.02, f"a launch took {max(delays) * 1e3:.1f} ms while chunks were page-locked"


@needs_linux
@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")  # that is the point
def test_a_fork_in_the_middle_of_transfers_changes_no_byte(run_asyncio: Loop) -> None:
    """Data loaders fork: the device must go on reading and writing the pages that this process has."""
    source = pattern(64 * MIB, 9)

    async def main() -> None:
        for _ in range(5):
            operation = aiogpu.to_device(source)
            child = os.fork()
            if child == 0:
                os._exit(0)
            there = await operation
            os.waitpid(child, 0)  # noqa: ASYNC222 -- it has ended
            same_bytes(there.cpu(), source, "bytes")
            out = torch.zeros_like(source)
            await aiogpu.to_host(there, out=out)
            same_bytes(out, source, "bytes")

    run_asyncio(main)


def test_many_transfers_of_all_sizes_at_once_are_exact_and_bounded(run_asyncio: Loop, engine: Engine) -> None:
    rng = random.Random(1)
    sources = [pattern(rng.choice([1, 4096, 65_537, MIB, 9 * MIB, 33 * MIB]), seed) for seed in range(24)]

    async def one(index: int) -> None:
        source = sources[index % len(sources)]
        there = await aiogpu.to_device(source)
        back = await aiogpu.to_host(there, out=torch.empty_like(source) if index % 2 else None)
        same_bytes(back, source, "bytes")

    async def main() -> None:
        await aiogpu.amap(one, range(200), limit=200)
        assert aiogpu.stats().staging_bytes_in_use == 0

    run_asyncio(main)
    assert engine.chunks.allocated_bytes <= engine.settings.staging_bytes
