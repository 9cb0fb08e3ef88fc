"""Transfers are exact: every size, dtype, layout and container, on every path.

Staging blocks are small here (256 bytes a slot, 1 KiB a chunk), so that a few kilobytes are "large".
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import anyio
import pytest
import torch
from _small_blocks import CHUNK, SLOT, UnpinnedCpu, small_cpu, small_virtual

import aiogpu

#: Elements of one byte: nothing, around a slot, around one and several chunks.
SIZES = [
    *[0, 1, SLOT - 1, SLOT, SLOT + 1, CHUNK - 1, CHUNK, CHUNK + 1],
    *[3 * CHUNK - 1, 3 * CHUNK, 3 * CHUNK + 1, 4 * CHUNK, 10 * CHUNK + 7],
]
#: Formats of several values to a byte: torch cannot make a tensor of them like any other.
_PACKED = ("x2", "bits", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "qint", "quint")
DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not any(word in str(dtype).split(".")[1] for word in _PACKED)
    }
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16},
    key=str,
)


@pytest.fixture(params=["virtual", "through chunks", "cpu", "cpu through chunks"])
def small(request: pytest.FixtureRequest):
    """A device with small blocks, virtual or with real threads; results page-locked or through chunks."""
    if request.param.startswith("cpu"):
        chunks = request.param != "cpu"
        with small_cpu(UnpinnedCpu() if chunks else None, pinned_bytes=0 if chunks else 2**30):
            yield
    else:
        with small_virtual(pinned_bytes=0 if request.param == "through chunks" else 2**30):
            yield


def pattern(nbytes: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> torch.Tensor:
    """``nbytes`` of a pattern that repeats neither in slots nor in chunks, as elements of ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.bool() if dtype is torch.bool else raw.view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, so that NaNs count, too."""
    if a.shape != b.shape or a.dtype != b.dtype or type(a) is not type(b):
        return False
    flat = [torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1)) for x in (a, b)]
    return torch.equal(*(x.view(torch.uint8) for x in flat))


def is_copy(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() == 0 or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


async def there_and_back(x: torch.Tensor) -> None:
    there = await aiogpu.to_device(x)
    assert same(there, x)
    assert is_copy(there, x)
    back = await aiogpu.to_host(there)
    assert same(back, x)
    assert is_copy(back, there)
    out = torch.empty_like(back)
    assert await aiogpu.to_host(there, out=out) is out
    assert same(out, x)
    dst = torch.empty_like(there)
    assert await aiogpu.copy_(dst, x) is dst
    assert same(dst, x)


# -- sizes, dtypes, layouts --------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_size_is_exact(run_asyncio, small, nbytes):
    run_asyncio(there_and_back, pattern(nbytes))


def test_sizes_are_exact_on_every_loop(run, small):
    async def main():
        for nbytes in (1, SLOT + 1, 3 * CHUNK + 1):
            await there_and_back(pattern(nbytes))

    run(main)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch's, once a process
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
def test_every_dtype_is_exact(run_asyncio, small, dtype):
    async def main():
        for nbytes in (SLOT // 2, 3 * CHUNK + 64):
            await there_and_back(pattern(nbytes, dtype))

    run_asyncio(main)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (0, 5), (1, 1, 1)], ids=str)
def test_empty_and_zero_dimensional_tensors_keep_shape_and_dtype(run_asyncio, small, shape, engine):
    """C83: and no staging block is used for nothing."""

    async def main():
        for dtype in DTYPES:
            await there_and_back(torch.empty(shape, dtype=dtype).zero_())
        assert engine().chunks.count == 0

    run_asyncio(main)


LAYOUTS = {
    "every second": lambda x: x[::2],
    "from an offset": lambda x: x[3:],
    "transposed": lambda x: x.view(-1, 8).t(),
    "permuted": lambda x: x.view(2, -1, 4).permute(2, 0, 1),
    "channels last": lambda x: x.view(2, 2, -1, 4).contiguous(memory_format=torch.channels_last),
    "with gaps": lambda x: x.view(-1, 8)[:, 1:5],
    "one column": lambda x: x.view(-1, 8)[:, 3],
    "broadcast rows": lambda x: x[:8].expand(x.numel() // 8, 8),
    "broadcast columns": lambda x: x[: x.numel() // 8, None].expand(-1, 8),
    "one element, odd strides": lambda x: x.as_strided((1, 1), (7, 3)),
    "overlapping windows": lambda x: x.unfold(0, 8, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("count", [32, 1600], ids=["small", "large"])
def test_every_layout_is_exact(run_asyncio, small, layout, count):
    run_asyncio(there_and_back, layout(pattern(4 * count, torch.int32)))


@pytest.mark.parametrize("view", ["conj", "neg", "conj.imag", "conj.t"])
@pytest.mark.parametrize("count", [16, 800], ids=["small", "large"])
def test_lazily_conjugated_and_negated_views_are_resolved(run_asyncio, small, view, count):
    z = torch.complex(torch.arange(count).float(), torch.arange(count).float() + 0.5)
    x = {
        "conj": lambda: z.conj(),
        "neg": lambda: torch._neg_view(z.real),
        "conj.imag": lambda: z.conj().imag,
        "conj.t": lambda: z.view(4, -1).conj().t(),
    }[view]()
    assert x.is_conj() or x.is_neg()

    async def main():
        for moved in (await aiogpu.to_device(x), await aiogpu.to_host(x)):
            assert torch.equal(moved, x)
            assert not moved.is_conj()
            assert not moved.is_neg()

    run_asyncio(main)


def test_a_dense_tensor_keeps_its_memory_format(run_asyncio, small):
    x = torch.zeros(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)

    async def main():
        assert (await aiogpu.to_device(x)).stride() == x.stride()
        assert (await aiogpu.to_host(x)).stride() == x.stride()

    run_asyncio(main)


@pytest.mark.parametrize("verb", ["to_device", "to_host"])
@pytest.mark.parametrize("strided", [False, True], ids=["row", "column"])
def test_a_row_of_a_large_tensor_moves_no_more_than_the_row(run_asyncio, monkeypatch, verb, strided):
    """C84."""
    with small_virtual(pinned_bytes=0) as (device, engine):
        x = pattern(100 * 3 * CHUNK).view(100, -1)
        if strided:
            x = x.t().contiguous().t()
        moved: list[int] = []
        copy = device.copy
        monkeypatch.setattr(device, "copy", lambda *args: (moved.append(args[0].nbytes), copy(*args)))

        async def main():
            assert same(await getattr(aiogpu, verb)(x[5]), x[5])
            assert sum(moved) == 3 * CHUNK
            assert max(moved) <= CHUNK
            assert engine.chunks.count <= 8

        run_asyncio(main)


# -- dtype= ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [aiogpu.to_device, aiogpu.to_host], ids=["to_device", "to_host"])
@pytest.mark.parametrize("count", [SLOT // 8, SLOT // 8 + 1, SLOT // 4, SLOT // 2])
def test_what_a_conversion_makes_larger_than_a_slot_leaves_the_next_slot_alone(
    run_asyncio, small, verb, count
):
    async def main():
        await aiogpu.to_device(torch.ones(1))  # the first call makes the engine
        for form in (lambda x: x, lambda x: x.view(1, -1).t(), lambda x: [x], lambda x: x.numpy()):
            rows = [torch.arange(count, dtype=torch.int16) + i for i in range(8)]
            operations = [verb(form(row), dtype=torch.float64) for row in rows]
            for row, operation in zip(rows, operations, strict=True):
                arrived = await operation
                arrived = arrived[0] if isinstance(arrived, list) else arrived
                assert arrived.flatten().tolist() == row.tolist()

    run_asyncio(main)


@pytest.mark.parametrize("count", [8, 2000], ids=["small", "large"])
@pytest.mark.parametrize(
    ("source", "wanted"),
    [(torch.float32, torch.float16), (torch.uint8, torch.float32), (torch.float64, torch.int32)],
    ids=str,
)
def test_dtype_converts_as_torch_does(run_asyncio, small, count, source, wanted):
    x = (torch.arange(count) % 100).to(source)

    async def main():
        assert same(await aiogpu.to_device(x, dtype=wanted), x.to(wanted))
        assert same(await aiogpu.to_host(x, dtype=wanted), x.to(wanted))
        out = torch.empty(count, dtype=wanted)
        await aiogpu.to_host(x, dtype=wanted, out=out)
        assert same(out, x.to(wanted))
        nested = await aiogpu.to_device({"a": [x, "text"]}, dtype=wanted)
        assert nested["a"][0].dtype is wanted

    run_asyncio(main)


# -- copy_ and item ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [8, 2000], ids=["small", "large"])
def test_copy_broadcasts_converts_and_fills_any_strides(run_asyncio, small, count):
    row = torch.arange(count, dtype=torch.float64)

    async def main():
        for dst in (
            torch.zeros(3, count),
            torch.zeros(count, 3).t(),
            torch.zeros(3, 2 * count)[:, ::2],
            torch.zeros(3, count, dtype=torch.int16),
        ):
            expected = torch.empty_like(dst).copy_(row)
            assert await aiogpu.copy_(dst, row) is dst
            assert torch.equal(dst, expected)
        around = torch.zeros(3 * count)
        await aiogpu.copy_(around[count : 2 * count], row)
        assert around.count_nonzero() == count - 1
        assert torch.equal(around[count : 2 * count].double(), row)

    run_asyncio(main)


def test_copy_does_not_show_in_autograd(run_asyncio, small):
    async def main():
        dst = torch.zeros(4, requires_grad=True)
        await aiogpu.copy_(dst, torch.ones(4, requires_grad=True) * 2)
        assert dst.is_leaf
        assert dst.tolist() == [2.0] * 4

    run_asyncio(main)


@pytest.mark.parametrize(
    "value", [True, False, 7, -(2**62), 0.25, float("inf"), 1 + 2j], ids=lambda value: str(value)
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_item_gives_the_python_number(run_asyncio, small, value, shape):
    async def main():
        x = torch.full(shape, value, dtype=torch.complex128 if isinstance(value, complex) else None)
        got = await aiogpu.item(x)
        assert (got, type(got)) == (value, type(value))
        assert await aiogpu.item(torch.zeros(4, requires_grad=True).sum()) == 0

    run_asyncio(main)


# -- containers --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    image: torch.Tensor
    label: int = 0


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    name: str


class Record(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize("count", [4, 2000], ids=["small", "large"])
def test_containers_keep_their_types_and_other_values_their_identity(run_asyncio, small, count):
    """C78, C79: the walk has tests of its own; here both verbs use it, on every path."""
    x = torch.arange(count)
    marker = object()
    data: dict[str, Any] = {
        "tuple": (x, 1),
        "list": [x + 1, None, marker],
        "named": Pair(x + 2),
        "dataclass": Batch(x + 3, "name"),
        "ordered": OrderedDict(b=x + 4, a=x + 5),
        "default": defaultdict(list, k=[x + 6]),
        "record": Record(x=x + 7),
    }

    def check(moved: dict[str, Any]) -> None:
        assert [type(v) for v in moved.values()] == [type(v) for v in data.values()]
        assert moved["list"][2] is marker
        assert moved["default"].default_factory is list
        assert list(moved["ordered"]) == ["b", "a"]
        flat = [moved["tuple"][0], moved["list"][0], moved["named"].image, moved["dataclass"].x]
        flat += [*moved["ordered"].values(), moved["default"]["k"][0], moved["record"]["x"]]
        assert all(torch.equal(t, x + i) for i, t in enumerate(flat))
        assert all(is_copy(t, x) for t in flat)

    async def main():
        there = await aiogpu.to_device(data)
        check(there)
        check(await aiogpu.to_host(there))

    run_asyncio(main)


def test_a_batch_of_very_many_small_leaves_is_exact(run_asyncio, small):
    xs = [torch.full((3,), i) for i in range(300)]

    async def main():
        there = await aiogpu.to_device(xs)
        back = await aiogpu.to_host(there)
        assert all(torch.equal(a, b) for a, b in zip(xs, back, strict=True))

    run_asyncio(main)


def test_data_without_tensors_passes_by_identity(run, small):
    async def main():
        for data in ("text", None, 3, ["text"], {}, ()):
            assert await aiogpu.to_device(data) is data
            assert await aiogpu.to_host(data) is data

    run(main)


def test_a_module_moves_itself_on_a_thread_of_ours(run_asyncio, small):
    module = torch.nn.Linear(2, 2)

    async def main():
        assert await aiogpu.to_device(module, dtype=torch.float64) is module
        assert module.weight.dtype is torch.float64
        moved = await aiogpu.to_device({"model": module, "x": torch.ones(2)})
        assert moved["model"] is module
        assert moved["x"].tolist() == [1.0, 1.0]

    run_asyncio(main)


# -- autograd and modes ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 2000], ids=["small", "large"])
def test_leaves_stay_leaves_and_parameters_parameters(run_asyncio, small, count):
    """C82."""

    class Weight(torch.nn.Parameter):
        pass

    async def main():
        leaf = torch.ones(count, requires_grad=True)
        moved = await aiogpu.to_device(leaf)
        assert moved.is_leaf
        assert moved.requires_grad
        moved.sum().backward()
        assert moved.grad is not None
        assert leaf.grad is None
        for parameter in (torch.nn.Parameter(torch.ones(count)), Weight(torch.ones(count), False)):
            parameter.tag = "kept"  # type: ignore[attr-defined]
            moved = await aiogpu.to_device(parameter)
            assert type(moved) is type(parameter)
            assert moved.requires_grad is parameter.requires_grad
            assert moved.tag == "kept"  # type: ignore[attr-defined]
            assert same(moved, parameter)

    run_asyncio(main)


@pytest.mark.parametrize("count", [4, 2000], ids=["small", "large"])
def test_downloads_are_detached(run_asyncio, small, count):
    """C65: a kept result must not keep the graph."""

    async def main():
        x = torch.ones(count, requires_grad=True)
        for source in (x, x * 2, torch.nn.Parameter(torch.ones(count))):
            moved = await aiogpu.to_host([source])
            assert not moved[0].requires_grad
            assert moved[0].grad_fn is None
            assert torch.equal(moved[0], source.detach())

    run_asyncio(main)


@pytest.mark.parametrize("count", [4, 2000], ids=["small", "large"])
def test_the_callers_modes_do_not_reach_the_results(run_asyncio, small, count):
    """No inference tensors, nothing on a default device, no graph, whatever is on at the call."""

    @aiogpu.task
    async def main():
        x = torch.arange(count).float()
        with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"):
            there = await aiogpu.to_device(x)
            back = await aiogpu.to_host(there)
        for moved in (there, back):
            assert not moved.is_inference()
            assert not moved.is_meta
            assert same(moved, x)

    run_asyncio(main)


@pytest.mark.parametrize("count", [4, 2000], ids=["small", "large"])
def test_inference_tensors_are_read_and_written(run_asyncio, small, count):
    with torch.inference_mode():
        x = torch.arange(count).float()
        out = torch.zeros(count)
        dst = torch.zeros(count)

    async def main():
        assert torch.equal(await aiogpu.to_device(x), x)
        await aiogpu.to_host(x, out=out)
        await aiogpu.copy_(dst, x)
        assert torch.equal(out, x)
        assert torch.equal(dst, x)

    run_asyncio(main)


# -- many at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [16, 2000], ids=["small", "large"])
def test_concurrent_transfers_of_distinct_contents_never_mix(run, small, count):
    """C49."""

    async def one(index):
        x = torch.full((count,), index)
        there = await aiogpu.to_device(x)
        assert torch.equal(there, x)
        assert torch.equal(await aiogpu.to_host(there), x)

    async def main():
        await aiogpu.amap(one, range(64))

    run(main)


def test_four_threads_with_a_loop_each_never_mix(run_asyncio, small):
    import threading

    failures: list[BaseException] = []

    def thread(first):
        async def one(index):
            x = torch.full((700,), index)
            assert torch.equal(await aiogpu.to_host(await aiogpu.to_device(x)), x)

        async def main():
            await aiogpu.amap(one, range(first, first + 32))

        try:
            run_asyncio(main)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=thread, args=(1000 * i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures


def test_an_operation_may_be_awaited_many_times_and_by_many(run, small):
    async def main():
        operation = aiogpu.to_device(torch.ones(1000))
        results: list[torch.Tensor] = []

        async def keep():
            results.append(await operation)

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(keep)
        results.append(await operation)
        assert len({id(result) for result in results}) == 1

    run(main)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, None])
@pytest.mark.parametrize("rows", [4, 64])
def test_a_view_that_is_converted_on_the_way_down_keeps_its_elements_in_place(run, small, rows, dtype):
    """A conversion of a permuted view with gaps comes out in an order of memory of its own."""

    async def main() -> None:
        source = torch.randn(rows, 5, 6).permute(2, 0, 1)[::2]
        for view in (source, source.transpose(0, 1), source[:, :, ::2]):
            back = await aiogpu.to_host(view, dtype=dtype)
            assert same(back, view if dtype is None else view.to(dtype))
            (again,) = await aiogpu.to_host([view], dtype=dtype)
            assert same(again, back)

    run(main)
