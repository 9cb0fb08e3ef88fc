"""Two GPUs: copies between them, and threads that stay on theirs."""

from __future__ import annotations

import pytest
import torch

import aiogpu

from ._tools import ON_GPU, Slow, filled, mark, needs_two, pattern, program, same_bytes, succeeds, tick
from .conftest import Loop

pytestmark = [*ON_GPU, needs_two]

MIB = 1 << 20


@pytest.mark.parametrize("decorated", [True, False], ids=["task", "plain"])
def test_a_peer_copy_follows_both_devices_and_is_complete(run: Loop, slow: Slow, decorated: bool) -> None:
    """C10: slow work on the source's device and on the destination's; strided sources, too."""

    async def main() -> None:
        for value in range(1, 11):
            x = torch.zeros(2048, 1024, dtype=torch.uint8, device="cuda:0")
            y = torch.zeros(1024, 2048, dtype=torch.uint8, device="cuda:1")
            with torch.cuda.device(1):
                slow(20)
                y.fill_(255)
            slow()
            x.fill_(value)
            z = await aiogpu.to_device(x.t(), "cuda:1")
            await aiogpu.copy_(y, x.t())
            assert z.device == y.device == torch.device("cuda", 1)
            filled((z + 0).cpu(), value, f"to_device, repeat {value}")
            filled((y + 0).cpu(), value, f"copy_, repeat {value}")
            assert torch.cuda.current_device() == 0, "the caller's device has changed"

    run(aiogpu.task(device="cuda:0")(main) if decorated else main)


def test_a_result_of_the_other_device_is_safe_for_the_parent(run: Loop, slow: Slow) -> None:
    @aiogpu.task(device="cuda:1")
    async def child(source: torch.Tensor, value: int) -> torch.Tensor:
        x = await aiogpu.to_device(source)
        assert x.device == torch.device("cuda", 1)
        assert torch.cuda.current_device() == 1
        slow()
        return x + value

    @aiogpu.task(device="cuda:0")
    async def parent() -> None:
        for value in range(5):
            source = pattern(MIB, value)
            x = await child(source, value)
            assert torch.cuda.current_device() == 0
            same_bytes(await aiogpu.to_host(x), source + value, f"repeat {value}")

    run(parent)


def test_each_device_keeps_its_own_current_stream_across_awaits(run: Loop, slow: Slow) -> None:
    @aiogpu.task(device="cuda:1")
    async def task() -> None:
        mine = torch.cuda.current_stream()
        with torch.cuda.device(0):
            other = torch.cuda.current_stream()
            await tick(3)
            assert torch.cuda.current_device() == 0
            assert torch.cuda.current_stream() == other
        slow(1)
        end = mark()
        await aiogpu.synchronize()
        assert end.query()
        assert torch.cuda.current_stream() == mine

    async def main() -> None:
        await aiogpu.gather(*[task() for _ in range(8)])
        assert torch.cuda.current_device() == 0
        assert torch.cuda.current_stream() == torch.cuda.default_stream()

    run(main)


OTHER_ONLY = """
torch.cuda.set_device(1)
seen = []

def where():
    seen.append(torch.cuda.current_device())
    return torch.empty(1, device="cuda").device.index

@aiogpu.task(device="cuda:1")
async def main():
    x = await aiogpu.to_device(torch.ones(3_000_000))
    slow(5)
    assert await aiogpu.run_sync(where) == 1 and seen == [1], seen
    y = await aiogpu.to_host(x + 1)
    assert float(y.sum()) == 6_000_000
    await aiogpu.synchronize()
    await aiogpu.synchronize("cuda:1")
    with aiogpu.stream():
        await aiogpu.item(x[0])
    assert torch.cuda.current_device() == 1

asyncio.run(main())
assert torch.cuda.current_device() == 1
assert torch.cuda.memory_allocated(0) == 0 and torch.cuda.memory_reserved(0) == 0
assert not torch._C._cuda_hasPrimaryContext(0), "a context was made on cuda:0"
print("ALL RIGHT")
"""


def test_work_on_the_second_gpu_never_touches_the_first(cycles: float) -> None:
    """C55: no memory, no context there; every thread of ours works on the task's device."""
    succeeds(program(OTHER_ONLY, cycles=cycles, limit=50.0))


# -- copies between them -----------------------------------------------------------------------------

SIZES = [4, 4096, 64 << 10, MIB, 48 * MIB + 3]


def _source(size: int, layout: str) -> torch.Tensor:
    """Zeros on cuda:0, of ``size`` bytes or about that."""
    if layout == "dense":
        return torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    rows = torch.zeros(max(1, size // 64) + 1, 128, dtype=torch.uint8, device="cuda:0")
    return rows[1:, ::2].t()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["dense", "strided"])
@pytest.mark.parametrize("home", ["cuda:0", "cuda:1", None])
def test_a_copy_to_the_other_device_is_behind_the_source_and_complete(
    run_asyncio: Loop, slow: Slow, size: int, layout: str, home: str | None
) -> None:
    """C10: slow work on the source's stream; in a task on either device, and in none."""

    async def main() -> None:
        for value in range(1, 6):
            x = _source(size, layout)
            with torch.cuda.device(0):
                slow(20)
                x.fill_(value)
            z = await aiogpu.to_device(x, "cuda:1")
            assert z.device == torch.device("cuda", 1)
            assert z.shape == x.shape
            with torch.cuda.device(0):
                x.fill_(255)  # allowed, now
            filled((z + 0).cpu(), value, f"repeat {value}")

    run_asyncio(aiogpu.task(device=home)(main) if home else main)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["dense", "strided"])
def test_a_copy_in_place_to_the_other_device_is_behind_both(
    run_asyncio: Loop, slow: Slow, size: int, layout: str
) -> None:
    @aiogpu.task(device="cuda:1")
    async def main() -> None:
        for value in range(1, 6):
            x = _source(size, layout)
            y = torch.zeros(x.shape, dtype=torch.float32, device="cuda:1")
            slow(20)
            y.fill_(-1.0)
            with torch.cuda.device(0):
                slow(20)
                x.fill_(value)
            assert await aiogpu.copy_(y, x) is y
            filled((y + 0).cpu().to(torch.uint8), value, f"repeat {value}")

    run_asyncio(main)


def test_ordered_is_enough_for_the_stream_of_the_other_device(run_asyncio: Loop, slow: Slow) -> None:
    @aiogpu.task(device="cuda:1")
    async def main() -> None:
        for size in SIZES:
            for value in range(1, 4):
                x = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
                with torch.cuda.device(0):
                    slow(20)
                    x.fill_(value)
                operation = aiogpu.to_device(x, "cuda:1")
                y = await operation.ordered() + 1
                filled(await aiogpu.to_host(y), value + 1, f"{size} bytes, repeat {value}")
                await operation

    run_asyncio(main)


def test_memory_of_both_sides_is_not_reused_while_the_copy_runs(run_asyncio: Loop, slow: Slow) -> None:
    async def main() -> None:
        for value in range(1, 6):
            x = torch.full((MIB,), value, dtype=torch.uint8, device="cuda:0")
            with torch.cuda.device(0):
                slow()
            operation = aiogpu.to_device(x, "cuda:1")
            await tick()
            del x
            junk = [torch.full((MIB,), 238, dtype=torch.uint8, device=f"cuda:{n % 2}") for n in range(40)]
            filled((await operation).cpu(), value, f"repeat {value}")
            del junk

    run_asyncio(main)
