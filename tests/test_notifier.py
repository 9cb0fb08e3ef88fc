"""The thread that turns a driver's posts into wake-ups, and asks when none comes."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any

import pytest

from aiogpu import _engine, _notifier
from aiogpu._notifier import Notifier, PosixSignal, ThreadSignal

SIGNALS = [ThreadSignal] + ([PosixSignal] if sys.platform == "linux" else [])


class Sleeper:
    """A reactor as the notifier sees it."""

    closed = False

    def __init__(self, sleeping: bool = True) -> None:
        self.sleeping = sleeping
        self.woken = threading.Semaphore(0)
        self.threads: set[str] = set()

    def wake(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.woken.release()


class Orphan:
    def __init__(self) -> None:
        self.over = False
        self.looks = 0

    def look(self) -> bool:
        self.looks += 1
        return self.over


@pytest.fixture
def notifier(monkeypatch):
    registered: list[Any] = []
    monkeypatch.setattr(_notifier.atexit, "register", registered.append)
    notifier = Notifier()
    notifier.period = 60.0  # tests that want the watchdog say so
    yield notifier
    notifier.stop()
    assert notifier._thread is None


# -- the semaphore -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SIGNALS)
def test_a_post_before_the_wait_is_not_lost(kind):
    signal = kind()
    signal.post()
    signal.post()
    assert signal.wait(5)
    assert signal.wait(5)
    assert not signal.wait(0)


@pytest.mark.parametrize("kind", SIGNALS)
def test_a_wait_ends_with_a_post_from_another_thread(kind):
    signal = kind()
    results: list[bool] = []
    waiter = threading.Thread(target=lambda: results.append(signal.wait(None)))
    waiter.start()
    signal.post()
    waiter.join(5)
    assert results == [True]


@pytest.mark.parametrize("kind", SIGNALS)
def test_a_wait_has_its_limit(kind):
    signal = kind()
    begin = time.monotonic()
    assert not signal.wait(0.05)
    assert 0.04 <= time.monotonic() - begin < 5


@pytest.mark.skipif(sys.platform != "linux", reason="libc's semaphore")
def test_what_the_driver_calls_is_libcs_own_function():
    """C29, C34: nothing that runs on a driver thread is Python or waits for Python."""
    signal = PosixSignal()
    libc = ctypes.CDLL(None)
    assert signal.function == ctypes.cast(libc.sem_post, ctypes.c_void_p).value
    # One pointer argument: exactly what a host function gets. Called as C would call it.
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(signal.function)
    assert function(signal.argument) == 0
    assert signal.wait(1)


@pytest.mark.skipif(sys.platform != "linux", reason="libc's semaphore")
def test_the_waiting_thread_does_not_hold_the_gil():
    signal = PosixSignal()
    waiting = threading.Thread(target=signal.wait, args=(5.0,))
    waiting.start()
    total = sum(range(100_000))  # would not get here before the wait's end
    signal.post()
    waiting.join(5)
    assert not waiting.is_alive()
    assert total


# -- the thread --------------------------------------------------------------------------------------


def test_no_thread_before_somebody_registers(notifier):
    assert notifier._thread is None
    notifier.signal.post()
    assert notifier._thread is None
    notifier.register(Sleeper())
    assert notifier._thread.daemon
    assert notifier._thread.name == "aiogpu-notifier"


def test_one_post_wakes_every_loop_that_sleeps(notifier):
    sleepers = [Sleeper(), Sleeper(), Sleeper(sleeping=False)]
    for sleeper in sleepers:
        notifier.register(sleeper)
    notifier.signal.post()
    assert sleepers[0].woken.acquire(timeout=5)
    assert sleepers[1].woken.acquire(timeout=5)
    assert sleepers[0].threads == {"aiogpu-notifier"}
    assert not sleepers[2].threads, "a busy loop polls; waking it is wasted"


def test_the_watchdog_wakes_without_a_post(notifier):
    notifier.period = 0.01
    sleeper = Sleeper()
    notifier.register(sleeper)
    for _ in range(3):
        assert sleeper.woken.acquire(timeout=5)


def test_who_has_left_is_not_woken(notifier):
    stays, leaves = Sleeper(), Sleeper()
    notifier.register(leaves)
    notifier.register(stays)
    notifier.unregister(leaves)
    while leaves.woken.acquire(blocking=False):
        pass  # woken by its own registration, perhaps
    while stays.woken.acquire(blocking=False):
        pass
    notifier.signal.post()
    assert stays.woken.acquire(timeout=5)
    assert not leaves.woken.acquire(blocking=False)
    notifier.unregister(leaves)  # twice does nothing


def test_orphans_are_asked_until_they_are_over(notifier, blocking_until):
    orphans = [Orphan(), Orphan()]
    notifier.adopt(orphans)
    assert notifier.orphans == 2
    blocking_until(lambda: orphans[0].looks >= 2)
    orphans[0].over = True
    blocking_until(lambda: notifier.orphans == 1)
    looks = orphans[0].looks
    blocking_until(lambda: orphans[1].looks > looks + 2)
    assert orphans[0].looks == looks, "it is over: nobody may ask it again"
    orphans[1].over = True
    blocking_until(lambda: notifier.orphans == 0)


def test_adopting_nothing_starts_nothing(notifier):
    notifier.adopt([])
    assert notifier._thread is None


def test_after_the_stop_nothing_starts_again(notifier):
    notifier.register(Sleeper())
    thread = notifier._thread
    notifier.stop()
    assert not thread.is_alive()
    notifier.register(Sleeper())
    notifier.adopt([Orphan()])
    assert notifier._thread is None
    notifier.signal.post()  # a callback that comes late is counted by a semaphore that nobody reads


def test_the_process_has_one_notifier(auto_vd):
    engine = _engine.find_engine(auto_vd.device)
    assert engine.notifier is _engine._notifier()
    assert engine.signal is _engine._notifier().signal


def test_the_signal_is_not_freed_while_the_process_lives(auto_vd):
    """A driver thread may post at any time, also after every engine is gone."""
    address = _engine._notifier().signal.argument
    with pytest.MonkeyPatch.context():
        assert _engine._notifier().signal.argument == address
