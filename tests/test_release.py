"""Large host memory goes back to the system on another thread than the loop's; nobody else notices."""

from __future__ import annotations

import os
import threading
import weakref

import pytest
import torch

import aiogpu
from aiogpu.transfers.release import LARGE, is_large, let_go


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def shared(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes // 8).share_memory_()


@pytest.mark.parametrize("kind", ["ordinary", "shared"])
def test_a_large_source_that_only_the_transfer_holds_is_freed_on_another_thread(run, auto_vd, until, kind):
    async def main() -> None:
        async with aiogpu.Runtime(auto_vd.device):
            await aiogpu.to_device(torch.ones(4))
            source = shared(2 * LARGE) if kind == "shared" else torch.arange(LARGE // 4)
            expected = source.clone()
            freed: list[int] = []
            weakref.finalize(source, lambda: freed.append(threading.get_ident()))
            operation = aiogpu.to_device(source)
            del source
            there = await operation
            await until(lambda: freed)
            assert freed != [threading.get_ident()]
            assert torch.equal(await aiogpu.to_host(there), expected)

    run(main)


def test_small_sources_take_no_thread():
    assert not is_large([torch.ones(4), torch.ones(LARGE // 4 - 1), "x", torch.ones(LARGE, device="meta")])
    assert is_large(["x", torch.ones(LARGE // 4)])


def test_whoever_else_holds_the_memory_finds_it_as_it_was():
    tensor, ordinary = shared(2 * LARGE), torch.arange(LARGE // 4)
    before = tensor.clone()
    let_go([tensor, tensor[1:], ordinary, tensor.view(torch.uint8)])
    assert torch.equal(tensor, before)
    assert ordinary[-1] == LARGE // 4 - 1
    tensor[5] = 7
    assert tensor[5] == 7


@pytest.mark.skipif(
    "file_system" not in torch.multiprocessing.get_all_sharing_strategies(), reason="no such sharing strategy"
)
def test_shared_memory_without_a_descriptor_stays_where_it_is():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensor = shared(2 * LARGE)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    place = tensor.data_ptr()  # others have this address, too: an array, a copy of the device's
    let_go([tensor])
    assert tensor.data_ptr() == place
    assert tensor[-1] == LARGE // 4 - 1


def test_a_privately_mapped_file_keeps_what_was_written_into_memory(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(2 * LARGE))
    tensor = torch.from_file(str(path), shared=False, size=LARGE // 4, dtype=torch.int64)
    tensor += 1
    let_go([tensor])
    assert torch.equal(tensor, torch.ones_like(tensor))


def test_no_descriptor_is_left():
    let_go([shared(2 * LARGE)])
    before = descriptors()
    for _ in range(5):
        let_go([shared(2 * LARGE), torch.ones(LARGE)])
    assert descriptors() == before


def test_the_list_is_emptied():
    values = [shared(2 * LARGE), torch.ones(3), object()]
    let_go(values)
    assert values == []
