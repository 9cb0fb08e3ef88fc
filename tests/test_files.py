"""Weights from files: exact, bounded, ended by whoever stops; what does not fit is refused before."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from _small_blocks import UnpinnedCpu, small_cpu

import aiogpu
from aiogpu import _safetensors, _tensorstream, files
from aiogpu.testing import VirtualDevice
from aiogpu.transfers import segments
from aiogpu.transfers.hostcopy import FileBytes

pytest.importorskip("safetensors", reason="the files extra is not installed")

from safetensors.torch import load_file, save_file

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
SHAPES = [(), (0,), (2, 0, 3), (1,), (3, 5), (300, 301)]


def content(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device) and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


@pytest.fixture
def small_groups(monkeypatch):
    """Groups of 1000 bytes, of which 4000 are under way at most."""
    monkeypatch.setattr(_tensorstream, "_GROUP_BYTES", 1000)
    monkeypatch.setattr(_tensorstream, "_AHEAD_BYTES", 4000)


@pytest.fixture
def many(tmp_path, small_groups):
    """A file of 100 tensors of 100 to 1999 bytes."""
    return save(
        tmp_path / "many.safetensors",
        {f"{i:03}": content((100 + 19 * i,), torch.uint8, i) for i in range(100)},
    )


async def collect(stream: Any) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in stream}


def assert_same(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    assert [name for name in expected if not same(loaded[name], expected[name])] == []


# -- load_safetensors ------------------------------------------------------------------------------------


def test_every_dtype_and_shape_is_what_safetensors_itself_loads(run, anydevice, tmp_path, small_groups):
    tensors = {f"{dtype}/{shape}": content(shape, dtype) for dtype in DTYPES for shape in SHAPES}
    path = save(tmp_path / "all.safetensors", tensors)

    async def main():
        loaded = await collect(aiogpu.load_safetensors(path))
        assert_same(loaded, load_file(path))

    run(main)


def test_dtypes_that_pack_several_numbers_into_a_byte(run_asyncio, tmp_path):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has none")
    path = tmp_path / "packed.safetensors"
    tensors = {
        "a": ("F4", [3, 8], bytes(range(12))),
        "b": ("F8_E8M0", [5], bytes(range(5))),
        "c": ("F4", [2], b"\x07"),
    }
    path.write_bytes(handmade(tensors))

    async def main():
        assert_same(await collect(aiogpu.load_safetensors(path)), load_file(path))

    run_asyncio(main)


def handmade(tensors: dict[str, tuple[str, list[int], bytes]], tail: bytes = b"") -> bytes:
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body + tail


def test_tensors_at_odd_addresses_are_exact(run_asyncio, tmp_path):
    """The format allows it, though its own writers align."""
    path = tmp_path / "odd.safetensors"
    data = bytes(range(8)) * 20_000
    path.write_bytes(
        handmade({"a": ("U8", [3], b"abc"), "b": ("F32", [40_000], data), "c": ("I64", [1], data[:8])})
    )

    async def main():
        assert_same(await collect(aiogpu.load_safetensors(path)), load_file(path))

    run_asyncio(main)


def test_tensors_come_in_the_order_of_the_file_and_only_those_asked_for(run, many):
    async def main():
        names = [name async for name, _ in aiogpu.load_safetensors(many)]
        assert names == [f"{i:03}" for i in range(100)]
        few = await collect(aiogpu.load_safetensors(many, names=["070", "005", "099"]))
        assert list(few) == ["005", "070", "099"]
        assert_same(few, {name: load_file(many)[name] for name in few})
        assert await collect(aiogpu.load_safetensors(many, names=[])) == {}

    run(main)


def test_the_loaded_tensors_are_nobodys_view_of_the_file(run_asyncio, tmp_path):
    """Writing to one must not change the file, nor keep it mapped."""
    path = save(tmp_path / "x.safetensors", {"x": torch.zeros(100_000)})

    async def main():
        loaded = await collect(aiogpu.load_safetensors(path, "cpu"))
        loaded["x"].fill_(1)
        assert load_file(path)["x"].sum() == 0
        assert not mapped(path)

    run_asyncio(main)


def test_dtype_converts_what_floats_and_nothing_else(run_asyncio, tmp_path):
    tensors = {
        "w": torch.randn(3, 100),
        "steps": torch.arange(5),
        "b": torch.randn(7, dtype=torch.float16),
        "mask": torch.tensor([True, False]),
    }
    path = save(tmp_path / "x.safetensors", tensors)

    async def main():
        loaded = await collect(aiogpu.load_safetensors(path, dtype=torch.bfloat16))
        assert_same(
            loaded, {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in tensors.items()}
        )

    run_asyncio(main)


def test_modes_of_the_caller_do_not_change_what_is_loaded(run, many):
    async def main():
        with torch.device("meta"), torch.inference_mode():
            loaded = await collect(aiogpu.load_safetensors(many, "cpu"))
        assert_same(loaded, load_file(many))
        assert not any(tensor.is_inference() for tensor in loaded.values())

    @aiogpu.task
    async def task():
        await main()

    run(task)


def test_an_empty_file_has_no_tensors(run_asyncio, tmp_path):
    path = save(tmp_path / "none.safetensors", {})

    async def main():
        assert await collect(aiogpu.load_safetensors(path)) == {}

    run_asyncio(main)


def test_progress_counts_the_bytes_up_to_the_end(run, many):
    seen = []

    async def main():
        async for _ in aiogpu.load_safetensors(many, progress=lambda done, total: seen.append((done, total))):
            pass

    run(main)
    total = sum(100 + 19 * i for i in range(100))
    assert seen[-1] == (total, total)
    assert seen[0] == (100, total)
    assert seen == sorted(seen)


def test_a_progress_bar_of_rich_can_show_it(run_asyncio, many):
    progress = pytest.importorskip("rich.progress", reason="rich is not installed")
    with progress.Progress(disable=True) as bar:
        task = bar.add_task("weights", total=None)

        async def main():
            def show(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            await collect(aiogpu.load_safetensors(many, progress=show))

        run_asyncio(main)
        assert bar.finished


# -- bounds ------------------------------------------------------------------------------------------------


def test_what_is_under_way_is_bounded_however_slow_the_consumer_is(run, many):
    async def main():
        stream = aiogpu.load_safetensors(many)
        async for _ in stream:
            under_way = stream._under_way
            assert len(under_way) <= 2 or sum(group.nbytes for group in under_way) <= 4000
            for _ in range(5):
                await anyio.lowlevel.checkpoint()

    run(main)


@pytest.mark.parametrize(("ahead", "at_least"), [(4000, 3), (0, 2)], ids=["bytes", "two always"])
def test_a_device_that_stands_still_stops_the_reading(run, vd, many, until, monkeypatch, ahead, at_least):
    monkeypatch.setattr(_tensorstream, "_AHEAD_BYTES", ahead)

    async def main():
        stream = aiogpu.load_safetensors(many)
        async with anyio.create_task_group() as group:
            group.start_soon(collect, stream)
            under_way = stream._under_way
            await until(lambda: len(under_way) >= at_least)
            for _ in range(50):
                await anyio.sleep(0.0005)
                assert len(under_way) <= 2 or sum(group.nbytes for group in under_way) <= ahead
            assert stream._to_come
            group.cancel_scope.cancel()
        await until(lambda: (vd.run_all(), not aiogpu.stats().operations)[1])

    run(main)


def test_the_next_tensors_travel_while_the_consumer_has_one(run, vd, many, until):
    """Nothing waits for the consumer: copies are in flight when it gets the first tensor."""

    async def main():
        stream = aiogpu.load_safetensors(many)
        async with anyio.create_task_group() as group:
            group.start_soon(move_until, vd, moved := [])
            await anext(stream)
            moved.append(True)
        assert len(stream._under_way) >= 2
        async with anyio.create_task_group() as group:
            group.start_soon(move_until, vd, moved := [])
            assert len(await collect(stream)) == 99
            moved.append(True)

    run(main)


async def move_until(device: VirtualDevice, moved: list[bool]) -> None:
    while not moved:
        device.run_all()
        await anyio.sleep(0.0005)


def test_the_loops_thread_opens_and_reads_nothing(run_asyncio, many, monkeypatch):
    threads = set()

    def noting(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def note(*args: Any) -> Any:
            threads.add((name, threading.current_thread() is threading.main_thread()))
            return original(*args)

        monkeypatch.setattr(kind, name, note)

    for name in ("__init__", "tensor", "bring_in"):
        noting(_safetensors.Shard, name)

    async def main():
        await collect(aiogpu.load_safetensors(many))

    run_asyncio(main)
    assert threads == {("__init__", False), ("tensor", False), ("bring_in", False)}


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux tells whether a page is in memory")
def test_pages_that_are_not_in_memory_are_read_first(run_asyncio, many, monkeypatch):
    """By the reader, so that no staging thread meets the disk."""
    read: list[tuple[int, int]] = []
    preadv = os.preadv

    def cold(fd: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        if flags == os.RWF_NOWAIT:
            raise BlockingIOError
        read.append((offset, len(buffers[0])))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cold)
    monkeypatch.setattr(_safetensors, "_PIECE", 256)

    async def main():
        assert_same(await collect(aiogpu.load_safetensors(many)), load_file(many))

    run_asyncio(main)
    size = os.path.getsize(many)
    data = sum(100 + 19 * i for i in range(100))
    assert sorted(read) == read  # front to back
    assert read[0][0] == size - data
    assert sum(nbytes for _, nbytes in read) == data


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux tells whether a page is in memory")
def test_file_systems_that_cannot_tell_are_believed(run_asyncio, many, monkeypatch):
    def cannot(*_: object) -> int:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "preadv", cannot)

    async def main():
        assert_same(await collect(aiogpu.load_safetensors(many)), load_file(many))

    run_asyncio(main)


@pytest.fixture
def from_the_file(monkeypatch):
    """A device that needs staging; no tensor is too small to be read from the file. What was read of it."""
    read: list[tuple[int, int]] = []
    real = FileBytes.read

    def noted(self: FileBytes, to: int, at: int, nbytes: int) -> None:
        read.append((self.start + at, nbytes))
        real(self, to, at, nbytes)

    monkeypatch.setattr(FileBytes, "read", noted)
    monkeypatch.setattr(_safetensors, "_SMALL", 0)
    with small_cpu(StagingCpu(), pinned_bytes=0):
        yield read


class StagingCpu(UnpinnedCpu):
    """... whose kernels are behind its copies, as a GPU's, as far as this needs it."""

    eager = False

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        with torch.no_grad():
            dst.copy_(src)


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="needs preadv")
def test_staging_reads_from_the_file_and_touches_no_page_of_its_mapping(
    run_asyncio, tmp_path, small_groups, from_the_file, monkeypatch
):
    """So that none is faulted in."""
    path = save(
        tmp_path / "x.safetensors", {f"{i}": content((300 + 19 * i,), torch.uint8, i) for i in range(100)}
    )
    moved: list[int] = []
    monkeypatch.setattr(segments, "move", lambda *args: moved.append(args[2]))

    async def main():
        assert_same(await collect(aiogpu.load_safetensors(path)), load_file(path))

    run_asyncio(main)
    assert not moved
    size = os.path.getsize(path)
    data = sum(300 + 19 * i for i in range(100))
    assert sum(nbytes for _, nbytes in from_the_file) == data
    covered = sorted(from_the_file)
    assert covered[0][0] == size - data
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(covered)), "every byte once"


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="needs preadv")
def test_a_read_that_comes_back_short_goes_on(run_asyncio, many, from_the_file, monkeypatch):
    preadv = os.preadv

    def short(fd: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
        return preadv(fd, [memoryview(buffers[0])[:37]], offset, flags)

    monkeypatch.setattr(os, "preadv", short)

    async def main():
        assert_same(await collect(aiogpu.load_safetensors(many)), load_file(many))

    run_asyncio(main)


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="needs preadv")
@pytest.mark.parametrize("how", ["shorter", "broken"])
def test_a_file_that_cannot_be_read_any_more_is_an_error_and_not_the_end_of_the_process(
    run_asyncio, many, from_the_file, monkeypatch, how
):
    preadv = os.preadv

    def fails(fd: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
        if isinstance(buffers[0], bytearray):
            return preadv(fd, buffers, offset, flags)
        if how == "shorter":
            return 0
        raise OSError(errno.EIO, "Input/output error")

    async def main():
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fails)
            with pytest.raises(OSError, match=r"shorter while it was being read|Input/output error"):
                await collect(aiogpu.load_safetensors(many))
        assert_same(await collect(aiogpu.load_safetensors(many)), load_file(many))

    run_asyncio(main)


# -- endings -----------------------------------------------------------------------------------------------


def mapped(path: Path) -> bool:
    """Is the file open or mapped in this process?"""
    if sys.platform != "linux":
        return False
    descriptors = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors.append(os.readlink(f"/proc/self/fd/{each}"))
    return str(path) in descriptors or str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("how", ["break", "exception", "aclose", "async with", "exhausted", "never begun"])
def test_leaving_early_ends_it_and_closes_the_file(run, many, until, how):
    async def fail_at_the_first():
        async for _ in aiogpu.load_safetensors(many):
            raise ZeroDivisionError

    async def main():
        if how == "break":
            async for _ in aiogpu.load_safetensors(many):
                break
        elif how == "exception":
            with pytest.raises(ZeroDivisionError):
                await fail_at_the_first()
        elif how == "aclose":
            stream = aiogpu.load_safetensors(many)
            await anext(stream)
            assert mapped(many) or sys.platform != "linux"
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        elif how == "async with":
            async with aiogpu.load_safetensors(many) as stream:
                await anext(stream)
        elif how == "exhausted":
            await collect(stream := aiogpu.load_safetensors(many))
            assert stream._closed
        else:
            aiogpu.load_safetensors(many)
        await until(lambda: not mapped(many), 1.0)  # what is in flight runs out by itself

    run(main)


def test_cancelling_the_consumer_ends_it(run, vd, many, until):
    """The device stands still, so that the consumer waits; its copies are in custody until it moves."""

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(collect, aiogpu.load_safetensors(many))
            await until(lambda: "copy" in [name for name, _ in vd.log])
            group.cancel_scope.cancel()
        assert aiogpu.stats().staging_bytes_in_use > 0
        await until(lambda: (vd.run_all(), not aiogpu.stats().operations)[1])
        await until(lambda: (vd.run_all(), not mapped(many))[1], 1.0)

    run(main)


def test_cancelling_ends_a_reader_in_the_midst_of_a_slow_disk(run, many, until, monkeypatch):
    """It is in a thread, and sees after each piece whether anybody wants the rest."""
    monkeypatch.setattr(_safetensors, "_PIECE", 100)
    reading, go_on, pieces = threading.Event(), threading.Event(), []

    def slow(self: Any, start: int, nbytes: int) -> bool:
        pieces.append(start)
        if len(pieces) == 3:
            reading.set()
            go_on.wait(10)
        return True

    monkeypatch.setattr(_safetensors.Shard, "_in_memory", slow)

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(collect, aiogpu.load_safetensors(many))
            await until(reading.is_set)
            group.cancel_scope.cancel()
        # Cancelled at once, although the thread is still in there.
        assert not go_on.is_set()
        go_on.set()
        await until(lambda: not mapped(many), 1.0)
        assert len(pieces) == 3

    run(main)


@pytest.mark.parametrize("looked_at", ["0", "2"], ids=["opening", "reading"])
def test_what_a_cancelled_reader_still_finds_is_let_go_of(run, tmp_path, until, monkeypatch, looked_at):
    """Also while somebody keeps the cancellation, whose frames lead to all that was under way."""
    path = save(
        tmp_path / "large.safetensors", {f"{i}": content((100_000,), torch.uint8, i) for i in range(3)}
    )
    reading, go_on = threading.Event(), threading.Event()
    kept: list[BaseException] = []
    tensor = _safetensors.Shard.tensor

    def slow(self: Any, *args: Any) -> torch.Tensor:
        found = tensor(self, *args)
        if args[0] == looked_at and not reading.is_set():  # opening looks at the first tensor of each dtype
            reading.set()
            go_on.wait(10)
        return found

    async def consume() -> None:
        try:
            await collect(aiogpu.load_safetensors(path))
        except BaseException as error:
            kept.append(error)
            raise

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            await until(reading.is_set)
            group.cancel_scope.cancel()
        go_on.set()
        await until(lambda: not mapped(path), 1.0)
        assert kept

    monkeypatch.setattr(_safetensors.Shard, "tensor", slow)
    run(main)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped where")
def test_what_the_loops_thread_might_read_is_no_part_of_the_mapped_file(run_asyncio, tmp_path, monkeypatch):
    """A page of it may have been dropped; small transfers would wait for the disk in the call."""
    sizes = {"small": 100, "border": 64 * 1024, "large": 64 * 1024 + 1}
    path = save(tmp_path / "x.safetensors", {k: torch.ones(n, dtype=torch.uint8) for k, n in sizes.items()})
    inside = {}
    to_device = _tensorstream.to_device

    def noting(sources: list[torch.Tensor], *args: Any, **options: Any) -> Any:
        inside.update({source.nbytes: is_in_mapping(path, source.data_ptr()) for source in sources})
        return to_device(sources, *args, **options)

    monkeypatch.setattr(_tensorstream, "to_device", noting)

    async def main():
        await collect(aiogpu.load_safetensors(path))

    run_asyncio(main)
    assert inside == {100: False, 64 * 1024: False, 64 * 1024 + 1: True}


def is_in_mapping(path: Path, address: int) -> bool:
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(first <= address < last for first, last in ranges)


def test_the_end_of_the_loop_closes_the_file(run, many, blocking_until):
    kept = []

    async def main():
        stream = aiogpu.load_safetensors(many)
        await anext(stream)
        kept.append(stream)

    run(main)
    kept.clear()
    gc.collect()
    blocking_until(lambda: not mapped(many), 1.0)


def test_one_task_at_a_time(run, vd, many, until):
    async def main():
        stream = aiogpu.load_safetensors(many)
        async with anyio.create_task_group() as group:
            group.start_soon(collect, stream)
            await until(lambda: stream._running)
            with pytest.raises(RuntimeError, match="one at a time"):
                await anext(stream)
            group.cancel_scope.cancel()
        vd.run_all()

    run(main)


@pytest.mark.parametrize("where", ["finding", "reading", "copying"])
def test_closing_it_ends_the_iteration_of_the_task_that_waits_in_it(run, vd, many, until, monkeypatch, where):
    gate, inside = threading.Event(), threading.Event()

    def held(real: Any) -> Any:
        def call(*args: Any) -> Any:
            result = real(*args)
            inside.set()
            assert gate.wait(10)
            return result

        return call

    if where == "finding":
        monkeypatch.setattr(_tensorstream, "_groups", held(_tensorstream._groups))
    elif where == "reading":
        monkeypatch.setattr(_safetensors.Shard, "bring_in", held(_safetensors.Shard.bring_in))

    async def main():
        stream = aiogpu.load_safetensors(many)
        async with anyio.create_task_group() as group:
            group.start_soon(collect, stream)
            await until(lambda: vd.submitted > 0 if where == "copying" else inside.is_set())
            await stream.aclose()
            gate.set()
            while stream._running:
                vd.run_all()
                await anyio.sleep(0.0005)
        vd.run_all()
        await until(lambda: not mapped(many))

    run(main)


def test_a_failed_copy_reaches_the_consumer_and_ends_it(run, vd, many, until):
    async def main():
        vd.fail_submit(3, ZeroDivisionError("the third submission"))
        stream = aiogpu.load_safetensors(many)
        async with anyio.create_task_group() as group:
            group.start_soon(move_until, vd, moved := [])
            with pytest.raises(ZeroDivisionError, match="third"):
                await collect(stream)
            moved.append(True)
        assert stream._closed
        await until(lambda: (vd.run_all(), not aiogpu.stats().operations)[1])

    run(main)


def test_a_failing_progress_callback_reaches_the_consumer(run_asyncio, many):
    async def main():
        stream = aiogpu.load_safetensors(many, progress=lambda done, total: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await collect(stream)
        assert stream._closed

    run_asyncio(main)


# -- several files -------------------------------------------------------------------------------------------


def sharded(folder: Path, weight_map: dict[str, str] | None = None) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = {f"layer.{i}": content((200 + i,), torch.float32, i) for i in range(12)}
    places = {name: f"model-{i % 3 + 1}-of-3.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save(folder / file, {name: tensors[name] for name in tensors if places[name] == file})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places | (weight_map or {})}))
    return index, tensors


def test_an_index_loads_all_its_shards(run, tmp_path, small_groups):
    index, tensors = sharded(tmp_path)

    async def main():
        loaded = await collect(aiogpu.load_safetensors(str(index)))
        assert_same(dict(sorted(loaded.items())), dict(sorted(tensors.items())))
        names = await collect(aiogpu.load_safetensors(index, names=["layer.1", "layer.2"]))
        assert sorted(names) == ["layer.1", "layer.2"]

    run(main)


def test_a_list_of_files_is_loaded_in_its_order(run_asyncio, tmp_path):
    paths = [save(tmp_path / f"{name}.safetensors", {name: torch.ones(3)}) for name in "cab"]

    async def main():
        assert list(await collect(aiogpu.load_safetensors(paths))) == ["c", "a", "b"]
        assert list(await collect(aiogpu.load_safetensors(iter(paths)))) == ["c", "a", "b"]

    run_asyncio(main)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/fd")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_file_that_is_replaced_while_it_is_opened_is_not_mixed_with_its_successor(
    run_asyncio, tmp_path, monkeypatch, when
):
    old = {"a": content((50_000,), torch.int32, 1)}
    new = {"b": torch.ones(7), "a": content((60_000,), torch.int32, 2)}
    path = save(tmp_path / "weights.safetensors", old)
    newer = save(tmp_path / "newer.safetensors", new)
    real = os.open

    def replacing(*args: Any, **kwargs: Any) -> int:
        if when == "before" and newer.exists():
            newer.replace(path)
        fd = real(*args, **kwargs)
        if newer.exists():
            newer.replace(path)
        return fd

    monkeypatch.setattr(os, "open", replacing)

    async def main():
        assert_same(await collect(aiogpu.load_safetensors(path)), new if when == "before" else old)
        assert not newer.exists()

    run_asyncio(main)


# -- what is wrong with files --------------------------------------------------------------------------------


GOOD = {"a": ("F32", [2], bytes(8))}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no safetensors file"),
        (b"abc", "no safetensors file"),
        (b"\x80\x02}q\x00." + bytes(100), "convert pickled checkpoints"),
        (handmade(GOOD)[:-1], "damaged, incomplete"),
        (handmade(GOOD, tail=b"x"), "damaged, incomplete"),
        (handmade({"a": ("Q9", [2], bytes(8))}), "Q9"),
        (handmade({"a": ("F32", [3], bytes(8))}), "damaged"),
        (struct.pack("<Q", 5) + b"{nope", "damaged"),
    ],
    ids=["empty", "short", "pickle", "truncated", "too long", "unknown dtype", "wrong shape", "no header"],
)
def test_bad_files_are_refused_by_name_before_the_first_tensor(run_asyncio, tmp_path, data, says):
    good = save(tmp_path / "good.safetensors", {"g": torch.ones(3)})
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(data)
    seen = []

    async def main():
        with pytest.raises(ValueError, match=says) as caught:
            await collect(aiogpu.load_safetensors([good, bad], progress=lambda *done: seen.append(done)))
        assert "bad.safetensors" in str(caught.value)

    run_asyncio(main)
    assert not seen


def test_a_dtype_that_this_torch_lacks_is_named_before_the_first_tensor(run_asyncio, tmp_path, monkeypatch):
    path = tmp_path / "new.safetensors"
    path.write_bytes(handmade({"a": ("F32", [2], bytes(8)), "b": ("F6_E2M3", [4], bytes(3))}))

    async def main():
        with pytest.raises(ValueError, match=r"'b' is of dtype F6_E2M3, which torch .* cannot load"):
            await collect(aiogpu.load_safetensors(path))

    run_asyncio(main)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nope", "no weight_map"),
        ("{}", "no weight_map"),
        ('{"weight_map": [1]}', "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "beside their index"),
        ('{"weight_map": {"a": "/etc/x.safetensors"}}', "beside their index"),
        ('{"weight_map": {"a": "..\\\\x.safetensors"}}', "beside their index"),
        ('{"weight_map": {"a": "x.bin"}}', "beside their index"),
    ],
)
def test_a_bad_index_is_refused(run_asyncio, tmp_path, text, says):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)

    async def main():
        with pytest.raises(ValueError, match=says):
            await collect(aiogpu.load_safetensors(index))

    run_asyncio(main)


def test_an_index_that_does_not_fit_its_shards_is_refused(run_asyncio, tmp_path):
    index, _ = sharded(tmp_path, {"layer.99": "model-1-of-3.safetensors"})

    async def main():
        with pytest.raises(ValueError, match=r"places 'layer.99' in 'model-1-of-3.safetensors'"):
            await collect(aiogpu.load_safetensors(index))
        (tmp_path / "model-2-of-3.safetensors").unlink()
        with pytest.raises(FileNotFoundError):
            await collect(aiogpu.load_safetensors(index))

    run_asyncio(main)


def test_misuse_is_named(run_asyncio, tmp_path, many):
    async def refused(error: type[Exception], says: str, *args: Any, **options: Any) -> None:
        with pytest.raises(error, match=says):
            await collect(aiogpu.load_safetensors(*args, **options))

    async def main():
        await refused(TypeError, "a file's name, or a list", 3)
        await refused(TypeError, "this one is 3", [many, 3])
        await refused(ValueError, "an empty list", [])
        await refused(TypeError, "torch.dtype", many, dtype="float16")
        await refused(TypeError, r"names=\['abc'\]", many, names="abc")
        await refused(ValueError, "did you mean '042'", many, names=["0042"])
        await refused(ValueError, "'000' is in both", [many, many])
        await refused(IsADirectoryError, "name the .safetensors file", tmp_path)
        await refused(FileNotFoundError, "nowhere", tmp_path / "nowhere.safetensors")
        await refused(ValueError, "no driver for", many, "xla")

    run_asyncio(main)


def test_without_the_package_the_call_says_how_to_get_it(monkeypatch, many):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install aiogpu\[files\]"):
        aiogpu.load_safetensors(many)


# -- load_state_dict -----------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.head = torch.nn.Linear(5, 7, bias=not tied)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    model = Net(**options)
    for buffer in model.buffers():
        buffer.fill_(seed)
    return model


def saved(path: Path, model: torch.nn.Module, **changes: torch.Tensor | None) -> Path:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()} | changes
    return save(path, {name: tensor for name, tensor in state.items() if tensor is not None})


@pytest.fixture
def weights(tmp_path):
    return saved(tmp_path / "net.safetensors", net(1))


def assert_holds(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    assert_same(dict(model.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_gets_its_weights(run, anydevice, weights, assign):
    model = net(2)
    before = dict(model.named_parameters())
    seen = []

    @aiogpu.task
    async def main():
        found = await aiogpu.load_state_dict(
            model, weights, assign=assign, progress=lambda done, total: seen.append((done, total))
        )
        assert (found.missing_keys, found.unexpected_keys) == ([], [])

    run(main)
    assert_holds(model, net(1))
    kept = [name for name, parameter in model.named_parameters() if parameter is before[name]]
    assert kept == ([] if assign else list(before))
    assert all(isinstance(x, torch.nn.Parameter) and x.requires_grad for x in model.parameters())
    assert seen[-1][0] == seen[-1][1]


def test_a_models_own_dtype_stays_unless_assigned(run_asyncio, weights):
    async def main():
        copied, assigned = net(2).half(), net(2).half()
        await aiogpu.load_state_dict(copied, weights)
        expected = net(2).half()
        expected.load_state_dict(load_file(weights))
        assert_holds(copied, expected)
        await aiogpu.load_state_dict(assigned, weights, assign=True)
        assert_holds(assigned, net(1))

    run_asyncio(main)


def test_a_meta_model_is_filled_by_assigning(run, anydevice, weights):
    with torch.device("meta"):
        model = Net()

    async def main():
        with pytest.raises(ValueError, match="pass assign=True"):
            await aiogpu.load_state_dict(model, weights)
        await aiogpu.load_state_dict(model, weights, assign=True, device="cpu")

    run(main)
    assert_holds(model, net(1))
    assert model.embed.weight.requires_grad


@pytest.mark.parametrize("assign", [False, True])
def test_tied_weights_may_be_in_the_file_once_and_stay_tied(run_asyncio, tmp_path, assign):
    path = saved(tmp_path / "tied.safetensors", net(1, tied=True), **{"head.weight": None})
    model = net(2, tied=True)

    async def main():
        found = await aiogpu.load_state_dict(model, path, assign=assign)
        assert (found.missing_keys, found.unexpected_keys) == ([], [])

    run_asyncio(main)
    assert_holds(model, net(1, tied=True))
    assert model.head.weight is model.embed.weight


BAD_STATES = {
    "missing": ({"head.bias": None}, 'Missing key.*"head.bias"'),
    "unexpected": ({"other": torch.ones(2)}, 'Unexpected key.*"other"'),
    "shape": (
        {"head.bias": torch.ones(9)},
        r"size mismatch for head.bias: the file has \[9\], the model \[7\]",
    ),
    "same size": ({"head.weight": torch.ones(5, 7)}, "size mismatch for head.weight"),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("case", BAD_STATES)
def test_a_model_that_does_not_fit_is_left_as_it_was(run_asyncio, tmp_path, case, assign):
    changes, says = BAD_STATES[case]
    path = saved(tmp_path / "net.safetensors", net(1), **changes)
    model = net(2)

    async def main():
        with pytest.raises(RuntimeError, match=says) as caught:
            await aiogpu.load_state_dict(model, path, assign=assign)
        assert "nothing was loaded" in str(caught.value)
        with pytest.raises(RuntimeError):  # torch agrees
            net(2).load_state_dict(load_file(path))

    run_asyncio(main)
    assert_holds(model, net(2))


@pytest.mark.parametrize("assign", [False, True])
def test_not_strict_loads_what_fits_and_tells_the_rest(run_asyncio, tmp_path, assign):
    path = saved(tmp_path / "net.safetensors", net(1), other=torch.ones(2), **{"head.bias": None})
    model, expected = net(2), net(2)

    async def main():
        return await aiogpu.load_state_dict(model, path, strict=False, assign=assign)

    found = run_asyncio(main)
    assert found == expected.load_state_dict(load_file(path), strict=False)
    assert found.missing_keys == ["head.bias"]
    assert found.unexpected_keys == ["other"]
    assert_holds(model, expected)


def test_a_buffer_that_old_files_lack_is_not_missed(run_asyncio, tmp_path):
    """As in torch: the counter of batch norms came later than some checkpoints."""
    path = saved(tmp_path / "old.safetensors", net(1), **{"norm.num_batches_tracked": None})
    model, expected = net(2), net(2)

    async def main():
        return await aiogpu.load_state_dict(model, path)

    found = run_asyncio(main)
    assert found == expected.load_state_dict(load_file(path))
    assert_holds(model, expected)


class Renames(torch.nn.Module):
    """Loads what older versions saved under another name, and keeps something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "old_w" in state:
            state[prefix + "w"] = state.pop(prefix + "old_w")
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("assign", [False, True])
def test_modules_that_take_part_in_loading_do(run_asyncio, tmp_path, assign):
    path = save(
        tmp_path / "x.safetensors",
        {"0.old_w": torch.arange(3.0), "1.weight": torch.ones(1, 2), "1.bias": torch.ones(1)},
    )
    model = torch.nn.Sequential(Renames(), torch.nn.Linear(2, 1))

    async def main():
        found = await aiogpu.load_state_dict(model, path, assign=assign)
        assert (found.missing_keys, found.unexpected_keys) == ([], [])
        assert torch.equal(model[0].w, torch.arange(3.0))
        (tmp_path / "x.safetensors").unlink()
        save(path, {"0.other": torch.ones(3)})
        with pytest.raises(RuntimeError, match=r"0\.other"):
            await aiogpu.load_state_dict(model, path, assign=assign)

    run_asyncio(main)


def test_hooks_are_called(run_asyncio, weights):
    model, seen = net(2), []
    model.register_load_state_dict_post_hook(lambda module, keys: seen.append(keys))

    async def main():
        await aiogpu.load_state_dict(model, weights)

    run_asyncio(main)
    assert len(seen) == 1
    assert_holds(model, net(1))


@pytest.mark.parametrize("assign", [False, True])
def test_a_cancelled_load_ends_at_once(run, vd, weights, until, assign):
    model = net(2)

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: aiogpu.load_state_dict(model, weights, assign=assign))
            await until(lambda: "copy" in [name for name, _ in vd.log])
            group.cancel_scope.cancel()
        await until(lambda: (vd.run_all(), not mapped(weights))[1], 1.0)

    run(main)
    assert_holds(model, net(2))  # nothing had arrived


def test_misuse_of_load_state_dict_is_named(run_asyncio, weights):
    async def main():
        with pytest.raises(TypeError, match=r"into a torch\.nn\.Module, not a dict"):
            await aiogpu.load_state_dict({}, weights)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="pass assign=True, or move the model"):
            await aiogpu.load_state_dict(net(), weights, device="cpu")

    run_asyncio(main)


def test_a_models_memory_in_the_host_is_written_off_the_loops_thread(run_asyncio, weights, monkeypatch):
    """It may be gigabytes."""
    threads: list[threading.Thread] = []
    put = files._Fit.put

    def noted(*args: Any) -> None:
        threads.append(threading.current_thread())
        put(*args)

    monkeypatch.setattr(files._Fit, "put", noted)
    model = net()
    run_asyncio(aiogpu.load_state_dict, model, weights)
    assert_holds(model, net(1))
    assert threads
    assert threading.main_thread() not in threads


def test_other_coroutines_run_meanwhile(run_asyncio, many):
    """C43: the loads of several files take turns with everybody else."""

    async def main():
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(beat())
        loads = await aiogpu.gather(*[collect(aiogpu.load_safetensors(many)) for _ in range(5)])
        beating.cancel()
        for loaded in loads:
            assert_same(loaded, load_file(many))
        assert beats > 100

    run_asyncio(main)


@pytest.mark.timeout(120)
def test_the_example_runs_as_it_stands():
    pytest.importorskip("rich", reason="the examples extra is not installed")
    root = Path(aiogpu.__file__).resolve().parent.parent
    command = [sys.executable, "-W", "error", "examples/load_model.py", "--layers", "2", "--width", "64"]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "gap max" in done.stdout
