"""The examples run as they stand, on a small scale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> str:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("script", "says"),
    [
        (["overlap_copies.py", "--size", "300", "--repeats", "3"], "of the ideal"),
        (["never_blocks.py", "--size", "300", "--repeats", "10"], "gap max"),
        (["digits.py", "--device", "cpu", "--requests", "200"], "held-back digits recognized"),
        (["train.py", "--device", "cpu", "--data", "cifar", "--steps", "12"], "steps later"),
        (["overlapped_forward_backward.py", "--layers", "3", "--repeats", "1"], "bit-equal"),
    ],
    ids=["overlap_copies", "never_blocks", "digits", "train", "overlapped_forward_backward"],
)
def test_an_example_runs_and_shows_what_it_measured(script, says):
    pytest.importorskip("sklearn", reason="the examples extra is not installed")
    assert says in run(f"examples/{script[0]}", *script[1:])


def test_the_readmes_ten_lines_run_as_they_stand(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = tmp_path / "snippet.py"
    snippet.write_text(readme.split("```python\n", 1)[1].split("```", 1)[0], encoding="utf-8")
    answers = eval(run(str(snippet)))
    assert len(answers) == 100
    assert all(0 <= answer < 10 for answer in answers)


def test_the_doctor_names_the_device_and_how_it_wakes_the_loop():
    said = run("-m", "aiogpu", "doctor")
    assert "wake-ups by" in said
    assert "device" in said
