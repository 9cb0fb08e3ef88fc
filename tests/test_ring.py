"""The staging ring and its copy threads: whose turn it is, who never waits, what is never mixed up."""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from _small_blocks import CHUNK, PIECE, SLOT, UnpinnedCpu, small_cpu, small_virtual
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import aiogpu
from aiogpu.drivers.cpu import CpuDriver
from aiogpu.transfers import crew as crew_room
from aiogpu.transfers.crew import Batch, Crew, Part, copying, touching
from aiogpu.transfers.layout import flat, pairs, same_order
from aiogpu.transfers.pinned import StagingMemory
from aiogpu.transfers.ring import Ring, _Ticket
from aiogpu.transfers.staging import Lane, cut

MIB = 2**20


def nothing() -> None: ...


def never() -> bool:
    return False


# -- copy threads ------------------------------------------------------------------------------------


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew(4, nothing)
    yield crew
    assert crew.close(5)


@pytest.mark.parametrize("nbytes", [1, 95, 96, 97, 10_000])
def test_pieces_cover_every_byte_once(crew, nbytes):
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    around = torch.full((nbytes + 64,), 7, dtype=torch.uint8)
    crew.each(copying(around[32:-32], source, 96))
    assert torch.equal(around[32:-32], source)
    assert around[:32].unique().tolist() == around[-32:].unique().tolist() == [7]
    crew.each(touching(around[32:-32], 96))
    assert around[32:-32].count_nonzero() == 0
    assert around[:32].unique().tolist() == around[-32:].unique().tolist() == [7]


@pytest.mark.parametrize("how", ["one core", "busy with others", "ended"])
def test_whoever_asks_gets_it_done_without_any_help(how, blocking_until):
    crew = Crew(1 if how == "one core" else 3, nothing)
    gate, blocked = threading.Event(), threading.Semaphore(0)
    if how == "busy with others":
        other = crew.batch()
        other.add([lambda: (blocked.release(), gate.wait(10))] * 3)
        for _ in range(2):
            assert blocked.acquire(timeout=5)
    if how == "ended":
        assert crew.close(5)
    done: list[int] = []
    crew.each([lambda i=i: done.append(i) for i in range(100)])
    assert sorted(done) == list(range(100))
    gate.set()
    assert crew.close(5)


def test_helpers_really_help(crew):
    """Four pieces that need each other need four threads."""
    barrier = threading.Barrier(4, timeout=10)
    crew.each([barrier.wait] * 4)


def test_one_transfer_does_not_keep_the_helpers_from_another():
    crew = Crew(2, nothing)
    gate = threading.Event()
    log: list[str] = []
    long, short = crew.batch(), crew.batch()
    first = long.add([lambda: gate.wait(10)] + [lambda: log.append("long")] * 100)
    # Nobody waits for them, so the one helper does everything.
    second = short.add([lambda: log.append("short")] * 2)
    gate.set()
    second.block()
    first.block()
    assert log.index("short") <= crew_room._TURN
    assert log.count("long") == 100
    assert crew.close(5)


def test_what_a_piece_raises_is_raised_to_whoever_waits_when_no_other_runs_any_more(crew):
    done: list[int] = []

    def fails():
        raise ValueError("mine")

    batch = crew.batch()
    part = batch.add([*[lambda: done.append(1)] * 20, fails, *[lambda: done.append(1)] * 20])
    with pytest.raises(ValueError, match="mine"):
        batch.wait(part)
    assert len(done) == 40
    assert batch._helpers == 0 or not batch._pieces
    crew.each([lambda: done.append(1)])  # and the threads are still there
    assert len(done) == 41


@pytest.mark.parametrize("count", [100, 70_000], ids=["by the asking thread", "by torch's own"])
def test_reordering_is_exact(crew, count):
    source = torch.arange(count * 2).view(count, 2).t()
    target = torch.zeros(2, count, dtype=torch.int64)
    Batch(crew).wait(crew.reorder(target, source))
    assert torch.equal(target, source)


def test_torchs_thread_settings_do_not_count_and_are_not_changed(crew):
    """Servers set them to 1; they belong to the whole process."""
    before = torch.get_num_threads()
    crew.each(copying(torch.empty(MIB), torch.ones(MIB), 4096))
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *seen] == [before, before]


# -- the order of memory -----------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4)


@st.composite
def strided(draw: Any) -> torch.Tensor:
    """A tensor with gaps, permuted dimensions, an offset."""
    shape = draw(SHAPES)
    steps = [draw(st.integers(1, 3)) for _ in shape]
    offset = draw(st.integers(0, 3))
    wide = [size * step for size, step in zip(shape, steps, strict=True)]
    tensor = torch.arange(offset + math.prod(wide))[offset:].view(wide)
    tensor = tensor[tuple(slice(None, None, step) for step in steps)]
    order = draw(st.permutations(range(len(shape))))
    tensor = tensor.permute(order)
    if draw(st.booleans()):
        tensor = tensor.expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@settings(max_examples=150, deadline=None)
@given(host=strided(), count=st.integers(1, 40), order=st.randoms())
def test_pairs_are_equal_elements_in_the_order_of_the_devices_memory(host, count, order):
    dims = list(range(host.dim()))
    order.shuffle(dims)
    there = torch.empty([host.size(dim) for dim in dims], dtype=host.dtype)
    there = there.permute(sorted(range(host.dim()), key=dims.__getitem__))
    assert there.shape == host.shape
    there.copy_(host)
    seen = []
    for mine, its in pairs(host, there, count):
        assert its.dim() == 1
        assert 1 <= mine.numel() == its.numel() <= count
        assert mine.reshape(-1).tolist() == its.tolist()
        assert not same_order(host, there) or (mine.dim() == 1 and mine.is_contiguous())
        seen.append(its)
    assert torch.equal(torch.cat(seen), flat(there))


@given(
    nbytes=st.integers(1, 2**34), chunk=st.sampled_from([1024, 64, 192, 8 * MIB]), threads=st.integers(1, 32)
)
def test_a_cut_fits_into_chunks_and_every_dtype_into_a_cut(nbytes, chunk, threads):
    plan = cut(nbytes, chunk, threads)
    assert 64 <= plan.step <= chunk
    assert plan.step % 64 == 0
    assert plan.piece >= 64
    assert 2 <= plan.ahead < plan.share


# -- the ring ----------------------------------------------------------------------------------------


class Event:
    done = False


class Device(CpuDriver):
    """Only what a ring asks of a driver: events that the test completes; memory that may run out."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 10**6  # blocks that can still be page-locked
        self.recycled: list[Event] = []
        self.unpinned = 0

    def pinned(self, nbytes: int, touch: Any = None) -> torch.Tensor:
        if self.left == 0:
            raise RuntimeError("no page-locked memory")
        self.left -= 1
        return torch.empty(nbytes, dtype=torch.uint8)

    def unpin(self, block: torch.Tensor) -> None:
        self.unpinned += 1

    def query(self, event: Event) -> bool:
        return event.done

    def recycle(self, event: Event) -> None:
        self.recycled.append(event)


class Rig:
    """A ring, and threads that wait in it."""

    def __init__(self, limit: int = 2, blocks: int = 10**6) -> None:
        self.device = Device()
        self.device.left = blocks
        self.memory = StagingMemory(self.device, Crew(1, nothing))
        self.ring = Ring(self.device, self.memory, 64, limit)
        self.got: list[tuple[str, torch.Tensor | None]] = []
        self.stopped = False
        self.threads: list[threading.Thread] = []

    def take(self, owner: object = "", share: int = 10, short: bool = False) -> torch.Tensor | None:
        return self.ring.take(owner, share, short=short, give_up=lambda: self.stopped)

    def wait_in_thread(
        self, name: str, *, short: bool = False, until: Callable[..., None], share: int = 10
    ) -> None:
        queue = self.ring._short if short else self.ring._long
        before = len(queue)
        thread = threading.Thread(target=lambda: self.got.append((name, self.take(name, share, short))))
        thread.start()
        self.threads.append(thread)
        until(lambda: len(queue) == before + 1)

    def fly(self, chunk: torch.Tensor, owner: object = "") -> Event:
        event = Event()
        self.ring.fly(owner, event, chunk)
        return event

    def close(self) -> None:
        self.stopped = True
        with self.ring._lock:
            for ticket in (*self.ring._short, *self.ring._long):
                ticket.call()
        for thread in self.threads:
            thread.join(5)
            assert not thread.is_alive()


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    with contextlib.ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> Rig:
            rig = Rig(*args, **kwargs)
            stack.callback(rig.close)
            return rig

        yield make


def test_chunks_are_page_locked_when_they_are_needed_and_then_used_again(rig):
    ring = (r := rig(limit=3)).ring
    assert ring.allocated_bytes == 0
    a = r.take()
    ring.give(a)
    b = r.take()
    assert a.data_ptr() == b.data_ptr()
    assert (ring.count, r.memory.allocations) == (1, 1)


def test_a_transfer_gets_no_more_chunks_than_its_share_and_all_no_more_than_the_limit(rig):
    r = rig(limit=4)
    for _ in range(2):
        r.fly(r.take("a", 2), "a")
    assert r.ring.try_take("a", 2) is None
    assert r.ring.try_take("b", 2) is not None
    assert r.ring.try_take("b", 2) is not None
    assert r.ring.try_take("c", 2) is None
    assert r.ring.allocated_bytes == 4 * 64


def test_a_free_chunk_is_anybodys_whatever_his_share(rig):
    r = rig()
    r.ring.give(r.take())
    assert r.ring.try_take("a", 0) is not None


def test_whoever_waits_gets_the_first_chunk_that_the_device_is_done_with(rig, blocking_until):
    """Not the oldest: that may be behind somebody's kernel."""
    r = rig(limit=3)
    chunks = [r.take() for _ in range(3)]
    events = [r.fly(chunk, number) for number, chunk in enumerate(chunks)]
    r.wait_in_thread("waiter", until=blocking_until)
    events[1].done = True
    blocking_until(lambda: r.got)
    assert r.got[0][1] is chunks[1]
    assert r.device.recycled == [events[1]]
    assert r.ring.waits == 1


def test_turns_come_in_the_order_of_asking_and_nobody_overtakes(rig, blocking_until):
    r = rig(limit=1)
    chunk = r.take()
    for name in "abc":
        r.wait_in_thread(name, until=blocking_until)
    assert r.ring.try_take("holder", 10) is None, "somebody who may hold chunks comes after all who wait"
    for count in (1, 2, 3):
        r.ring.give(chunk)
        blocking_until(lambda count=count: len(r.got) == count)
        assert r.ring.try_take("holder", 10) is None
    assert [name for name, _ in r.got] == ["a", "b", "c"]


def test_who_holds_chunks_gets_neither_a_finished_nor_a_new_one_while_somebody_waits(rig):
    """Also when the one who waits has not come to look yet."""
    r = rig(limit=3)
    r.fly(r.take("a"), "a").done = True
    somebody = _Ticket(short=False)
    r.ring._long.append(somebody)
    assert r.ring.try_take("a", 10) is None
    assert r.ring.count == 1
    r.ring._long.clear()
    assert r.ring.try_take("a", 10) is not None


def test_a_short_transfer_is_next_but_never_twice_in_a_row(rig, blocking_until):
    r = rig(limit=1)
    chunk = r.take()
    for name in ("L1", "L2", "L3"):
        r.wait_in_thread(name, until=blocking_until)
    for name in ("s1", "s2", "s3"):
        r.wait_in_thread(name, short=True, until=blocking_until)
    for count in range(1, 7):
        r.ring.give(chunk)
        blocking_until(lambda count=count: len(r.got) == count)
    assert [name for name, _ in r.got] == ["s1", "L1", "s2", "L2", "s3", "L3"]


def test_a_chunk_in_flight_is_never_handed_out(rig):
    r = rig(limit=2)
    flying = [r.take(), r.take()]
    for chunk in flying:
        r.fly(chunk)
    assert r.ring.try_take("b", 10) is None
    assert r.ring.trim() == 0
    assert r.ring.used_bytes == 2 * 64


def test_the_end_of_a_transfer_frees_what_it_had_in_flight_and_nothing_else(rig):
    r = rig(limit=3)
    mine, other = r.take("a"), r.take("b")
    r.fly(mine, "a")
    r.fly(other, "b")
    r.ring.land("a")
    assert r.ring.used_bytes == 64
    assert r.ring.try_take("c", 0) is mine
    assert r.ring.try_take("c", 0) is None


def test_without_page_locked_memory_nobody_waits_for_any(rig):
    r = rig(blocks=0)
    with pytest.warns(RuntimeWarning, match="could not page-lock"):
        assert r.take() is None
    assert r.ring.try_take("a", 10) is None
    assert (r.ring.count, r.memory.failures) == (0, 2)
    assert rig(limit=0).take() is None


def test_when_no_more_can_be_page_locked_one_waits_for_what_there_is(rig, blocking_until, monkeypatch):
    r = rig(limit=5, blocks=1)
    chunk = r.take()
    monkeypatch.setattr(r.memory, "_warn", lambda *_: None)
    r.wait_in_thread("waiter", until=blocking_until)
    blocking_until(lambda: r.memory.failures == 1)
    assert r.ring.count == 1
    r.ring.give(chunk)
    blocking_until(lambda: r.got)
    assert r.got[0][1] is chunk
    assert r.memory.failures == 1, "each asks the system once"


def test_a_waiter_gives_up_when_waiting_has_become_pointless(rig, blocking_until):
    r = rig(limit=1)
    r.take()
    r.wait_in_thread("a", until=blocking_until)
    r.wait_in_thread("b", until=blocking_until)
    r.close()
    assert r.got == [("a", None), ("b", None)] or r.got == [("b", None), ("a", None)]
    assert not r.ring.wanted


def test_trimming_gives_back_what_is_free_and_those_who_wait_get_new_memory(rig, blocking_until):
    r = rig(limit=2)
    a, b = r.take(), r.take()
    event = r.fly(b)
    r.ring.give(a)
    event.done = True
    assert r.ring.trim() == 2 * 64
    assert (r.ring.allocated_bytes, r.device.unpinned) == (0, 2)
    assert r.take() is not None


def test_trimming_and_reserving_leave_graph_captures_of_other_threads_alone(rig, monkeypatch):
    """They run on threads that belong to no engine, and an event query there would kill a capture."""
    r = rig(limit=2)
    relaxed = [0]

    @contextlib.contextmanager
    def bracket() -> Iterator[None]:
        relaxed[0] += 1
        yield
        relaxed[0] -= 1

    def within(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            assert relaxed[0], real
            return real(*args)

        return call

    event = r.fly(r.take())
    monkeypatch.setattr(r.device, "relaxed", bracket)
    for name in ("query", "pinned", "unpin"):
        monkeypatch.setattr(r.device, name, within(getattr(r.device, name)))
    event.done = True
    assert r.ring.reserve() == 2 * 64
    assert r.ring.trim() == 2 * 64


def test_trimming_takes_nothing_from_those_who_wait(rig, blocking_until, monkeypatch):
    r = rig(limit=1)
    event = r.fly(r.take())
    # Nobody looks at what is in flight, but trim.
    monkeypatch.setattr(r.ring, "_look", nothing)
    r.wait_in_thread("a", until=blocking_until)
    r.device.left = 0
    event.done = True
    assert r.ring.trim() == 0
    blocking_until(lambda: len(r.got) == 1)
    assert r.got[0][1] is not None


def test_reserving_page_locks_ahead_and_says_how_much(rig):
    r = rig(limit=4)
    assert r.ring.reserve(65) == 2 * 64
    assert r.ring.reserve(65) == 2 * 64
    assert r.memory.allocations == 2
    assert r.ring.reserve() == 4 * 64
    assert r.ring.used_bytes == 0
    for _ in range(4):
        r.take()
    assert r.memory.allocations == 4
    short = rig(limit=4, blocks=1)
    with pytest.warns(RuntimeWarning, match="could not page-lock"):
        assert short.ring.reserve() == 64


class Turns(RuleBasedStateMachine):
    """Whatever happens in whatever order: each chunk is with one holder, and the books are right."""

    @initialize(limit=st.integers(1, 4), blocks=st.integers(0, 6))
    def start(self, limit: int, blocks: int) -> None:
        self.rig = Rig(limit, blocks)
        self.ring = self.rig.ring
        self.held: dict[int, torch.Tensor] = {}
        self.flying: list[tuple[str, Event, torch.Tensor]] = []

    @rule(owner=st.sampled_from("ab"), share=st.integers(0, 3))
    def take(self, owner: str, share: int) -> None:
        mine = [f for f in self.flying if f[0] == owner]
        before = self.ring.count
        with contextlib.suppress(RuntimeWarning):
            chunk = self.ring.try_take(owner, share)
            if chunk is not None:
                assert id(chunk) not in self.held
                still = [f for f in self.flying if f[2] is chunk]
                assert all(f[1].done for f in still), "the device still uses it"
                self.flying = [f for f in self.flying if f[2] is not chunk]
                self.held[id(chunk)] = chunk
                assert self.ring.count == before or len(mine) < share

    @precondition(lambda self: self.held)
    @rule(owner=st.sampled_from("ab"), submit=st.booleans())
    def let_go(self, owner: str, submit: bool) -> None:
        _, chunk = self.held.popitem()
        if submit:
            self.flying.append((owner, self.rig.fly(chunk, owner), chunk))
        else:
            self.ring.give(chunk)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.flying))[1].done = True

    @rule(owner=st.sampled_from("ab"))
    def end(self, owner: str) -> None:
        self.ring.land(owner)
        self.flying = [f for f in self.flying if f[0] != owner]

    @rule()
    def trim(self) -> None:
        self.ring.trim()
        self.flying = [f for f in self.flying if not f[1].done]

    @rule(nbytes=st.integers(0, 300))
    def reserve(self, nbytes: int) -> None:
        with contextlib.suppress(RuntimeWarning):
            self.ring.reserve(nbytes)

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "rig"):
            return
        ring = self.ring
        assert 0 <= ring.count <= ring.limit
        assert ring.allocated_bytes == 64 * (self.rig.memory.allocations - self.rig.device.unpinned)
        known = len(self.held) + len(self.flying)
        done = sum(f[1].done for f in self.flying)
        assert 64 * (known - done) <= ring.used_bytes <= 64 * known


Turns.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_a_ring_keeps_its_books_whatever_happens = pytest.mark.filterwarnings("ignore:aiogpu could not")(
    Turns.TestCase
)


# -- transfers through it ----------------------------------------------------------------------------


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


async def settled() -> None:
    runtime = aiogpu.current_runtime()
    while runtime.reactor.operations or runtime.reactor.pending:
        await anyio.sleep(0.0005)


def test_a_short_upload_does_not_wait_for_long_ones(run, until):
    """There are more long ones than chunks and than threads for them."""
    with small_virtual(auto=False, chunks=2) as (device, engine):
        xs = [pattern(10 * CHUNK, index) for index in range(70)]

        async def main():
            long = [aiogpu.to_device(x) for x in xs]
            await until(lambda: engine.chunks.wanted)
            short = aiogpu.to_device(pattern(CHUNK, 7))
            while not short.done():
                device.run_all()
                await anyio.sleep(0.0005)
            assert not any(operation.done() for operation in long), "it waited for long ones"
            assert torch.equal(await short, pattern(CHUNK, 7))
            while aiogpu.current_runtime().reactor.operations:
                device.run_all()
                await anyio.sleep(0.0005)
            for x, operation in zip(xs, long, strict=True):
                assert torch.equal(await operation, x)

        run(main)


@pytest.mark.parametrize("verb", ["to_device", "to_host"])
def test_many_transfers_share_the_ring_fairly(run_asyncio, moving, monkeypatch, verb):
    """Eight equal ones at once are all under way before any is over."""
    with small_virtual(auto=False, chunks=2, pinned_bytes=0) as (device, engine):
        xs = [pattern(64 * CHUNK, i) for i in range(8)]
        turns: list[int] = []
        asking: set[int] = set()
        take = Ring.take

        def noted(ring, owner, *args, **kwargs):
            asking.add(id(owner))
            chunk = take(ring, owner, *args, **kwargs)
            turns.append(id(owner))
            return chunk

        monkeypatch.setattr(Ring, "take", noted)

        async def main():
            operations = [getattr(aiogpu, verb)(x) for x in xs]
            while len(asking) < len(xs):  # downloads start when the device has come to them
                if verb == "to_host" and not asking:
                    device.run_all()
                await anyio.sleep(0.0005)
            with moving(device):
                results = await aiogpu.gather(*operations)
            assert all(torch.equal(a, b) for a, b in zip(xs, results, strict=True))

        run_asyncio(main)
        owners = set(turns)
        first_over = min(len(turns) - turns[::-1].index(owner) for owner in owners)
        assert len(owners) == 8
        assert set(turns[:first_over]) == owners, "one ended before another had its first turn"
        assert engine.chunks.allocated_bytes <= 2 * CHUNK


@pytest.mark.parametrize("when", ["filling", "submitting", "recording"])
def test_what_breaks_off_leaves_no_chunk_and_no_copy_thread_behind(run_asyncio, monkeypatch, when, until):
    """Copy threads may still be reading the source when a submission fails."""
    with small_cpu(driver := UnpinnedCpu()) as engine:
        x = pattern(20 * CHUNK)
        calls = 0

        def then_fail(real: Any, nth: int) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == nth:
                    raise RuntimeError("injected")
                return real(*args, **kwargs)

            return call

        async def main():
            with monkeypatch.context() as patch:
                if when == "filling":
                    patch.setattr(Batch, "add", then_fail(Batch.add, 5))
                elif when == "submitting":
                    patch.setattr(driver, "copy", then_fail(driver.copy, 5))
                else:
                    patch.setattr(driver, "record", then_fail(driver.record, 5))
                with pytest.raises(RuntimeError, match="injected"):
                    await aiogpu.to_device(x)
            await until(lambda: engine.chunks.used_bytes == 0)
            assert torch.equal(await aiogpu.to_device(x), x)

        run_asyncio(main)


def test_an_upload_that_breaks_off_is_not_left_while_a_copy_thread_still_reads_for_it(monkeypatch):
    """Its chunk and its source would be somebody else's by then."""
    gate, returned = threading.Event(), threading.Event()
    left: list[bool] = []
    copiers: list[threading.Thread] = []
    fill = Lane._fill

    def slowly(lane: Lane, load: Any, rows: bool, plan: Any) -> None:
        if not copiers:
            fill(lane, load, rows, plan)
        else:
            load.part = Part(1)
        work = load.part.run if copiers else lambda piece: None
        copiers.append(threading.Thread(target=work, args=(lambda: gate.wait(10),)))
        copiers[-1].start()

    def fails(*args: Any) -> None:
        raise RuntimeError("injected")

    with small_cpu(driver := UnpinnedCpu()) as engine:

        def upload() -> None:
            lane = Lane(engine, driver.open_stream("copy"))
            with contextlib.suppress(RuntimeError):
                lane.upload(torch.empty(3 * CHUNK), torch.ones(3 * CHUNK))
            left.append(gate.is_set())
            returned.set()
            lane.give_back()

        monkeypatch.setattr(Lane, "_fill", slowly)
        monkeypatch.setattr(driver, "copy", fails)
        thread = threading.Thread(target=upload)
        thread.start()
        assert not returned.wait(0.1)
        gate.set()
        for each in (thread, *copiers):
            each.join(10)
        assert len(copiers) > 1
        assert left == [True]
        assert engine.chunks.used_bytes == 0


def test_what_copy_threads_write_into_out_shows_in_its_version(run_asyncio):
    """Autograd and debug mode must see it."""
    with small_virtual(pinned_bytes=0):

        async def main():
            out = torch.zeros(10 * CHUNK, dtype=torch.uint8)
            before = out._version
            await aiogpu.to_host(pattern(10 * CHUNK), out=out)
            assert out._version > before
            with torch.inference_mode():
                out = torch.zeros(10 * CHUNK, dtype=torch.uint8)
            await aiogpu.to_host(pattern(10 * CHUNK), out=out)
            assert torch.equal(out, pattern(10 * CHUNK))

        run_asyncio(main)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    sizes=st.lists(st.integers(SLOT + 1, 12 * CHUNK), min_size=1, max_size=6),
    chunks=st.integers(2, 5),
    pinned_bytes=st.sampled_from([0, 2**30]),
    failures=st.sampled_from([0, 0, 1, 3, 10**6]),
    strided=st.booleans(),
    seed=st.integers(0, 10**6),
)
@pytest.mark.filterwarnings("ignore:aiogpu could not page-lock")
def test_any_mix_of_transfers_is_exact_whatever_the_order_of_the_devices_streams(
    run_asyncio, sizes, chunks, pinned_bytes, failures, strided, seed
):
    rng = random.Random(seed)
    with small_virtual(auto=False, chunks=chunks, pinned_bytes=pinned_bytes) as (device, engine):
        device.pin_failures = failures
        xs = [pattern(2 * size, i)[:: 2 if strided else 1] for i, size in enumerate(sizes)]
        results: list[Any] = [None] * len(xs)

        async def one(index: int) -> None:
            there = await aiogpu.to_device(xs[index])
            results[index] = await aiogpu.to_host(there)

        async def move() -> None:
            while any(result is None for result in results) or not device.idle:
                streams = device.movable()
                if streams:
                    device.step(rng.choice(streams))
                    device.deliver()
                if not streams or rng.random() < 0.2:
                    await anyio.lowlevel.checkpoint()

        async def main() -> None:
            async with aiogpu.Runtime(spin=float("inf")), anyio.create_task_group() as group:
                group.start_soon(move)
                for index in range(len(xs)):
                    group.start_soon(one, index)

        run_asyncio(main)
        assert all(torch.equal(x, y) for x, y in zip(xs, results, strict=True))
        assert engine.chunks.used_bytes == engine.slots.used_bytes == 0
        assert engine.chunks.count <= engine.chunks.limit


#: 10^5 of them are the real test: AIOGPU_SOAK=100000 python -m pytest tests/test_ring.py -k soak
SOAK = int(os.environ.get("AIOGPU_SOAK", "400"))


@pytest.mark.timeout(max(60, SOAK // 10))
@pytest.mark.parametrize("kind", ["virtual", "threads"])
def test_soak_of_random_transfers_and_cancellations(run_asyncio, moving, blocking_until, kind):
    """C70, C72: not one wrong byte; nothing left in pools and registry."""
    rng = random.Random(SOAK)
    sizes = [1, SLOT, SLOT + 1, PIECE, CHUNK, CHUNK + 1, 3 * CHUNK, 17 * CHUNK + 5]
    sources = [pattern(size, index) for index, size in enumerate(sizes)]
    survived = 0
    with contextlib.ExitStack() as stack:
        if kind == "virtual":
            device, engine = stack.enter_context(small_virtual(auto=False, chunks=3, pinned_bytes=4000))
            stack.enter_context(moving(device))
        else:
            engine = stack.enter_context(small_cpu(UnpinnedCpu(), chunks=3, pinned_bytes=4000))

        async def one(index: int) -> None:
            nonlocal survived
            x = rng.choice(sources)
            if rng.random() < 0.3:
                x = torch.stack([x, x.flip(0)])[:, : max(1, x.numel() // 2)]
            expected = x.clone()
            with anyio.CancelScope() as scope:
                if rng.random() < 0.4:
                    scope.deadline = anyio.current_time() + rng.random() * 0.004
                there = await aiogpu.to_device(x)
                assert torch.equal(there, expected)
                back = await aiogpu.to_host(there)
                assert torch.equal(back, expected)
                out = torch.zeros(x.shape[::-1], dtype=x.dtype)
                out = out.t() if x.dim() == 2 else out
                assert torch.equal(await aiogpu.to_host(there, out=out), expected)
                survived += 1

        async def main() -> None:
            await aiogpu.amap(one, range(SOAK // 3), limit=24)
            await settled()
            stats = aiogpu.stats()
            assert (stats.pending, stats.operations, stats.staging_bytes_in_use) == (0, 0, 0)

        run_asyncio(main, limit=max(50, SOAK // 10))
        assert survived > SOAK // 12
        assert engine.chunks.used_bytes == engine.slots.used_bytes == 0
        # A staging thread may give its stream back a moment after the transfer has ended.
        blocking_until(lambda: engine.uploads.in_use == engine.downloads.in_use == 0)


def test_a_download_through_chunks_does_not_wait_for_others_kernels(run_asyncio, until):
    """Law of downloads.py: no thread of ours ever waits for them, and it has chunks in hand. Even when more
    downloads wait for their producers than there are streams for these."""
    size = 8 * CHUNK
    waiting, streams = 14, 7  # of 12 and 8
    with small_virtual(auto=False, pinned_bytes=waiting * size) as (device, engine):

        async def main():
            x = torch.arange(size).to(torch.uint8)
            latches, ops, done = [], [], []

            @aiogpu.task
            async def slow() -> None:
                latches.append(device.latch())
                ops.extend(aiogpu.to_host(x) for _ in range(waiting // streams))
                await aiogpu.gather(*ops[-2:])

            @aiogpu.task
            async def quick() -> None:
                done.append(torch.equal(await aiogpu.to_host(x), x))

            def moved(predicate: Callable[[], object]) -> Callable[[], object]:
                return lambda: (device.run_all(), predicate())[1]

            async with anyio.create_task_group() as group:
                for _ in range(streams):
                    group.start_soon(slow)
                await until(moved(lambda: sum(op._state.value == "in flight" for op in ops) == waiting))
                group.start_soon(quick)
                await until(moved(lambda: done))
                assert done == [True]
                assert engine.chunks.used_bytes == 0
                assert not any(op.done() for op in ops)
                for latch in latches:
                    latch.release()
                await until(moved(lambda: all(op.done() for op in ops)))
            reactor = aiogpu.current_runtime().reactor  # the tasks' ends are on the device, too
            await until(moved(lambda: device.idle and not reactor.pending))

        run_asyncio(main)
