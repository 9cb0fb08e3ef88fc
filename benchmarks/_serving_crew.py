"""The processes of `serving.py` as seen from it: servers that are asked, and those that ask.

Nothing here waits without an end, and no process outlives the block that started it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _serving_load import TOLERANCE, Connection, Outcome, request, truth

ROOT = Path(__file__).resolve().parent.parent
START_S = 60.0  # importing torch and starting CUDA on a busy machine
Truths = list[list[float]]


@asynccontextmanager
async def program(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python program that ends when its input does. Whatever it has started ends with it."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    made = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**28,
    )  # fmt: skip
    assert made.stdin is not None
    try:
        yield made
    finally:
        made.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await made.wait()
        with suppress(ProcessLookupError):
            os.killpg(made.pid, signal.SIGKILL)
        await made.wait()


# -- who is asked --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A running server."""

    process: asyncio.subprocess.Process
    port: int
    health: str  # the path of its health check

    async def get(self, path: str) -> bytes:
        async with asyncio.timeout(10), Connection("127.0.0.1", self.port) as connection:
            return (await connection.ask(request("GET", path))).body

    async def stats(self) -> dict[str, float]:
        numbers: dict[str, float] = json.loads(await self.get("/stats"))
        return numbers

    async def settled(self) -> dict[str, float]:
        """The numbers once nothing is under way, or after 10 s."""
        deadline = time.monotonic() + 10
        while busy(now := await self.stats()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return now


def busy(stats: dict[str, float]) -> float:
    return sum(stats[name] for name in ("in_flight", "streams_in_use", "operations", "waiting", "running"))


@asynccontextmanager
async def serving(model: tuple[int, int, int]) -> AsyncIterator[Server]:
    """All contenders that can share a process."""
    async with program("-m", "benchmarks._serving_app", *map(str, model)) as process:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError("the server has ended before it was ready; it has said why above")
        yield Server(process, int(line), "/healthz")


@asynccontextmanager
async def litserve(model: tuple[int, int, int]) -> AsyncIterator[Server]:
    """LitServe; not ready yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with program("-m", "benchmarks._serving_litserve", *map(str, (*model, port))) as process:
        yield Server(process, port, "/health")


async def ready(server: Server) -> None:
    """Wait until it is healthy; it does not listen at first."""
    async with asyncio.timeout(START_S):
        while True:
            if server.process.returncode is not None:
                raise RuntimeError("it has ended before it was ready; it has said why above")
            with suppress(OSError, asyncio.IncompleteReadError):
                async with Connection("127.0.0.1", server.port) as connection:
                    if (await connection.ask(request("GET", server.health))).status == 200:
                        return
            await asyncio.sleep(0.1)


async def truths(server: Server, path: str, tokens: int) -> Truths:
    """The right answers. They differ by more than is lost in sums, or mixed-up ones would go unseen."""
    async with asyncio.timeout(60):
        found = await truth(server.port, path, tokens)
    distances = [
        max(abs(x - y) for x, y in zip(a, b, strict=True)) for i, a in enumerate(found) for b in found[:i]
    ]
    if min(distances) <= 4 * TOLERANCE:
        raise RuntimeError(f"answers are too much alike to tell them apart: {min(distances)}")
    return found


# -- who asks ------------------------------------------------------------------------------------------


@dataclass
class Answered:
    """What became of the requests of several processes, and how late the health check was meanwhile."""

    outcome: Outcome
    goodput: float  # right answers per second, before the end
    offered: float  # requests per second
    health: list[float]  # seconds


class Crew:
    """Processes that ask, started once."""

    def __init__(self, processes: list[asyncio.subprocess.Process], tokens: int) -> None:
        self._processes = processes
        self._numbers = itertools.count()
        self.tokens = tokens
        self.truths: Truths = []

    async def ask(
        self, server: Server, path: str, seconds: float, *, clients: int = 0, rate: float = 0.0
    ) -> Answered:
        """`clients` in a closed loop or `rate` in an open one, in all."""
        number, n = next(self._numbers), len(self._processes)
        base: dict[str, Any] = {
            "number": number, "port": server.port, "path": path, "seconds": seconds,
            "tokens": self.tokens, "truths": self.truths,
        }  # fmt: skip
        for i, process in enumerate(self._processes):
            share = {"clients": clients // n + (i < clients % n)} if clients else {"rate": rate / n}
            assert process.stdin is not None
            process.stdin.write(json.dumps({**base, **share, "seed": i}).encode() + b"\n")
        async with asyncio.timeout(seconds + 30):
            parts, health = await self._watched(server, number)
        whole = Outcome()
        for part in parts:
            for status, of in part["latencies"].items():
                whole.latencies.setdefault(int(status), []).extend(of)
            whole.wrong += part["wrong"]
            whole.elapsed = max(whole.elapsed, part["elapsed"])
        goodput = sum(part["in_time"] for part in parts) / seconds
        return Answered(whole, goodput, sum(whole.counts.values()) / seconds, health)

    async def _watched(self, server: Server, number: int) -> tuple[list[dict[str, Any]], list[float]]:
        health: list[float] = []
        probing = asyncio.create_task(probe(server, health))
        try:
            parts = await asyncio.gather(*(self._answer(process, number) for process in self._processes))
        finally:
            probing.cancel()
            await asyncio.wait([probing])
            if not probing.cancelled() and probing.exception() is not None:
                health.append(math.inf)  # no answer is later than any
        return parts, health or [math.nan]

    async def _answer(self, process: asyncio.subprocess.Process, number: int) -> dict[str, Any]:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            if answer["number"] == number:  # else to a question that nobody waits for any more
                return answer
        raise RuntimeError("a process that asks has ended; it has said why above")


async def probe(server: Server, latencies: list[float]) -> None:
    """Ask for its health every 10 ms; a late answer counts from when it was due."""
    wire = request("GET", server.health)
    async with Connection("127.0.0.1", server.port) as connection:
        due = time.perf_counter()
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await connection.ask(wire)
            latencies.append(time.perf_counter() - due)
            due = max(due + 0.01, time.perf_counter())


@asynccontextmanager
async def crew(processes: int, tokens: int) -> AsyncIterator[Crew]:
    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(program(str(ROOT / "benchmarks" / "_serving_load.py")))
            for _ in range(processes)
        ]
        yield Crew(made, tokens)
