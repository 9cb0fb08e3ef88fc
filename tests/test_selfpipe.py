"""The pipe by which a driver's callback wakes a sleeping loop: none is lost, and nothing else is written."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import subprocess
import sys
import threading
import weakref
from contextvars import ContextVar
from typing import Any

import anyio
import pytest

import aiogpu
from aiogpu import _selfpipe
from aiogpu._loops import AsyncioDoor, Door, open_door
from aiogpu._selfpipe import SelfPipe, open_pipe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pipe is used on Linux")


def callback(pipe: SelfPipe) -> Any:
    """As a driver's thread calls it: a C function and its argument."""
    return lambda: ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(pipe.function)(pipe.argument)


def held(pipe: SelfPipe) -> bytes:
    """What can be read now."""
    try:
        return os.read(pipe.fd, 64)
    except BlockingIOError:
        return b""


def test_a_post_writes_one_byte_and_the_next_ones_none_until_it_is_taken():
    pipe = SelfPipe()
    call = callback(pipe)
    assert call() == 0
    pipe.post()
    assert call() == 0
    assert len(held(pipe)) == 1
    pipe.take()
    assert held(pipe) == b""
    call()
    assert len(held(pipe)) == 1


def test_what_was_posted_to_the_last_owner_does_not_wake_the_next_one():
    pipe = SelfPipe()
    pipe.post()
    pipe.reset()
    assert held(pipe) == b""
    pipe.reset()
    pipe.post()
    assert held(pipe)


def test_no_post_is_lost_however_posts_and_looks_fall(run):
    """What a look did not see has its own wake-up: a loop that only ever looks when it is woken sees all."""
    many = 3000

    async def main() -> None:
        door = open_door()
        done = anyio.Event()
        completed: list[int] = []
        seen = 0

        def awake() -> None:
            nonlocal seen
            seen = len(completed)
            if seen == many:
                done.set()

        pipe, stop = open_pipe(door, awake)
        assert pipe is not None
        call = callback(pipe)

        def device(first: int) -> None:
            for number in range(first, many, 4):
                completed.append(number)  # complete first, announced then, as on a device
                call()

        threads = [threading.Thread(target=device, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        with anyio.fail_after(20):
            await done.wait()
        for thread in threads:
            thread.join()
        stop()

    run(main)


def test_what_completes_while_the_loop_looks_has_a_wake_up_of_its_own(run):
    async def main() -> None:
        looks = 0
        twice = anyio.Event()

        def awake() -> None:
            nonlocal looks
            looks += 1
            if looks == 1:
                call()  # too late for this look
            else:
                twice.set()

        pipe, stop = open_pipe(open_door(), awake)
        assert pipe is not None
        call = callback(pipe)
        call()
        with anyio.fail_after(5):
            await twice.wait()
        stop()
        stop()
        await anyio.sleep(0.01)
        assert _selfpipe._idle.count(pipe) == 1, "two loops would share it"

    run(main)


def test_a_sleeping_loop_is_woken_without_the_notifiers_thread(run, auto_vd, until):
    async def main() -> None:
        async with aiogpu.Runtime(auto_vd.device, spin=0.0) as runtime:
            reactor = runtime.reactor
            reactor.wake = lambda: None  # the thread has nothing to say
            latch = auto_vd.latch()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(aiogpu.synchronize)
                await until(lambda: reactor.sleeping)
                threading.Thread(target=latch.release).start()
                with anyio.fail_after(5):
                    await until(lambda: reactor.pending == 0)

    run(main)


def test_pipes_are_used_again_and_by_one_loop_at_a_time(run):
    def ours() -> set[int]:
        return {pipe.fd for pipe in _selfpipe._idle}

    async def main() -> int:
        runtime = aiogpu.current_runtime()
        assert runtime.reactor.pipe is not None
        assert runtime.reactor.pipe.fd not in ours()
        return runtime.reactor.pipe.fd

    first = run(main)
    before = len(_selfpipe._all)
    assert first in ours()
    assert run(main) in {first, *ours()}
    assert len(_selfpipe._all) == before
    assert len(_selfpipe._idle) == len(ours()), "one pipe twice"


def test_the_reader_keeps_no_task_alive():
    variable: ContextVar[Any] = ContextVar("variable")

    class Big:
        pass

    async def main() -> None:
        async def first() -> weakref.ref[Big]:
            big = Big()
            variable.set(big)
            aiogpu.current_runtime()  # opens the pipe, in this context
            return weakref.ref(big)

        ref = await asyncio.create_task(first())
        await asyncio.sleep(0)
        gc.collect()
        assert ref() is None

    asyncio.run(main())


def test_a_loop_that_cannot_watch_descriptors_is_woken_by_the_thread(monkeypatch, auto_vd):
    def on_readable(self: Door, *_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(AsyncioDoor, "on_readable", on_readable)

    async def main() -> None:
        async with aiogpu.Runtime(auto_vd.device, spin=0.0) as runtime:
            assert runtime.reactor.pipe is None
            await aiogpu.synchronize()

    before = len(_selfpipe._all)
    asyncio.run(main())
    asyncio.run(main())
    assert len(_selfpipe._all) <= before + 1


def test_a_forked_child_writes_its_parents_bytes_nowhere(tmp_path):
    """A C stream's buffer is copied by a fork, and written at exit to whatever has the number then."""
    target = tmp_path / "file"
    program = f"""
import os, sys
from aiogpu._selfpipe import _take_or_make
pipe = _take_or_make()
child = os.fork()
if child == 0:
    os.closerange(3, 100)
    numbers = [os.open({str(target)!r}, os.O_CREAT | os.O_RDWR) for _ in range(20)]
    sys.exit(0)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert target.read_bytes() == b""
