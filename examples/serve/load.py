"""A load generator for app.py: what do its clients see?

    python examples/serve/load.py closed [--clients 64]         as fast as the answers come
    python examples/serve/load.py open --rate 200               as many as are sent, whatever comes back

Closed: each client sends a request when it has its last answer, so a slow server is asked less. Open:
requests are due at random moments (a Poisson process), and a latency counts from that moment, also when the
client could not send it then. A server that stands still cannot hide by not being asked (Gil Tene called
that coordinated omission). Every answer is checked against the label. `--plot file.png` draws the latencies
(needs matplotlib).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from client import Connection, request

if TYPE_CHECKING:
    from rich.console import Console

CONNECTIONS = 512  # at most, of an open loop: then requests wait here, and that counts as latency


@dataclass
class Outcome:
    """What became of the requests. Latencies in seconds, by status; 0: no answer at all."""

    latencies: dict[int, list[float]] = field(default_factory=dict)
    wrong: int = 0
    elapsed: float = 0.0

    def add(self, status: int, seconds: float) -> None:
        self.latencies.setdefault(status, []).append(seconds)

    @property
    def good(self) -> list[float]:
        return self.latencies.get(200, [])

    @property
    def counts(self) -> dict[int, int]:
        return {status: len(of) for status, of in sorted(self.latencies.items())}

    def percentile(self, percent: float, status: int = 200) -> float:
        """Nearest rank, in seconds."""
        ranked = sorted(self.latencies.get(status, ()))
        return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)] if ranked else math.nan


@dataclass(frozen=True)
class Ask:
    """A request, and whether an answer to it is right."""

    wire: bytes
    right: Callable[[bytes], bool]


Told = Callable[[], object]


class Clients:
    """Connections that are used again, up to a number."""

    def __init__(self, host: str, port: int, most: int) -> None:
        self._address = host, port
        self._free: list[Connection] = []
        self._limit = asyncio.Semaphore(most)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Connection]:
        async with self._limit:
            connection = self._free.pop() if self._free else Connection(*self._address)
            try:
                yield connection
            finally:
                self._free.append(connection)

    def close(self) -> None:
        for connection in self._free:
            connection.drop()


async def ask_once(connection: Connection, ask: Ask, outcome: Outcome, since: float) -> None:
    try:
        reply = await connection.ask(ask.wire)
    except (OSError, asyncio.IncompleteReadError):
        outcome.add(0, perf_counter() - since)
        return
    outcome.add(reply.status, perf_counter() - since)
    if reply.status == 200 and not ask.right(reply.body):
        outcome.wrong += 1


async def closed_loop(
    host: str,
    port: int,
    asks: Sequence[Ask],
    *,
    clients: int,
    requests: int = sys.maxsize,
    seconds: float = math.inf,
    told: Told = lambda: None,
) -> Outcome:
    """`requests` in all, or for so many seconds, by `clients` that send one after another."""
    outcome, left = Outcome(), iter(range(requests))

    async def client(number: int) -> None:
        async with Connection(host, port) as connection:
            for i in left:
                if (now := perf_counter()) - start > seconds:
                    return
                await ask_once(connection, asks[(i + number) % len(asks)], outcome, now)
                told()

    start = perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    outcome.elapsed = perf_counter() - start
    return outcome


async def open_loop(
    host: str,
    port: int,
    asks: Sequence[Ask],
    *,
    rate: float,
    requests: int = sys.maxsize,
    seconds: float = math.inf,
    seed: int = 0,
    connections: int = CONNECTIONS,
    told: Told = lambda: None,
) -> Outcome:
    """`requests` in all, or for so many seconds, `rate` per second on average, sent when they are due."""
    outcome, rng = Outcome(), random.Random(seed)
    clients = Clients(host, port, connections)

    async def one(ask: Ask, due: float) -> None:
        async with clients.one() as connection:
            await ask_once(connection, ask, outcome, due)
            told()

    start = due = perf_counter()
    async with asyncio.TaskGroup() as group:
        for i in range(requests):
            due += rng.expovariate(rate)
            # The loop's timer has a granularity of a millisecond: late ones go at once, together.
            if (wait := due - perf_counter()) > 0:
                await asyncio.sleep(wait)
            if perf_counter() - start > seconds:
                break
            # Nor is it exact: one that goes too early counts from when it goes.
            group.create_task(one(asks[i % len(asks)], min(due, perf_counter())))
    outcome.elapsed = perf_counter() - start
    clients.close()
    return outcome


# -- what is asked -------------------------------------------------------------------------------------


def digits_asks() -> list[Ask]:
    """The held-back digits, each as JSON. A trained model takes some of them for another digit, too."""
    from model import digits

    _, _, pixels, labels = digits()

    def ask(image: list[list[float]], label: int) -> Ask:
        body = json.dumps({"pixels": image}).encode()
        wire = request("POST", "/classify", body, content_type="application/json")
        return Ask(wire, lambda answer: bool(json.loads(answer)["digit"] == label))

    return [ask(image.tolist(), int(label)) for image, label in zip(pixels, labels, strict=True)]


# -- what is shown -------------------------------------------------------------------------------------


def report(outcome: Outcome, console: Console) -> None:
    from rich.table import Table

    table = Table("status", "requests", "per second", "p50", "p90", "p99", "largest", title_justify="left")
    for status, count in outcome.counts.items():
        times = (outcome.percentile(percent, status) for percent in (50, 90, 99, 100))
        cells = (f"{seconds * 1e3:,.1f} ms" for seconds in times)
        name = str(status) if status else "none"
        table.add_row(name, str(count), f"{count / outcome.elapsed:,.0f}", *cells)
    console.print(table)
    if outcome.good:
        right = len(outcome.good) - outcome.wrong
        console.print(
            f"{right} of {len(outcome.good)} digits were recognised ({right / len(outcome.good):.1%})"
        )
        console.print(histogram(outcome.good))


def histogram(seconds: Sequence[float], rows: int = 12, width: int = 50) -> str:
    """Latencies as text, on a logarithmic scale."""
    seconds = [max(each, 1e-6) for each in seconds]
    low, high = math.log10(min(seconds)), math.log10(max(seconds))
    step = max((high - low) / rows, 1e-3)
    counts = Counter(min(rows - 1, int((math.log10(each) - low) / step)) for each in seconds)
    largest = max(counts.values())
    lines = []
    for row in range(rows):
        edge = 10 ** (low + row * step) * 1e3
        bar = "█" * math.ceil(counts[row] / largest * width)
        lines.append(f"{edge:9.2f} ms  {bar} {counts[row] or ''}")
    return "\n".join(lines)


def plot(outcome: Outcome, path: Path, title: str) -> bool:
    """Latency over the share of requests that were faster; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="percentile", ylabel="latency, ms", title=title)
    for status, seconds in sorted(outcome.latencies.items()):
        ranked = sorted(seconds)
        # Nines along the axis, as in HdrHistogram: the slow ones are those that users remember.
        shares = [1 / (1 - i / len(ranked)) for i in range(len(ranked))]
        axes.plot(shares, [each * 1e3 for each in ranked], label=f"{status or 'no answer'} ({len(ranked)})")
    axes.set(xscale="log", yscale="log")
    ticks = [tick for tick in (1, 10, 100, 1000, 10_000) if tick <= max(map(len, outcome.latencies.values()))]
    axes.set_xticks(ticks, [f"{(1 - 1 / tick) * 100:g}" for tick in ticks])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Load for app.py.")
    parser.add_argument("loop", choices=["closed", "open"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64, help="of the closed loop")
    parser.add_argument("--rate", type=float, default=200.0, help="of the open loop, requests per second")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.requests < 1 or args.clients < 1 or args.rate <= 0:
        parser.error("--requests, --clients and --rate are positive")
    return args


async def main(args: argparse.Namespace) -> Outcome:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    asks = digits_asks()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns) as progress:
        bar = progress.add_task(f"{args.loop} loop", total=args.requests)

        def told() -> None:
            progress.advance(bar)

        if args.loop == "closed":
            load = closed_loop(
                args.host, args.port, asks, clients=args.clients, requests=args.requests, told=told
            )
        else:
            load = open_loop(args.host, args.port, asks, rate=args.rate, requests=args.requests, told=told)
        return await load


if __name__ == "__main__":
    args = arguments()
    outcome = asyncio.run(main(args))
    from rich.console import Console

    console = Console()
    report(outcome, console)
    offered = f"{args.clients} clients" if args.loop == "closed" else f"{args.rate:g} requests/s offered"
    if args.plot is not None and not plot(outcome, args.plot, f"{args.loop} loop, {offered}"):
        console.print("no plot: matplotlib is not installed")
    sys.exit(0 if outcome.good else 1)
