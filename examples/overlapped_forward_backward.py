"""The backward of one model chunk beside the forward of another, on two streams.

    python examples/overlapped_forward_backward.py [--batches N] [--repeats N] [--trace DIR] [--json out.json]

A pipeline stage that holds two chunks of a model (as in DualPipe, DeepSeek-V3 technical report, section
3.2.1, https://arxiv.org/abs/2412.19437) has a forward of one and a backward of the other to do at any time,
and they do not depend on each other. Here each chunk is a task with a stream of its own; forward and backward
are launched from worker threads, so that neither waits for the other's host time: autograd launches a
backward from C++, without the GIL, while Python launches the other chunk's forward.

The gradients must be those of plain PyTorch in the same order, bit for bit. A trace shows how much really ran
side by side: a lot where launching is what takes the time, little where each kernel fills the GPU by itself.
"""

from __future__ import annotations

import os

# cuBLAS gives the same bits on every stream with a fixed workspace for each:
# https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import argparse
import asyncio
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

import aiogpu
from _show import milliseconds, print_table, write_json

WARM_UP = 3  # rounds: the first ones load cuBLAS and fill the allocator's caches


class Shape(NamedTuple):
    layers: int
    width: int
    rows: int


SHAPES = {
    "launch-bound": Shape(layers=60, width=256, rows=64),
    "compute-bound": Shape(layers=6, width=4096, rows=8192),
}


class Job(NamedTuple):
    """Two chunks, and the inputs that each of them gets, batch by batch."""

    chunks: tuple[nn.Module, nn.Module]
    inputs: tuple[list[torch.Tensor], list[torch.Tensor]]


def build(shape: Shape, batches: int, device: torch.device) -> Job:
    torch.manual_seed(0)

    def chunk() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(shape.width, shape.width), nn.GELU()) for _ in range(shape.layers)]
        return nn.Sequential(*layers).to(device)

    def inputs() -> list[torch.Tensor]:
        return [torch.randn(shape.rows, shape.width, device=device) for _ in range(batches)]

    return Job((chunk(), chunk()), (inputs(), inputs()))


def forward(chunk: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return chunk(x).square().mean()


# -- one after the other, as plain PyTorch does it ----------------------------------------------------


def in_turn(job: Job) -> None:
    """The same steps in the same order, on one stream, from one thread."""
    (one, other), (xs, ys) = job
    pending = None
    for x, y in zip(xs, ys, strict=True):
        loss = forward(one, x)
        if pending is not None:
            pending.backward()
        pending = forward(other, y)
        loss.backward()
    if pending is not None:
        pending.backward()


# -- side by side --------------------------------------------------------------------------------------


@aiogpu.task
async def lane(chunk: nn.Module, inputs: list[torch.Tensor], meet: asyncio.Barrier, late: bool) -> None:
    """Forward and backward of one chunk in turn, on this task's stream. The lane that starts half a step
    late always does the other thing."""
    if late:
        await meet.wait()
    for x in inputs:
        loss = await aiogpu.run_sync(forward, chunk, x)
        await meet.wait()  # launched, not finished: the device has its own queue for each lane
        await aiogpu.run_sync(loss.backward)  # autograd uses the stream of the forward
        await meet.wait()
    if not late:
        await meet.wait()


@aiogpu.task
async def side_by_side(job: Job) -> None:
    meet = asyncio.Barrier(2)
    await aiogpu.gather(
        lane(job.chunks[0], job.inputs[0], meet, late=False),
        lane(job.chunks[1], job.inputs[1], meet, late=True),
    )


# -- what came of it -----------------------------------------------------------------------------------


def take_gradients(job: Job) -> list[torch.Tensor]:
    parameters = [parameter for chunk in job.chunks for parameter in chunk.parameters()]
    gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == len(parameters)
    for parameter in parameters:
        parameter.grad = None
    return gradients


@aiogpu.task
async def measure(job: Job, repeats: int) -> dict[str, float]:
    """Median seconds of both ways, which take turns, so that a drifting clock hits both; checks the
    gradients of every round."""
    took: dict[str, list[float]] = defaultdict(list)
    for _ in range(WARM_UP + repeats):
        start = perf_counter()
        await aiogpu.run_sync(in_turn, job)
        await aiogpu.synchronize()
        took["in turn"].append(perf_counter() - start)
        expected = take_gradients(job)
        start = perf_counter()
        await side_by_side(job)
        await aiogpu.synchronize()
        took["side by side"].append(perf_counter() - start)
        if not all(map(torch.equal, take_gradients(job), expected)):
            raise SystemExit("the gradients differ from those of the serial order: please report this")
    return {way: median(seconds[WARM_UP:]) for way, seconds in took.items()}


async def trace(job: Job, path: Path) -> None:
    with torch.profiler.profile() as profiler:
        await side_by_side(job)
        await aiogpu.synchronize()
    await asyncio.to_thread(profiler.export_chrome_trace, str(path))
    take_gradients(job)


class Overlap(NamedTuple):
    """What a trace says, in seconds: kernels running on any stream, and on two streams or more."""

    busy: float
    shared: float
    blocks_per_multiprocessor: float


def overlap(path: Path) -> Overlap:
    kernels = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    edges = sorted(
        edge for k in kernels for edge in ((k["ts"], 1, _stream(k)), (k["ts"] + k["dur"], -1, _stream(k)))
    )
    running: dict[Any, int] = defaultdict(int)
    busy = shared = last = 0.0
    for at, step, stream in edges:
        active = sum(count > 0 for count in running.values())
        busy += (at - last) * (active > 0)
        shared += (at - last) * (active > 1)
        running[stream] += step
        last = at
    total = sum(k["dur"] for k in kernels)
    blocks = sum(k["dur"] * float(k["args"].get("blocks per SM", 0)) for k in kernels) / max(total, 1e-9)
    return Overlap(busy * 1e-6, shared * 1e-6, blocks)


def _stream(kernel: dict[str, Any]) -> Any:
    return kernel["args"].get("stream", kernel["tid"])


def explain(kind: str, seen: Overlap, measured: dict[str, float]) -> str:
    wall = measured["side by side"]
    if seen.shared > 0.2 * seen.busy or measured["in turn"] / wall > 1.2:
        return (
            f"{kind}: the GPU had kernels for {seen.busy / wall:.0%} of the time; what was saved is the "
            "host's time of launching one pass while the other was launched."
        )
    return (
        f"{kind}: little to gain. The kernels bring {seen.blocks_per_multiprocessor:.1f} blocks for each "
        f"multiprocessor and the GPU was busy for {seen.busy / wall:.0%} of the time: a kernel that fills "
        "the GPU leaves no room for another beside it, whatever its stream."
    )


def report(kind: str, measured: dict[str, float], seen: Overlap | None) -> dict[str, Any]:
    ratio = measured["in turn"] / measured["side by side"]
    rows = [[way, milliseconds(seconds)] for way, seconds in measured.items()]
    rows.append(["in turn / side by side", f"{ratio:.2f}"])
    if seen is not None:
        rows.append(["trace: kernels on any stream", milliseconds(seen.busy)])
        rows.append(["trace: kernels on two streams at once", milliseconds(seen.shared)])
        rows.append(["  of the busy time", f"{seen.shared / max(seen.busy, 1e-9):.0%}"])
    print_table(f"{kind}: gradients bit-equal to the serial order", ["", ""], rows)
    if seen is not None:
        print(explain(kind, seen, measured))
    return {"seconds": measured, "ratio": ratio, "trace": seen._asdict() if seen is not None else None}


async def main(
    device: torch.device, kinds: dict[str, Shape], batches: int, repeats: int, traces: Path
) -> dict[str, Any]:
    results = {}
    async with aiogpu.Runtime(device):
        for kind, shape in kinds.items():
            job = await aiogpu.run_sync(build, shape, batches, device)
            measured = await measure(job, repeats)
            seen = None
            if device.type == "cuda":
                await trace(job, traces / f"{kind}.json")
                seen = await asyncio.to_thread(overlap, traces / f"{kind}.json")
            results[kind] = report(kind, measured, seen)
            del job
    return results


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="The backward of one chunk beside the forward of another.")
    parser.add_argument("--batches", type=int, default=4, help="batches for each chunk and round")
    parser.add_argument("--repeats", type=int, default=10, help="measured rounds, after the warm-up")
    parser.add_argument("--layers", type=int, help="of a chunk, instead of the two kinds' own")
    parser.add_argument("--trace", type=Path, help="keep the traces (for https://ui.perfetto.dev) there")
    parser.add_argument("--json", type=Path, help="write the seconds, the ratio, and what the trace says")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda" if cuda else "cpu")
    kinds = SHAPES if cuda else {"small": Shape(layers=8, width=64, rows=32)}
    if args.layers:
        kinds = {kind: shape._replace(layers=args.layers) for kind, shape in kinds.items()}
    with tempfile.TemporaryDirectory() as temporary:
        traces = args.trace or Path(temporary)
        traces.mkdir(parents=True, exist_ok=True)
        write_json(args.json, asyncio.run(main(device, kinds, args.batches, args.repeats, traces)))
    if not cuda:
        print("On the CPU nothing can overlap: both passes take turns on the same cores.")
