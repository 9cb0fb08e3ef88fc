"""Handwritten digits: train a small CNN and serve it, without ever holding up the event loop.

    python examples/digits.py [--device cpu|cuda] [--requests N] [--json out.json]

scikit-learn's 1797 scanned digits are split; an async loop trains on one part. Then every digit is sent
as a request of its own by concurrent clients, first to a handler that awaits the GPU, then to the same
handler written the blocking way. At least 97 % of the held-back digits must be recognized.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import platform
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import aiogpu
from _show import BEAT, heartbeat, milliseconds, percentile, print_table, write_json

SEED = 0
EPOCHS = 15
BATCH = 64
CLIENTS = 64
REQUIRED_ACCURACY = 0.97

Handler = Callable[[nn.Module, np.ndarray], Coroutine[Any, Any, int]]


class Digits(NamedTuple):
    """`images`: (n, 1, 8, 8) float32 in 0..1; `labels`: (n,) int64; the others index into both."""

    images: np.ndarray
    labels: np.ndarray
    training: np.ndarray
    held_back: np.ndarray


class Served(NamedTuple):
    """What one way of serving achieved."""

    accuracy: float
    requests_per_s: float
    p50_s: float
    p99_s: float
    largest_lag_s: float


def load() -> Digits:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    training, held_back = train_test_split(
        np.arange(len(labels)), test_size=0.25, stratify=labels, random_state=SEED
    )
    return Digits(images, labels.astype(np.int64), training, held_back)


def small_cnn() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 128), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(128 * 2 * 2, 10),
    )  # fmt: skip


def batches(digits: Digits, rng: np.random.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    shuffled = rng.permutation(digits.training)
    for start in range(0, len(shuffled), BATCH):
        chosen = shuffled[start : start + BATCH]
        yield torch.from_numpy(digits.images[chosen]), torch.from_numpy(digits.labels[chosen])


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@aiogpu.task
async def train(model: nn.Module, digits: Digits, progress: Progress, bar: TaskID) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    rng = np.random.default_rng(SEED)
    for _ in range(EPOCHS):
        for images, labels in batches(digits, rng):
            x, y = await aiogpu.to_device((images, labels))
            loss = await aiogpu.run_sync(learn, model, optimizer, x, y)
            progress.advance(bar)
        schedule.step()
        progress.update(bar, note=f"loss {await aiogpu.item(loss):.4f}")
    await aiogpu.synchronize()  # the last step has to be finished before somebody else reads the weights


@aiogpu.task
async def classify(model: nn.Module, image: np.ndarray) -> int:
    with torch.inference_mode():
        x = await aiogpu.to_device(image[None])
        # Launching this small a model takes 0.2 ms: less than a hop to a thread, and threads that launch
        # share the GIL with the loop. On the CPU the call would compute here, and hold up everybody.
        scores = model(x) if x.is_cuda else await aiogpu.run_sync(model, x)
        return int((await aiogpu.to_host(scores)).argmax())


async def classify_blocking(model: nn.Module, image: np.ndarray) -> int:
    with torch.inference_mode():
        x = torch.from_numpy(image[None]).to(next(model.parameters()).device)
        return int(model(x).cpu().argmax())


async def serve(
    handle: Handler, model: nn.Module, digits: Digits, requests: int, on_answer: Callable[[], object]
) -> Served:
    """Each client sends one request after another; as in a web server, each request is a task of its own."""
    answers = np.full(len(digits.labels), -1)
    latencies: list[float] = []
    # The held-back digits first, so that a short run is checked as strictly as a long one.
    waiting = islice(cycle([*digits.held_back, *digits.training]), requests)

    async def client() -> None:
        for i in waiting:
            start = perf_counter()
            answers[i] = await asyncio.create_task(handle(model, digits.images[i]))
            latencies.append(perf_counter() - start)
            on_answer()

    async with heartbeat() as gaps:
        start = perf_counter()
        await aiogpu.gather(*(client() for _ in range(CLIENTS)))
        elapsed = perf_counter() - start
    return Served(
        accuracy=accuracy(answers, digits),
        requests_per_s=requests / elapsed,
        p50_s=percentile(latencies, 50),
        p99_s=percentile(latencies, 99),
        largest_lag_s=max(gaps) - BEAT,
    )


def accuracy(answers: np.ndarray, digits: Digits) -> float:
    """The part of the held-back digits that was recognized, of those that were asked for."""
    asked = digits.held_back[answers[digits.held_back] >= 0]
    return float((answers[asked] == digits.labels[asked]).mean()) if len(asked) else 0.0


async def main_job(digits: Digits, device: torch.device, requests: int) -> dict[str, Served]:
    """Trains, then serves both ways; gives what each of them achieved."""
    columns = TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}")) as progress:
        async with aiogpu.Runtime(device):
            torch.manual_seed(SEED)
            model = await aiogpu.to_device(small_cnn())
            steps = EPOCHS * math.ceil(len(digits.training) / BATCH)
            await train(model, digits, progress, progress.add_task("training", total=steps, note=""))
            model.eval()
            # What servers do before they serve: torch's half a million objects, looked through by a full
            # collection in the midst of requests, hold up everybody for 100 ms.
            gc.collect()
            gc.freeze()
            served = {}
            for way, handle in {"aiogpu": classify, "blocking": classify_blocking}.items():
                await serve(handle, model, digits, 4 * CLIENTS, lambda: None)  # warm-up
                bar = progress.add_task(f"classifying, {way}", total=requests, note="")
                served[way] = await serve(handle, model, digits, requests, partial(progress.advance, bar))
    return served


def report(served: dict[str, Served], title: str) -> None:
    ways = served.values()
    print_table(
        title,
        ["", *served],
        [
            ["requests/s", *(f"{way.requests_per_s:,.0f}" for way in ways)],
            ["latency p50", *(milliseconds(way.p50_s) for way in ways)],
            ["latency p99", *(milliseconds(way.p99_s) for way in ways)],
            ["loop's largest lag", *(milliseconds(way.largest_lag_s) for way in ways)],
            ["held-back digits recognized", *(f"{way.accuracy:.1%}" for way in ways)],
        ],
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on digits and serve it.")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    parser.add_argument("--requests", type=int, default=1797, help="default: each digit once")
    parser.add_argument("--json", type=Path, help="write the table there, times in seconds")
    args = parser.parse_args()
    if args.requests < 1:
        parser.error("--requests: at least one is needed")
    return args


def main() -> int:
    args = arguments()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    served = asyncio.run(main_job(load(), device, args.requests))
    report(served, f"{args.requests} requests, {CLIENTS} clients, {device}")
    setting = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": str(device),
        "requests": args.requests,
        "clients": CLIENTS,
    }
    write_json(args.json, setting | {way: achieved._asdict() for way, achieved in served.items()})
    recognized = min(way.accuracy for way in served.values())
    if recognized < REQUIRED_ACCURACY:
        print(f"Only {recognized:.1%} of the held-back digits were recognized.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
