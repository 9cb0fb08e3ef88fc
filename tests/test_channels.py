"""Channels: anyio's behaviour, with the stream order of what is sent."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import random
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from _kernels import cell, go, read, write
from conftest import LOOPS, Mover, Run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import aiogpu
from aiogpu._handoff import Handoff
from aiogpu.testing import RaceError, VirtualDevice, virtual_device

tick = anyio.lowlevel.checkpoint


# -- order ---------------------------------------------------------------------------------------------


async def through_a_channel(vd: VirtualDevice, max_items: float, seen: list[float]) -> None:
    send, receive = aiogpu.create_channel[torch.Tensor](max_items)

    @aiogpu.task
    async def produce() -> None:
        async with send:
            for i in range(5):
                x = cell()
                write(vd, x, i)
                await send.send(x)

    @aiogpu.task
    async def consume() -> None:
        async with receive:
            async for x in receive:
                read(vd, x, seen)
                write(vd, x, -1)  # it is the receiver's now

    async with anyio.create_task_group() as group:
        group.start_soon(produce)
        group.start_soon(consume)


@pytest.mark.parametrize("max_items", [0, 1, math.inf])
def test_a_receiver_reads_what_its_sender_wrote(run, vd, max_items):
    seen: list[float] = []
    go(run, vd, lambda: through_a_channel(vd, max_items, seen))
    assert seen == [0, 1, 2, 3, 4]


def test_without_the_hand_over_the_same_is_a_race(run, vd, monkeypatch):
    """The control: the race detector sees what is missing."""
    monkeypatch.setattr(Handoff, "take", lambda self: self._value)
    with pytest.raises(BaseExceptionGroup) as caught:
        go(run, vd, lambda: through_a_channel(vd, 1, []))
    assert caught.group_contains(RaceError)


def test_sending_and_receiving_without_waiting_is_ordered_too(run, vd):
    seen: list[float] = []

    @aiogpu.task
    async def produce(send):
        with send:
            x = cell()
            write(vd, x, 3)
            send.send_nowait(x)
            await tick()

    @aiogpu.task
    async def consume(receive):
        with receive:
            while not receive.statistics().current_buffer_used:
                await tick()
            read(vd, receive.receive_nowait(), seen)

    async def main():
        send, receive = aiogpu.create_channel[torch.Tensor](1)
        await aiogpu.gather(consume(receive), produce(send))

    go(run, vd, main)
    assert seen == [3]


def test_a_receiver_does_not_wait_for_what_its_sender_does_afterwards(run, vd):
    done: list[str] = []

    @aiogpu.task
    async def produce(send, latches):
        with send:
            x = cell()
            write(vd, x, 1)
            await send.send(x)
            latches.append(vd.latch())
            vd.launch(lambda: done.append("sender"))
            await tick()

    @aiogpu.task
    async def consume(receive):
        with receive:
            read(vd, await receive.receive())
            vd.launch(lambda: done.append("receiver"))

    async def main():
        send, receive = aiogpu.create_channel[torch.Tensor](1)
        latches: list[Any] = []
        async with anyio.create_task_group() as group:
            group.start_soon(produce, send, latches)
            while not latches:
                await tick()
            group.start_soon(consume, receive)
            while receive.statistics().open_receive_streams:
                await tick()
            vd.run_all()
            assert done == ["receiver"]
            latches[0].release()

    go(run, vd, main)


@pytest.mark.parametrize("sender", [True, False], ids=["from a task", "from undecorated code"])
@pytest.mark.parametrize("receiver", [True, False], ids=["to a task", "to undecorated code"])
def test_either_end_may_be_undecorated(run, vd, sender, receiver):
    seen: list[float] = []

    async def produce(send):
        with send:
            for i in range(3):
                x = cell()
                write(vd, x, i)
                await send.send(x)

    async def consume(receive):
        with receive:
            async for x in receive:
                read(vd, x, seen)

    async def main():
        send, receive = aiogpu.create_channel[torch.Tensor](1)
        await aiogpu.synchronize()  # the device is started
        async with anyio.create_task_group() as group:
            group.start_soon(aiogpu.task(produce) if sender else produce, send)
            group.start_soon(aiogpu.task(consume) if receiver else consume, receive)

    with Mover(vd):
        run(main)
    vd.run_all()
    assert seen == [0, 1, 2]


def test_the_memory_of_items_is_kept_for_the_receivers_stream(run, vd):
    kept: list[Any] = []
    vd.keep = lambda tensor, stream: kept.append((tensor, stream))

    @aiogpu.task
    async def consume(receive):
        item = await receive.receive()
        return item["x"][0], vd.current()

    @aiogpu.task
    async def main():
        send, receive = aiogpu.create_channel[dict[str, list[torch.Tensor]]](1)
        with send, receive:
            await send.send({"x": [cell()]})
            x, stream = await consume(receive)
        assert (x, stream) in [(t, s) for t, s in kept if t is x]

    go(run, vd, main)


# -- as anyio's --------------------------------------------------------------------------------------


VERBS = ["send_nowait", "receive_nowait", "send clone", "receive clone", "close", "statistics"]


@settings(max_examples=200, deadline=None)
@given(
    max_items=st.sampled_from([0, 1, 2, math.inf]),
    script=st.lists(
        st.tuples(
            st.sampled_from(
                ["send_nowait", "receive_nowait", "send clone", "receive clone", "close", "statistics"]
            ),
            st.integers(0, 3),
        ),
        max_size=16,
    ),
    virtual=st.booleans(),
)
def test_whatever_is_done_to_it_comes_to_what_anyio_makes_of_it(max_items, script, virtual):
    async def play(send: Any, receive: Any) -> list[Any]:
        ends: dict[str, list[Any]] = {"send": [send], "receive": [receive]}
        outcomes: list[Any] = []
        for step, (verb, which) in enumerate(script):
            try:
                if verb == "send_nowait":
                    outcomes.append(ends["send"][which % len(ends["send"])].send_nowait(step))
                elif verb == "receive_nowait":
                    outcomes.append(ends["receive"][which % len(ends["receive"])].receive_nowait())
                elif verb.endswith("clone"):
                    kind = verb.split()[0]
                    ends[kind].append(ends[kind][which % len(ends[kind])].clone())
                elif verb == "close":
                    [*ends["send"], *ends["receive"]][which % 4 % sum(map(len, ends.values()))].close()
                else:
                    outcomes.append(receive.statistics())
            except Exception as error:
                outcomes.append(repr(error))
        for end in (*ends["send"], *ends["receive"]):
            end.close()
        outcomes.append(send.statistics()[2:])
        return outcomes

    async def main():
        expected = await play(*anyio.create_memory_object_stream[int](max_items))
        assert await play(*aiogpu.create_channel[int](max_items)) == expected
        assert await aiogpu.task(play)(*aiogpu.create_channel[int](max_items)) == expected

    with virtual_device() if virtual else contextlib.nullcontext():
        Run("asyncio")(main)


def test_waiting_ends_when_the_other_end_is_closed(run, anydevice):
    async def main():
        send, receive = aiogpu.create_channel[int](0)

        async def failing(fn, *args):
            with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)) as caught:
                await fn(*args)
            errors.append(type(caught.value))

        errors: list[type] = []
        async with anyio.create_task_group() as group:
            group.start_soon(failing, send.send, 1)
            while not send.statistics().tasks_waiting_send:
                await tick()
            receive.close()
        send.close()
        send, receive = aiogpu.create_channel[int](0)
        async with anyio.create_task_group() as group:
            group.start_soon(failing, receive.receive)
            while not send.statistics().tasks_waiting_receive:
                await tick()
            await send.aclose()
        assert errors == [anyio.BrokenResourceError, anyio.EndOfStream]
        with pytest.raises(anyio.ClosedResourceError):
            await send.send(1)
        await receive.aclose()
        with pytest.raises(anyio.ClosedResourceError):
            await receive.receive()

    run(main)


def test_clones_share_the_items_and_the_last_one_ends_the_channel(run, anydevice):
    async def main():
        send, receive = aiogpu.create_channel[int](math.inf)
        got: list[int] = []

        async def consume(receive):
            async with receive:
                async for item in receive:
                    got.append(item)
                    await tick()

        async with anyio.create_task_group() as group:
            with send, receive:
                for _ in range(3):
                    group.start_soon(consume, receive.clone())
                for first in (0, 10, 20):
                    with send.clone() as clone:
                        for item in range(first, first + 10):
                            await clone.send(item)
        assert sorted(got) == list(range(30))

    run(main)


def test_a_cancelled_receive_loses_no_item(run, vd):
    seen: list[float] = []

    async def main():
        send, receive = aiogpu.create_channel[torch.Tensor](0)
        await aiogpu.synchronize()

        @aiogpu.task
        async def consume():
            read(vd, await receive.receive(), seen)

        with send, receive:
            for patience in range(4):
                async with anyio.create_task_group() as group:
                    group.start_soon(consume)
                    for _ in range(patience):
                        await tick()
                    group.cancel_scope.cancel()
                    with contextlib.suppress(anyio.WouldBlock):
                        send.send_nowait(cell())
                assert not receive.statistics().tasks_waiting_receive
            async with anyio.create_task_group() as group:
                group.start_soon(consume)
                x = cell()
                write(vd, x, 5)
                await send.send(x)

    with Mover(vd):
        run(main)
    vd.run_all()
    assert seen[-1] == 5


def test_a_cancelled_send_sends_nothing_and_lets_go_of_its_item(run, vd, until):
    async def main():
        send, receive = aiogpu.create_channel[torch.Tensor](0)
        x = cell()
        alive = weakref.ref(x)

        @aiogpu.task
        async def produce(box):
            vd.launch(lambda: None, writes=[box[0]], duration=1.0)
            await send.send(box.pop())

        async with anyio.create_task_group() as group:
            group.start_soon(produce, [x])
            del x
            while not send.statistics().tasks_waiting_send:
                await tick()
            group.cancel_scope.cancel()
        with pytest.raises(anyio.WouldBlock):
            receive.receive_nowait()
        gc.collect()
        assert alive() is not None, "the device still writes it"
        vd.run_all()
        await until(lambda: alive() is None)
        send.close()
        receive.close()

    go(run, vd, main)


def test_items_left_in_a_closed_channel_are_let_go_of(run, anydevice, until):
    async def main():
        send, receive = aiogpu.create_channel[torch.Tensor](3)
        clone = receive.clone()
        alive = []
        for _ in range(3):
            x = cell()
            alive.append(weakref.ref(x))
            await send.send(x)
            del x
        receive.close()
        await tick()
        assert all(each() is not None for each in alive)
        assert await clone.receive() is alive[0]()
        clone.close()
        await until(lambda: all(each() is None for each in alive))
        with pytest.raises(anyio.BrokenResourceError):
            await send.send(cell())
        send.close()

    run(main)


def test_an_item_that_was_given_to_a_receiver_outlives_the_channel(run, anydevice):
    """It waits to go on when the channel is closed, and has its item already."""

    async def main():
        send, receive = aiogpu.create_channel[torch.Tensor](0)
        got = []

        async def consume():
            got.append(await receive.receive())

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            while not receive.statistics().tasks_waiting_receive:
                await tick()
            x = cell()
            send.send_nowait(x)
            receive.close()
            send.close()
        assert got == [x]

    run(main)


@pytest.mark.parametrize("max_items", [-1, 1.5, True, math.nan, -math.inf, "3", None])
def test_a_limit_that_is_none_is_refused(max_items):
    with pytest.raises(ValueError, match=r"max_items is a number of items, 0 or more, or math\.inf"):
        aiogpu.create_channel(max_items)


def test_an_end_that_is_not_closed_warns_as_anyios_do():
    send, receive = aiogpu.create_channel[int](0)
    receive.close()
    with pytest.warns(ResourceWarning, match="Unclosed"):
        del send


def test_its_ends_tell_their_state(run_asyncio, anydevice):
    async def main():
        send, receive = aiogpu.create_channel[int](2)
        await send.send(1)
        clone = send.clone()
        state = "1 of 2 items, 2 sending and 1 receiving ends open"
        assert repr(send) == f"<SendChannel, {state}>"
        assert repr(receive) == f"<ReceiveChannel, {state}>"
        for end in (send, receive, clone):
            end.close()

    run_asyncio(main)


# -- where it cannot be used -----------------------------------------------------------------------------


def test_another_thread_is_told_what_to_do(run, anydevice):
    async def main():
        send, receive = aiogpu.create_channel[int](1)
        await send.send(1)
        for fn in (lambda: send.send_nowait(2), receive.receive_nowait):
            with pytest.raises(RuntimeError, match="return the value and send it in the coroutine"):
                await aiogpu.run_sync(fn)
        assert await receive.receive() == 1
        send.close()
        receive.close()

    run(main)


def test_another_loop_is_told_what_to_do(run, anydevice):
    async def main():
        send, receive = aiogpu.create_channel[int](1)
        await send.send(1)
        errors: list[BaseException] = []

        def other():
            async def use():
                for call in (send.send(1), receive.receive()):
                    try:
                        await call
                    except RuntimeError as error:
                        errors.append(error)

            asyncio.run(use())

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert ["belongs to the event loop that used it first" in str(error) for error in errors] == [
            True
        ] * 2
        assert await receive.receive() == 1
        send.close()
        receive.close()

    run(main)


def test_it_is_refused_inside_a_capture_and_nothing_is_lost(run, vd):
    async def main():
        send, receive = aiogpu.create_channel[torch.Tensor](2)
        x = cell()
        with send, receive:
            await send.send(x)
            vd.is_capturing = True
            before = vd.submitted
            try:
                for call in (send.send, lambda _: receive.receive()):
                    with pytest.raises(aiogpu.CaptureError, match="after the capture"):
                        await call(x)
                for call in (send.send_nowait, lambda _: receive.receive_nowait()):
                    with pytest.raises(aiogpu.CaptureError, match="after the capture"):
                        call(x)
                assert vd.submitted == before
            finally:
                vd.is_capturing = False
            assert await receive.receive() is x
            with pytest.raises(anyio.WouldBlock):
                receive.receive_nowait()

    go(run, vd, aiogpu.task(main))


# -- random graphs of tasks, generators and channels ------------------------------------------------------


class Token:
    """One cell on its way through a graph: whoever has it may write it."""

    def __init__(self) -> None:
        self.cell = cell()
        self.value = 0.0


class Graph:
    """A source, stages, a sink. Every stage reads and writes every token."""

    def __init__(self, device: VirtualDevice, seed: int) -> None:
        self.device = device
        self.random = random.Random(seed)
        self.problems: list[str] = []
        self.receivers: list[aiogpu.ReceiveChannel[Any]] = []
        self.taken = 0
        self.over = False

    def touch(self, token: Token) -> None:
        x, expected, value = token.cell, token.value, float(self.random.randrange(1000))

        def check() -> None:
            if x.item() != expected:
                self.problems.append(f"{x.item()} where {expected} must be")

        self.device.launch(check, reads=[x])
        self.device.launch(lambda: x.fill_(value), writes=[x])
        token.value = value

    async def pause(self) -> None:
        for _ in range(self.random.randrange(3)):
            await tick()

    # -- stages ------------------------------------------------------------------------------------

    async def source(self, n: int) -> AsyncIterator[Token]:
        for _ in range(n):
            token = Token()
            self.touch(token)
            await self.pause()
            yield token

    async def generator(self, upstream: Any) -> AsyncIterator[Token]:
        async for token in upstream:
            self.touch(token)
            await self.pause()
            yield token

    async def lent(self, upstream: Any) -> AsyncIterator[Token]:
        """Its upstream lends it one cell with every item, and wants it back at the next."""
        async for scratch, token in aiogpu.task(self.lender)(upstream):
            self.touch(scratch)
            self.touch(token)
            yield token

    async def lender(self, upstream: Any) -> AsyncIterator[tuple[Token, Token]]:
        scratch = Token()
        async for token in upstream:
            self.touch(scratch)
            yield scratch, token
            self.touch(scratch)

    async def sent(self, upstream: Any) -> AsyncIterator[Token]:
        """Sends every item to a generator and goes on with what comes back."""
        echo = aiogpu.task(self.echo)()
        await anext(echo)
        async for token in upstream:
            self.touch(token)
            back = await echo.asend(token)
            self.touch(back)
            yield back

    async def echo(self) -> AsyncGenerator[Token | None, Token]:
        token = None
        while True:
            token = yield token
            await self.pause()
            self.touch(token)

    async def asked_from_children(self, upstream: Any) -> AsyncIterator[Token]:
        """A generator whose upstream is asked by a new task each time."""

        @aiogpu.task
        async def one() -> Token:
            return await anext(upstream)

        upstream = aiter(upstream)
        while True:
            try:
                token = await one()
            except StopAsyncIteration:
                return
            self.touch(token)
            yield token

    async def pump(self, upstream: Any, send: aiogpu.SendChannel[Token]) -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the sink has left
            async with send:
                async for token in upstream:
                    self.touch(token)
                    await send.send(token)
                    await self.pause()

    async def sink(self, upstream: Any, patience: int) -> None:
        async for token in upstream:
            self.touch(token)
            self.taken += 1
            if self.taken > patience:
                break

    # -- a whole graph -----------------------------------------------------------------------------

    async def execute(self, stages: list[tuple[str, Any]], n: int, patience: int, end: str) -> None:
        task = aiogpu.task
        async with anyio.create_task_group() as outer:
            outer.start_soon(self.move)
            async with aiogpu.Runtime(), anyio.create_task_group() as group:
                stream: Any = task(self.source)(n)
                for kind, operand in stages:
                    if kind == "channel":
                        max_items, workers = operand
                        send, receive = aiogpu.create_channel[Token](max_items)
                        self.receivers.append(receive)
                        group.start_soon(task(self.pump), stream, send)
                        if workers > 1:
                            last, joined = aiogpu.create_channel[Token](max_items)
                            self.receivers.append(joined)
                            for _ in range(workers):
                                self.receivers.append(receive.clone())
                                group.start_soon(task(self.pump), self.receivers[-1], last.clone())
                            last.close()
                            receive = joined
                        stream = receive
                    else:
                        stream = task(getattr(self, kind))(stream)
                with anyio.CancelScope() as scope:
                    if end == "cancelled":
                        group.start_soon(self.cancel_later, scope, patience)
                    await (self.sink if end == "undecorated" else task(self.sink))(stream, patience)
                stream = None
                for receiver in self.receivers:
                    receiver.close()
            self.over = True

    async def cancel_later(self, scope: anyio.CancelScope, patience: int) -> None:
        for _ in range(patience):
            await tick()
        scope.cancel()

    async def move(self) -> None:
        """Let streams go on in random order, until all is over."""
        while not self.over:
            movable = self.device.movable()
            for _ in range(self.random.randint(0, 3)):
                if movable:
                    self.device.step(self.random.choice(movable))
                    movable = self.device.movable()
            await anyio.sleep(0 if movable else 0.0002)


stages_of_graphs = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["generator", "lent", "sent", "asked_from_children"]), st.none()),
        st.tuples(st.just("channel"), st.tuples(st.sampled_from([0, 1, 2, math.inf]), st.integers(1, 3))),
    ),
    max_size=4,
)


def carry_out(
    stages: list[tuple[str, Any]], n: int, patience: int, end: str, seed: int, loop: str = "asyncio"
) -> Graph:
    with virtual_device(auto=False) as device:
        graph = Graph(device, seed)

        async def main() -> None:
            await graph.execute(stages, n, patience, end)
            assert aiogpu.stats().streams_in_use == 0

        try:
            Run(loop)(main)
        finally:
            device.run_all()
            for receiver in graph.receivers:
                receiver.close()
        assert graph.problems == []
        assert graph.taken == min(n, patience + 1) or end == "cancelled"
    return graph


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stages=stages_of_graphs,
    n=st.integers(0, 6),
    patience=st.integers(0, 8),
    end=st.sampled_from(["task", "undecorated", "cancelled"]),
    seed=st.integers(0, 10**6),
    loop=st.sampled_from(LOOPS),
)
@example(
    stages=[("channel", (1, 3)), ("lent", None), ("sent", None), ("asked_from_children", None)],
    n=6,
    patience=8,
    end="task",
    seed=0,
    loop="trio",
)
@pytest.mark.timeout(300)
def test_random_graphs_pass_tensors_without_a_race(stages, n, patience, end, seed, loop):
    carry_out(stages, n, patience, end, seed, loop)


@pytest.mark.parametrize("missing", ["Handoff.take", "Task.yielded", "Task.fork"])
def test_a_missing_edge_is_seen_in_such_graphs(monkeypatch, missing):
    """The control."""
    from aiogpu._tasks import Task

    if missing == "Handoff.take":
        monkeypatch.setattr(Handoff, "take", lambda self: self._value)
    else:
        monkeypatch.setattr(Task, missing.partition(".")[2], lambda self, *args, **kwargs: None)
    everything = [("generator", None), ("channel", (1, 2)), ("lent", None), ("asked_from_children", None)]
    with pytest.raises((RaceError, BaseExceptionGroup)) as caught:
        carry_out(everything, 6, 8, "task", 1)
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RaceError)
