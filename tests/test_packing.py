"""Many small tensors in one call are copied as few large ones, and nobody can tell but by the clock."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies as st
from test_transfers import DTYPES, pattern, same

import aiogpu
from aiogpu._engine import SLOT_BYTES
from aiogpu.testing import VirtualDevice, virtual_device
from aiogpu.transfers import api, packing, plan, tree
from aiogpu.transfers.jobs import SMALL_LEAVES
from aiogpu.transfers.packing import ALIGNMENT, SLAB_BYTES

MANY = 400


def copies(device: VirtualDevice) -> int:
    return sum(name == "copy" for name, _ in device.log)


def batch(count: int = MANY, numel: int = 256) -> dict[str, torch.Tensor]:
    return {f"key {n}": torch.arange(numel, dtype=torch.float32) + n for n in range(count)}


def equal(found: Any, expected: Any) -> bool:
    return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)


def test_a_dict_of_many_goes_up_and_down_in_few_copies(run, auto_vd):
    async def main():
        data = batch(10_000, 256)  # 10 MB
        there = await aiogpu.to_device(data)
        assert copies(auto_vd) <= 10_000 * 1024 / SLAB_BYTES + 1
        back = await aiogpu.to_host(there)
        assert copies(auto_vd) <= 2 * (10_000 * 1024 / SLAB_BYTES + 1)
        assert equal(there, data)
        assert equal(back, data)

    run(main)


@pytest.mark.parametrize("count", [1, SMALL_LEAVES, SMALL_LEAVES + 1])
def test_few_leaves_have_memory_of_their_own(run_asyncio, auto_vd, count):
    async def main():
        there = await aiogpu.to_device(batch(count))
        memories = {x.untyped_storage().data_ptr() for x in there.values()}
        assert len(memories) == (count if count <= SMALL_LEAVES else 1)

    run_asyncio(main)


# -- exact ---------------------------------------------------------------------------------------------------


def zoo() -> list[Any]:
    """Small leaves of every kind, side by side, some of each."""
    leaves: list[Any] = []
    for seed in range(3):
        for dtype in DTYPES:
            for nbytes in (dtype.itemsize, 48, 1024 + 16, SLOT_BYTES):
                leaves.append(pattern(nbytes, dtype, seed))
        x = pattern(4 * 96, torch.float32, seed)
        leaves += [torch.tensor(seed), torch.empty(0), torch.empty(0, 5, dtype=torch.bool)]
        leaves += [x.view(2, 4, 12), x.view(8, 12).t(), x[::2], x[3:], x[:12].expand(4, 12), x[5]]
        leaves += [x.view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)]
        leaves += [torch.view_as_complex(x.view(-1, 2)).conj(), torch._neg_view(x), x.view(1, 1, -1)]
        leaves += [torch.view_as_complex(x.view(-1, 2)).conj().imag]
        leaves += [pattern(SLOT_BYTES + 8, torch.uint8, seed), pattern(SLOT_BYTES * 3, torch.int64, seed)]
    return leaves


@pytest.fixture(params=["virtual", "through chunks", "cpu"])
def anywhere(request: pytest.FixtureRequest):
    if request.param == "cpu":
        yield
    else:
        from aiogpu._engine import EngineSettings

        none = EngineSettings(pinned_bytes=0)
        with virtual_device(auto=True, settings=none if request.param == "through chunks" else None):
            yield


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_and_layout_is_exact_in_one_batch(run_asyncio, anywhere):
    async def main():
        leaves = zoo()
        there = await aiogpu.to_device(leaves)
        back = await aiogpu.to_host(there)
        for number, (leaf, up, down) in enumerate(zip(leaves, there, back, strict=True)):
            for moved in (up, down):
                assert same(moved, leaf.resolve_conj().resolve_neg()), (number, leaf.dtype, leaf.shape)
                assert not moved.is_conj()
                assert not moved.is_neg()
                if leaf.is_contiguous() or leaf.is_contiguous(memory_format=torch.channels_last):
                    assert moved.stride() == leaf.stride() or leaf.numel() < 2 or 1 in leaf.shape

    run_asyncio(main)


@pytest.mark.parametrize("wanted", [torch.float16, torch.float64, torch.int32], ids=str)
def test_dtype_converts_each_leaf(run_asyncio, anywhere, wanted):
    async def main():
        data = [pattern(24, torch.int16, n) if n % 3 else torch.randn(5, 5) * 50 for n in range(MANY)]
        for moved in (await aiogpu.to_device(data, dtype=wanted), await aiogpu.to_host(data, dtype=wanted)):
            assert all(same(x, leaf.to(wanted)) for x, leaf in zip(moved, data, strict=True))

    run_asyncio(main)


def test_numpy_arrays_are_packed_beside_tensors(run_asyncio, auto_vd):
    async def main():
        data = [
            numpy.arange(n % 7 + 1, dtype=">i4" if n % 2 else "f8")[:: 1 - 2 * (n % 3 == 0)]
            for n in range(MANY)
        ]
        mixed = [*data, *batch(MANY).values()]
        there = await aiogpu.to_device(mixed)
        assert copies(auto_vd) <= 4
        for found, expected in zip(there, mixed, strict=True):
            assert found.tolist() == expected.tolist()

    run_asyncio(main)


def test_what_is_one_object_stays_one(run_asyncio, auto_vd):
    async def main():
        x = torch.ones(5)
        there = await aiogpu.to_device({"a": [x] * 3, "b": x, "rest": batch()})
        assert there["a"][0] is there["a"][2] is there["b"]

    run_asyncio(main)


def test_leaves_that_require_grad_are_parameters_and_leaves_again(run_asyncio, auto_vd):
    async def main():
        data = [
            torch.nn.Parameter(torch.randn(4)) if n % 2 else torch.randn(4, requires_grad=True)
            for n in range(50)
        ]
        there = await aiogpu.to_device(data)
        assert [type(x) for x in there] == [type(x) for x in data]
        assert all(x.requires_grad and x.is_leaf for x in there)
        sum((x * 2).sum() for x in there).backward()
        assert all(x.grad is not None and x.grad.tolist() == [2.0] * 4 for x in there)
        assert not any(x.requires_grad for x in await aiogpu.to_host(there))

    run_asyncio(main)


def test_inside_inference_mode_the_results_are_ordinary_tensors(run_asyncio, auto_vd):
    @aiogpu.task
    async def main():
        with torch.inference_mode():
            data = [torch.full((9,), n) for n in range(50)]
            there = await aiogpu.to_device(data)
            assert not any(x.is_inference() for x in there)
            assert [x.tolist() for x in there] == [x.tolist() for x in data]

    run_asyncio(main)


SHAPES = [(), (1,), (3,), (64,), (2, 5), (5, 2), (4, 4, 4, 4), (0,), (70, 1000)]
several = st.lists(
    st.tuples(
        st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64]),
        st.sampled_from(SHAPES),
        st.sampled_from(["plain", "plain", "transposed", "parameter", "array", "same"]),
        st.integers(1, 30),
    ),
    min_size=1,
    max_size=8,
)


def firsts(leaves: list[Any]) -> list[int]:
    """For each leaf, where that object is first."""
    seen: dict[int, int] = {}
    return [seen.setdefault(id(x), number) for number, x in enumerate(leaves)]


def made(recipe: list[Any]) -> list[Any]:
    leaves: list[Any] = []
    for seed, (dtype, shape, kind, count) in enumerate(recipe):
        for number in range(count):
            x = torch.randint(0, 100, shape, generator=torch.manual_seed(31 * seed + number)).to(dtype)
            if kind == "parameter" and dtype.is_floating_point:
                x = torch.nn.Parameter(x)
            if kind == "same" and number:
                x = leaves[-1]
            leaves.append(
                x.mT if kind == "transposed" and x.dim() > 1 else x.numpy() if kind == "array" else x
            )
    return leaves


@pytest.mark.parametrize("wanted", [None, torch.float16], ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_packed_means_the_same_as_one_by_one(auto_vd, wanted):
    """Whatever the mixture, of which runs of leaves that are alike go together."""

    @hypothesis.given(several)
    @hypothesis.settings(deadline=None, max_examples=25)
    def check(recipe: list[Any]) -> None:
        asyncio.run(compare(made(recipe)))

    async def compare(data: list[Any]) -> None:
        for start in (aiogpu.to_device, aiogpu.to_host):
            few = [data[n : n + SMALL_LEAVES] for n in range(0, len(data), SMALL_LEAVES)]
            one_by_one = [leaf for some in few for leaf in await start(some, dtype=wanted)]
            for found, alone in zip(await start(data, dtype=wanted), one_by_one, strict=True):
                assert same(found, alone)
                assert type(found) is type(alone)
                assert found.requires_grad == alone.requires_grad
                assert found.is_leaf
                assert found.stride() == alone.stride() or found.numel() < 2 or 1 in found.shape
                assert found._base is None
        there = await aiogpu.to_device(data)
        assert firsts(data) == firsts(there)

    check()


def test_leaves_of_equal_shape_go_together_wherever_they_are(run_asyncio, auto_vd, monkeypatch):
    joined: list[int] = []
    stack = packing._stack
    monkeypatch.setattr(
        packing, "_stack", lambda leaves, table: (joined.append(len(leaves)), stack(leaves, table))
    )

    async def main():
        data = [{"a": torch.full((n % 3 + 1,), n), "b": torch.tensor(n)} for n in range(300)]
        there = await aiogpu.to_device(data)
        assert sorted(joined) == [100, 100, 100, 300]
        assert all(same(x["a"], y["a"]) and same(x["b"], y["b"]) for x, y in zip(there, data, strict=True))

    run_asyncio(main)


def test_slabs_go_up_where_page_locked_chunks_are_smaller(run_asyncio):
    from aiogpu._engine import EngineSettings

    with virtual_device(auto=True, settings=EngineSettings(staging_bytes=256 * 1024)):

        async def main():
            data = batch(3000)
            assert equal(await aiogpu.to_device(data), data)

        run_asyncio(main)


# -- what shared memory must not mean ------------------------------------------------------------------------


def test_each_leaf_has_memory_that_no_other_touches(run_asyncio, anywhere):
    async def main():
        data = [
            torch.zeros(n % 9 + 1, dtype=(torch.uint8, torch.float32, torch.int16)[n % 3])
            for n in range(MANY)
        ]
        for moved in (await aiogpu.to_device(data), await aiogpu.to_host(data)):
            for number, x in enumerate(moved):
                x.fill_(number % 200 + 1)
            assert all(bool((x == number % 200 + 1).all()) for number, x in enumerate(moved))

    run_asyncio(main)


def test_writing_one_in_place_does_not_outdate_the_others(run_asyncio, auto_vd):
    """A view made under no_grad may not be written where gradients are wanted, and shares its version."""

    async def main():
        weight = torch.ones(4, requires_grad=True)
        a, b, *_ = await aiogpu.to_device([torch.ones(4) for _ in range(50)])
        product = (weight * a).sum()  # keeps `a` for its gradient
        b.add_(1)
        b.mul_(weight)
        (product + b.sum()).backward()
        assert weight.grad is not None
        assert a._base is None
        assert not a._is_view()

    run_asyncio(main)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128], ids=str)
def test_every_leaf_is_aligned_as_memory_of_its_own_would_be(run_asyncio, auto_vd, dtype):
    async def main():
        for shapes in ([(3,)] * 50, [(n % 5 + 1, 3) for n in range(50)]):
            for moved in (
                await aiogpu.to_device([torch.ones(shape, dtype=dtype) for shape in shapes]),
                await aiogpu.to_device([torch.ones(shape) for shape in shapes], dtype=torch.float16),
            ):
                start = moved[0].untyped_storage().data_ptr()
                assert all((x.data_ptr() - start) % ALIGNMENT == 0 for x in moved)

    run_asyncio(main)


def test_whoever_keeps_one_leaf_keeps_no_more_than_a_slab(run_asyncio, anywhere):
    async def main():
        data = [torch.zeros(SLOT_BYTES // 2, dtype=torch.uint8) for _ in range(100)]
        for moved in (await aiogpu.to_device(data), await aiogpu.to_host(data)):
            assert max(x.untyped_storage().nbytes() for x in moved) <= SLAB_BYTES
            assert copy.deepcopy(moved[0]).sum() == 0
            assert moved[0].clone().untyped_storage().nbytes() == SLOT_BYTES // 2

    run_asyncio(main)


def test_memory_is_marked_once_a_slab_and_not_once_a_leaf(run_asyncio, auto_vd, monkeypatch):
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(auto_vd, "keep", lambda tensor, stream: kept.append(tensor))

    @aiogpu.task
    async def main():
        there = await aiogpu.to_device(batch())
        assert 0 < len(kept) <= 4
        assert kept[0].untyped_storage().data_ptr() == there["key 0"].untyped_storage().data_ptr()

    run_asyncio(main)


# -- life ----------------------------------------------------------------------------------------------------


def test_a_batch_is_usable_by_ordered(run, vd):
    @aiogpu.task
    async def main():
        there = await aiogpu.to_device(batch()).ordered()
        vd.launch(lambda: seen.append(there["key 7"][0].item()), reads=[there["key 7"]])

    seen: list[float] = []

    async def whole():
        await main()
        vd.run_all()

    run(whole)
    assert seen == [7.0]


def test_sources_stay_alive_until_a_packed_download_has_read_them(run, vd, until):
    """The gathering kernels read the leaves when the device gets to them."""
    from torch.multiprocessing.reductions import StorageWeakRef

    async def main():
        data = [torch.full((10,), float(n)) for n in range(50)]
        memories = [StorageWeakRef(x.untyped_storage()) for x in data]
        operation = aiogpu.to_host(data)
        del data
        await until(lambda: "in flight" in repr(operation))
        assert not any(memory.expired() for memory in memories)
        vd.run_all()
        back = await operation
        assert [x[0].item() for x in back] == list(range(50))
        operation = back = None
        await until(lambda: all(memory.expired() for memory in memories))

    run(main)


def test_out_of_memory_in_a_batch_is_tried_once_more(run_asyncio, auto_vd, monkeypatch):
    from aiogpu.transfers import uploads

    allocate, refused = uploads.room_for, []

    def room_for(source: torch.Tensor, device: torch.device) -> torch.Tensor:
        if not refused:
            refused.append(source)
            raise torch.OutOfMemoryError("injected")
        return allocate(source, device)

    monkeypatch.setattr(uploads, "room_for", room_for)

    async def main():
        data = batch()
        assert equal(await aiogpu.to_device(data), data)
        assert refused

    run_asyncio(main)


def test_destinations_of_the_callers_are_filled_one_by_one(run_asyncio, auto_vd):
    async def main():
        data = batch(50)
        out = {key: torch.empty_like(x) for key, x in data.items()}
        assert await aiogpu.to_host(data, out=out) is out
        assert equal(out, data)

    run_asyncio(main)


def test_packing_lets_go_of_the_gil_again_and_again(run_asyncio, auto_vd, monkeypatch):
    """The loop's thread needs it, too, and would wait up to 5 ms each time."""
    threads: list[int] = []
    for room in (packing, plan):
        monkeypatch.setattr(room, "breathe", lambda: threads.append(threading.get_ident()))

    async def main():
        await aiogpu.to_device(batch(10 * plan.STRIDE, 8))
        assert len(threads) >= 10 - 1
        threads.clear()
        shapes = [torch.ones(n + 1, dtype=torch.uint8) for n in range(10 * packing.STRIDE)]
        for start in (aiogpu.to_device, aiogpu.to_host):
            await start(shapes)
            assert len(threads) >= 3 * (10 - 3)  # planned, gathered, cut
            assert threading.get_ident() not in threads
            threads.clear()

    run_asyncio(main)


# -- the walk ------------------------------------------------------------------------------------------------

HUGE = 3 * api.PARTS_AT_ONCE


def nested(count: int) -> dict[str, Any]:
    """``count`` tensors, some deep inside, one of them twice."""
    x = torch.ones(3)
    leaves = [torch.full((n % 5 + 1,), float(n)) for n in range(count)]
    return {
        "x": x,
        "flat": leaves[::2],
        "deep": [{"n": n, "leaf": leaf} for n, leaf in enumerate(leaves[1::2])],
        "last": x,
    }


def test_of_very_many_leaves_the_call_looks_at_some_and_a_thread_at_the_rest(run, auto_vd, monkeypatch):
    looks: list[int] = []
    is_ordinary, ordinary = tree.is_ordinary, tree.ordinary

    def noting(x: torch.Tensor) -> bool:
        looks.append(threading.get_ident())
        return is_ordinary(x)

    def noting_all(parts: Any, dtype: Any) -> Any:
        found = ordinary(parts, dtype)
        looks.extend([threading.get_ident()] * len(parts) * (found is not None))
        return found

    monkeypatch.setattr(tree, "is_ordinary", noting)
    monkeypatch.setattr(tree, "ordinary", noting_all)

    async def main():
        for start in (aiogpu.to_device, aiogpu.to_host):
            looks.clear()
            data = nested(HUGE)
            there = await start(data)
            here = looks.count(threading.get_ident())
            assert 0 < here <= api.PARTS_AT_ONCE
            assert len(looks) == HUGE + 1
            assert there["x"] is there["last"]
            assert all(same(a, b) for a, b in zip(there["flat"], data["flat"], strict=True))
            assert [each["n"] for each in there["deep"]] == list(range(HUGE // 2))
            assert all(same(a["leaf"], b["leaf"]) for a, b in zip(there["deep"], data["deep"], strict=True))

    run(main)


def test_what_is_refused_among_the_rest_fails_the_operation(run, auto_vd):
    async def main():
        data = [*(torch.ones(2) for _ in range(HUGE)), torch.empty(3, device="meta")]
        for start in (aiogpu.to_device, aiogpu.to_host):
            operation = start(data)
            with pytest.raises(ValueError, match=rf"data\[{HUGE}\] is a meta tensor"):
                await operation
        with pytest.raises(ValueError, match="meta"):  # among the first ones, before any work
            aiogpu.to_device(data[::-1])

    run(main)


def test_objects_that_move_themselves_may_be_among_the_rest(run_asyncio, auto_vd):
    async def main():
        data = [*(torch.ones(2) for _ in range(HUGE)), torch.nn.Linear(2, 2), numpy.arange(3)]
        there = await aiogpu.to_device(data)
        assert isinstance(there[-2], torch.nn.Linear)
        assert there[-1].tolist() == [0, 1, 2]

    run_asyncio(main)


def test_a_huge_batch_goes_up_as_the_first_call_of_a_program(run_asyncio):
    """There is no engine yet."""
    from aiogpu import _engine

    before = _engine.install_engine(torch.device("cpu"), None)
    try:

        async def main():
            data = nested(HUGE)
            there = await aiogpu.to_device(data)
            assert same(there["flat"][-1], data["flat"][-1])

        run_asyncio(main)
    finally:
        made = _engine.install_engine(torch.device("cpu"), before)
        if made is not None:
            made.close_threads(5.0)
            made.driver.close()


def test_debug_mode_knows_all_sources_of_a_huge_batch(run_asyncio, vd):
    async def main():
        async with aiogpu.Runtime(debug=True):
            data = [torch.ones(2) for _ in range(HUGE)]
            operation = aiogpu.to_device(data)
            data[-1].add_(1)
            with pytest.raises(RuntimeError, match="written in place"):
                await operation.ordered()
            vd.run_all()

    run_asyncio(main)
