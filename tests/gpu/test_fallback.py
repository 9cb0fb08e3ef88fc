"""Without host callbacks: waiter threads take their place; without cuda.bindings, torch's own streams.

The engine of a device is made once for each process, so each of these is a program of its own.
"""

from __future__ import annotations

import pytest

from ._tools import ON_GPU, Together, has_module, succeeds

pytestmark = [pytest.mark.timeout(180), *ON_GPU]

WORKS = """
@aiogpu.task
async def child(x, value):
    slow(2)
    x += value
    return x * 2

@aiogpu.task
async def request(value):
    for size in (10, 100_000, 9_000_000):
        x = await aiogpu.to_device(torch.full((size,), float(value)))
        slow(2)
        y = await child(x, 1)
        z = await aiogpu.run_sync(torch.add, y, x)
        with aiogpu.stream():
            w = aiogpu.share(z) + 0
            await aiogpu.synchronize()
        host = await aiogpu.to_host(aiogpu.share(w))
        wanted = 3.0 * (value + 1)
        assert host.min() == host.max() == wanted, (size, host.min(), host.max(), wanted)
        assert await aiogpu.item(z[0]) == wanted
    return True

async def plain():
    x = torch.zeros(1000, device="cuda")
    slow(20)
    x += 3
    assert (await aiogpu.to_host(x)).tolist() == [3.0] * 1000
    event = torch.cuda.Event(); slow(20); event.record()
    await aiogpu.synchronize(event)
    assert event.query()

async def main():
    async with aiogpu.Runtime(spin={spin}, wake={wake!r}) as runtime:
        await aiogpu.synchronize("cuda")
        print(runtime.stats())
        assert runtime.stats().wake == {mechanism!r}, runtime.stats()
        assert all(await asyncio.gather(*[request(value) for value in range(12)]))
        await plain()
        begin, cpu = time.perf_counter(), time.process_time()
        @aiogpu.task
        async def long():
            slow(400)
            await aiogpu.synchronize()
        await long()
        took = time.perf_counter() - begin
        print("a kernel of 400 ms:", took, "s,", time.process_time() - cpu, "s of CPU")
        assert 0.3 < took < 5, took  # other programs take turns on the device
        assert runtime.stats().notifications > 0, "nothing was announced"
        # Cancelled waits, too, find their way out.
        waiting = asyncio.create_task(long())
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=1)
        assert waiting.cancelled(), waiting

{loops}
print("ALL RIGHT")
"""
LOOPS = {
    "asyncio": "asyncio.run(main()); asyncio.run(main())",
    "uvloop": "import uvloop; uvloop.run(main())",
}


SPINS = ["50e-6", "0.0"]
SPIN_NAMES = ["default", "always-asleep"]


@pytest.mark.parametrize("loop", list(LOOPS))
@pytest.mark.parametrize("spin", SPINS, ids=SPIN_NAMES)
def test_results_are_right_with_waiter_threads(programs: Together, spin: str, loop: str) -> None:
    if not has_module(loop):
        pytest.skip(f"{loop} is not installed")
    succeeds(programs[f"waiter threads, {loop}, {spin}"])


WITHOUT_BINDINGS = """
from aiogpu.drivers.cuda import CudaDriver
CudaDriver._find_entries = staticmethod(lambda: (None, "simulated"))
"""


@pytest.mark.parametrize("spin", SPINS, ids=SPIN_NAMES)
def test_results_are_right_without_cuda_bindings(programs: Together, spin: str) -> None:
    """C41 on hardware: torch's streams and waiter threads."""
    succeeds(programs[f"no bindings, {spin}"])


REFUSED = (
    WITHOUT_BINDINGS
    + """
async def main():
    async with aiogpu.Runtime(wake="callback"):
        try:
            await aiogpu.synchronize("cuda")
        except RuntimeError as error:
            assert "callback" in str(error) and "simulated" in str(error), str(error)
            print("ALL RIGHT")

asyncio.run(main())
"""
)


def test_callbacks_that_were_asked_for_and_are_not_there_are_an_error(programs: Together) -> None:
    succeeds(programs["refused"])


@pytest.fixture(scope="module", autouse=True)
def _programs(programs: Together) -> None:
    settings = {"mechanism": "waiter thread"}
    for spin in SPINS:
        for loop, loops in LOOPS.items():
            if has_module(loop):
                body = WORKS.format(spin=spin, wake="thread", loops=loops, **settings)
                programs.add(f"waiter threads, {loop}, {spin}", body)
        body = WORKS.format(spin=spin, wake="auto", loops=LOOPS["asyncio"], **settings)
        programs.add(f"no bindings, {spin}", WITHOUT_BINDINGS + body)
    programs.add("refused", REFUSED)
