"""What the examples share: how still the loop stood, and how to say so."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

BEAT = 0.001  # seconds


@asynccontextmanager
async def heartbeat() -> AsyncIterator[list[float]]:
    """Collects the gaps, in seconds, between the beats of a coroutine that wants to run every `BEAT`.

    A gap much longer than that is a time during which the loop served nobody.
    """
    gaps: list[float] = []
    last = perf_counter()

    def beat() -> None:
        nonlocal last
        now = perf_counter()
        gaps.append(now - last)
        last = now

    async def keep_beating() -> None:
        while True:
            await asyncio.sleep(BEAT)
            beat()

    beating = asyncio.create_task(keep_beating())
    try:
        yield gaps
    finally:
        beating.cancel()
        beat()  # a loop that stood still until now has not beaten yet, and that gap counts, too


def percentile(samples: Iterable[float], percent: float) -> float:
    """The smallest sample that at least `percent` of all samples do not exceed (nearest rank)."""
    ranked = sorted(samples)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def write_json(path: Path | None, results: object) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")
