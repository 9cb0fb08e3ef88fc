"""An upload that runs out of device memory waits for what is in flight, tries once more, and fails alone.

Device memory is a number here: ``Memory`` counts what uploads have allocated and nobody
has let go of yet, and refuses what does not fit, as torch does.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiogpu
from aiogpu import _capacity
from aiogpu.transfers import single, uploads


class Memory:
    """``limit`` bytes for the results of uploads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.refusals: list[int] = []  # on which thread
        self._lock = threading.RLock()

    def room_for(self, source: torch.Tensor, device: torch.device, *, counts: bool = True) -> torch.Tensor:
        nbytes = source.numel() * source.element_size()
        with self._lock:
            if self.used + nbytes > self.limit:
                if counts:
                    self.refusals.append(threading.get_ident())
                raise torch.OutOfMemoryError(
                    f"virtual device out of memory: {self.used} of {self.limit} used"
                )
            self.used += nbytes
        room = torch.empty_like(source, device=device)
        weakref.finalize(room.untyped_storage(), self._free, nbytes).atexit = False
        return room

    def _free(self, nbytes: int) -> None:
        with self._lock:
            self.used -= nbytes


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory(1_000_000)
    monkeypatch.setattr(uploads, "room_for", memory.room_for)
    # Refused here, a call goes the general way at once, and makes its first try there.
    monkeypatch.setattr(single, "room_for", partial(memory.room_for, counts=False))
    return memory


SIZES = {"small": 60_000, "large": 600_000}


def of(nbytes: int, value: int = 1) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def start(verb: str, nbytes: int) -> aiogpu.Operation[torch.Tensor]:
    """An upload that needs ``nbytes`` on the device."""
    if verb == "to_device":
        return aiogpu.to_device(of(nbytes))
    # Another dtype: the bytes land in memory of their own first.
    return aiogpu.copy_(torch.zeros(nbytes, dtype=torch.int32), of(nbytes))


@pytest.mark.parametrize("verb", ["to_device", "copy_"])
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES)
def test_it_waits_for_memory_in_flight_and_tries_once_more(run, auto_vd, until, memory, verb, nbytes):
    async def main():
        latch = auto_vd.latch()
        before = aiogpu.to_device(of(50_000))  # in flight: nobody holds it but the runtime
        before._awaited = True
        del before
        assert memory.used
        memory.limit = memory.used + nbytes - 1
        if verb == "copy_" and nbytes == SIZES["large"]:
            # It starts only behind what its stream holds: another transfer must be in flight then.
            with auto_vd.on(auto_vd.open_stream("copy")):
                operation = start(verb, nbytes)
        else:
            operation = start(verb, nbytes)
        await until(lambda: memory.refusals)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert not operation.done()
        latch.release()
        assert bool((await operation == 1).all())
        assert len(memory.refusals) == 1

    run(main)


def test_the_second_try_is_made_on_a_thread_of_ours(run, vd, moving, until, memory, monkeypatch):
    tries: list[int] = []
    allocate = memory.room_for

    def counting(source: torch.Tensor, device: torch.device) -> torch.Tensor:
        tries.append(threading.get_ident())
        return allocate(source, device)

    monkeypatch.setattr(uploads, "room_for", counting)

    async def main():
        first = aiogpu.to_device(of(50_000))
        first._awaited = True
        del first
        memory.limit = 60_000
        operation = aiogpu.to_device(of(60_000))
        with moving(vd):
            await operation
        assert tries[0] == threading.get_ident()
        assert tries[1] != threading.get_ident()
        assert len(tries) == 2

    run(main)


@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES)
def test_in_vain_it_fails_with_torchs_own_error_and_alone(run, auto_vd, memory, nbytes):
    """C67: only the one that does not fit fails; the one beside it, and the next, do not notice."""

    async def main():
        held = await aiogpu.to_device(of(500_000))  # the user's, and so never waited for
        memory.limit = 500_000 + nbytes - 1
        latch = auto_vd.latch()
        neighbour = aiogpu.to_device(of(1000))
        operation = aiogpu.to_device(of(nbytes))
        operation2 = aiogpu.to_host(of(nbytes))
        latch.release()
        with pytest.raises(torch.OutOfMemoryError, match="virtual device out of memory"):
            await operation
        assert bool((await neighbour == 1).all())
        assert bool((await operation2 == 1).all())
        del neighbour
        gc.collect()
        assert bool((await aiogpu.to_device(of(1000)) == 1).all())
        assert held.numel() == 500_000

    run(main)


def test_with_nothing_in_flight_it_fails_without_a_wait(run, auto_vd, memory):
    """Once more it is tried all the same: something may have come back between the two."""

    async def main():
        memory.limit = 100
        begin = time.monotonic()
        for nbytes in SIZES.values():
            with pytest.raises(torch.OutOfMemoryError):
                await aiogpu.to_device(of(nbytes))
        assert time.monotonic() - begin < _capacity.PATIENCE / 2
        assert len(memory.refusals) == 2 * len(SIZES)

    run(main)


def test_memory_that_comes_back_in_the_very_moment_is_enough(run, auto_vd, memory, monkeypatch):
    """The race: what was in flight at the refusal has landed by the time that we look for it."""

    def too_late(engine: Any) -> list[Any]:
        memory.limit = 10**9
        return []

    monkeypatch.setattr("aiogpu.transfers.jobs.in_flight", too_late)

    async def main():
        memory.limit = 100
        assert bool((await aiogpu.to_device(of(600_000)) == 1).all())

    run(main)


def test_the_wait_is_bounded(run, vd, until, memory, monkeypatch):
    monkeypatch.setattr(_capacity, "PATIENCE", 0.05)

    async def main():
        latch = vd.latch()
        first = aiogpu.to_device(of(50_000))
        memory.limit = 60_000
        begin = time.monotonic()
        operation = aiogpu.to_device(of(60_000))
        await until(lambda: len(memory.refusals) == 2)  # though the device has not moved
        assert time.monotonic() - begin >= 0.05
        latch.release()
        vd.run_all()
        await first
        with pytest.raises(torch.OutOfMemoryError):
            await operation

    run(main)


def test_what_the_first_try_had_got_is_let_go_of_before_the_second(run, auto_vd, until, memory):
    """Two of three leaves fit; kept through the second try they would make it fail, too."""

    async def main():
        latch = auto_vd.latch()
        first = aiogpu.to_device(of(60_000))
        first._awaited = True
        del first
        memory.limit = 900_000
        operation = aiogpu.to_device([of(300_000, 1), of(300_000, 2), of(300_000, 3)])
        await until(lambda: memory.refusals)
        latch.release()
        there = await operation
        assert [int(x[0]) for x in there] == [1, 2, 3]

    run(main)
    assert len(memory.refusals) == 1


def test_memory_that_another_loop_has_in_flight_is_waited_for_too(run, vd, moving, until, memory):
    started, go_on = threading.Event(), threading.Event()

    def guest() -> None:
        async def main() -> None:
            operation = aiogpu.to_device(of(60_000))
            operation._awaited = True
            del operation
            started.set()
            await until(go_on.is_set)
            await until(lambda: aiogpu.stats().pending == 0)

        run(main)

    async def main():
        memory.limit = 100_000
        thread = threading.Thread(target=guest)
        thread.start()
        await until(started.is_set)
        operation = aiogpu.to_device(of(60_000))
        assert memory.refusals
        go_on.set()
        with moving(vd):
            await operation
        await anyio.to_thread.run_sync(thread.join, 10)

    run(main)


def test_a_cancelled_wait_for_memory_leaves_no_trace(run, vd, moving, until, memory):
    async def main():
        latch = vd.latch()
        first = aiogpu.to_device(of(50_000))
        memory.limit = 60_000
        operation = aiogpu.to_device(of(60_000))
        with anyio.move_on_after(0):
            await operation
        assert not operation.done()
        latch.release()
        with moving(vd):
            await first
            del first
            await until(operation.done)

    run(main)


def test_a_device_that_is_lost_meanwhile_ends_the_wait(run, vd, until, memory):
    async def main():
        vd.latch()
        first = aiogpu.to_device(of(50_000))
        memory.limit = 60_000
        operation = aiogpu.to_device(of(60_000))
        vd.fault()
        for each in (first, operation):
            with pytest.raises(aiogpu.DeviceLostError):
                await each

    run(main)


def test_the_error_holds_no_tensor(run, auto_vd, until, memory):
    """C66: whoever stores the exception keeps no memory by it."""

    async def main():
        latch = auto_vd.latch()
        first = aiogpu.to_device(of(50_000))
        source = of(960_000)
        reference = weakref.ref(source)
        operation: Any = aiogpu.to_device([of(30_000), source])
        del source
        latch.release()
        stored = None
        try:
            await operation
        except torch.OutOfMemoryError as error:
            stored = error
        assert stored is not None
        await first
        del operation, first
        await until(lambda: gc.collect() >= 0 and reference() is None)  # the thread may still be unwinding
        assert memory.used == 0

    run(main)
