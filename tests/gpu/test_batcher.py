"""The batcher on a GPU: order and memory between callers and batches, overlap, compiled models."""

from __future__ import annotations

import random
import threading
import time

import anyio
import pytest
import torch

import aiogpu

from ._tools import ON_GPU, Slow, asynchronous, heartbeat, needs_compiler, unsanitized
from .conftest import Loop

pytestmark = ON_GPU

SIZE = 1 << 18


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


async def together(batcher: aiogpu.Batcher, items: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of concurrent calls, each in a task of its own."""

    @aiogpu.task
    async def call(item: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = await batcher(item)
        return await aiogpu.to_host(result)

    return list(await aiogpu.gather(*(call(item) for item in items)))


@asynchronous
def test_items_on_the_device_are_read_behind_their_callers_streams(run: Loop, slow: Slow) -> None:
    """Each caller's item is written 30 ms after the call."""

    @aiogpu.task
    async def call(batcher: aiogpu.Batcher, value: int) -> int:
        x = torch.zeros(SIZE, device="cuda")
        slow(30)
        x.fill_(value)
        y = await batcher(x)
        low, high = torch.aminmax(y)
        return int(await aiogpu.item(low)) if int(await aiogpu.item(high)) == value + 1 else -1

    async def main() -> None:
        async with aiogpu.Batcher(plus_one, max_batch_size=8, max_delay=0.01) as batcher:
            for _ in range(3):
                found = await aiogpu.gather(*(call(batcher, i) for i in range(8)))
                assert list(found) == [i + 1 for i in range(8)]

    run(main)


@pytest.mark.timing
@asynchronous
def test_results_are_read_behind_the_batch_and_nobody_waits_on_the_host(run: Loop, slow: Slow) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        slow(100)
        return x + 1

    @aiogpu.task
    async def call(batcher: aiogpu.Batcher, value: int) -> tuple[float, int]:
        start = time.perf_counter()
        y = await batcher(torch.full((SIZE,), float(value)))
        handed_out = time.perf_counter() - start
        return handed_out, int(await aiogpu.item(y.sum() / SIZE))

    async def main() -> None:
        async with aiogpu.Batcher(fn, max_batch_size=8, max_delay=0.01) as batcher:
            for _ in range(2):  # a kernel's first launch loads it, and may wait for what the device does
                await aiogpu.gather(*(call(batcher, i) for i in range(8)))
            found = await aiogpu.gather(*(call(batcher, i) for i in range(8)))
        assert [value for _, value in found] == [i + 1 for i in range(8)]
        assert max(seconds for seconds, _ in found) < 0.09

    run(main)


def test_the_memory_of_results_is_not_reused_under_their_callers(run: Loop, slow: Slow) -> None:
    """Callers read 30 ms after they have dropped the result; later batches allocate meanwhile."""

    @aiogpu.task
    async def call(batcher: aiogpu.Batcher, value: int) -> torch.Tensor:
        y = await batcher(torch.full((SIZE,), float(value)))
        slow(30)
        kept = y * 2
        del y
        return await aiogpu.to_host(kept)

    async def main() -> None:
        async with aiogpu.Batcher(plus_one, max_batch_size=4) as batcher:
            found = await aiogpu.gather(*(call(batcher, i) for i in range(64)))
        for i, y in enumerate(found):
            assert bool((y == 2 * (i + 1)).all()), i

    run(main)


def test_callers_outside_of_tasks_get_finished_results(run: Loop, slow: Slow) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        slow(30)
        return x + 1

    async def main() -> None:
        async with aiogpu.Batcher(fn, max_batch_size=4) as batcher:
            for value in range(5):
                y = await batcher(torch.full((SIZE,), float(value)))
                side = torch.cuda.Stream()  # non-blocking: nothing orders it behind the batch
                with torch.cuda.stream(side):
                    copied = y.clone()
                side.synchronize()
                assert bool((copied == value + 1).all())

    run(main)


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_small_batches_whose_slots_are_used_again_and_again_are_right(
    run: Loop, slow: Slow, to_host: bool, kind: str
) -> None:
    """The device is 2 ms behind the host: a slot that came back too early would hold another batch's rows."""

    def fn(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        slow(2)
        return {"y": x["a"] * 2 + x["b"].unsqueeze(1), "b": x["b"]}

    async def afn(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return fn(x)

    async def main() -> None:
        function = fn if kind == "sync" else afn
        async with aiogpu.Batcher(function, max_batch_size=4, in_flight=3, to_host=to_host) as batcher:

            async def call(value: int) -> None:
                result = await batcher({"a": torch.full((300,), float(value)), "b": value})
                y = result["y"] if to_host else await aiogpu.to_host(result["y"])
                assert bool((y == 3 * value).all()), value

            in_task = aiogpu.task(call)
            await aiogpu.gather(*((call if i % 2 else in_task)(i) for i in range(400)))

    run(main)


@pytest.mark.timing
@asynchronous
@unsanitized
def test_the_upload_of_the_next_batch_runs_beside_the_computation_of_this_one(run: Loop, slow: Slow) -> None:
    """Large uploads take as long as the kernels: in turns it would take twice the time."""
    item = torch.ones(1 << 26)  # 256 MiB, about 10 ms

    def fn(x: torch.Tensor) -> torch.Tensor:
        slow(30)
        return x[:, :1]

    async def timed(in_flight: int) -> float:
        async with aiogpu.Batcher(fn, max_batch_size=1, in_flight=in_flight) as batcher:
            await together(batcher, [item])
            start = time.perf_counter()
            await together(batcher, [item] * 8)
            return time.perf_counter() - start

    async def main() -> None:
        alone, beside = await timed(1), await timed(2)
        assert beside < 0.92 * alone, (beside, alone)

    run(main)


def test_500_random_cancellations_leave_the_others_results_right(run: Loop) -> None:
    """C70: buffers of one size are reused at once, while cancelled calls' work is still in flight."""
    rng = random.Random(7)

    async def main() -> None:
        right = 0

        @aiogpu.task
        async def call(value: int) -> None:
            nonlocal right
            y = await batcher(torch.full((SIZE,), float(value)))
            host = await aiogpu.to_host(y)
            assert bool((host == value + 1).all()), value
            right += 1

        async def maybe(value: int) -> None:
            with anyio.move_on_after(rng.random() * 0.01 if value % 2 else 60):
                await call(value)

        async with aiogpu.Batcher(plus_one, max_batch_size=8, max_queue=2000) as batcher:
            async with anyio.create_task_group() as group:
                for value in range(1000):
                    group.start_soon(maybe, value)
                    if value % 10 == 0:
                        await anyio.sleep(0.0005)
        assert right >= 500

    run(main)


@pytest.mark.timing
@unsanitized
def test_the_loop_stays_free(run: Loop) -> None:
    """C43: large items and a function that launches for long."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(300))).cuda()

    async def main() -> None:
        async with aiogpu.Batcher(model, max_batch_size=32, to_host=True) as batcher:
            items = [torch.ones(64, 256) for _ in range(256)]
            await together(batcher, items)
            async with heartbeat() as pulse:
                for _ in range(3):
                    await together(batcher, items)
        assert pulse.largest < 60, pulse.largest

    run(main)


def test_memory_is_flat_and_a_real_shortage_halves_the_batch(run: Loop) -> None:
    """The batch of eight asks for 1.5 times the device's memory, halves of it fit."""
    free, _ = torch.cuda.mem_get_info()
    each = int(free * 0.16)

    def fn(x: torch.Tensor) -> torch.Tensor:
        workspace = torch.empty(each * len(x), dtype=torch.uint8, device="cuda")
        return x + workspace[0] * 0

    async def main() -> None:
        async with aiogpu.Batcher(fn, max_batch_size=8, max_delay=0.05) as batcher:
            found = await together(batcher, [torch.full((4,), float(i)) for i in range(8)])
            assert [y[0].item() for y in found] == list(range(8))
            assert batcher.stats().limit == 4
            before = torch.cuda.memory_allocated()
            for _ in range(5):
                await together(batcher, [torch.full((4,), float(i)) for i in range(8)])
            assert torch.cuda.memory_allocated() <= before + (1 << 20)

    try:
        run(main)
    finally:
        torch.cuda.empty_cache()


@needs_compiler
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # the compiler has many, about itself and about precision
def test_a_compiled_model_with_cuda_graphs_sees_one_thread_and_right_inputs(run_asyncio: Loop) -> None:
    """C61: with ``sizes`` each shape is captured once; outputs are cloned: the next replay writes them."""
    model = (
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda().eval()
    )
    compiled = torch.compile(model, mode="reduce-overhead")
    threads = set()

    def fn(x: torch.Tensor) -> torch.Tensor:
        threads.add(threading.get_ident())
        return compiled(x).clone()  # type: ignore[no-any-return]

    async def main() -> None:
        async with aiogpu.Batcher(fn, max_batch_size=8, sizes=(1, 4, 8)) as batcher:
            for size in (1, 4, 8) * 3:  # compile and capture
                await together(batcher, [torch.ones(64)] * size)
            items = [torch.randn(64) for _ in range(500)]
            found = await together(batcher, items)
        with torch.no_grad():
            expected = model(torch.stack(items).cuda()).cpu()
        torch.testing.assert_close(torch.stack(found), expected, rtol=1e-3, atol=1e-3)
        assert len(threads) == 1

    run_asyncio(main, limit=280)
