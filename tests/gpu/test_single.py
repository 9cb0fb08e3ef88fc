"""One ordinary tensor on CUDA: it goes the short way, whose copies the device makes behind the right work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import aiogpu
from aiogpu.transfers import single

from ._tools import ON_GPU, unsanitized

# Under the sanitizer, a dispatch mode, everything goes the general way.
pytestmark = [*ON_GPU, unsanitized]


@pytest.fixture
def shorts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that went the short way."""
    taken: list[str] = []
    start = single._Flight.start

    def counting(self: Any, runtime: Any, what: str, *args: Any) -> Any:
        taken.append(what)
        return start(self, runtime, what, *args)

    monkeypatch.setattr(single._Flight, "start", counting)
    return taken


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", sorted(single._DTYPES, key=str), ids=str)
def test_every_format_arrives_bit_for_bit(run_asyncio, engine, shorts, mode: Callable[[], Any], dtype):
    async def main():
        raw = torch.randint(0, 2, (3, 4 * dtype.itemsize), dtype=torch.uint8)
        x = raw.view(dtype)
        with mode():
            there = await aiogpu.to_device(x)
            back = await aiogpu.to_host(there)
            into = await aiogpu.copy_(torch.empty_like(there, device="cpu"), there)
            up = await aiogpu.copy_(torch.empty_like(x, device=engine.device), x)
        assert there.device == up.device == engine.device
        assert not there.is_inference()
        assert not back.is_inference()
        for result in (there, back, into, up):
            assert torch.equal(result.cpu().view(torch.uint8), raw)

    run_asyncio(main)
    # What is made in inference mode is an inference tensor, which `copy_` leaves to the general way.
    assert len(shorts) == (2 if mode is torch.inference_mode else 4)


def test_a_download_follows_its_producer_and_an_upload_is_a_snapshot(run_asyncio, engine, slow, shorts):
    async def main():
        x = torch.zeros(1000, device=engine.device)
        slow()
        x.fill_(7.0)
        number = aiogpu.item(x[3])
        down = aiogpu.to_host(x)
        source = torch.ones(1000)
        up = aiogpu.to_device(source)
        source.fill_(2.0)
        x.fill_(8.0)
        assert not down.done()
        assert await number == 7.0
        assert bool((await down == 7.0).all())
        assert bool((await up == 1.0).all())

    run_asyncio(main)
    assert shorts == ["item", "to_host", "to_device"]


def test_what_requires_grad_is_read_without_a_graph(run_asyncio, engine, shorts):
    async def main():
        x = torch.ones(3, device=engine.device, requires_grad=True)
        assert await aiogpu.item((x * 2).sum()) == 6.0
        assert not (await aiogpu.to_host(x * 2)).requires_grad

    run_asyncio(main)
    assert shorts == ["item", "to_host"]


@pytest.mark.parametrize("count", [16, 2**17, 2**20], ids=["through a slot", "straight", "large"])
def test_a_copy_of_what_requires_grad_leaves_no_graph_behind(run_asyncio, engine, count):
    async def main():
        src = torch.ones(count).pin_memory().requires_grad_()
        there = torch.zeros(count, device=engine.device)
        assert await aiogpu.copy_(there, src) is there
        assert not there.requires_grad
        assert bool((there == 1.0).all())

    run_asyncio(main)


def test_a_page_locked_mebibyte_takes_no_thread(run_asyncio, engine, shorts):
    async def main():
        x = torch.arange(single.DIRECT_BYTES // 4, dtype=torch.int32).pin_memory()
        assert torch.equal((await aiogpu.to_device(x)).cpu(), x)
        assert torch.equal((await aiogpu.to_device(x.clone())).cpu(), x)  # not page-locked

    run_asyncio(main)
    assert shorts == ["to_device"]
