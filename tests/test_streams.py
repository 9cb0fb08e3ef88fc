"""Streams are leased newest first, shared in order, and idle only when the device is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from aiogpu._engine import Engine
from aiogpu._reactor import Point
from aiogpu._streams import StreamPool
from aiogpu.testing import VirtualDevice


@pytest.fixture
def device() -> VirtualDevice:
    return VirtualDevice(auto=False)


@pytest.fixture
def pool(device) -> StreamPool:
    return opened(device, 4)


def opened(device: VirtualDevice, limit: int) -> StreamPool:
    pool = StreamPool(device, "compute", limit)
    pool.open()
    return pool


class Tail(Point):
    """A point that the test completes."""

    def __init__(self) -> None:
        super().__init__(None, None)  # type: ignore[arg-type]

    def complete(self) -> None:
        self.done = True


def test_leases_are_of_distinct_streams_while_there_are_enough(pool):
    """C23."""
    leases = [pool.lease() for _ in range(4)]
    assert len({lease.stream.raw for lease in leases}) == 4
    assert (pool.opened, pool.in_use, pool.leases, pool.shared) == (4, 4, 4, 0)
    for lease in leases:
        lease.release(None)
    assert pool.in_use == 0


def test_the_newest_idle_stream_is_leased_first(pool):
    """Its memory caches are warm."""
    first, second = pool.lease(), pool.lease()
    first.release(None)
    second.release(None)
    again = pool.lease()
    assert again.stream is second.stream
    third = pool.lease()
    assert third.stream is first.stream
    third.release(None)
    again.release(None)
    assert pool.lease().stream is first.stream, "newest means leased last"


def test_few_tasks_use_few_streams(pool):
    seen = set()
    for _ in range(50):
        lease = pool.lease()
        seen.add(lease.stream.raw)
        lease.release(None)
    assert len(seen) == 1


def test_streams_are_opened_ahead_once_for_each_priority(device):
    """Leasing happens on a loop's thread, and opening may wait for the device."""
    pool = StreamPool(device, "compute", 3)
    assert not pool.is_open(0)
    pool.open()
    pool.open()
    assert pool.is_open(0)
    assert not pool.is_open(-1)
    assert pool.opened == 3
    pool.open(-1)
    assert pool.opened == 6
    before = {stream.raw for stream in pool.streams()}
    leased = {pool.lease().stream.raw for _ in range(10)}
    assert leased < before == {stream.raw for stream in pool.streams()}


def test_a_stream_with_no_user_but_unfinished_work_is_taken_before_one_is_shared(pool):
    leases = [pool.lease() for _ in range(4)]
    leases[2].release(Tail())
    assert pool.lease().stream is leases[2].stream
    assert pool.shared == 0


def test_those_that_find_no_idle_stream_take_the_busy_ones_in_turn(pool):
    """Whoever submits and goes is no user any more: all would take the same one, behind one another."""
    for _ in range(4):
        pool.lease().release(Tail())
    taken = []
    for _ in range(8):
        lease = pool.lease()
        taken.append(lease.stream)
        lease.release(Tail())
    assert len({stream.raw for stream in taken[:4]}) == 4
    assert taken[4:] == taken[:4]
    assert pool.shared == 0


def test_a_released_stream_is_busy_until_the_device_is_done(pool):
    tail = Tail()
    lease = pool.lease()
    lease.release(tail)
    other = pool.lease()
    assert other.stream is not lease.stream
    tail.complete()
    assert pool.lease().stream is lease.stream


def test_beyond_the_limit_the_least_shared_is_shared_and_counted(pool):
    leases = [pool.lease() for _ in range(9)]
    users: dict[Any, int] = {}
    for lease in leases:
        users[lease.stream.raw] = users.get(lease.stream.raw, 0) + 1
    assert sorted(users.values()) == [2, 2, 2, 3]
    assert (pool.opened, pool.in_use, pool.shared) == (4, 9, 5)
    for lease in leases:
        lease.release(None)
    assert pool.in_use == 0


def test_a_stream_is_idle_only_when_all_who_share_it_are_gone(device):
    pool = opened(device, 1)
    first, second = pool.lease(), pool.lease()
    assert first.stream is second.stream
    first.release(None)
    assert pool.in_use == 1
    third = pool.lease()
    assert pool.shared == 2
    second.release(None)
    third.release(None)
    assert pool.in_use == 0
    pool.lease()
    assert pool.shared == 2


def test_priorities_have_streams_of_their_own(pool):
    pool.open(-1)
    urgent, normal = pool.lease(-1), pool.lease(0)
    assert urgent.stream is not normal.stream
    urgent.release(None)
    assert pool.lease(0).stream is not urgent.stream
    assert pool.lease(-1).stream is urgent.stream


def test_a_lease_with_two_holders_ends_with_the_last(pool):
    lease = pool.lease()
    lease.hold()
    lease.release(None)
    assert pool.in_use == 1
    lease.release(None)
    assert pool.in_use == 0


def test_the_last_holders_tail_counts(pool):
    early, late = Tail(), Tail()
    lease = pool.lease()
    lease.hold()
    lease.release(early)
    lease.release(late)
    early.complete()
    assert pool.lease().stream is not lease.stream
    late.complete()
    assert pool.lease().stream is lease.stream


def test_leasing_from_many_threads_loses_and_invents_nothing(pool):
    def work():
        for _ in range(300):
            pool.lease().release(None)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert pool.in_use == 0
    assert pool.leases == 1800
    assert pool.opened == 4


def test_lanes_that_are_promised_to_be_distinct_are(device):
    """C23: uploads, downloads and compute never share a stream."""
    engine = Engine(device)
    engine.warm_up()
    pools = (engine.compute, engine.uploads, engine.downloads, engine.chunked, engine.sides)
    raws = [stream.raw for pool in pools for stream in pool.streams()]
    assert len(raws) == len(set(raws)) >= 8
    engine.staging.close(1)
    engine.workers.close(1)


def test_shared_streams_run_their_users_in_the_order_of_submission(device):
    pool = opened(device, 1)
    ran: list[int] = []
    leases = [pool.lease() for _ in range(5)]
    for number, lease in enumerate(leases):
        device.launch(lambda number=number: ran.append(number), stream=lease.stream)
    device.run_all()
    assert ran == [0, 1, 2, 3, 4]
    assert torch.is_grad_enabled()
