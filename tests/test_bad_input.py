"""Misuse is an error before any work was submitted, and its message says what to write instead."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aiogpu

X = torch.ones(3)


class Wrapped:
    """Runs ``call`` in a coroutine on a device that counts what is submitted."""

    def __init__(self, run: Any, device: Any) -> None:
        self._run = run
        self._device = device

    def refuses(self, error: type[BaseException], message: str, call: Callable[[], Any]) -> None:
        async def main() -> None:
            before = self._device.submitted
            with pytest.raises(error, match=message):
                await _called(call)
            assert self._device.submitted == before
            stats = aiogpu.stats()
            assert (stats.operations, stats.pending, stats.staging_bytes_in_use) == (0, 0, 0)

        self._run(main)


async def _called(call: Callable[[], Any]) -> None:
    result = call()
    if asyncio.iscoroutine(result):
        await result


@pytest.fixture
def check(run_asyncio: Any, vd: Any) -> Wrapped:
    return Wrapped(run_asyncio, vd)


# -- what is moved -----------------------------------------------------------------------------------


def packed_quantized() -> torch.Tensor:
    scales, zero_points = torch.ones(2), torch.zeros(2)
    return torch.quantize_per_channel(torch.ones(2, 4), scales, zero_points, 0, torch.quint4x2)


UNMOVABLE = [
    pytest.param(
        lambda: torch.ones(3).to_mkldnn(),
        TypeError,
        r"torch\._mkldnn tensor.*use `x\.to_dense\(\)`",
        id="mkldnn",
        marks=pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN"),
    ),
    pytest.param(
        packed_quantized,
        TypeError,
        r"quantized tensor of several torch\.quint4x2 a byte; use `x\.dequantize\(\)`",
        id="several elements a byte",
        marks=pytest.mark.filterwarnings("ignore"),
    ),
    pytest.param(
        lambda: torch._efficientzerotensor((3,)), ValueError, "zero tensors.*`torch.zeros", id="zero tensor"
    ),
    pytest.param(lambda: torch.ones(3).untyped_storage(), TypeError, "storage.*pass a tensor", id="storage"),
    pytest.param(
        lambda: torch.ones(3, device="meta"), ValueError, r"meta tensor.*torch\.empty_like\(x", id="meta"
    ),
    pytest.param(
        lambda: torch.nn.LazyLinear(2).weight,
        ValueError,
        "holds no data before its module's first",
        id="lazy",
    ),
]


@pytest.mark.parametrize(("make", "error", "words"), UNMOVABLE)
@pytest.mark.parametrize("verb", ["to_device", "to_host"])
def test_layouts_that_cannot_be_moved_are_named_with_their_place(check, verb, make, error, words):
    x = make()
    call = getattr(aiogpu, verb)
    check.refuses(error, rf"{verb}\(\): data is an? .*{words}|{verb}\(\): data is .*{words}", lambda: call(x))
    check.refuses(error, rf"{verb}\(\): data\['a'\]\[1\] .*{words}", lambda: call({"a": [1, x]}))


def test_unsupported_conversions_are_refused_by_both_formats(check):
    """Torch has no kernels for them, and would say so only when the transfer is under way."""
    message = (
        r"to_device\(\): data\['a'\] is of dtype torch\.bits8, which torch cannot convert to torch\.float32"
    )
    bits = torch.zeros(3, dtype=torch.uint8).view(torch.bits8)
    check.refuses(TypeError, message, lambda: aiogpu.to_device({"a": bits}, dtype=torch.float32))
    message = r"to_host\(\): data is of dtype torch\.float32, which torch cannot convert to torch\.qint8"
    check.refuses(TypeError, message, lambda: aiogpu.to_host(X, dtype=torch.qint8))


def test_a_tensor_in_the_middle_of_a_graph_is_refused_with_the_two_ways_out(check):
    y = torch.ones(3, requires_grad=True) * 2
    message = r"requires grad and is not a leaf.*`x\.detach\(\)`.*`await aiogpu\.run_sync\(x\.to, device\)`"
    check.refuses(ValueError, message, lambda: aiogpu.to_device([y]))


def test_data_that_contains_itself_is_refused(check):
    loop: list[Any] = [X]
    loop.append(loop)
    check.refuses(ValueError, r"data\[1\] is a list that contains itself", lambda: aiogpu.to_device(loop))


def test_numpy_dtypes_that_torch_lacks_are_refused(check):
    numpy = pytest.importorskip("numpy")
    dates = numpy.array(["2020-01-01"], dtype="datetime64[D]")
    check.refuses(
        TypeError, r"datetime64.*convert it with `x\.astype", lambda: aiogpu.to_device({"d": dates})
    )


# -- where to ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", "cpu:cpu"])
def test_a_device_that_is_none_is_refused_with_how_to_write_one(check, device):
    message = f"{re.escape(repr(device))} is not a device: write 'cuda', 'cuda:0', 'cpu' or a torch.device"
    check.refuses(ValueError, message, lambda: aiogpu.to_device(X, device))
    check.refuses(ValueError, message, lambda: aiogpu.Runtime(device))


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_a_device_without_a_driver_is_refused(check, device):
    message = f"aiogpu has no driver for {device}: use 'cuda', 'cuda:<index>' or 'cpu'"
    check.refuses(ValueError, message, lambda: aiogpu.to_device(X, device))
    check.refuses(ValueError, message, lambda: aiogpu.synchronize(device))


@pytest.mark.parametrize("device", [True, 1.5, ["cuda"], object()])
def test_what_is_no_device_at_all_is_a_type_error(check, device):
    message = "is not a device: write 'cuda', 'cuda:0', 'cpu' or a torch.device"
    check.refuses(TypeError, message, lambda: aiogpu.to_device(X, device))


@pytest.mark.parametrize("verb", ["to_device", "to_host"])
@pytest.mark.parametrize("dtype", ["float16", float, 16])
def test_a_dtype_is_torchs(check, verb, dtype):
    check.refuses(
        TypeError,
        rf"{verb}\(dtype=\.\.\.\) takes a torch\.dtype such as torch\.float16",
        lambda: getattr(aiogpu, verb)(X, dtype=dtype),
    )


# -- out=, copy_, item -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "out", "message"),
    [
        pytest.param(X, [], r"in the same nesting as data", id="nothing"),
        pytest.param([X, X + 1], [X.clone()], r"in the same nesting as data", id="too few"),
        pytest.param(
            X, torch.ones(4), r"shape \(4,\) on cpu where data gives torch\.float32, \(3,\)", id="shape"
        ),
        pytest.param(
            X, torch.ones(3).int(), r"torch\.int32 tensor .* where data gives torch\.float32", id="dtype"
        ),
        pytest.param(X, torch.nn.Linear(1, 1), r"in the same nesting", id="module"),
    ],
)
def test_out_must_fit(check, data, out, message):
    check.refuses(ValueError, message, lambda: aiogpu.to_host(data, out=out))


def test_out_is_matched_by_place_not_by_order(run_asyncio, auto_vd):
    """Dicts of equal shapes in another order: a mix-up would be silent."""

    async def main():
        data = {"a": torch.full((3,), 1.0), "b": torch.full((3,), 2.0)}
        out = {"b": torch.zeros(3), "a": torch.zeros(3)}
        await aiogpu.to_host(data, out=out)
        assert [out["a"][0], out["b"][0]] == [1, 2]
        with pytest.raises(ValueError, match="same nesting"):
            aiogpu.to_host(data, out=[torch.zeros(3), torch.zeros(3)])

    run_asyncio(main)


def test_out_on_a_device_without_data_is_refused(check):
    meta = torch.ones(3, device="meta")
    check.refuses(ValueError, "meta tensor, which holds no data", lambda: aiogpu.to_host(X, out=meta))


@pytest.mark.parametrize(
    ("dst", "src", "error", "message"),
    [
        ([X], X, TypeError, r"dst is a list\. For containers use `to_device\(data\)`"),
        (X, 3.0, TypeError, r"takes two tensors; src is a float"),
        (X, torch.ones(4), ValueError, r"cannot broadcast src of shape \(4,\) to dst"),
        (X, torch.ones(2, 3), ValueError, r"cannot broadcast src of shape \(2, 3\)"),
        (torch.ones(1).expand(3), X, ValueError, r"elements have memory of their own: use dst\.clone"),
        (X.to_sparse(), X, TypeError, r"torch\.sparse_coo.*run_sync\(dst\.copy_, src\)"),
        (X, X.to_sparse(), TypeError, r"torch\.sparse_coo"),
    ],
    ids=["list", "number", "shape", "larger", "expanded", "sparse", "from sparse"],
)
def test_copy_takes_two_tensors_that_fit(check, dst, src, error, message):
    check.refuses(error, message, lambda: aiogpu.copy_(dst, src))


def test_item_takes_one_element(check):
    message = r"one element, not 3 \(shape \(3,\)\): use `await aiogpu\.to_host\(tensor\)`"
    check.refuses(ValueError, message, lambda: aiogpu.item(X))
    check.refuses(ValueError, "one element, not 0", lambda: aiogpu.item(X[:0]))
    check.refuses(TypeError, r"item\(\) takes a tensor, not a float", lambda: aiogpu.item(3.0))  # type: ignore[arg-type]


# -- synchronize, run_sync, stream, share ------------------------------------------------------------


@pytest.mark.parametrize("target", [1.5, True, X, [0], object()])
def test_synchronize_takes_streams_events_and_devices(check, target):
    message = r"takes nothing, a torch\.cuda\.Stream, a torch\.cuda\.Event or a device.*await its operation"
    check.refuses(TypeError, message, lambda: aiogpu.synchronize(target))


def test_run_sync_takes_a_function(check):
    message = r"run_sync\(\) takes a function and its arguments, not a Tensor"
    check.refuses(TypeError, message, lambda: aiogpu.run_sync(X))  # type: ignore[arg-type]


def test_stream_outside_of_a_task_says_where_it_works(check):
    def block() -> None:
        with aiogpu.stream():
            pass

    message = r"works inside a task only.*@aiogpu\.task\. Outside of tasks.*torch\.cuda\.stream\(\)"
    check.refuses(RuntimeError, message, block)


def test_stream_in_a_coroutine_that_a_task_has_spawned_is_outside_of_that_task(run_asyncio, auto_vd):
    async def spawned():
        with pytest.raises(RuntimeError, match="works inside a task only"):
            aiogpu.stream().__enter__()
        return True

    @aiogpu.task
    async def task():
        return await asyncio.create_task(spawned())

    assert run_asyncio(task)


@pytest.mark.parametrize("stream", [0, 140_000_000, "cuda:0", object()])
def test_stream_takes_torchs_streams_and_no_raw_handles(stream):
    message = r"takes a torch\.cuda\.Stream, not .*goes through torch\.cuda\.ExternalStream\(handle\)"
    with pytest.raises(TypeError, match=message):
        aiogpu.stream(stream)


def test_a_stream_block_is_entered_once_at_a_time(run_asyncio, auto_vd):
    @aiogpu.task
    async def task():
        block = aiogpu.stream()
        with block:
            with pytest.raises(RuntimeError, match=r"already entered: make one for each block"):
                block.__enter__()
        with block:  # again, but not nested
            await asyncio.sleep(0)

    run_asyncio(task)


def test_a_stream_on_a_device_that_has_not_been_started_says_how_to_start_it(run_asyncio, auto_vd):
    @aiogpu.task
    async def task():
        message = (
            r"cuda:7 has not been used through aiogpu yet.*`await aiogpu\.synchronize\('cuda:7'\)` first"
        )
        with pytest.raises(RuntimeError, match=message):
            aiogpu.stream(device="cuda:7").__enter__()

    run_asyncio(task)


# -- no loop, no runtime -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: aiogpu.to_device(X),
        lambda: aiogpu.to_host(X),
        lambda: aiogpu.copy_(X, X),
        lambda: aiogpu.item(X[:1]),
        lambda: aiogpu.share(X),
        lambda: aiogpu.current_runtime(),
        lambda: aiogpu.stats(),
        lambda: aiogpu.synchronize().send(None),
        lambda: aiogpu.run_sync(print).send(None),
    ],
    ids=[
        "to_device",
        "to_host",
        "copy_",
        "item",
        "share",
        "current_runtime",
        "stats",
        "synchronize",
        "run_sync",
    ],
)
def test_without_an_event_loop_every_call_says_how_to_start_one(call):
    message = r"needs a running event loop in this thread: .* started with asyncio\.run\(main\(\)\)"
    with pytest.raises(RuntimeError, match=message):
        call()
    gc.collect()


def test_a_second_runtime_on_one_loop_is_refused(run, auto_vd):
    async def main():
        async with aiogpu.Runtime() as runtime:
            with pytest.raises(RuntimeError, match=r"already has a Runtime.*aiogpu\.current_runtime\(\)"):
                async with aiogpu.Runtime():
                    pass
            with pytest.raises(RuntimeError, match=r"entered once; make a new one"):
                await runtime.__aenter__()

    run(main)


def test_a_closed_runtime_says_so(run, auto_vd):
    async def main():
        async with aiogpu.Runtime() as runtime:
            pass
        with pytest.raises(RuntimeError, match="this Runtime is closed"):
            runtime.stats()
        with pytest.raises(RuntimeError, match="entered once; make a new one"):
            async with runtime:
                pass
        with pytest.raises(RuntimeError, match=r"has not been entered: `async with aiogpu\.Runtime\(\)"):
            aiogpu.Runtime().stats()

    run(main)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"streams": 0}, ValueError, "streams must be at least 1, not 0"),
        ({"spin": -1}, ValueError, "spin must be at least 0"),
        ({"spin": float("nan")}, TypeError, "spin is a number"),
        ({"grace": "5"}, TypeError, "grace is a number, not '5'"),
        ({"workers": 0}, ValueError, "workers must be at least 1"),
        ({"staging_bytes": -1}, ValueError, "staging_bytes must be at least 0"),
        ({"pinned_bytes": True}, TypeError, "pinned_bytes is a number"),
        ({"wake": "poll"}, ValueError, "wake is 'auto', 'callback' or 'thread', not 'poll'"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        aiogpu.Runtime(**settings)


@pytest.mark.parametrize(
    ("name", "text", "kind"), [("STREAMS", "many", "int"), ("SPIN", "x", "float"), ("GRACE", "5s", "float")]
)
def test_an_environment_variable_that_is_no_number_is_named(monkeypatch, name, text, kind):
    monkeypatch.setenv(f"AIOGPU_{name}", text)
    with pytest.raises(ValueError, match=f"AIOGPU_{name}='{text}' is not a valid {kind}"):
        aiogpu.Runtime()


# -- inside a capture --------------------------------------------------------------------------------


@aiogpu.task
async def nothing() -> None: ...


CAPTURED: dict[str, tuple[Callable[[], Any], str]] = {
    "to_device": (lambda: aiogpu.to_device(X), r"aiogpu\.to_device\(\).*Copy into static inputs before"),
    "to_host": (lambda: aiogpu.to_host(X), r"aiogpu\.to_host\(\).*captured into a CUDA graph"),
    "copy_": (lambda: aiogpu.copy_(X.clone(), X), r"aiogpu\.copy_\(\).*captured into a CUDA graph"),
    "item": (lambda: aiogpu.item(X[:1]), r"aiogpu\.item\(\).*captured into a CUDA graph"),
    "share": (lambda: aiogpu.share(X), r"aiogpu\.share\(\) cannot add edges"),
    "synchronize": (lambda: aiogpu.synchronize(), r"synchronize before the capture, or after a replay"),
    "a device": (lambda: aiogpu.synchronize("cpu"), r"synchronize before the capture, or after a replay"),
    "task": (lambda: nothing(), r"call the undecorated function inside the capture"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CAPTURED.values(), ids=CAPTURED)
def test_a_call_inside_a_capture_is_refused_before_it_touches_the_stream(check, vd, call, message):
    """C59."""
    vd.is_capturing = True
    check.refuses(aiogpu.CaptureError, message, call)


def test_a_stream_block_inside_a_capture_is_refused(run_asyncio, vd):
    @aiogpu.task
    async def task():
        vd.is_capturing = True
        before = vd.submitted
        with pytest.raises(aiogpu.CaptureError, match="cannot fork a stream that is being captured"):
            aiogpu.stream().__enter__()
        assert vd.submitted == before
        vd.is_capturing = False

    async def main():
        await task()
        vd.run_all()

    run_asyncio(main)


def test_a_refused_call_leaves_everything_usable(run, vd, moving):
    async def main():
        vd.is_capturing = True
        with pytest.raises(aiogpu.CaptureError):
            aiogpu.to_device(X)
        vd.is_capturing = False
        with moving(vd):
            assert torch.equal(await aiogpu.to_device(X), X)
        await nothing()
        vd.run_all()

    run(main)


def test_capture_errors_are_aiogpus_and_runtime_errors():
    assert issubclass(aiogpu.CaptureError, aiogpu.AiogpuError)
    assert issubclass(aiogpu.CaptureError, RuntimeError)
    assert issubclass(aiogpu.DeviceLostError, aiogpu.DeviceError)
    assert issubclass(aiogpu.DeviceError, RuntimeError)


# -- what newcomers write first ------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_in_words(run_asyncio):
    async def main():
        with pytest.raises(ValueError, match=r"there is no CUDA device here for cuda:0.*write 'cpu'"):
            await aiogpu.to_device(torch.ones(1), "cuda")

    run_asyncio(main)


@pytest.mark.parametrize("verb", [aiogpu.to_device, aiogpu.to_host])
def test_a_forgotten_await_is_no_data(run, auto_vd, verb):
    async def main():
        operation = aiogpu.to_device(torch.ones(1))
        with pytest.raises(TypeError, match=r"was given an operation, not its result: \w+\(await"):
            verb(operation)
        await operation

    run(main)


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda op: op.shape, AttributeError),
        (lambda op: op.float(), AttributeError),
        (bool, TypeError),
        (lambda op: not op, TypeError),
    ],
)
def test_an_operation_that_is_taken_for_its_result_says_what_is_missing(run, auto_vd, use, error):
    """Above all in conditions: `if item(flag):` would always be taken."""

    async def main():
        operation = aiogpu.item(torch.zeros(1))
        with pytest.raises(error, match="`await operation`"):
            use(operation)
        assert not hasattr(operation, "shape")
        assert await operation == 0.0

    run(main)


def test_a_batcher_takes_no_operation(run, auto_vd):
    async def main():
        async with aiogpu.Batcher(lambda x: x, max_batch_size=4) as batcher:
            operation = aiogpu.to_device(X)
            with pytest.raises(TypeError, match=r"not its result: batcher\(await"):
                await batcher(operation)
            assert torch.equal(await batcher(await operation), X)

    run(main)


def test_amap_of_an_ordinary_function_says_how_to_run_it(run, auto_vd):
    async def main():
        with pytest.raises(ExceptionGroup) as caught:
            await aiogpu.amap(len, ["a", "bc"])
        assert all(re.search("run_sync", str(error)) for error in caught.value.exceptions)

    run(main)


def test_a_worker_thread_is_told_that_it_has_no_loop(run, auto_vd):
    async def main():
        with pytest.raises(RuntimeError, match=r"in this thread.*run_sync.*async def"):
            await aiogpu.run_sync(aiogpu.to_device, X)

    run(main)


def test_an_async_function_is_no_blocking_one(run, anydevice):
    async def work():
        raise AssertionError("it ran")

    async def main():
        with pytest.raises(TypeError, match="work is an `async def`: await it"):
            await aiogpu.run_sync(work)

    run(main)


@pytest.mark.parametrize(
    "iterable", [aiogpu.prefetch([1]), aiogpu.pipeline([1])], ids=["prefetch", "pipeline"]
)
def test_what_must_be_entered_says_so_when_it_is_iterated(run, iterable):
    async def main():
        with pytest.raises(TypeError, match="async with"):
            async for _ in iterable:
                pass

    run(main)
