"""How fast do weights come from a safetensors file onto the device, and does the loop go on meanwhile?

A file of 4 GB (64 MB without a GPU), as a language model has it: large matrices and many small vectors. It is
in the page cache: what is measured is reading it from there, staging and copying. All contenders in turns.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

import aiogpu
from _harness import Heartbeat, main, p50, percentile, run
from _report import Row, at_least, at_most

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
NBYTES = 4 * 10**9 if CUDA else 64 * 10**6
ROUNDS, QUICK_ROUNDS, WARM_UP = 5, 2, 1
AIOGPU, LOAD_FILE = "aiogpu.load_safetensors", f"safetensors' load_file(device={DEVICE!r})"
IN_PLACE, TORCH = "aiogpu.load_state_dict", "model.load_state_dict(load_file())"

Tensors = dict[str, torch.Tensor]
Way = Callable[[], Awaitable[object]]


def measure(quick: bool) -> list[Row]:
    try:
        import safetensors  # noqa: F401
    except ImportError:
        print("files: needs the safetensors package (pip install aiogpu[files]); skipped")
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        nbytes = write(path, NBYTES // 4 if quick else NBYTES)
        return run(lambda: compete(path, nbytes, QUICK_ROUNDS if quick else ROUNDS), limit_s=100)


def write(path: Path, nbytes: int) -> int:
    """Layers of four matrices and 20 vectors each, bfloat16; what the file has of tensors, in bytes."""
    from safetensors.torch import save_file

    side = 4096 if CUDA else 1024
    noise = torch.randint(0, 256, (2 * side * side + 4096,), dtype=torch.uint8)
    layers = max(1, nbytes // (4 * 2 * side * side))
    tensors = {}
    for layer in range(layers):
        for number in range(4):
            begin = 2 * (4 * layer + number) % 4096  # every matrix has a content of its own
            matrix = noise[begin : begin + 2 * side * side].view(torch.bfloat16)
            tensors[f"layers.{layer}.matrices.{number}"] = matrix.reshape(side, side).clone()
        for number in range(20):
            tensors[f"layers.{layer}.vectors.{number}"] = torch.full(
                (side,), float(number), dtype=torch.bfloat16
            )
    save_file(tensors, path)
    return sum(tensor.nbytes for tensor in tensors.values())


class Model(torch.nn.Module):
    """Parameters of the file's names and shapes."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, torch.nn.Parameter(torch.empty_like(tensor), requires_grad=False))


async def compete(path: Path, nbytes: int, rounds: int) -> list[Row]:
    """Median GB/s of each way, in turns, and the lags of the loop during ours."""
    from safetensors.torch import load_file

    load = functools.partial(load_file, path, device=DEVICE)
    model = Model(load())

    async def on_the_loop() -> Tensors:
        return load()

    async def then_to() -> Tensors:
        return {name: tensor.to(DEVICE, copy=True) for name, tensor in load_file(path).items()}

    async def by_torch() -> None:
        model.load_state_dict(load())

    ways: dict[str, Way] = {
        AIOGPU: lambda: collect(path),
        LOAD_FILE: on_the_loop,
        "asyncio.to_thread(load_file)": lambda: asyncio.to_thread(load),
        "load_file(), then .to()": then_to,
        IN_PLACE: lambda: aiogpu.load_state_dict(model, path),
        TORCH: by_torch,
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    lags: list[float] = []
    async with aiogpu.Runtime(DEVICE):
        await check(await collect(path), load())
        for turn in range(WARM_UP + rounds):
            for name, way in ways.items():
                async with Heartbeat() as pulse:
                    took[name].append(await seconds(way))
                if name == AIOGPU and turn >= WARM_UP:
                    lags += pulse.lags
    rate = {name: nbytes / 1e9 / p50(samples[WARM_UP:]) for name, samples in took.items()}
    return rows(rate, lags, nbytes)


def rows(rate: dict[str, float], lags: list[float], nbytes: int) -> list[Row]:
    question = f"{nbytes / 1e9:.3g} GB of safetensors in the page cache to {DEVICE}"
    lag = percentile(lags, 99) * 1e3
    worst = {"largest_ms": max(lags) * 1e3}
    found = [Row(question, name, value, "GB/s") for name, value in rate.items()]
    if not CUDA:  # the targets are for the link to a GPU
        return [*found, Row("lag of the loop meanwhile, p99", AIOGPU, lag, "ms", detail=worst)]
    return [
        *found,
        at_least(question, "load_safetensors / load_file", rate[AIOGPU] / rate[LOAD_FILE], "×", 2),
        Row(question, "load_state_dict / torch's", rate[IN_PLACE] / rate[TORCH], "×"),
        at_most("lag of the loop meanwhile, p99", AIOGPU, lag, "ms", 2, **worst),
    ]


async def collect(path: Path) -> Tensors:
    return {name: tensor async for name, tensor in aiogpu.load_safetensors(path, DEVICE)}


async def check(ours: Tensors, theirs: Tensors) -> None:
    """A wrong byte is no speed."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


async def seconds(way: Way) -> float:
    start = time.perf_counter()
    result = await way()
    if CUDA:
        torch.cuda.synchronize()
    took = time.perf_counter() - start
    del result  # the next one's memory
    return took


if __name__ == "__main__":
    main("files", measure, needs_gpu=False)
