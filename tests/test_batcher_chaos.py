"""Everything at once: every caller has exactly one outcome, no value is wrong, and nothing is left."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from conftest import Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiogpu
from aiogpu.testing import VirtualFault, virtual_device


@dataclass(frozen=True)
class Caller:
    """What one caller does. Times are in iterations of the loop."""

    comes: int = 0
    leaves: int | None = None
    timeout: float | None = None
    priority: int = 0
    client: str | None = None
    bad: bool = False
    width: int = 3


@dataclass(frozen=True)
class Scene:
    callers: list[Caller]
    batch: dict[str, Any] = field(default_factory=dict)
    asynchronous: bool = False
    memory: int = 99  # items that fit
    fault_after: int | None = None  # calls of the function
    ends: int | None = None  # iterations after which the batcher is left with an error


class Broken(Exception):
    pass


class Model:
    """Checksummed: each row's result tells whose it is."""

    def __init__(self, scene: Scene, device: Any) -> None:
        self.scene = scene
        self.device = device
        self.calls = 0
        self.threads: set[int] = set()

    def __call__(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.threads.add(threading.get_ident())
        if self.calls == self.scene.fault_after:
            self.device.fault(VirtualFault("an illegal memory access was encountered"))
        if len(x) > self.scene.memory:
            raise torch.OutOfMemoryError("injected")
        if any(self.scene.callers[int(i)].bad for i in x[:, 0]):
            raise ValueError("a bad item")
        return {"checksum": x * 3 + 1, "sizes": ["row"] * len(x)}

    async def later(self, x: torch.Tensor) -> Any:
        await anyio.lowlevel.checkpoint()
        return self(x)


async def ticks(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


async def play(scene: Scene, device: Any = None) -> tuple[aiogpu.Batcher, list[list[str]], Model]:
    """The scene, to its end; what became of each caller, and that no value was wrong."""
    model = Model(scene, device)
    fn: Any = model.later if scene.asynchronous else model
    batcher = aiogpu.Batcher(fn, **{"max_batch_size": 4, **scene.batch})
    outcomes: list[list[str]] = [[] for _ in scene.callers]
    expected = (aiogpu.OverloadedError, TimeoutError, aiogpu.ClosedError, aiogpu.DeviceLostError)

    async def call(number: int, caller: Caller) -> None:
        await ticks(caller.comes)
        with anyio.CancelScope() as scope:
            if caller.leaves is not None:
                group.start_soon(leave, scope, caller.leaves)
            outcome = "cancelled"
            try:
                result = await batcher(
                    torch.full((caller.width,), float(number)),
                    timeout=caller.timeout,
                    priority=caller.priority,
                    client=caller.client,
                )
            except (ValueError, torch.OutOfMemoryError, *expected) as error:
                outcome = type(error).__name__
            else:
                outcome = "ok"
                right = torch.full((caller.width,), 3.0 * number + 1)
                assert torch.equal(result["checksum"], right), f"caller {number} got another's result"
                assert result["sizes"] == "row"
            finally:
                outcomes[number].append(outcome)

    async def leave(scope: anyio.CancelScope, after: int) -> None:
        await ticks(after)
        scope.cancel()

    async def serve() -> None:
        async with batcher:
            started.set()
            if scene.ends is not None:
                await ticks(scene.ends)
                raise Broken
            await over.wait()

    async def guarded() -> None:
        try:
            await serve()
        except Broken:
            pass

    started, over = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as outer:
        outer.start_soon(guarded)
        await started.wait()
        async with anyio.create_task_group() as group:
            for number, caller in enumerate(scene.callers):
                group.start_soon(call, number, caller)
        over.set()
    check(scene, batcher, outcomes, model)
    return batcher, outcomes, model


def check(scene: Scene, batcher: aiogpu.Batcher, outcomes: list[list[str]], model: Model) -> None:
    assert all(len(each) == 1 for each in outcomes), "exactly one outcome each"
    stats = batcher.stats()
    assert (stats.waiting, stats.running) == (0, 0) or scene.ends is not None
    assert stats.waiting == 0
    over = stats.ok + stats.errors + stats.timeouts + stats.cancelled + stats.refused + stats.closed
    assert over == stats.calls
    counts = Counter(outcome for (outcome,) in outcomes)
    assert counts["ok"] == stats.ok
    assert counts["OverloadedError"] == stats.refused
    assert counts["TimeoutError"] == stats.timeouts
    assert not batcher._queue._groups
    assert not batcher._queue._clients
    if not scene.asynchronous:
        assert len(model.threads) <= 1
    smallest = scene.batch.get("sizes")
    peaceful = scene.fault_after is None and scene.ends is None and scene.memory >= (smallest or (1,))[0]
    for caller, (outcome,) in zip(scene.callers, outcomes, strict=True):
        if peaceful and caller.leaves is None and caller.timeout is None and scene.batch.get("isolate"):
            allowed = {"ValueError"} if caller.bad else {"ok"}
            assert outcome in allowed | {"OverloadedError"}


# -- soak ------------------------------------------------------------------------------------------


def scene_of(seed: int, count: int, **fixed: Any) -> Scene:
    rng = random.Random(seed)
    callers = [
        Caller(
            comes=rng.randrange(60),
            leaves=rng.randrange(25) if rng.random() < 0.3 else None,
            timeout=rng.choice([0.0, 0.001, 0.01, 10.0]) if rng.random() < 0.3 else None,
            priority=rng.choice([-1, 0, 0, 0, 3]),
            client=rng.choice([None, "a", "b"]),
            bad=rng.random() < 0.08,
            width=rng.choice([3, 3, 3, 5]),
        )
        for _ in range(count)
    ]
    size = rng.choice([1, 3, 8])
    batch = {
        "max_batch_size": size,
        "max_delay": rng.choice([None, 0.0, 0.002]),
        "max_queue": rng.choice([10, 1000]),
        "in_flight": rng.choice([1, 2, 3]),
        "isolate": rng.random() < 0.6,
        "to_host": rng.random() < 0.3,
        "sizes": rng.choice([None, (1, size)]),
    }
    return Scene(callers, batch, rng.random() < 0.4, memory=rng.choice([1, 2, 99]), **fixed)


@pytest.mark.usefixtures("anydevice")
@pytest.mark.parametrize("seed", range(4))
def test_soak_of_cancels_timeouts_exceptions_and_memory_running_out(run, seed):
    run(play, scene_of(seed, 150))


@pytest.mark.parametrize("seed", range(2))
def test_soak_with_a_device_that_is_lost_in_the_middle(run, auto_vd, seed):
    async def main() -> Counter[str]:
        _, outcomes, _ = await play(scene_of(seed, 120, fault_after=5 + 3 * seed), auto_vd)
        return Counter(outcome for (outcome,) in outcomes)

    assert run(main)["DeviceLostError"] > 0


@pytest.mark.parametrize("seed", range(2))
def test_soak_of_a_batcher_that_is_left_in_the_middle(run, seed):
    async def main() -> Counter[str]:
        _, outcomes, _ = await play(scene_of(seed, 120, ends=30))
        return Counter(outcome for (outcome,) in outcomes)

    assert run(main)["ClosedError"] > 0


# -- hypothesis ------------------------------------------------------------------------------------

callers = st.builds(
    Caller,
    comes=st.integers(0, 12),
    leaves=st.none() | st.integers(0, 12),
    timeout=st.none() | st.sampled_from([0.0, 0.001, 10.0]),
    priority=st.integers(-1, 1),
    client=st.sampled_from([None, "a"]),
    bad=st.booleans() | st.just(False),
    width=st.sampled_from([2, 3]),
)
scenes = st.builds(
    Scene,
    st.lists(callers, min_size=1, max_size=14),
    st.fixed_dictionaries(
        {
            "max_batch_size": st.just(4),
            "max_delay": st.sampled_from([None, 0.001]),
            "max_queue": st.sampled_from([3, 100]),
            "in_flight": st.integers(1, 3),
            "isolate": st.booleans(),
            "to_host": st.booleans(),
            "sizes": st.sampled_from([None, (2, 4)]),
        }
    ),
    st.booleans(),
    memory=st.sampled_from([1, 2, 99]),
    fault_after=st.none() | st.integers(1, 4),
    ends=st.none() | st.integers(0, 15),
)


@given(scenes)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_any_scene_ends_well(loop, scene):
    with virtual_device(auto=True) as device:
        Run(loop)(play, scene, device)
