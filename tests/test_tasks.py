"""A task is an ordinary coroutine: what it looks like, how it is driven, what it holds and gives back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import traceback
import weakref
from typing import Any

import anyio
import pytest
import torch
from _kernels import cell, go, read, write

import aiogpu
from aiogpu import _tasks


@aiogpu.task
async def add(a: int, b: int = 2, *, scale: float = 1.0) -> float:
    """Add, then scale."""
    await anyio.lowlevel.checkpoint()
    return (a + b) * scale


# -- what it looks like ------------------------------------------------------------------------------


def test_a_task_stays_a_coroutine_function_with_its_signature_name_and_doc():
    async def plain(a: int, b: int = 2, *, scale: float = 1.0) -> float: ...  # type: ignore[empty-body]

    assert inspect.iscoroutinefunction(add)
    assert asyncio.iscoroutinefunction(add)
    assert inspect.signature(add) == inspect.signature(plain)
    assert (add.__name__, add.__doc__, add.__module__) == ("add", "Add, then scale.", __name__)
    assert inspect.unwrap(add) is not add


def test_a_call_gives_a_coroutine_that_does_nothing_before_it_is_awaited(recwarn):
    coroutine = add(1)
    assert inspect.iscoroutine(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED
    coroutine.close()


def test_arguments_and_results_pass_through(run, anydevice):
    assert run(add, 1) == 3

    async def main():
        assert await add(1, 3, scale=2.0) == 8
        assert await functools.partial(add, 5)(b=5) == 10

    run(main)


def test_methods_static_methods_and_class_methods_can_be_tasks(run, anydevice):
    class Model:
        factor = 3

        @aiogpu.task
        async def method(self, x):
            return self.factor * x

        @staticmethod
        @aiogpu.task
        async def static(x):
            return x

        @classmethod
        @aiogpu.task(priority=0)
        async def of_class(cls, x):
            return cls.factor + x

    async def main():
        model = Model()
        assert [await model.method(2), await Model.static(2), await model.of_class(2)] == [6, 2, 5]

    run(main)


def test_wrong_arguments_are_the_functions_own_type_error(run, anydevice):
    async def main():
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
            await add()  # type: ignore[call-arg]

    run(main)


def test_a_task_outside_of_an_event_loop_says_that_it_needs_one():
    with pytest.raises(RuntimeError, match=r"aiogpu needs a running event loop.*asyncio\.run"):
        add(1).send(None)


def test_a_traceback_shows_the_users_frames_and_hides_the_driver_from_tools_that_ask(run, anydevice):
    @aiogpu.task
    async def fails():
        await anyio.lowlevel.checkpoint()
        raise KeyError("on purpose")

    async def main():
        try:
            await fails()
        except KeyError as error:
            frames = list(traceback.walk_tb(error.__traceback__))
            names = [frame.f_code.co_name for frame, _ in frames]
            assert names[-1] == "fails"
            ours = [f for f, _ in frames if f.f_globals["__name__"].startswith("aiogpu.")]
            assert ours
            assert all(frame.f_locals.get("__tracebackhide__") for frame in ours)
            return names
        raise AssertionError("did not raise")

    run(main)


# -- how it is driven --------------------------------------------------------------------------------


def test_a_generator_based_awaitable_sees_every_value_that_the_loop_sends():
    """Without any loop: what is yielded goes out, what is sent or thrown comes in."""
    log: list[Any] = []

    class Talk:
        def __await__(self):
            log.append((yield "question"))
            try:
                yield "again"
            except ValueError as error:
                log.append(error)
            return "result"

    @aiogpu.task
    async def talker():
        return await Talk()

    async def main():
        coroutine = talker()
        assert coroutine.send(None) == "question"
        assert coroutine.send("answer") == "again"
        error = ValueError("thrown")
        with pytest.raises(StopIteration) as stop:
            coroutine.throw(error)
        assert stop.value.value == "result"
        assert log == ["answer", error]

    asyncio.run(main())


def test_an_exception_thrown_in_comes_out_as_the_same_object(run, anydevice):
    error = KeyError("on purpose")

    @aiogpu.task
    async def fails():
        await anyio.lowlevel.checkpoint()
        raise error

    async def main():
        with pytest.raises(KeyError) as caught:
            await fails()
        assert caught.value is error

    run(main)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopAsyncIteration])
def test_base_exceptions_pass_and_leave_the_stream_free(auto_vd, kind):
    @aiogpu.task
    async def fails():
        raise kind("on purpose")

    async def main():
        outer = auto_vd.current().raw
        with pytest.raises(kind):
            await fails()
        assert auto_vd.current().raw is outer
        assert aiogpu.stats().streams_in_use == 0

    asyncio.run(main())


def test_a_cancellation_is_never_wrapped_and_may_be_caught(run, auto_vd):
    log = []

    @aiogpu.task
    async def stubborn():
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            log.append("cancelled")
            raise

    async def main():
        with anyio.move_on_after(0.001) as scope:
            await stubborn()
        assert scope.cancelled_caught
        assert log == ["cancelled"]
        assert aiogpu.stats().streams_in_use == 0

    run(main)


def test_cancelling_before_the_first_step_leases_nothing(run_asyncio, auto_vd, recwarn):
    async def main():
        aiogpu.current_runtime()
        task = asyncio.ensure_future(add(1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert aiogpu.stats().leases == 0

    run_asyncio(main)


def test_every_step_runs_on_the_tasks_own_stream_and_leaves_the_threads_alone(run, auto_vd):
    """C21: a third coroutine, without aiogpu, sees the thread's stream whenever it runs."""
    rounds = 20

    @aiogpu.task
    async def task():
        own = auto_vd.current().raw
        for _ in range(rounds):
            await anyio.lowlevel.checkpoint()
            assert auto_vd.current().raw is own
        return own

    async def undecorated(default):
        for _ in range(rounds):
            assert auto_vd.current().raw is default
            await anyio.lowlevel.checkpoint()

    async def main():
        default = auto_vd.current().raw
        streams: list[Any] = []

        async def keep():
            streams.append(await task())

        async with anyio.create_task_group() as group:
            group.start_soon(keep)
            group.start_soon(undecorated, default)
            group.start_soon(keep)
        assert len({default, *streams}) == 3

    run(main)


def test_callbacks_of_the_loop_see_the_threads_own_stream(run_asyncio, auto_vd):
    seen = []

    @aiogpu.task
    async def task():
        asyncio.get_running_loop().call_soon(lambda: seen.append((auto_vd.current(), _tasks.current_task())))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def main():
        default = auto_vd.current()
        await task()
        assert seen == [(default, None)]

    run_asyncio(main)


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="eager tasks came with Python 3.12")
def test_eager_tasks_nest_in_a_step_of_their_parent(auto_vd):
    @aiogpu.task
    async def child(outer):
        assert auto_vd.current().raw is not outer
        await asyncio.sleep(0)
        return auto_vd.current().raw

    @aiogpu.task
    async def parent():
        own = auto_vd.current().raw
        task = asyncio.create_task(child(own))
        assert auto_vd.current().raw is own
        assert await task is not own
        assert auto_vd.current().raw is own

    async def main():
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        await parent()

    asyncio.run(main())


def test_nest_asyncio_finds_tasks_that_work(auto_vd):
    """C47: a loop that runs inside itself, as in notebooks. In a process of its own: it stays patched."""
    nest_asyncio = pytest.importorskip("nest_asyncio")
    assert nest_asyncio
    import subprocess
    import sys

    program = """
import asyncio, nest_asyncio, torch, aiogpu
nest_asyncio.apply()
@aiogpu.task
async def inner():
    return await aiogpu.item(torch.ones(1))
@aiogpu.task
async def outer():
    await asyncio.sleep(0)
    return asyncio.get_event_loop().run_until_complete(inner())
print(asyncio.run(outer()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.stdout.strip(), done.returncode) == ("1.0", 0), done.stderr


# -- what it holds, what it gives back ---------------------------------------------------------------


def test_arguments_live_until_the_device_is_done_with_them(run, vd, until):
    """C03: the function, its closure and its arguments; also what a container held at the call."""

    class Big(torch.Tensor):
        pass

    seen: list[float] = []

    @aiogpu.task
    async def child(direct, box):
        vd.latch()
        read(vd, direct, seen)
        read(vd, box.pop(), seen)

    async def main():
        direct, boxed = torch.ones(1).as_subclass(Big), torch.full((1,), 2.0).as_subclass(Big)
        alive = weakref.ref(direct), weakref.ref(boxed)
        box = [boxed]
        await child(direct, box)
        del direct, boxed
        gc.collect()
        assert all(ref() is not None for ref in alive)
        for queue in vd._queues:
            for command in queue.commands:
                if command.latch is not None:
                    command.latch.release()
        vd.run_all()
        await until(lambda: aiogpu.stats().pending == 0)
        gc.collect()
        assert all(ref() is None for ref in alive)

    # Kernels close over their tensors in these tests, which would keep them, so let them not.
    launch = vd.launch
    vd.launch = lambda run=None, **options: launch(None, **options)  # type: ignore[method-assign]
    run(main)


def test_a_root_returns_device_tensors_only_once_they_are_finished(run, vd, until):
    x = cell()

    @aiogpu.task
    async def root():
        latches.append(vd.latch())
        write(vd, x, 5)
        return {"x": x}

    latches: list[Any] = []

    async def main():
        results = []

        async def keep():
            results.append(await root())

        async with anyio.create_task_group() as group:
            group.start_soon(keep)
            await until(lambda: latches)
            await anyio.sleep(0.002)
            assert not results
            latches[0].release()
            vd.run_all()
        assert results[0]["x"].item() == 5

    run(main)


def test_a_root_without_device_tensors_in_its_result_does_not_wait_for_the_device(run, vd):
    @aiogpu.task
    async def root():
        vd.launch()
        return "text"

    async def main():
        assert await root() == "text"
        assert not vd.idle

    go(run, vd, main)


def test_a_cancelled_root_returns_at_once_and_its_stream_stays_busy(run, vd, until):
    """C70: the wait ends with the cancellation, custody with the device."""

    @aiogpu.task
    async def root():
        latches.append(vd.latch())
        return cell()

    latches: list[Any] = []

    async def main():
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(root)
                await until(lambda: latches)
                scope.cancel()
        assert scope.cancelled_caught
        slots = aiogpu.current_runtime().engine_now(None).compute._slots[0]
        assert sum(not slot.idle for slot in slots) == 1
        latches[0].release()
        vd.run_all()
        await until(lambda: all(slot.idle for slot in slots))

    run(main)


def test_a_failed_tasks_exception_keeps_none_of_its_arguments_through_our_frames(run, anydevice):
    """C66: the users' own frames are theirs; ours hold no tensor."""

    class Big(torch.Tensor):
        pass

    @aiogpu.task
    async def fails(x, *, y):
        del x, y
        await anyio.lowlevel.checkpoint()
        raise torch.OutOfMemoryError("injected")

    async def main():
        x, y = torch.ones(1).as_subclass(Big), torch.ones(1).as_subclass(Big)
        alive = weakref.ref(x), weakref.ref(y)
        stored = None
        call = fails(x, y=y)
        del x, y
        try:
            await call
        except torch.OutOfMemoryError as error:
            stored = error
        del call
        await aiogpu.synchronize()
        await anyio.sleep(0.001)
        gc.collect()
        assert [ref() for ref in alive] == [None, None]
        assert stored is not None
        assert stored.__traceback__ is not None

    run(main)


def test_a_task_on_the_cpu_by_name_and_its_children_inherit_the_device(run, anydevice):
    @aiogpu.task
    async def child():
        return aiogpu.device()

    @aiogpu.task(device="cpu")
    async def parent():
        return await child(), aiogpu.device()

    assert run(parent) == (torch.device("cpu"), torch.device("cpu"))


def test_operations_left_over_by_a_task_that_failed_owe_no_await(run, auto_vd, recwarn):
    @aiogpu.task
    async def fails():
        aiogpu.to_device(torch.ones(3))
        raise KeyError("on purpose")

    async def main():
        with contextlib.suppress(KeyError):
            await fails()
        gc.collect()

    run(main)
    assert not recwarn.list


# -- what is refused ---------------------------------------------------------------------------------


async def generator():
    yield 1


@pytest.mark.parametrize(
    ("fn", "remedy"),
    [
        pytest.param(
            lambda: 1, r"not an `async def`; call it with `await aiogpu\.run_sync\(fn", id="function"
        ),
        pytest.param(torch.no_grad()(generator), r"write `with torch\.no_grad\(\):`", id="async generator"),
        pytest.param(torch.nn.Linear(1, 1), r"`await aiogpu\.run_sync\(fn, \.\.\.\)`", id="module"),
        pytest.param(torch.nn.Linear, r"`await aiogpu\.run_sync\(fn, \.\.\.\)`", id="class"),
        pytest.param("cuda:0", r"a str; write @aiogpu\.task or @aiogpu\.task\(device=", id="device"),
        pytest.param(0, r"an? int; write @aiogpu\.task", id="int"),
    ],
)
def test_what_is_no_async_def_is_refused_with_what_to_write(fn, remedy):
    with pytest.raises(TypeError, match=rf"decorates `async def` functions; .*{remedy}"):
        aiogpu.task(fn)


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"), torch.enable_grad()],
    ids=["no_grad", "inference_mode", "autocast", "enable_grad"],
)
def test_a_mode_as_decorator_is_refused_because_it_would_do_nothing(mode):
    """C52: never silently nothing."""

    async def model():
        return torch.is_grad_enabled()

    with pytest.raises(TypeError, match=r"to an `async def`: write `with torch\.no_grad\(\):` inside"):
        aiogpu.task(mode(model))


@pytest.mark.parametrize("priority", [1.5, "high", None, True])
def test_a_priority_is_an_int(priority):
    with pytest.raises(TypeError, match=r"priority is an int \(lower is more urgent\)"):
        aiogpu.task(priority=priority)


def test_an_unknown_device_is_refused_at_the_decoration():
    with pytest.raises(ValueError, match="'gpu' is not a device: write 'cuda', 'cuda:0', 'cpu'"):
        aiogpu.task(device="gpu")
    with pytest.raises(ValueError, match="aiogpu has no driver for meta"):
        aiogpu.task(device="meta")
