"""A handed-over value is ordered behind its sender's stream, and behind nothing else."""

from __future__ import annotations

import anyio
import pytest
import torch
from _kernels import cell, go, read, write

import aiogpu
from aiogpu._handoff import Handoff
from aiogpu.testing import RaceError


def two_siblings(take: bool):
    """A sibling sends ``x`` while its write has not run; the other one reads it."""

    def build(vd, seen):
        x = cell()
        sent: list[Handoff[torch.Tensor]] = []

        @aiogpu.task
        async def sender():
            write(vd, x, 3)
            sent.append(Handoff(x))
            await anyio.lowlevel.checkpoint()

        @aiogpu.task
        async def taker():
            while not sent:
                await anyio.lowlevel.checkpoint()
            read(vd, sent[0].take() if take else x, seen)

        @aiogpu.task
        async def main():
            await aiogpu.gather(taker(), sender())

        return main

    return build


def test_a_taker_reads_what_its_sibling_wrote(run, vd):
    seen: list[float] = []
    go(run, vd, two_siblings(take=True)(vd, seen))
    assert seen == [3]


def test_without_it_the_same_is_a_race(run, vd):
    with pytest.raises(BaseExceptionGroup) as caught:
        go(run, vd, two_siblings(take=False)(vd, []))
    assert caught.group_contains(RaceError)


def test_a_taker_waits_for_the_sender_only(run, vd):
    """``share`` would wait for the third task, too, which is held."""
    x, done = cell(), []
    latches = []

    @aiogpu.task
    async def held():
        latches.append(vd.latch())
        vd.launch(lambda: done.append("held"))
        await anyio.lowlevel.checkpoint()

    @aiogpu.task
    async def sender():
        write(vd, x, 1)
        return Handoff(x)

    @aiogpu.task
    async def taker(handoff):
        read(vd, handoff.take())
        vd.launch(lambda: done.append("taker"))

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(held)
            while not latches:
                await anyio.lowlevel.checkpoint()
            handoff = await sender()
            await taker(handoff)
            vd.run_all()
            assert done == ["taker"]
            latches[0].release()

    go(run, vd, main)


def test_a_value_without_tensors_is_ordered_too(run, vd):
    """It may be the word that a shared buffer is ready."""
    x, seen = cell(), []

    @aiogpu.task
    async def sender(sent):
        write(vd, x, 7)
        sent.append(Handoff("ready"))
        await anyio.lowlevel.checkpoint()

    @aiogpu.task
    async def taker(sent):
        while not sent:
            await anyio.lowlevel.checkpoint()
        assert sent[0].take() == "ready"
        read(vd, x, seen)

    @aiogpu.task
    async def main():
        sent: list[Handoff[str]] = []
        await aiogpu.gather(taker(sent), sender(sent))

    go(run, vd, main)
    assert seen == [7]


def test_it_is_refused_inside_a_capture(run, vd):
    @aiogpu.task
    async def main():
        vd.is_capturing = True
        try:
            with pytest.raises(aiogpu.CaptureError, match="after the capture"):
                Handoff(torch.ones(1))
        finally:
            vd.is_capturing = False

    go(run, vd, main)


def test_undecorated_code_of_a_task_hands_over_what_a_child_made(run, vd):
    """The child's end is ordered for its parent's stream alone, and the sender runs on neither."""
    x, seen = cell(), []

    @aiogpu.task
    async def child():
        write(vd, x, 5)
        return x

    @aiogpu.task
    async def taker(sent):
        while not sent:
            await anyio.lowlevel.checkpoint()
        read(vd, sent[0].take(), seen)

    @aiogpu.task
    async def main():
        sent: list[Handoff[torch.Tensor]] = []

        async def undecorated():
            sent.append(Handoff(await child()))

        await aiogpu.gather(taker(sent), undecorated())

    go(run, vd, main)
    assert seen == [5]


def test_taking_it_on_the_default_stream_is_no_barrier(run, vd, monkeypatch):
    """Compute streams order the default stream by themselves; a wait on it would hold all of them up."""
    x, seen = cell(), []

    @aiogpu.task
    async def sender():
        write(vd, x, 2)
        return Handoff(x)

    async def main():
        handoff = await sender()
        waits = []
        monkeypatch.setattr(vd, "wait", lambda *args: waits.append(args))
        assert handoff.take() is x
        assert not waits
        read(vd, x, seen)
        vd.run_all()

    go(run, vd, main)
    assert seen == [2]


def test_a_lost_device_is_named_as_such(run, vd):
    @aiogpu.task
    async def main():
        vd.fault()
        with pytest.raises(aiogpu.DeviceLostError):
            Handoff(torch.ones(1))

    async def outer():
        with pytest.raises(aiogpu.DeviceLostError):
            await main()

    run(outer)
