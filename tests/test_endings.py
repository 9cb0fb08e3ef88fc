"""What ends at an awkward moment: runtimes left early, closed loops, abandoned functions, chains of tasks."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import anyio
import anyio.lowlevel
import torch
from _kernels import cell, go, read, write

import aiogpu
from aiogpu._engine import find_engine
from aiogpu._tasks import Task

CPU = torch.device("cpu")


def test_a_task_that_began_before_an_explicit_runtime_ends_well_inside_it(run, auto_vd):
    async def main():
        went_on = anyio.Event()

        @aiogpu.task
        async def early():
            await went_on.wait()
            await aiogpu.synchronize()
            return torch.ones(2)

        results = []

        async def keep():
            results.append(await early())

        async with anyio.create_task_group() as group:
            group.start_soon(keep)
            await anyio.lowlevel.checkpoint()
            async with aiogpu.Runtime():
                went_on.set()
                while not results:
                    await anyio.lowlevel.checkpoint()
        assert results[0].tolist() == [1, 1]

    run(main)
    assert find_engine(CPU).compute.in_use == 0


def test_a_roots_result_arrives_although_its_runtime_was_left_early(run, vd, abandoned):
    """The notifier looks after the point then, and must not touch the loop from its own thread."""

    async def main():
        results = []

        @aiogpu.task
        async def root():
            latch.append(vd.latch())
            return torch.ones(2)

        async def keep():
            results.append(await root())

        latch = []
        async with anyio.create_task_group() as group:
            async with aiogpu.Runtime(grace=0.0):
                group.start_soon(keep)
                while not latch:
                    await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
            latch[0].release()
            vd.run_all()
            with anyio.fail_after(5):
                while not results:
                    await anyio.sleep(0.001)
        assert find_engine(CPU).notifier._thread.is_alive()

    run(main)


def test_an_operation_of_a_loop_that_was_closed_while_busy_still_ends(vd, blocking_until, abandoned):
    async def start():
        latch = vd.latch()
        return latch, aiogpu.to_host(torch.ones(4))

    loop = asyncio.new_event_loop()
    latch, operation = loop.run_until_complete(start())
    loop.close()  # without shutting down its generators: nobody is told
    latch.release()
    vd.run_all()
    blocking_until(operation.done)

    async def wait():
        return (await operation).tolist()

    assert asyncio.run(wait()) == [1, 1, 1, 1]
    assert find_engine(CPU).slots.used_bytes == 0


def test_arguments_of_an_abandoned_function_live_as_long_as_its_kernels(vd, run_asyncio, blocking_until):
    began, proceed, returned = threading.Event(), threading.Event(), threading.Event()
    latches = []

    def launches_late(x):
        began.set()
        proceed.wait(5)
        latches.append(vd.latch())
        vd.launch(reads=[x])
        returned.set()

    async def main():
        @aiogpu.task
        async def child(x):
            await aiogpu.run_sync(launches_late, x, abandon_on_cancel=True)

        x = torch.zeros(4)
        memory = weakref.ref(x.untyped_storage())
        task = asyncio.create_task(child(x))
        del x
        await asyncio.to_thread(began.wait)
        task.cancel()
        await asyncio.wait([task])
        del task
        proceed.set()
        await asyncio.to_thread(returned.wait)
        await asyncio.sleep(0)
        gc.collect()
        assert memory() is not None, "freed while the device uses it"
        latches[0].release()
        while memory() is not None:
            vd.run_all()
            await asyncio.sleep(0.001)

    run_asyncio(main)


def test_a_function_that_runs_a_child_on_a_loop_of_its_own_is_ordered_behind_it(
    vd, run_asyncio, short_grace, abandoned
):
    x = cell()

    @aiogpu.task
    async def child():
        write(vd, x, 1)

    def runs_a_loop():
        asyncio.run(child())
        read(vd, x, [])  # a RaceError without an edge

    @aiogpu.task
    async def parent():
        await aiogpu.run_sync(runs_a_loop)

    go(run_asyncio, vd, parent)


def test_a_task_that_starts_its_own_successor_keeps_no_ancestors(auto_vd, run_asyncio):
    async def main():
        last = asyncio.get_running_loop().create_future()

        @aiogpu.task
        async def tick(left):
            if left:
                running.append(asyncio.create_task(tick(left - 1)))
                del running[:-2]
            else:
                last.set_result(None)

        running = []
        running.append(asyncio.create_task(tick(300)))
        await last
        await asyncio.gather(*running)
        gc.collect()
        alive = sum(isinstance(each, Task) for each in gc.get_objects())
        assert alive < 20, f"{alive} of 300 tasks are still there"

    run_asyncio(main)


def test_a_parent_that_never_steps_does_not_collect_its_childrens_ends(auto_vd, run_asyncio):
    async def main():
        @aiogpu.task
        async def child():
            pass

        @aiogpu.task
        async def server():
            me = aiogpu._tasks.current_task()

            async def accept():
                for _ in range(1000):
                    await asyncio.create_task(child())
                    await aiogpu.synchronize()
                return len(me.ended)

            accepting = asyncio.create_task(accept())
            done = asyncio.Event()
            accepting.add_done_callback(lambda _: done.set())
            await done.wait()
            return accepting.result()

        assert await server() < 200

    run_asyncio(main)


def test_pruning_a_parents_ends_loses_none_that_another_thread_adds_meanwhile():
    """A lost end is a lost edge: the parent would read early."""

    class End:
        def __init__(self, done):
            self.done = done

    class Contended(list):
        def __setitem__(self, where, what):
            self.append(late)  # the other thread, between the look at the old list and the new one
            super().__setitem__(where, what)

        def remove(self, each):
            if late not in self:
                self.append(late)
            super().remove(each)

    task = Task.__new__(Task)
    late, last = End(False), End(False)
    task.ended = Contended(End(True) for _ in range(63))
    task.add_ended(last)
    assert task.ended == [last, late]


def test_what_a_left_runtime_had_armed_is_disarmed_when_it_completes(vd, run, blocking_until, abandoned):
    """On CUDA the token is a notification stream, and each loop that ends early would use one up."""
    disarmed = []
    vd.disarm = disarmed.append

    async def main():
        @aiogpu.task
        async def root():
            latches.append(vd.latch())
            await aiogpu.synchronize()

        latches = []
        async with anyio.create_task_group() as group:
            async with aiogpu.Runtime(grace=0.0, spin=0.0) as runtime:
                group.start_soon(root)
                while not runtime.reactor.sleeping or not latches:
                    await anyio.lowlevel.checkpoint()
                armed = runtime.stats().notifications
                assert armed == 1
            assert not disarmed
            latches[0].release()
            vd.run_all()
        blocking_until(lambda: len(disarmed) == armed)
        vd.run_all()  # the task's own end

    run(main)
