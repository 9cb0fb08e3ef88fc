"""What a benchmark says: rows with a number, its unit and, where one is promised, a target and a verdict.

A missed target is a row like any other. Nothing here drops, rounds up or re-measures a number.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

COLUMNS = ("question", "contender", "result", "target", "verdict", "detail")


@dataclass(frozen=True)
class Row:
    question: str
    contender: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None  # None: nothing was promised, the number is there to compare with
    detail: dict[str, Any] = field(default_factory=dict)  # further numbers, units in their names

    @property
    def verdict(self) -> str:
        return {None: "", True: "met", False: "missed"}[self.met]

    def cells(self) -> tuple[str, ...]:
        detail = ", ".join(f"{name} {number(value)}" for name, value in self.detail.items())
        result = f"{number(self.value)} {self.unit}".strip()
        return (self.question, self.contender, result, self.target, self.verdict, detail)


def at_most(question: str, contender: str, value: float, unit: str, bound: float, **detail: Any) -> Row:
    return Row(question, contender, value, unit, f"≤ {number(bound)} {unit}", value <= bound, detail)


def at_least(question: str, contender: str, value: float, unit: str, bound: float, **detail: Any) -> Row:
    return Row(question, contender, value, unit, f"≥ {number(bound)} {unit}", value >= bound, detail)


def number(value: object) -> str:
    """Three digits are what such a measurement is worth; integers from 1000 up keep all of theirs."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def machine() -> dict[str, Any]:
    """Where the numbers come from. Asks CUDA, so call it after anything that measures CUDA's start."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "aiogpu": _version("aiogpu"),
        "cuda-bindings": _version("cuda-bindings"),
        "uvloop": _version("uvloop"),
        "cupy": _version("cupy-cuda13x") or _version("cupy-cuda12x") or _version("cupy"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def record(
    benchmark: str, rows: Sequence[Row], *, quick: bool, seconds: float, skipped: str = ""
) -> dict[str, Any]:
    """One script's result as plain data; `skipped` says why there are no rows."""
    return {
        "benchmark": benchmark,
        "quick": quick,
        "seconds": round(seconds, 1),
        "skipped": skipped,
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }


def write_json(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def show(title: str, rows: Sequence[Row]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(title, rows))
        return
    table = Table(*COLUMNS, title=title, title_justify="left")
    for cells in _without_repeats(rows):
        colour = {"met": "green", "missed": "bold red"}.get(cells[4])
        table.add_row(*cells, style=colour)
    console = Console()
    # A pipe has no width: 80 columns would fold every cell.
    console = console if console.is_terminal else Console(width=180)
    console.print(table)


def plain(title: str, rows: Sequence[Row]) -> str:
    lines = [COLUMNS, *_without_repeats(rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    ]
    return "\n".join([title, *(line.rstrip() for line in padded)])


def markdown(rows: Iterable[Row]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    lines += [_emphasised(row.cells()) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _emphasised(cells: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"**{cell}**" if cell == "missed" else cell.replace("|", "\\|") for cell in cells)


def _without_repeats(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The question only where it changes, so that the eye finds the groups."""
    shown, last = [], None
    for row in rows:
        question, *rest = row.cells()
        shown.append(("" if question == last else question, *rest))
        last = question
    return shown
