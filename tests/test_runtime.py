"""One runtime per event loop: settings, lifetime, and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref

import anyio
import anyio.lowlevel
import pytest
import pytest_asyncio
import torch

import aiogpu
from aiogpu import _engine, _runtime
from aiogpu.testing import VirtualDevice, virtual_device

# -- settings ----------------------------------------------------------------------------------------


def test_a_thread_that_has_made_an_engine_goes_on_as_one_of_that_engines(run_asyncio, monkeypatch):
    """Set to its device, and leaving graph captures of others alone: it carries out the first transfers."""
    with virtual_device() as device:
        entered: list[threading.Thread] = []
        monkeypatch.setattr(device, "enter_thread", lambda: entered.append(threading.current_thread()))
        device_name = torch.device("cpu")

        async def main():
            runtime = aiogpu.current_runtime()
            for _ in range(2):  # made by this thread, or by another one
                await runtime.in_starter(lambda: runtime.engine_blocking(device_name))

        run_asyncio(main)
        assert len([thread for thread in entered if "starter" in thread.name]) == 2


def test_the_documented_defaults():
    runtime = aiogpu.Runtime()
    assert (runtime.settings.streams, runtime.spin, runtime.grace) == (8, 50e-6, 5.0)
    assert runtime.settings.wake == "auto"
    assert runtime.settings.staging_bytes == 128 * 2**20
    assert runtime.settings.pinned_bytes == 4 * 2**30
    assert runtime.workers >= 1
    assert not runtime.debug


SETTINGS = [
    ("STREAMS", "3", "streams", 3, 5),
    ("SPIN", "0.25", "spin", 0.25, 0.5),
    ("SPIN", "inf", "spin", math.inf, 0.5),
    ("STAGING_BYTES", "1000", "staging_bytes", 1000, 2000),
    ("PINNED_BYTES", "1000", "pinned_bytes", 1000, 2000),
    ("WORKERS", "7", "workers", 7, 9),
    ("GRACE", "1.5", "grace", 1.5, 2.5),
    ("WAKE", "thread", "wake", "thread", "callback"),
    ("DEBUG", "1", "debug", True, False),
]


@pytest.mark.parametrize(("variable", "text", "name", "value", "other"), SETTINGS)
def test_each_setting_has_an_environment_variable_and_an_argument_wins(
    monkeypatch, variable, text, name, value, other
):
    def setting(runtime):
        return getattr(runtime, name) if hasattr(runtime, name) else getattr(runtime.settings, name)

    monkeypatch.setenv(f"AIOGPU_{variable}", text)
    assert setting(aiogpu.Runtime()) == value
    assert setting(aiogpu.Runtime(**{name: other})) == other


def test_the_device_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("AIOGPU_DEVICE", "cpu")
    assert aiogpu.Runtime().device_now() == torch.device("cpu")


def test_a_bad_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("AIOGPU_STREAMS", "many")
    with pytest.raises(ValueError, match=r"AIOGPU_STREAMS='many'"):
        aiogpu.Runtime()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"streams": 0}, ValueError, "streams must be at least 1"),
        ({"spin": -1}, ValueError, "spin must be at least 0"),
        ({"spin": math.nan}, TypeError, "spin is a number"),
        ({"spin": "fast"}, TypeError, "spin is a number"),
        ({"workers": True}, TypeError, "workers is a number"),
        ({"grace": -0.1}, ValueError, "grace must be at least 0"),
        ({"staging_bytes": -1}, ValueError, "staging_bytes must be at least 0"),
        ({"wake": "bell"}, ValueError, "'auto', 'callback' or 'thread'"),
        ({"device": "gpu"}, ValueError, "'gpu' is not a device"),
        ({"device": "mps"}, ValueError, "no driver for mps"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(options, kind, message):
    with pytest.raises(kind, match=message):
        aiogpu.Runtime(**options)


# -- entering and leaving ------------------------------------------------------------------------------


def test_module_functions_use_the_loops_runtime(run, auto_vd):
    async def main():
        async with aiogpu.Runtime(spin=0.5) as runtime:
            assert aiogpu.current_runtime() is runtime
            assert "open" in repr(runtime)
            await aiogpu.to_device(torch.ones(1))
            assert runtime.stats().looks == aiogpu.stats().looks > 0
        assert aiogpu.current_runtime() is not runtime
        assert (await aiogpu.to_device(torch.ones(1))).sum() == 1

    run(main)


def test_a_second_runtime_on_the_same_loop_raises(run):
    async def main():
        async with aiogpu.Runtime() as runtime:
            with pytest.raises(RuntimeError, match=r"current_runtime\(\)"):
                async with aiogpu.Runtime():
                    pass
            assert aiogpu.current_runtime() is runtime
        async with aiogpu.Runtime():
            pass

    run(main)


def test_a_runtime_can_be_entered_once(run):
    async def main():
        runtime = aiogpu.Runtime()
        async with runtime:
            pass
        with pytest.raises(RuntimeError, match="make a new one"):
            async with runtime:
                pass

    run(main)


def test_closed_and_unentered_runtimes_say_so(run):
    async def main():
        runtime = aiogpu.Runtime()
        with pytest.raises(RuntimeError, match="not been entered"):
            runtime.stats()
        async with runtime:
            pass
        assert "closed" in repr(runtime)
        with pytest.raises(RuntimeError, match="is closed"):
            runtime.stats()
        await runtime.aclose()  # closing twice does nothing

    run(main)


def test_an_explicit_runtime_takes_over_what_is_in_flight(run, vd, moving):
    async def main():
        operation = aiogpu.to_device(torch.ones(3))
        reactor = aiogpu.current_runtime().reactor
        async with aiogpu.Runtime(spin=math.inf) as runtime:
            assert runtime.reactor is reactor
            assert reactor.spin == math.inf
            with moving(vd):
                assert (await operation).sum() == 3

    run(main)


def test_outside_of_a_loop_there_is_no_runtime():
    with pytest.raises(RuntimeError, match="running event loop"):
        aiogpu.current_runtime()


def test_leaving_waits_for_what_is_in_flight(run, vd, moving):
    async def main():
        async with aiogpu.Runtime():
            operations = [aiogpu.to_device(torch.ones(size)) for size in (1, 100_000)]
        assert all(operation.done() for operation in operations)
        assert vd.idle
        for operation in operations:
            await operation

    with moving(vd):
        run(main)


def test_leaving_is_bounded_and_names_what_it_abandons(run, vd, abandoned):
    async def main():
        async with aiogpu.Runtime(grace=0.05):
            operation = aiogpu.to_device(torch.ones(3))
            begin = time.monotonic()
        assert time.monotonic() - begin < 2
        (line,) = abandoned
        assert "0.1 s of grace" in line
        assert "to_device, 12 B" in line
        assert __file__ in line
        assert not operation.done()
        vd.run_all()
        assert (await operation).sum() == 3, "abandoned work still completes"

    run(main)


def test_abandoned_work_keeps_its_buffers_until_the_device_is_done(run, vd, abandoned, blocking_until):
    """C36: the loop is gone; somebody must still look after its buffers."""
    references = []

    async def main():
        async with aiogpu.Runtime(grace=0):
            source = torch.ones(1000)
            references.append(weakref.ref(source))
            aiogpu.to_host(source)._awaited = True

    run(main)
    gc.collect()
    assert abandoned
    assert references[0]() is not None
    vd.run_all()
    blocking_until(lambda: gc.collect() is not None and references[0]() is None)


def test_a_cancelled_leaving_still_drains_within_its_grace(run, vd, moving):
    async def main():
        with anyio.CancelScope() as scope:
            async with aiogpu.Runtime():
                operation = aiogpu.to_device(torch.ones(3))
                operation._awaited = True
                scope.cancel()
        assert operation.done()

    with moving(vd):
        run(main)


def test_an_error_leaves_as_it_is(run, auto_vd):
    async def main():
        async with aiogpu.Runtime():
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main)


def test_a_wait_may_outlive_its_runtime(run, vd, abandoned, until):
    async def main():
        ended: list[int] = []

        async def wait():
            await aiogpu.synchronize()
            ended.append(threading.get_ident())

        async with anyio.create_task_group() as group:
            async with aiogpu.Runtime(grace=0.02):
                latch = vd.latch()
                group.start_soon(wait)
                await until(lambda: aiogpu.stats().pending)
            latch.release()
            vd.run_all()
            await until(lambda: ended, 3)
        assert ended == [threading.get_ident()]

    run(main)


@pytest_asyncio.fixture
async def runtime():
    # Set up and torn down in different tasks: a cancel scope held in between would break.
    with virtual_device():
        async with aiogpu.Runtime(spin=0.001) as runtime:
            yield runtime


@pytest.mark.asyncio
async def test_it_can_be_a_pytest_fixture(runtime):
    assert aiogpu.current_runtime() is runtime
    assert (await aiogpu.to_device(torch.ones(2))).sum() == 2


# -- implicit runtimes -------------------------------------------------------------------------------


def test_an_implicit_runtime_closes_with_its_loop(run, vd, moving):
    kept = []

    async def main():
        kept.append(aiogpu.current_runtime())
        operation = aiogpu.to_device(torch.ones(1))
        operation._awaited = True
        kept.append(operation)

    with moving(vd):
        run.bare(main)
    runtime, operation = kept
    assert operation.done(), "the end of the loop did not wait for what was in flight"
    assert runtime.closed
    assert runtime not in _runtime._runtimes.values()
    assert not any(sleeper is runtime for sleeper in _engine._notifier()._sleepers)


def test_a_second_run_in_the_same_process_has_a_runtime_of_its_own(run, auto_vd):
    async def main():
        await aiogpu.to_device(torch.ones(1))
        return aiogpu.current_runtime()

    first, second = run.bare(main), run.bare(main)
    assert first is not second
    assert first.closed
    assert second.closed


def test_a_hundred_runs_that_end_with_work_in_flight(run, vd, monkeypatch, abandoned, blocking_until):
    """C36: no exception in any thread, and the buffers are held until the event."""
    monkeypatch.setenv("AIOGPU_GRACE", "0")
    references = []

    async def main():
        source = torch.ones(100)
        references.append(weakref.ref(source))
        aiogpu.to_host(source)._awaited = True
        await anyio.lowlevel.checkpoint()

    for _ in range(100):
        run.bare(main)
    assert len(abandoned) == 100
    gc.collect()
    assert all(reference() is not None for reference in references)
    vd.run_all()
    blocking_until(lambda: _engine._notifier().orphans == 0)
    assert all(reference() is None for reference in references)


def test_loops_that_nobody_shut_down_are_forgotten(vd, abandoned, auto_vd):
    async def main():
        await aiogpu.to_device(torch.ones(1))

    runtimes = []
    for _ in range(3):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        runtimes += _runtime._runtimes.values()
        loop.close()  # without shutdown_asyncgens: no hook has run
    assert len(_runtime._runtimes) == 1, "only the last may wait for the next runtime's start"
    _runtime._forget_closed_loops()
    assert not _runtime._runtimes
    assert all(runtime.closed for runtime in runtimes)


def test_a_waiter_of_a_loop_that_died_is_no_error(run_asyncio, vd, abandoned, monkeypatch):
    """C36: the wake-up for a coroutine whose loop is gone goes nowhere, quietly."""
    monkeypatch.setenv("AIOGPU_GRACE", "0")

    async def main():
        tasks = [asyncio.ensure_future(aiogpu.to_device(torch.ones(1))) for _ in range(5)]
        tasks.append(asyncio.ensure_future(aiogpu.synchronize()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    run_asyncio.bare(main)
    vd.run_all()


# -- what it says --------------------------------------------------------------------------------------


def test_stats_count(run, vd, until):
    async def main():
        operations = [aiogpu.to_device(torch.ones(1)) for _ in range(3)]
        stats = aiogpu.stats()
        assert (stats.pending, stats.operations) == (3, 3)
        assert stats.staging_bytes_in_use == 3 * _engine.SLOT_BYTES
        assert stats.staging_bytes >= stats.staging_bytes_in_use
        assert stats.streams >= 8
        assert stats.streams_in_use == 0
        assert stats.wake == "virtual"
        vd.run_all()
        for operation in operations:
            await operation
        stats = aiogpu.stats()
        assert (stats.pending, stats.operations, stats.staging_bytes_in_use, stats.orphans) == (0, 0, 0, 0)

    run(main)


def test_leases_and_sharing_are_counted(run, auto_vd):
    """C23: two hundred tasks on eight streams, and it can be seen."""

    @aiogpu.task
    async def work(number, everybody_is_here):
        await everybody_is_here()
        return number

    async def main():
        here = 0
        opened = aiogpu.stats().streams

        async def everybody_is_here():
            nonlocal here
            here += 1
            while here < 200:
                await anyio.lowlevel.checkpoint()

        numbers = await aiogpu.gather(*(work(n, everybody_is_here) for n in range(200)))
        assert numbers == tuple(range(200))
        stats = aiogpu.stats()
        assert stats.leases == 200
        assert stats.shared == 200 - 8
        assert stats.streams == opened
        assert stats.streams_in_use == 0

    run(main)


# -- forks -------------------------------------------------------------------------------------------


def test_a_device_that_the_parent_used_is_refused_after_a_fork(monkeypatch):
    """C75: a clear error, not CUDA's."""
    monkeypatch.setattr(_engine, "_forked_with", ["cuda:0"])
    with pytest.raises(RuntimeError, match="'spawn' or 'forkserver'"):
        _engine.make_engine(torch.device("cuda:0"))


def test_the_virtual_device_leaves_no_trace():
    before = dict(_engine._engines)
    with virtual_device() as device:
        assert isinstance(device, VirtualDevice)
        assert _engine.find_engine(torch.device("cpu")).driver is device
    assert dict(_engine._engines) == before


def test_a_point_that_a_thread_hands_in_at_the_very_end_is_no_reason_to_warn(
    run, vd, monkeypatch, until, blocking_until
):
    """Nobody has waited for it: it comes between the last look at what is pending and the end."""
    close = _runtime.Runtime._close
    done = []

    def late(self):
        if not self.closed:
            engine = _engine.find_engine(torch.device("cpu"))
            stream = engine.compute.streams()[0]
            thread = threading.Thread(
                target=lambda: done.append(self.watch(engine, stream, vd.record(stream)))
            )
            thread.start()
            thread.join()
        close(self)

    monkeypatch.setattr(_runtime.Runtime, "_close", late)

    async def main():
        operation = aiogpu.to_device(torch.ones(1))
        await until(lambda: vd.run_all() or operation.done())
        await operation

    run(main)
    vd.run_all()
    blocking_until(lambda: done[0].done)
