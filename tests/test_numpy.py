"""numpy arrays go up as they are, whatever strides, byte order and flags, and are never written (C86)."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from _small_blocks import CHUNK, SLOT, small_cpu, small_virtual
from conftest import Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiogpu

numpy = pytest.importorskip("numpy")


CODES = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


def small_device(name: str) -> Any:
    if name == "cpu":
        return small_cpu()
    return small_virtual(pinned_bytes=0 if name == "through chunks" else 2**30)


@pytest.fixture(params=["virtual", "through chunks", "cpu"])
def small(request: pytest.FixtureRequest):
    """A device with small blocks: results page-locked, results through chunks, the CPU."""
    with small_device(request.param):
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


@pytest.mark.parametrize("code", CODES)
def test_every_dtype_that_torch_has_arrives_exactly(run_asyncio, small, code):
    array = numpy.arange(700).astype(code)

    async def main():
        there = await aiogpu.to_device(array)
        assert there.numpy().dtype == array.dtype
        assert (there.numpy() == array).all()

    run_asyncio(main)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_the_formats_that_ml_dtypes_adds_arrive_exactly(run_asyncio, small, name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = getattr(ml_dtypes, name)

    async def main():
        for count in (16, 1600):
            array = numpy.arange(1, count + 1).astype(dtype)
            for view in (array, array[::-2], array.reshape(4, -1).T):
                there = await aiogpu.to_device(view)
                assert there.dtype is getattr(torch, name)
                assert numpy.array_equal(there.float().numpy(), view.astype("f4"), equal_nan=True)
            out = numpy.zeros(count, dtype)
            await aiogpu.to_host(torch.from_numpy(array.view("u1")).view(getattr(torch, name)), out=out)
            assert out.tobytes() == array.tobytes()

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


@st.composite
def arrays(draw: st.DrawFn):
    """Any dtype in any byte order; any shape, order and step, also backwards; broadcast; read-only."""
    code = draw(st.sampled_from("<>")) + draw(st.sampled_from(CODES))
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    whole = numpy.arange(int(numpy.prod([2 * n + 1 for n in shape], dtype=int))) * 37 % 251
    whole = whole.astype(code).reshape([2 * n + 1 for n in shape])
    cut = tuple(
        slice(n, None, draw(st.sampled_from([1, -1]))) if draw(st.booleans()) else slice(0, 2 * n, 2)
        for n in shape
    )
    array = whole[(..., *cut)].transpose(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        array = numpy.broadcast_to(array, (draw(st.integers(1, 5)), *array.shape))
    elif draw(st.booleans()):
        array.flags.writeable = False
    return array


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(array=arrays(), device=st.sampled_from(["virtual", "through chunks", "cpu"]))
def test_any_array_arrives_exactly(array, device):
    expected = array.astype(array.dtype.newbyteorder("="))
    before = array.tobytes()

    async def main():
        for there in (await aiogpu.to_device(array), (await aiogpu.to_host([array]))[0]):
            assert there.numpy().dtype == expected.dtype
            assert there.numpy().shape == expected.shape
            assert there.numpy().tobytes() == expected.tobytes()
            there.numpy().fill(1)  # the result's own memory
        out = numpy.zeros_like(expected)
        await aiogpu.to_host(torch.from_numpy(expected.copy()), out=out)
        assert out.tobytes() == expected.tobytes()

    with small_device(device):
        Run("asyncio")(main)
    assert array.tobytes() == before


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: numpy.array([object()]), "dtype object.*`x.astype"),
        (lambda: numpy.zeros(2, [("a", "f4"), ("b", "i8")]), "dtype .*'a'.*'b'.*`x.astype"),
        (lambda: numpy.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]), "dtype .*record.*`x.astype"),
        (lambda: numpy.array(["a"]), "dtype <U1"),
        (lambda: numpy.array(["2020-01-01"], "M8[D]"), r"datetime64\[D\]"),
        (lambda: numpy.ma.masked_array([1, 2], [True, False]), r"MaskedArray.*`x.filled"),
        (lambda: numpy.zeros(2, numpy.longdouble), "longdouble|float128"),
        (lambda: numpy.zeros(2, pytest.importorskip("ml_dtypes").int4), "dtype int4"),
    ],
    ids=["object", "structured", "records", "text", "dates", "masked", "long double", "int4"],
)
def test_an_array_that_cannot_be_a_tensor_is_refused_by_name_before_any_work(run_asyncio, vd, make, words):
    async def main():
        for verb in ("to_device", "to_host"):
            with pytest.raises(TypeError, match=rf"{verb}\(\): data\['a'\]\[1\] is a numpy .*({words})"):
                getattr(aiogpu, verb)({"a": [torch.ones(1), make()]})
        assert vd.submitted == 0

    run_asyncio(main)


def test_numpy_scalars_pass_by_identity(run_asyncio, small):
    async def main():
        scalar = numpy.float32(3)
        assert await aiogpu.to_device(scalar) is scalar
        assert (await aiogpu.to_host([scalar]))[0] is scalar

    run_asyncio(main)
