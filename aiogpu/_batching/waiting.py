"""The calls that wait, and which of them make the next batch.

Law of this file: it decides and does nothing else: no time but what it is told, no event loop, no device. All
of it runs on the loop's thread, so that deciding and taking is one step.

The order is by priority; within one, fair between clients (start-time fair queueing: P. Goyal, H. Vin,
H. Cheng, SIGCOMM 1996), which for one client is first in, first out; and, so that nobody starves, the longest
waiting call is passed over by :data:`PATIENCE` batches at most.

Calls of one signature are a group. Each question about all groups (whose first call goes first, whose has
waited longest) is a heap of groups whose keys may be out of date, but only so that a group stands too far in
front; it is looked at, and put right, when it comes to the top. So a batch costs O(log n), however many
groups there are. In the same way a call that leaves stays in its group as an empty shell until it comes to
the front, or until shells are more than calls: leaving costs nothing, and nothing is longer than twice what
it holds (and a few).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator

from .entry import Entry, State

__all__ = ["PATIENCE", "WaitingCalls"]

#: Batches in a row that may be made without the call that has waited longest.
PATIENCE = 15

_SHELLS = 64  # not worth a clean-up

Rank = tuple[int, float, int]


class _Level:
    """The calls of one priority: how far fair queueing has come with each client."""

    __slots__ = ("clients", "count", "virtual_time")

    def __init__(self) -> None:
        self.count = 0
        self.virtual_time = 0.0
        #: For each client with waiting calls: their number, and where its last one ends.
        self.clients: dict[Hashable, list[float]] = {}

    def tag(self, client: Hashable, cost: float) -> float:
        """The place of one more call: behind the client's own, or, if it has none, among the first."""
        self.count += 1
        start = self.virtual_time
        record = self.clients.get(client)
        if record is None:
            record = self.clients[client] = [0, 0.0]
        elif record[1] > start:
            start = record[1]
        record[0] += 1
        record[1] = start + (cost or 1.0)  # nothing is free, or one client could fill the queue with it
        return start

    def drop(self, client: Hashable) -> None:
        self.count -= 1
        record = self.clients[client]
        record[0] -= 1
        if record[0] == 0:
            del self.clients[client]


class _Group:
    """The calls that may be in one batch: those of one signature."""

    __slots__ = ("_by_age", "_by_rank", "cost", "count", "due")

    def __init__(self) -> None:
        self.count = 0
        self.cost = 0.0
        self.due = False  # a batch of it was, when it was last looked at
        self._by_rank: list[tuple[int, float, int, Entry]] = []  # a heap
        self._by_age: deque[Entry] = deque()

    def put(self, entry: Entry) -> None:
        self.count += 1
        self.cost += entry.cost
        heapq.heappush(self._by_rank, (entry.priority, entry.tag, entry.number, entry))
        self._by_age.append(entry)

    def drop(self, entry: Entry) -> None:
        """``entry`` waits no longer."""
        self.count -= 1
        self.cost = self.cost - entry.cost if self.count else 0.0
        if len(self._by_age) > 2 * self.count + _SHELLS or len(self._by_rank) > 2 * self.count + _SHELLS:
            self._by_age = deque(self)
            self._by_rank = [(e.priority, e.tag, e.number, e) for e in self._by_age]
            heapq.heapify(self._by_rank)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entry in self._by_age if entry.state is State.WAITING)

    def oldest(self) -> Entry:
        while self._by_age[0].state is not State.WAITING:
            self._by_age.popleft()
        return self._by_age[0]

    def first(self) -> Entry:
        while self._by_rank[0][3].state is not State.WAITING:
            heapq.heappop(self._by_rank)
        return self._by_rank[0][3]

    def rank(self) -> Rank:
        """Where it stands among groups."""
        first = self.first()
        return first.priority, first.tag, first.number

    def age(self) -> Rank:
        """The same, by how long it has waited."""
        return 0, 0.0, self.oldest().number

    def full(self, limit: float, max_cost: float) -> bool:
        return self.count >= limit or self.cost >= max_cost


class _Groups:
    """Some of all groups, in an order: a heap whose keys may be too small, and never too large."""

    __slots__ = ("_all", "_belongs", "_heap", "_key")

    def __init__(
        self,
        groups: dict[Hashable, _Group],
        key: Callable[[_Group], Rank],
        belongs: Callable[[_Group], bool] = lambda group: True,
    ) -> None:
        self._all = groups
        self._key = key
        self._belongs = belongs
        self._heap: list[tuple[Rank, _Group]] = []

    def add(self, group: _Group) -> None:
        """``group``, new here, or with a smaller key than before."""
        heapq.heappush(self._heap, (self._key(group), group))
        if len(self._heap) > 2 * len(self._all) + _SHELLS:
            self._heap = [(self._key(each), each) for each in filter(self._belongs, self._all.values())]
            heapq.heapify(self._heap)

    def top(self) -> _Group | None:
        """The first one; those that do not belong here any more are forgotten on the way."""
        heap = self._heap
        while heap:
            key, group = heap[0]
            if not group.count or not self._belongs(group):
                heapq.heappop(heap)
            elif (now := self._key(group)) != key:
                heapq.heapreplace(heap, (now, group))
            else:
                return group
        return None

    def clear(self) -> None:
        self._heap.clear()


class WaitingCalls:
    """The queue of one batcher.

    Parameters
    ----------
    most:
        Calls that may wait.
    most_per_client:
        Of them, calls of one client; calls without a client are not limited by it.
    max_cost:
        What the costs of one batch may sum up to.
    """

    def __init__(self, most: int, most_per_client: int, max_cost: float = math.inf) -> None:
        self.most = most
        self.most_per_client = most_per_client
        self.max_cost = max_cost
        self.count = 0
        #: Sum of the costs of those that wait.
        self.cost = 0.0
        self._number = 0
        self._passed_over = 0
        self._limit = math.inf  # of the last batch
        self._groups: dict[Hashable, _Group] = {}
        self._due = _Groups(self._groups, _Group.rank, lambda group: group.due)
        self._young = _Groups(self._groups, _Group.age, lambda group: not group.due)
        self._ages = _Groups(self._groups, _Group.age)
        self._levels: dict[int, _Level] = {}
        self._clients: dict[Hashable, int] = {}  # waiting calls of each named client

    def __len__(self) -> int:
        return self.count

    # -- in and out --------------------------------------------------------------------------------

    def refusal(self, client: Hashable) -> str | None:
        """Why there is no room for one more call of ``client``."""
        if self.count >= self.most:
            return f"{self.count} calls are waiting already (max_queue)"
        if client is not None and (mine := self._clients.get(client, 0)) >= self.most_per_client:
            return f"this client has {mine} calls waiting already (max_queue_per_client)"
        return None

    def put(self, entry: Entry) -> None:
        entry.number = self._number
        level = self._levels.get(entry.priority)
        if level is None:
            level = self._levels[entry.priority] = _Level()
        entry.tag = level.tag(entry.client, entry.cost)
        self._number += 1
        self.count += 1
        self.cost += entry.cost
        if entry.client is not None:
            self._clients[entry.client] = self._clients.get(entry.client, 0) + 1
        group = self._groups.get(entry.signature)
        if group is None:
            group = self._groups[entry.signature] = _Group()
            group.put(entry)
            self._ages.add(group)
            self._young.add(group)
        else:
            group.put(entry)
        if not group.due:
            if group.full(self._limit, self.max_cost):
                self._make_due(group)
        elif group.first() is entry:
            self._due.add(group)  # it stands further in front now

    def drop(self, entry: Entry) -> None:
        """``entry`` waits no longer: its caller has left, or its time is over."""
        self._drop(entry, self._levels[entry.priority], self._groups[entry.signature])

    def _drop(self, entry: Entry, level: _Level, group: _Group) -> None:
        self.count -= 1
        self.cost = self.cost - entry.cost if self.count else 0.0
        level.drop(entry.client)
        if level.count == 0:
            del self._levels[entry.priority]
        group.drop(entry)
        if group.count == 0:
            del self._groups[entry.signature]
        if entry.client is not None:
            left = self._clients[entry.client] - 1
            if left:
                self._clients[entry.client] = left
            else:
                del self._clients[entry.client]

    def clear(self) -> list[Entry]:
        """Take everybody out."""
        everybody = [entry for group in self._groups.values() for entry in group]
        self._groups.clear()
        self._levels.clear()
        self._clients.clear()
        for groups in (self._due, self._young, self._ages):
            groups.clear()
        self.count, self.cost = 0, 0.0
        return everybody

    # -- the next batch ----------------------------------------------------------------------------

    def take(self, limit: int, now: float, before: float) -> list[Entry]:
        """The calls of the next batch, at most ``limit``, now RUNNING; none when no batch is due.

        One is due when it would be full, or when it has a call that was made at ``before`` or earlier.
        ``before`` never comes back, and calls were put here in the order in which they were made.
        """
        self._find_due(limit, before)
        while (group := self._due.top()) is not None and not self._is_due(group, before):
            pass
        eldest = self._ages.top()
        if group is None or eldest is None:
            return []
        longest = eldest.oldest()
        if self._passed_over >= PATIENCE and self._is_due(eldest, before):
            batch = self._fill(eldest, limit, now, by_age=True)
        else:
            batch = self._fill(group, limit, now)
        self._passed_over = self._passed_over + 1 if longest.state is State.WAITING else 0
        return batch

    def _find_due(self, limit: int, before: float) -> None:
        """Move the groups that have become due."""
        if limit != self._limit:
            if limit < self._limit:  # those of a larger limit are looked at when they come to the top
                for group in self._groups.values():
                    if not group.due and group.full(limit, self.max_cost):
                        self._make_due(group)
            self._limit = limit
        while (grown := self._young.top()) is not None and grown.oldest().born <= before:
            self._make_due(grown)

    def _make_due(self, group: _Group) -> None:
        group.due = True
        self._due.add(group)

    def _is_due(self, group: _Group, before: float) -> bool:
        """It may not be any more: calls have left, or the limit has been raised."""
        due = group.full(self._limit, self.max_cost) or group.oldest().born <= before
        if group.due and not due:
            group.due = False
            self._young.add(group)
        return due

    def _fill(self, group: _Group, limit: int, now: float, *, by_age: bool = False) -> list[Entry]:
        batch: list[Entry] = []
        cost = 0.0
        while group.count and len(batch) < limit:
            entry = group.oldest() if by_age else group.first()
            cost += entry.cost
            # The first that does not fit ends the batch: if smaller ones overtook it, it might never fit.
            if batch and cost > self.max_cost:
                break
            level = self._levels[entry.priority]
            if entry.tag > level.virtual_time:
                level.virtual_time = entry.tag
            entry.start(now)
            self._drop(entry, level, group)
            batch.append(entry)
        return batch

    def full(self, signature: Hashable, limit: int) -> bool:
        """Would a batch of this signature be full?"""
        group = self._groups.get(signature)
        return group is not None and group.full(limit, self.max_cost)

    def oldest_born(self) -> float:
        """When the longest waiting call was made; ``inf`` when nobody waits."""
        group = self._ages.top()
        return math.inf if group is None else group.oldest().born

    # -- how many are in front ---------------------------------------------------------------------

    def ahead(self, priority: int, client: Hashable) -> int:
        """About how many waiting calls would be served before a new one."""
        levels = [level for rank, level in self._levels.items() if rank <= priority]
        mine = sum(int(level.clients[client][0]) for level in levels if client in level.clients)
        clients = sum(len(level.clients) for level in levels)
        return min(sum(level.count for level in levels), (mine + 1) * max(1, clients))
