"""Torch's race detector, told by many threads at once. Its books are plain Python: no GPU is needed."""

from __future__ import annotations

import threading

import pytest

from aiogpu.drivers import sanitizer

torch_sanitizer = pytest.importorskip("torch.cuda._sanitizer")

FIRST, SECOND, READER = 1, 2, 3  # streams
EVENT = 7


def launch(handler, stream, *, reads=(), writes=()):
    aliases = {pointer: [] for pointer in (*reads, *writes)}
    return handler._handle_kernel_launch(stream, set(reads), set(writes), set(), "an operation", aliases)


def two_launches_at_once(handler):
    """The first thread is in the middle of its launch while another one launches, if it is let in."""
    begun, other_is_through = threading.Event(), threading.Event()
    update = handler.syncs.update_seq_num

    def slowly(stream, number):
        update(stream, number)
        if stream == FIRST:
            begun.set()
            other_is_through.wait(0.3)  # with a lock it is not, before this one is

    handler.syncs.update_seq_num = slowly

    def other():
        assert begun.wait(10)
        assert launch(handler, SECOND, writes=[200]) == []
        other_is_through.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert launch(handler, FIRST, writes=[100]) == []
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("serialized", [True, False])
def test_an_ordered_read_is_no_race_although_another_thread_has_launched_meanwhile(serialized):
    handler = torch_sanitizer.EventHandler()
    if serialized:
        sanitizer.serialize_books(handler)
        sanitizer.serialize_books(handler)  # once is enough, twice does no harm
    two_launches_at_once(handler)
    handler._handle_event_record(EVENT, FIRST)
    handler._handle_event_wait(EVENT, READER)
    errors = launch(handler, READER, reads=[100])
    # Torch as it is reports a race here: if it does no longer, this file's subject is not needed.
    assert bool(errors) is not serialized, errors


def test_a_race_is_still_a_race():
    handler = torch_sanitizer.EventHandler()
    sanitizer.serialize_books(handler)
    two_launches_at_once(handler)
    assert launch(handler, READER, reads=[100]), "nobody has waited for the write"


def test_a_sanitizer_that_works_in_another_way_is_left_alone():
    class Other:
        pass

    other = Other()
    sanitizer.serialize_books(other)
    assert not vars(other)
