"""What all tests share: three event loops, two devices, and a leak check that nobody can forget.

Tests are ordinary functions. A test that takes ``run`` runs on asyncio, uvloop and trio; with ``vd`` its
device is virtual and moves only when told to, with ``auto_vd`` it is virtual and moves by itself, with
``anydevice`` it is that one and then the real CPU driver.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest

from aiogpu import _engine, _runtime
from aiogpu._engine import Engine
from aiogpu._reactor import Reactor
from aiogpu.testing import VirtualDevice, virtual_device

pytest.register_assert_rewrite("aiogpu.testing.conformance", "aiogpu.testing.ordering")

LOOPS = ["asyncio", "trio"] if sys.platform == "win32" else ["asyncio", "uvloop", "trio"]

#: Seconds that a program under test may take. Generous: machines that run tests are busy.
LIMIT = 20.0


def pytest_sessionstart() -> None:
    # Each test ends with a collection; what torch has made by now need not be looked at every time.
    # Hypothesis asks the collector who refers to trio's random generator: not after the freeze.
    import hypothesis  # noqa: F401

    gc.collect()
    gc.freeze()


# -- event loops -----------------------------------------------------------------------------------


class Run:
    """``run(fn, *args)``: call the async function on a new event loop; fail when it takes too long."""

    def __init__(self, loop: str) -> None:
        self.loop = loop

    @property
    def is_trio(self) -> bool:
        return self.loop == "trio"

    def __call__(self, fn: Callable[..., Awaitable[Any]], *args: Any, limit: float = LIMIT) -> Any:
        async def limited() -> Any:
            with anyio.move_on_after(limit) as scope:
                return await fn(*args)
            if scope.cancelled_caught:
                pytest.fail(f"{fn.__qualname__} did not end within {limit} s on {self.loop}")

        return self.bare(limited)

    def bare(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """The same without a limit (and so without a cancel scope around it)."""
        if self.loop == "trio":
            import trio

            return trio.run(fn, *args)
        factory = None
        if self.loop == "uvloop":
            import uvloop

            factory = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(fn(*args))  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"<run on {self.loop}>"


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    """Each test that takes it runs on every event loop."""
    return Run(request.param)


@pytest.fixture
def run_asyncio() -> Run:
    """For what only asyncio has, or where the loop makes no difference."""
    return Run("asyncio")


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """``await until(predicate)``: let the loop run until it holds; fail when it never does."""

    async def wait(predicate: Callable[[], object], limit: float = 10.0) -> None:
        deadline = time.monotonic() + limit
        while not predicate():
            assert time.monotonic() < deadline, f"still not true after {limit} s: {predicate}"
            await anyio.sleep(0.0005)

    return wait


@pytest.fixture
def blocking_until() -> Callable[..., None]:
    """The same for plain threads."""
    return _blocking_until


def _blocking_until(predicate: Callable[[], object], limit: float = 10.0) -> None:
    deadline = time.monotonic() + limit
    while not predicate():
        assert time.monotonic() < deadline, f"still not true after {limit} s: {predicate}"
        time.sleep(0.0005)


# -- devices ---------------------------------------------------------------------------------------


@pytest.fixture
def vd() -> Iterator[VirtualDevice]:
    """A virtual device that moves only when the test says so."""
    with virtual_device(auto=False) as device:
        yield device


@pytest.fixture
def auto_vd() -> Iterator[VirtualDevice]:
    """A virtual device that runs whatever can run at once (latches hold it)."""
    with virtual_device(auto=True) as device:
        yield device


@pytest.fixture(params=["virtual", "cpu"])
def anydevice(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the device that is in place: the virtual one (moving by itself), then the CPU."""
    if request.param == "virtual":
        with virtual_device(auto=True):
            yield "virtual"
    else:
        yield "cpu"


class Mover:
    """Moves a virtual device from a thread of its own, as a GPU moves by itself."""

    def __init__(self, device: VirtualDevice) -> None:
        self.thread = threading.Thread(target=self._run, name="virtual device")
        self._device = device
        self._stop = threading.Event()

    def _run(self) -> None:
        while not self._stop.wait(0.0005):
            self._device.run_all()
            self._device.deliver()

    def __enter__(self) -> Mover:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.thread.join()


@pytest.fixture
def moving() -> type[Mover]:
    """``with moving(vd):`` the device moves by itself within the block, in a thread of its own."""
    return Mover


@pytest.fixture
def engine() -> Callable[[], Engine]:
    """``engine()``: the engine of the device that is in place now."""
    import torch

    return lambda: _engine.make_engine(torch.device("cpu"))


@pytest.fixture
def fast_watchdog(monkeypatch: pytest.MonkeyPatch) -> float:
    """The watchdog looks every 10 ms instead of every 0.5 s."""
    notifier = _engine._notifier()
    monkeypatch.setattr(notifier, "period", 0.01)
    notifier.signal.post()  # it may be in a wait of the usual length
    return 0.01


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> float:
    """Runtimes wait 50 ms instead of 5 s for work in flight when they end."""
    monkeypatch.setenv("AIOGPU_GRACE", "0.05")
    return 0.05


# -- leaks -----------------------------------------------------------------------------------------


@pytest.fixture
def abandoned(_warnings_logged: list[str]) -> list[str]:
    """What runtimes have said that they abandoned. Without this fixture, saying so fails the test."""
    return _warnings_logged


@pytest.fixture
def _warnings_logged() -> Iterator[list[str]]:
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logging.getLogger("aiogpu").addHandler(handler)
    yield lines
    logging.getLogger("aiogpu").removeHandler(handler)


class _Seen:
    """Engines and reactors that exist during a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines: list[Engine] = list(_engine._engines.values())
        self.reactors: list[Reactor] = []
        self._note(monkeypatch, Engine, self.engines)
        self._note(monkeypatch, Reactor, self.reactors)

    @staticmethod
    def _note(monkeypatch: pytest.MonkeyPatch, kind: Any, into: list[Any]) -> None:
        make = kind.__init__

        def noting(self: Any, *args: Any, **kwargs: Any) -> None:
            into.append(self)
            make(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", noting)

    def leaks(self) -> list[str]:
        found: list[str] = []
        for reactor in self.reactors:
            if reactor.pending or reactor.inbox:
                found.append(f"{reactor.pending + len(reactor.inbox)} points pending in a reactor")
            found += [f"not over: {operation!r}" for operation in reactor.operations]
        for engine in self.engines:
            if engine.lost is None:  # a lost device leaks on purpose
                found += _engine_leaks(engine)
        notifier = _engine._notifier()
        lost = sum(1 for orphan in notifier._orphans if getattr(orphan, "engine", None) in self.engines)
        if lost:
            found.append(f"{lost} orphans still in flight")
        return found


def _engine_leaks(engine: Engine) -> list[str]:
    found = []
    for name in ("compute", "uploads", "downloads", "chunked", "sides"):
        in_use = getattr(engine, name).in_use
        if in_use:
            found.append(f"{in_use} leases of {engine}.{name}")
    for name in ("slots", "chunks"):
        nbytes = getattr(engine, name).used_bytes
        if nbytes:
            found.append(f"{nbytes} bytes of {engine}.{name} in use")
    if engine.leaked:
        found.append(f"{len(engine.leaked)} things given up by {engine}")
    return found


def _foreground_threads() -> set[threading.Thread]:
    # The CPU driver's copy threads belong to an engine, and engines live as long as the process.
    return {
        thread
        for thread in threading.enumerate()
        if not thread.daemon and not thread.name.startswith("aiogpu-cpu-copy")
    }


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_not_looked_at_again() -> None:
    """Some tests make torch import half a million objects, and every test ends with a full collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_leaks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _warnings_logged: list[str]
) -> Iterator[None]:
    """After every test nothing is in flight, leased or staged, and no thread has stayed."""
    before = _foreground_threads()
    seen = _Seen(monkeypatch)
    yield
    gc.collect()  # coroutines and operations that nobody holds end here, in the test that made them
    _runtime._forget_closed_loops()
    deadline = time.monotonic() + 3.0
    # The last word on an orphan, or on a worker's hand-over, may come from another thread a little later.
    while (seen.leaks() or _foreground_threads() - before) and time.monotonic() < deadline:
        time.sleep(0.002)
    problems = seen.leaks() + [f"thread {t.name} has stayed" for t in _foreground_threads() - before]
    problems += [f"the runtime of a closed loop has stayed: {r}" for r in _runtime._runtimes.values()]
    if "abandoned" not in request.fixturenames:
        problems += [f"logged: {line}" for line in _warnings_logged]
    if problems:
        pytest.fail("leaks:\n  " + "\n  ".join(problems), pytrace=False)
