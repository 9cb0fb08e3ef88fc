"""Runs every script in a process of its own and writes one JSON file and one Markdown table.

`python -m benchmarks [--quick] [--out DIR] [SCRIPT ...]`. A missed target is reported, not an error; the
exit status is 1 where a script failed or ran out of time.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from _plot import draw  # noqa: E402 -- found beside this file
from _report import Row, machine, markdown, write_json  # noqa: E402

SCRIPTS = (
    "wake",
    "many",
    "idle",
    "stream_cost",
    "step",
    "batcher",
    "pending",
    "overlap",
    "heartbeat",
    "transfers",
    "files",
    "pipeline",
    "training",
)
LIMIT_S = 320  # above each script's own, so that its watchdog speaks first

Result = dict[str, Any]


def main() -> None:
    arguments = _arguments()
    start = time.perf_counter()
    results: list[Result] = []
    for script in arguments.scripts or SCRIPTS:
        results.append(run(script, quick=arguments.quick))
        if any(result["rows"] for result in results):  # after each: an interrupted run keeps what it has
            seconds = time.perf_counter() - start
            write(arguments.out, results, quick=arguments.quick, seconds=seconds)
    sys.exit(any(result["failed"] for result in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"default: {' '.join(SCRIPTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer samples: for a look, not for a verdict")
    parser.add_argument("--out", type=Path, default=HERE / "results", metavar="DIR")
    arguments = parser.parse_args()
    if unknown := set(arguments.scripts) - set(SCRIPTS):
        parser.error(f"no such script: {', '.join(sorted(unknown))}")
    return arguments


def run(script: str, *, quick: bool) -> Result:
    """The script's record, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        options = ["--json", str(target)] + ["--quick"] * quick
        if failed := _failure([sys.executable, "-m", f"benchmarks.{script}", *options]):
            print(f"{script}: {failed}", flush=True)
            return {"benchmark": script, "rows": [], "skipped": "", "failed": failed}
        return json.loads(target.read_text(encoding="utf-8")) | {"failed": ""}


def _failure(command: list[str]) -> str:
    try:
        # From the root: a checkout that is not installed works, too.
        status = subprocess.run(command, cwd=HERE.parent, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return f"no end after {LIMIT_S} s"
    return f"exit status {status}" if status else ""


def write(folder: Path, results: list[Result], *, quick: bool, seconds: float) -> None:
    where = machine()
    slug = re.sub(r"[^a-z0-9]+", "-", (where["gpu"] or "cpu").lower()).strip("-")
    stem = f"{date.today().isoformat()}-{slug}{'-quick' if quick else ''}"
    write_json(
        folder / f"{stem}.json",
        {"machine": where, "quick": quick, "seconds": round(seconds, 1), "results": results},
    )
    (folder / f"{stem}.md").write_text(page(where, results, quick=quick, seconds=seconds), encoding="utf-8")
    print(f"wrote {folder / stem}.json and .md ({seconds:.0f} s)")
    newest = results[-1]
    if newest["benchmark"] == "transfers" and newest["rows"]:
        print(draw(newest["rows"], folder / f"{stem}-transfers.svg", where["gpu"] or "CPU"))


def page(where: dict[str, Any], results: list[Result], *, quick: bool, seconds: float) -> str:
    rows = {result["benchmark"]: [Row(**row) for row in result["rows"]] for result in results}
    judged = [row for of in rows.values() for row in of if row.met is not None]
    missed = sum(not row.met for row in judged)
    lines = [
        f"# {where['gpu'] or 'CPU'}, {where['date'][:10]}{' (quick: few samples)' if quick else ''}",
        f"{len(judged) - missed} targets met, {missed} missed. {seconds:.0f} s in all.",
        "\n".join(f"- {name}: {value}" for name, value in where.items() if value is not None),
    ]
    for result in results:
        name = result["benchmark"]
        lines += [f"## {name}", _body(result, rows[name])]
    return "\n\n".join(lines) + "\n"


def _body(result: Result, rows: list[Row]) -> str:
    if result["failed"]:
        return f"**failed**: {result['failed']}"
    return markdown(rows) if rows else result["skipped"]


if __name__ == "__main__":
    main()
