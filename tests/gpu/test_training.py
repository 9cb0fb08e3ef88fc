"""Training and inference across tasks: backward on another stream, modes, compiled models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aiogpu

from ._tools import ON_GPU, SANITIZED, Slow, needs_compiler, no_race_detector, same_bytes
from .conftest import Loop

pytestmark = ON_GPU

STEPS = 10 if SANITIZED else 50


class _SlowBackward(torch.autograd.Function):
    """The identity; on the way back it keeps the stream busy."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, slow: Slow) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        _SlowBackward.slow()
        return gradient, None

    slow: Slow


def _model() -> nn.Module:
    torch.manual_seed(27)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).to("cuda")


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, slow: Slow) -> torch.Tensor:
    slow()
    return nn.functional.mse_loss(_SlowBackward.apply(model(x), slow), y)


# Torch notices that a parameter's gradient is accumulated on another stream than the last step's.
@pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream.*")
def test_forward_in_one_task_and_backward_in_another_train_as_on_one_stream(
    run_asyncio: Loop, slow: Slow
) -> None:
    """C27: bit-equal parameters after 50 steps, with 50 ms of slow work in forward and backward."""
    _SlowBackward.slow = slow
    generator = torch.Generator().manual_seed(3)
    xs = torch.randn(STEPS, 32, 64, generator=generator).cuda()
    ys = torch.randn(STEPS, 32, 10, generator=generator).cuda()

    @aiogpu.task
    async def forward(model: nn.Module, step: int) -> torch.Tensor:
        return _loss(model, xs[step], ys[step], slow)

    @aiogpu.task
    async def backward(loss: torch.Tensor) -> None:
        await aiogpu.run_sync(loss.backward)

    @aiogpu.task
    async def train() -> nn.Module:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = await forward(model, step)
            await backward(loss)
            optimizer.step()
        await aiogpu.synchronize()
        return model

    trained = run_asyncio(train)
    expected = _model()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.9)
    quick = Slow(0.0)
    _SlowBackward.slow = quick
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(expected, xs[step], ys[step], quick).backward()
        optimizer.step()
    torch.cuda.synchronize()
    for name, parameter in expected.state_dict().items():
        same_bytes(trained.state_dict()[name].cpu(), parameter.cpu(), f"{name} after {STEPS} steps")


# -- modes -----------------------------------------------------------------------------------------


def _modes() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.cuda.current_device(),
        torch.cuda.current_stream().cuda_stream,
    )


def _product() -> torch.Tensor:
    a = torch.ones(8, 8, device="cuda", requires_grad=True)
    return a @ a


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_worker_computes_under_the_callers_autocast_and_grad_mode(run: Loop, dtype: torch.dtype) -> None:
    """C50 on CUDA: the product in the worker has the dtype and the graph that it has here."""

    @aiogpu.task
    async def main() -> None:
        outside = _modes()
        with torch.autocast("cuda", dtype=dtype), torch.no_grad():
            inside = _modes()
            assert await aiogpu.run_sync(_modes) == inside
            product = await aiogpu.run_sync(_product)
            assert product.dtype == dtype
            assert not product.requires_grad
            assert _modes() == inside
        with torch.inference_mode():
            assert (await aiogpu.run_sync(_product)).is_inference()
        assert await aiogpu.run_sync(_modes) == outside
        product = await aiogpu.run_sync(_product)
        assert product.dtype == torch.float32
        assert product.requires_grad

    before = _modes()
    run(main)
    assert _modes() == before


@pytest.mark.parametrize("where", ["task", "run_sync"])
def test_an_error_under_autocast_leaves_every_mode_as_it_was(run: Loop, where: str) -> None:
    """C53 on CUDA: on the loop's thread, and on the worker that the next job gets."""

    def leaks() -> None:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.cuda.set_stream(torch.cuda.Stream())
        raise ValueError("from user code")

    @aiogpu.task
    async def fails() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
            await aiogpu.synchronize()
            if where == "run_sync":
                await aiogpu.run_sync(leaks)
            leaks()

    @aiogpu.task
    async def asks() -> None:
        assert await aiogpu.run_sync(_modes) == _modes()

    async def main() -> None:
        before = _modes()
        for _ in range(3):
            with pytest.raises(ValueError, match="from user code"):
                await fails()
            assert _modes() == before
            await asks()
            assert _modes() == before

    run(main)


# -- torch.compile ---------------------------------------------------------------------------------


@needs_compiler
@no_race_detector
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_in_tasks_gives_the_eager_result(run_asyncio: Loop, slow: Slow, mode: str) -> None:
    """C28: on each task's stream, without a compilation for each task. A CUDA graph has one set of inputs
    and outputs, and torch replays it on whatever stream calls it: its calls take turns on the device."""
    import torch._inductor.config
    from torch._dynamo.utils import counters

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).sin() * x

    compiled = torch.compile(f, mode=mode)
    turns = aiogpu.Limiter(operations=1 if mode == "reduce-overhead" else 24)

    @aiogpu.task
    async def call(value: int) -> None:
        x = torch.zeros(4096, device="cuda")
        slow(5)
        x += value
        async with turns.slot():
            with torch.no_grad():
                y = compiled(x).clone()  # the next replay overwrites the result
        host, wanted = await aiogpu.to_host((y, f(x)))
        torch.testing.assert_close(host, wanted, rtol=1e-5, atol=1e-5)

    async def main() -> int:
        for value in range(4):  # compiled, warmed up and captured
            await call(value)
        before = counters["stats"]["unique_graphs"]
        for first in range(0, 24, 6):
            await aiogpu.gather(*[call(value) for value in range(first, first + 6)])
        return counters["stats"]["unique_graphs"] - before

    torch.compiler.reset()
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):  # no pool of processes, whose threads stay
        again = run_asyncio(main)
    torch.compiler.reset()
    assert again <= 1, f"{again} recompilations in 24 calls"
