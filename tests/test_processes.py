"""What only a process of its own can show: import, fork, signals, and the end of the interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMIT = 40


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **more}


def python(code: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=LIMIT)


# -- import ------------------------------------------------------------------------------------------


def test_importing_and_building_objects_starts_nothing():
    """C75: no thread, no CUDA, no library that the program does not use."""
    done = python(
        """
        import sys, threading, torch
        before, modules = threading.enumerate(), set(sys.modules)
        import aiogpu
        aiogpu.Runtime(streams=2)
        @aiogpu.task
        async def f(): ...
        @aiogpu.task(priority=-1)
        async def g(): ...
        f().close()
        assert threading.enumerate() == before, threading.enumerate()
        assert not torch.cuda.is_initialized()
        new = set(sys.modules) - modules  # torch itself brings cuda-python where it is installed
        assert not new & {"trio", "uvloop", "cuda.bindings", "numpy.testing", "pytest", "hypothesis"}, new
        """
    )
    assert done.returncode == 0, done.stderr


# -- fork --------------------------------------------------------------------------------------------

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

FORK = """
import asyncio, os, sys, warnings, torch, aiogpu
warnings.simplefilter("ignore")  # of forking with threads
torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork, aiogpu or not

async def main(size):
    async with asyncio.timeout(10):
        x = await aiogpu.to_device(torch.ones(size))
        y = await aiogpu.run_sync(lambda: x + x)
        assert (await aiogpu.to_host(y)).sum() == 2 * size

if sys.argv[1] == "used":
    asyncio.run(main(10)), asyncio.run(main(100_000))
pid = os.fork()
if pid == 0:
    asyncio.run(main(10)), asyncio.run(main(100_000))
    print("child", flush=True)
    sys.exit(0)
_, status = os.waitpid(pid, 0)
asyncio.run(main(10)), asyncio.run(main(100_000))
print("parent", flush=True)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@needs_fork
@pytest.mark.parametrize("before", ["unused", "used"])
def test_both_sides_of_a_fork_work(before):
    """C75: threads and locks of the parent are not the child's."""
    done = python(FORK, before)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["child", "parent"]


@needs_fork
def test_a_fork_inside_the_running_loop_leaves_the_parent_alone():
    done = python(
        """
        import asyncio, os, warnings, torch, aiogpu
        warnings.simplefilter("ignore")
        async def main():
            await aiogpu.to_device(torch.ones(100_000))
            pid = os.fork()
            if pid == 0:
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            await aiogpu.to_device(torch.ones(100_000))
        asyncio.run(main())
        """
    )
    assert done.returncode == 0, done.stderr


# -- the end of the interpreter ------------------------------------------------------------------------

EXIT = """
import asyncio, sys, threading, torch, aiogpu
from aiogpu.testing import virtual_device

async def main():
    operations = [aiogpu.to_device(torch.ones(size)) for size in (10, 100_000) * 5]
    operations += [aiogpu.to_host(torch.ones(size)) for size in (10, 100_000)]
    waiters = [asyncio.ensure_future(operation) for operation in operations]
    if sys.argv[1] == "return":  # once: its thread is waited for, for 3 s, at the end
        never = asyncio.ensure_future(aiogpu.run_sync(threading.Event().wait, abandon_on_cancel=True))
    await asyncio.sleep(0.05)
    ENDING

context = virtual_device(auto=False) if DEVICE == "virtual" else None
if context is not None:
    context.__enter__()
asyncio.run(main())
"""

ENDINGS = {
    "return": ("return", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "error": ("raise KeyError('mine')", 1),
    "loop left open": ("LOOP", 0),
}


@pytest.mark.parametrize("device", ["virtual", "cpu"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_in_good_order_with_work_in_flight(device, ending):
    """C73: the expected exit code, no signal, no crash, no long wait."""
    statement, code = ENDINGS[ending]
    program = EXIT.replace("DEVICE", repr(device))
    if ending == "loop left open":
        program = program.replace("ENDING", "return").replace(
            "asyncio.run(main())", "loop = asyncio.new_event_loop(); loop.run_until_complete(main())"
        )
    begin = time.monotonic()
    done = python(program.replace("ENDING", statement), ending, AIOGPU_GRACE="0.1")
    assert done.returncode == code, done.stderr
    assert time.monotonic() - begin < 20  # importing torch on a busy machine included
    assert "Fatal" not in done.stderr
    assert "Exception in thread" not in done.stderr


# -- Ctrl-C ------------------------------------------------------------------------------------------

INTERRUPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background has it ignored
import torch, aiogpu
from aiogpu.testing import virtual_device

async def main(device):
    device.latch()  # a kernel that does not end
    operation = aiogpu.to_device(torch.ones(10))
    print("ready", flush=True)
    await operation

with virtual_device(auto=False) as device:
    if sys.argv[1] == "trio":
        import trio
        trio.run(main, device)
    else:
        import asyncio
        asyncio.run(main(device))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_ctrl_c_during_a_long_kernel_ends_within_the_grace_and_names_what_was_abandoned(loop):
    """C74."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPT, loop],
        env=environment(AIOGPU_GRACE="0.3"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()
    assert time.monotonic() - begin < 10
    assert process.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors
    lines = [line for line in errors.splitlines() if "of grace the device had not finished" in line]
    assert len(lines) == 1, errors
    assert "to_device, 40 B" in lines[0]
