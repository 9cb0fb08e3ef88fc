"""Typical use, for type checkers: not run, but read by mypy --strict (see test_typing.py)."""

from __future__ import annotations

import math
from collections.abc import Coroutine
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
    assert_type(await aiogpu.copy_(torch.ones(3), torch.ones(3)), torch.Tensor)
    loss: float = await aiogpu.item(torch.ones(1))
    print(loss)


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
        assert_type(aiogpu.stats().pending, int)
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
