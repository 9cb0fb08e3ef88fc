"""Whatever the tree of tasks, whatever the order in which streams go on: nothing lost, nothing early, nothing
left in flight, and every access across streams ordered."""

from __future__ import annotations

import math
from typing import Any

import pytest
from _programs import Planned, Program, Run, programs
from _small_blocks import small_virtual
from conftest import LOOPS, _blocking_until
from conftest import Run as Loop
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import aiogpu
from aiogpu.testing import RaceError

#: Enough to find the faults that were planted by hand; `--hypothesis-seed` and a larger number find more.
EXAMPLES = 150


def carry_out(
    program: Program, seed: int, *, loop: str = "asyncio", spin: float = 50e-6, notifications: str = "prompt"
) -> Run:
    """Run the program, check everything that can be checked after it."""
    with small_virtual(auto=False, chunks=2, pinned_bytes=0 if seed % 2 else 2**30) as (device, engine):
        device.notifications = notifications  # type: ignore[assignment]
        run = Run(device, seed)

        async def main() -> None:
            async with aiogpu.Runtime(spin=spin):
                await run.execute(program)
                stats = aiogpu.stats()
                assert (stats.pending, stats.operations, stats.streams_in_use) == (0, 0, 0)

        Loop(loop)(main)
        assert run.problems == []
        assert run.ran == run.submitted
        for index, (cell, value) in enumerate(zip(run.cells, run.shadow, strict=True)):
            assert index in run.dead or bool((cell == value).all())
        assert engine.slots.used_bytes == engine.chunks.used_bytes == 0
        pools = (engine.compute, engine.uploads, engine.downloads, engine.chunked, engine.sides)
        # A staging thread may give its stream back a moment after the transfer has ended.
        _blocking_until(
            lambda: all(s.idle for pool in pools for slots in pool._slots.values() for s in slots)
        )
    return run


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    program=programs(),
    seed=st.integers(0, 10**6),
    loop=st.sampled_from(LOOPS),
    spin=st.sampled_from([0.0, 50e-6, math.inf]),
    notifications=st.sampled_from(["prompt", "early", "twice", "late"]),
)
@example(
    program=Program((("write", 0), ("cancel", (Program((("download", 0), ("copy", 1)), False), 2))), False),
    seed=1,
    loop="trio",
    spin=0.0,
    notifications="late",
)
@pytest.mark.timeout(300)
def test_random_programs_end_well_in_whatever_order_the_device_goes_on(
    program: Program, seed: int, loop: str, spin: float, notifications: str
) -> None:
    carry_out(program, seed, loop=loop, spin=spin, notifications=notifications)


@pytest.mark.parametrize("seed", range(4))
def test_a_program_with_everything_in_it_ends_well(seed):
    """So that no shrinking strategy can leave out a verb."""
    leaf = Program(tuple((verb, i) for i, verb in enumerate(
        ["write", "read", "worker", "upload", "download", "copy", "item", "pause", "synchronize", "drop"]
    )), False)  # fmt: skip
    failing = Program((("write", 1), ("pause", 0)), True)
    tree = Program(
        (
            ("write", 0),
            ("await", leaf),
            ("gather", (leaf, leaf, failing)),
            ("group", (leaf, failing, leaf)),
            ("block", leaf),
            ("cancel", (leaf, 3 + seed)),
            ("read", 0),
        ),
        False,
    )
    run = carry_out(Program((("gather", (tree, tree)), ("await", tree), ("block", tree)), False), seed)
    assert run.submitted > 10


# -- the checks see faults ---------------------------------------------------------------------------


def test_a_missing_join_is_seen(monkeypatch):
    """The control: programs like these fail when a task leaves no end behind for its parent."""
    from aiogpu._tasks import Task

    monkeypatch.setattr(Task, "_join_parent", lambda self, point, tensors, parent: None)
    child = Program((("pause", 0), ("write", 0)), False)
    with pytest.raises((RaceError, ExceptionGroup)) as caught:
        carry_out(Program((("await", child), ("read", 0)), False), 0)
    assert "reads what stream" in str(flattened(caught.value))


def test_a_missing_fork_is_seen(monkeypatch):
    from aiogpu._tasks import Task

    monkeypatch.setattr(Task, "fork", lambda self, parent: None)
    child = Program((("read", 0),), False)
    with pytest.raises((RaceError, ExceptionGroup)) as caught:
        carry_out(Program((("write", 0), ("await", child)), False), 0)
    assert "reads what stream" in str(flattened(caught.value))


def flattened(error: BaseException) -> list[Any]:
    if isinstance(error, BaseExceptionGroup):
        return [each for inner in error.exceptions for each in flattened(inner)]
    return [error]


def test_planned_failures_are_the_programs_own():
    run = carry_out(Program((("write", 0),), True), 0)
    assert run.submitted == 1
    assert issubclass(Planned, Exception)
