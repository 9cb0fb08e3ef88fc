"""Right programs pass mypy --strict, wrong ones are refused at the line that is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

HERE = Path(__file__).parent

#: Wrong uses, each with a part of what mypy says about its line.
WRONG = [
    ("x: int = await aiogpu.to_device(torch.ones(3))", "[Ii]ncompatible type"),
    ("y: int = await classify(torch.ones(3))", "Incompatible types in assignment"),
    ('await classify("image")', "incompatible type"),
    ("await classify(torch.ones(3), bottom=1)", "Unexpected keyword argument"),
    ("await aiogpu.run_sync(double)", "run_sync"),
    ("await aiogpu.run_sync(double, 'text')", "incompatible type"),
    ("aiogpu.task(double)", "No overload variant|incompatible type"),
    ("await aiogpu.to_device(torch.ones(3), dtype='float16')", "No overload variant|incompatible type"),
    ("await aiogpu.amap(classify, ['text'])", "incompatible type"),
    ("aiogpu.Runtime(streams='8')", "incompatible type"),
    ("aiogpu.to_gpu(torch.ones(3))", "has no attribute"),
    ("await aiogpu.copy_(torch.ones(3), 3.0)", "incompatible type"),
    ("a, b = await aiogpu.gather(classify(torch.ones(3)))", "too many values|More than|unpack"),
]


def mypy(path: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        f"--cache-dir={cache}",
        str(path),
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, timeout=280)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.timeout(300)
def test_typical_use_passes_and_wrong_use_is_refused(cache: Path, tmp_path: Path) -> None:
    """One test, because most of its time goes into torch's own stubs, which the cache keeps."""
    right = mypy(HERE / "typed_usage.py", cache)
    assert right.returncode == 0, right.stdout + right.stderr

    head = """
from __future__ import annotations
import torch
import aiogpu
@aiogpu.task
async def classify(image: torch.Tensor, *, top: int = 1) -> list[int]:
    return []
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
async def main() -> None:
"""
    path = tmp_path / "wrong.py"
    path.write_text(head + "".join(f"    {line}\n" for line, _ in WRONG))
    wrong = mypy(path, cache)
    first = head.count("\n") + 1
    found = {int(line): text for line, text in re.findall(r"wrong\.py:(\d+): error: (.*)", wrong.stdout)}
    for number, (line, message) in enumerate(WRONG, first):
        assert number in found, f"mypy accepts {line!r}:\n{wrong.stdout}"
        assert re.search(message, found[number]), f"{line!r}: {found[number]}"
    assert set(found) == set(range(first, first + len(WRONG)))
