"""The batcher's pure parts: who makes the next batch, how large it may be, how items become a batch."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiogpu._batching import waiting
from aiogpu._batching.collate import cut, describe, stack
from aiogpu._batching.deadlines import Deadlines
from aiogpu._batching.entry import Entry, State
from aiogpu._batching.forecast import Forecast
from aiogpu._batching.sizes import RECOVERY, BatchSizes
from aiogpu._batching.waiting import PATIENCE, WaitingCalls

CPU = torch.device("cpu")


# -- the queue, against a model --------------------------------------------------------------------


class Queue(RuleBasedStateMachine):
    """Calls come, leave and are taken; the model is a list of those that wait."""

    @initialize(
        limit=st.integers(1, 5), most=st.integers(1, 40), share=st.integers(1, 40), delay=st.booleans()
    )
    def make(self, limit: int, most: int, share: int, delay: bool) -> None:
        self.queue = WaitingCalls(most, share, max_cost=6.0)
        self.limit = limit
        self.waiting: list[Entry] = []
        self.delay = delay
        self.now = 0.0
        self.passed_over: dict[int, int] = {}

    @rule(
        priority=st.integers(-1, 1),
        client=st.sampled_from([None, "a", "b", "c"]),
        cost=st.sampled_from([0.0, 1.0, 2.5, 6.0]),
        signature=st.sampled_from([0, 0, 0, 1]),
    )
    def put(self, priority: int, client: str | None, cost: float, signature: int) -> None:
        self.now += 1
        mine = sum(entry.client == client for entry in self.waiting)
        refused = self.queue.refusal(client)
        room = len(self.waiting) < self.queue.most and (client is None or mine < self.queue.most_per_client)
        assert (refused is None) == room
        if room:
            entry = Entry(
                object(),
                waiter=None,
                born=self.now,
                priority=priority,
                client=client,
                cost=cost,
                signature=signature,
            )
            self.queue.put(entry)
            self.waiting.append(entry)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        entry = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        entry.leave()
        self.queue.drop(entry)

    @rule()
    def take(self) -> None:
        self.now += 1
        before = self.now - 10 if self.delay else math.inf
        impatient = self.queue._passed_over >= PATIENCE
        batch = self.queue.take(self.limit, self.now, before)
        if not batch:
            assert not self.due(before)
            return
        assert self.due(before)
        assert len(batch) <= self.limit
        assert sum(entry.cost for entry in batch) <= 6.0
        assert len({entry.signature for entry in batch}) == 1
        assert all(entry.state is State.RUNNING for entry in batch)
        oldest = min(self.waiting, key=lambda entry: entry.number)
        for entry in batch:
            self.waiting.remove(entry)
        rest = [entry for entry in self.waiting if entry.signature == batch[0].signature]
        if not (impatient and oldest in batch):  # else they went by age
            # Nobody more urgent of the same kind was left behind.
            assert all(entry.priority >= batch[-1].priority for entry in rest)
            # Of one client and priority, in order.
            for taken in batch:
                for left in rest:
                    if (left.client, left.priority) == (taken.client, taken.priority):
                        assert left.number > taken.number
        if len(batch) < self.limit and rest:  # the next one did not fit
            assert sum(entry.cost for entry in batch) + max(entry.cost for entry in rest) > 6.0
        if oldest in self.waiting and not self.delay:
            self.passed_over[oldest.number] = self.passed_over.get(oldest.number, 0) + 1
            assert self.passed_over[oldest.number] <= PATIENCE + 1

    def due(self, before: float) -> bool:
        for signature in {entry.signature for entry in self.waiting}:
            group = [entry for entry in self.waiting if entry.signature == signature]
            if len(group) >= self.limit or sum(entry.cost for entry in group) >= 6.0:
                return True
            if any(entry.born <= before for entry in group):
                return True
        return False

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert len(self.queue) == len(self.waiting)
        assert self.queue.cost == pytest.approx(sum(entry.cost for entry in self.waiting))
        assert self.queue.oldest_born() == min((entry.born for entry in self.waiting), default=math.inf)
        assert self.queue.ahead(5, None) <= len(self.waiting)
        clients = [entry.client for entry in self.waiting if entry.client is not None]
        assert self.queue._clients == {client: clients.count(client) for client in set(clients)}
        if not self.waiting:
            assert not self.queue._groups
            assert not self.queue._levels

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            assert sorted(e.number for e in self.queue.clear()) == [e.number for e in self.waiting]
            assert len(self.queue) == 0


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


def entries(queue: WaitingCalls, count: int, **options: Any) -> list[Entry]:
    made = [Entry(i, waiter=None, born=0.0, **options) for i in range(count)]
    for entry in made:
        queue.put(entry)
    return made


def test_calls_that_leave_do_not_pile_up():
    """A queue that stands still under a storm of cancellations stays small."""
    queue = WaitingCalls(10_000, 10_000)
    entries(queue, 3)
    for _ in range(5_000):
        (entry,) = entries(queue, 1)
        entry.leave()
        queue.drop(entry)
    (group,) = queue._groups.values()
    assert len(group._by_age) < 100
    assert len(group._by_rank) < 100


@pytest.mark.parametrize("before", [math.inf, 0.5], ids=["at once", "when full or late"])
def test_a_batch_does_not_look_at_every_shape_that_waits(monkeypatch, before):
    looks = []
    for name in ("oldest", "first"):
        real = getattr(waiting._Group, name)
        monkeypatch.setattr(waiting._Group, name, lambda self, real=real: looks.append(1) or real(self))
    queue = WaitingCalls(10_000, 10_000)
    for shape in range(1000):
        entries(queue, 2, signature=shape)
    queue.take(2, 1.0, before)  # after a standstill, all of them become due
    looks.clear()
    for _ in range(100):
        assert len(queue.take(2, 1.0, before)) == 2
    assert len(looks) < 100 * 20


def test_a_client_is_as_many_calls_ahead_as_fairness_gives_it():
    queue = WaitingCalls(100, 100)
    entries(queue, 50, client="greedy")
    assert queue.ahead(0, "greedy") == 50
    assert queue.ahead(0, "modest") == 1
    assert queue.ahead(-1, "modest") == 0


# -- an entry's life -------------------------------------------------------------------------------


class Loop:
    """Stands in for a door."""

    def __init__(self) -> None:
        self.woken = 0

    def settle(self, waiter: Any, error: BaseException | None) -> None:
        assert error is None
        self.woken += 1


ENDS = {
    "succeed": lambda entry, loop: entry.succeed(loop, "result", None),
    "fail": lambda entry, loop: entry.fail(loop, LookupError("failed")),
    "expire": lambda entry, loop: entry.expire(loop, TimeoutError("late")),
    "leave": lambda entry, loop: entry.leave(),
}


@pytest.mark.parametrize("started", [False, True], ids=["waiting", "running"])
@pytest.mark.parametrize("second", ENDS)
@pytest.mark.parametrize("first", ENDS)
def test_an_entry_ends_once_whoever_comes_second(first, second, started):
    loop: Any = Loop()
    entry = Entry(torch.ones(1), waiter=None, born=0.0)
    if started:
        entry.start(1.0)
    ENDS[first](entry, loop)
    ENDS[second](entry, loop)
    assert entry.state is State.OVER
    assert entry.item is None
    assert loop.woken == (first != "leave")
    assert entry.expired == (first == "expire")
    if second == "leave":
        assert (entry.result, entry.error) == (None, None)
    elif first == "succeed":
        assert entry.outcome() == "result"
    elif first == "leave":
        assert entry.outcome() is None
    else:
        with pytest.raises(LookupError if first == "fail" else TimeoutError):
            entry.outcome()


# -- deadlines, sizes, forecast --------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=300))
@settings(max_examples=30, deadline=None)
def test_deadlines_give_out_exactly_those_whose_time_is_over(calls):
    deadlines = Deadlines()
    expected = []
    for number, (deadline, over) in enumerate(calls):
        entry = Entry(0, waiter=None, born=0.0)
        entry.number = number
        deadlines.add(deadline, entry)
        if over:
            entry.leave()
        elif deadline <= 50:
            expected.append(entry)
    found = deadlines.expired(50)
    assert sorted(found, key=lambda e: e.number) == expected
    assert deadlines.next() > 50


def test_deadlines_of_calls_that_are_over_do_not_pile_up():
    deadlines = Deadlines()
    for number in range(10_000):
        entry = Entry(0, waiter=None, born=0.0)
        entry.number = number
        deadlines.add(1e9, entry)
        entry.leave()
    assert len(deadlines._heap) < 300


def test_the_limit_falls_and_comes_back():
    sizes = BatchSizes(20)
    assert sizes.out_of_memory(20)
    assert (sizes.limit, sizes.lowered) == (10, True)
    assert sizes.out_of_memory(5)  # a batch that was formed when memory was shorter still
    assert sizes.limit == 2
    assert not sizes.out_of_memory(1)
    assert sizes.limit == 1
    limits = []
    for _ in range(RECOVERY * 6):
        sizes.succeeded()
        limits.append(sizes.limit)
    assert limits[::RECOVERY][:6] == [1, 2, 4, 8, 16, 20]
    assert not sizes.lowered


def test_preferred_sizes_are_padded_to_and_fallen_back_on():
    sizes = BatchSizes(16, (16, 1, 4))
    assert [sizes.padded(n) for n in (1, 2, 4, 5, 16)] == [1, 4, 4, 16, 16]
    assert sizes.out_of_memory(9)
    assert sizes.limit == 4
    for _ in range(RECOVERY):
        sizes.succeeded()
    assert sizes.limit == 16


def test_the_forecast_is_the_typical_time_that_one_batch_holds_up_the_next():
    forecast = Forecast()
    assert forecast.wait(1, 3) == 0.0
    forecast.note(0.0, 30.0)  # compiles
    forecast.note(30.0, 31.0)
    forecast.note(30.5, 32.0)  # beside the one before: one second more
    assert forecast.typical == 1.0
    assert forecast.wait(2, 3) == 5.0
    assert forecast.wait(2, 3, elapsed=forecast.elapsed(30.0, now=32.25)) == 4.75
    assert forecast.wait(2, 3, elapsed=forecast.elapsed(33.0, now=99.0)) == 4.0  # late, not done


# -- collate ---------------------------------------------------------------------------------------


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Record:
    x: Any
    y: Any = None


tensors = st.builds(lambda v, n: torch.full((n, 2), float(v)), st.integers(0, 9), st.integers(0, 3))
leaves = st.one_of(
    tensors,
    st.integers(0, 9).map(lambda v: numpy.full((2,), v, "i4")),
    st.integers(-5, 5),
    st.booleans(),
    st.floats(-4, 4, width=32),
    st.sampled_from(["a", "b"]),
)
nested = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=2),
        st.tuples(children, children),
        st.builds(Pair, children, children),
        st.builds(Record, children, children),
        st.dictionaries(st.sampled_from("xyz"), children, max_size=2),
    ),
    max_leaves=6,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor | numpy.ndarray) or isinstance(b, torch.Tensor):
        return torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Record):
        return type(b) is Record and same(a.x, b.x) and same(a.y, b.y)
    return bool(a == b)


@given(st.lists(nested, min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_what_has_one_signature_can_be_stacked_and_comes_back_as_it_was(items):
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(describe(item, CPU)[0], []).append(item)
    for group in groups.values():
        results = cut(stack(group), len(group))
        assert all(map(same, group, results))


def test_items_are_told_apart_by_structure_shape_dtype_and_type():
    different = [
        torch.ones(2),
        torch.ones(3),
        torch.ones(2, dtype=torch.int32),
        torch.ones(2).to_sparse(),
        numpy.ones(2, "f4"),
        [torch.ones(2)],
        (torch.ones(2),),
        {"a": torch.ones(2)},
        {"b": torch.ones(2)},
        Pair(torch.ones(2), 1),
        Pair(torch.ones(2), 1.0),
        Record(torch.ones(2)),
        1,
        2**63,
        True,
        1.0,
        "x",
        None,
    ]
    assert len({describe(item, CPU)[0] for item in different}) == len(different)


def test_bytes_that_are_not_on_the_device_are_counted():
    meta = torch.device("meta")
    assert describe(torch.ones(3), meta)[1] == 16
    assert describe(torch.ones(0), meta)[1] == 16  # an empty tensor has to get there, too
    assert describe(torch.ones(3, device="meta"), meta)[1] == 0
    assert describe({"x": torch.ones(5), "y": [numpy.ones(2), "z"], "n": 3}, meta)[1] == 32 + 16 + 16
    assert describe(["a", None], meta)[1] == 0
    for odd in (
        torch.nn.Linear(1, 1),  # moves itself
        torch.ones(3).to_sparse(),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, device="meta"),  # from another device
    ):
        assert describe([odd, torch.ones(1)], CPU)[1] == math.inf


def test_containers_of_other_kinds_are_kept():
    ordered = OrderedDict(x=torch.ones(2), y=["a", "b"])
    first, second = cut(ordered, 2)
    assert type(first) is OrderedDict
    assert (first["y"], second["y"]) == ("a", "b")
    values, indices = cut(torch.ones(2, 3).max(1), 2)[0]
    assert (values.shape, indices.shape) == ((), ())


def test_a_list_with_tensors_is_structure_and_one_without_is_a_column():
    """By what is in it, never by its length: two feature maps in a batch of two are not two results."""
    maps = [torch.ones(2, 3), torch.zeros(2, 5)]
    first, _ = cut(maps, 2)
    assert [m.shape for m in first] == [(3,), (5,)]
    assert cut([["a", "b"], ["c"]], 2) == [["a", "b"], ["c"]]
    assert cut(stack([["a", "b"], ["c", "d"]]), 2) == [["a", "b"], ["c", "d"]]


def test_a_default_device_in_place_does_not_change_what_numbers_become():
    with torch.device("meta"):
        assert stack([1, 2]).device == CPU
