"""Device errors: a sticky one reaches everybody at once, any other belongs to one."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch

import aiogpu
from aiogpu import _engine
from aiogpu.drivers.cpu import CpuDriver
from aiogpu.testing import VirtualDevice, VirtualFault, installed, virtual_device

LARGE = 50_000  # elements: too large for a slot


def engine_of(device: VirtualDevice) -> _engine.Engine:
    engine = _engine.find_engine(device.device)
    assert engine is not None
    assert engine.driver is device
    return engine


async def outcome(awaitable: Any, into: list[Any], name: str) -> None:
    """Await it, and note the error and the time at which it came."""
    try:
        await awaitable
    except Exception as error:
        into.append((name, error, time.monotonic()))
    else:
        into.append((name, None, time.monotonic()))


def waits(vd: VirtualDevice) -> dict[str, Any]:
    """Every way to wait for the device, none of them able to end."""

    @aiogpu.task
    async def root():
        vd.launch()
        return torch.ones(2)

    @aiogpu.task
    async def inside():
        await aiogpu.to_host(torch.ones(2))

    return {
        "small upload": aiogpu.to_device(torch.ones(2)),
        "large upload": aiogpu.to_device(torch.ones(LARGE)),
        "upload in chunks": aiogpu.to_device(torch.ones(6 * 2**20)),
        "small download": aiogpu.to_host(torch.ones(2)),
        "large download": aiogpu.to_host(torch.ones(LARGE)),
        "download into": aiogpu.to_host(torch.ones(LARGE), out=torch.empty(LARGE)),
        "item": aiogpu.item(torch.ones(1)),
        "copy": aiogpu.copy_(torch.ones(2), torch.ones(2)),
        "large copy": aiogpu.copy_(torch.ones(LARGE), torch.ones(LARGE)),
        "synchronize": aiogpu.synchronize(),
        "synchronize device": aiogpu.synchronize("cpu"),
        "task's result": root(),
        "inside a task": inside(),
    }


# -- sticky faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["prompt", "never", "early"])
def test_a_sticky_fault_reaches_every_pending_wait_within_two_seconds(run, vd, until, mode):
    """C68, C31: also when no notification ever comes."""
    vd.notifications = mode

    async def main():
        vd.latch()
        ends: list[Any] = []
        async with anyio.create_task_group() as group:
            names = []
            for name, awaitable in waits(vd).items():
                names.append(name)
                group.start_soon(outcome, awaitable, ends, name)
            await until(lambda: aiogpu.current_runtime().reactor.sleeping)
            assert ends == []
            begin = time.monotonic()
            vd.fault()
        assert sorted(name for name, _, _ in ends) == sorted(names)
        for name, error, when in ends:
            assert isinstance(error, aiogpu.DeviceLostError), f"{name}: {error!r}"
            assert when - begin < 2, f"{name} took {when - begin:.1f} s"
        assert len({id(error) for _, error, _ in ends}) == len(ends), "waiters share an exception object"

    run(main)


def test_a_sticky_fault_reaches_every_loop(run, vd, until, blocking_until):
    """C68, C37."""
    ready: list[int] = []
    ends: list[Any] = []

    def body():
        async def main():
            async with anyio.create_task_group() as group:
                group.start_soon(outcome, aiogpu.to_device(torch.ones(2)), ends, "upload")
                group.start_soon(outcome, aiogpu.synchronize(), ends, "synchronize")
                await until(lambda: aiogpu.current_runtime().reactor.sleeping)
                ready.append(1)

        run(main)

    threads = [threading.Thread(target=body) for _ in range(3)]
    for thread in threads:
        thread.start()
    blocking_until(lambda: len(ready) == 3)
    begin = time.monotonic()
    vd.fault()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(ends) == 6
    assert all(isinstance(error, aiogpu.DeviceLostError) for _, error, _ in ends)
    assert all(when - begin < 2 for _, _, when in ends)


def test_calls_that_meet_the_fault_themselves_leave_the_cause_to_all_others(run, vd):
    """Submissions in many threads may meet it before and after the first of them has told: each raises."""

    async def main():
        operation = aiogpu.to_device(torch.ones(1))
        engine = engine_of(vd)
        vd.fault(VirtualFault("the first cause"))
        with pytest.raises(aiogpu.DeviceLostError) as waited:
            await operation
        for _ in range(2):
            with pytest.raises(aiogpu.DeviceLostError) as met:
                engine.rethrow(RuntimeError("a submission that meets it"))
            assert "the first cause" in str(met.value.__cause__)
            with pytest.raises(aiogpu.DeviceLostError) as later:
                await aiogpu.synchronize()
            assert "the first cause" in str(later.value.__cause__)
        assert "the first cause" in str(waited.value.__cause__)

    run(main)


def test_an_error_that_is_raised_again_keeps_no_frame_alive(vd):
    """Nor the tensors in it, which the next try may need."""
    engine = engine_of(vd)

    def fails() -> weakref.ref[torch.Tensor]:
        tensor = torch.ones(1)
        found = weakref.ref(tensor)
        try:
            try:
                raise torch.OutOfMemoryError("of memory")
            except RuntimeError as error:
                engine.rethrow(error)
        except torch.OutOfMemoryError:
            pass
        return found

    gc.collect()
    gc.disable()
    try:
        assert fails()() is None
    finally:
        gc.enable()


def test_after_a_fault_every_call_fails_at_once(run, vd):
    """C68: and carries the first cause."""

    async def main():
        first = aiogpu.to_device(torch.ones(1))
        vd.fault(VirtualFault("the first cause"))
        with pytest.raises(aiogpu.DeviceLostError):
            await first

        @aiogpu.task
        async def task():
            pytest.fail("ran on a lost device")

        one, large = torch.ones(1), torch.ones(LARGE)  # not part of what is timed
        calls: dict[str, Callable[[], Any]] = {
            "to_device": lambda: aiogpu.to_device(one),
            "large to_device": lambda: aiogpu.to_device(large),
            "to_host": lambda: aiogpu.to_host(one),
            "item": lambda: aiogpu.item(one),
            "copy_": lambda: aiogpu.copy_(one, one),
            "synchronize": lambda: aiogpu.synchronize(),
            "synchronize(device)": lambda: aiogpu.synchronize("cpu"),
            "run_sync": lambda: aiogpu.run_sync(int),
            "task": task,
        }
        for name, call in calls.items():
            quickest = 1.0
            for _ in range(5):  # a busy machine may take the processor away now and then
                begin = time.monotonic()
                with pytest.raises(aiogpu.DeviceLostError, match="the first cause") as caught:
                    await call()
                quickest = min(quickest, time.monotonic() - begin)
                assert isinstance(caught.value.__cause__, VirtualFault)
            assert quickest < 0.010, f"{name} took {quickest * 1e3:.1f} ms"

    run(main)


def test_the_message_names_the_oldest_operations_and_does_not_blame_the_waiter(run, vd, until):
    """C69."""

    async def main():
        oldest = aiogpu.to_host(torch.zeros(1000))
        second = aiogpu.to_device(torch.zeros(2000))
        innocent = aiogpu.item(torch.ones(1))
        vd.fault()
        with pytest.raises(aiogpu.DeviceLostError) as caught:
            await innocent
        text = str(caught.value)
        assert "submitted earlier" in text
        assert "may be the cause" in text
        assert "to_host, 3.9 KiB" in text
        assert "to_device, 7.8 KiB" in text
        assert text.index("to_host") < text.index("to_device"), "oldest first"
        assert text.count(__file__) >= 2, "without the lines that started them nobody finds them"
        assert "restart the process" in text
        for operation in (oldest, second):
            with pytest.raises(aiogpu.DeviceLostError):
                await operation

    run(main)


def test_a_wake_up_on_a_broken_device_never_returns_data(run, vd, until):
    """C32: the callback came, the work never ran."""
    vd.notifications = "late"

    async def main():
        operation = aiogpu.to_host(torch.ones(3))
        reactor = aiogpu.current_runtime().reactor
        await until(lambda: reactor.sleeping)
        vd.fault()
        vd.deliver()
        engine_of(vd).signal.post()
        with pytest.raises(aiogpu.DeviceLostError):
            await operation

    run(main)


def test_the_loop_and_the_host_go_on_without_the_device(run, vd):
    """C68."""

    async def main():
        operation = aiogpu.to_device(torch.ones(1))
        vd.fault()
        with pytest.raises(aiogpu.DeviceLostError):
            await operation
        assert (torch.ones(3) * 2).sum() == 6
        assert await anyio.to_thread.run_sync(lambda: 7) == 7
        await anyio.sleep(0.001)
        assert aiogpu.stats().operations == 0

    run(main)


def test_what_a_lost_device_held_is_leaked_on_purpose(run, vd):
    """Freeing memory that was recorded on a broken stream can abort the process."""
    reference = []

    async def main():
        source = torch.ones(100)
        reference.append(weakref.ref(source))
        operation = aiogpu.to_host(source)
        del source
        vd.fault()
        with pytest.raises(aiogpu.DeviceLostError):
            await operation

    run(main)
    gc.collect()
    assert reference[0]() is not None
    assert engine_of(vd).leaked


def test_leaving_a_runtime_does_not_wait_for_a_lost_device(run, vd):
    async def main():
        async with aiogpu.Runtime(grace=30):
            operation = aiogpu.to_device(torch.ones(1))
            vd.fault()
            with pytest.raises(aiogpu.DeviceLostError):
                await operation
            begin = time.monotonic()
        assert time.monotonic() - begin < 3

    run(main)


def test_a_task_that_ends_on_a_lost_device_raises_its_own_error(run, auto_vd):
    @aiogpu.task
    async def task():
        auto_vd.fault()
        raise KeyError("more telling than the device's error")

    async def main():
        with pytest.raises(KeyError, match="more telling"):
            await task()

    run(main)


def test_a_task_that_goes_on_after_the_fault_cannot_succeed(run, auto_vd):
    @aiogpu.task
    async def task():
        auto_vd.fault()
        return torch.ones(1)

    async def main():
        with pytest.raises(aiogpu.DeviceLostError):
            await task()

    run(main)


# -- errors of one operation -----------------------------------------------------------------------------


def test_an_error_that_is_not_sticky_belongs_to_one(run, vd, until, monkeypatch):
    async def main():
        operations = [aiogpu.to_device(torch.full((4,), n)) for n in range(3)]
        reactor = aiogpu.current_runtime().reactor
        (lane,) = reactor._lanes.values()
        broken = lane.points[1].event
        query = vd.query

        def failing(event):
            if event is broken and query(event):
                raise RuntimeError("invalid argument")
            return query(event)

        monkeypatch.setattr(vd, "query", failing)
        vd.run_all()
        assert (await operations[0]).tolist() == [0] * 4
        with pytest.raises(aiogpu.DeviceError, match="invalid argument") as caught:
            await operations[1]
        assert not isinstance(caught.value, aiogpu.DeviceLostError)
        assert "earlier may be the cause" in str(caught.value)
        assert (await operations[2]).tolist() == [2] * 4
        assert engine_of(vd).lost is None

    run(main)


class Failing(CpuDriver):
    """Copies fail while they run, as a device reports it: at the next event."""

    failing = True

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        if not self.failing:
            super().copy(dst, src, stream)
            return

        def broken() -> None:
            raise RuntimeError("copy engine: bad address")

        stream.native.put("run", broken)


@pytest.mark.parametrize("size", [4, 100_000], ids=["small", "large"])
@pytest.mark.parametrize("verb", [aiogpu.to_device, aiogpu.to_host], ids=["up", "down"])
def test_failures_that_are_not_sticky_use_up_no_staging_memory(run_asyncio, size, verb):
    """Three hundred failed transfers are more than there are slots or chunks."""
    driver = Failing()

    async def main():
        for _ in range(300 if size == 4 else 40):
            with pytest.raises(aiogpu.DeviceError, match="bad address"):
                await verb(torch.ones(size))
        driver.failing = False
        assert (await verb(torch.ones(size))).sum() == size
        assert aiogpu.stats().staging_bytes_in_use == 0

    with installed(driver):
        run_asyncio(main)


def test_out_of_memory_stays_torchs_own_exception(run, auto_vd):
    async def main():
        auto_vd.fail_submit(1, torch.OutOfMemoryError("no memory left"))
        with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
            await aiogpu.to_host(torch.ones(1))  # an upload would try once more
        assert (await aiogpu.to_device(torch.ones(1))).sum() == 1

    run(main)


@pytest.mark.parametrize("size", [4, LARGE], ids=["small", "large"])
def test_a_download_that_failed_does_not_write_the_callers_memory(run, auto_vd, until, size):
    async def main():
        out = torch.zeros(size)
        for nth in (1, 2, 3):
            auto_vd.fail_submit(nth, RuntimeError("injected"))
            with pytest.raises(RuntimeError, match="injected"):
                await aiogpu.to_host(torch.ones(size), out=out)
            if nth == 1:  # the copy itself never reached the device
                await until(lambda: aiogpu.stats().pending == 0)
                assert out.sum() == 0
            if size == 4 and nth == 2:
                break
        assert (await aiogpu.to_host(torch.ones(size), out=out)).sum() == size

    run(main)
    engine_of(auto_vd).leaked.clear()  # what nobody can know to be finished is kept on purpose


# -- a failure at every single submission ------------------------------------------------------------------


async def _program(vd: VirtualDevice) -> None:
    """Every verb, small and large, in tasks and outside."""

    @aiogpu.task
    async def child(x):
        y = torch.zeros_like(x)
        vd.launch(lambda: y.copy_(x + 1), reads=[x], writes=[y])
        return y

    @aiogpu.task
    async def parent(values):
        x = await aiogpu.to_device(values)
        y = await child(x)
        z = torch.zeros_like(y)
        vd.launch(lambda: z.copy_(y * 2), reads=[y], writes=[z])
        with aiogpu.stream():
            vd.launch(reads=[z])
        await aiogpu.copy_(z, z.clone())
        return await aiogpu.to_host(z)

    small, large = torch.arange(8), torch.arange(LARGE)
    assert torch.equal(await parent(small), (small + 1) * 2)
    assert torch.equal(await parent(large), (large + 1) * 2)
    assert await aiogpu.item(torch.tensor([5])) == 5
    out = torch.zeros(LARGE, dtype=torch.int64)
    await aiogpu.to_host(large, out=out)
    assert torch.equal(out, large)
    await aiogpu.synchronize()


def _submissions() -> int:
    import asyncio

    with virtual_device(races=False) as device:
        asyncio.run(_program(device))
        return device.submitted


def _state(engine: _engine.Engine) -> str:
    pools = [engine.compute, engine.uploads, engine.downloads, engine.chunked, engine.sides]
    return (
        f"leases={sum(pool.in_use for pool in pools)} slots={engine.slots.used_bytes} "
        f"chunks={engine.chunks.used_bytes}"
    )


CLEAN = "leases=0 slots=0 chunks=0"


def _causes(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in _causes(inner)]
    return [error]


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError], ids=["error", "out of memory"])
def test_a_failure_at_any_submission_is_raised_and_leaves_nothing_behind(run_asyncio, kind):
    problems: list[str] = []
    total = _submissions()
    assert total > 40

    def one(nth: int) -> None:
        with virtual_device(races=False) as device:
            device.fail_submit(nth, kind(f"injected at {nth}"))
            engine = engine_of(device)
            try:
                run_asyncio(_program, device, limit=5)
            except pytest.fail.Exception:
                problems.append(f"{nth}: hangs")
                return
            except BaseException as error:
                if not any(f"injected at {nth}" in str(cause) for cause in _causes(error)):
                    problems.append(f"{nth}: raises {error!r}")
            else:
                if kind is not torch.OutOfMemoryError:  # uploads try once more, and may well succeed
                    problems.append(f"{nth}: the failure was swallowed")
            if engine.lost is not None:
                problems.append(f"{nth}: the device counts as lost")
            deadline = time.monotonic() + 1  # a staging thread may still be on its way out
            while _state(engine) != CLEAN and time.monotonic() < deadline:
                time.sleep(0.001)
            if _state(engine) != CLEAN and not engine.leaked:
                problems.append(f"{nth}: {_state(engine)}")
            engine.leaked.clear()  # what nobody can know to be finished is kept on purpose
            try:
                run_asyncio(_program, device, limit=5)
            except BaseException as error:
                problems.append(f"{nth}: the next run fails with {error!r}")

    for nth in range(1, total + 1):
        one(nth)
    assert not problems, f"{len(problems)} problems in {total}:\n" + "\n".join(problems)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_stream_block_whose_fork_fails_gives_its_stream_back(run_asyncio, auto_vd, nth):
    @aiogpu.task
    async def task():
        auto_vd.fail_submit(nth, RuntimeError("injected"))
        with aiogpu.stream():
            pytest.fail("entered although it could not be ordered")

    async def main():
        with pytest.raises(RuntimeError, match="injected"):
            await task()

    run_asyncio(main)
    assert engine_of(auto_vd).compute.in_use == 0


# -- page-locked memory runs out -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, LARGE, 3 * 2**20], ids=["small", "large", "chunks"])
def test_without_page_locked_memory_results_are_right_and_one_warning_says_so(run, size):
    """C18."""
    device = VirtualDevice()
    device.pin_failures = 10**9

    async def main():
        source = torch.arange(size)
        for _ in range(3):
            up = await aiogpu.to_device(source)
            assert torch.equal(up, source)
            assert torch.equal(await aiogpu.to_host(up), source)
            assert torch.equal(await aiogpu.to_host(up, out=torch.zeros_like(source)), source)
        assert aiogpu.stats().staging_bytes == 0

    with pytest.warns(RuntimeWarning, match="could not page-lock") as caught:
        with installed(device):
            run(main)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) <= 2, messages  # once for each of the two pools
    assert all("AIOGPU_STAGING_BYTES" in message for message in messages)


def test_a_pinning_that_fails_once_leaves_the_books_as_they_were(run, auto_vd):
    """C18: the pool's accounting is unchanged, and it tries again."""

    async def main():
        engine = engine_of(auto_vd)
        before = engine.chunks.allocated_bytes
        auto_vd.pin_failures = 1
        source = torch.arange(LARGE)
        with pytest.warns(RuntimeWarning, match="could not page-lock"):
            assert torch.equal(await aiogpu.to_device(source), source)
        assert engine.chunks.allocated_bytes == before
        assert torch.equal(await aiogpu.to_device(source), source)
        assert engine.chunks.allocated_bytes == before + engine.chunks.nbytes

    run(main)


def test_asking_a_lost_gpu_for_captures_never_raises(monkeypatch):
    """It is asked where things are given back; whoever submits next meets the error, and says whose it is. Of
    the legacy stream CUDA does not say while a blocking stream is captured: nothing may be put on it then."""
    from aiogpu.drivers import cuda

    driver = object.__new__(cuda.CudaDriver)

    def ask(error: str) -> bool:
        def raises() -> bool:
            raise RuntimeError(error)

        monkeypatch.setattr(cuda, "_capturing", raises)
        return driver.capturing()

    assert not ask("CUDA error: an illegal memory access was encountered")
    assert ask("CUDA error: operation would make the legacy stream depend on a capturing blocking stream")
