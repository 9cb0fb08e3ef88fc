"""Loops that end early, many loops on one device, and what waiting costs."""

from __future__ import annotations

import asyncio
import threading
import time

import anyio
import pytest
import torch

import aiogpu
from aiogpu import _engine
from aiogpu._engine import Engine

from ._tools import ON_GPU, Slow, asynchronous, filled, pattern, same_bytes, tick, unsanitized
from .conftest import Loop

pytestmark = ON_GPU

MIB = 1 << 20


def _times(run: Loop) -> int:
    return 20 if run.name == "trio" else 100


def test_a_loop_that_ends_with_work_in_flight_leaves_the_next_one_alone(
    run: Loop, slow: Slow, engine: Engine
) -> None:
    """C36: one hundred loops (trio: twenty); each waits for its work when it ends."""
    target = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    source = torch.zeros(MIB, dtype=torch.uint8).pin_memory()

    @aiogpu.task
    async def child(value: int) -> None:
        slow(2)
        source.fill_(value)
        await aiogpu.copy_(target, source)

    async def main(value: int) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(child, value)
            await tick(2)
            group.cancel_scope.cancel()  # the wait ends; the copy does not

    for value in range(1, _times(run) + 1):
        run(main, value)
        filled(target.cpu(), value, f"loop {value}")


def test_work_whose_loop_does_not_wait_keeps_its_buffers(
    run: Loop, slow: Slow, engine: Engine, abandoned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C36 without grace: points become orphans, and end well."""
    monkeypatch.setenv("AIOGPU_GRACE", "0")
    targets = [torch.zeros(MIB, dtype=torch.uint8, device="cuda") for _ in range(_times(run))]

    @aiogpu.task
    async def child(value: int, target: torch.Tensor) -> None:
        await aiogpu.copy_(target, torch.full((MIB,), value, dtype=torch.uint8).pin_memory())

    async def main(value: int, target: torch.Tensor) -> None:
        engine.uploads.open()
        slow.on([stream.native for stream in engine.uploads.streams()], 3)
        async with anyio.create_task_group() as group:
            group.start_soon(child, value, target)
            await tick(5)
            group.cancel_scope.cancel()

    for value, target in enumerate(targets, 1):
        run(main, value, target)
        junk = [torch.full((MIB,), 238, dtype=torch.uint8).pin_memory() for _ in range(4)]
        del junk
    deadline, quiet = time.monotonic() + 10, 0
    while quiet < 20 and time.monotonic() < deadline:  # one point's end may start the next step
        quiet = 0 if _engine._notifier().orphans or engine.uploads.in_use else quiet + 1
        time.sleep(0.002)
    assert quiet == 20, "work of closed loops was never let go"
    torch.cuda.synchronize()
    for value, target in enumerate(targets, 1):
        host = target.cpu()
        # A copy that had not been submitted when its loop ended may be missing; torn it may not be.
        filled(host, int(host[0]), f"loop {value}")
        assert int(host[0]) in (0, value), f"loop {value} received {int(host[0])}"


@pytest.mark.parametrize("threads", [1, 4])
def test_many_loops_move_their_own_data_at_once(run: Loop, slow: Slow, threads: int) -> None:
    """C37, C49: 64 transfers up and down in each loop; every result is its own input."""
    failures: list[BaseException] = []

    @aiogpu.task
    async def there_and_back(seed: int) -> None:
        source = pattern(1000 + 7919 * (seed % 64), seed)
        x = await aiogpu.to_device(source)
        if seed % 8 == 0:
            slow(2)
        x = x.clone()
        same_bytes(await aiogpu.to_host(x), source, f"seed {seed}")

    async def main(first: int) -> None:
        await aiogpu.gather(*map(there_and_back, range(first, first + 64)))

    def thread(number: int) -> None:
        try:
            for repeat in range(3):
                run(main, number * 1000 + repeat * 100)
        except BaseException as error:
            failures.append(error)

    others = [threading.Thread(target=thread, args=(number,)) for number in range(1, threads)]
    for other in others:
        other.start()
    thread(0)
    for other in others:
        other.join(30)
    assert not any(other.is_alive() for other in others), "a loop hangs"
    if failures:
        raise failures[0]


def test_an_operation_can_be_awaited_from_another_threads_loop(slow: Slow) -> None:
    """C37: each waiter is awakened in its own loop."""
    handed: list[aiogpu.Operation[torch.Tensor]] = []
    ready = threading.Event()

    async def elsewhere() -> None:
        filled(await handed[0], 5, "seen from the other loop")

    def other() -> None:
        ready.wait(10)
        asyncio.run(elsewhere())

    @aiogpu.task
    async def main() -> None:
        x = torch.full((MIB,), 5, dtype=torch.uint8, device="cuda")
        slow()
        handed.append(aiogpu.to_host(x))
        ready.set()
        filled(await handed[0], 5, "seen from its own loop")
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()

    thread = threading.Thread(target=other)
    thread.start()
    asyncio.run(main())


@pytest.mark.timing
@asynchronous
@unsanitized
def test_waiting_for_long_kernels_costs_next_to_no_cpu(run: Loop, slow: Slow) -> None:
    """C39: 16 tasks on 8 streams, 2 s in all: below 5 % of one core."""

    @aiogpu.task
    async def waits(ms: float) -> None:
        slow(ms)
        await aiogpu.synchronize()

    async def main() -> tuple[float, float]:
        await aiogpu.gather(*[waits(1) for _ in range(16)])
        wall, cpu = time.perf_counter(), time.process_time()
        await aiogpu.gather(*[waits(1000) for _ in range(16)])
        return time.perf_counter() - wall, time.process_time() - cpu

    wall, cpu = run(main)
    assert wall > 0.9, f"16 kernels of 1 s took {wall:.2f} s"
    share = cpu / wall
    assert share < 0.05, f"waiting {wall:.2f} s took {cpu * 1e3:.0f} ms of CPU: {share:.1%} of a core"


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["task", "run_sync"])
def test_whatever_user_code_raises_reaches_the_waiter_and_leaves_nothing_behind(
    run: Loop, slow: Slow, engine: Engine, kind: type[BaseException], where: str
) -> None:
    """C40: stream and lease are back, and the stream is usable afterwards."""

    def boom() -> None:
        torch.ones(3, device="cuda")
        raise kind("from user code")

    @aiogpu.task
    async def fails() -> None:
        slow(5)
        if where == "run_sync":
            await aiogpu.run_sync(boom)
        else:
            await aiogpu.synchronize()
            boom()

    @aiogpu.task
    async def works() -> int:
        return int(await aiogpu.item(torch.ones(5, device="cuda").sum()))

    async def main() -> None:
        before = torch.cuda.current_stream()
        for _ in range(engine.settings.streams + 1):
            with pytest.raises(kind, match="from user code") as raised:
                await fails()
            assert any(entry.name == "boom" for entry in raised.traceback), "the traceback lost user code"
            assert torch.cuda.current_stream() == before
            assert engine.compute.in_use == 0, "the failed task has kept its stream"
        assert await aiogpu.gather(*[works() for _ in range(16)]) == (5,) * 16

    run(main)
