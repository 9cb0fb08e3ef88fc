"""Every layout and type arrives exactly, in both directions: bytes are compared, and all that is not bytes.

Staging blocks are small here (256 bytes a slot, 1 KiB a chunk), so that a few kilobytes are "large".
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from _small_blocks import small_cpu, small_virtual
from conftest import Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiogpu
from aiogpu.testing import VirtualDevice
from aiogpu.transfers.parts import RAW, core, spread
from aiogpu.transfers.plan import Plan
from aiogpu.transfers.tree import flatten, tensors_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(S|s)parse.*"),  # torch's own, once a process
    pytest.mark.filterwarnings("ignore:.*nested tensors.*"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation"),
]

DEVICES = ["virtual", "through chunks", "cpu"]


def small_device(name: str) -> Any:
    if name == "cpu":
        return small_cpu()
    return small_virtual(pinned_bytes=0 if name == "through chunks" else 2**30)


@pytest.fixture(params=DEVICES)
def small(request: pytest.FixtureRequest) -> Iterator[None]:
    """A device with small blocks: results page-locked, results through chunks, the CPU."""
    with small_device(request.param):
        yield


# -- What is compared ------------------------------------------------------------------------------------


def bytes_of(x: torch.Tensor) -> bytes:
    x = x.detach()
    x = x.view(RAW[x.dtype]) if x.dtype in RAW else x.resolve_conj().resolve_neg()
    row = torch.empty(x.shape, dtype=x.dtype).copy_(x).reshape(-1)
    return bytes(row.view(torch.uint8).tolist())


def inside(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a tensor's data, by torch's public names."""
    if x.layout is torch.jagged:
        ends = [x.offsets()] if x.lengths() is None else [x.offsets(), x.lengths()]
        return [x.values(), *ends]
    if x.is_nested:
        return list(x.unbind())
    if x.layout is torch.sparse_coo:
        return [x._indices(), x._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    if x.is_quantized and x.qscheme() is torch.per_tensor_affine:
        return [x.int_repr(), torch.tensor([x.q_scale(), x.q_zero_point()])]
    if x.is_quantized:
        axis = torch.tensor(x.q_per_channel_axis())
        return [x.int_repr(), x.q_per_channel_scales(), x.q_per_channel_zero_points(), axis]
    return [x]


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (type(a), a.layout, a.dtype, a.is_quantized) == (type(b), b.layout, b.dtype, b.is_quantized)
    assert a.is_nested or a.shape == b.shape
    assert a.layout is not torch.sparse_coo or a.is_coalesced() == b.is_coalesced()
    left, right = inside(a), inside(b)
    assert [(x.shape, x.dtype) for x in left] == [(x.shape, x.dtype) for x in right]
    assert [bytes_of(x) for x in left] == [bytes_of(x) for x in right]


def addresses(x: torch.Tensor) -> set[int]:
    return {part.untyped_storage().data_ptr() for part in tensors_of(x) if part.numel()}


async def there_and_back(x: torch.Tensor) -> torch.Tensor:
    there = await aiogpu.to_device(x)
    assert_same(there, x.detach() if there.requires_grad is False else x)
    assert not addresses(there) & addresses(x)
    back = await aiogpu.to_host({"x": [there]})
    assert_same(back["x"][0], x.detach() if x.requires_grad else x)
    assert not addresses(back["x"][0]) & addresses(there)
    return there


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return (torch.arange(1, count + 1) * 7 % 251).to(dtype).reshape(shape)


# -- Sparse ----------------------------------------------------------------------------------------------


def coo(n: int, *, coalesced: bool) -> torch.Tensor:
    where = torch.stack([torch.arange(n) % 5, torch.arange(n) % 3])
    x = torch.sparse_coo_tensor(where, numbers(n), (5, 3), check_invariants=True)
    return x.coalesce() if coalesced else x


def compressed(layout: torch.layout, n: int) -> torch.Tensor:
    blocks = {"blocksize": (2, 4)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    dense = numbers(n, 8).masked_fill(torch.arange(8 * n).reshape(n, 8) % 3 == 0, 0)
    return dense.to_sparse(layout=layout, **blocks)


SPARSE: dict[str, Callable[[int], torch.Tensor]] = {
    "COO with repeated indices": lambda n: coo(n, coalesced=False),
    "coalesced COO": lambda n: coo(n, coalesced=True),
    "hybrid COO": lambda n: numbers(2, n, 3).to_sparse(1),
    "CSR": lambda n: compressed(torch.sparse_csr, n),
    "CSC": lambda n: compressed(torch.sparse_csc, n),
    "BSR": lambda n: compressed(torch.sparse_bsr, n),
    "BSC": lambda n: compressed(torch.sparse_bsc, n),
    "batch of CSR": lambda n: numbers(3, 2, n).to_sparse_csr(),
    "complex": lambda n: numbers(n, 2, dtype=torch.complex64).to_sparse(),
    "nothing in it": lambda n: torch.zeros(n, 3).to_sparse_csr(),
}


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_sparse_tensors_keep_layout_order_and_flags(run_asyncio, small, make):
    """C81."""

    async def main():
        for n in (4, 400):  # through slots, and in chunks
            await there_and_back(make(n))

    run_asyncio(main)


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_dtype_converts_the_values_of_a_sparse_tensor_and_not_its_indices(run_asyncio, small, make):
    async def main():
        x = make(400)
        dtype = torch.complex128 if x.is_complex() else torch.float64
        assert_same(await aiogpu.to_device(x, dtype=dtype), x.to(dtype))
        assert_same(await aiogpu.to_host(x, dtype=dtype), x.to(dtype))

    run_asyncio(main)


def test_a_sparse_leaf_that_requires_grad_stays_one(run_asyncio, small):
    async def main():
        x = numbers(4, 4).to_sparse().requires_grad_()
        there = await there_and_back(x)
        assert there.requires_grad
        assert there.is_leaf
        assert not there._is_view()
        torch.sparse.sum(there).backward()
        assert x.grad is None
        parameter = await aiogpu.to_device(torch.nn.Parameter(numbers(2, 2).to_sparse_csr()))
        assert type(parameter) is torch.nn.Parameter
        assert parameter.layout is torch.sparse_csr

    run_asyncio(main)


# -- Nested ----------------------------------------------------------------------------------------------


def pieces(n: int) -> list[torch.Tensor]:
    return [numbers(n, 3), numbers(1, 3), numbers(2 * n, 3)]


def jagged(n: int, **options: Any) -> torch.Tensor:
    return torch.nested.nested_tensor(pieces(n), layout=torch.jagged, **options)


def narrowed(n: int) -> torch.Tensor:
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([n, 1, n - 1])
    return torch.nested.narrow(numbers(3, 2 * n, 2), 1, starts, lengths, layout=torch.jagged)


def with_cached_lengths(n: int) -> torch.Tensor:
    x = jagged(n)
    assert x._get_max_seqlen() == 2 * n
    return x


NESTED: dict[str, Callable[[int], torch.Tensor]] = {
    "strided": lambda n: torch.nested.nested_tensor(pieces(n), layout=torch.strided),
    "strided, transposed": lambda n: torch.nested.nested_tensor(pieces(n), layout=torch.strided).transpose(
        1, 2
    ),
    "strided, of anything": lambda n: torch.nested.nested_tensor(
        [numbers(n, 3), numbers(2, n), numbers(0, 1)], layout=torch.strided
    ),
    "strided, empty": lambda n: torch.nested.nested_tensor([numbers(0, 3)], layout=torch.strided),
    "jagged": jagged,
    "jagged, transposed": lambda n: jagged(n).transpose(1, 2),
    "jagged, with holes": narrowed,
    "jagged, lengths known": with_cached_lengths,
}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_nested_tensors_keep_their_pieces(run_asyncio, small, make):
    """C82."""

    async def main():
        for x in (make(4), make(300)):
            there = await there_and_back(x)
            assert there.is_nested
            assert [bytes_of(a) for a in there.unbind()] == [bytes_of(a) for a in x.unbind()]
            if x.is_contiguous() and x.layout is torch.strided and x.numel():
                assert torch.equal(there.to_padded_tensor(0.0), x.to_padded_tensor(0.0))  # the whole storage

    run_asyncio(main)


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_dtype_converts_the_values_of_a_nested_tensor_and_not_its_offsets(run_asyncio, small, make):
    async def main():
        x = make(300)
        there = await aiogpu.to_device(x, dtype=torch.float64)
        assert there.dtype is torch.float64
        assert [a.tolist() for a in there.unbind()] == [a.tolist() for a in x.unbind()]
        if x.layout is torch.jagged:
            assert there.offsets().dtype is torch.int64

    run_asyncio(main)


def test_tensors_of_one_ragged_structure_have_one_structure_afterwards(run_asyncio, small):
    """Torch adds two of them only if their offsets are one and the same tensor."""

    async def main():
        a = jagged(5)
        b = a * 2
        there = await aiogpu.to_device({"a": a, "b": b, "offsets": a.offsets()})
        assert there["a"].offsets() is there["b"].offsets() is there["offsets"]
        assert there["a"].shape == a.shape
        total = there["a"] + there["b"]
        assert bytes_of(total.values()) == bytes_of((a + b).values())

    run_asyncio(main)


def test_a_jagged_leaf_that_requires_grad_stays_one_and_comes_down_detached(run_asyncio, small):
    async def main():
        x = jagged(5, requires_grad=True)
        there = await aiogpu.to_device(x)
        assert there.requires_grad
        assert there.is_leaf
        assert not (await aiogpu.to_host(there)).requires_grad
        assert not (await aiogpu.to_host(there * 2)).requires_grad

    run_asyncio(main)


def test_known_lengths_of_a_jagged_tensor_stay_known_and_cost_no_import():
    """The class's constructor imports torch._dynamo for them: seconds, on the event loop's thread."""
    program = """
import sys, torch
from aiogpu.transfers.plan import Plan
from aiogpu.transfers.tree import flatten
x = torch.nested.nested_tensor_from_jagged(torch.ones(6, 3), torch.tensor([0, 2, 6]))
assert x._get_max_seqlen() == 4
before = "torch._dynamo" in sys.modules
plan = Plan(flatten(x, verb="to_device"), lambda _: False)
moved = plan.rebuild([part.clone() for part in plan.plain], [])
print(moved._maybe_max_seqlen, moved.shape == x.shape, before == ("torch._dynamo" in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=110, check=True
    )
    assert done.stdout.split() == ["4", "True", "True"]


def test_a_strided_nested_view_stages_only_its_own_part_of_the_buffer():
    rows = torch.nested.nested_tensor([numbers(2, 3), numbers(4, 3), numbers(1, 3)], layout=torch.strided)
    offsets = rows._nested_tensor_storage_offsets()[1:]
    buffer = torch.empty(0).set_(rows.untyped_storage(), 0, (21,), (1,))
    last = torch._nested_view_from_buffer(
        buffer, rows._nested_tensor_size()[1:], rows._nested_tensor_strides()[1:], offsets
    )
    plan: Plan[Any] = Plan(flatten(last, verb="to_device"), lambda _: False)
    assert plan.nbytes == 15 * 4
    assert_same(plan.rebuild([plan.plain[0].clone()], []), last)
    padded = torch.zeros(100)
    padded[10:25] = plan.plain[0]
    assert_same(plan.rebuild([padded[10:25]], []), last)  # a copy that lies in a larger block


# -- Quantized, and formats without kernels --------------------------------------------------------------


def per_tensor(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(numbers(n, 8) / 100, 0.25, 3, dtype)


def per_channel(n: int, axis: int, zero_points: torch.dtype = torch.int64) -> torch.Tensor:
    channels = (n, 8)[axis]
    return torch.quantize_per_channel(
        numbers(n, 8) / 100,
        torch.rand(channels) + 0.1,
        torch.arange(channels).to(zero_points) % 7,
        axis,
        torch.quint8,
    )


QUANTIZED: dict[str, Callable[[int], torch.Tensor]] = {
    "qint8": lambda n: per_tensor(n, torch.qint8),
    "quint8": lambda n: per_tensor(n, torch.quint8),
    "qint32": lambda n: per_tensor(n, torch.qint32),
    "transposed": lambda n: per_tensor(n, torch.qint8).t(),
    "rows": lambda n: per_tensor(n, torch.qint8)[1:-1],
    "per row": lambda n: per_channel(n, 0),
    "per column": lambda n: per_channel(n, 1),
    "per channel, float zero points": lambda n: per_channel(n, 0, torch.float32),
    "one channel each": lambda n: torch.quantize_per_channel(
        numbers(n) / 100, torch.rand(n) + 0.1, torch.zeros(n), 0, torch.quint8
    ),
    "empty": lambda n: torch.quantize_per_tensor(torch.empty(0, 3), 0.5, 1, torch.qint8),
    "0-d": lambda n: torch.quantize_per_tensor(torch.tensor(1.0), 0.5, 1, torch.qint8),
}


@pytest.mark.parametrize("make", QUANTIZED.values(), ids=QUANTIZED)
def test_quantized_tensors_keep_their_integers_scales_and_zero_points(run_asyncio, small, make):
    async def main():
        for x in (make(4), make(400)):
            there = await there_and_back(x)
            assert torch.equal(there.dequantize(), x.dequantize())

    run_asyncio(main)


def test_copies_that_lie_in_larger_blocks_are_put_together_right():
    """Many small tensors may travel as one, and arrive as views of one."""
    for x in (per_tensor(3, torch.qint8), per_channel(3, 1), numbers(5).to_sparse(), jagged(2)):
        plan: Plan[Any] = Plan(flatten(x, verb="to_device"), lambda _: False)
        moved = []
        for part in plan.plain:
            block = torch.zeros(part.numel() + 7, dtype=part.dtype)
            moved.append(block[3 : 3 + part.numel()].view(part.shape).copy_(part))
        assert_same(plan.rebuild(moved, []), x)


@pytest.mark.parametrize("count", [64, 6000], ids=["small", "large"])
def test_formats_that_torch_has_no_kernels_for_arrive_exactly(run_asyncio, small, count):
    async def main():
        for dtype in RAW:
            x = numbers(count, dtype=torch.uint8).view(RAW[dtype]).view(dtype)
            for view in (x, x.reshape(2, -1).t(), x[1:]):
                there = await there_and_back(view)
                assert there.dtype is dtype
                out = torch.empty_like(view.view(RAW[dtype])).view(dtype)
                assert await aiogpu.to_host(there, out=out) is out
                assert_same(out, view)

    run_asyncio(main)


# -- Subclasses ------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """Two inner tensors of other shapes, and an attribute; `.to` as torch does it for such classes."""

    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, unit: str) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=torch.float32, device=data.device
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, unit: str) -> None:
        self.inner, self.scale, self.unit = data, scale, unit

    def __tensor_flatten__(self) -> Any:
        return ["inner", "scale"], self.unit

    @staticmethod
    def __tensor_unflatten__(inner: Any, unit: Any, size: Any, stride: Any) -> Any:
        assert inner["inner"].shape == size
        assert inner["inner"].stride() == stride
        return Wrapped(inner["inner"], inner["scale"], unit)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self, dtype = args[0], (kwargs or {}).get("dtype")
            return Wrapped(self.inner.clone(), self.scale * 2, f"{self.unit} as {dtype}")
        raise NotImplementedError(func)


@pytest.mark.parametrize("n", [2, 300], ids=["small", "large"])
def test_a_wrapper_subclass_arrives_with_all_it_is_made_of(run_asyncio, small, n):
    """C82; also where the inner tensors are views with gaps, whose copies are dense."""

    async def main():
        for data in (numbers(n, 4).to(torch.int8), numbers(n, 8)[:, ::2], numbers(4, n).t()):
            x = Wrapped(data, torch.tensor([0.5, 2.0]), "m")
            there = await aiogpu.to_device([x])
            assert type(there[0]) is Wrapped
            assert there[0].unit == "m"
            assert_same(there[0].inner, data)
            assert there[0].scale.tolist() == [0.5, 2.0]
            back = await aiogpu.to_host(there)
            assert_same(back[0].inner, data)

    run_asyncio(main)


def test_a_wrapper_subclass_is_converted_by_its_own_to(run_asyncio, small):
    """Which of its tensors a dtype is meant for, it alone knows."""

    async def main():
        x = Wrapped(numbers(2, 4), torch.tensor([0.5]), "m")
        for verb in ("to_device", "to_host"):
            there = await getattr(aiogpu, verb)(x, dtype=torch.float16)
            assert there.unit == "m as torch.float16"
            kept = await getattr(aiogpu, verb)(x, dtype=torch.float32)
            assert kept.unit == "m"

    run_asyncio(main)


# -- Elements that are shared ----------------------------------------------------------------------------


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy that a virtual device was given."""
    sizes: list[int] = []
    copy = VirtualDevice.copy

    def counting(self: Any, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        sizes.append(src.numel() * src.element_size())
        copy(self, dst, src, stream)

    monkeypatch.setattr(VirtualDevice, "copy", counting)
    return sizes


SHARED: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
    "rows": (lambda: numbers(8).expand(2000, 8), 32),
    "columns": (lambda: numbers(2000, 1).expand(2000, 50), 8000),
    "one number": (lambda: torch.tensor(3.0).expand(30, 40, 50), 4),
    "between": (lambda: numbers(30, 1, 8).expand(30, 40, 8), 960),
    "of every second": (lambda: numbers(60)[::2].expand(100, 30), 120),
    "windows": (lambda: numbers(1000).unfold(0, 100, 1), 4000),
    "windows from an offset": (lambda: numbers(1100)[100:].unfold(0, 100, 1), 4000),
    "expanded windows": (lambda: numbers(500).unfold(0, 50, 2).expand(3, -1, -1), 2000),
    "conjugated": (lambda: numbers(8, dtype=torch.complex64).conj().expand(200, 8), 64),
    "a row of many": (lambda: numbers(1000, 500)[7], 2000),
    "a column of many": (lambda: numbers(1000, 500)[:, 7], 4000),
    "with gaps": (lambda: numbers(100, 100)[:50:2, ::4], 2500),
}


@pytest.mark.parametrize(("make", "nbytes"), SHARED.values(), ids=SHARED)
def test_at_most_the_real_elements_are_staged(run_asyncio, staged, make, nbytes):
    """C84: an expanded view is spread out on the device, and its copy has memory for every element."""

    async def main():
        x = make()
        there = await aiogpu.to_device(x)
        assert sum(staged) == nbytes
        assert_same(there, x)
        assert there.untyped_storage().nbytes() == x.numel() * x.element_size()
        assert there.stride() == torch.empty_like(x).stride()

    with small_virtual():
        run_asyncio(main)


@pytest.mark.parametrize("make", [make for make, _ in SHARED.values()], ids=SHARED)
def test_shared_elements_arrive_exactly_and_converted(run_asyncio, small, make):
    async def main():
        x = make()
        await there_and_back(x)
        dtype = torch.complex128 if x.is_complex() else torch.int32
        assert_same(await aiogpu.to_device(x, dtype=dtype), x.to(dtype).contiguous())
        assert_same(await aiogpu.to_host(x, dtype=dtype), x.to(dtype).contiguous())

    run_asyncio(main)


def test_page_locked_memory_is_copied_from_where_it_lies(run_asyncio):
    """In whatever dense order; what has gaps in it is put in order first, by a thread."""

    async def main(device: VirtualDevice, chunks: Any) -> None:
        x = device.pin(numbers(40, 50))
        for view in (x, x.t(), x.view(4, 10, 50).permute(2, 0, 1), x[3:9]):
            assert_same(await aiogpu.to_device(view), view)
            assert (await aiogpu.to_device(view)).stride() == view.stride()
        assert chunks.count == 0
        for view in (x[:, ::2], x[::3].t(), x.expand(3, -1, -1)):
            assert_same(await aiogpu.to_device(view), view)

    with small_virtual() as (device, engine):
        run_asyncio(main, device, engine.chunks)


def test_a_broadcast_array_stages_its_real_elements_only(run_asyncio, staged):
    numpy = pytest.importorskip("numpy")

    async def main():
        rows = numpy.broadcast_to(numpy.arange(8, dtype=">f4"), (500, 8))
        there = await aiogpu.to_device(rows)
        assert sum(staged) == 32
        assert there.tolist() == rows.tolist()

    with small_virtual():
        run_asyncio(main)


@pytest.mark.parametrize("count", [2**31 + 17, 2**32 + 17, 2**40])
def test_more_elements_than_32_bits_can_count_are_planned_right(count):
    """C87: sizes and places are Python's integers."""
    x = torch.ones(1, dtype=torch.int8).expand(count)
    plan: Plan[Any] = Plan(flatten([x], verb="to_device"), lambda _: False)
    assert plan.nbytes == plan.largest == count
    assert type(plan.nbytes) is int
    assert core(x).shape == (1,)
    assert spread(core(x).to("meta"), x).shape == x.shape
    windows = torch.ones(2**12, dtype=torch.int8).expand(count // 2**11, -1).unfold(1, 2**11, 1)
    assert core(windows).shape == (2**12,)
    assert (
        spread(core(windows).to("meta"), windows).stride()
        == torch.empty_like(windows, device="meta").stride()
    )
    numpy = pytest.importorskip("numpy")
    array = numpy.broadcast_to(numpy.int8(1), (count,))
    plan = Plan(flatten([array], verb="to_device"), lambda _: False)
    assert plan.nbytes == count
    assert core(plan.sources()[0]).shape == (1,)


@pytest.mark.parametrize("view", ["expanded", "windows"])
def test_a_copy_into_a_tensor_stages_real_elements_only(run_asyncio, staged, view):
    async def main():
        x = numbers(1000).unfold(0, 100, 1) if view == "windows" else numbers(1, 100).expand(901, 100)
        dst = torch.zeros(901, 100, dtype=torch.float64)
        assert await aiogpu.copy_(dst, x) is dst
        assert_same(dst, x.double().contiguous())
        assert sum(staged) == (4000 if view == "windows" else 400)

    with small_virtual():
        run_asyncio(main)


def test_destinations_may_be_conjugated_negated_and_strided(run_asyncio, small):
    async def main():
        for n in (4, 800):
            z = torch.complex(numbers(n), -numbers(n))
            room = torch.zeros(2 * n, dtype=torch.complex64)
            for dst in (room[::2].conj(), room[::2].conj().imag):
                src = z if dst.is_complex() else z.real
                assert await aiogpu.copy_(dst, src) is dst
                assert torch.equal(dst, src)
                dst.zero_()
                assert await aiogpu.to_host(src, out=dst) is dst
                assert torch.equal(dst, src)
            assert not room[1::2].any()

    run_asyncio(main)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: coo(4, coalesced=True), r"torch\.sparse_coo"),
        (lambda: jagged(3), "nested"),
        (lambda: per_tensor(2, torch.qint8), "quantized"),
        (lambda: Wrapped(numbers(2, 4), torch.tensor([0.5]), "m"), "Wrapped"),
    ],
    ids=["sparse", "jagged", "quantized", "wrapper"],
)
def test_layouts_of_several_tensors_are_refused_as_or_with_destinations(run_asyncio, vd, make, name):
    async def main():
        x = make()
        with pytest.raises(ValueError, match=rf"out=.*cannot copy a {name} tensor .* leave `out` away"):
            aiogpu.to_host(x, out=torch.zeros(3))
        with pytest.raises(TypeError, match=rf"to_host\(out=\.\.\.\): out\['x'\] is a {name} tensor"):
            aiogpu.to_host({"x": torch.zeros(3)}, out={"x": x})
        with pytest.raises(TypeError, match=r"copy_\(\): data is a .*run_sync\(dst\.copy_, src\)"):
            aiogpu.copy_(x, torch.zeros(3))
        assert vd.submitted == 0

    run_asyncio(main)


def test_one_destination_for_two_sources_is_refused(run_asyncio, vd):
    async def main():
        out = torch.zeros(3)
        with pytest.raises(ValueError, match="each once"):
            aiogpu.to_host([torch.ones(3), torch.zeros(3)], out=[out, out])
        inner: Any = [torch.ones(3)]
        for _ in range(100):  # 2^100 places
            inner = [inner, inner]
        with pytest.raises(ValueError, match="each once"):
            aiogpu.to_host(inner, out=inner)
        assert vd.submitted == 0

    run_asyncio(main)


# -- Kernels and copies ----------------------------------------------------------------------------------


def test_what_follows_a_large_copy_never_comes_before_it(run_asyncio, small):
    """On the CPU kernels do not wait for copies, which are made on other threads."""

    async def main():
        x = numbers(200, 100)
        for _ in range(5):
            assert_same(await aiogpu.to_device(x, dtype=torch.float64), x.double())
            assert_same(
                await aiogpu.to_device(x.expand(2, -1, -1), dtype=torch.int32), x.expand(2, -1, -1).int()
            )
            strided = torch.zeros(100, 200).t()
            assert_same(await aiogpu.copy_(strided, x), x)
            wider = torch.zeros(200, 100, dtype=torch.float64)
            assert_same(await aiogpu.copy_(wider, x), x.double())

    with mock.patch("aiogpu.drivers.cpu._AT_ONCE", 0):
        run_asyncio(main)


# -- Any layout at all -----------------------------------------------------------------------------------

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.complex64, torch.complex128, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.int4),
]


@st.composite
def layouts(draw: st.DrawFn) -> torch.Tensor:
    """A strided tensor of any shape, order, overlap, offset and flag."""
    dtype = draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(st.integers(0, 9), max_size=4))
    strides = [draw(st.integers(0, 40)) for _ in sizes]
    if draw(st.booleans()):  # dense, in any order
        step = 1
        for dim in draw(st.permutations(range(len(sizes)))):
            strides[dim], step = step, step * max(1, sizes[dim])
    offset = draw(st.integers(0, 5))
    span = 1 + sum(max(0, size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    raw = torch.arange((offset + span) * dtype.itemsize) * 37 % 251
    raw = raw.to(torch.uint8) % 2 if dtype is torch.bool else raw.to(torch.uint8)
    x = raw.view(dtype).as_strided(sizes, strides, offset)
    if dtype.is_complex and draw(st.booleans()):
        x = x.conj()
        if draw(st.booleans()):
            return x.imag  # a negated view
    return x


async def goes_everywhere(x: torch.Tensor, dst: torch.Tensor) -> None:
    there = await there_and_back(x)
    assert there.stride() == torch.empty_like(x).stride()
    out = torch.empty_like(x)
    assert_same(await aiogpu.to_host(there, out=out), x)
    if x.dtype not in RAW and not dst.is_neg() and not dst.is_conj():
        expected = dst.clone().copy_(x)
        assert_same(await aiogpu.copy_(dst, x), expected)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_layout_arrives_exactly(device, data):
    async def main() -> None:
        for _ in range(3):
            x = data.draw(layouts())
            order = data.draw(st.permutations(range(x.dim())))
            gaps = data.draw(st.integers(1, 2))
            sizes = [x.shape[dim] for dim in order]
            room = torch.zeros(
                [*sizes[:-1], sizes[-1] * gaps] if sizes else [],
                dtype=x.dtype if x.dtype not in RAW else torch.uint8,
            )
            dst = (room[..., ::gaps] if sizes else room).permute([order.index(dim) for dim in range(x.dim())])
            assert dst.shape == x.shape
            await goes_everywhere(x, dst)

    with small_device(device):
        Run("asyncio")(main)
