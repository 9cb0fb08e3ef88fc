"""The training example: exact going on after Ctrl-C, numbers in order, and a loss that is not finite."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn", reason="the examples extra is not installed")

ROOT = Path(__file__).resolve().parent.parent
STEPS = 25


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    train = importlib.import_module("train")
    for kind, method in ((train.Training, "learn"), (train.Evaluation, "_hits")):
        monkeypatch.setattr(kind, method, on_one_core(getattr(kind, method)))
    yield train
    torch.use_deterministic_algorithms(False)


def on_one_core(fn: Any) -> Any:
    """Bits depend on the number of threads, which each worker thread keeps as it was when torch first ran in
    it; and some of this process have worked for other tests."""

    def alone(*args: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return fn(*args)
        finally:
            torch.set_num_threads(before)

    return alone


def options(**changes: Any) -> argparse.Namespace:
    given = {
        "data": "digits", "device": torch.device("cpu"), "steps": STEPS, "workers": 0, "checkpoints": None,
        "checkpoint_every": 10, "evaluate_every": 10, "distributed": False, "resume": False, "plain": True,
    }  # fmt: skip
    return argparse.Namespace(**(given | changes))


def trained(example: Any, **changes: Any) -> Any:
    log = example.Log()
    asyncio.run(example.main(options(**changes), log))
    return log


def test_losses_are_logged_in_order_and_evaluation_runs_beside(example, capsys):
    log = trained(example)
    said = [int(step) for step in re.findall(r"step (\d+) ", capsys.readouterr().out)]
    assert said == list(range(1, STEPS + 1))
    assert len(log.losses) == STEPS
    assert log.losses[-1] < log.losses[0]
    assert sorted(log.accuracies) == [10, 20, STEPS]


@pytest.mark.parametrize("distributed", [False, True], ids=["torch.save", "dcp"])
def test_a_run_in_two_parts_is_the_same_bit_for_bit(example, tmp_path, distributed):
    whole = trained(example)
    kept = {"checkpoints": tmp_path, "distributed": distributed}
    first = trained(example, steps=12, **kept)
    second = trained(example, resume=True, **kept)
    assert first.losses + second.losses == whole.losses
    assert second.accuracies[STEPS] == whole.accuracies[STEPS]


def test_a_checkpoint_is_that_of_the_step_it_names(example, tmp_path):
    """It is written while later steps change the weights."""
    trained(example, checkpoints=tmp_path / "a", steps=10)
    trained(example, checkpoints=tmp_path / "b", steps=11, checkpoint_every=10)
    a, b = (
        torch.load(tmp_path / run / "step-00000010.pt", weights_only=True) for run in ("a", "b")
    )  # at the end of its run; in the midst of one
    assert a["step"] == b["step"] == 10
    for name, weight in a["model"].items():
        assert torch.equal(weight, b["model"][name]), name


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to a child there")
@pytest.mark.timeout(120)
def test_ctrl_c_ends_cleanly_with_a_checkpoint_to_go_on_from(example, tmp_path):
    whole = trained(example)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-W", "error", "examples/train.py", "--plain", "--device", "cpu"]
    command += ["--steps", "1000000", "--checkpoints", str(tmp_path), "--checkpoint-every", "1000000"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
        # In the background of a shell that has no job control, children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3 "):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
        assert process.wait(60) == 130, rest
    (path_of_checkpoint,) = tmp_path.iterdir()
    step = torch.load(path_of_checkpoint, weights_only=True)["step"]
    assert path_of_checkpoint.name == f"step-{step:08d}.pt"
    assert step >= 3
    if step < STEPS:  # else this machine was too busy to interrupt it in time
        went_on = trained(example, checkpoints=tmp_path, resume=True)
        assert went_on.losses == whole.losses[step:]


def test_a_loss_that_is_not_finite_stops_with_the_number_of_its_step(example, tmp_path, monkeypatch):
    learn = example.Training.learn

    def spoiled(self, x, y):
        return learn(self, x * float("nan") if self.step == 6 else x, y)

    monkeypatch.setattr(example.Training, "learn", spoiled)
    log = example.Log()
    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(example.main(options(checkpoints=tmp_path, checkpoint_every=5), log))
    assert caught.group_contains(example.NotFinite, match="step 7: the loss is nan")
    assert len(log.losses) == 6
    good = torch.load(tmp_path / "step-00000005.pt", weights_only=True)
    assert all(weight.isfinite().all() for weight in good["model"].values())


@pytest.mark.parametrize("every", [1, 7])
def test_no_checkpoint_is_written_of_a_step_whose_numbers_are_not_finite(
    example, tmp_path, monkeypatch, every
):
    """They are known some steps later; `--resume` would go on from the spoiled weights."""
    learn = example.Training.learn

    def spoiled(self, x, y):
        return learn(self, x * float("nan") if self.step == 6 else x, y)

    async def patient(self, *args):
        with example.anyio.CancelScope(shield=True):  # the end of training does not come to the rescue
            await save(self, *args)

    save = example.Checkpoints.save
    monkeypatch.setattr(example.Training, "learn", spoiled)
    monkeypatch.setattr(example.Checkpoints, "save", patient)
    with pytest.raises(BaseExceptionGroup):
        asyncio.run(example.main(options(checkpoints=tmp_path, checkpoint_every=every), example.Log()))
    written = sorted(path.stem for path in tmp_path.glob("*.pt"))
    assert written == (["step-00000005", "step-00000006"] if every == 1 else [])


@pytest.mark.parametrize("distributed", [False, True])
def test_a_step_that_has_a_checkpoint_already_gets_it_again(example, tmp_path, distributed):
    """Nothing is left to do, or Ctrl-C came right after a checkpoint: the last one is written once more."""
    changes = {"checkpoints": tmp_path, "steps": 3, "distributed": distributed}
    trained(example, **changes)
    trained(example, **changes, resume=True)
    assert [path.stem for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_new_run_does_not_mix_its_checkpoints_with_those_of_another(example, tmp_path):
    """The older ones had higher numbers: each new one would be forgotten as soon as it was written."""
    trained(example, checkpoints=tmp_path, steps=4)
    with pytest.raises(SystemExit, match="--resume goes on from it"):
        trained(example, checkpoints=tmp_path, steps=2)
    assert [path.stem for path in tmp_path.iterdir()] == ["step-00000004"]
