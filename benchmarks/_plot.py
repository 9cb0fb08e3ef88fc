"""Bandwidth over size as an SVG, from the rows of `transfers`. Needs matplotlib; without it there is no plot.

`python -m benchmarks._plot RESULTS.json [PLOT.svg]` draws a results file again.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NO_PLOT = "no plot: matplotlib is not installed (pip install matplotlib)"

Lines = dict[str, dict[str, list[tuple[int, float]]]]  # question → contender → (bytes, GB/s)


def lines(rows: Sequence[dict[str, Any]]) -> Lines:
    found: Lines = defaultdict(lambda: defaultdict(list))
    for row in rows:
        nbytes = row["detail"].get("bytes")
        if nbytes is not None and row["unit"] == "GB/s":
            found[row["question"].rpartition(", ")[0]][row["contender"]].append((nbytes, row["value"]))
    return found


def draw(rows: Sequence[dict[str, Any]], path: Path, title: str = "") -> str:
    """What was done, in words: the file that was written, or why there is none."""
    questions = lines(rows)
    if not questions:
        return "no plot: no bandwidths were measured"
    try:
        from matplotlib.figure import Figure  # not pyplot: no display, no global state
    except ImportError:
        return NO_PLOT
    columns = min(3, len(questions))
    height = -(-len(questions) // columns)
    figure = Figure(figsize=(5.2 * columns, 4.2 * height), layout="constrained")
    for number, (question, contenders) in enumerate(questions.items(), 1):
        axes = figure.add_subplot(height, columns, number)
        for name, points in contenders.items():
            sizes, speeds = zip(*sorted(points), strict=True)
            # Ours in black, over the others: the one line to look for in every panel.
            look: dict[str, Any] = (
                {"color": "black", "linewidth": 2.4, "zorder": 3} if name == "aiogpu" else {}
            )
            axes.plot(sizes, speeds, marker="o", label=name, **look)
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s", title=question)
        axes.set_xscale("log", base=2)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    if title:
        figure.suptitle(title)
    figure.savefig(path, format="svg", metadata={"Date": None})
    return f"wrote {path}"


def main() -> None:
    source = Path(sys.argv[1])
    data = json.loads(source.read_text(encoding="utf-8"))
    results = data.get("results") or [data]
    rows = [row for result in results if result["benchmark"] == "transfers" for row in result["rows"]]
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".svg")
    print(draw(rows, target, data["machine"]["gpu"] or "CPU"))


if __name__ == "__main__":
    main()
