"""Copies beside a matrix product: c and d go up while a @ b runs.

    python examples/overlap_copies.py [--size N] [--repeats N] [--trace out.json] [--json out.json]

Four page-locked matrices a, b, c and d. In turn, everything takes four copies and a product; with the
copies of c and d beside the product it takes two copies and the longer of the two. Race-free under
`TORCH_CUDA_SANITIZER=1`; the trace of one overlapped round opens in https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

import aiogpu
from _show import milliseconds, print_table, write_json

WARM_UP = 3  # rounds: the first ones create contexts, load cuBLAS and fill the allocator's caches


class Matrices(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor


class Result(NamedTuple):
    product: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor


@aiogpu.task
async def overlapped(host: Matrices) -> Result:
    a, b = await aiogpu.to_device((host.a, host.b))
    upload = aiogpu.to_device((host.c, host.d))  # under way from here on
    product = a @ b  # launched beside it: an operation starts at the call, not at the await
    c, d = await upload
    await aiogpu.synchronize()
    return Result(product, c, d)


@aiogpu.task
async def in_turn(host: Matrices) -> Result:
    a, b, c, d = [await aiogpu.to_device(matrix) for matrix in host]
    product = a @ b
    await aiogpu.synchronize()
    return Result(product, c, d)


@aiogpu.task
async def two_copies(host: Matrices) -> None:
    await aiogpu.to_device((host.c, host.d))


@aiogpu.task
async def product_alone(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a, b)
    await aiogpu.synchronize()


def check(result: Result, host: Matrices) -> None:
    """Compares with plain PyTorch, step after step on one stream."""
    a, b, c, d = (matrix.to(result.product.device) for matrix in host)
    # On another stream cuBLAS may sum in another order; a value that was read early is off by far more.
    torch.testing.assert_close(result.product, a @ b, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close((result.c, result.d), (c, d), rtol=0, atol=0)


async def seconds(work: Callable[..., Awaitable[object]], *args: object) -> float:
    start = perf_counter()
    await work(*args)
    return perf_counter() - start


@aiogpu.task
async def measure(host: Matrices, repeats: int) -> dict[str, float]:
    """Median seconds of each part. The parts take turns, so that a drifting clock hits all of them."""
    await aiogpu.run_sync(check, await overlapped(host), host)
    a, b = await aiogpu.to_device((host.a, host.b))
    rounds = [
        {
            "in turn": await seconds(in_turn, host),
            "overlapped": await seconds(overlapped, host),
            "two copies": await seconds(two_copies, host),
            "product": await seconds(product_alone, a, b),
        }
        for _ in range(WARM_UP + repeats)
    ]
    return {part: median(r[part] for r in rounds[WARM_UP:]) for part in rounds[0]}


async def trace(host: Matrices, path: Path) -> None:
    with torch.profiler.profile() as profiler:
        await overlapped(host)
    await asyncio.to_thread(profiler.export_chrome_trace, str(path))


def page_locked(size: int, *, pin: bool) -> torch.Tensor:
    return torch.empty(size, size, pin_memory=pin).uniform_(-1, 1)


async def main(device: torch.device, size: int, repeats: int, trace_path: Path | None) -> dict[str, float]:
    torch.manual_seed(0)
    host = Matrices(*(page_locked(size, pin=device.type == "cuda") for _ in range(4)))
    async with aiogpu.Runtime(device):
        measured = await measure(host, repeats)
        if trace_path is not None:
            await trace(host, trace_path)
    return measured


def report(measured: dict[str, float], title: str) -> dict[str, float]:
    ideal = measured["two copies"] + max(measured["two copies"], measured["product"])
    rows = [[part, milliseconds(took), f"{took / ideal:.2f}"] for part, took in measured.items()]
    print_table(title, ["", "median", "of the ideal"], [*rows, ["ideal", milliseconds(ideal), "1.00"]])
    return {**measured, "ideal": ideal, "ratio": measured["overlapped"] / ideal}


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Copies beside a matrix product.")
    parser.add_argument("--size", type=int, default=9_999 if cuda else 999)
    parser.add_argument("--repeats", type=int, default=20, help="measured rounds, after the warm-up")
    parser.add_argument("--trace", type=Path, help="export a torch.profiler trace of one overlapped round")
    parser.add_argument("--json", type=Path, help="write the seconds, and the ratio to the ideal")
    args = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    measured = asyncio.run(main(device, args.size, args.repeats, args.trace))
    title = f"4 copies and a product of {args.size} x {args.size} float32 on {device}"
    write_json(args.json, report(measured, title))
    if device.type == "cpu":
        print("On the CPU nothing can overlap: copies and products take turns on the same cores.")
