"""A training loop that never waits: loading, copies, compute, logs, evaluation, checkpoints side by side.

    python examples/train.py [--data digits|cifar] [--steps N] [--checkpoints DIR] [--resume] [--distributed]

* Batches are loaded and uploaded ahead (`aiogpu.prefetch`).
* Forward, backward and the optimizer are launched from a worker thread (`aiogpu.run_sync`).
* Loss and gradient norm of every step are logged, in order, some steps later: nobody calls `.item()`.
* A loss that is not finite stops training with the number of the step in which it happened.
* Evaluation runs beside training, on a copy of the weights and a stream of its own.
* Checkpoints are exact for the step they name, and written in the background; Ctrl-C writes one more.
* `--resume` goes on from the latest one: the same numbers, bit for bit, as without the interruption (on the
  CPU, with as many threads as before).

Two kinds of data: scikit-learn's handwritten digits, and images of CIFAR's shape that are made on the fly.
"""

from __future__ import annotations

import os

# Bit for bit, also on the GPU: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import argparse
import asyncio
import copy
import math
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aiogpu
from _checkpoints import Checkpoints, read, snapshot
from _show import BEAT, heartbeat, milliseconds, percentile, print_table, write_json

SEED = 0
BATCH = 64

# -- data ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """`images`: (n, channels, side, side) float32; `labels`: (n,) int64; the last part is held back."""

    training: TensorDataset
    held_back: tuple[torch.Tensor, torch.Tensor]
    channels: int
    side: int


def digits() -> Data:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().div(16).view(-1, 1, 8, 8)
    y = torch.from_numpy(labels).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SEED))
    x, y = x[order], y[order]
    return Data(TensorDataset(x[:1347], y[:1347]), (x[1347:], y[1347:]), channels=1, side=8)


def cifar_shaped(n: int = 4096) -> Data:
    """Ten colour gratings in noise: 3 x 32 x 32 like CIFAR-10, without a download."""
    random = torch.Generator().manual_seed(SEED)
    y = torch.randint(10, (n,), generator=random)
    at = torch.arange(32) / 32 * math.tau
    across, down = (1 + y % 5)[:, None, None], (1 + y // 5)[:, None, None]
    waves = torch.sin(at[None, :, None] * across + at[None, None, :] * down)
    x = waves[:, None].expand(n, 3, 32, 32) + torch.randn(n, 3, 32, 32, generator=random)
    held = n // 8
    return Data(TensorDataset(x[held:], y[held:]), (x[:held], y[:held]), channels=3, side=32)


@dataclass(frozen=True)
class Order:
    """The samples of each batch from step `first` to step `last`. They follow from the seed and the step
    alone: that is what makes going on exact."""

    first: int
    last: int
    n: int

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[list[int]]:
        per_epoch = self.n // BATCH
        shuffled, epoch = torch.empty(0), -1
        for step in range(self.first, self.last):
            if step // per_epoch != epoch:
                epoch = step // per_epoch
                shuffled = torch.randperm(self.n, generator=torch.Generator().manual_seed(SEED + 1 + epoch))
            start = step % per_epoch * BATCH
            yield shuffled[start : start + BATCH].tolist()


def loader(data: Data, first: int, last: int, workers: int) -> DataLoader[Any]:
    order: Any = Order(first, last, len(data.training))
    # A generator of its own: DataLoader would draw from the global one, whose state we save.
    own = torch.Generator().manual_seed(SEED)
    return DataLoader(data.training, batch_sampler=order, num_workers=workers, generator=own)


def network(data: Data) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    features = 64 * (data.side // 4) ** 2
    head = nn.Flatten(), nn.Dropout(0.2), nn.Linear(features, 10)
    return nn.Sequential(*block(data.channels, 32), *block(32, 64), *head)


# -- one step ------------------------------------------------------------------------------------------


@dataclass
class Training:
    """What a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0

    def learn(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """One step, launched from a worker thread; (2,): the loss and the gradient's norm, on the device.

        It counts itself, in that thread: an await may be cancelled after the step has been launched.
        """
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # no synchronisation in it
        self.optimizer.step()
        self.step += 1
        return torch.stack([loss.detach(), norm])

    def state(self) -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else torch.get_rng_state()
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def load(self, path: Path) -> None:
        if not self.optimizer.state_dict()["state"]:  # a .dcp folder is read into what is there
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
        state = read(path, self.state())
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        torch.set_rng_state(state["random"]["cpu"])
        if torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state["random"]["cuda"])


# -- beside the steps ------------------------------------------------------------------------------------


class NotFinite(ArithmeticError):
    """The loss or the gradient's norm was inf or nan."""


@dataclass
class Log:
    """Numbers of past steps, in order. Each was on its way from the device while later steps ran."""

    losses: list[float] = field(default_factory=list)
    accuracies: dict[int, float] = field(default_factory=dict)
    delays: list[int] = field(default_factory=list)  # how many steps later a number was there
    spoiled: str = ""  # which step's numbers were not finite: the weights since then are worth nothing


@asynccontextmanager
async def logging_to(log: Log, training: Training, show: Callable[[int, float], None]) -> AsyncIterator[Any]:
    """`record(step, values)` starts the way down and returns; a task awaits the numbers in order.

    `record` raises :class:`NotFinite` for an earlier step. Leaving reads what is still on its way.
    """
    send, receive = anyio.create_memory_object_stream[tuple[int, aiogpu.Operation[torch.Tensor]]](64)
    read = anyio.Event()

    async def read_all() -> None:
        async with receive:
            async for step, operation in receive:
                loss, norm = (await operation).tolist()
                if math.isfinite(loss) and math.isfinite(norm) and not log.spoiled:
                    log.losses.append(loss)
                    log.delays.append(training.step - step)
                    show(step, loss)
                elif not log.spoiled:
                    log.spoiled = (
                        f"step {step}: the loss is {loss}, the gradient's norm {norm}. The checkpoints "
                        "of earlier steps are good"
                    )
        read.set()

    def check() -> None:
        if log.spoiled:
            raise NotFinite(log.spoiled)

    async def record(step: int, values: torch.Tensor) -> None:
        check()
        await send.send((step, aiogpu.to_host(values)))  # waits only when 64 are on their way

    async with anyio.create_task_group() as group:
        group.start_soon(read_all)
        try:
            yield record
        finally:
            send.close()
            with anyio.CancelScope(shield=True):
                await read.wait()
        check()


@dataclass
class Evaluation:
    """Accuracy on the held-back part, with copies of the weights, beside training; one at a time."""

    data: Data
    model: nn.Module
    device: torch.device
    log: Log
    turn: anyio.Lock = field(default_factory=anyio.Lock)

    @aiogpu.task
    async def run(self, step: int, weights: dict[str, torch.Tensor]) -> None:
        async with self.turn:
            with torch.inference_mode():
                x, y = await aiogpu.to_device(self.data.held_back, self.device)
                hits = await aiogpu.run_sync(self._hits, weights, x, y)
                self.log.accuracies[step] = await aiogpu.item(hits)

    def _hits(self, weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.model.load_state_dict(weights)
        return (self.model(x).argmax(1) == y).float().mean()


# -- the loop ------------------------------------------------------------------------------------------


@dataclass
class Loop:
    """What the loop works with."""

    training: Training
    data: Data
    evaluation: Evaluation
    checkpoints: Checkpoints | None
    log: Log
    show: Callable[[int, float], None]


@aiogpu.task
async def train(loop: Loop, options: argparse.Namespace) -> None:
    try:
        await steps(loop, options)
        await aiogpu.synchronize()
    finally:
        # Also after Ctrl-C: the state is that of the last step that was launched, whole.
        if loop.checkpoints is not None and not loop.log.spoiled:
            with anyio.CancelScope(shield=True):
                state = snapshot(loop.training.state())
                await loop.checkpoints.save(loop.training.step, state)


async def steps(loop: Loop, options: argparse.Namespace) -> None:
    training, checkpoints = loop.training, loop.checkpoints
    batches = loader(loop.data, training.step, options.steps, options.workers)
    async with (
        anyio.create_task_group() as beside,
        logging_to(loop.log, training, loop.show) as record,
        aiogpu.prefetch(batches, depth=2, device=options.device) as uploaded,
    ):
        async for x, y in uploaded:
            values = await aiogpu.run_sync(training.learn, x, y)
            step = training.step
            await record(step, values)
            if step % options.evaluate_every == 0 or step == options.steps:
                beside.start_soon(loop.evaluation.run, step, snapshot(training.model.state_dict()))
            if checkpoints is not None and step % options.checkpoint_every == 0 and step < options.steps:
                beside.start_soon(checkpoints.save, step, snapshot(training.state()), values)


async def build(options: argparse.Namespace, log: Log, show: Callable[[int, float], None]) -> Loop:
    data = await aiogpu.run_sync(digits if options.data == "digits" else cifar_shaped)
    torch.manual_seed(SEED)
    model = await aiogpu.to_device(network(data), options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    training = Training(model, optimizer)
    checkpoints = None
    if options.checkpoints is not None:
        checkpoints = Checkpoints(options.checkpoints, distributed=options.distributed)
        latest = checkpoints.latest()
        if latest is not None and not options.resume:
            raise SystemExit(f"{latest} is there already: --resume goes on from it; or name another folder")
        if latest is not None:
            await aiogpu.run_sync(training.load, latest)
            print(f"going on from {latest}", flush=True)
    spare = copy.deepcopy(model).eval()
    return Loop(training, data, Evaluation(data, spare, options.device, log), checkpoints, log, show)


async def main(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}"), disable=options.plain) as progress:
        bar = progress.add_task("training", total=options.steps, note="")

        def show(step: int, loss: float) -> None:
            progress.update(bar, completed=step, note=f"loss {loss:.4f}")
            if options.plain:
                print(f"step {step} loss {loss!r}", flush=True)

        async with aiogpu.Runtime(options.device):
            loop = await build(options, log, show)
            first, start = loop.training.step, perf_counter()
            async with heartbeat() as gaps:
                await train(loop, options)
            took = perf_counter() - start
    return {
        "steps": loop.training.step,
        "steps_per_s": (loop.training.step - first) / took,
        "loss": log.losses[-1] if log.losses else None,
        "accuracy": log.accuracies.get(options.steps),
        "logged_steps_later": max(log.delays, default=0),
        "lag_p99_s": percentile(gaps, 99) - BEAT,
        "lag_max_s": max(gaps) - BEAT,
    }


def report(done: dict[str, Any], title: str) -> None:
    shown = "-" if done["accuracy"] is None else f"{done['accuracy']:.1%}"
    print_table(
        title,
        ["", ""],
        [
            ["steps/s", f"{done['steps_per_s']:,.0f}"],
            ["last loss", "-" if done["loss"] is None else f"{done['loss']:.4f}"],
            ["held-back part recognized", shown],
            ["a loss was logged, at most", f"{done['logged_steps_later']} steps later"],
            ["loop's lag p99", milliseconds(done["lag_p99_s"])],
            ["loop's largest lag", milliseconds(done["lag_max_s"])],
        ],
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training loop that never waits.")
    parser.add_argument("--data", choices=["digits", "cifar"], default="digits")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--workers", type=int, default=0, help="loading processes of the DataLoader")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--evaluate-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--distributed", action="store_true", help="torch.distributed.checkpoint's format")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    parser.add_argument("--plain", action="store_true", help="a line for each step instead of a bar")
    parser.add_argument("--json", type=Path, help="write the table there, times in seconds")
    options = parser.parse_args()
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return options


def run() -> int:
    options, log = arguments(), Log()
    torch.use_deterministic_algorithms(True)
    try:
        done = asyncio.run(main(options, log))
    except KeyboardInterrupt:
        go_on = "; --resume goes on from the checkpoint" if options.checkpoints else ""
        print(f"stopped after {len(log.losses)} logged steps{go_on}", file=sys.stderr)
        return 130
    except ExceptionGroup:
        if not log.spoiled:
            raise
        print(log.spoiled, file=sys.stderr)
        return 1
    report(done, f"{options.data}, {done['steps']} steps of {BATCH} on {options.device}")
    write_json(options.json, done)
    return 0


if __name__ == "__main__":
    sys.exit(run())
