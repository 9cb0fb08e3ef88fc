"""Whose memory is used on which stream, what keeps it alive, and that it comes back."""

from __future__ import annotations

import gc
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
import torch

import aiogpu
from aiogpu._engine import Engine

from ._tools import ON_GPU, Slow, filled
from .conftest import Loop

pytestmark = ON_GPU

MIB = 1 << 20


# -- results and shared tensors --------------------------------------------------------------------


class _Reuser:
    """A task of nobody's family: leases the stream that a child has left, and fills its memory at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.go = anyio.Event()
        self.done = anyio.Event()
        self.over = False

    async def watch(self) -> None:
        await self.go.wait()
        await self.junk()
        self.done.set()

    @aiogpu.task
    async def junk(self) -> None:
        for _ in range(8):
            torch.full((self.size,), 238, dtype=torch.uint8, device="cuda")
        await aiogpu.synchronize()


async def _five_times(parent: Callable[[_Reuser, int], Any]) -> None:
    """The reuser's task starts outside of the parent, so that no edge orders it after the parent's reads."""
    for value in range(1, 6):
        reuser = _Reuser(MIB)
        async with anyio.create_task_group() as group:
            group.start_soon(reuser.watch)
            await parent(reuser, value)


def test_a_childs_result_is_not_overwritten_after_the_parent_let_go_of_it(run: Loop, slow: Slow) -> None:
    """It was allocated on the child's stream; the parent reads it 50 ms later, when it has dropped it."""

    @aiogpu.task
    async def child(value: int) -> torch.Tensor:
        return torch.full((MIB,), value, dtype=torch.uint8, device="cuda")

    @aiogpu.task
    async def parent(reuser: _Reuser, value: int) -> None:
        x = await child(value)
        await aiogpu.synchronize()  # the child's stream is idle: the next task gets it
        slow()
        y = x + 0
        del x
        reuser.go.set()
        await reuser.done.wait()
        filled(await aiogpu.to_host(y), value, f"repeat {value}")

    run(_five_times, parent)


def test_shared_lists_filled_through_a_closure_are_safe_with_share(run: Loop, slow: Slow) -> None:
    """Five of five are wrong without it."""

    @aiogpu.task
    async def parent(reuser: _Reuser, value: int) -> None:
        found: list[torch.Tensor] = []

        @aiogpu.task
        async def child() -> None:
            found.append(torch.full((MIB,), value, dtype=torch.uint8, device="cuda"))

        await child()
        await aiogpu.synchronize()
        shared = aiogpu.share(found)
        assert shared is found
        slow()
        y = shared[0] + 0
        del shared
        found.clear()
        reuser.go.set()
        await reuser.done.wait()
        filled(await aiogpu.to_host(y), value, f"repeat {value}")

    run(_five_times, parent)


def test_a_tasks_arguments_outlive_its_work_on_the_device(run: Loop, slow: Slow) -> None:
    """The caller drops them, and its stream fills new tensors of that size, while the task still reads."""

    @aiogpu.task
    async def child(boxed: list[torch.Tensor], into: torch.Tensor) -> None:
        slow()
        into.copy_(boxed.pop())

    @aiogpu.task
    async def parent(value: int) -> None:
        into = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
        x = [torch.full((MIB,), value, dtype=torch.uint8, device="cuda")]
        async with anyio.create_task_group() as group:
            group.start_soon(child, x, into)
            while x:
                await anyio.lowlevel.checkpoint()
            junk = [torch.full((MIB,), 238, dtype=torch.uint8, device="cuda") for _ in range(8)]
            del junk
        filled(await aiogpu.to_host(into), value, f"value {value}")

    for value in range(1, 6):
        run(parent, value)


# -- graphs of autograd, and running out -------------------------------------------------------------


def test_downloads_keep_no_autograd_graph(run: Loop) -> None:
    """C65: 200 results in a list do not hold device memory."""

    @aiogpu.task
    async def step(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (weight * torch.ones_like(weight)).relu().mean()
        return await aiogpu.to_host(loss), await aiogpu.to_host((weight * 2)[:100_000])

    async def main() -> None:
        weight = torch.ones(MIB, device="cuda", requires_grad=True)
        await step(weight)
        await aiogpu.synchronize("cuda")
        before, kept = torch.cuda.memory_allocated(), []
        for _ in range(200):
            kept.append(await step(weight))
        assert all(not host.requires_grad and host.grad_fn is None for pair in kept for host in pair)
        await aiogpu.synchronize("cuda")
        grown = torch.cuda.memory_allocated() - before
        assert grown < 8 * MIB, f"200 results on the host hold {grown / MIB:.1f} MiB on the device"

    run(main)


def _allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator looks at what other streams have finished
    return torch.cuda.memory_allocated()


def _frames(error: BaseException) -> Iterator[types.FrameType]:
    for inner in getattr(error, "exceptions", ()):
        yield from _frames(inner)
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _holds_device_tensor(value: Any, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cuda
    if depth and isinstance(value, list | tuple | set):
        return any(_holds_device_tensor(each, depth - 1) for each in value)
    if depth and isinstance(value, dict):
        return any(_holds_device_tensor(each, depth - 1) for each in value.values())
    return False


@pytest.mark.parametrize("how", ["plain await", "task group", "run_sync"])
def test_running_out_of_memory_keeps_nothing_though_its_error_is_kept(
    run: Loop, engine: Engine, how: str
) -> None:
    """C66: aiogpu's frames in the stored error hold no tensors; without the user's, all memory is back."""
    far_too_much = 1 << 42
    stored: list[BaseException] = []

    @aiogpu.task
    async def child(x: torch.Tensor) -> torch.Tensor:
        activations = x * 2
        await aiogpu.synchronize()
        if how == "run_sync":
            await aiogpu.run_sync(lambda: torch.empty(far_too_much, dtype=torch.uint8, device="cuda"))
        return activations + torch.empty(far_too_much, dtype=torch.uint8, device="cuda")

    @aiogpu.task
    async def request() -> None:
        x = torch.ones(16 * MIB, device="cuda")
        if how == "task group":
            await aiogpu.gather(child(x), child(x))
        else:
            await child(x)

    async def main() -> None:
        try:
            await request()
        except (torch.OutOfMemoryError, BaseExceptionGroup) as error:
            stored.append(error)

    async def small() -> int:
        return int(await aiogpu.item((await aiogpu.to_device(torch.ones(10))).sum()))

    run(small)
    before = _allocated()
    run(main)
    assert len(stored) == 1, "the allocation did not fail"
    for frame in _frames(stored[0]):
        if frame.f_code.co_filename == __file__:
            frame.clear()  # what a user does who wants the memory back: traceback.clear_frames
        elif "aiogpu" in frame.f_globals.get("__name__", ""):
            held = [name for name, value in frame.f_locals.items() if _holds_device_tensor(value)]
            assert not held, f"{frame.f_code.co_qualname} holds tensors in {held}"
    grown = _allocated() - before
    assert grown <= 0, f"{grown / MIB:.1f} MiB are still held although only the error is kept"
    assert run(small) == 10


def test_an_upload_that_does_not_fit_fails_where_it_is_awaited(run: Loop, engine: Engine) -> None:
    """C66: with torch's own exception; the next request is fine."""

    async def main() -> None:
        before = _allocated()
        source = torch.zeros(1, dtype=torch.uint8).expand(1 << 42)
        operation = aiogpu.to_device(source)
        with pytest.raises(torch.OutOfMemoryError):
            await operation
        del operation
        # A staging thread that has told of the error may still be leaving the frames that hold what it had.
        deadline = time.monotonic() + 5
        while _allocated() > before and time.monotonic() < deadline:
            await anyio.sleep(0.01)
        assert _allocated() <= before, [t.shape for t in gc.get_objects() if _holds_device_tensor(t)]
        assert (await aiogpu.to_host(await aiogpu.to_device(torch.ones(3)))).tolist() == [1.0] * 3

    run(main)
