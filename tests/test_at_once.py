"""Large copies between page-locked memory and memory of the device, both there already: the call submits them
itself. Nothing is allocated, no thread takes part, and the loop waits for nothing.

Most tests use a device that moves only when told to, with small staging blocks.
"""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from _small_blocks import CHUNK, SLOT, small_virtual
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import aiogpu
from aiogpu.testing import VirtualDevice
from aiogpu.transfers import single

LARGE = 5 * CHUNK + 3


@pytest.fixture
def still(monkeypatch):
    """A device with small blocks that stands still, and no other way for what is larger than a slot."""
    monkeypatch.setattr(single, "DIRECT_BYTES", SLOT)
    with small_virtual(auto=False) as (device, engine):
        yield device, engine


@pytest.fixture
def no_threads(monkeypatch, still):
    """Nothing may be handed to a staging thread."""
    monkeypatch.setattr(still[1].staging, "submit", lambda *_, **__: pytest.fail("it went to a thread"))


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def up(device: VirtualDevice, there: torch.Tensor, host: torch.Tensor) -> aiogpu.Operation[Any]:
    return aiogpu.copy_(there, device.pin(host))


def down(device: VirtualDevice, there: torch.Tensor, host: torch.Tensor) -> aiogpu.Operation[Any]:
    return aiogpu.to_host(there, out=device.pin(host))


WAYS = pytest.mark.parametrize("way", [up, down])
Way = Callable[[VirtualDevice, torch.Tensor, torch.Tensor], "aiogpu.Operation[Any]"]


def ends(way: Way, there: torch.Tensor, host: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and destination."""
    return (host, there) if way is up else (there, host)


@WAYS
def test_the_call_submits_it_and_no_thread_takes_part(run, still, no_threads, way):
    device, engine = still

    async def main():
        there, host = pattern(LARGE), pattern(LARGE, 1)
        src, dst = ends(way, there, host)
        wanted = src.clone()
        operation = way(device, there, host)
        assert "in flight" in repr(operation)
        assert aiogpu.stats().inflight_bytes == LARGE
        device.run_all()
        assert await operation is (there if way is up else host)
        assert torch.equal(dst, wanted)
        assert aiogpu.stats().inflight_bytes == engine.downloads.in_use == 0

    run(main)


def test_a_nesting_with_a_destination_for_each_comes_down_at_once(run, still, no_threads):
    device, _ = still

    async def main():
        data = {"k": [pattern(LARGE), pattern(2 * LARGE, 1)], "empty": torch.empty(0), "n": 3}
        out = {
            "k": [device.pin(torch.zeros_like(x)) for x in data["k"]],
            "empty": device.pin(torch.empty(0)),
            "n": 3,
        }
        operation = aiogpu.to_host(data, out=out)
        device.run_all()
        assert await operation is out
        assert all(map(torch.equal, out["k"], data["k"]))

    run(main)


@WAYS
def test_it_comes_behind_what_the_callers_stream_held_and_before_nothing_of_it(run, still, no_threads, way):
    """The race detector of the device would raise where an edge is missing."""
    device, _ = still

    @aiogpu.task
    async def main():
        there, host = pattern(LARGE), pattern(LARGE, 1)
        _, dst = ends(way, there, host)
        device.launch(lambda: there.fill_(7), duration=1.0, reads=[there], writes=[there])
        operation = way(device, there, host)
        device.launch(duration=5.0)  # later work of the caller's that has nothing to do with it
        device.advance(0.5)
        await anyio.lowlevel.checkpoint()
        assert not operation.done()
        device.advance(1.0)
        await operation  # while the later kernel runs
        assert device.now == 1.5
        assert torch.equal(dst, host if way is up else torch.full_like(there, 7))
        device.auto = True  # for the end of the task itself
        device.run_all()

    run(main)


def test_its_order_is_there_as_soon_as_the_call_returns(run, still, no_threads):
    device, _ = still

    @aiogpu.task
    async def main():
        there, host, seen = torch.zeros(LARGE, dtype=torch.uint8), pattern(LARGE), []
        operation = up(device, there, host)
        assert await operation.ordered() is there
        assert not operation.done()
        device.launch(lambda: seen.append(there.clone()), reads=[there])
        device.auto = True  # for the end of the task itself
        device.run_all()
        await operation
        assert torch.equal(seen[0], host)

    run(main)


@WAYS
def test_what_finds_too_few_idle_copy_streams_goes_to_a_thread(run, still, way):
    """A stream takes about 1020 commands; behind a long kernel, copies without end would fill them up."""
    device, engine = still
    submitted = []
    submit = engine.staging.submit
    engine.staging.submit = lambda *args, **options: (submitted.append(1), submit(*args, **options))  # type: ignore[method-assign]
    at_once = engine.downloads.limit // 2
    count = at_once + 20

    async def main():
        latch = device.latch()
        pairs = [(pattern(LARGE, i), pattern(LARGE, 100 + i)) for i in range(count)]
        operations = [way(device, *pair) for pair in pairs]
        assert len(submitted) == (0 if way is up else 20)  # uploads wait for the caller's stream first
        assert sum("in flight" in repr(operation) for operation in operations) >= at_once
        latch.release()
        device.auto = True
        device.run_all()
        for pair, operation in zip(pairs, operations, strict=True):
            await operation
            assert torch.equal(*pair)
        assert len(submitted) == 20

    run(main)


def test_uploads_behind_a_long_kernel_do_not_hold_up_a_download_that_is_not(run, still):
    device, _ = still
    busy, other = device.open_stream("compute"), device.open_stream("compute")

    async def main():
        with device.on(busy):
            latch = device.latch()
            operations = [up(device, pattern(LARGE, i), pattern(LARGE, 50 + i)) for i in range(30)]
        with device.on(other):
            x = pattern(LARGE, 99)
            download = aiogpu.to_host(x)
        device.auto = True
        device.run_all()
        assert torch.equal(await download, x)
        assert not any(operation.done() for operation in operations)
        latch.release()
        for operation in operations:
            await operation

    run(main)


def test_what_is_in_host_memory_already_is_not_copied_by_the_call(run_asyncio, still, monkeypatch):
    """Such a copy takes as long as it is large, whoever makes it."""
    device, engine = still
    device.auto = True
    threads = []
    copy = device.copy
    monkeypatch.setattr(
        device, "copy", lambda *args: (threads.append(threading.current_thread()), copy(*args))
    )

    async def main():
        data = {"there": pattern(LARGE), "here": pattern(LARGE, 1)}
        out = {name: device.pin(torch.zeros_like(x)) for name, x in data.items()}
        engine.device = torch.device("meta")  # as if it were another one than the host's
        try:
            operation = aiogpu.to_host(data, out=out)
        finally:
            engine.device = device.device
        await operation
        assert all(torch.equal(out[name], x) for name, x in data.items())

    run_asyncio(main)
    assert threads
    assert threading.main_thread() not in threads


def copy_at_submission(monkeypatch: pytest.MonkeyPatch, device: VirtualDevice) -> None:
    """As CUDA's driver does: torch's own ``copy_``, on the thread that submits."""
    copy = device.copy

    def both(dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        dst.copy_(src)
        copy(dst, src, stream)

    monkeypatch.setattr(device, "copy", both)


class Sees(TorchDispatchMode):
    """Refuses copies, as modes that run nothing (fake tensors) do."""

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "copy_" not in str(fn)
        return fn(*args, **(kwargs or {}))


class Listens(TorchFunctionMode):
    def __init__(self) -> None:
        self.calls: list[str] = []
        super().__init__()

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(getattr(fn, "__name__", ""))
        return fn(*args, **(kwargs or {}))


@WAYS
def test_modes_of_the_callers_do_not_see_the_copy(run_asyncio, still, monkeypatch, way):
    device, _ = still
    device.auto = True
    copy_at_submission(monkeypatch, device)

    async def main():
        for mode in (Sees(), listening := Listens()):
            there, host = pattern(LARGE), pattern(LARGE, 1)
            src, _ = ends(way, there, host)
            wanted = src.clone()
            device.pin(host)
            with mode:
                operation = aiogpu.copy_(there, host) if way is up else aiogpu.to_host(there, out=host)
            await operation
            assert torch.equal(there, wanted)
            assert torch.equal(host, wanted)
        assert not {"is_conj", "is_pinned", "copy_"} & set(listening.calls)

    run_asyncio(main)


class Watchful(torch.Tensor):
    """Code of a user's, in every operation."""

    @classmethod
    def __torch_dispatch__(cls, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        with torch._C._DisableTorchDispatch():
            return fn(*args, **(kwargs or {}))


def test_a_destination_of_a_users_class_is_none_of_the_loops_thread(run_asyncio, still, monkeypatch):
    device, _ = still
    device.auto = True
    copy_at_submission(monkeypatch, device)

    async def main():
        there, host = pattern(LARGE), device.pin(pattern(LARGE, 1))
        mine = torch.Tensor._make_subclass(Watchful, there)
        operation = aiogpu.copy_(mine, host)
        assert await operation is mine
        assert torch.equal(there, host)

    run_asyncio(main)


@WAYS
def test_with_bounded_bytes_in_flight_it_waits_for_its_turn(run, still, way):
    device, _ = still

    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=LARGE):
            pairs = [(pattern(LARGE, i), pattern(LARGE, 9 + i)) for i in range(3)]
            operations = [way(device, *pair) for pair in pairs]
            assert aiogpu.stats().inflight_bytes <= LARGE
            device.auto = True
            device.run_all()
            for pair, operation in zip(pairs, operations, strict=True):
                await operation
                assert torch.equal(*pair)

    run(main)


@WAYS
def test_memory_lives_until_the_device_is_done_though_nobody_waits(run, still, no_threads, way):
    """C03."""
    device, _ = still

    async def main():
        there, host = pattern(LARGE), pattern(LARGE, 1)
        storages = [StorageWeakRef(x.untyped_storage()) for x in (there, host)]
        operation = way(device, there, host)
        del there, host
        with anyio.move_on_after(0.001):
            await operation
        del operation
        gc.collect()
        assert not any(storage.expired() for storage in storages)
        device.run_all()
        await aiogpu.synchronize("cpu")
        for _ in range(200):
            gc.collect()
            if all(storage.expired() for storage in storages):
                return
            await anyio.sleep(0.01)
        raise AssertionError("the memory is still held")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        run(main)


@WAYS
@pytest.mark.parametrize("nth", range(1, 6))
def test_whatever_submission_breaks_off_the_operation_fails_and_all_is_given_back(run, still, way, nth):
    """The event of the caller, the wait, the copy, the last event."""
    device, engine = still

    async def main():
        there, host = pattern(LARGE), pattern(LARGE, 1)
        device.fail_submit(nth, RuntimeError("broken"))
        operation = way(device, there, host)
        device.auto = True
        device.run_all()
        if nth <= 4:
            with pytest.raises(RuntimeError, match="broken"):
                await operation
        else:
            await operation
            device._failures.clear()
        assert aiogpu.stats().inflight_bytes == engine.downloads.in_use == 0
        assert aiogpu.stats().operations == 0
        again = way(device, there, host)
        await again
        assert torch.equal(there, host)

    run(main)


def test_memory_that_runs_out_is_waited_for_once_and_then_a_thread_does_it(run, still, until):
    device, engine = still

    async def main():
        there, host = pattern(LARGE), pattern(LARGE, 1)
        device.fail_submit(3, torch.OutOfMemoryError("none left"))
        operation = up(device, there, host)
        device.auto = True
        device.run_all()
        await operation
        assert torch.equal(there, host)
        await until(lambda: engine.downloads.in_use == engine.uploads.in_use == 0)

    run(main)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "columns first": lambda x: x.t().contiguous().t(),
    "a part": lambda x: x[1:3],
    "gaps": lambda x: x[:, ::2],
    "turned": lambda x: x.t(),
}
SQUARE = ("as it is", "columns first", "turned")


@WAYS
@pytest.mark.parametrize(
    ("a", "b"), [*itertools.product(SQUARE, SQUARE), ("a part", "a part"), ("gaps", "gaps")]
)
def test_every_order_in_memory_comes_out_right(run_asyncio, still, way, a, b):
    """Whichever of them can go at once."""
    device, _ = still
    device.auto = True
    there = FORMS[a](torch.arange(48 * 48).view(48, 48).to(torch.int16))
    host = FORMS[b](torch.arange(48 * 48).view(48, 48).to(torch.int16) + 1)

    async def main():
        src, dst = ends(way, there, host)
        wanted = src.clone()
        await way(device, there, host)
        assert torch.equal(dst, wanted)

    run_asyncio(main)


@WAYS
def test_modes_and_kinds_of_the_caller_change_nothing(run_asyncio, still, no_threads, way):
    device, _ = still
    device.auto = True

    async def main():
        with torch.inference_mode():
            inner = pattern(LARGE, 5)
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, lambda: torch.device("meta")):
            for there in (pattern(LARGE), inner):
                host = pattern(LARGE, 1)
                src, _ = ends(way, there, host)
                wanted = src.clone()
                with mode():
                    operation = way(device, there, host)
                await operation
                assert torch.equal(there, wanted)
                assert torch.equal(host, wanted)
        assert torch.is_grad_enabled()

    run_asyncio(main)


def test_a_destination_that_takes_part_in_autograd_is_marked_as_written(run_asyncio, still, no_threads):
    device, _ = still
    device.auto = True

    async def main():
        for way in (up, down):
            there, host = pattern(LARGE), pattern(LARGE, 1)
            _, dst = ends(way, there, host)
            version = dst._version
            await way(device, there, host)
            assert dst._version > version

    run_asyncio(main)


def test_debug_mode_sees_a_source_that_is_written_too_early(run_asyncio, still, no_threads):
    device, _ = still

    async def main():
        async with aiogpu.Runtime(debug=True):
            there, host = pattern(LARGE), pattern(LARGE, 1)
            operation = up(device, there, host)
            host.zero_()
            device.run_all()
            with pytest.raises(RuntimeError, match="written in place"):
                await operation

    run_asyncio(main)


def test_a_leaf_of_autograds_is_filled_as_under_no_grad(run_asyncio, still, no_threads):
    device, _ = still
    device.auto = True

    async def main():
        there = torch.zeros(LARGE, requires_grad=True)
        host = torch.arange(LARGE, dtype=torch.float32)
        await up(device, there, host)
        assert torch.equal(there, host)
        assert there.is_leaf
        assert there.requires_grad
        back = torch.zeros(LARGE)
        await down(device, there, back)
        assert torch.equal(back, host)
        assert not back.requires_grad

    run_asyncio(main)


@WAYS
def test_what_lies_otherwise_goes_to_a_thread(run_asyncio, still, way):
    """Element by element, through chunks: not on the loop's thread."""
    device, engine = still
    device.auto = True
    submitted = []
    submit = engine.staging.submit
    engine.staging.submit = lambda *args, **options: (submitted.append(1), submit(*args, **options))  # type: ignore[method-assign]

    async def main():
        there, host = torch.zeros(64, 48), torch.arange(64.0 * 48).view(48, 64).t()
        await way(device, there, host)
        assert torch.equal(there, host)
        assert submitted

    run_asyncio(main)


def test_small_ones_go_through_a_slot_as_ever(run_asyncio, still, no_threads):
    device, engine = still
    device.auto = True

    async def main():
        there, host = pattern(SLOT), pattern(SLOT, 1)
        await up(device, there, host)
        await down(device, there, host)
        assert engine.downloads.leases == 0

    run_asyncio(main)


def test_a_lost_device_is_reported_at_once(run_asyncio, still):
    device, _ = still

    async def main():
        operation = up(device, pattern(LARGE), pattern(LARGE, 1))
        device.fault()
        with pytest.raises(aiogpu.DeviceLostError):
            await operation
        with pytest.raises(aiogpu.DeviceLostError):
            await up(device, pattern(LARGE), pattern(LARGE, 1))

    run_asyncio(main)
