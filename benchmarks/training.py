"""What does training cost that never waits: loading, logging, checkpoints, two chunks side by side?

Each row against the way that people write it today, in one run. `--quick` is small enough for a CPU, where
nothing overlaps and no verdict means anything.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import aiogpu
from _harness import Heartbeat, main, p50, percentile, run
from _report import Row, at_least, at_most

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import overlapped_forward_backward as chunks
from _checkpoints import snapshot, write_plain

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
STEPS, QUICK_STEPS = 80, 12
WORKERS = 2
CHECKPOINT_BYTES, QUICK_CHECKPOINT_BYTES = 4 << 30, 8 << 20


def measure(quick: bool) -> list[Row]:
    steps = QUICK_STEPS if quick else STEPS
    rows = loading(steps)
    rows += logging(steps)
    rows += side_by_side(quick)
    rows += checkpointing(QUICK_CHECKPOINT_BYTES if quick else CHECKPOINT_BYTES)
    return rows


# -- a model whose step takes a known time ------------------------------------------------------------

WIDTH, ROWS = (4096, 4096) if CUDA else (64, 64)


class Learner:
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, device=DEVICE) for _ in range(3)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def learn(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def seconds_per_step(self) -> float:
        x = torch.randn(ROWS, WIDTH, device=DEVICE)
        took = []
        for _ in range(8):
            _wait()
            start = time.perf_counter()
            for _ in range(5):
                self.learn(x)
            _wait()
            took.append((time.perf_counter() - start) / 5)
        return p50(took[2:])


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


# -- loading takes as long as compute -----------------------------------------------------------------


class Busy(Dataset[torch.Tensor]):
    """One batch an item; making it keeps a core of a loading process busy for `seconds`."""

    def __init__(self, n: int, seconds: float) -> None:
        self.n, self.seconds = n, seconds
        self.batch = torch.randn(ROWS, WIDTH)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass
        return self.batch


def loading(steps: int) -> list[Row]:
    question = "a step where loading takes as long as compute"
    learner = Learner()
    compute = learner.seconds_per_step()
    data = Busy(steps, compute * WORKERS)

    def loader(pin: bool) -> DataLoader[torch.Tensor]:
        return DataLoader(data, batch_size=None, num_workers=WORKERS, pin_memory=pin, prefetch_factor=4)

    rates: dict[str, list[float]] = {"DataLoader, pin_memory, non_blocking": [], "aiogpu.prefetch": []}
    alone, lags, starts = [], [], []
    for _ in range(3):
        start = time.perf_counter()
        for _ in loader(pin=False):
            pass
        alone.append(steps / (time.perf_counter() - start))
        rates["DataLoader, pin_memory, non_blocking"].append(plain(learner, loader(pin=CUDA), steps))
        rate, start_lags, lag = run(lambda: prefetched(learner, loader(pin=False), steps), limit_s=60)
        rates["aiogpu.prefetch"].append(rate)
        starts += start_lags
        lags += lag
    by_hand, ours = map(p50, rates.values())
    achievable = min(1 / compute, p50(alone))
    return [
        *(Row(question, name, p50(of), "steps/s") for name, of in rates.items()),
        Row(question, "compute alone", 1 / compute, "steps/s"),
        Row(question, "loading alone", p50(alone), "steps/s"),
        at_least(question, "aiogpu / DataLoader by hand", ours / by_hand, "×", 1.0),
        at_least(question, "aiogpu / achievable (the slower one alone)", ours / achievable * 100, "%", 95),
        at_most(question, "loop lag p99, from the first batch on", percentile(lags, 99) * 1e3, "ms", 2),
        Row(
            question, "largest lag while the loader forks its processes", max(starts, default=0.0) * 1e3, "ms"
        ),
    ]


def plain(learner: Learner, loader: DataLoader[torch.Tensor], steps: int) -> float:
    start = time.perf_counter()
    for x in loader:
        learner.learn(x.to(DEVICE, non_blocking=True))
    _wait()
    return steps / (time.perf_counter() - start)


async def prefetched(
    learner: Learner, loader: DataLoader[torch.Tensor], steps: int
) -> tuple[float, list[float], list[float]]:
    """Steps per second, and the lags before the first batch and from then on.

    A fork holds the GIL while it copies the page tables (some 10 ms for each of the loader's processes, on a
    machine without a GPU): once, and whoever starts them.
    """
    begun: list[int] = []  # beats before the first batch

    @aiogpu.task
    async def train(pulse: Heartbeat) -> None:
        async with aiogpu.prefetch(loader, depth=2, device=DEVICE) as batches:
            async for x in batches:
                if not begun:
                    begun.append(len(pulse.lags))
                await aiogpu.run_sync(learner.learn, x)
        await aiogpu.synchronize()

    async with aiogpu.Runtime(DEVICE), Heartbeat() as pulse:
        start = time.perf_counter()
        await train(pulse)
        rate = steps / (time.perf_counter() - start)
    return rate, pulse.lags[: begun[0]], pulse.lags[begun[0] :]


# -- logging the loss ---------------------------------------------------------------------------------


def logging(steps: int) -> list[Row]:
    question = "logging the loss of every step"
    ms = run(lambda: logged(steps), limit_s=60)
    none, later, item = ms["not at all"], ms["aiogpu.item, read later"], ms[".item() at once"]
    return [
        *(Row(question, name, of, "ms/step") for name, of in ms.items()),
        at_most(question, "aiogpu.item, read later: over not logging", (later / none - 1) * 100, "%", 1),
        Row(question, ".item() at once: over not logging", (item / none - 1) * 100, "%"),
    ]


async def logged(steps: int) -> dict[str, float]:
    learner = Learner()
    x = torch.randn(ROWS, WIDTH, device=DEVICE)

    @aiogpu.task
    async def loop(way: str) -> float:
        numbers = []
        start = time.perf_counter()
        for _ in range(steps):
            loss = await aiogpu.run_sync(learner.learn, x)
            if way == ".item() at once":
                loss.item()
            elif way == "aiogpu.item, read later":
                numbers.append(aiogpu.item(loss))
                if len(numbers) > 4:
                    await numbers.pop(0)
        for number in numbers:
            await number
        await aiogpu.synchronize()
        return (time.perf_counter() - start) / steps * 1e3

    ways = "not at all", "aiogpu.item, read later", ".item() at once"
    took: dict[str, list[float]] = {way: [] for way in ways}
    async with aiogpu.Runtime(DEVICE):
        for _ in range(4):
            for way in ways:
                took[way].append(await loop(way))
    return {way: p50(of[1:]) for way, of in took.items()}


# -- forward beside backward --------------------------------------------------------------------------


def side_by_side(quick: bool) -> list[Row]:
    kinds = {"small": chunks.Shape(4, 32, 16)} if quick or not CUDA else chunks.SHAPES
    rows = []
    for kind, shape in kinds.items():
        question = f"forward beside backward, {kind}"

        async def compete(shape: chunks.Shape = shape) -> dict[str, float]:
            async with aiogpu.Runtime(DEVICE):
                job = await aiogpu.run_sync(chunks.build, shape, 4, DEVICE)
                return await chunks.measure(job, 2 if quick else 10)

        seconds = run(compete, limit_s=60)
        ratio = seconds["in turn"] / seconds["side by side"]
        rows += [Row(question, way, of * 1e3, "ms") for way, of in seconds.items()]
        if kind == "launch-bound":
            rows.append(at_least(question, "in turn / side by side", ratio, "×", 1.3))
        else:
            rows.append(Row(question, "in turn / side by side", ratio, "×"))
    return rows


# -- a checkpoint in the background -------------------------------------------------------------------


def checkpointing(nbytes: int) -> list[Row]:
    question = f"a checkpoint of {nbytes / (1 << 30):.3g} GiB"
    with tempfile.TemporaryDirectory() as folder:
        seconds = run(lambda: checkpointed(nbytes, Path(folder)), limit_s=100)
    share = seconds["training stalled, in the background"] / seconds["torch.save, blocking"] * 100
    return [
        *(Row(question, name, of, "s") for name, of in seconds.items()),
        at_most(question, "stall / blocking torch.save", share, "%", 5),
    ]


async def checkpointed(nbytes: int, folder: Path) -> dict[str, float]:
    learner = Learner()
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    rest = [torch.randn(nbytes // 64, device=DEVICE) for _ in range(16)]  # 16 float32 tensors in all

    def state() -> dict[str, Any]:
        return {"model": learner.model.state_dict(), "rest": rest}

    @aiogpu.task
    async def step() -> float:
        start = time.perf_counter()
        await aiogpu.run_sync(learner.learn, x)
        await aiogpu.synchronize()
        return time.perf_counter() - start

    @aiogpu.task
    async def save() -> None:
        on_host = await aiogpu.to_host(snapshot(state()))
        await aiogpu.run_sync(write_plain, on_host, folder / "ours.pt")

    async with aiogpu.Runtime(DEVICE, pinned_bytes=4 * nbytes):
        await save()  # warm: its page-locked memory is there from now on
        usual = p50([await step() for _ in range(50)])
        start = time.perf_counter()
        await aiogpu.run_sync(write_plain, state(), folder / "theirs.pt")
        blocking = time.perf_counter() - start
        async with in_background(save()) as saving:
            start, n = time.perf_counter(), 0
            while not saving.done():
                await step()
                n += 1
            whole = time.perf_counter() - start
    return {
        "torch.save, blocking": blocking,
        "in the background, until it is written": whole,
        "training stalled, in the background": max(0.0, whole - n * usual),
    }


@asynccontextmanager
async def in_background(coroutine: Any) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        yield group.create_task(coroutine)


if __name__ == "__main__":
    main("training", measure, needs_gpu=False, limit_s=300)
