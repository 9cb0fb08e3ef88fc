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
