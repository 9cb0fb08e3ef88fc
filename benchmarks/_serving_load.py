"""A process that asks: the load of `serving.py`, several of these side by side.

Reads what to ask from its input, a JSON object a line, and answers each with a line of JSON. Without torch:
it is ready at once, and never touches the device.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import random
import struct
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "serve"))

from client import Connection, request
from load import Ask, Outcome, closed_loop, open_loop

FEATURES = 32  # as in _serving_app.py
INPUTS = 32
TOLERANCE = 2e-3  # a batch's sums are added up in another order than a single request's
LITSERVE = "/predict"  # takes JSON only


def body(number: int, tokens: int) -> bytes:
    rng = random.Random(number)
    return struct.pack(f"{tokens * FEATURES}f", *(rng.gauss(0, 1) for _ in range(tokens * FEATURES)))


@cache
def wires(path: str, tokens: int) -> list[bytes]:
    bodies = (body(number, tokens) for number in range(INPUTS))
    if path != LITSERVE:
        return [request("POST", path, each) for each in bodies]
    texts = (json.dumps({"x": base64.b64encode(each).decode()}).encode() for each in bodies)
    return [request("POST", path, each, content_type="application/json") for each in texts]


def same(answer: bytes, truth: list[float]) -> bool:
    scores = json.loads(answer)
    return len(scores) == len(truth) and all(
        abs(a - b) < TOLERANCE for a, b in zip(scores, truth, strict=True)
    )


async def truth(port: int, path: str, tokens: int) -> list[list[float]]:
    """Each input's answer from a server that has nothing else to do."""
    async with Connection("127.0.0.1", port) as connection:
        return [json.loads((await connection.ask(wire)).body) for wire in wires(path, tokens)]


class InTime:
    """Right answers, and how many of them came before the end: what comes later is no goodput."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds
        self.count = 0

    def right(self, truth: list[float]) -> Callable[[bytes], bool]:
        def right(answer: bytes) -> bool:
            right = same(answer, truth)
            self.count += right and time.perf_counter() < self.end
            return right

        return right


async def load(spec: dict[str, Any]) -> tuple[Outcome, int]:
    """What became of the requests, and the right answers in time."""
    port, seconds = spec["port"], spec["seconds"]
    in_time = InTime(seconds)
    asks = [
        Ask(wire, in_time.right(truth))
        for wire, truth in zip(wires(spec["path"], spec["tokens"]), spec["truths"], strict=True)
    ]
    if "clients" in spec:
        made = closed_loop("127.0.0.1", port, asks, clients=spec["clients"], seconds=seconds)
    else:
        made = open_loop("127.0.0.1", port, asks, rate=spec["rate"], seconds=seconds, seed=spec["seed"])
    return await made, in_time.count


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def main() -> None:
    gc.freeze()
    # Unbuffered (PYTHONUNBUFFERED), Python drops what a pipe does not take at once: 64 KiB.
    out = open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for line in sys.stdin:
        spec = json.loads(line)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            outcome, in_time = runner.run(load(spec))
        latencies = {status: [round(each, 6) for each in of] for status, of in outcome.latencies.items()}
        answer = {
            "number": spec["number"], "latencies": latencies, "wrong": outcome.wrong,
            "elapsed": outcome.elapsed, "in_time": in_time,
        }  # fmt: skip
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
