"""Page-locked memory: bounded, counted, reserved ahead, given back on request; and what comes beyond it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from _small_blocks import CHUNK, SLOT, UnpinnedCpu, small_blocks, small_cpu, small_virtual

import aiogpu
from aiogpu import _engine
from aiogpu._engine import Engine, EngineSettings
from aiogpu.drivers import host_allocator
from aiogpu.drivers.cpu import CpuDriver
from aiogpu.drivers.hostmem import cpus_near, pages, pin_thread_to
from aiogpu.testing import VirtualDevice, installed
from aiogpu.transfers.crew import Crew
from aiogpu.transfers.pinned import BlockPool, Budget, StagingMemory

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells, others do not")


# -- the budget of results ---------------------------------------------------------------------------


def claimed(budget: Budget, nbytes: int) -> torch.Tensor:
    assert budget.claim(nbytes)
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    budget.track(tensor, nbytes)
    return tensor


def test_results_count_for_as_long_as_any_view_of_them_is_held():
    budget = Budget(100)
    tensor = claimed(budget, 60)
    view = tensor[10:20].view(2, 5).t()
    del tensor
    gc.collect()
    assert budget.held == 60
    assert not budget.claim(50)
    del view
    gc.collect()
    assert budget.held == 0
    assert budget.claim(100)
    assert budget.refused == 1


def test_what_torch_keeps_for_reuse_is_counted_by_size_and_used_again():
    emptied: list[int] = []
    budget = Budget(100, lambda: emptied.append(1))
    tensors = [claimed(budget, 30) for _ in range(3)]
    assert (budget.held, budget.kept) == (90, 0)
    tensors.clear()
    assert (budget.held, budget.kept) == (0, 90)
    tensors = [claimed(budget, 30) for _ in range(3)]
    assert (budget.held, budget.kept) == (90, 0)
    assert not emptied, "torch had all of them ready"


def test_another_size_does_not_push_what_is_page_locked_beyond_the_limit():
    """Held and kept together stay below it: what is kept goes first."""
    emptied: list[int] = []
    budget = Budget(100, lambda: emptied.append(1))
    held = claimed(budget, 10)
    big = claimed(budget, 80)
    del big
    assert budget.kept == 80
    other = claimed(budget, 40)
    assert emptied == [1]
    assert (budget.held, budget.kept) == (50, 0)
    another = claimed(budget, 40)
    assert emptied == [1]
    del held, other, another


def test_a_claim_that_came_to_nothing_is_given_back():
    budget = Budget(10)
    assert budget.claim(10)
    budget.give_back(10)
    assert budget.held == 0
    budget.forget_kept()
    assert budget.kept == 0


def test_tensors_may_be_collected_in_any_thread_while_others_claim():
    budget = Budget(10**9)

    def work() -> None:
        for _ in range(300):
            tensor = claimed(budget, 8)
            del tensor

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.held == 0


# -- blocks ------------------------------------------------------------------------------------------


def test_slots_are_pieces_of_one_block_and_taking_one_allocates_nothing():
    memory = StagingMemory(device := VirtualDevice(), Crew(1, lambda: None))
    pool = BlockPool(memory, SLOT, 4)
    assert pool.take_free() is None
    pool.reserve(10)
    slots = [pool.take_free() for _ in range(4)]
    assert pool.take_free() is None
    assert len({slot.data_ptr() for slot in slots}) == 4
    assert {slot.nbytes for slot in slots} == {SLOT}
    assert (memory.allocations, device.pinned_bytes, pool.used_bytes) == (1, 4 * SLOT, 4 * SLOT)
    for slot in slots:
        pool.give(slot)
    assert pool.used_bytes == 0


def test_staging_memory_is_touched_by_several_threads_before_it_is_page_locked():
    crew = Crew(3, lambda: None)
    driver = CpuDriver()
    toucher = StagingMemory(driver, crew)
    seen: list[int] = []
    barrier = threading.Barrier(3, timeout=10)

    def pinned(nbytes: int, touch: Callable[[torch.Tensor], None]) -> torch.Tensor:
        block = pages(nbytes)
        block.fill_(7)
        touch(block)
        seen.append(int(block.count_nonzero()))
        return block

    driver.pinned = pinned  # type: ignore[method-assign]
    assert toucher.allocate(7 * 2**20 + 5) is not None
    assert seen == [0], "not every page was written"
    crew.run(3, lambda _: barrier.wait())
    assert crew.close(5)


@pytest.mark.parametrize("staging_bytes", [0, 1, 200, 2 * CHUNK - 1, 2 * CHUNK, 5 * CHUNK + 1])
def test_staging_never_takes_more_than_it_may(run_asyncio, staging_bytes):
    """Chunks become smaller before there are fewer than two; with none the driver stages."""
    with small_blocks(), installed(VirtualDevice(), EngineSettings(staging_bytes=staging_bytes)) as engine:
        x = torch.arange(20 * CHUNK).to(torch.uint8)

        async def main():
            assert torch.equal(await aiogpu.to_device(x), x)
            assert torch.equal(await aiogpu.to_host(x, out=torch.zeros_like(x)), x)

        run_asyncio(main)
        assert engine.chunks.allocated_bytes <= staging_bytes
        assert (engine.chunks.count > 0) == (staging_bytes >= 128)


# -- the runtime's view ------------------------------------------------------------------------------


def test_reserving_ahead_leaves_nothing_to_page_lock_for_later_transfers(run):
    with small_virtual(chunks=4) as (device, _engine):

        async def main():
            async with aiogpu.Runtime() as runtime:
                assert await runtime.reserve(CHUNK + 1) == 2 * CHUNK
                assert await runtime.reserve() == 4 * CHUNK
                before = (device.pinned_bytes, aiogpu.stats().staging_allocations)
                x = torch.zeros(30 * CHUNK, dtype=torch.uint8)
                for _ in range(10):
                    await aiogpu.to_device(x)
                assert (device.pinned_bytes, aiogpu.stats().staging_allocations) == before

        run(main)


def test_trimming_gives_idle_staging_back_and_the_next_transfer_takes_it_anew(run):
    with small_cpu(driver := UnpinnedCpu()) as engine:

        async def main():
            runtime = aiogpu.current_runtime()
            assert await runtime.trim() == 0
            x = torch.arange(20 * CHUNK).to(torch.uint8)
            await aiogpu.to_device(x)
            staged = engine.chunks.allocated_bytes
            assert staged > 0
            assert aiogpu.stats().staging_bytes == staged + 128 * SLOT
            assert await runtime.trim() == staged
            assert driver.pinned_bytes == 128 * SLOT
            assert aiogpu.stats().staging_bytes == 128 * SLOT
            assert torch.equal(await aiogpu.to_device(x), x)

        run(main)


def test_trimming_takes_nothing_from_transfers_under_way(run_asyncio, until):
    with small_virtual(auto=False, chunks=4) as (device, engine):

        async def main():
            x = torch.arange(20 * CHUNK).to(torch.uint8)
            operation = aiogpu.to_device(x)
            await until(lambda: engine.chunks.used_bytes == 4 * CHUNK)
            assert await aiogpu.current_runtime().trim() == 0
            while not operation.done():
                device.run_all()
                await anyio.sleep(0.0005)
            assert torch.equal(await operation, x)
            assert await aiogpu.current_runtime().trim() == 4 * CHUNK

        run_asyncio(main)


def test_trimming_before_anything_has_started_is_nothing(run_asyncio, monkeypatch):
    monkeypatch.setattr(_engine, "find_engine", lambda device: None)

    async def main():
        async with aiogpu.Runtime("cpu") as runtime:
            assert await runtime.trim() == 0

    run_asyncio(main)


def test_trimming_and_reserving_do_not_run_on_the_loops_thread(run_asyncio, monkeypatch):
    """They may take long, and page-locking stops launches."""
    with small_virtual() as (_, engine):
        where: list[threading.Thread] = []
        for name in ("trim", "reserve"):
            real = getattr(engine.chunks, name)

            def noted(*args: Any, real: Any = real) -> int:
                where.append(threading.current_thread())
                return real(*args)

            monkeypatch.setattr(engine.chunks, name, noted)

        async def main():
            await aiogpu.current_runtime().reserve()
            await aiogpu.current_runtime().trim()

        run_asyncio(main)
        assert len(where) == 2
        assert threading.main_thread() not in where


class OutOfPages(UnpinnedCpu):
    """The system has no pages left: mapping them fails, with an OSError, before any page-locking."""

    def pinned(self, nbytes: int, touch: Any = None) -> torch.Tensor:
        return pages(2**62)


def test_a_system_without_pages_to_give_costs_speed_and_one_warning(run_asyncio):
    """C18."""

    async def main():
        x = torch.arange(5 * CHUNK).to(torch.uint8)
        assert torch.equal(await aiogpu.to_host(await aiogpu.to_device(x)), x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with small_cpu(OutOfPages(), pinned_bytes=0) as engine:
            run_asyncio(main)
            assert engine.chunks.count == 0
    assert len([each for each in caught if "could not page-lock" in str(each.message)]) == 1


def test_a_thousand_transfers_after_warm_up_page_lock_nothing(run_asyncio):
    with small_cpu(UnpinnedCpu(), pinned_bytes=0):

        async def main():
            xs = [torch.zeros(size, dtype=torch.uint8) for size in (SLOT, CHUNK, 6 * CHUNK)]
            await aiogpu.current_runtime().reserve()
            before = aiogpu.stats()
            for index in range(500):
                await aiogpu.to_host(await aiogpu.to_device(xs[index % 3]))
            after = aiogpu.stats()
            assert after.staging_allocations == before.staging_allocations
            assert after.ordinary_results > 0

        run_asyncio(main)


def test_two_hundred_transfers_at_once_stay_below_every_limit(run_asyncio):
    with small_cpu(driver := UnpinnedCpu(), chunks=3, pinned_bytes=40 * CHUNK) as engine:
        most = 0

        async def one(index: int) -> None:
            nonlocal most
            x = torch.full((3 * CHUNK + index,), index, dtype=torch.uint8)
            there = await aiogpu.to_device(x)
            back = await aiogpu.to_host(there)
            most = max(most, engine.results.held)
            assert torch.equal(back, x)

        async def main():
            await aiogpu.amap(one, range(200), limit=200)
            assert aiogpu.stats().result_bytes <= 40 * CHUNK

        run_asyncio(main)
        assert 0 < most <= 40 * CHUNK
        assert driver.peak_bytes <= 3 * CHUNK + 128 * SLOT


def test_users_who_hold_all_results_make_nobody_wait(run_asyncio, until):
    """Beyond the budget results come in ordinary memory; nobody waits for memory that users hold."""
    with small_virtual(pinned_bytes=4 * CHUNK):

        async def main():
            x = torch.arange(3 * CHUNK).to(torch.uint8)
            held = [await aiogpu.to_host(x) for _ in range(10)]
            assert all(torch.equal(x, y) for y in held)
            stats = aiogpu.stats()
            assert (stats.result_bytes, stats.ordinary_results) == (4 * CHUNK, 9)
            held.clear()
            await until(lambda: gc.collect() >= 0 and aiogpu.stats().result_bytes == 0)
            assert aiogpu.stats().result_cache_bytes == 4 * CHUNK
            await aiogpu.current_runtime().trim()
            assert aiogpu.stats().result_cache_bytes == 0

        run_asyncio(main)


# -- what the system offers --------------------------------------------------------------------------


@pytest.mark.parametrize("users", ["", "max_split_size_mb:128"])
def test_allocator_settings_of_users_stay_as_they_are(monkeypatch, users):
    """A call of theirs counts like the environment: torch resets some of what a later one leaves out."""
    calls: list[str] = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: users, raising=False)
    host_allocator.register_in_pieces()
    assert len(calls) == (0 if users else 1)


def test_pages_are_zero_writable_and_aligned():
    block = pages(3 * 4096)
    assert (block.dtype, block.shape, block.data_ptr() % 4096) == (torch.uint8, (3 * 4096,), 0)
    assert block.count_nonzero() == 0
    block.fill_(3)
    part = block[4096:5000]
    del block
    gc.collect()
    assert part.unique().tolist() == [3]


@LINUX
def test_a_fork_does_not_share_pages_that_a_device_knows():
    """With copy-on-write the parent could be the one that gets another page at its next write."""
    block = pages(64 * 4096)
    block.fill_(1)
    # VmFlags of the mapping: "dc" is "do not copy area on fork".
    flags, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(text, 16) for text in first.split("-"))
            inside = start <= block.data_ptr() < end
        elif inside and first == "VmFlags:":
            flags = line
    if not flags:
        pytest.skip("this kernel does not tell a mapping's flags")
    assert " dc" in flags


@LINUX
def test_a_forked_child_never_unmaps_what_lies_where_its_parent_had_pages(tmp_path):
    """Its own memory may lie there: unmapping is by address."""
    program = """
import gc, os, sys
import torch
from aiogpu.drivers.hostmem import pages
blocks = [pages(1 << 21) for _ in range(8)]
places = {block.data_ptr() for block in blocks}
child = os.fork()
if child == 0:
    own = [pages(1 << 21).fill_(5) for _ in range(16)]
    reused = places & {block.data_ptr() for block in own}
    del blocks
    gc.collect()
    right = all(int(block.min()) == int(block.max()) == 5 for block in own)
    os._exit(0 if right else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
blocks[0].fill_(1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0", done.stdout + done.stderr


def fake_sys(root: Path, node: str, cpulist: str) -> Path:
    device = root / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node)
    if node.strip() != "-1":
        (root / f"devices/system/node/node{node.strip()}").mkdir(parents=True)
        (root / f"devices/system/node/node{node.strip()}/cpulist").write_text(cpulist)
    return root


@LINUX
@pytest.mark.parametrize(
    ("node", "cpulist", "allowed", "near"),
    [
        ("1\n", "4-7,12\n", set(range(16)), {4, 5, 6, 7, 12}),
        ("0\n", "0-15\n", set(range(16)), set()),  # all of them: no difference
        ("1\n", "4-7\n", {0, 1}, set()),  # this process may not run there
        ("1\n", "4-7\n", {0, 5}, {5}),
        ("-1\n", "", set(range(4)), set()),  # one node only
        ("what\n", "0-3", set(range(4)), set()),
    ],
)
def test_the_cpus_near_a_device_are_those_of_its_memory_node(
    tmp_path, monkeypatch, node, cpulist, allowed, near
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    assert cpus_near("0000:3B:00.0", fake_sys(tmp_path, node, cpulist)) == near
    assert cpus_near("0000:aa:00.0", tmp_path) == frozenset()


@LINUX
def test_only_staging_threads_are_moved_near_the_device():
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        pytest.skip("needs two CPUs")
    one = frozenset([min(mine)])

    class Near(CpuDriver):
        def near_cpus(self) -> frozenset[int]:
            return one

    engine = Engine(Near())
    seen: dict[str, set[int]] = {}
    over = threading.Semaphore(0)

    def look(name: str) -> None:
        seen[name] = os.sched_getaffinity(0)
        over.release()

    engine.staging.submit(lambda: look("staging"))
    engine.workers.submit(lambda: look("users"))
    assert over.acquire(timeout=5)
    assert over.acquire(timeout=5)
    assert seen == {"staging": set(one), "users": mine}
    assert os.sched_getaffinity(0) == mine
    assert engine.crew.threads == 1
    engine.close_threads(5)


def test_a_wish_that_the_system_does_not_grant_is_no_error():
    pin_thread_to(frozenset())
    thread = threading.Thread(target=pin_thread_to, args=(frozenset({10**5}),))
    thread.start()
    thread.join()


def test_torchs_pinned_cache_is_emptied_by_its_public_name_and_its_books(monkeypatch):
    left = [500]
    monkeypatch.setattr(
        torch.accelerator, "empty_host_cache", lambda: left.__setitem__(0, 100), raising=False
    )
    monkeypatch.setattr(
        torch.cuda.memory, "host_memory_stats", lambda: {"allocated_bytes.current": left[0]}, raising=False
    )
    assert host_allocator.drop_cache() == 400


def test_pinning_that_fails_is_said_once_with_the_remedy():
    memory = StagingMemory(device := VirtualDevice(), Crew(1, lambda: None))
    device.pin_failures = 3
    with pytest.warns(RuntimeWarning, match="ulimit -l.*AIOGPU_STAGING_BYTES"):
        assert memory.allocate(10) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert memory.allocate(10) is None
    assert (memory.failures, memory.allocations) == (2, 0)
