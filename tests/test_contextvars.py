"""Context variables reach whatever code of the user's aiogpu runs, and what it sets stays there (C54)."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import math
import weakref
from contextvars import ContextVar

import anyio
import pytest
import torch

import aiogpu

pytestmark = pytest.mark.usefixtures("anydevice")

request_id: ContextVar[str] = ContextVar("request_id", default="none")


class Mover:
    """A batch with a ``.to`` of its own, which aiogpu calls on a thread of its own."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def to(self, device, **options):
        self.seen.append(request_id.get())
        request_id.set("from the mover")
        return self


def test_run_sync_sees_the_callers_variables(run):
    async def main():
        request_id.set("first")
        assert await aiogpu.run_sync(request_id.get) == "first"
        request_id.set("second")
        assert await aiogpu.run_sync(request_id.get) == "second"

    run(main)


def test_what_a_function_in_run_sync_sets_stays_behind(run):
    def sets():
        request_id.set("from the thread")
        return request_id.get()

    async def main():
        request_id.set("mine")
        assert await aiogpu.run_sync(sets) == "from the thread"
        assert request_id.get() == "mine"
        assert await aiogpu.run_sync(request_id.get) == "mine"

    run(main)


def test_concurrent_calls_see_their_own_variables(run):
    @aiogpu.task
    async def handle(name):
        request_id.set(name)
        await anyio.lowlevel.checkpoint()
        inside = await aiogpu.run_sync(request_id.get)
        return name, inside, request_id.get()

    async def main():
        names = [f"request {i}" for i in range(20)]
        results: list[tuple[str, str, str]] = []

        async def keep(name):
            results.append(await handle(name))

        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(keep, name)
        assert sorted(results) == sorted((name, name, name) for name in names)
        assert request_id.get() == "none"

    run(main)


@pytest.mark.parametrize("verb", [aiogpu.to_device, aiogpu.to_host])
def test_an_object_that_moves_itself_sees_the_variables_of_the_call(run, verb):
    async def main():
        mover = Mover()
        request_id.set("at the call")
        operation = verb({"batch": mover, "x": torch.ones(2)})
        request_id.set("later")
        await operation
        assert mover.seen == ["at the call"]
        assert request_id.get() == "later"

    run(main)


def test_a_plainly_awaited_task_shares_its_callers_variables(run):
    """As a plain await does: what it sets is there afterwards."""

    @aiogpu.task
    async def sets():
        await anyio.lowlevel.checkpoint()
        request_id.set("set by the task")

    async def main():
        await sets()
        assert request_id.get() == "set by the task"

    run(main)


def test_a_task_that_is_driven_in_foreign_contexts_still_ends(run_asyncio):
    """A framework may run each step in a context of its own."""

    @aiogpu.task
    async def task():
        await anyio.sleep(0)  # noqa: ASYNC115
        return "result"

    async def main():
        await aiogpu.synchronize()  # the device is ready: the first step runs
        coroutine = task()
        contextvars.copy_context().run(coroutine.send, None)
        with pytest.raises(StopIteration) as stop:
            contextvars.copy_context().run(coroutine.send, None)
        assert stop.value.value == "result"

    run_asyncio(main)


def test_the_reactor_keeps_no_callers_context_alive(run_asyncio, vd):
    """A poll that was scheduled from a task would otherwise run in that task's context for ever."""

    class Request:
        pass

    variable: ContextVar[Request] = ContextVar("request")

    async def handler(alive, operations):
        request = Request()
        alive.append(weakref.ref(request))
        variable.set(request)
        operations.append(aiogpu.to_device(torch.ones(3)))

    async def main():
        async with aiogpu.Runtime(spin=math.inf) as runtime:
            alive: list[weakref.ref[Request]] = []
            operations: list[aiogpu.Operation[torch.Tensor]] = []
            await asyncio.create_task(handler(alive, operations))
            for _ in range(3):  # asyncio itself lets go of the ended task a little later
                await asyncio.sleep(0)
            looks = runtime.stats().looks
            await asyncio.sleep(0)
            assert runtime.stats().looks > looks  # it still polls
            gc.collect()
            assert alive[0]() is None
            vd.run_all()
            await operations[0]

    run_asyncio(main)
