"""How processes end: with work in flight, by Ctrl-C, after a fork. Each is a program of its own."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from ._tools import ON_GPU, Together, command, environment, needs_linux, succeeds

pytestmark = [pytest.mark.timeout(180), *ON_GPU, needs_linux, pytest.mark.timing]

ENDS = """
kind = {kind!r}

@aiogpu.task
async def starts():
    x = torch.ones(300_000, device="cuda")
    await aiogpu.synchronize()
    slow(700)
    operations.extend(aiogpu.to_host(x if i % 2 else x[:10]) for i in range(10))
    await asyncio.sleep(0.05)

operations = []

async def main():
    task = asyncio.create_task(starts())  # it ends after its operations: it is cancelled with the loop
    while len(operations) < 10:
        await asyncio.sleep(0.01)
    assert not any(operation.done() for operation in operations), "the operations are not in flight"
    print("LEAVES", time.time(), flush=True)
    if kind == "sys.exit": sys.exit(3)
    if kind == "error": raise ValueError("unhandled")

asyncio.run(main())
print("AFTER", flush=True)
"""
CODES = {"return": 0, "sys.exit": 3, "error": 1}
RUNS = 4


@pytest.mark.parametrize("kind", list(CODES))
def test_a_process_with_operations_in_flight_ends_in_time_and_good_order(
    kind: str, programs: Together
) -> None:
    """C73: 10 operations and 0.7 s of work in flight; the code that was asked for, no signal, within 5 s."""
    for number in range(RUNS):
        each = programs[f"{kind} {number}"]
        assert each.code == CODES[kind], f"run {number}: expected exit code {CODES[kind]}\n{each}"
        left = [line.split() for line in each.out.splitlines() if line.startswith("LEAVES")]
        assert left, f"run {number} never got as far\n{each}"
        took = each.at - float(left[0][1])
        assert took < 5, f"run {number}: the process ended {took:.1f} s after its main function\n{each}"
        assert ("AFTER" in each.out) == (kind == "return"), f"run {number}\n{each}"
        assert "Exception in thread" not in each.err, f"run {number}\n{each}"


CTRL_C = """
import logging, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background has it ignored
logging.basicConfig()

@aiogpu.task
async def main():
    x = torch.ones(300_000, device="cuda")
    await aiogpu.synchronize()
    slow(30_000)
    print("READY", flush=True)
    await aiogpu.to_host(x)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("INTERRUPTED", flush=True)
    sys.exit(42)
"""


def test_ctrl_c_during_a_long_kernel_ends_within_the_grace_and_says_what_it_left(cycles: float) -> None:
    """C74: KeyboardInterrupt, one log line, and the end within the grace of 1 s and 3 s more."""
    process = subprocess.Popen(
        command(CTRL_C, limit=55, cycles=cycles),
        env=environment(AIOGPU_GRACE="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "READY" not in line:
            process.kill()
            pytest.fail(f"the program did not start: {line}{process.communicate()}")
        time.sleep(0.2)  # not for the program's sake: the kernel shall be running, not about to
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"still running 20 s after SIGINT\n{process.communicate()}")
    took = time.monotonic() - begin
    said = f"code {process.returncode} after {took:.1f} s\n{out}\n{err}"
    assert process.returncode == 42, said
    assert "INTERRUPTED" in out, said
    assert took < 4, said
    logged = [line for line in err.splitlines() if "aiogpu" in line and "grace" in line]
    assert len(logged) == 1, f"{len(logged)} log lines name what was abandoned\n{said}"
    assert "to_host" in logged[0], said


FORK = """
import warnings, signal
warnings.filterwarnings("ignore", category=DeprecationWarning)  # the fork of a process with threads

@aiogpu.task
async def total():
    x = await aiogpu.to_device(torch.ones(1000))
    return await aiogpu.item(x.sum())

def child(works):
    signal.alarm(20)  # a child that hangs dies of this
    try:
        result = asyncio.run(total())
    except RuntimeError as error:
        print("child:", error, flush=True)
        os._exit(0 if not works and "fork" in str(error) else 3)
    except BaseException as error:
        print("child:", repr(error), flush=True)
        os._exit(4)
    print("child:", result, flush=True)
    os._exit(0 if works and result == 1000 else 5)

def fork(works):
    pid = os.fork()
    if pid == 0:
        child(works)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status} (works={works})"

# Imported, decorated, configured: no context, no thread.
runtime = aiogpu.Runtime(device="cuda", spin=0.0)
repr(runtime), aiogpu.task(priority=-1)
assert not torch.cuda.is_initialized(), "importing and building has initialised CUDA"
assert threading.active_count() == 1, threading.enumerate()
fork(works=True)
assert not torch.cuda.is_initialized()

assert asyncio.run(total()) == 1000
fork(works=False)
# The parent goes on.
assert asyncio.run(total()) == 1000
print("ALL RIGHT")
"""


def test_a_fork_before_the_first_use_works_and_one_after_it_is_refused(programs: Together) -> None:
    """C75: import and objects make no context and no thread; used before, the child gets a clear error."""
    succeeds(programs["fork"])


@pytest.fixture(scope="module", autouse=True)
def _programs(programs: Together) -> None:
    programs.add("fork", FORK)
    for number in range(RUNS):
        for kind in CODES:
            programs.add(f"{kind} {number}", ENDS.format(kind=kind), AIOGPU_GRACE="0.1")
