"""Runtime(max_inflight_bytes=): what does not fit waits on the host, in order, and no coroutine with it."""

from __future__ import annotations

import random
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from _small_blocks import CHUNK, SLOT, small_virtual

import aiogpu
from aiogpu._workers import WorkerPool
from aiogpu.transfers.inflight import InFlight

LIMIT = 10 * CHUNK


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@pytest.fixture
def still():
    with small_virtual(auto=False) as (device, engine):
        yield device, engine


@pytest.fixture
def moves():
    with small_virtual() as (device, engine):
        yield device, engine


async def drain(device: Any) -> None:
    runtime = aiogpu.current_runtime()
    while runtime.reactor.pending or runtime.reactor.operations or not device.idle:
        device.run_all()
        await anyio.sleep(0.0005)


class Watched:
    """Notes the bytes in flight whenever they change, and the order in which transfers start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = 0
        self.started: list[int] = []
        first = InFlight._next

        def noting(inflight: InFlight) -> Any:
            entry = first(inflight)
            self.peak = max(self.peak, inflight.nbytes)
            if entry is not None:
                self.started.append(entry[1])
            return entry

        monkeypatch.setattr(InFlight, "_next", noting)


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


# -- the bound -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["to_device", "to_host", "copy_"])
def test_many_transfers_at_once_stay_within_the_limit_and_are_exact(run, moves, watched, verb):
    sources = [pattern(CHUNK + 64 * seed, seed) for seed in range(40)]

    def start(source: torch.Tensor) -> aiogpu.Operation[Any]:
        if verb == "copy_":
            return aiogpu.copy_(torch.zeros_like(source), source)
        return aiogpu.to_device(source) if verb == "to_device" else aiogpu.to_host(source)

    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
            moved = await aiogpu.gather(*[start(source) for source in sources])
            assert all(map(torch.equal, moved, sources))
            assert aiogpu.stats().inflight_bytes == aiogpu.stats().waiting_transfers == 0

    run(main)
    assert 0 < watched.peak <= LIMIT
    assert len(watched.started) == 40


def test_the_call_starts_it_and_neither_blocks_nor_awaits(run, still, until):
    """Queued transfers start by themselves, when earlier ones have finished: nobody needs to await them."""
    device, _ = still

    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
            operations = [aiogpu.to_device(pattern(LIMIT, seed)) for seed in range(3)]
            assert (aiogpu.stats().inflight_bytes, aiogpu.stats().waiting_transfers) == (LIMIT, 2)
            await until(lambda: "copy" in [name for name, _ in device.log])
            assert "queued" in repr(operations[2])
            await drain(device)
            assert all(operation.done() for operation in operations)
            assert torch.equal(await operations[2], pattern(LIMIT, 2))
            for operation in operations:
                await operation

    run(main)


def test_transfers_start_in_the_order_of_their_calls(run, moves, watched):
    """Nobody overtakes: a large one is not starved by the small ones that would still fit."""
    sizes = [LIMIT // 2, LIMIT, *[CHUNK + n for n in range(20)], LIMIT - 1, CHUNK]

    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
            await aiogpu.gather(*[aiogpu.to_device(pattern(nbytes)) for nbytes in sizes])

    run(main)
    assert watched.started == sizes


def test_one_that_is_larger_than_the_limit_goes_alone(run, moves, watched):
    sizes = [CHUNK, 3 * LIMIT, CHUNK, 2 * LIMIT]

    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
            moved = await aiogpu.gather(*[aiogpu.to_device(pattern(nbytes, nbytes)) for nbytes in sizes])
            assert all(
                torch.equal(x, pattern(nbytes, nbytes)) for x, nbytes in zip(moved, sizes, strict=True)
            )

    run(main)
    assert watched.started == sizes
    assert watched.peak == 3 * LIMIT


def test_small_ones_go_onto_the_callers_stream_at_once(run, still, until):
    """They must keep their place there, and the slots bound them: they neither wait nor count."""
    device, _ = still

    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
            large = [aiogpu.to_device(pattern(LIMIT)) for _ in range(2)]
            small = aiogpu.to_device(pattern(SLOT))
            assert "in flight" in repr(small)
            assert (aiogpu.stats().inflight_bytes, aiogpu.stats().waiting_transfers) == (LIMIT, 1)
            await drain(device)
            await aiogpu.gather(small, *large)

    run(main)


def test_a_queued_download_has_what_the_stream_held_at_its_call(run, still, until):
    """It starts later, and is ordered after the work of then; what the stream got since does not matter."""
    device, _ = still
    x = torch.zeros(LIMIT, dtype=torch.uint8)

    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
            first = aiogpu.to_device(pattern(LIMIT))
            device.launch(lambda: x.fill_(7), writes=[x])
            queued = aiogpu.to_host(x)
            latch = device.latch()  # the stream's later work never ends while this test waits
            await until(lambda: (device.run_all(), queued.done())[1])
            assert torch.equal(await queued, torch.full((LIMIT,), 7, dtype=torch.uint8))
            latch.release()
            await first

    run(main)


@pytest.mark.parametrize("verb", ["to_host", "copy_"])
def test_a_transfer_in_several_steps_waits_only_once(run, watched, verb):
    """One that must wait for its stream before a thread may take it on; it would wait for itself."""
    with small_virtual(pinned_bytes=0) as (device, _):
        x = torch.zeros(LIMIT, dtype=torch.uint8)

        async def main():
            async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
                for value in range(3):
                    device.launch(lambda value=value: x.fill_(value), writes=[x])
                    host = aiogpu.to_host(x) if verb == "to_host" else aiogpu.copy_(x, pattern(LIMIT, value))
                    expected = torch.full_like(x, value) if verb == "to_host" else pattern(LIMIT, value)
                    assert torch.equal(await host, expected)
                assert aiogpu.stats().inflight_bytes == 0

        run(main)
    assert watched.started == [LIMIT] * 3


def test_without_a_limit_nothing_waits(run, still):
    device, _ = still

    async def main():
        operations = [aiogpu.to_device(pattern(LIMIT)) for _ in range(20)]
        assert (aiogpu.stats().inflight_bytes, aiogpu.stats().waiting_transfers) == (20 * LIMIT, 0)
        await drain(device)
        await aiogpu.gather(*operations)
        assert aiogpu.stats().inflight_bytes == 0

    run(main)


def test_the_implicit_runtimes_transfers_count_for_the_explicit_one_too(run, still):
    device, _ = still

    async def main():
        before = aiogpu.to_device(pattern(LIMIT))
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
            after = aiogpu.to_device(pattern(CHUNK))
            assert (aiogpu.stats().inflight_bytes, aiogpu.stats().waiting_transfers) == (LIMIT, 1)
            await drain(device)
            await aiogpu.gather(before, after)

    run(main)


# -- endings -------------------------------------------------------------------------------------------


def test_cancelled_waits_leave_the_queue_in_order(run, still, until):
    """A transfer that has been started is finished, also if it waits on the host and nobody for it."""
    device, _ = still

    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
            operations = [aiogpu.to_device(pattern(LIMIT, seed)) for seed in range(4)]
            for operation in operations[:3]:
                with anyio.move_on_after(0.001) as scope:
                    await operation
                assert scope.cancelled_caught
            await drain(device)
            assert torch.equal(await operations[3], pattern(LIMIT, 3))
            assert aiogpu.stats().waiting_transfers == 0

    run(main)


def test_failures_make_room(run, moves, monkeypatch):
    """Also those of a submission, which no device will ever finish."""
    _, engine = moves
    failing = iter([True, False] * 20)
    lease = engine.uploads.lease

    def leasing() -> Any:
        if next(failing):
            raise RuntimeError("no stream")
        return lease()

    monkeypatch.setattr(engine.uploads, "lease", leasing)

    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
            operations = [aiogpu.to_device(pattern(LIMIT)) for _ in range(20)]
            results = []
            for operation in operations:
                try:
                    results.append(torch.equal(await operation, pattern(LIMIT)))
                except RuntimeError as error:
                    results.append(str(error))
            assert results.count(True) == results.count("no stream") == 10

    run(main)


def test_what_no_thread_can_be_had_for_fails_and_makes_room(run_asyncio, still, monkeypatch):
    """Hundreds in a row, without a stack that grows with them."""
    device, _ = still
    refusing = False
    submit = WorkerPool.submit

    def submit_or_refuse(pool: WorkerPool, job: Any) -> None:
        if refusing:
            raise RuntimeError("no thread")
        submit(pool, job)

    async def main():
        nonlocal refusing
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
            first = aiogpu.to_device(pattern(LIMIT))
            rest = [aiogpu.to_device(torch.empty(LIMIT, dtype=torch.uint8)) for _ in range(500)]
            refusing = True
            await drain(device)
            await first
            for operation in rest:
                with pytest.raises(RuntimeError, match="no thread"):
                    await operation

    monkeypatch.setattr(WorkerPool, "submit", submit_or_refuse)
    run_asyncio(main)


def test_a_lost_device_wakes_the_queue(run, still, until, fast_watchdog):
    device, _ = still

    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
            operations = [aiogpu.to_device(pattern(LIMIT)) for _ in range(5)]
            await until(lambda: "copy" in [name for name, _ in device.log])
            device.fault()
            for operation in operations:
                with pytest.raises(aiogpu.DeviceLostError):
                    await operation
            assert aiogpu.stats().inflight_bytes == 0

    run(main)


def test_a_runtime_that_is_left_waits_for_the_queue(run, moves):
    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT):
            operations = [aiogpu.to_device(pattern(LIMIT)) for _ in range(10)]
        assert all(operation.done() for operation in operations)
        for operation in operations:
            await operation

    run(main)


def test_what_the_end_of_the_runtime_overtakes_still_ends(
    run, still, short_grace, abandoned, fast_watchdog, blocking_until
):
    """Left in the queue after the grace: it is named, goes on as the device does, and then holds nothing."""
    device, _ = still
    kept = []

    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=LIMIT) as runtime:
            kept.append(runtime)
            for _ in range(3):
                operation = aiogpu.to_device(pattern(LIMIT))
                operation._awaited = True  # that nobody awaits it is meant

    run(main)
    assert "to_device" in abandoned[0]
    inflight = kept[0].inflight
    blocking_until(lambda: (device.run_all(), inflight.nbytes == inflight.waiting == 0)[1])


def test_random_sizes_cancellations_and_devices_lose_nothing(run, anydevice, monkeypatch, watched):
    chance = random.Random(3)

    async def one(seed: int) -> None:
        source = pattern(chance.randrange(300_000), seed)
        with anyio.move_on_after(chance.choice([0.0, 0.001, 10.0])):
            operation = aiogpu.to_device(source) if seed % 2 else aiogpu.to_host(source)
            assert torch.equal(await operation, source)

    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=500_000):
            async with anyio.create_task_group() as group:
                for seed in range(100):
                    group.start_soon(one, seed)
        assert watched.peak <= 500_000

    run(main)


# -- settings ------------------------------------------------------------------------------------------


def test_the_limit_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("AIOGPU_MAX_INFLIGHT_BYTES", "4096")
    assert aiogpu.Runtime().max_inflight_bytes == 4096
    assert aiogpu.Runtime(max_inflight_bytes=1).max_inflight_bytes == 1
    monkeypatch.delenv("AIOGPU_MAX_INFLIGHT_BYTES")
    assert aiogpu.Runtime().max_inflight_bytes is None


@pytest.mark.parametrize(("limit", "error"), [(0, ValueError), (-1, ValueError), ("1", TypeError)])
def test_a_limit_that_cannot_be_meant_is_refused(limit, error):
    with pytest.raises(error, match="max_inflight_bytes"):
        aiogpu.Runtime(max_inflight_bytes=limit)


# -- re-entrancy -----------------------------------------------------------------------------------------


class Counted:
    """An operation, for the queue."""

    def __init__(self) -> None:
        self.over: list[Any] = []
        self.error: BaseException | None = None

    def when_over(self, callback: Any) -> None:
        self.over.append(callback)

    def fail(self, error: BaseException) -> None:
        self.error = error

    def end(self) -> None:
        for callback in self.over:
            callback()


def reentrant(queue: InFlight, monkeypatch: pytest.MonkeyPatch, then: Any) -> None:
    """At the next question whether something fits, ``then()`` happens, as in a garbage collection (which from
    Python 3.12 on comes at the entry of any function)."""
    fits, due = queue._fits, [then]

    def asked(nbytes: int) -> bool:
        answer = fits(nbytes)
        if due:
            due.pop()()
        return answer

    monkeypatch.setattr(queue, "_fits", asked)


@pytest.mark.parametrize("limit", [None, 10])
def test_a_transfer_that_a_collection_starts_meanwhile_takes_nobodys_place(monkeypatch, limit):
    queue, started = InFlight(limit), []
    inner, outer = Counted(), Counted()
    reentrant(queue, monkeypatch, lambda: queue.admit(inner, 4, lambda: started.append("inner")))
    queue.admit(outer, 4, lambda: started.append("outer"))
    assert started == ["outer", "inner"]
    assert queue.nbytes == 8
    inner.end()
    outer.end()
    queue.admit(Counted(), 1, lambda: started.append("later"))
    assert started[2:] == ["later"]


def test_a_transfer_that_ends_while_another_is_found_not_to_fit_makes_room_for_it(monkeypatch):
    queue, started = InFlight(10), []
    first = Counted()
    queue.admit(first, 8, lambda: started.append("first"))
    reentrant(queue, monkeypatch, first.end)
    queue.admit(Counted(), 8, lambda: started.append("second"))
    assert started == ["first", "second"]
    assert queue.nbytes == 8
