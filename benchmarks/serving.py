"""Many clients on one device, over HTTP on the loopback interface: what do they get, and how late?

One server process has one model and every contender at a path of its own (LitServe, which has processes of
its own, the same model once more); processes that share nothing with it ask. Every phase says when it
starts, and what it has found when it ends; one that fails says so and leaves the others their turn.
Everything is bounded in time, and ends with its rows when it is told to (SIGTERM). Latencies of the open
loop count from the moment a request was due.

    python -m benchmarks.serving [--quick] [--json PATH]      SERVING_PLOT=plot.png: draw the latencies, too
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import resource
import signal
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch

from _harness import main, percentile
from _report import Row, at_least, at_most
from _serving_crew import Answered, Crew, Server, busy, crew, litserve, ready, serving, truths
from _serving_load import INPUTS, LITSERVE, Connection, Outcome, wires

CUDA = torch.cuda.is_available()

OURS, PLAIN, BLOCKING, BATCHING = (
    "aiogpu with Batcher",
    "aiogpu, no batching",
    "handler with .cpu()",
    "LitServe",
)
PATHS = {
    BLOCKING: "/cpu",
    "handler with asyncio.to_thread": "/to_thread",
    "def endpoint": "/def",
    BATCHING: LITSERVE,
    PLAIN: "/aiogpu",
    OURS: "/batcher",
}


@dataclass(frozen=True)
class Scale:
    """How much of everything, in seconds and numbers."""

    clients: int
    seconds: float  # of one measurement
    warm: float
    calm: float  # of the one that the disconnects are compared with
    long: float  # of the two that look for what only time shows
    limit: float  # of all
    #: Layers, width, tokens. Deep and narrow, so that one request is a matter of launches and leaves the
    #: device idle, and heavy enough that the device, not Python's HTTP, is what saturates, also when three
    #: times as much is offered: a process of uvicorn answers some 1500 requests a second here.
    model: tuple[int, int, int]


FULL = Scale(256, seconds=2.5, warm=0.4, calm=5.0, long=60.0, limit=300, model=(48, 512, 256))
QUICK_GPU = Scale(128, seconds=1.0, warm=0.3, calm=2.0, long=4.0, limit=90, model=FULL.model)
# Small enough for two cores that do everything: no verdict means anything there.
QUICK = Scale(32, seconds=1.0, warm=0.3, calm=1.5, long=2.5, limit=90, model=(2, 64, 16))

Rows = AsyncIterator[Row]

_began = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - _began:6.1f} s] {text}", flush=True)


def measure(quick: bool) -> list[Row]:
    if importlib.util.find_spec("uvicorn") is None:
        print("serving: needs uvicorn (pip install uvicorn; with httptools and uvloop it is faster); skipped")
        return []
    scale = (QUICK_GPU if CUDA else QUICK) if quick else FULL
    rows: list[Row] = []
    asyncio.run(whole(scale, rows))
    return rows


async def whole(scale: Scale, rows: list[Row]) -> None:
    """All phases; whatever ends this, the rows that there are stay."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async with asyncio.timeout(scale.limit), AsyncExitStack() as stack:
            questions = await prepare(scale, stack)
            await collect("warm-up", questions.warm_up(), rows)
            await collect("saturation", questions.saturation(), rows)
            await collect("half of saturation", questions.half(), rows)
            await collect("one at a time", questions.idle(), rows)
            await collect("overload", questions.overload(), rows)
            await collect("disconnects", questions.disconnects(), rows)
    except asyncio.CancelledError:
        rows.append(failed("the rest", "told to end"))
    except Exception as error:
        traceback.print_exc()
        rows.append(failed("the rest", error))
    say("end")


async def prepare(scale: Scale, stack: AsyncExitStack) -> Questions:
    # Connections are files, and shells allow 1024 of them; children inherit what is allowed here.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    say(f"start: model {scale.model}, {'CUDA' if CUDA else 'CPU'}")
    other = await stack.enter_async_context(litserve(scale.model)) if has_litserve() else None
    server = await stack.enter_async_context(serving(scale.model))
    # Less than half of the processors: the servers have some threads, too.
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(6, max(1, processors // 2 - 1))
    askers = await stack.enter_async_context(crew(processes, scale.model[2]))
    say("right answers, one by one")
    askers.truths = await truths(server, PATHS[BLOCKING], scale.model[2])
    servers = dict.fromkeys(PATHS, server)
    if other is None:
        del servers[BATCHING]
    else:
        servers[BATCHING] = other
        say("waiting for LitServe")
        try:
            await ready(other)
        except (TimeoutError, RuntimeError) as error:
            say(f"LitServe is not ready ({error!r}); skipped")
            del servers[BATCHING]
    return Questions(scale, askers, server, servers)


def has_litserve() -> bool:
    """Says what is not compared with, and why."""
    found = importlib.util.find_spec("litserve") is not None
    if not found:
        say("LitServe is not installed (pip install litserve); skipped")
    say("Ray Serve: no contender, a cluster of processes is not what this compares; skipped")
    return found


async def collect(name: str, found: Rows, rows: list[Row]) -> None:
    """A phase's rows as they come, and its failure as one of them."""
    say(name)
    try:
        async for row in found:
            rows.append(row)
            say("    " + " | ".join(cell for cell in row.cells() if cell))
    except Exception as error:
        if not isinstance(error, OSError):  # a server that has gone, and says why itself
            traceback.print_exc()
        rows.append(failed(name, error))


def failed(question: str, why: Exception | str, contender: str = "") -> Row:
    why = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
    say(f"    {question} {contender} failed: {why}")
    return Row(question, contender, 0.0, "", "an end", False, {"failed": why})


# -- the questions -------------------------------------------------------------------------------------


class Questions:
    def __init__(self, scale: Scale, askers: Crew, server: Server, servers: dict[str, Server]) -> None:
        self.scale = scale
        self.crew = askers
        self.server = server
        self.servers = servers  # of each contender that there is
        self.rates: dict[str, float] = {}  # at saturation, right answers per second

    async def ask(self, name: str, seconds: float, *, clients: int = 0, rate: float = 0.0) -> Answered:
        return await self.crew.ask(self.servers[name], PATHS[name], seconds, clients=clients, rate=rate)

    @property
    def peak(self) -> float:
        if not self.rates.get(OURS):
            raise RuntimeError("how much saturates it is not known")
        return self.rates[OURS]

    async def warm_up(self) -> Rows:
        """Kernels are loaded, caches filled, threads started."""
        for name in tuple(self.servers):
            try:
                found = await self.ask(name, self.scale.warm, clients=min(64, self.scale.clients))
                if not found.outcome.good or found.outcome.wrong:
                    raise RuntimeError(
                        f"no right answers: {found.outcome.counts}, {found.outcome.wrong} wrong"
                    )
            except Exception as error:  # whoever cannot even do this is not asked again
                yield failed("warm-up", error, name)
                del self.servers[name]

    async def saturation(self) -> Rows:
        clients = self.scale.clients
        for name in self.servers:
            try:
                found = await self.ask(name, self.scale.seconds, clients=clients)
            except Exception as error:
                yield failed("saturation", error, name)
                continue
            outcome = found.outcome
            self.rates[name] = (len(outcome.good) - outcome.wrong) / outcome.elapsed
            detail = {"p50 ms": ms(outcome, 50), "p99 ms": ms(outcome, 99)} | trouble(outcome)
            yield Row(f"{clients} clients, requests/s", name, self.rates[name], "1/s", detail=detail)
            yield health("health check's p99 at full load", name, found, 10 if name == OURS else None)
        unbatched = {name: rate for name, rate in self.rates.items() if name not in (OURS, BATCHING)}
        if BLOCKING in self.rates:
            ratio = self.peak / self.rates[BLOCKING]
            yield at_least("throughput against .cpu()", OURS, ratio, "×", 4)
        if unbatched:
            best = max(unbatched, key=lambda name: unbatched[name])
            ratio = self.peak / unbatched[best]
            yield at_least("throughput against the best without batching", OURS, ratio, "×", 1.5, best=best)
        if BATCHING in self.rates:
            yield Row("throughput against LitServe", OURS, self.peak / self.rates[BATCHING], "×")

    async def half(self) -> Rows:
        """Where a service should run: each at half of its own saturation, and ours under the same load."""
        question = "p99 at half of saturation"
        outcomes: dict[str, Outcome] = {}
        beside: dict[str, Outcome] = {}
        for name, rate in self.rates.items():
            # A percentile needs its hundred requests, more or less.
            seconds = self.scale.seconds if rate / 2 * self.scale.seconds > 100 else self.scale.calm
            try:
                outcomes[name] = (await self.ask(name, seconds, rate=rate / 2)).outcome
                if name not in (OURS, PLAIN):
                    beside[name] = (await self.ask(OURS, seconds, rate=rate / 2)).outcome
            except Exception as error:
                yield failed(question, error, name)
                continue
            outcome = outcomes[name]
            detail = {"requests/s": rate / 2, "p50 ms": ms(outcome, 50)} | trouble(outcome)
            yield Row(question, name, ms(outcome, 99), "ms", detail=detail)
        draw(outcomes)
        for name, mine in beside.items():
            detail = {"requests/s": self.rates[name] / 2, "p50 ms": ms(mine, 50)} | trouble(mine)
            theirs = ms(outcomes[name], 99)
            yield at_most(f"p99 under that load, {name}'s", OURS, ms(mine, 99), "ms", theirs, **detail)

    async def idle(self) -> Rows:
        """One client, nobody else. All ways in turns, so that they see the same machine."""
        names = [name for name in (BLOCKING, PLAIN, OURS, BATCHING) if name in self.servers]
        taken: dict[str, list[float]] = {name: [] for name in names}
        inside: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(5):
            for name in names:
                await self._alone(name, 20, taken[name], inside[name])
        for name in names:
            yield Row("one request at a time, p50", name, percentile(taken[name], 50) * 1e3, "ms")
        p50 = {name: percentile(inside[name], 50) * 1e3 for name in names if inside[name]}
        for name in (BLOCKING, PLAIN):  # what .cpu()'s handler does is to call the model directly
            yield Row("of it in the handler, p50", name, p50[name], "ms")
        question = "a lone request in the handler against calling the model directly, p50"
        yield at_most(question, OURS, p50[OURS] / p50[BLOCKING], "×", 1.1, **{"p50 ms": p50[OURS]})

    async def _alone(self, name: str, n: int, taken: list[float], inside: list[float]) -> None:
        asked = wires(PATHS[name], self.scale.model[2])
        async with asyncio.timeout(30), Connection("127.0.0.1", self.servers[name].port) as connection:
            for i in range(n):
                start = time.perf_counter()
                reply = await connection.ask(asked[i % INPUTS])
                taken.append(time.perf_counter() - start)
                if told := reply.headers.get("server-timing"):
                    inside.append(float(told.rpartition("=")[2]) / 1e3)

    async def overload(self) -> Rows:
        seconds, peak = self.scale.long, self.peak
        before = await self.server.settled()
        sampling = asyncio.create_task(self._samples(seconds))
        try:
            found = await self.ask(OURS, seconds, rate=3 * peak)
        finally:
            sampling.cancel()
        samples = await sampling
        after = await self.server.settled()
        outcome = found.outcome
        question = f"3 × saturation offered for {seconds:g} s"
        detail = {"offered ×": found.offered / peak, "p99 ms": ms(outcome, 99)} | trouble(outcome)
        yield at_least(f"{question}: goodput of peak", OURS, found.goodput / peak, "×", 0.9, **detail)
        if 429 in outcome.latencies:
            detail = {"most ms": ms(outcome, 100, 429)}
            yield at_most(f"{question}: refusals, p99", OURS, ms(outcome, 99, 429), "ms", 50, **detail)
        else:
            yield Row(f"{question}: refusals", OURS, 0, "", detail={"there were none": 0})
        yield health(f"{question}: health check's p99", OURS, found, None)
        # Connections and queues fill up at first; from then on nothing may grow.
        early, late = samples[len(samples) // 4], samples[-1]
        growth = max((late[name] + 1) / (early[name] + 1) for name in ("rss_MB", "gpu_MB"))
        detail = {
            "RSS MB before": before["rss_MB"], "at a quarter": early["rss_MB"], "at the end": late["rss_MB"],
            "after": after["rss_MB"], "GPU MB before": before["gpu_MB"], "GPU MB at the end": late["gpu_MB"],
        }  # fmt: skip
        yield at_most(f"{question}: memory at its end against a quarter", OURS, growth, "×", 1.05, **detail)

    async def _samples(self, seconds: float) -> list[dict[str, float]]:
        """The server's numbers, every so often, until this is cancelled."""
        samples = []
        try:
            while True:
                samples.append(await self.server.stats())
                await asyncio.sleep(min(2.0, seconds / 8))
        except asyncio.CancelledError:
            return samples

    async def disconnects(self) -> Rows:
        """A client per second goes away at a random moment; do the others notice?"""
        seconds, rate = self.scale.long, self.peak / 2
        calm = (await self.ask(OURS, self.scale.calm, rate=rate)).outcome
        before = await self.server.settled()
        leaving = asyncio.create_task(self._leave(within=2 * calm.percentile(50)))
        try:
            troubled = (await self.ask(OURS, seconds, rate=rate)).outcome
        finally:
            leaving.cancel()
        gone = await leaving
        after = await self.server.settled()
        question = f"a client per second goes away, {seconds:g} s"
        missing = sum(len(of) for status, of in troubled.latencies.items() if status not in (200, 429))
        yield at_most(
            f"{question}: wrong or missing answers", OURS, missing + troubled.wrong, "", 0,
            right=len(troubled.good) - troubled.wrong, gone=gone,
        )  # fmt: skip
        detail = {"RSS grew MB": after["rss_MB"] - before["rss_MB"]}
        detail |= {"GPU grew MB": after["gpu_MB"] - before["gpu_MB"]}
        yield at_most(f"{question}: left behind", OURS, busy(after), "", 0, **detail)
        detail = {"p99 ms": ms(troubled, 99), "calm p99 ms": ms(calm, 99)} | trouble(troubled)
        ratio = ms(troubled, 99) / ms(calm, 99)
        yield at_most(f"{question}: siblings' p99 against calm", OURS, ratio, "×", 1.2, **detail)

    async def _leave(self, within: float) -> int:
        """Go away in the middle of a request, its computation, its answer; how often, when cancelled."""
        rng, gone = random.Random(0), 0
        asked = wires(PATHS[OURS], self.scale.model[2])
        try:
            while True:
                async with Connection("127.0.0.1", self.server.port) as connection:
                    wire = rng.choice(asked)
                    cut = len(wire) if rng.random() < 0.7 else rng.randrange(len(wire))
                    await connection.send(wire[:cut])
                    await asyncio.sleep(rng.uniform(0, within))
                gone += 1
                await asyncio.sleep(rng.uniform(0.5, 1.5) * min(1.0, self.scale.long / 10))
        except asyncio.CancelledError:
            return gone


# -- numbers -------------------------------------------------------------------------------------------


def health(question: str, name: str, found: Answered, most_ms: float | None) -> Row:
    late = percentile(found.health, 99) * 1e3
    detail = {"asked": len(found.health), "most ms": max(found.health) * 1e3}
    if most_ms is None:
        return Row(question, name, late, "ms", detail=detail)
    return at_most(question, name, late, "ms", most_ms, **detail)


def ms(outcome: Outcome, percent: float, status: int = 200) -> float:
    return outcome.percentile(percent, status) * 1e3


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
        say("no plot: matplotlib is not installed")
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


if __name__ == "__main__":
    main("serving", measure, needs_gpu=False, limit_s=FULL.limit + 30)
