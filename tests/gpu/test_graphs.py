"""CUDA graphs that users capture, in CUDA's global mode (torch's default), beside everything aiogpu does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import anyio
import pytest
import torch

import aiogpu
from aiogpu._engine import Engine

from ._tools import ON_GPU, Slow, asynchronous, needs_bindings, no_race_detector, pattern, same_bytes
from .conftest import Loop

pytestmark = [*ON_GPU, no_race_detector]

CAPTURES = 100


class _Captures:
    """Captures, replays and checks graphs in a thread of its own."""

    def __init__(self, ticks: Callable[[], int]) -> None:
        self.ticks = ticks
        self.done = 0
        self.ticks_inside = 0
        self.error: BaseException | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="captures")

    def _run(self) -> None:
        try:
            static = torch.zeros(1024, device="cuda")
            for number in range(CAPTURES):
                self._capture(static, number)
                self.done += 1
        except BaseException as error:
            self.error = error
        finally:
            self.over.set()

    def _capture(self, static: torch.Tensor, number: int) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = static * 2 + number
            before = self.ticks()
            # The capture stays open until awaits have been resolved beside it.
            deadline = time.monotonic() + 0.2
            while self.ticks() < before + 3 and time.monotonic() < deadline:
                time.sleep(0)
            self.ticks_inside += self.ticks() - before
            y = y + 1
        static.fill_(number)
        graph.replay()
        wanted = torch.full((1024,), 3.0 * number + 1)
        assert torch.equal(y.cpu(), wanted), f"replay of capture {number}: {y[0].item()}, not {wanted[0]}"


@asynchronous
@needs_bindings
def test_captures_in_a_thread_survive_awaits_and_transfers_on_the_loop(run: Loop, slow: Slow) -> None:
    """C58: 100 captures, 20 tasks; no capture fails, no await fails, replays are exact."""
    _capture_beside_a_busy_loop(run, slow, spin=50e-6)


@asynchronous
@needs_bindings
def test_captures_in_a_thread_survive_callbacks(run_asyncio: Loop, slow: Slow) -> None:
    """C58 where every await is announced by a callback."""
    _capture_beside_a_busy_loop(run_asyncio, slow, spin=0.0)


def _capture_beside_a_busy_loop(run: Loop, slow: Slow, spin: float) -> None:
    ticks = [0]
    captures = _Captures(lambda: ticks[0])

    @aiogpu.task
    async def busy(index: int) -> None:
        size = (256, 100_000, 1_500_000, 9_000_000)[index % 4]
        source = pattern(size, index)
        while not captures.over.is_set():
            x = await aiogpu.to_device(source)
            slow(0.2)
            x += 1
            await aiogpu.synchronize()
            ticks[0] += 1
            same_bytes(await aiogpu.to_host(x), source + 1, f"task {index}")
            ticks[0] += 1

    async def main() -> None:
        async with aiogpu.Runtime(spin=spin), anyio.create_task_group() as group:
            await aiogpu.synchronize("cuda")
            for index in range(20):
                group.start_soon(busy, index)
            captures.thread.start()

    try:
        run(main)
    finally:
        captures.over.set()
        if captures.thread.ident is not None:
            captures.thread.join(30)
    if captures.error is not None:
        raise AssertionError(f"capture {captures.done} of {CAPTURES} failed") from captures.error
    assert captures.done == CAPTURES, f"only {captures.done} captures"
    assert captures.ticks_inside >= CAPTURES, "hardly any await ended during a capture: nothing was tested"


def _refused(fn: Callable[[], object]) -> None:
    with pytest.raises(aiogpu.CaptureError, match="captured"):
        fn()


async def _everything_is_refused(x: torch.Tensor, child: Callable[[], object]) -> None:
    host = torch.zeros(4)
    for call in (
        lambda: aiogpu.to_device(host),
        lambda: aiogpu.to_host(x),
        lambda: aiogpu.item(x.sum()),
        lambda: aiogpu.copy_(x, host),
        lambda: aiogpu.copy_(host, x),
        lambda: aiogpu.share(x),
    ):
        _refused(call)
    for target in (None, "cuda", torch.cuda.current_stream()):
        with pytest.raises(aiogpu.CaptureError, match="captured"):
            await aiogpu.synchronize(target)
    with pytest.raises(aiogpu.CaptureError, match="captured"):
        await child()  # type: ignore[misc]


@pytest.mark.parametrize("decorated", [True, False], ids=["task", "plain"])
def test_calls_inside_a_capture_are_refused_and_the_capture_stays_valid(
    run: Loop, slow: Slow, decorated: bool
) -> None:
    """C59: an error before the stream is touched; the graph ends, replays and is exact."""

    @aiogpu.task
    async def child() -> None: ...

    async def main() -> None:
        x = torch.zeros(4, device="cuda")
        await aiogpu.synchronize("cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
            await _everything_is_refused(y, child)
            if decorated:
                _refused(aiogpu.stream().__enter__)
            y = y * 3
        x.fill_(4)
        graph.replay()
        slow(20)
        assert (await aiogpu.to_host(y)).tolist() == [15.0] * 4
        await child()

    run(aiogpu.task(main) if decorated else main)


@asynchronous
def test_a_capture_on_the_loops_thread_survives_what_is_pending(
    run: Loop, slow: Slow, engine: Engine
) -> None:
    """Other tasks' awaits are pending, large copies under way in staging threads, while this one captures."""

    @aiogpu.task
    async def pending(index: int) -> None:
        source = pattern(9_000_000, index)
        x = await aiogpu.to_device(source)
        slow(30)
        same_bytes(await aiogpu.to_host(x), source, f"task {index}")

    @aiogpu.task
    async def main() -> None:
        static = torch.ones(1024, device="cuda")
        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(pending, number)
                await anyio.sleep(0.002)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = static + number
                graph.replay()
                assert (await aiogpu.to_host(y)).tolist() == [1.0 + number] * 1024

    run(main)
