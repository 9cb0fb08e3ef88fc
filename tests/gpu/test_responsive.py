"""The loop never stands still, pinning happens once and elsewhere, and copies run beside compute."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import torch

import aiogpu
from aiogpu._engine import Engine

from ._tools import ON_GPU, Slow, asynchronous, filled, heartbeat, same_bytes, unsanitized
from .conftest import Loop

pytestmark = [*ON_GPU, pytest.mark.timing]

MIB = 1 << 20
LARGE = 256 * MIB


def _on_time(pulse: Any, what: str) -> None:
    assert pulse.gaps, f"{what} took less than one tick of the heartbeat: nothing was tested"
    assert pulse.largest < 20, f"{what}: the loop stood still for {pulse.largest:.1f} ms"


@asynchronous
@unsanitized
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_the_loop_keeps_ticking_while_256_mib_go_up_behind_slow_work(
    run: Loop, slow: Slow, pinned: bool
) -> None:
    """C13: ticks are due every 5 ms; after warm-up no gap reaches 20 ms."""
    source = torch.full((LARGE,), 3, dtype=torch.uint8, pin_memory=pinned)

    @aiogpu.task
    async def upload() -> torch.Tensor:
        slow(300)
        x = await aiogpu.to_device(source)
        await aiogpu.synchronize()
        return x

    async def main() -> None:
        await upload()
        async with heartbeat() as pulse:
            x = await upload()
        _on_time(pulse, "to_device(256 MiB)")
        filled(x[:: LARGE // 1000].cpu(), 3, "the upload")

    run(main)


@asynchronous
@unsanitized
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["as it is", "converted"])
def test_the_loop_keeps_ticking_while_256_mib_come_down_behind_slow_work(
    run_asyncio: Loop, slow: Slow, dtype: torch.dtype | None
) -> None:
    """C15: a conversion on the way down happens on the device, and blocks nobody either."""

    async def main() -> None:
        x = torch.arange(LARGE // 4, device="cuda", dtype=torch.float32) % 2048
        expected = (x if dtype is None else x.to(dtype)).cpu()

        @aiogpu.task
        async def download() -> torch.Tensor:
            slow(300)
            return await aiogpu.to_host(x, dtype=dtype)

        await download()
        async with heartbeat() as pulse:
            host = await download()
        _on_time(pulse, f"to_host(256 MiB, dtype={dtype})")
        assert host.dtype == expected.dtype
        same_bytes(host, expected, f"dtype={dtype}")

    run_asyncio(main)


@asynchronous
@unsanitized
def test_a_blocking_call_in_a_worker_leaves_the_loop_alone(run: Loop, slow: Slow) -> None:
    """``run_sync`` is where ``.item()`` and friends belong when they cannot be avoided."""

    @aiogpu.task
    async def main() -> None:
        x = torch.ones(1000, device="cuda")
        await aiogpu.run_sync(lambda: x.sum().item())
        async with heartbeat() as pulse:
            slow(200)
            assert await aiogpu.run_sync(lambda: x.sum().item()) == 1000
            await anyio.sleep(0.02)
        _on_time(pulse, "run_sync(item)")

    run(main)


# -- pinning ---------------------------------------------------------------------------------------


def _pinned_allocations() -> int:
    return int(torch.cuda.host_memory_stats()["num_host_alloc"])


@pytest.mark.parametrize(("size", "count"), [(4096, 800), (MIB, 150), (20 * MIB, 50)])
def test_uploads_of_one_shape_pin_nothing_after_warm_up(run_asyncio: Loop, size: int, count: int) -> None:
    """C16: a thousand uploads in all, no new page-locked allocation."""
    source = torch.full((size,), 9, dtype=torch.uint8)

    @aiogpu.task
    async def upload() -> None:
        await aiogpu.to_device(source)

    async def main() -> int:
        for _ in range(10):  # more at once than later: the pool is as large as it will get
            await aiogpu.gather(*[upload() for _ in range(8)])
        before = _pinned_allocations() + aiogpu.stats().staging_allocations
        for _ in range(count // 4):
            await aiogpu.gather(*[upload() for _ in range(4)])
        return _pinned_allocations() + aiogpu.stats().staging_allocations - before

    fresh = run_asyncio(main)
    assert fresh == 0, f"{count} uploads of {size} bytes made {fresh} new page-locked allocations"


def test_nothing_is_page_locked_on_the_loops_thread(
    run: Loop, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C16, law 2: pinning takes 0.7 s for a gigabyte, and stops other threads' launches meanwhile."""
    where: list[str] = []
    loop_thread = threading.current_thread().name

    def watched(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            where.append(threading.current_thread().name)
            return make(*args, **kwargs)

        return call

    for name in ("pinned", "result_memory"):
        monkeypatch.setattr(engine.driver, name, watched(getattr(engine.driver, name)))

    @aiogpu.task
    async def main() -> None:
        for size in (100, 100_000, 30 * MIB):
            x = await aiogpu.to_device(torch.full((size,), 4, dtype=torch.uint8))
            filled(await aiogpu.to_host(x), 4, f"{size} bytes")

    engine.chunks.trim()  # so that chunks are page-locked anew
    run(main)
    assert where, "nothing was page-locked at all: nothing was tested"
    assert loop_thread not in where, f"page-locked on the loop's thread: {where}"


# -- overlap ---------------------------------------------------------------------------------------


async def _seconds(work: Callable[[], Awaitable[Any]]) -> float:
    begin = time.perf_counter()
    await work()
    return time.perf_counter() - begin


@asynchronous
@unsanitized
def test_upload_compute_and_download_of_different_batches_overlap(
    run_asyncio: Loop, slow: Slow, engine: Engine
) -> None:
    """C19: 20 batches of three equal stages take less than two stages each (in turn: three; ideal: one)."""
    size, batches = 256 * MIB, 20
    free = [tuple(torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)) for _ in range(3)]
    stage_ms = [5.0]

    @aiogpu.task
    async def batch(number: int) -> None:
        source, target = free.pop()
        source[:100] = number
        x = await aiogpu.to_device(source)
        slow(stage_ms[0])
        x += 1
        await aiogpu.to_host(x, out=target)
        filled(target[:100], number + 1, f"batch {number}")
        free.append((source, target))

    async def upload() -> None:
        await aiogpu.to_device(free[0][0])

    async def main() -> tuple[float, float]:
        await aiogpu.amap(batch, range(6), limit=3)
        stage = min([await _seconds(upload) for _ in range(3)])
        stage_ms[0] = stage * 1e3
        total = min([await _seconds(lambda: aiogpu.amap(batch, range(batches), limit=3)) for _ in range(3)])
        return stage, total

    stage, total = run_asyncio(main)
    assert total < 2.0 * stage * batches, (
        f"{batches} batches of three stages of {stage * 1e3:.1f} ms took {total * 1e3:.0f} ms: "
        f"{total / stage / batches:.2f} stages each"
    )
    names = {"uploads": engine.uploads, "downloads": engine.downloads, "compute": engine.compute}
    handles = {name: {s.native.cuda_stream for s in pool.streams()} for name, pool in names.items()}
    assert not handles["uploads"] & handles["downloads"]
    assert not (handles["uploads"] | handles["downloads"]) & handles["compute"]
