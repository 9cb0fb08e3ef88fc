"""Typical use, for type checkers: not run, but read by mypy --strict (see test_typing.py)."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, NamedTuple, assert_type

import anyio
import numpy
import numpy.typing as npt
import torch

import aiogpu


class Batch(NamedTuple):
    x: torch.Tensor
    label: int


@aiogpu.task
async def classify(image: torch.Tensor, *, top: int = 1) -> list[int]:
    x = await aiogpu.to_device(image)
    assert_type(x, torch.Tensor)
    y: torch.Tensor = await aiogpu.run_sync(torch.nn.Linear(3, 3), x)
    host = await aiogpu.to_host(y.topk(top).indices)
    assert_type(host, torch.Tensor)
    return [int(i) for i in host]


@aiogpu.task(device="cuda:0", priority=-1)
async def urgent(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), aiogpu.stream(priority=-1):
        return x * 2


@aiogpu.task
async def chunks(x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
    for chunk in x:
        yield chunk


@aiogpu.task(priority=-1)
async def averages() -> AsyncGenerator[float, torch.Tensor]:
    mean = 0.0
    while True:
        mean += (yield mean).mean().item()


async def pipelines() -> None:
    async for chunk in chunks(torch.ones(3)):
        assert_type(chunk, torch.Tensor)
    assert_type(await averages().asend(torch.ones(3)), float)
    send, receive = aiogpu.create_channel[torch.Tensor](max_items=2)
    assert_type(send, aiogpu.SendChannel[torch.Tensor])
    async with send, receive:
        await send.send(torch.ones(3))
        assert_type(await receive.receive(), torch.Tensor)
        assert_type(receive.clone(), aiogpu.ReceiveChannel[torch.Tensor])
        async for item in receive:
            assert_type(item, torch.Tensor)


def multiply(a: torch.Tensor, times: int) -> torch.Tensor:
    return a * times


async def transfers(array: npt.NDArray[numpy.float32], batch: Batch) -> None:
    assert_type(await aiogpu.to_device(array), torch.Tensor)
    assert_type(await aiogpu.to_host(array), torch.Tensor)
    assert_type(await aiogpu.to_device(batch, "cuda", dtype=torch.float16), Batch)
    assert_type(await aiogpu.to_device({"a": [batch]}), dict[str, list[Batch]])
    operation = aiogpu.to_device(torch.ones(3))
    assert_type(operation, aiogpu.Operation[torch.Tensor])
    assert_type(operation.done(), bool)
    assert_type(await operation.ordered(), torch.Tensor)
    assert_type(await aiogpu.to_device({"a": [batch]}).ordered(), dict[str, list[Batch]])
    assert_type(await aiogpu.copy_(torch.ones(3), torch.ones(3)), torch.Tensor)
    loss: float = await aiogpu.item(torch.ones(1))
    print(loss)


class Graph:
    def __init__(self, nodes: torch.Tensor, name: str) -> None:
        self.nodes, self.name = nodes, name


limiter = aiogpu.Limiter(operations=4, bytes=8 * 2**30)


async def limited(x: torch.Tensor) -> None:
    async with limiter.slot(x.nbytes):
        await aiogpu.to_device(x)
    assert_type(limiter.statistics().borrowed, int)
    async with aiogpu.Runtime(max_inflight_bytes=2**30):
        pass


async def files(model: torch.nn.Module) -> None:
    async for name, tensor in aiogpu.load_safetensors("model.safetensors", "cuda", dtype=torch.bfloat16):
        assert_type(name, str)
        assert_type(tensor, torch.Tensor)
    async with aiogpu.load_safetensors(["a.safetensors"], progress=lambda done, total: None) as stream:
        await stream.aclose()
    found = await aiogpu.load_state_dict(model, "model.safetensors.index.json", assign=True)
    missing: list[str] = found.missing_keys
    print(missing)


def registrations() -> None:
    registration = aiogpu.register(
        Graph,
        lambda graph: ([graph.nodes], graph.name),
        lambda children, name: Graph(children[0], name),
    )
    with registration:
        pass
    registration.remove()


async def positive(batches: AsyncIterator[torch.Tensor]) -> AsyncGenerator[torch.Tensor, None]:
    async for batch in batches:
        if batch.min() > 0:
            yield batch


async def loading(paths: list[str], loader: torch.utils.data.DataLoader[torch.Tensor]) -> None:
    def load(path: str) -> torch.Tensor:
        return torch.ones(len(path))

    async with aiogpu.prefetch(paths, depth=4, transform=load, device="cuda") as batches:
        async for batch in batches:
            assert_type(batch, torch.Tensor)
        assert_type(batches.stats(), aiogpu.PrefetchStats)
    async with aiogpu.prefetch(paths, transform=classify_path) as lists:
        async for labels in lists:
            assert_type(labels, list[int])
    async with aiogpu.prefetch(loader, stateful=True) as plain:
        print(plain.state_dict())
    loaded = aiogpu.pipeline(paths).map(load, concurrency=8)
    assert_type(loaded, aiogpu.pipeline[torch.Tensor])
    async with loaded.to_device().map_gpu(torch.neg).then(positive).to_host() as results:
        async for result in results:
            assert_type(result, torch.Tensor)
        assert_type(results.stats(), list[aiogpu.StageStats])


async def classify_path(path: str) -> list[int]:
    return [len(path)]


async def main() -> None:
    call: Coroutine[Any, Any, list[int]] = classify(torch.ones(3), top=2)
    assert_type(await call, list[int])
    assert_type(await urgent(torch.ones(3)), torch.Tensor)
    assert_type(await aiogpu.run_sync(multiply, torch.ones(3), 2), torch.Tensor)
    assert_type(
        await aiogpu.gather(aiogpu.to_device(torch.ones(3)), classify(torch.ones(3))),
        tuple[torch.Tensor, list[int]],
    )
    assert_type(
        await aiogpu.gather(urgent(torch.ones(3)), classify(torch.ones(3))), tuple[torch.Tensor, list[int]]
    )
    assert_type(await aiogpu.gather(*[urgent(torch.ones(3))] * 3), tuple[torch.Tensor, ...])
    assert_type(await aiogpu.amap(classify, [torch.ones(3)], limit=4), list[list[int]])
    async with aiogpu.Runtime("cuda", spin=math.inf, streams=4) as runtime:
        assert_type(runtime, aiogpu.Runtime)
        assert_type(runtime.stats(), aiogpu.Stats)
        assert_type(await runtime.reserve(64 << 20), int)
        assert_type(await runtime.trim(), int)
        assert_type(aiogpu.stats().pending, int)
    async with aiogpu.Batcher(torch.nn.Linear(3, 3), max_batch_size=8, max_delay=0.005) as batcher:
        assert_type(batcher, aiogpu.Batcher)
        image: torch.Tensor = await batcher(torch.ones(3), timeout=1.0, priority=-1, client="10.0.0.1")
        assert_type(batcher.stats().waiting, int)
        print(image)
    async with anyio.create_task_group() as group:
        group.start_soon(classify, torch.ones(3))
    assert_type(aiogpu.share([torch.ones(3)]), list[torch.Tensor])
    await aiogpu.synchronize()
    await aiogpu.synchronize("cuda:1")
    assert_type(aiogpu.device(), torch.device)
    try:
        await aiogpu.synchronize()
    except aiogpu.DeviceLostError as error:
        print(error.__cause__)
