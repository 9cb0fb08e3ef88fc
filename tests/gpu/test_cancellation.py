"""A cancelled wait ends at once; the device goes on, and its buffers are nobody else's until it is done."""

from __future__ import annotations

import random
import time

import anyio
import pytest
import torch

import aiogpu

from ._tools import ON_GPU, Slow, asynchronous, pattern, same_bytes, unsanitized
from .conftest import Loop

pytestmark = ON_GPU

KIB, MIB = 1 << 10, 1 << 20
BASE = pattern(9 * MIB, 70)


@pytest.mark.timing
@asynchronous
@unsanitized
@pytest.mark.parametrize("kind", ["to_host", "small to_host", "to_device", "copy_", "synchronize", "task"])
def test_cancelling_a_wait_returns_at_once(run: Loop, slow: Slow, kind: str) -> None:
    """C70: within 50 ms, of a kernel of 200 ms."""

    @aiogpu.task
    async def child() -> None:
        slow(200)
        await aiogpu.synchronize()

    @aiogpu.task
    async def main() -> None:
        x = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
        host = torch.zeros(MIB, dtype=torch.uint8)
        await aiogpu.synchronize()
        if kind != "task":
            slow(200)
        begin = time.perf_counter()
        with anyio.move_on_after(0.02) as scope:
            if kind == "to_host":
                await aiogpu.to_host(x)
            elif kind == "small to_host":
                await aiogpu.to_host(x[:100])
            elif kind == "to_device":  # a small one: it goes onto this stream
                await aiogpu.to_device(host[:100])
            elif kind == "copy_":
                await aiogpu.copy_(x, host)
            elif kind == "synchronize":
                await aiogpu.synchronize()
            else:
                await child()
        took = time.perf_counter() - begin
        assert scope.cancelled_caught, "the wait ended before it was cancelled: nothing was tested"
        assert took < 0.07, f"a wait that was cancelled after 20 ms returned after {took * 1e3:.0f} ms"

    run(main)


class _Mixed:
    """Waits that are cancelled at random, each followed by one whose data must be right."""

    def __init__(self, slow: Slow, seed: int) -> None:
        self.slow = slow
        self.random = random.Random(seed)
        self.cancelled = 0
        self.seed = seed * 1000

    async def victim(self, size: int, out: torch.Tensor) -> None:
        x = torch.full((size,), 238, dtype=torch.uint8, device="cuda")
        self.slow(self.random.random() * 2)
        which = self.random.randrange(5)
        with anyio.move_on_after(self.random.random() * 0.003) as scope:
            if which == 0:
                await aiogpu.to_host(x)
            elif which == 1:
                await aiogpu.to_device(torch.full((size,), 221, dtype=torch.uint8, pin_memory=True))
            elif which == 2:
                await aiogpu.copy_(x, torch.full((size,), 204, dtype=torch.uint8))
            elif which == 3:
                await aiogpu.to_host(x, out=out)
            else:
                await aiogpu.synchronize()
        self.cancelled += scope.cancelled_caught

    async def survivor(self, size: int) -> None:
        self.seed += 1
        source = BASE[:size] ^ self.seed % 251
        if self.random.random() < 0.5:
            source = source.pin_memory()
        x = await aiogpu.to_device(source)
        y = x + 0
        del x
        same_bytes(await aiogpu.to_host(y), source, f"seed {self.seed}, {size} bytes")

    async def run(self, count: int) -> None:
        for _ in range(count):
            size = self.random.choice([KIB, 64 * KIB, 100 * KIB, MIB, 9 * MIB])
            await self.victim(size, torch.empty(size, dtype=torch.uint8))
            await self.survivor(size)


@pytest.mark.timeout(150)
def test_five_hundred_random_cancellations_corrupt_nobody(run: Loop, slow: Slow) -> None:
    """C70: the survivor reuses buffers of the same size at once, while the victim's copy still runs."""
    workers = [_Mixed(slow, seed) for seed in range(10)]

    @aiogpu.task
    async def worker(mixed: _Mixed) -> None:
        await mixed.run(50)

    async def main() -> None:
        await aiogpu.gather(*map(worker, workers))

    run(main, limit=120.0)
    cancelled = sum(worker.cancelled for worker in workers)
    assert cancelled > 50, f"only {cancelled} of 500 waits were cancelled: nothing was tested"


def test_cancelled_tasks_give_everything_back(run: Loop, slow: Slow) -> None:
    """C72 on hardware: 200 tasks, each cancelled at some await; leases, slots and chunks all come back."""
    rng = random.Random(7)

    @aiogpu.task
    async def request(size: int) -> None:
        x = await aiogpu.to_device(torch.zeros(size, dtype=torch.uint8))
        slow(0.5)
        y = await aiogpu.run_sync(torch.add, x, 1)
        with aiogpu.stream():
            z = y + 1
            await aiogpu.synchronize()
        assert int((await aiogpu.to_host(z))[0]) == 2

    async def cancelled(size: int, after: float) -> None:
        with anyio.move_on_after(after):
            await request(size)

    async def main() -> None:
        await request(MIB)
        async with anyio.create_task_group() as group:
            for _ in range(200):
                size = rng.choice([100, 100 * KIB, 2 * MIB])
                group.start_soon(cancelled, size, rng.random() * 0.15)
        deadline = time.monotonic() + 10
        while (held := _held()) and time.monotonic() < deadline:
            await anyio.sleep(0.002)
        assert not held, f"still held 10 s after the last request ended: {held}"
        await request(100)

    run(main)


def _held() -> dict[str, int]:
    stats = aiogpu.stats()
    counts = {
        "points": stats.pending,
        "operations": stats.operations,
        "streams": stats.streams_in_use,
        "bytes of staging": stats.staging_bytes_in_use,
    }
    return {name: count for name, count in counts.items() if count}
