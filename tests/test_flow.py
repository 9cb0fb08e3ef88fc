"""The buffer between two stages: nothing is lost, nothing overtakes, whoever waits and gives up."""

from __future__ import annotations

import itertools

import anyio
import anyio.lowlevel
import pytest

from aiogpu._flow.reorder import ReorderBuffer


async def drain(buffer):
    """What comes out, the failure as itself."""
    found = []
    while (entry := await buffer.take()) is not None:
        found.append(entry.error or entry.take())
    return found


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("failing", [None, 0, 2])
def test_entries_come_in_the_order_of_their_reservation_whatever_is_filled_first(run_asyncio, order, failing):
    error = KeyError("on purpose")

    async def main():
        buffer = ReorderBuffer()
        entries = [buffer.reserve() for _ in range(4)]
        for number in order:
            if number == failing:
                entries[number].fail(error)
            else:
                entries[number].fill(number)
        buffer.close()
        expected = [0, 1, 2, 3] if failing is None else [*range(failing), error]
        assert await drain(buffer) == expected
        assert await buffer.take() is None

    run_asyncio(main)


def test_as_completed_they_come_in_the_order_of_their_filling(run_asyncio):
    async def main():
        buffer = ReorderBuffer(ordered=False)
        a, b, c = (buffer.reserve() for _ in range(3))
        c.fill("c")
        a.fill("a")
        assert buffer.ready == 2
        b.fill("b")
        buffer.close()
        assert await drain(buffer) == ["c", "a", "b"]

    run_asyncio(main)


def test_a_failure_at_the_close_comes_last(run_asyncio):
    async def main():
        buffer = ReorderBuffer()
        entry = buffer.reserve()
        error = KeyError()
        buffer.close(error)
        buffer.close(ValueError("too late"))
        entry.fill(1)
        assert await drain(buffer) == [1, error]

    run_asyncio(main)


def test_room_is_made_by_every_item_and_by_no_failure(run_asyncio):
    async def main():
        taken = []
        buffer = ReorderBuffer(on_take=lambda: taken.append(True))
        buffer.reserve().fill(1)
        buffer.reserve().fill(2)
        buffer.reserve().fail(KeyError())
        await drain(buffer)
        assert len(taken) == 2

    run_asyncio(main)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_taker_that_is_cancelled_as_it_is_woken_passes_it_on(run, ordered):
    """Two wait, one is woken and cancelled in the same tick: the other one gets the item."""

    async def main():
        buffer = ReorderBuffer(ordered=ordered)
        got = []
        scopes = []

        async def take():
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                entry = await buffer.take()
                if entry is not None:
                    got.append(entry.take())

        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(take)
                while len(scopes) < 1:
                    await anyio.lowlevel.checkpoint()
                group.start_soon(take)
                while len(scopes) < 2:
                    await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
                buffer.reserve().fill("item")  # wakes the first
                scopes[0].cancel()
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()
                assert got == ["item"]  # the first may be faster than its cancellation
                buffer.close()
        assert got == ["item"]

    run(main)


def test_everybody_who_waits_learns_of_the_end(run):
    async def main():
        buffer = ReorderBuffer()
        ends = []

        async def take():
            ends.append(await buffer.take())

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(take)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            buffer.close()
        assert ends == [None] * 5

    run(main)


@pytest.mark.parametrize("ordered", [True, False])
def test_an_abandoned_buffer_keeps_nothing_and_ends(run, ordered):
    async def main():
        buffer = ReorderBuffer(ordered=ordered)
        late, unfilled = buffer.reserve(), buffer.reserve()
        buffer.reserve().fill("lost")
        buffer.abandon()
        late.fill("too late")
        buffer.reserve().fill("much too late")
        assert buffer.ready == 0
        assert await buffer.take() is None
        assert not unfilled.filled

        error = KeyError()
        broken = ReorderBuffer(ordered=ordered)
        broken.reserve()  # by somebody who is gone
        broken.abandon(error)
        assert await drain(broken) == [error]

    run(main)
