"""The staging ring and its copy threads: whose turn it is, who never waits, what is never mixed up."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from _small_blocks import CHUNK, SLOT, UnpinnedCpu, small_cpu, small_virtual
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import aiogpu
from aiogpu.drivers.cpu import CpuDriver
from aiogpu.transfers import staging
from aiogpu.transfers.crew import Crew
from aiogpu.transfers.hostcopy import clear, move
from aiogpu.transfers.layout import flat, pairs, same_order
from aiogpu.transfers.pinned import StagingMemory
from aiogpu.transfers.ring import Ring
from aiogpu.transfers.segments import Cutter, Rows, Views, segment_bytes
from aiogpu.transfers.staging import Lane
from aiogpu.transfers.submitting import Submissions

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


def in_thread(fn: Callable[..., object], *args: Any, **kwargs: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: fn(*args, **kwargs))
    thread.start()
    return thread


@pytest.mark.parametrize("how", ["one core", "busy with others", "ended"])
@pytest.mark.parametrize("helps", [True, False])
def test_whoever_asks_gets_it_done_without_any_help(how, helps):
    crew = Crew(1 if how == "one core" else 3, nothing)
    gate, blocked = threading.Event(), threading.Semaphore(0)
    others = []
    if how == "busy with others":
        others.append(in_thread(crew.run, 3, lambda _: (blocked.release(), gate.wait(10))))
        for _ in range(3):
            assert blocked.acquire(timeout=5)
        helps = True  # who does not help waits for those who are busy
    if how == "ended":
        assert crew.close(5)
    done: list[int] = []
    crew.run(100, done.append, help=helps)
    assert sorted(done) == list(range(100))
    gate.set()
    for each in others:
        each.join(5)
    assert crew.close(5)


@pytest.mark.parametrize("helps", [True, False])
def test_helpers_really_help(crew, helps):
    """As many segments that need each other need as many threads."""
    barrier = threading.Barrier(4 if helps else 3, timeout=10)
    crew.run(barrier.parties, lambda _: barrier.wait(), help=helps)


def test_a_single_segment_is_done_by_whoever_asks(crew):
    ran: list[threading.Thread] = []
    crew.run(1, lambda _: ran.append(threading.current_thread()))
    crew.run(0, lambda _: ran.append(threading.current_thread()))
    assert ran == [threading.current_thread()]


def test_copy_threads_take_turns_between_transfers(blocking_until):
    crew = Crew(2, nothing)
    gate, begun = threading.Event(), threading.Event()
    log: list[str] = []

    def first(index: int) -> None:
        begun.set()
        assert gate.wait(10)
        log.append("long")

    # Nobody of those who ask helps, so the one copy thread does everything.
    threads = [in_thread(crew.run, 100, first, help=False)]
    assert begun.wait(5)
    for name in ("a", "b"):
        threads.append(in_thread(crew.run, 3, lambda _, name=name: log.append(name), help=False))
        blocking_until(lambda: len(crew._batches) == len(threads))
    gate.set()
    for thread in threads:
        thread.join(10)
    assert log[:9] == ["long", "long", "a", "b", "long", "a", "b", "long", "a"]
    assert log.count("long") == 100
    assert crew.close(5)


def test_what_a_segment_raises_is_raised_to_whoever_waits_when_no_other_runs_any_more(crew):
    """Those that nobody has begun by then are left out: their chunks are somebody else's."""
    begun, gate = threading.Semaphore(0), threading.Event()
    running = [0]
    lock = threading.Lock()

    def step(index: int) -> None:
        if index == 0:
            for _ in range(3):
                assert begun.acquire(timeout=5)
            raise ValueError("mine")
        with lock:
            running[0] += 1
        begun.release()
        assert gate.wait(10)
        with lock:
            running[0] -= 1

    def ask() -> None:
        with pytest.raises(ValueError, match="mine"):
            crew.run(1000, step)
        left.append(running[0])

    left: list[int] = []
    thread = in_thread(ask)
    assert not thread.join(0.05)
    assert left == []
    gate.set()
    thread.join(10)
    assert left == [0]
    assert not crew._batches
    done: list[int] = []
    crew.run(20, done.append)  # and the threads are still there
    assert sorted(done) == list(range(20))


def test_a_crew_keeps_nothing_of_what_it_has_done_or_failed_with(crew):
    class Tensor: ...

    def ask(fails: bool) -> weakref.ref[Tensor]:
        tensor = Tensor()

        def step(_: int, tensor: Tensor = tensor) -> None:
            if fails:
                raise ValueError("mine")

        with contextlib.suppress(ValueError):
            crew.run(10, step)
        return weakref.ref(tensor)

    gc.disable()
    try:
        found = [ask(False), ask(True)]
        barrier = threading.Barrier(4, timeout=10)
        crew.run(4, lambda _: barrier.wait())  # all have gone on
        assert [each() for each in found] == [None, None]
    finally:
        gc.enable()


def test_copy_threads_run_without_grad(crew):
    seen: list[bool] = []
    barrier = threading.Barrier(3, timeout=10)
    crew.run(3, lambda _: (barrier.wait(), seen.append(torch.is_grad_enabled())), help=False)
    assert seen == [False] * 3


def test_torchs_thread_settings_do_not_count_and_are_not_changed(crew):
    """Servers set them to 1; they belong to the whole process."""
    before = torch.get_num_threads()
    rows = Rows(torch.ones(MIB), torch.empty(MIB), Cutter(4 * MIB, 4096, 4))
    chunk = [rows.row(i, torch.empty(4096, dtype=torch.uint8)) for i in range(rows.count)]
    crew.run(rows.count, lambda i: rows.fill(i, chunk[i]))
    seen: list[int] = []
    in_thread(lambda: seen.append(torch.get_num_threads())).join()
    assert [torch.get_num_threads(), *seen] == [before, before]


# -- submissions -------------------------------------------------------------------------------------


def test_what_comes_while_a_thread_submits_is_submitted_by_it_in_one_go():
    box: Submissions[int] = Submissions()
    begun, go = threading.Event(), threading.Event()
    calls: list[tuple[int, list[int]]] = []

    def submit(items):
        calls.append((threading.get_ident(), items))
        begun.set()
        assert go.wait(10)

    first = in_thread(box.add, 0, submit, pytest.fail)
    assert begun.wait(10)
    others = [in_thread(box.add, number, submit, pytest.fail) for number in (1, 2, 3)]
    for each in others:
        each.join(10)
        assert not each.is_alive(), "it waits for the thread that submits"
    assert len(calls) == 1
    go.set()
    first.join(10)
    (one, before), (same, after) = calls
    assert one == same
    assert before == [0]
    assert sorted(after) == [1, 2, 3]


def test_what_was_left_to_a_submission_that_fails_is_given_up_and_later_ones_are_made():
    box: Submissions[int] = Submissions()
    begun, go = threading.Event(), threading.Event()
    given_up: list[int] = []
    errors: list[str] = []

    def fail(items):
        begun.set()
        assert go.wait(10)
        raise RuntimeError(str(items))

    def add():
        try:
            box.add(0, fail, given_up.extend)
        except RuntimeError as error:
            errors.append(str(error))

    first = in_thread(add)
    assert begun.wait(10)
    box.add(1, pytest.fail, pytest.fail)
    go.set()
    first.join(10)
    assert (errors, given_up) == (["[0]"], [1])
    made: list[int] = []
    box.add(2, made.extend, pytest.fail)
    assert made == [2]


def test_everything_is_submitted_once_and_by_the_time_that_all_calls_have_returned():
    box: Submissions[int] = Submissions()
    made: list[int] = []
    submitting = threading.Lock()

    def submit(items):
        assert submitting.acquire(blocking=False), "two threads submit at once"
        made.extend(items)
        submitting.release()

    def work(start):
        for number in range(start, start + 500):
            box.add(number, submit, pytest.fail)

    threads = [in_thread(work, 500 * i) for i in range(6)]
    for each in threads:
        each.join(20)
    assert sorted(made) == list(range(3000))


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


@given(nbytes=st.integers(1, 2**36), chunk=st.sampled_from([1024, 64, 192, 8 * MIB]))
def test_a_segment_fits_into_a_chunk_and_every_dtype_into_a_segment(nbytes, chunk):
    each = segment_bytes(nbytes, chunk)
    assert 64 <= each <= chunk
    assert each % 64 == 0
    assert each >= chunk // 4 // 64 * 64
    assert nbytes <= 2 * MIB or nbytes > each


@pytest.mark.parametrize(("nbytes", "each"), [(1, 2), (2, 2), (16, 2), (64, 4), (256, 4), (1024, 8)])
def test_segments_grow_with_the_transfer(nbytes, each):
    """In MiB; what was fastest on an H200."""
    assert segment_bytes(nbytes * MIB, 8 * MIB) == each * MIB


@given(
    tensors=st.lists(st.integers(1, 2**31), min_size=1, max_size=8),
    chunk=st.sampled_from([1024, 64, 192, 8 * MIB, 100]),
    threads=st.integers(1, 16),
)
def test_tensors_are_cut_into_whole_cache_lines_no_longer_than_a_chunk(tensors, chunk, threads):
    tensors = [min(nbytes, 4096 * chunk) for nbytes in tensors]
    cutter = Cutter(sum(tensors), chunk, threads)
    for nbytes in tensors:
        bounds = cutter.cut(nbytes)
        assert (bounds[0], bounds[-1]) == (0, nbytes)
        assert all(bound % 64 == 0 for bound in bounds[:-1])
        sizes = [end - start for start, end in itertools.pairwise(bounds)]
        assert all(0 < size <= max(64, chunk) for size in sizes)
        assert all(size >= chunk // 8 // 64 * 64 for size in sizes[:-1]), "crumbs"


def test_segments_shrink_towards_the_end_so_that_all_threads_are_done_at_once():
    """For ten threads, in MiB: whole chunks, until each thread's share of what is left is less."""
    bounds = Cutter(256 * MIB, 8 * MIB, 10).cut(256 * MIB)
    sizes = [(end - start) / MIB for start, end in itertools.pairwise(bounds)]
    assert sizes[:22] == [8.0] * 22
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert sizes[-2] == 4.0
    assert 2.0 <= sizes[-1] < 6.0
    assert len(sizes) < 42
    short = Cutter(16 * MIB, 8 * MIB, 10).cut(16 * MIB)
    assert [end - start for start, end in itertools.pairwise(short)] == [2 * MIB] * 8


@settings(max_examples=100, deadline=None)
@given(host=strided(), nbytes=st.sampled_from([64, 128, 1024]), alike=st.booleans())
def test_segments_are_every_element_once_both_ways(host, nbytes, alike):
    if alike:
        host = host.contiguous()
    if not host.numel():
        return
    there = torch.zeros(host.shape, dtype=host.dtype)
    back = torch.zeros_like(host, memory_format=torch.contiguous_format)
    up: Rows | Views
    down: Rows | Views
    if alike:
        up, down = (Rows(each, there, Cutter(each.nbytes, nbytes, 3)) for each in (host, back))
    else:
        up, down = Views(host, there, nbytes), Views(back, there, nbytes)
    for index in random.sample(range(up.count), up.count):
        row = torch.full_like(up.there(index), 7)
        assert row.nbytes <= nbytes
        up.fill(index, row)
        assert torch.equal(up.host(index), row)
        up.there(index).copy_(row)
    assert torch.equal(there, host)
    for index in random.sample(range(down.count), down.count):
        down.empty(index, down.there(index).clone())
    assert torch.equal(back, host)


def test_bytes_are_moved_and_cleared_where_they_belong_and_nowhere_else():
    source = torch.randint(0, 256, (97,), dtype=torch.uint8)
    around = torch.full((97 + 64,), 7, dtype=torch.uint8)
    move(around.data_ptr() + 32, source.data_ptr(), 97)
    assert torch.equal(around[32:-32], source)
    assert around[:32].unique().tolist() == around[-32:].unique().tolist() == [7]
    clear(around.data_ptr() + 32, 97)
    assert around[32:-32].count_nonzero() == 0
    assert around[:32].unique().tolist() == around[-32:].unique().tolist() == [7]


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

    def take(self, owner: str = "", *, short: bool = False, grow: bool = True) -> torch.Tensor | None:
        return self.ring.take(owner or self, short=short, grow=grow, give_up=lambda: self.stopped)

    def wait_in_thread(self, name: str, *, short: bool = False, until: Callable[..., None]) -> None:
        queue = self.ring._short if short else self.ring._long
        before = len(queue)
        self.threads.append(in_thread(lambda: self.got.append((name, self.take(short=short)))))
        until(lambda: len(queue) == before + 1)

    def fly(self, chunk: torch.Tensor, owner: object = "") -> Event:
        event = Event()
        self.ring.fly(owner, event, [chunk])
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


def test_there_are_no_more_chunks_than_the_limit_and_no_more_than_were_needed_at_once(rig):
    r = rig(limit=3)
    for _ in range(5):
        r.ring.give(r.take())
    assert r.ring.count == 1
    r.fly(r.take()).done = True
    r.ring.give(r.take())
    assert r.ring.count == 1, "the device was done with it"
    chunks = [r.take() for _ in range(3)]
    assert r.ring.count == 3
    r.fly(chunks.pop()).done = True
    assert r.take() is not None
    assert (r.ring.count, r.memory.allocations) == (3, 3)


def test_a_transfer_that_has_something_in_flight_waits_instead_of_taking_new_memory(rig, blocking_until):
    r = rig(limit=3)
    event = r.fly(r.take("a"), "a")
    r.threads.append(in_thread(lambda: r.got.append(("a", r.take("a")))))
    blocking_until(lambda: r.ring.waits == 1)
    assert r.ring.count == 1
    event.done = True
    blocking_until(lambda: r.got)
    assert r.take("b") is not None
    assert r.ring.count == 2


def test_how_many_chunks_there_are_depends_on_what_is_expected_not_on_who_is_faster(rig):
    """So after the first transfer of a kind, nothing is page-locked any more."""
    r = rig(limit=4)
    r.ring.expect(3)
    for _ in range(3):
        r.ring.give(r.take())
    assert r.ring.count == 3
    r.ring.expect(2)
    r.ring.expect(10)
    for _ in range(3):
        r.ring.give(r.take())
    assert (r.ring.count, r.memory.allocations) == (4, 4)
    r.ring.trim()
    r.ring.give(r.take())
    assert r.ring.count == 1, "what was expected before is forgotten with it"


def test_chunks_are_page_locked_one_at_a_time(rig, monkeypatch):
    """It holds up the launches of every other thread."""
    r = rig(limit=8)
    r.ring.expect(8)
    lock = threading.Lock()
    pinned = r.device.pinned

    def alone(*args: Any) -> torch.Tensor:
        assert lock.acquire(blocking=False)
        time.sleep(0)
        block = pinned(*args)
        lock.release()
        return block

    monkeypatch.setattr(r.device, "pinned", alone)
    barrier = threading.Barrier(8, timeout=10)
    threads = [in_thread(lambda: (barrier.wait(), r.got.append(("", r.take())))) for _ in range(8)]
    for thread in threads:
        thread.join(10)
    assert len({chunk.data_ptr() for _, chunk in r.got}) == 8


def test_the_chunk_that_was_given_back_last_is_taken_first(rig):
    """Its memory may still be in the caches."""
    r = rig(limit=3)
    a, b, c = (r.take() for _ in range(3))
    for chunk in (a, c, b):
        r.ring.give(chunk)
    assert [r.take() is chunk for chunk in (b, c, a)] == [True] * 3


def test_whoever_waits_gets_the_first_chunk_that_the_device_is_done_with(rig, blocking_until):
    """Not the oldest: that may be behind somebody's kernel."""
    r = rig(limit=3)
    chunks = [r.take() for _ in range(3)]
    events = [r.fly(chunk, number) for number, chunk in enumerate(chunks)]
    r.wait_in_thread("waiter", until=blocking_until)
    assert not r.got
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
    for count in (1, 2, 3):
        r.ring.give(chunk)
        blocking_until(lambda count=count: len(r.got) == count)
    assert [name for name, _ in r.got] == ["a", "b", "c"]


def test_who_asks_while_somebody_waits_overtakes_nobody_even_if_he_is_the_one_who_finds_it(
    rig, blocking_until, monkeypatch
):
    """The one who waits has not come to look yet."""
    r = rig(limit=1)
    event = r.fly(r.take())
    look = r.ring._look
    monkeypatch.setattr(r.ring, "_look", nothing)
    r.wait_in_thread("first", until=blocking_until)
    event.done = True
    first = r.threads[0].ident
    monkeypatch.setattr(r.ring, "_look", lambda: None if threading.get_ident() == first else look())
    r.threads.append(in_thread(lambda: r.got.append(("second", r.take()))))
    blocking_until(lambda: r.got)
    assert [name for name, _ in r.got] == ["first"]
    r.ring.give(r.got[0][1])
    blocking_until(lambda: len(r.got) == 2)


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


def test_a_chunk_in_flight_is_never_handed_out(rig, blocking_until):
    r = rig(limit=2)
    for chunk in [r.take(), r.take()]:
        r.fly(chunk)
    r.wait_in_thread("waiter", until=blocking_until)
    blocking_until(lambda: r.ring.waits == 1)
    assert not r.got
    assert r.ring.trim() == 0
    assert r.ring.used_bytes == 2 * 64


def test_the_end_of_a_transfer_frees_what_it_had_in_flight_and_nothing_else(rig):
    r = rig(limit=3)
    mine, other = r.take(), r.take()
    r.fly(mine, "a")
    r.fly(other, "b")
    r.ring.land("a")
    assert r.ring.used_bytes == 64
    assert r.take(grow=False) is mine
    assert r.ring.used_bytes == 2 * 64


def test_without_page_locked_memory_nobody_waits_for_any(rig):
    r = rig(blocks=0)
    with pytest.warns(RuntimeWarning, match="could not page-lock"):
        assert r.take() is None
    assert r.take(grow=False) is None
    assert (r.ring.count, r.memory.failures) == (0, 1)
    assert rig(limit=0).take() is None


def test_what_a_look_raises_is_raised_to_the_one_who_looks_and_the_queue_moves_on(rig, blocking_until):
    """A lost device: the others give up by themselves."""
    r = rig(limit=1)
    chunk = r.take()

    def fails(_: Any) -> bool:
        raise RuntimeError("lost")

    real, r.device.query = r.device.query, fails
    r.fly(chunk)
    with pytest.raises(RuntimeError, match="lost"):
        r.take()
    assert not r.ring.wanted
    r.device.query = real
    r.wait_in_thread("waiter", until=blocking_until)
    r.ring.land("")
    blocking_until(lambda: r.got)
    assert r.got[0][1] is chunk


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

    @precondition(lambda self: self.ring._free or self.ring.count < self.ring.limit or self.landable)
    @rule(grow=st.booleans())
    def take(self, grow: bool) -> None:
        before, free, landable = self.ring.count, len(self.ring._free), self.landable
        none = not free and not landable and not (grow and self.rig.device.left)
        if none and before:
            return  # it would wait
        with contextlib.suppress(RuntimeWarning):
            chunk = self.rig.take(grow=grow)
        assert (chunk is None) == none
        if chunk is not None:
            assert id(chunk) not in self.held
            still = [f for f in self.flying if f[2] is chunk]
            assert all(f[1].done for f in still), "the device still uses it"
            self.flying = [f for f in self.flying if f[2] is not chunk]
            self.held[id(chunk)] = chunk
            assert (self.ring.count == before + 1) == (not free and not landable)

    @property
    def landable(self) -> bool:
        """Is the device done with the oldest chunk of an owner?"""
        oldest = {owner: event for owner, event, _ in reversed(self.flying)}
        return any(event.done for event in oldest.values())

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
        while self.landable:
            oldest = {f[0]: f for f in reversed(self.flying)}
            done = next(f for f in oldest.values() if f[1].done)
            self.flying = [f for f in self.flying if f is not done]

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
        assert ring.used_bytes == 64 * (len(self.held) + len(self.flying))


Turns.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_a_ring_keeps_its_books_whatever_happens = pytest.mark.filterwarnings("ignore:aiogpu could not")(
    Turns.TestCase
)


# -- transfers through it ----------------------------------------------------------------------------


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("way", ["up", "down"])
def test_tensors_of_one_transfer_are_copied_side_by_side(run_asyncio, monkeypatch, way):
    """Also those that are no longer than a segment: here each copy needs the two others."""
    barrier = threading.Barrier(3, timeout=10)
    name = "fill" if way == "up" else "empty"
    real = getattr(Rows, name)
    with small_cpu(UnpinnedCpu(), pinned_bytes=0) as engine:
        assert engine.crew.threads == 3
        xs = [pattern(300 + 8 * index, index) for index in range(3)]
        strided = pattern(600)[::2]

        async def main():
            with monkeypatch.context() as patch:
                patch.setattr(Rows, name, lambda *args: (barrier.wait(), real(*args))[1])
                if way == "up":
                    back = await aiogpu.to_device([*xs, strided])
                else:
                    back = await aiogpu.to_host(xs)
                    strided_out = torch.zeros(600, dtype=torch.uint8)[::2]
                    back.append(await aiogpu.to_host(strided.clone(), out=strided_out))
            assert all(torch.equal(a, b) for a, b in zip([*xs, strided], back, strict=True))

        run_asyncio(main)


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
        take = Lane._take

        def noted(lane, short):
            asking.add(id(lane))
            chunk = take(lane, short)
            turns.append(id(lane))
            return chunk

        monkeypatch.setattr(Lane, "_take", noted)

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
                    patch.setattr(Rows, "fill", then_fail(Rows.fill, 5))
                elif when == "submitting":
                    patch.setattr(driver, "copy", then_fail(driver.copy, 5))
                else:
                    patch.setattr(driver, "record", then_fail(driver.record, 5))
                with pytest.raises(RuntimeError, match="injected"):
                    await aiogpu.to_device(x)
            await until(lambda: engine.chunks.used_bytes == 0)
            assert torch.equal(await aiogpu.to_device(x), x)

        run_asyncio(main)


@pytest.mark.parametrize("fails", ["filling", "submitting"])
def test_an_upload_that_breaks_off_is_not_left_while_a_copy_thread_still_reads_for_it(monkeypatch, fails):
    """Its chunk and its source would be somebody else's by then."""
    gate, returned, reads = threading.Event(), threading.Event(), threading.Event()
    left: list[bool] = []
    turn = itertools.count()

    def breaks() -> None:
        assert reads.wait(10)
        raise RuntimeError("injected")

    def slowly(*_: Any) -> None:
        if next(turn) == 0:
            if fails == "filling":
                breaks()
            return
        reads.set()
        assert gate.wait(10)

    with small_cpu(driver := UnpinnedCpu()) as engine:

        def upload() -> None:
            lane = Lane(engine, driver.open_stream("copy"))
            with pytest.raises(RuntimeError, match="injected"):
                lane.upload(torch.empty(3 * CHUNK), torch.ones(3 * CHUNK))
            left.append(gate.is_set())
            returned.set()
            lane.give_back()

        monkeypatch.setattr(Rows, "fill", slowly)
        if fails == "submitting":
            monkeypatch.setattr(driver, "copy", lambda *_: breaks())
        thread = in_thread(upload)
        assert reads.wait(10)
        assert not returned.wait(0.1)
        gate.set()
        thread.join(10)
        assert left == [True]
        assert engine.chunks.used_bytes == 0


@pytest.mark.parametrize("verb", ["upload", "download_through_chunks"])
def test_a_chunk_of_a_submission_that_broke_off_is_kept_until_the_device_is_done(monkeypatch, verb):
    """It may have been given to the device before."""
    with small_virtual(auto=False) as (device, engine):

        def fails(_: Any) -> None:
            raise RuntimeError("injected")

        lane = Lane(engine, device.open_stream("copy"))
        monkeypatch.setattr(device, "record", fails)
        with pytest.raises(RuntimeError, match="injected"):
            getattr(lane, verb)(torch.empty(64), pattern(256).view(torch.float32))  # one segment
        assert engine.chunks.used_bytes == CHUNK
        lane.give_back()
        assert engine.chunks.used_bytes == 0
        device.run_all()


@pytest.mark.filterwarnings("ignore:aiogpu could not page-lock")
def test_page_locked_memory_that_was_refused_is_asked_for_once_in_a_transfer(run_asyncio):
    """By each thread that asks at the same time, at most."""
    with small_virtual() as (device, engine):
        device.pin_failures = 10**6

        async def main():
            for count in (1, 2):
                x = pattern(30 * CHUNK)
                assert torch.equal(await aiogpu.to_device(x), x)
                assert 1 <= engine.memory.failures <= count * engine.crew.threads

        run_asyncio(main)


def test_a_transfer_is_short_while_all_of_it_so_far_fits_into_a_chunk(monkeypatch):
    with small_virtual(auto=True) as (device, engine):
        shorts: list[bool] = []
        take = engine.chunks.take

        def noted(owner: object, *, short: bool, **rest: Any) -> Any:
            shorts.append(short)
            return take(owner, short=short, **rest)

        monkeypatch.setattr(engine.chunks, "take", noted)
        lane = Lane(engine, device.open_stream("copy"))
        for nbytes in (200, CHUNK - 200, 1):
            lane.upload(torch.empty(nbytes, dtype=torch.uint8), pattern(nbytes))
        assert shorts[0] is shorts[-2] is True
        assert shorts[-1] is False
        lane.give_back()


def test_torch_reorders_on_one_thread_for_all_transfers(run_asyncio, monkeypatch):
    """OpenMP makes a team for each thread that calls it."""
    monkeypatch.setattr(staging, "_GRAIN", 0)
    threads: set[str] = set()
    for name in ("fill", "empty"):
        real = getattr(Views, name)

        def noted(*args: Any, real: Any = real) -> None:
            threads.add(threading.current_thread().name)
            real(*args)

        monkeypatch.setattr(Views, name, noted)
    with small_cpu(UnpinnedCpu(), pinned_bytes=0):
        xs = [pattern(20 * CHUNK, index)[::2] for index in range(4)]

        async def main():
            there = await aiogpu.gather(*map(aiogpu.to_device, xs))
            outs = [torch.zeros(20 * CHUNK, dtype=torch.uint8)[::2] for _ in xs]
            ways = zip(there, outs, strict=True)
            back = await aiogpu.gather(*(aiogpu.to_host(x, out=out) for x, out in ways))
            assert all(torch.equal(x, y) for x, y in zip(xs, back, strict=True))

        run_asyncio(main)
    assert threads == {"aiogpu-reorder-1"}


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
    chunks=st.integers(1, 5),
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
    with small_virtual(auto=False, chunks=5, pinned_bytes=pinned_bytes) as (device, engine):
        engine.chunks.limit = chunks
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
    sizes = [1, SLOT, SLOT + 1, CHUNK // 2, CHUNK, CHUNK + 1, 3 * CHUNK, 17 * CHUNK + 5]
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


def test_transfers_do_not_wait_for_chunks_that_a_failure_has_lost_for_good(run):
    """An event that cannot be recorded: nobody knows when the device is done, so the chunk stays away."""
    with small_virtual(pinned_bytes=0, chunks=2, auto=True) as (device, engine):

        async def main() -> None:
            async with aiogpu.Runtime(device.device):
                await aiogpu.to_device(torch.ones(3))
                record = engine.driver.record
                engine.driver.record = failing
                for _ in range(3):
                    with pytest.raises(RuntimeError, match="no event"):
                        await aiogpu.to_device(torch.ones(CHUNK))
                engine.driver.record = record
                lost = len(engine.leaked)
                assert lost
                for value in range(4):
                    there = await aiogpu.to_device(torch.full((CHUNK,), value))
                    assert torch.equal(await aiogpu.to_host(there), torch.full((CHUNK,), value))
                engine.leaked.clear()

        def failing(*_: Any) -> Any:
            raise RuntimeError("no event")

        run(main, limit=5.0)
        assert engine.chunks.used_bytes == 0
