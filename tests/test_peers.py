"""Copies between two devices follow what both held at the call, and nobody waits for them in a thread.

On two virtual devices: a copy, read or write that streams do not order raises at its submission. On two GPUs:
tests/gpu/test_two_gpus.py.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
import torch
from _two_devices import Two, two_devices
from torch.multiprocessing.reductions import StorageWeakRef

import aiogpu
from aiogpu._operation import Operation
from aiogpu.testing import RaceError
from aiogpu.transfers import peers
from aiogpu.transfers.peers import Origins, PeerCopy
from aiogpu.transfers.plan import Plan
from aiogpu.transfers.tree import flatten

SIZES = {"small": 8, "large": 50_000}
sized = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    with two_devices(monkeypatch) as pair:
        yield pair


@pytest.fixture
def settled(two: Two) -> Callable[..., Any]:
    """Await an operation while the devices move."""

    async def settle(operation: Any) -> Any:
        while not operation.done():
            two.run_all()
            await anyio.sleep(0.0005)
        return await operation

    return settle


def peer_copy(two: Two, dst: torch.Tensor, src: torch.Tensor) -> Operation[torch.Tensor]:
    """``copy_(dst, src)`` as the call makes it, for a ``dst`` on the second device."""
    runtime = aiogpu.current_runtime()
    plan = Plan(flatten(src, verb="copy_"), lambda _: False)
    operation: Operation[torch.Tensor] = Operation("copy_", runtime.reactor)
    PeerCopy(runtime, plan, operation, dst, src).start(two.engines[1])
    return operation


def go(run: Any, two: Two, main: Callable[[], Any]) -> None:
    """Run ``main``, then what the devices still hold."""

    async def whole() -> None:
        try:
            await main()
        finally:
            two.run_all()

    run(whole)


def write(two: Two, x: torch.Tensor, value: float) -> None:
    """A kernel of the first device."""
    two.first.launch(lambda: x.fill_(value), writes=[x])


def read(two: Two, x: torch.Tensor, into: list[float]) -> None:
    """A kernel of the second device."""
    two.second.launch(lambda: into.append(x.view(-1)[0].item()), reads=[x])


# -- order -------------------------------------------------------------------------------------------------


@sized
@pytest.mark.parametrize("decorated", [True, False], ids=["task", "plain"])
def test_a_copy_to_the_other_device_follows_the_sources_stream(run, two, settled, until, size, decorated):
    async def main():
        x = two.on_first(torch.zeros(size))
        latch = two.first.latch()
        write(two, x, 5.0)
        operation = aiogpu.to_device(x, "second")
        await until(lambda: "in flight" in repr(operation))
        two.run_all()
        assert not operation.done()
        latch.release()
        there = await settled(operation)
        assert there is not x
        assert bool((there == 5.0).all())
        write(two, x, 6.0)  # the source may be written now
        two.run_all()
        assert bool((there == 5.0).all())

    go(run, two, aiogpu.task(main) if decorated else main)


def test_the_detector_sees_it_where_the_edge_is_missing(run, two, settled, monkeypatch):
    """What the other tests rely on."""
    monkeypatch.setattr(Origins, "follow", lambda *_: None)

    @aiogpu.task
    async def main():
        x = two.on_first(torch.zeros(50_000))
        write(two, x, 5.0)
        with pytest.raises(RaceError):
            await settled(aiogpu.to_device(x, "second"))

    go(run, two, main)


@sized
def test_a_copy_in_place_follows_both_streams(run, two, settled, until, size):
    async def main():
        src, dst = two.on_first(torch.zeros(size)), torch.zeros(size)
        for value in range(1, 4):  # a first one, which introduces the devices, and others
            latches = two.first.latch(), two.second.latch()
            write(two, src, float(value))
            two.second.launch(lambda: dst.fill_(-1.0), writes=[dst])
            operation = peer_copy(two, dst, src)
            await until(lambda operation=operation: "in flight" in repr(operation))
            for latch in latches:
                two.run_all()
                assert not operation.done()
                latch.release()
            assert await settled(operation) is dst
            assert bool((dst == value).all())

    go(run, two, main)


def test_strided_sources_and_other_dtypes_arrive_whole(run, two, settled):
    async def main():
        base = two.on_first(torch.arange(60_000.0).view(300, 200))
        for x in (base.t(), base[:, ::3], base[0].expand(7, 200), base[:2, :3], base[0, 0]):
            assert torch.equal(await settled(aiogpu.to_device(x, "second")), x)
            dst = torch.zeros(2, *x.shape, dtype=torch.float64)
            assert torch.equal((await settled(peer_copy(two, dst, x)))[1], x.double())

    go(run, two, main)


@sized
def test_ordered_is_enough_for_the_target_stream(run, two, until, settled, size):
    async def main():
        x = two.on_first(torch.zeros(size))
        for value in (3.0, 4.0):
            write(two, x, value)
            operation = aiogpu.to_device(x, "second")
            there = await operation.ordered()
            assert not operation.done()
            read(two, there, seen)
            await settled(operation)

    seen: list[float] = []
    go(run, two, main)
    assert seen == [3.0, 4.0]


def test_a_batch_may_come_from_everywhere(run, two, settled):
    async def main():
        x, y = two.on_first(torch.full((9,), 1.0)), two.on_first(torch.full((50_000,), 2.0))
        data = {"a": x, "b": torch.full((9,), 3.0), "c": [y, torch.full((90_000,), 4.0)]}
        write(two, x, 10.0)
        for _ in range(2):
            there = await settled(aiogpu.to_device(data, "second"))
            assert there["a"][0] == 10.0
            assert [there["b"][8], there["c"][0][-1], there["c"][1][-1]] == [3.0, 2.0, 4.0]

    go(run, two, main)


# -- where it runs -----------------------------------------------------------------------------------------


def test_the_first_copy_of_a_pair_is_made_off_the_loop_and_small_ones_later_on_the_callers_stream(
    run, two, settled, until, monkeypatch
):
    """Mapping one device's memory into the other takes long, the first time."""
    threads: list[int] = []
    copy = two.second.copy

    def noted(*what):
        threads.append(threading.get_ident())
        copy(*what)

    monkeypatch.setattr(two.second, "copy", noted)

    async def main():
        x = two.on_first(torch.ones(4))
        await settled(aiogpu.to_device(x, "second"))
        assert threading.get_ident() not in threads
        assert len(threads) == 1
        await until(lambda: peers._introduced)  # by the thread that made it, perhaps a moment later
        second = aiogpu.to_device(x, "second")
        assert "in flight" in repr(second)
        assert two.second.log[-2] == ("copy", 1000)  # the default stream
        await settled(second)
        third = peer_copy(two, torch.zeros(4), x)
        assert "in flight" in repr(third)
        await settled(third)

    go(run, two, main)


def test_no_bytes_pass_through_the_host(run, two, settled):
    """No slot, no chunk: the devices' own business."""

    async def main():
        for size in (4, 4, 50_000):
            await settled(aiogpu.to_device(two.on_first(torch.ones(size)), "second"))
        for engine in two.engines:
            assert engine.chunks.count == 0
            assert engine.slots.used_bytes == 0

    go(run, two, main)


# -- life --------------------------------------------------------------------------------------------------


@sized
def test_source_and_destination_stay_alive_until_the_copy_is_done(run, two, until, size):
    async def one():
        src, dst = two.on_first(torch.ones(size)), torch.zeros(size)
        memories = [StorageWeakRef(x.untyped_storage()) for x in (src, dst)]
        latch = two.first.latch()
        operation = peer_copy(two, dst, src)
        del src, dst
        with anyio.move_on_after(0):
            await operation
        await until(lambda: operation is None or "in flight" in repr(operation))
        two.run_all()
        operation = None
        gc.collect()
        assert not any(memory.expired() for memory in memories)
        latch.release()
        two.run_all()
        await until(lambda: gc.collect() >= 0 and all(memory.expired() for memory in memories))

    async def main():
        await one()  # introduces the devices
        await one()

    go(run, two, main)


def test_streams_of_both_devices_come_back(run, two, settled, until):
    async def main():
        for _ in range(3):
            await settled(aiogpu.to_device(two.on_first(torch.ones(50_000)), "second"))
            await settled(peer_copy(two, torch.zeros(50_000), two.on_first(torch.ones(50_000))))
        await until(lambda: all(e.downloads.in_use == e.uploads.in_use == 0 for e in two.engines))

    go(run, two, main)


def test_a_failed_submission_fails_the_operation_and_gives_everything_back(run, two, settled, until):
    async def main():
        for size in (50_000, 4):
            src = two.on_first(torch.ones(size))
            two.second.fail_submit(3, MemoryError("injected"))
            with pytest.raises(MemoryError, match="injected"):
                await settled(peer_copy(two, torch.zeros(size), src))
        # The staging thread still has to leave the frames that failed.
        await until(lambda: all(engine.downloads.in_use == 0 for engine in two.engines))

    go(run, two, main)


def test_threads_have_their_own_streams_again_afterwards(run, two, settled, monkeypatch):
    """Swapped like brackets: CUDA saves and restores the streams of all devices at once."""
    opened: list[Any] = []
    for device in (two.first, two.second):
        swap, restore = device.swap, device.restore

        def noting(raw: Any, swap: Any = swap) -> Any:
            saved = swap(raw)
            opened.append(raw)
            return saved

        def checking(saved: Any, restore: Any = restore) -> Any:
            raw = restore(saved)
            assert opened.pop() is raw, "not the innermost one"
            return raw

        monkeypatch.setattr(device, "swap", noting)
        monkeypatch.setattr(device, "restore", checking)

    async def main():
        x = two.on_first(torch.ones(50_000))
        await settled(aiogpu.to_device([x, torch.ones(50_000)], "second"))
        await settled(peer_copy(two, torch.zeros(50_000), x))
        assert not opened

    go(run, two, main)
