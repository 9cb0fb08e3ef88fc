"""A device-side assert: it breaks the process's CUDA context, so every test is a program of its own."""

from __future__ import annotations

import pytest

from ._tools import ON_GPU, Together, succeeds

pytestmark = [pytest.mark.timeout(180), *ON_GPU]

FAULT = """
# Made now: making them later would wait behind the waits' kernels.
table, index = torch.zeros(4, device="cuda"), torch.tensor([1000], device="cuda")
aside = torch.cuda.Stream()
table[index * 0]  # loads the kernel's module, which would wait for them, too
torch.cuda.synchronize()

def fault():
    with torch.cuda.stream(aside):
        table[index]  # device-side assert: index out of bounds

@aiogpu.task
async def waits(kind):
    x = torch.ones(200_000, device="cuda")
    slow(3000)
    if kind == "synchronize": await aiogpu.synchronize()
    elif kind == "event":
        event = torch.cuda.Event(); event.record(torch.cuda.current_stream())
        await aiogpu.synchronize(event)
    elif kind == "to_host": await aiogpu.to_host(x)
    elif kind == "small": await aiogpu.to_host(x[:4])
    elif kind == "item": await aiogpu.item(x[0])
    raise AssertionError(f"{kind} returned although the device was lost")

KINDS = ["synchronize", "event", "to_host", "small", "item"]

async def everybody(ready):
    '''All kinds of waits, and when each of them ended and how.'''
    async def one(kind):
        try:
            await waits(kind)
        except BaseException as error:
            return kind, time.monotonic(), error
    tasks = [asyncio.create_task(one(kind)) for kind in KINDS]
    await asyncio.sleep(0.3)
    ready()
    return await asyncio.gather(*tasks)

def judge(where, results, faulted):
    for kind, ended, error in results:
        took = ended - faulted
        print(where, kind, f"{took:.3f} s", type(error).__name__)
        assert isinstance(error, aiogpu.DeviceLostError), f"{where}: {kind} raised {error!r}"
        assert took < 2.0, f"{where}: {kind} raised only after {took:.2f} s"
        assert "cuda:0" in str(error) and "earlier" in str(error), str(error)
        assert error.__cause__ is not None and "assert" in str(error.__cause__), repr(error.__cause__)

async def later_calls():
    x = torch.zeros(4)
    @aiogpu.task
    async def child(): pass
    calls = {
        "to_device": lambda: aiogpu.to_device(x),
        "task": child,
        "synchronize": lambda: aiogpu.synchronize("cuda"),
        "run_sync": lambda: aiogpu.run_sync(len, "abc"),
    }
    for name, call in calls.items():
        begin = time.perf_counter()
        try:
            await call()
        except aiogpu.DeviceLostError as error:
            took = time.perf_counter() - begin
            assert took < 0.010, f"{name} took {took * 1e3:.1f} ms to fail"
            assert "assert" in str(error), str(error)
        else:
            raise AssertionError(f"{name} did not fail on a lost device")
    # The CPU and the loop go on.
    assert (await aiogpu.to_device(x, "cpu")).tolist() == [0.0] * 4
    await asyncio.sleep(0.01)
"""

TWO_LOOPS = (
    FAULT
    + """
barrier = threading.Barrier(2)
outcome, faulted = {}, []

def loop(name):
    async def main():
        await aiogpu.synchronize("cuda")  # the engine is there
        await asyncio.to_thread(barrier.wait)
        def ready():
            barrier.wait(10)
            if name == "first":
                faulted.append(time.monotonic())
                fault()
        outcome[name] = await everybody(ready)
        await later_calls()
    try:
        asyncio.run(main())
    except BaseException as error:
        failures.append((name, repr(error)))
        import traceback; traceback.print_exc()

failures = []
second = threading.Thread(target=loop, args=("second",))
second.start(); loop("first"); second.join(20)
assert not second.is_alive() and not failures, failures
for name, results in outcome.items():
    judge(name, results, faulted[0])
assert sum(len(results) for results in outcome.values()) == 2 * len(KINDS)
print("ALL RIGHT")
sys.exit(7)
"""
)


@pytest.mark.parametrize("spin", ["50e-6", "0.0"], ids=["default", "always-asleep"])
def test_a_fault_reaches_every_wait_in_every_loop_within_two_seconds(programs: Together, spin: str) -> None:
    """C31, C32, C68: callbacks may never run, or early; later calls fail in 10 ms; the exit is clean."""
    succeeds(programs[f"two loops, spin={spin}"], code=7)


def test_a_fault_reaches_everybody_through_waiter_threads_as_well(programs: Together) -> None:
    succeeds(programs["waiter threads"], code=7)


IN_TRIO = (
    FAULT
    + """
import trio

async def main():
    await aiogpu.synchronize("cuda")
    begin = time.monotonic()
    async def one(kind):
        try:
            await waits(kind)
        except aiogpu.DeviceLostError as error:
            ended.append((kind, time.monotonic(), error))
    ended = []
    async with trio.open_nursery() as nursery:
        for kind in KINDS:
            nursery.start_soon(one, kind)
        await trio.sleep(0.3)
        begin = time.monotonic()
        fault()
    judge("trio", ended, begin)
    assert len(ended) == len(KINDS), ended
    print("ALL RIGHT")
    raise SystemExit(7)

trio.run(main)
"""
)


def test_a_fault_in_trio_ends_the_program_with_its_error(programs: Together) -> None:
    pytest.importorskip("trio", reason="trio is not installed")
    succeeds(programs["trio"], code=7)


BLAME = (
    FAULT
    + """
@aiogpu.task
async def main():
    x = torch.ones(200_000, device="cuda")
    await aiogpu.synchronize()
    slow(500)
    operation = aiogpu.to_host(x)
    await asyncio.sleep(0.1)  # a staging thread submits it
    fault()
    try:
        await operation
    except aiogpu.DeviceLostError as error:
        print(error)
        assert "to_host" in str(error) and "started at" in str(error), str(error)
        print("ALL RIGHT")
    else:
        raise AssertionError("the download of a lost device returned data")

try:
    asyncio.run(main())
except aiogpu.DeviceLostError:
    pass
"""
)


def test_the_error_names_the_oldest_operations(programs: Together) -> None:
    """C69 on hardware: the blame is not put on whoever happened to look."""
    succeeds(programs["blame"])


@pytest.fixture(scope="module", autouse=True)
def _programs(programs: Together) -> None:
    for spin in ("50e-6", "0.0"):
        programs.add(f"two loops, spin={spin}", TWO_LOOPS, AIOGPU_SPIN=spin)
    programs.add("waiter threads", TWO_LOOPS, AIOGPU_WAKE="thread")
    programs.add("trio", IN_TRIO)
    programs.add("blame", BLAME)
