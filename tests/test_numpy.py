"""numpy arrays go up as they are, whatever strides, byte order and flags, and are never written (C86)."""

from __future__ import annotations

import mmap

import pytest
import torch
from _small_blocks import CHUNK, SLOT, small_cpu, small_virtual

import aiogpu

numpy = pytest.importorskip("numpy")


@pytest.fixture(params=["virtual", "through chunks", "cpu"])
def small(request: pytest.FixtureRequest):
    """A device with small blocks: results page-locked, results through chunks, the CPU."""
    if request.param == "cpu":
        with small_cpu():
            yield
    else:
        with small_virtual(pinned_bytes=0 if request.param == "through chunks" else 2**30):
            yield


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


ARRAYS = {
    "plain": lambda x: x,
    "read-only": read_only,
    "reversed": lambda x: x[::-1],
    "both ways": lambda x: x.reshape(-1, 4)[::-1, ::-2],
    "transposed": lambda x: x.reshape(-1, 4).T,
    "fortran order": lambda x: numpy.asfortranarray(x.reshape(-1, 4)),
    "big-endian": lambda x: x.astype(">f4"),
    "big-endian, reversed": lambda x: x.astype(">f4")[::-1],
    "broadcast": lambda x: numpy.broadcast_to(x, (3, x.size)),
    "misaligned": lambda x: numpy.frombuffer(b"\0" + x.tobytes(), dtype=numpy.uint8)[1:].view("f4"),
    "matrix of one": lambda x: x[:1].reshape(1, 1),
    "0-d": lambda x: numpy.array(x[0]),
    "empty": lambda x: x[:0],
    "a subclass": lambda x: x.view(type("Sub", (numpy.ndarray,), {})),
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize("count", [32, 1600], ids=["small", "large"])
def test_every_array_arrives_exactly_and_stays_as_it_was(run_asyncio, small, make, count):
    array = make(numpy.arange(count, dtype="f4"))
    expected = array.astype("f4").copy()

    async def main():
        there = await aiogpu.to_device(array)
        assert type(there) is torch.Tensor
        assert there.dtype is torch.float32
        assert there.shape == expected.shape
        assert (there.numpy() == expected).all()
        there.zero_()  # the result's own memory
        assert (array == expected).all()
        nested = await aiogpu.to_host({"a": (array,)})
        assert (nested["a"][0].numpy() == expected).all()

    run_asyncio(main)


@pytest.mark.parametrize(
    "code", ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
)
def test_every_dtype_that_torch_has_arrives_exactly(run_asyncio, small, code):
    array = numpy.arange(700).astype(code)

    async def main():
        there = await aiogpu.to_device(array)
        assert there.numpy().dtype == array.dtype
        assert (there.numpy() == array).all()

    run_asyncio(main)


def test_a_read_only_memory_map_needs_no_copy_and_no_warning(run_asyncio, small, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 20)

    async def main():
        with open(path, "rb") as file:  # noqa: ASYNC230
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            array = numpy.frombuffer(mapped, dtype=numpy.uint8)
            there = await aiogpu.to_device(array)
            assert there.numpy().tobytes() == path.read_bytes()

    run_asyncio(main)


def test_an_array_is_read_at_the_call_when_small_and_before_the_await_returns_when_large(run_asyncio, small):
    async def main():
        tiny = numpy.zeros(SLOT // 4, dtype="f4")
        operation = aiogpu.to_device(tiny)
        tiny += 1
        assert (await operation).sum() in (0, tiny.sum())  # the CPU's copies may come later than the call
        large = numpy.zeros(5 * CHUNK, dtype="u1")
        there = await aiogpu.to_device(large)
        large += 1
        assert there.sum() == 0

    run_asyncio(main)


@pytest.mark.parametrize("count", [32, 1600], ids=["small", "large"])
def test_out_may_be_a_writable_array(run_asyncio, small, count):
    async def main():
        x = torch.arange(count, dtype=torch.float32)
        out = numpy.zeros(count, dtype="f4")
        assert await aiogpu.to_host(x, out=out) is out
        assert (out == x.numpy()).all()
        every_second = numpy.zeros((2, 2 * count), dtype="f4")[1, ::2]
        await aiogpu.to_host(x, out=every_second)
        assert (every_second == x.numpy()).all()

    run_asyncio(main)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: read_only(numpy.zeros(4, "f4")), "read-only numpy array: pass a writable copy"),
        (lambda: numpy.zeros(4, "f4")[::-1], "that torch cannot view: use a C-contiguous, native one"),
        (lambda: numpy.zeros(4, ">f4"), "that torch cannot view: use a C-contiguous, native one"),
        (lambda: numpy.zeros(5, "f4"), r"torch.float32 tensor of shape \(5,\).* where data gives"),
        (lambda: numpy.zeros(4, "f8"), "torch.float64 tensor of shape"),
    ],
    ids=["read-only", "reversed", "big-endian", "shape", "dtype"],
)
def test_an_array_that_cannot_be_written_into_is_refused_before_any_work(run_asyncio, vd, make, remedy):
    async def main():
        out = make()
        with pytest.raises(ValueError, match=remedy):
            aiogpu.to_host(torch.ones(4), out=out)
        assert not out.any()
        assert vd.submitted == 0

    run_asyncio(main)


def test_numpy_scalars_pass_by_identity(run_asyncio, small):
    async def main():
        scalar = numpy.float32(3)
        assert await aiogpu.to_device(scalar) is scalar
        assert (await aiogpu.to_host([scalar]))[0] is scalar

    run_asyncio(main)
