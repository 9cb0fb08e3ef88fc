"""Custody: the runtime holds source, staging and destination until the device is done, whoever waits or not.

Most tests here use a device that moves only when told to, with small staging blocks.
"""

from __future__ import annotations

import gc
import random
import threading
import warnings
import weakref
from typing import Any

import anyio
import pytest
import torch
from _small_blocks import CHUNK, SLOT, small_virtual
from torch.multiprocessing.reductions import StorageWeakRef

import aiogpu
from aiogpu._runtime import Runtime
from aiogpu.transfers.segments import Rows

SIZES = pytest.mark.parametrize("nbytes", [SLOT // 2, 5 * CHUNK + 3], ids=["small", "large"])


@pytest.fixture
def still():
    """A device with small blocks that stands still."""
    with small_virtual(auto=False) as (device, engine):
        yield device, engine


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


# -- held --------------------------------------------------------------------------------------------


class Box:
    """Moves itself; its tensor is on the device afterwards."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(3)

    def to(self, *args: Any, **kwargs: Any) -> Box:
        moved = Box()
        moved.tensor = self.tensor.clone()
        return moved


def test_what_moves_itself_is_kept_for_the_stream_of_whoever_awaits_it(run, monkeypatch):
    """C05: its memory is that of the stream of whoever started it."""
    with small_virtual() as (device, engine):
        kept: list[tuple[int, Any]] = []
        monkeypatch.setattr(device, "keep", lambda tensor, stream: kept.append((tensor.data_ptr(), stream)))

        @aiogpu.task
        async def other(operation: Any) -> None:
            (box,) = await operation
            assert (box.tensor.data_ptr(), device.current()) in kept

        async def main():
            operation = aiogpu.to_device([Box()])
            await operation
            await other(operation)
            # Its stream is behind the caller's: none that uploads of others could stand behind.
            assert engine.uploads.leases == 0

        run(main)


def test_a_walk_that_gets_no_thread_fails_its_operation(run_asyncio, monkeypatch):
    """Not the call: the task that called would wait for it for ever."""
    with small_virtual() as (_, engine):

        def refuse(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        async def main():
            monkeypatch.setattr(engine.staging, "submit", refuse)
            for verb in (aiogpu.to_device, aiogpu.to_host):
                operation = verb([torch.zeros(1) for _ in range(1000)])
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    await operation

        run_asyncio(main)


async def drain(device: Any) -> None:
    """Move the device until nobody gives it anything more to do."""
    runtime = aiogpu.current_runtime()
    while runtime.reactor.pending or runtime.reactor.operations or not device.idle:
        device.run_all()
        device.deliver()
        await anyio.sleep(0.0005)


@SIZES
@pytest.mark.parametrize("verb", ["to_device", "to_host", "copy_"])
def test_source_staging_and_destination_live_until_the_device_is_done(run, still, until, nbytes, verb):
    """C03: also when everybody has dropped everything at once, the operation too."""
    device, engine = still

    async def main():
        source, dst = pattern(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
        memories = [StorageWeakRef(source.untyped_storage())]
        if verb == "copy_":
            memories.append(StorageWeakRef(dst.untyped_storage()))
        verbs = {"to_device": aiogpu.to_device, "to_host": aiogpu.to_host}
        operation = aiogpu.copy_(dst, source) if verb == "copy_" else verbs[verb](source)
        operation._awaited = True  # that it is dropped is meant
        ended = weakref.ref(operation)
        del operation, source, dst
        # A large one into given memory waits for what its caller's stream holds before it is staged.
        while "copy" not in [name for name, _ in device.log]:
            for stream in device.movable():
                device.step(stream)
            await anyio.sleep(0.0005)
        await anyio.sleep(0.002)
        gc.collect()
        assert not any(memory.expired() for memory in memories)
        assert not ended().done()
        if nbytes < SLOT or verb != "to_host":
            assert engine.slots.used_bytes + engine.chunks.used_bytes > 0
        await drain(device)
        await until(lambda: all(memory.expired() for memory in memories))
        assert engine.slots.used_bytes + engine.chunks.used_bytes == 0

    run(main)


@SIZES
def test_a_downloads_source_lives_until_the_device_is_done(run, still, until, nbytes):
    """C05: the last reference goes right after the call."""
    device, _ = still

    async def main():
        source = pattern(nbytes)
        expected = source.clone()
        memory, place = StorageWeakRef(source.untyped_storage()), source.data_ptr()
        latch = device.latch()
        operation = aiogpu.to_host(source)
        del source
        gc.collect()
        assert not memory.expired()
        # What would happen to freed memory: 50 allocations of the same size are filled.
        others = [torch.full((nbytes,), i, dtype=torch.uint8) for i in range(50)]
        assert all(x.data_ptr() != place for x in others)
        latch.release()
        task_result: list[torch.Tensor] = []

        async def wait():
            task_result.append(await operation)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            group.start_soon(drain, device)
        assert torch.equal(task_result[0], expected)

    run(main)


@SIZES
def test_no_block_in_flight_is_handed_out_again(run, still, until, nbytes):
    """C03: a hundred more uploads while the first has not moved."""
    device, _engine = still

    async def main():
        xs = [pattern(nbytes, i) for i in range(20)]
        operations = [aiogpu.to_device(x) for x in xs]
        copies = [line for line in device.log if line[0] == "copy"]
        assert nbytes > SLOT or len(copies) == 20
        results: list[Any] = [None] * 20

        async def wait(index):
            results[index] = await operations[index]

        async with anyio.create_task_group() as group:
            for index in range(20):
                group.start_soon(wait, index)
            group.start_soon(drain, device)
        assert all(torch.equal(x, y) for x, y in zip(xs, results, strict=True))

    run(main)


def test_a_small_source_is_a_snapshot(run, still):
    """C02: written right after the call, before the device has moved."""
    device, _ = still

    async def main():
        x = pattern(SLOT)
        expected = x.clone()
        operation = aiogpu.to_device(x)
        x.zero_()
        device.run_all()
        assert torch.equal(await operation, expected)

    run(main)


@SIZES
def test_a_source_written_after_the_await_changes_nothing(run, nbytes):
    """C02: a copy is a copy, on the CPU's driver, too."""
    with small_virtual():

        async def main():
            x = pattern(nbytes)
            expected = x.clone()
            there = await aiogpu.to_device(x)
            x.zero_()
            assert torch.equal(there, expected)
            back = await aiogpu.to_host(there)
            there.zero_()
            assert torch.equal(back, expected)

        run(main)


# -- nothing early -----------------------------------------------------------------------------------


@SIZES
def test_an_await_returns_no_earlier_than_the_device(run, still, until, nbytes):
    """C01: the producer's kernel is behind a latch; the value is what it writes."""
    device, _ = still
    x = torch.zeros(nbytes, dtype=torch.uint8)

    async def main():
        latch = device.latch()
        device.launch(lambda: x.fill_(7), writes=[x])
        operation = aiogpu.to_host(x)
        results: list[torch.Tensor] = []

        async def wait():
            results.append(await operation)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            for _ in range(20):
                device.run_all()
                await anyio.sleep(0.0005)
            assert not results
            assert not operation.done()
            latch.release()
            group.start_soon(drain, device)
        assert results[0].unique().tolist() == [7]

    run(main)


def test_host_memory_is_written_only_after_its_chunks_event_and_resolved_after_that(run_asyncio, monkeypatch):
    """C09: event, then the host's own copy, then the await."""
    log: list[tuple[int, str]] = []  # each segment is a thread's of its own
    with small_virtual(auto=False, pinned_bytes=0) as (device, _):
        synchronize, empty = device.synchronize, Rows.empty

        def noted_synchronize(event):
            synchronize(event)
            assert event.done
            log.append((threading.get_ident(), "event"))

        def noted_copy(rows, index, row):
            log.append((threading.get_ident(), "host copy"))
            empty(rows, index, row)

        monkeypatch.setattr(device, "synchronize", noted_synchronize)
        monkeypatch.setattr(Rows, "empty", noted_copy)
        x = pattern(5 * CHUNK + 3)

        async def main():
            async def wait():
                assert torch.equal(await aiogpu.to_host(x), x)
                log.append((0, "resolved"))

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                group.start_soon(drain, device)

        run_asyncio(main)
    assert log.pop() == (0, "resolved")
    assert len(log) > 12
    for thread in {thread for thread, _ in log}:
        steps = [step for each, step in log if each == thread]
        assert steps == ["event", "host copy"] * (len(steps) // 2)


# -- cancellation ------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("verb", ["to_device", "to_host", "out", "copy_"])
def test_a_cancelled_wait_returns_at_once_and_leaves_the_buffers_alone(run, still, until, nbytes, verb):
    """C70."""
    device, _engine = still

    async def main():
        x, y = pattern(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
        latch = device.latch()
        start = {
            "to_device": lambda: aiogpu.to_device(x),
            "to_host": lambda: aiogpu.to_host(x),
            "out": lambda: aiogpu.to_host(x, out=y),
            "copy_": lambda: aiogpu.copy_(y, x),
        }[verb]
        operation = start()
        with anyio.move_on_after(0.002) as scope:
            await operation
        assert scope.cancelled_caught
        assert not operation.done()
        latch.release()
        await drain(device)
        assert operation.done()
        assert torch.equal(await operation, x)  # the transfer itself went on

    run(main)


def test_storms_of_cancellations_corrupt_no_survivor(run, moving, until):
    """C70, C72: 300 transfers of all kinds, every other one cancelled, memory reused at once."""
    with small_virtual(auto=False, pinned_bytes=2000) as (device, engine):
        rng = random.Random(1)
        survived = 0

        async def one(index):
            nonlocal survived
            x = pattern(rng.choice([10, SLOT, CHUNK, 3 * CHUNK + 1]), index)
            with anyio.CancelScope() as scope:
                if rng.random() < 0.5:
                    scope.deadline = anyio.current_time() + rng.random() * 0.003
                there = await aiogpu.to_device(x)
                assert torch.equal(there, x)
                back = await aiogpu.to_host(there)
                assert torch.equal(back, x)
                del there
                assert torch.equal(await aiogpu.copy_(torch.empty_like(x), x), back)
                survived += 1

        async def main():
            with moving(device):
                await aiogpu.amap(one, range(300), limit=30)
                runtime = aiogpu.current_runtime()
                while runtime.reactor.operations or runtime.reactor.pending:
                    await anyio.sleep(0.001)
            assert engine.slots.used_bytes == engine.chunks.used_bytes == 0
            # A staging thread may give its stream back a moment after the transfer has ended.
            await until(lambda: engine.uploads.in_use == engine.downloads.in_use == 0)

        run(main)
        assert 100 < survived <= 300


# -- staging memory ----------------------------------------------------------------------------------


def test_after_warm_up_no_upload_takes_new_page_locked_memory(run_asyncio):
    """C16."""
    with small_virtual() as (device, _engine):

        async def main():
            for nbytes in (SLOT // 2, 5 * CHUNK):
                x = pattern(nbytes)
                for _ in range(3):
                    await aiogpu.to_device(x)
                before = device.pinned_bytes
                for _ in range(300):
                    await aiogpu.to_device(x)
                assert device.pinned_bytes == before

        run_asyncio(main)


@pytest.mark.parametrize("pinned_bytes", [0, 2**30], ids=["through chunks", "page-locked results"])
def test_two_hundred_transfers_share_two_chunks_without_a_deadlock(run, moving, pinned_bytes):
    """C17: staging never exceeds its limit, and whoever holds a chunk never waits for another."""
    with small_virtual(auto=False, chunks=2, pinned_bytes=pinned_bytes) as (device, engine):
        limit = engine.chunks.limit * CHUNK
        assert limit == 2 * CHUNK

        async def one(index):
            x = pattern(4 * CHUNK + index, index)
            there = await aiogpu.to_device(x)
            assert engine.chunks.allocated_bytes <= limit
            assert torch.equal(await aiogpu.to_host(there), x)

        async def main():
            with moving(device):
                await aiogpu.amap(one, range(200), limit=200)

        run(main)
        assert engine.chunks.allocated_bytes <= limit
        assert engine.chunks.trim() == limit
        assert engine.chunks.allocated_bytes == 0


@pytest.mark.parametrize("pinned_bytes", [0, 2**30], ids=["through chunks", "page-locked results"])
def test_one_transfer_of_many_leaves_needs_no_more_than_two_chunks(run, moving, pinned_bytes):
    """It uses its own again: one that holds a chunk and waits for the next would wait for itself."""
    with small_virtual(auto=False, chunks=2, pinned_bytes=pinned_bytes) as (device, engine):
        xs = [pattern(2 * CHUNK + index, index) for index in range(40)]

        async def main():
            with moving(device):
                there = await aiogpu.to_device(xs)
                back = await aiogpu.to_host(there)
            assert all(torch.equal(x, y) for x, y in zip(xs, back, strict=True))

        run(main)
        assert engine.chunks.allocated_bytes <= 2 * CHUNK


@pytest.mark.parametrize("failures", [1, 1000], ids=["once", "always"])
def test_memory_that_cannot_be_page_locked_costs_speed_and_one_warning(run_asyncio, failures):
    """C18: the data is right, and the books are as before."""
    with small_virtual(pinned_bytes=0) as (device, engine):
        device.pin_failures = failures
        x = pattern(5 * CHUNK + 1)

        async def main():
            for _ in range(3):
                there = await aiogpu.to_device(x)
                assert torch.equal(there, x)
                assert torch.equal(await aiogpu.to_host(there), x)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_asyncio(main)
        messages = [str(each.message) for each in caught if "page-lock" in str(each.message)]
        assert len(messages) == 1
        assert "Raise the limit on locked memory (ulimit -l), or lower AIOGPU_STAGING_BYTES" in messages[0]
        assert engine.chunks.used_bytes == 0
        assert engine.chunks.count == (0 if failures == 1000 else engine.chunks.count)
        device.pin_failures = 0


def test_a_machine_without_page_locked_memory_has_no_slots_either(run_asyncio):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with small_virtual() as (device, engine):
            while engine.slots.take_free() is not None:
                engine.slots.count -= 1
            device.pin_failures = 10**6

            async def main():
                x = pattern(10)
                assert torch.equal(await aiogpu.to_device(x), x)
                assert torch.equal(await aiogpu.to_host(x), x)
                assert await aiogpu.item(torch.tensor(3)) == 3

            run_asyncio(main)


# -- out of memory -----------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("verb", ["to_device", "to_host", "copy_"])
def test_out_of_memory_is_torchs_own_and_keeps_no_tensor(run_asyncio, until, verb, nbytes):
    """C66: with the exception stored, dropping the user's references is enough; the next request works."""
    with small_virtual() as (device, _engine):

        async def main():
            x = pattern(nbytes)
            dst = torch.empty_like(x)
            start = {
                "to_device": lambda x, dst: aiogpu.to_device(x),
                "to_host": lambda x, dst: aiogpu.to_host(x),
                "copy_": lambda x, dst: aiogpu.copy_(dst, x),
            }[verb]
            memories = [StorageWeakRef(each.untyped_storage()) for each in (x, dst)]
            copy = device.copy

            def fails(*args):
                raise torch.OutOfMemoryError("injected")

            device.copy = fails  # type: ignore[method-assign]
            stored = None
            try:
                await start(x, dst)
            except torch.OutOfMemoryError as error:
                stored = error
            device.copy = copy  # type: ignore[method-assign]
            del x, dst
            await aiogpu.synchronize()
            assert str(stored) == "injected"
            # The staging thread still has to leave the frames that failed.
            await until(lambda: gc.collect() >= 0 and all(memory.expired() for memory in memories))
            x = pattern(nbytes)
            assert torch.equal(await start(x, torch.empty_like(x)), x)

        run_asyncio(main)


def test_a_failure_that_is_seen_before_its_thread_has_unwound_keeps_no_tensor(
    run_asyncio, until, monkeypatch
):
    """The loop resolves the operation with the very exception that a staging thread is still raising."""
    seen = threading.Event()
    watch = Runtime.watch

    def then_wait(self, *args):
        point = watch(self, *args)
        assert seen.wait(10)
        return point

    monkeypatch.setattr(Runtime, "watch", then_wait)
    with small_virtual() as (device, _engine):

        async def main():
            x = pattern(5123)
            memory = StorageWeakRef(x.untyped_storage())

            def fails(*args):
                raise MemoryError("injected")

            device.copy = fails  # type: ignore[method-assign]
            stored = None
            try:
                await aiogpu.to_device(x)
            except MemoryError as error:
                stored = error
            del x
            seen.set()
            await until(lambda: gc.collect() >= 0 and memory.expired())
            assert stored is not None

        run_asyncio(main)


# -- debug mode --------------------------------------------------------------------------------------


def test_debug_mode_names_the_line_that_started_and_the_one_that_awaited(run, auto_vd):
    """C11: a source that was written in between."""

    async def main():
        async with aiogpu.Runtime(debug=True):
            x = torch.zeros(100_000)
            operation = aiogpu.to_device(x)
            x.add_(1)
            with pytest.raises(RuntimeError) as caught:
                await operation
        message = str(caught.value)
        started, awaited = operation._site[1], operation._site[1] + 3
        assert f"started at {__file__}:{started}" in message
        assert f"before the await at {__file__}:{awaited}" in message
        assert "Await it first, or pass a clone" in message

    run(main)


def test_debug_mode_lets_right_programs_pass(run, auto_vd):
    async def main():
        async with aiogpu.Runtime(debug=True):
            x = torch.zeros(100_000)
            await aiogpu.to_device(x)
            x.add_(1)
            y = await aiogpu.to_host([x])
            x.add_(1)
            assert y[0].sum() == 100_000
            with torch.inference_mode():
                await aiogpu.to_device(torch.ones(3))

    run(main)


def test_hundreds_of_copies_are_not_queued_behind_a_producer_that_still_runs(run, monkeypatch, until):
    """A copy stream takes about 1020 commands, and then blocks whoever submits, inside of CUDA."""
    monkeypatch.setattr("aiogpu.transfers.downloads._COMMANDS", 4)

    async def main() -> None:
        with small_virtual() as (device, _):
            sources = [torch.full((SLOT + 1,), float(n), dtype=torch.float64) for n in range(9)]
            await aiogpu.to_host(sources)
            latch = device.latch()
            operation = aiogpu.to_host(sources)
            few = aiogpu.to_host(sources[:3])
            await until(lambda: _waiting(device) >= 3)
            assert _waiting(device) < 9, "they fill the copy stream"
            latch.release()
            values = await operation
            assert [value[0].item() for value in values] == list(range(9))
            assert (await few)[2][0] == 2

    run(main)


def _waiting(device: Any) -> int:
    """Copies that are queued behind something."""
    return sum(command.name == "copy" for queue in device._queues for command in queue.commands)
