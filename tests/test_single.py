"""One ordinary tensor goes a short way: the same results, and the same promises, as the general one."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
import torch
from _small_blocks import SLOT, small_cpu, small_virtual
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import aiogpu
from aiogpu import _engine
from aiogpu.transfers import api, single

CPU = torch.device("cpu")


class Labelled(torch.Tensor):
    pass


def complex_conjugate(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x).conj()


def in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


#: Every kind of tensor, made of a row of eight numbers, and whether it is ordinary.
KINDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "a row": (lambda x: x, True),
    "a matrix": (lambda x: x.view(2, 4), True),
    "a number": (lambda x: x[3], True),
    "a slice": (lambda x: x[2:5], True),
    "one element, odd strides": (lambda x: x.as_strided((1, 1), (7, 3)), True),
    "half": (lambda x: x.to(torch.float16), True),
    "bfloat16": (lambda x: x.to(torch.bfloat16), True),
    "float8": (lambda x: x.to(torch.float8_e4m3fn), True),
    "bool": (lambda x: x > 3, True),
    "uint16": (lambda x: x.to(torch.uint16), True),
    "inference": (in_inference_mode, True),
    "requires grad": (lambda x: x.clone().requires_grad_(), True),
    "a lazy clone": (lambda x: torch._lazy_clone(x), True),
    "nothing": (lambda x: x[:0], False),
    "every other": (lambda x: x[::2], False),
    "transposed": (lambda x: x.view(2, 4).t(), False),
    "expanded": (lambda x: x[:1].expand(4), False),
    "complex": (lambda x: torch.complex(x, x), False),
    "conjugate": (complex_conjugate, False),
    "negative": (lambda x: complex_conjugate(x[:1]).imag, False),
    "a subclass": (lambda x: x.as_subclass(Labelled), False),
    "a parameter": (lambda x: torch.nn.Parameter(x), False),
    "sparse": (lambda x: x.to_sparse(), False),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8), False),
    "packed": (lambda x: x.to(torch.uint8).view(torch.bits8), False),
    "too large": (lambda x: x.repeat(single.DIRECT_BYTES // 4), False),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def made(kind: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of formats that it means to drop
        return KINDS[kind][0](torch.arange(8.0))


def told(value: Any) -> Any:
    """All that can be seen of a result, so that two can be compared."""
    if not isinstance(value, torch.Tensor):
        return type(value), value
    plain = value.detach().dequantize() if value.is_quantized else value.detach()
    plain = plain.to_dense() if plain.layout is torch.sparse_coo else plain
    if plain.dtype.itemsize == 1 and not plain.dtype.is_floating_point and plain.dtype is not torch.bool:
        plain = plain.view(torch.uint8)
    plain = plain.resolve_conj().resolve_neg()
    numbers = plain.to(torch.complex128).tolist() if plain.numel() < 100 else plain.double().sum().item()
    strides = value.stride() if value.layout is torch.strided else None
    flags = (value.requires_grad, value.is_leaf, value.is_inference(), value.is_conj(), value.is_neg())
    return type(value), value.dtype, value.layout, tuple(value.shape), strides, flags, numbers


@pytest.fixture
def shorts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that went the short way."""
    taken: list[str] = []
    start = single._Flight.start

    def counting(self: Any, runtime: Any, what: str, *args: Any) -> Any:
        taken.append(what)
        operation = start(self, runtime, what, *args)
        return operation

    monkeypatch.setattr(single._Flight, "start", counting)
    return taken


@pytest.fixture
def general_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """``with general_way():`` nothing is ordinary."""

    @contextmanager
    def block() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(api, "is_ordinary", lambda x: False)
            yield

    return block


async def outcome(call: Callable[[], aiogpu.Operation[Any]]) -> Any:
    try:
        return told(await call())
    except Exception as error:
        return type(error), str(error)


# -- both ways agree -------------------------------------------------------------------------------


@kinds
def test_both_ways_agree_on_every_kind_of_tensor(run_asyncio, anydevice, general_way, shorts, kind):
    async def main():
        x = made(kind)
        await aiogpu.to_device(torch.ones(1))  # the first call makes the engine
        shorts.clear()
        for verb in (aiogpu.to_device, aiogpu.to_host, aiogpu.item):
            for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
                with mode():
                    here = await outcome(lambda: verb(x))  # noqa: B023
                    went = bool(shorts)
                    with general_way():
                        there = await outcome(lambda: verb(x))  # noqa: B023
                assert here == there, (verb, mode)
                ordinary = KINDS[kind][1] and (verb is not aiogpu.item or x.numel() == 1)
                # A leaf that requires grad is put together again.
                assert went == (ordinary and not (verb is aiogpu.to_device and x.requires_grad))
                shorts.clear()

    run_asyncio(main)


@kinds
def test_both_ways_of_copying_into_memory_agree(run_asyncio, anydevice, general_way, kind):
    async def into(dst: torch.Tensor) -> Any:
        version = None if dst.is_inference() else dst._version
        result = await outcome(lambda: aiogpu.copy_(dst, made(kind)))
        return result, version is None or dst._version > version

    def room() -> torch.Tensor:
        x = made(kind)
        return x.detach().clone() if x.numel() < 100 else torch.empty_like(x)

    async def main():
        there = [room, lambda: in_inference_mode(room())]
        if not made(kind).is_complex():  # of which torch warns, once in a process
            there.append(lambda: torch.zeros(8, dtype=torch.float64))
        await aiogpu.to_device(torch.ones(1))  # the first call makes the engine
        for make in there:
            here = await into(make())
            with general_way():
                assert here == await into(make())

    run_asyncio(main)


@given(
    st.sampled_from(sorted(single._DTYPES, key=str)),
    st.lists(st.integers(1, 5), max_size=4),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_every_shape_and_format_arrives_bit_for_bit(dtype, shape, seed):
    async def main():
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(
            0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        raw = raw % 2 if dtype is torch.bool else raw
        x = raw.view(dtype).view(shape)
        assert single.is_ordinary(x)
        there = await aiogpu.to_device(x)
        back = await aiogpu.to_host(there)
        for y in (there, back):
            assert (y.shape, y.dtype, y.stride()) == (x.shape, x.dtype, x.stride())
            assert torch.equal(y.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8))
            assert y.data_ptr() != x.data_ptr()

    anyio.run(main)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in make_dual
def test_no_tangent_is_left_behind_in_staging_memory(run_asyncio, anydevice):
    # ``copy_`` hands tangents on, under no_grad, too; and views of slots are kept for the next tensor.
    async def main():
        await aiogpu.to_device(torch.ones(1))  # the first call makes the engine
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones(4), torch.full((4,), 7.0))
            with pytest.raises(ValueError, match=r"has a tangent .* `x.detach\(\)`"):
                aiogpu.to_device(dual)
            for data in (dual, [dual], [dual] + [torch.ones(4) for _ in range(20)]):
                await aiogpu.to_host(data)
                await aiogpu.copy_(torch.zeros(4), dual)
                for x in (torch.ones(4), [torch.ones(4)], [torch.ones(4) for _ in range(20)]):
                    for verb in (aiogpu.to_device, aiogpu.to_host):
                        arrived = await verb(x)
                        for y in arrived if isinstance(arrived, list) else [arrived]:
                            assert forward_ad.unpack_dual(y).tangent is None
        assert single.is_ordinary(torch.ones(4))

    run_asyncio(main)


@pytest.mark.parametrize("way", ["function mode", "fake tensors", "vmap", "default device"])
def test_where_others_have_a_say_nothing_is_ordinary(way):
    x = torch.ones(3)
    assert single.is_ordinary(x)
    if way == "function mode":
        with torch.device("meta"):
            assert not single.is_ordinary(x)
    elif way == "fake tensors":
        with FakeTensorMode():
            assert not single.is_ordinary(x)
    elif way == "vmap":
        seen = []
        torch.vmap(lambda y: (seen.append(single.is_ordinary(y)), y)[1])(torch.ones(2, 2))
        assert seen == [False]
    else:
        torch.set_default_device("meta")
        try:
            assert not single.is_ordinary(x)
        finally:
            torch.set_default_device(None)
    assert single.is_ordinary(x)


# -- the promises ----------------------------------------------------------------------------------


VERBS: dict[str, Callable[[torch.Tensor, torch.Tensor], aiogpu.Operation[Any]]] = {
    "to_device": lambda x, dst: aiogpu.to_device(x),
    "to_host": lambda x, dst: aiogpu.to_host(x),
    "item": lambda x, dst: aiogpu.item(x),
    "copy_": lambda x, dst: aiogpu.copy_(dst, x),
}
verbs = pytest.mark.parametrize("verb", VERBS)


def number(value: Any) -> float:
    return float(value)


@verbs
def test_it_is_complete_when_awaited_and_not_before(run, vd, until, shorts, verb):
    async def main():
        latch = vd.latch()
        operation = VERBS[verb](torch.ones(1), torch.zeros(1))
        results = []

        async def wait():
            results.append(number(await operation))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await until(lambda: operation._waiters)
            vd.run_all()
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert not operation.done()
            assert not results
            latch.release()
            vd.run_all()
        assert results == [1.0]
        assert shorts == [verb]

    run(main)


def test_an_uploads_source_is_free_when_the_call_returns(run, vd, shorts):
    async def main():
        x, dst = torch.ones(4), torch.zeros(4)
        operations = [aiogpu.to_device(x), aiogpu.copy_(dst, x)]
        x.fill_(2.0)
        vd.run_all()
        assert [(await operation).tolist() for operation in operations] == [[1.0] * 4] * 2
        assert len(shorts) == 2

    run(main)


@verbs
def test_what_the_device_uses_lives_until_it_is_done_though_the_wait_was_cancelled(run, vd, until, verb):
    async def main():
        x, dst = torch.ones(1), torch.zeros(1)
        kept = weakref.ref(x)
        engine = _engine.find_engine(CPU)
        operation = VERBS[verb](x, dst)
        operation._awaited = True
        handle = weakref.ref(operation)
        with anyio.move_on_after(0) as scope:
            await operation
        assert scope.cancelled_caught
        del operation, x
        gc.collect()
        assert kept() is not None
        assert handle() is not None
        assert engine.slots.used_bytes == engine.slots.nbytes
        vd.run_all()
        await until(lambda: aiogpu.stats().pending == 0)
        gc.collect()
        assert kept() is None
        assert handle() is None
        assert engine.slots.used_bytes == 0

    run(main)


@verbs
@pytest.mark.parametrize("nth", [1, 2], ids=["the copy", "the record"])
def test_a_submission_that_breaks_off_fails_when_the_device_is_done_with_it(
    run, vd, until, shorts, verb, nth
):
    async def main():
        engine = _engine.find_engine(CPU)
        latch = vd.latch()
        vd.fail_submit(nth, ValueError("refused"))
        operation = VERBS[verb](torch.ones(1), torch.zeros(1))
        vd.run_all()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert not operation.done()
        assert engine.slots.used_bytes == engine.slots.nbytes
        latch.release()
        vd.run_all()
        with pytest.raises(ValueError, match="refused") as caught:
            await operation
        assert caught.value.__context__ is None
        assert engine.slots.used_bytes == 0
        assert shorts == [verb]

    run(main)


@verbs
def test_on_a_lost_device_nothing_is_let_go_of(run, vd, verb):
    async def main():
        engine = _engine.find_engine(CPU)
        operation = VERBS[verb](torch.ones(1), torch.zeros(1))
        vd.fault()
        with pytest.raises(aiogpu.DeviceLostError):
            await operation
        assert engine.slots.used_bytes == engine.slots.nbytes
        assert engine.leaked
        with pytest.raises(aiogpu.DeviceLostError):
            VERBS[verb](torch.ones(1), torch.zeros(1))

    run(main)


@verbs
def test_it_is_refused_inside_a_capture(run_asyncio, auto_vd, shorts, verb):
    async def main():
        await aiogpu.to_device(torch.ones(1))
        shorts.clear()
        auto_vd.is_capturing = True
        with pytest.raises(aiogpu.CaptureError, match=verb):
            VERBS[verb](torch.ones(1), torch.zeros(1))
        auto_vd.is_capturing = False
        assert not shorts

    run_asyncio(main)


@verbs
def test_without_a_free_slot_it_goes_the_general_way(run_asyncio, auto_vd, shorts, verb):
    async def main():
        engine = _engine.find_engine(CPU)
        taken = []
        while (slot := engine.slots.take_free()) is not None:
            taken.append(slot)
        assert number(await VERBS[verb](torch.ones(1), torch.zeros(1))) == 1.0
        assert not shorts
        for slot in taken:
            engine.slots.give(slot)

    run_asyncio(main)


@verbs
def test_never_awaited_it_warns_with_the_callers_line(run_asyncio, auto_vd, verb):
    async def main():
        operations = [VERBS[verb](torch.ones(1), torch.zeros(1))]
        while not operations[0].done():
            await anyio.lowlevel.checkpoint()
        with pytest.warns(RuntimeWarning, match="never awaited") as caught:
            operations.clear()
        (warning,) = caught
        assert warning.filename == __file__

    run_asyncio(main)


def test_a_task_ends_after_the_short_transfers_that_it_has_started(run, vd, until, shorts):
    @aiogpu.task
    async def forgetful():
        operation = aiogpu.to_device(torch.ones(1))
        operation._awaited = True

    async def main():
        ended = []

        async def call():
            await forgetful()
            ended.append(True)

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await until(lambda: shorts)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert not ended
            vd.auto = True
            vd.run_all()

    run(main)


def test_memory_of_an_upload_is_kept_for_the_stream_that_awaits_it(run, auto_vd, monkeypatch):
    kept = []
    monkeypatch.setattr(auto_vd, "keep", lambda tensor, stream: kept.append(stream))

    async def main():
        operation = aiogpu.to_device(torch.ones(1))
        await operation
        assert not kept
        with auto_vd.on(auto_vd.open_stream("compute")):
            await operation
            await operation
        assert len(kept) == 1

    run(main)


def test_host_memory_is_written_and_counted_as_written_when_the_bytes_have_landed(run_asyncio, vd):
    """On the virtual device all memory is host memory: the call itself takes ``dst`` for the device's."""

    async def main():
        engine, dst = _engine.find_engine(CPU), torch.zeros(3)
        operation = single.download(aiogpu.current_runtime(), engine, torch.ones(3), "copy_", dst)
        before = dst._version
        await anyio.lowlevel.checkpoint()
        assert dst.tolist() == [0.0] * 3
        vd.run_all()
        assert await operation is dst
        assert dst.tolist() == [1.0] * 3
        assert dst._version == before + 1

    run_asyncio(main)


def test_autograd_does_not_see_what_is_copied(run_asyncio, auto_vd):
    """A driver's copy is an ordinary ``copy_``, in whatever grad mode the caller has."""
    copied = []

    async def main():
        await aiogpu.to_device(torch.ones(1))
        copy = auto_vd.copy
        auto_vd.copy = lambda dst, src, stream: (copied.extend((dst, src)), copy(dst, src, stream))
        x = torch.ones(3, requires_grad=True)
        assert not (await aiogpu.to_host(x * 2)).requires_grad
        assert not (await aiogpu.to_host(x)).requires_grad
        assert await aiogpu.item((x * 2).sum()) == 6.0
        assert not any(tensor.requires_grad for tensor in copied)
        dst = torch.zeros(3, requires_grad=True)
        assert await aiogpu.copy_(dst, torch.ones(3)) is dst
        assert dst.is_leaf
        assert not single._alike(dst, torch.ones(3))

    run_asyncio(main)


def test_what_is_done_within_a_turn_of_the_loop_is_not_parked_for(run, auto_vd, monkeypatch):
    async def main():
        door = aiogpu.current_runtime().reactor.door
        parked = []
        waiter = door.waiter
        monkeypatch.setattr(door, "waiter", lambda: (parked.append(None), waiter())[1])
        for _ in range(3):
            await aiogpu.to_device(torch.ones(1))
        assert not parked or not door.looks_in_a_turn

    run(main)


# -- page-locked sources ---------------------------------------------------------------------------


def test_a_page_locked_source_up_to_a_mebibyte_goes_straight_onto_the_callers_stream(run, vd, until):
    async def main():
        x = vd.pin(torch.arange(single.DIRECT_BYTES // 4, dtype=torch.int32))
        reference = weakref.ref(x)
        operation = aiogpu.to_device(x)
        assert "in flight" in repr(operation)
        assert ("copy", vd.current().native.number) in vd.log
        assert _engine.find_engine(CPU).slots.used_bytes == 0
        expected = x.clone()
        del x
        gc.collect()
        assert reference() is not None
        vd.run_all()
        assert torch.equal(await operation, expected)
        await until(lambda: reference() is None)

    run(main)


@pytest.mark.parametrize("count", [16, 2**17], ids=["through a slot", "straight"])
def test_autograd_does_not_see_a_copy_of_what_requires_grad(run_asyncio, auto_vd, monkeypatch, count):
    """With a driver that copies as the CUDA one does, in whatever grad mode there is."""
    monkeypatch.setattr(auto_vd, "copy", lambda dst, src, stream: dst.copy_(src))

    async def main():
        src = auto_vd.pin(torch.ones(count)).requires_grad_()
        for source in (src, auto_vd.pin(src * 2)):
            there = await aiogpu.copy_(torch.zeros(count), source)
            assert there.sum() == source.sum()
            assert not there.requires_grad
            assert not (await aiogpu.to_host(source)).requires_grad

    run_asyncio(main)


def test_with_a_limit_of_bytes_in_flight_it_counts(run_asyncio, auto_vd, shorts):
    async def main():
        async with aiogpu.Runtime(max_inflight_bytes=2**20):
            x = auto_vd.pin(torch.ones(2**17))
            assert torch.equal(await aiogpu.to_device(x), x)
            assert not shorts

    run_asyncio(main)


def test_what_is_not_page_locked_is_staged(run_asyncio, auto_vd, shorts):
    async def main():
        x = torch.ones(2**17)
        assert torch.equal(await aiogpu.to_device(x), x)
        assert not shorts

    run_asyncio(main)


def test_the_size_of_a_slot_decides(run_asyncio, shorts):
    for block in (small_virtual, small_cpu):
        with block():

            async def main():
                x = torch.ones(SLOT + 1, dtype=torch.uint8)
                assert torch.equal(await aiogpu.to_host(x), x)
                assert torch.equal(await aiogpu.to_host(x[:SLOT]), x[:SLOT])

            run_asyncio(main)
    assert shorts == ["to_host"] * 2
