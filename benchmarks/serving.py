"""Many clients on one device, over HTTP on the loopback interface: what do they get, and how late?

One server process has one model and every contender at a path of its own; processes that share nothing with
it ask. Everything is bounded in time. Latencies of the open loop count from the moment a request was due.

    python -m benchmarks.serving [--quick] [--json PATH]      SERVING_PLOT=plot.png: draw the latencies, too
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from _harness import main, percentile
from _report import Row, at_least, at_most
from _serving_load import INPUTS, TOLERANCE, Connection, Outcome, request, truth, wires

ROOT = Path(__file__).resolve().parent.parent
CUDA = torch.cuda.is_available()

CONTENDERS = {
    "handler with .cpu()": "/cpu",
    "handler with asyncio.to_thread": "/to_thread",
    "def endpoint": "/def",
    "aiogpu, no batching": "/aiogpu",
    "aiogpu with Batcher": "/batcher",
}
OURS, PLAIN, BLOCKING = "aiogpu with Batcher", "aiogpu, no batching", "handler with .cpu()"


@dataclass(frozen=True)
class Scale:
    """How much of everything. Layers, width, tokens: a request's cost on the device."""

    clients: int
    seconds: float  # of one measurement
    long: float  # of the two that look for what only time shows
    processes: int
    model: tuple[int, int, int]


FULL = Scale(clients=256, seconds=6.0, long=60.0, processes=4, model=(24, 512, 128))
# Small enough for two cores that do everything: no verdict means anything there.
QUICK = Scale(clients=32, seconds=1.2, long=2.5, processes=1, model=(2, 64, 16))
QUICK_GPU = Scale(clients=256, seconds=2.0, long=6.0, processes=4, model=FULL.model)


class Server:
    """A running server, and questions to it."""

    def __init__(self, port: int, scale: Scale) -> None:
        self.port = port
        self.scale = scale
        self.truths = asyncio.run(truth(port, "/cpu", scale.model[2]))
        # Answers must differ by more than what may be lost in sums, or mixed-up ones would go unseen.
        distances = [
            max(abs(x - y) for x, y in zip(a, b, strict=True))
            for i, a in enumerate(self.truths)
            for b in self.truths[:i]
        ]
        assert min(distances) > 4 * TOLERANCE, f"answers are too much alike: {min(distances)}"

    def load(self, path: str, seconds: float, **how: float) -> Iterator[subprocess.Popen[str]]:
        """Start processes that ask for so many seconds; `clients` or `rate` in all."""
        n = self.scale.processes
        # Clients are whole, and there is one in each process at least.
        each = {name: value / n if name == "rate" else max(1, int(value) // n) for name, value in how.items()}
        for number in range(n):
            spec = {
                "port": self.port, "path": path, "seconds": seconds, "seed": number,
                "tokens": self.scale.model[2], "truths": self.truths, **each,
            }  # fmt: skip
            command = [sys.executable, str(ROOT / "benchmarks/_serving_load.py"), json.dumps(spec)]
            yield subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def ask(self, path: str, seconds: float, **how: float) -> tuple[Outcome, list[float]]:
        """What became of the requests, and how late the health check was answered meanwhile."""
        processes = list(self.load(path, seconds, **how))
        try:
            health = asyncio.run(probe(self.port, processes))
            parts = [json.loads(process.communicate(timeout=seconds + 30)[0]) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        whole = Outcome()
        for latencies, wrong, elapsed in parts:
            for status, of in latencies.items():
                whole.latencies.setdefault(int(status), []).extend(of)
            whole.wrong += wrong
            whole.elapsed = max(whole.elapsed, elapsed)
        return whole, health

    def stats(self) -> dict[str, float]:
        return asyncio.run(_stats(self.port))

    def settled(self) -> dict[str, float]:
        """The numbers once nothing is under way, or after 10 s."""
        deadline = time.monotonic() + 10
        while (now := self.stats()) and busy(now) and time.monotonic() < deadline:
            time.sleep(0.05)
        return now


def busy(stats: dict[str, float]) -> float:
    return sum(stats[name] for name in ("in_flight", "streams_in_use", "operations", "waiting", "running"))


async def _stats(port: int) -> dict[str, float]:
    async with Connection("127.0.0.1", port) as connection:
        numbers: dict[str, float] = json.loads((await connection.ask(request("GET", "/stats"))).body)
        return numbers


async def probe(port: int, processes: list[subprocess.Popen[str]]) -> list[float]:
    """Ask /healthz every 10 ms while the others run; a late answer counts from when it was due."""
    latencies: list[float] = []
    wire = request("GET", "/healthz")
    async with Connection("127.0.0.1", port) as connection:
        due = time.perf_counter() + 0.3  # they have to start first
        while all(process.poll() is None for process in processes):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await connection.ask(wire)
            latencies.append(time.perf_counter() - due)
            due = max(due + 0.01, time.perf_counter())
    return latencies or [math.nan]


@contextmanager
def serving(scale: Scale) -> Iterator[Server]:
    command = [sys.executable, "-m", "benchmarks._serving_app", *map(str, scale.model)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield Server(int(process.stdout.readline()), scale)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


# -- the questions -------------------------------------------------------------------------------------


def measure(quick: bool) -> list[Row]:
    if importlib.util.find_spec("uvicorn") is None:
        print("serving: needs uvicorn (pip install uvicorn; with httptools and uvloop it is faster); skipped")
        return []
    scale = (QUICK_GPU if CUDA else QUICK) if quick else FULL
    with serving(scale) as server:
        for path in CONTENDERS.values():  # kernels are loaded, caches filled, threads started
            server.ask(path, scale.seconds / 2, clients=scale.clients)
        rates, rows = saturation(server)
        rows += half(server, rates)
        rows += idle(server)
        rows += overload(server, rates[OURS])
        rows += disconnects(server, rates[OURS])
    return rows + others()


def saturation(server: Server) -> tuple[dict[str, float], list[Row]]:
    scale = server.scale
    question = f"{scale.clients} clients, requests/s"
    rates, rows, lags = {}, [], []
    for name, path in CONTENDERS.items():
        outcome, health = server.ask(path, scale.seconds, clients=scale.clients)
        rates[name] = len(outcome.good) / outcome.elapsed
        detail = {"p50 ms": ms(outcome, 50), "p99 ms": ms(outcome, 99)} | trouble(outcome)
        rows.append(Row(question, name, rates[name], "1/s", detail=detail))
        late = percentile(health, 99) * 1e3
        health_question = "/healthz p99 at full load"
        make = at_most(health_question, name, late, "ms", 10) if name == OURS else None
        lags.append(make or Row(health_question, name, late, "ms"))
    best = max(rate for name, rate in rates.items() if name != OURS)
    rows.append(at_least("throughput against .cpu()", OURS, rates[OURS] / rates[BLOCKING], "×", 4))
    rows.append(at_least("throughput against the best without batching", OURS, rates[OURS] / best, "×", 1.5))
    return rates, rows + lags


def half(server: Server, rates: dict[str, float]) -> list[Row]:
    """Each at half of its own saturation: where a service should run."""
    outcomes = {
        name: server.ask(path, server.scale.seconds, rate=rates[name] / 2)[0]
        for name, path in CONTENDERS.items()
    }
    draw(outcomes)
    question = "p99 at half of saturation"
    best = min(ms(outcome, 99) for name, outcome in outcomes.items() if name not in (OURS, PLAIN))
    rows = []
    for name, outcome in outcomes.items():
        detail = {"requests/s": rates[name] / 2, "p50 ms": ms(outcome, 50)} | trouble(outcome)
        if name == OURS:
            rows.append(at_most(question, name, ms(outcome, 99), "ms", best, **detail))
        else:
            rows.append(Row(question, name, ms(outcome, 99), "ms", detail=detail))
    return rows


def idle(server: Server) -> list[Row]:
    """One client, nobody else. Both ways in turns, so that both see the same machine."""
    names = (BLOCKING, PLAIN, OURS)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(5):
        for name in names:
            taken[name] += asyncio.run(_alone(server, CONTENDERS[name], 20))
    question = "one request at a time, p50"
    direct = percentile(taken[BLOCKING], 50)
    rows = [Row(question, name, percentile(taken[name], 50) * 1e3, "ms") for name in names]
    return [*rows, at_most("the same, against .cpu()", OURS, percentile(taken[OURS], 50) / direct, "×", 1.1)]


async def _alone(server: Server, path: str, n: int) -> list[float]:
    taken = []
    asked = wires(path, server.scale.model[2])
    async with Connection("127.0.0.1", server.port) as connection:
        for i in range(n):
            start = time.perf_counter()
            await connection.ask(asked[i % INPUTS])
            taken.append(time.perf_counter() - start)
    return taken


def overload(server: Server, peak: float) -> list[Row]:
    seconds = server.scale.long
    before = server.settled()
    outcome, _ = server.ask("/batcher", seconds, rate=3 * peak)
    after = server.settled()
    question = f"3 × saturation offered for {seconds:g} s"
    goodput = len(outcome.good) / outcome.elapsed
    refused = ms(outcome, 99, 429)
    growth = max((after[name] + 1) / (before[name] + 1) for name in ("rss_MB", "gpu_MB"))
    detail = {"requests/s": 3 * peak, "p99 ms": ms(outcome, 99)} | trouble(outcome)
    return [
        at_least(f"{question}: goodput of peak", OURS, goodput / peak, "×", 0.9, **detail),
        at_most(f"{question}: refusals, p99", OURS, refused, "ms", 50)
        if not math.isnan(refused)
        else Row(f"{question}: refusals", OURS, 0, "", detail=detail),
        at_most(f"{question}: memory after against before", OURS, growth, "×", 1.1, **memory(before, after)),
    ]


def memory(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {
        "RSS MB": after["rss_MB"],
        "grew MB": after["rss_MB"] - before["rss_MB"],
        "GPU MB": after["gpu_MB"],
    }


def disconnects(server: Server, peak: float) -> list[Row]:
    """A client per second goes away at a random moment; do the others notice?"""
    seconds = server.scale.long
    calm, _ = server.ask("/batcher", seconds / 2, rate=peak / 2)
    leaving = subprocess.Popen(
        [sys.executable, __file__, "--leave", str(server.port), str(server.scale.model[2]), str(seconds)]
    )
    try:
        troubled, _ = server.ask("/batcher", seconds, rate=peak / 2)
    finally:
        leaving.wait(30)
    left = busy(server.settled())
    question = f"a client per second goes away, {seconds:g} s"
    ratio = ms(troubled, 99) / ms(calm, 99)
    detail = {"p99 ms": ms(troubled, 99), "calm p99 ms": ms(calm, 99)} | trouble(troubled)
    return [
        at_most(f"{question}: wrong or missing answers", OURS, len(lost(troubled)) + troubled.wrong, "", 0),
        at_most(f"{question}: left behind", OURS, left, "", 0),
        at_most(f"{question}: siblings' p99 against calm", OURS, ratio, "×", 1.2, **detail),
    ]


def leave(port: int, tokens: int, seconds: float) -> None:
    """The client that goes away: in the middle of its request, of its computation, of its answer."""

    async def go() -> None:
        rng, end = random.Random(0), time.monotonic() + seconds
        pause = min(1.0, seconds / 10)
        while time.monotonic() < end:
            async with Connection("127.0.0.1", port) as connection:
                wire = rng.choice(wires("/batcher", tokens))
                cut = len(wire) if rng.random() < 0.7 else rng.randrange(len(wire))
                await connection.send(wire[:cut])
                await asyncio.sleep(rng.uniform(0, 0.03))
            await asyncio.sleep(pause)

    asyncio.run(go())


def others() -> list[Row]:
    """What is not compared with here, and why."""
    for name in ("litserve", "ray.serve"):
        found = importlib.util.find_spec(name.split(".")[0]) is not None
        print(f"serving: {name}: {'no contender written yet' if found else 'not installed'}; skipped")
    return []


# -- numbers -------------------------------------------------------------------------------------------


def ms(outcome: Outcome, percent: float, status: int = 200) -> float:
    return outcome.percentile(percent, status) * 1e3


def lost(outcome: Outcome) -> list[float]:
    """Requests with neither an answer nor a refusal."""
    return [each for status, of in outcome.latencies.items() if status not in (200, 429) for each in of]


def trouble(outcome: Outcome) -> dict[str, int]:
    """Only where there was any."""
    counts = {f"status {status or 'none'}": n for status, n in outcome.counts.items() if status != 200}
    return counts | ({"wrong": outcome.wrong} if outcome.wrong else {})


def draw(outcomes: dict[str, Outcome]) -> None:
    """Latency over percentile, into the file that SERVING_PLOT names."""
    target = os.environ.get("SERVING_PLOT")
    if not target:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(
        xlabel="percentile", ylabel="latency, ms", title="Each at half of its own saturation"
    )
    for name, outcome in outcomes.items():
        ranked = sorted(outcome.good)
        shares = [1 / (1 - i / len(ranked)) for i in range(len(ranked))]
        label = f"{name} ({len(ranked) / outcome.elapsed:,.0f}/s)" if ranked else name
        axes.plot(shares, [each * 1e3 for each in ranked], label=label)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks([1, 10, 100, 1000], ["0", "90", "99", "99.9"])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120)


def _arguments_of_leave() -> Any:
    port, tokens, seconds = sys.argv[2:5]
    return int(port), int(tokens), float(seconds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--leave"]:
        leave(*_arguments_of_leave())
    else:
        main("serving", measure, needs_gpu=False, limit_s=420)
