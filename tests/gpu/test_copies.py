"""Copies are complete when their await returns, whatever was slow before them; so long their buffers live.

Each race is given 50 ms to happen: work that runs before the copy holds its stream. Eight tasks race side by
side, each on a stream of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable

import anyio
import pytest
import torch

import aiogpu
from aiogpu._engine import Engine

from ._tools import (
    ON_GPU,
    Slow,
    asynchronous,
    filled,
    mark,
    pattern,
    same_bytes,
    tick,
    unsanitized,
)
from .conftest import Loop

pytestmark = ON_GPU

KIB, MIB = 1 << 10, 1 << 20
#: Through slots (up to 64 KiB), straight, through one chunk and through several; odd sizes on purpose.
SIZES = [1, 3, 4 * KIB, 64 * KIB, 64 * KIB + 1, MIB, 8 * MIB + 5, 64 * MIB]
WORKERS, EACH = 8, 25


async def _side_by_side(worker: Callable[[int], Awaitable[None]]) -> None:
    async with anyio.create_task_group() as group:
        for index in range(WORKERS):
            group.start_soon(worker, index)


def _hold_uploads(engine: Engine, slow: Slow, ms: float = 50.0) -> None:
    """Keep every copy stream for uploads busy."""
    engine.uploads.open()
    slow.on([stream.native for stream in engine.uploads.streams()], ms)


def _hold_downloads(engine: Engine, slow: Slow, ms: float = 50.0) -> None:
    engine.downloads.open()
    slow.on([stream.native for stream in engine.downloads.streams()], ms)


# -- downloads -------------------------------------------------------------------------------------


def test_a_downloaded_value_is_complete_when_its_await_returns(run: Loop, slow: Slow) -> None:
    """C01: never random, zero or the last step's values, whatever the size; 200 repeats."""

    @aiogpu.task
    async def worker(index: int) -> None:
        for repeat in range(EACH):
            size, value = SIZES[(index + repeat) % len(SIZES)], (index * EACH + repeat) % 251
            x = torch.zeros(size, dtype=torch.uint8, device="cuda")
            slow()
            x.fill_(value)
            written = mark()
            host = await aiogpu.to_host(x)
            assert written.query(), f"{size} bytes: the await returned before the work in front of the copy"
            filled(host, value, f"worker {index}, repeat {repeat}, {size} bytes")

    run(_side_by_side, worker)


def test_a_download_in_plain_code_follows_the_default_stream(run: Loop, slow: Slow) -> None:
    """C01 without tasks."""

    async def main() -> None:
        for value, size in enumerate(SIZES):
            x = torch.zeros(size, dtype=torch.uint8, device="cuda")
            slow()
            x.fill_(value)
            filled(await aiogpu.to_host(x), value, f"{size} bytes")

    run(main)


def test_an_item_is_the_value_after_everything_submitted_before(run: Loop, slow: Slow) -> None:
    @aiogpu.task
    async def worker(index: int) -> None:
        for repeat in range(5):
            x = torch.zeros((), dtype=torch.int64, device="cuda")
            slow()
            x += index * 100 + repeat
            assert await aiogpu.item(x) == index * 100 + repeat

    run(_side_by_side, worker)


@pytest.mark.parametrize("size", [16 * KIB, 16 * MIB + 3])
def test_a_download_into_ordinary_memory_is_finished_as_well(
    run_asyncio: Loop, slow: Slow, size: int
) -> None:
    """C09: that a copy into pageable memory ends with its call is a habit of drivers, not a promise."""

    @aiogpu.task
    async def main() -> None:
        out = torch.empty(size, dtype=torch.uint8)
        for value in range(10):
            x = torch.zeros(size, dtype=torch.uint8, device="cuda")
            out.fill_(255)
            slow()
            x.fill_(value)
            written = mark()
            assert await aiogpu.to_host(x, out=out) is out
            assert written.query(), "the await returned before the work in front of the copy"
            filled(out, value, f"repeat {value}")

    run_asyncio(main)


def test_an_update_in_place_after_the_await_does_not_reach_the_download(
    run_asyncio: Loop, slow: Slow
) -> None:
    """C11: a source may be written as soon as the await has returned; 200 repeats."""

    @aiogpu.task
    async def worker(index: int) -> None:
        x = torch.zeros(MIB + index, dtype=torch.uint8, device="cuda")
        for repeat in range(EACH):
            slow()
            x.fill_(repeat)
            host = await aiogpu.to_host(x)
            x.fill_(255)
            filled(host, repeat, f"worker {index}, repeat {repeat}")

    run_asyncio(_side_by_side, worker)


@pytest.mark.parametrize("decorated", [True, False], ids=["task", "plain"])
def test_memory_of_a_source_is_not_reused_while_it_is_downloaded(
    run_asyncio: Loop, slow: Slow, engine: Engine, decorated: bool
) -> None:
    """C05: the copy waits on its own stream, the source is dropped, its stream fills new tensors at once."""

    async def main() -> None:
        for size in (MIB, 3 * MIB + 1):
            for value in range(1, 9):
                x = torch.full((size,), value, dtype=torch.uint8, device="cuda")
                _hold_downloads(engine, slow)
                operation = aiogpu.to_host(x)
                await tick()
                del x
                junk = [torch.full((size,), 238, dtype=torch.uint8, device="cuda") for _ in range(50)]
                filled(await operation, value, f"{size} bytes, repeat {value}")
                del junk

    run_asyncio(aiogpu.task(main) if decorated else main)


# -- uploads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64 * KIB, MIB, 24 * MIB])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_a_source_may_be_written_once_its_upload_was_awaited(
    run_asyncio: Loop, slow: Slow, engine: Engine, size: int, pinned: bool
) -> None:
    """C02: a reused host buffer never mixes two batches."""

    @aiogpu.task
    async def main() -> None:
        source = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        for value in range(5):
            source.fill_(value)
            _hold_uploads(engine, slow)
            x = await aiogpu.to_device(source)
            source.fill_(99)
            filled(await aiogpu.to_host(x), value, f"repeat {value}")

    run_asyncio(main)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_small_sources_are_snapshots_taken_by_the_call(run_asyncio: Loop, slow: Slow, pinned: bool) -> None:
    """C02: up to 64 KiB, as the documentation says."""

    @aiogpu.task
    async def main() -> None:
        source = torch.empty(64 * KIB, dtype=torch.uint8, pin_memory=pinned)
        for value in range(10):
            source.fill_(value)
            slow()
            operation = aiogpu.to_device(source)
            source.fill_(99)
            filled(await aiogpu.to_host(await operation), value, f"repeat {value}")

    run_asyncio(main)


@asynchronous
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_nothing_aliases_a_source_or_chunk_in_flight_after_everybody_has_let_go(
    run_asyncio: Loop, slow: Slow, engine: Engine, pinned: bool
) -> None:
    """C03: the wait is cancelled and every reference dropped; buffers of the same size come from the pool."""
    size = 2 * MIB  # on a copy stream, where it can be held: up to 1 MiB it is on the task's own

    @aiogpu.task
    async def main() -> None:
        warm = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(101)]
        del warm
        target = torch.zeros(size, dtype=torch.uint8, device="cuda")
        await aiogpu.synchronize()
        source = torch.full((size,), 7, dtype=torch.uint8, pin_memory=pinned)
        address = source.data_ptr()
        _hold_uploads(engine, slow, 500)
        _hold_downloads(engine, slow, 500)  # where what the call itself submits goes, if it is page-locked
        operation = aiogpu.copy_(target, source)
        del source
        with anyio.move_on_after(0.02):
            await operation
        gc.collect()
        others = [torch.full((size,), 238, dtype=torch.uint8, pin_memory=True) for _ in range(100)]
        assert not operation.done(), "too slow a machine: the copy ended while this test made its buffers"
        if pinned:
            assert all(other.data_ptr() != address for other in others), "the source's memory was given away"
        else:
            assert engine.chunks.used_bytes > 0, "the chunk was given back while the device reads it"
        del operation
        gc.collect()
        await aiogpu.synchronize("cuda")
        filled(await aiogpu.to_host(target), 7, "the target")

    run_asyncio(main)


@pytest.mark.parametrize("decorated", [True, False], ids=["task", "plain"])
def test_an_uploaded_tensor_is_usable_at_once_on_the_awaiting_stream(
    run_asyncio: Loop, slow: Slow, engine: Engine, decorated: bool
) -> None:
    """C04: a product right after the await; 100 repeats. Small integers: float32 is exact."""
    generator = torch.Generator().manual_seed(4)
    sources = [torch.randint(0, 8, (512, 512), generator=generator).float().pin_memory() for _ in range(4)]
    expected = [source @ source for source in sources]

    async def use(index: int) -> torch.Tensor:
        x = await aiogpu.to_device(sources[index])
        return await aiogpu.to_host(x @ x)

    child = aiogpu.task(use) if decorated else use

    async def main() -> None:
        for repeat in range(25):
            _hold_uploads(engine, slow)
            products = await aiogpu.gather(*map(child, range(4)))
            for index, product in enumerate(products):
                same_bytes(product, expected[index], f"repeat {repeat}, product {index}")

    run_asyncio(aiogpu.task(main) if decorated else main)


@pytest.mark.parametrize(("size", "repeats"), [(MIB, 180), (64 * MIB, 20)])
def test_a_kernel_right_after_a_pageable_upload_reads_all_of_it(
    run_asyncio: Loop, size: int, repeats: int
) -> None:
    """C08: no copy on the legacy stream that a task's stream would have to wait for; 200 runs."""

    @aiogpu.task
    async def main() -> None:
        source = torch.empty(size, dtype=torch.uint8)
        for repeat in range(repeats):
            source.fill_(repeat % 251)
            x = await aiogpu.to_device(source)
            x += 1
            filled(await aiogpu.to_host(x), repeat % 251 + 1, f"run {repeat}")

    run_asyncio(main)


def test_memory_of_an_upload_is_not_reused_under_the_awaiting_stream(run_asyncio: Loop, slow: Slow) -> None:
    """Uploads allocate on a copy stream; dropped while the task still reads, the next upload overwrites."""

    @aiogpu.task
    async def main() -> None:
        for repeat in range(10):
            x = await aiogpu.to_device(torch.full((MIB,), repeat, dtype=torch.uint8))
            slow()
            y = x + 1  # runs 50 ms from now
            del x
            junk = [await aiogpu.to_device(torch.full((MIB,), 238, dtype=torch.uint8)) for _ in range(8)]
            filled(await aiogpu.to_host(y), repeat + 1, f"repeat {repeat}")
            del junk

    run_asyncio(main)


def test_copies_in_place_follow_the_stream_and_are_complete(run: Loop, slow: Slow) -> None:
    """``copy_`` up, across and down, each behind slow work on the caller's stream."""

    @aiogpu.task
    async def main() -> None:
        for size in (KIB, 2 * MIB):
            there = torch.zeros(size, dtype=torch.uint8, device="cuda")
            other, back = torch.zeros_like(there), torch.zeros(size, dtype=torch.uint8)
            for value in range(1, 5):
                slow()
                there.fill_(255)
                await aiogpu.copy_(there, torch.full((size,), value, dtype=torch.uint8))
                slow()
                await aiogpu.copy_(other, there)
                await aiogpu.copy_(back, other)
                filled(back, value, f"{size} bytes, repeat {value}")

    run(main)


def test_strided_and_converted_data_arrives_exactly(run_asyncio: Loop) -> None:
    @aiogpu.task
    async def main() -> None:
        base = pattern(4 * MIB, 1).view(2048, 2048)
        for source in (base.t(), base[::2, 1::3], base[5], base.view(8, 512, 1024).permute(2, 0, 1)):
            x = await aiogpu.to_device(source)
            same_bytes(await aiogpu.to_host(x), source, f"strides {source.stride()}")
            half = await aiogpu.to_host(x, dtype=torch.float16)
            same_bytes(half, source.to(torch.float16), f"float16, strides {source.stride()}")
            same_bytes(await aiogpu.to_host(x.flip(0)[1:]), source.flip(0)[1:], "a view on the device")

    run_asyncio(main)


# -- between memory that is there already ------------------------------------------------------------


@asynchronous
@pytest.mark.parametrize("decorated", [True, False], ids=["task", "plain"])
def test_copies_that_the_call_submits_come_behind_the_callers_stream_and_lose_nothing(
    run: Loop, slow: Slow, engine: Engine, monkeypatch: pytest.MonkeyPatch, decorated: bool
) -> None:
    """Page-locked buffers and device memory that stay, as engines keep them: no thread takes part."""
    size = 24 * MIB + 5

    async def main() -> None:
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        back = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        there = torch.zeros(size, dtype=torch.uint8, device="cuda")
        await aiogpu.synchronize()
        monkeypatch.setattr(engine.staging, "submit", lambda *_, **__: pytest.fail("it went to a thread"))
        for value in range(1, 9):
            host.fill_(value)
            slow()
            there.fill_(99)  # in front of the copy
            operation = aiogpu.copy_(there, host)
            assert "in flight" in repr(operation)
            y = (await operation.ordered()) + 1
            assert not operation.done(), "it has waited for the device"
            back.fill_(255)
            down = aiogpu.to_host(y, out=back)
            del y
            junk = torch.full((size,), 238, dtype=torch.uint8, device="cuda")
            await operation
            host.fill_(77)  # finished: the source may be written
            await down
            filled(back, value + 1, f"repeat {value}")
            await aiogpu.copy_(back, there)
            filled(back, value, f"repeat {value}, copied back")
            del junk

    run(aiogpu.task(main) if decorated else main)


@asynchronous
def test_more_copies_than_streams_behind_a_long_kernel_do_not_stop_the_loop(
    run_asyncio: Loop, slow: Slow, engine: Engine
) -> None:
    """A stream takes about 1020 commands; there are twelve of them for this."""

    @aiogpu.task
    async def main() -> None:
        targets = [torch.zeros(MIB + 4, dtype=torch.uint8, device="cuda") for _ in range(600)]
        source = torch.full((MIB + 4,), 3, dtype=torch.uint8, pin_memory=True)
        await aiogpu.synchronize()
        slow(400)
        start = time.perf_counter()
        operations = [aiogpu.copy_(target, source) for target in targets]
        submitted = time.perf_counter() - start
        assert not operations[-1].done(), (
            "too slow a machine: the kernel ended while this test made its copies"
        )
        assert submitted < 0.3, f"{submitted * 1e3:.0f} ms: the calls waited for the kernel"
        for operation in operations:
            await operation
        for target in targets:
            filled(await aiogpu.to_host(target), 3, "a copy")

    run_asyncio(main)


# -- ordered() -------------------------------------------------------------------------------------


@asynchronous
@pytest.mark.parametrize("size", [4 * KIB, 24 * MIB], ids=["small", "large"])
@pytest.mark.parametrize("decorated", [True, False], ids=["task", "plain"])
def test_ordered_returns_before_the_copy_and_what_follows_it_on_the_stream_reads_all_of_it(
    run: Loop, slow: Slow, engine: Engine, size: int, decorated: bool
) -> None:
    async def main() -> None:
        for value in range(8):
            source = torch.full((size,), value, dtype=torch.uint8, pin_memory=True)
            _hold_uploads(engine, slow)
            if size <= 64 * KIB:
                slow()  # a small one is on the current stream itself
            operation = aiogpu.to_device(source)
            x = await operation.ordered()
            assert not operation.done(), "it has waited for the device"
            y = x + 1
            filled(await aiogpu.to_host(y), value + 1, f"repeat {value}")
            await operation

    run(aiogpu.task(main) if decorated else main)


@asynchronous
def test_ordered_memory_is_not_reused_under_the_stream_that_uses_it(
    run_asyncio: Loop, slow: Slow, engine: Engine
) -> None:
    @aiogpu.task
    async def main() -> None:
        for value in range(8):
            _hold_uploads(engine, slow)
            x = await aiogpu.to_device(torch.full((MIB,), value, dtype=torch.uint8)).ordered()
            slow()
            y = x + 1
            del x
            junk = [aiogpu.to_device(torch.full((MIB,), 238, dtype=torch.uint8)) for _ in range(8)]
            await aiogpu.gather(*junk)
            filled(await aiogpu.to_host(y), value + 1, f"repeat {value}")

    run_asyncio(main)


@asynchronous
def test_a_copy_in_place_that_was_ordered_is_read_whole(run_asyncio: Loop, slow: Slow) -> None:
    @aiogpu.task
    async def main() -> None:
        for size in (4 * KIB, MIB):
            target = torch.zeros(size, dtype=torch.uint8, device="cuda")
            for value in range(1, 6):
                await aiogpu.copy_(target, torch.full((size,), value, dtype=torch.uint8)).ordered()
                filled(await aiogpu.to_host(target + 1), value + 1, f"repeat {value}")

    run_asyncio(main)


# -- many small ones -------------------------------------------------------------------------------


@pytest.mark.parametrize("alike", [True, False], ids=["of one shape", "of all shapes"])
def test_ten_thousand_small_tensors_are_exact_both_ways(run_asyncio: Loop, slow: Slow, alike: bool) -> None:
    """Packed: laid out, copied and cut up while kernels run before and after."""
    dtypes = (torch.float32, torch.uint8, torch.bfloat16, torch.int64)

    @aiogpu.task
    async def main() -> None:
        data = {
            f"{n}": pattern(1024 if alike else 8 * (n % 200 + 1), n).view(dtypes[0 if alike else n % 4])
            for n in range(10_000)
        }
        there = await aiogpu.to_device(data).ordered()
        slow()
        for x in list(there.values())[::100]:
            x.view(torch.uint8).bitwise_not_()
        back = await aiogpu.to_host(there)
        for index, (key, x) in enumerate(data.items()):
            expected = ~x.view(torch.uint8) if index % 100 == 0 else x.view(torch.uint8)
            same_bytes(back[key].view(torch.uint8), expected, f"leaf {key}")
            assert there[key].data_ptr() % 256 == 0
            assert back[key].dtype == x.dtype

    run_asyncio(main)


@pytest.mark.timing
@unsanitized
def test_ten_thousand_small_tensors_are_faster_than_a_loop(run_asyncio: Loop) -> None:
    """The promise is 5 x, measured in benchmarks; this only sees that packing works at all."""
    data = {n: torch.full((256,), float(n)) for n in range(10_000)}

    async def main() -> None:
        for _ in range(2):
            start = time.perf_counter()
            there = await aiogpu.to_device(data)
            ours = time.perf_counter() - start
            start = time.perf_counter()
            for x in data.values():
                x.to("cuda")
            loop = time.perf_counter() - start
            del there
        assert ours < loop / 2, f"{ours * 1e3:.0f} ms against {loop * 1e3:.0f} ms"

    run_asyncio(main)


# -- out of memory ---------------------------------------------------------------------------------


@asynchronous
def test_an_upload_that_runs_out_of_memory_waits_for_what_is_in_flight(
    run_asyncio: Loop, slow: Slow, engine: Engine
) -> None:
    """The memory of a transfer that nobody holds comes back when its copy has ended; the second try fits."""
    size = 512 * MIB

    async def main() -> None:
        await aiogpu.to_device(torch.zeros(MIB, dtype=torch.uint8))
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(engine.device).total_memory
        reserved = torch.cuda.memory_reserved(engine.device)
        source = torch.full((size,), 7, dtype=torch.uint8, pin_memory=True)
        torch.cuda.set_per_process_memory_fraction((reserved + 1.5 * size) / total, engine.device)
        try:
            _hold_uploads(engine, slow, 200)
            first = aiogpu.to_device(source)
            await first.ordered()
            del first
            gc.collect()
            second = await aiogpu.to_device(source)  # both at once do not fit
            filled((second[-MIB:]).cpu(), 7, "the second upload")
            with pytest.raises(torch.OutOfMemoryError):
                await aiogpu.to_device(source)  # `second` is held: in vain
            filled(await aiogpu.to_host(second[:MIB]), 7, "its neighbour")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, engine.device)

    run_asyncio(main)


# -- what is on the device already -----------------------------------------------------------------


@asynchronous
def test_a_conversion_on_the_device_itself_does_not_pass_through_the_host(
    run_asyncio: Loop, slow: Slow
) -> None:
    """What is there is converted there, and the loop does not wait for the stream."""

    @aiogpu.task
    async def main() -> None:
        for size in (64, MIB):
            x = torch.zeros(size, device="cuda")
            slow()
            x.fill_(3.0)
            written = mark()
            operation = aiogpu.to_device(x, dtype=torch.float16)
            assert not written.query(), "the call has waited for the device"
            y = await operation
            assert y.dtype == torch.float16
            filled((y + 0).cpu().to(torch.uint8), 3, f"{size} elements")

    run_asyncio(main)
