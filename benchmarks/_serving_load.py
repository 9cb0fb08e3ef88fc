"""A process that asks: the load of `serving.py`, several of these side by side.

`python -m benchmarks._serving_load SPEC` with a JSON object; prints what became of the requests, as JSON.
Without torch: it shall be ready at once.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "serve"))

from client import Connection, request
from load import Ask, Outcome, closed_loop, open_loop

FEATURES = 32  # as in _serving_app.py
INPUTS = 32
TOLERANCE = 2e-3  # a batch's sums are added up in another order than a single request's


def body(number: int, tokens: int) -> bytes:
    rng = random.Random(number)
    return struct.pack(f"{tokens * FEATURES}f", *(rng.gauss(0, 1) for _ in range(tokens * FEATURES)))


def wires(path: str, tokens: int) -> list[bytes]:
    return [request("POST", path, body(number, tokens)) for number in range(INPUTS)]


def same(answer: bytes, truth: list[float]) -> bool:
    scores = json.loads(answer)
    return len(scores) == len(truth) and all(
        abs(a - b) < TOLERANCE for a, b in zip(scores, truth, strict=True)
    )


def asks(path: str, tokens: int, truths: list[list[float]]) -> list[Ask]:
    return [
        Ask(wire, lambda answer, truth=truth: same(answer, truth))  # type: ignore[misc]
        for wire, truth in zip(wires(path, tokens), truths, strict=True)
    ]


async def truth(port: int, path: str, tokens: int) -> list[list[float]]:
    """Each input's answer from a server that has nothing else to do."""
    async with Connection("127.0.0.1", port) as connection:
        return [json.loads((await connection.ask(wire)).body) for wire in wires(path, tokens)]


async def load(spec: dict[str, Any]) -> Outcome:
    port, seconds = spec["port"], spec["seconds"]
    questions = asks(spec["path"], spec["tokens"], spec["truths"])
    if "clients" in spec:
        return await closed_loop("127.0.0.1", port, questions, clients=spec["clients"], seconds=seconds)
    requests = max(1, round(spec["rate"] * seconds))
    return await open_loop(
        "127.0.0.1", port, questions, rate=spec["rate"], requests=requests, seed=spec["seed"]
    )


if __name__ == "__main__":
    outcome = asyncio.run(load(json.loads(sys.argv[1])))
    print(json.dumps([outcome.latencies, outcome.wrong, outcome.elapsed]))
