"""One runtime per event loop: its settings and its lifetime.

Law of this file: module-level functions use the running loop's runtime, which is made on first use and closes
with its loop. ``async with Runtime(...)`` gives that loop explicit settings and an explicit end. A runtime
owns a reactor and limits; devices, streams and memory belong to the engines, which all loops share.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import torch

from . import _engine, _loops
from ._engine import Engine, EngineSettings, make_engine, normalize
from ._farewells import say_farewell, say_late_farewell
from ._reactor import Point, Reactor
from ._settings import at_least, from_environment
from ._stats import Stats, count
from ._workers import WorkerPool
from .drivers.base import Event, Stream
from .transfers.inflight import InFlight

__all__ = ["Runtime", "Stats", "current_runtime", "stats"]

R = TypeVar("R")
log = logging.getLogger("aiogpu")


class Runtime:
    """Settings and lifetime of aiogpu on the event loop that enters it.

    ::

        async with aiogpu.Runtime(spin=math.inf):
            ...

    Without one, every loop has a runtime with the defaults. Each default can be set by an environment
    variable, ``AIOGPU_<NAME>`` in capitals; an argument wins over it.

    Parameters
    ----------
    device:
        Where ``to_device`` and tasks go when they name no device. Default: the current CUDA device, or
        the CPU where there is none.
    streams:
        Compute streams per priority and device (each costs cuBLAS a workspace of 32 MiB and has memory
        caches of its own). More concurrent tasks share them, in order.
    spin:
        Seconds for which the loop keeps polling after the last submission or completion before it
        sleeps until a notification. ``math.inf`` polls for as long as anything is pending: the
        latency of a blocking wait, for a core at 100 %.
    staging_bytes, pinned_bytes:
        Limits of page-locked memory, in bytes: for staging (default 128 MiB, taken when it is first
        needed or by :meth:`reserve`); for results of ``to_host`` (default 4 GiB of what users hold; beyond
        it results come in ordinary memory). ``streams`` and these two belong to the device: the first
        runtime of the process that uses it decides.
    workers:
        How many :func:`aiogpu.run_sync` calls run at once by default.
    max_inflight_bytes:
        Bytes of transfers in flight at once; default: any number. Further ones start in the order of
        their calls when there is room; a larger one than this goes alone. What a call submits itself (up
        to 64 KiB a tensor) keeps its place on the caller's stream: it neither waits nor counts.
    grace:
        Seconds that leaving waits for work in flight. What is still running then is named in one
        warning and left to finish on its own; its buffers stay alive.
    wake:
        "auto", "callback" (host callbacks) or "thread" (waiter threads).
    debug:
        Check that sources are not written while they are copied.

    Raises
    ------
    RuntimeError
        When the loop already has an explicit runtime, or this one has been closed.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        *,
        streams: int | None = None,
        spin: float | None = None,
        staging_bytes: int | None = None,
        pinned_bytes: int | None = None,
        workers: int | None = None,
        max_inflight_bytes: int | None = None,
        grace: float | None = None,
        wake: str | None = None,
        debug: bool | None = None,
    ) -> None:
        default = EngineSettings()
        env = from_environment
        named = device if device is not None else os.environ.get("AIOGPU_DEVICE")
        self._device = None if named is None else normalize(named)
        self.settings = EngineSettings(
            streams=at_least(1, "streams", streams, env("STREAMS", int, default.streams)),
            staging_bytes=at_least(
                0, "staging_bytes", staging_bytes, env("STAGING_BYTES", int, default.staging_bytes)
            ),
            pinned_bytes=at_least(
                0, "pinned_bytes", pinned_bytes, env("PINNED_BYTES", int, default.pinned_bytes)
            ),
            wake=wake or env("WAKE", str, default.wake),
        )
        if self.settings.wake not in ("auto", "callback", "thread"):
            raise ValueError(f"wake is 'auto', 'callback' or 'thread', not {self.settings.wake!r}")
        self.spin = at_least(0.0, "spin", spin, env("SPIN", float, 50e-6))
        self.grace = at_least(0.0, "grace", grace, env("GRACE", float, 5.0))
        cores = os.cpu_count() or 1
        self.workers = at_least(1, "workers", workers, env("WORKERS", int, min(32, cores + 4)))
        limit = env("MAX_INFLIGHT_BYTES", int, None) if max_inflight_bytes is None else max_inflight_bytes
        self.max_inflight_bytes = None if limit is None else at_least(1, "max_inflight_bytes", limit, limit)
        self.inflight = InFlight(self.max_inflight_bytes)
        self.debug = debug if debug is not None else bool(env("DEBUG", int, 0))
        self.closed = False
        self._explicit = False
        #: Who has taken over this implicit runtime's reactor; tasks of before still hold this one.
        self._successor: Runtime | None = None
        self._reactor: Reactor | None = None
        self._limiter: anyio.CapacityLimiter | None = None

    # -- lifetime ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self.closed or self._reactor is not None:
            raise RuntimeError("a Runtime can be entered once; make a new one: async with Runtime(): ...")
        token = _loops.current_token()
        present = _runtimes.get(token)
        if present is not None and not present.closed:
            if present._explicit:
                raise RuntimeError(
                    "this event loop already has a Runtime: use it through aiogpu.current_runtime(), or "
                    "leave its `async with` block first"
                )
            self._take_over(present)
        else:
            self._open()
        self._explicit = True
        _runtimes[token] = self
        _here.token = None
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Wait for what is in flight, at most ``grace`` seconds, and let go of the loop."""
        if self.closed or self._reactor is None:
            self.closed = True  # also where another runtime has taken over
            return
        try:
            # Shielded, but bounded: a cancelled task still deserves its buffers back in order.
            with anyio.CancelScope(shield=True):
                for _ in range(2):  # what the device has kept may lead to more that is open
                    await say_farewell(self._reactor.door, ending=False, grace=self.grace)
                    await self._drain()
        finally:
            self._close()

    def _open(self) -> None:
        door = _loops.open_door()
        self._reactor = Reactor(door, self.spin)
        _engine._notifier().register(self._reactor)
        door.on_close(self._close_with_loop)

    def _take_over(self, implicit: Runtime) -> None:
        """An explicit runtime on a loop that was already in use: same reactor, new settings."""
        reactor = implicit.reactor
        reactor.spin = self.spin
        self.inflight = implicit.inflight
        self.inflight.resize(self.max_inflight_bytes)
        self._reactor, implicit._successor, implicit.closed = reactor, self, True
        reactor.door.on_close(self._close_with_loop)

    async def _close_with_loop(self) -> None:
        if self._reactor is not None:  # also of a runtime that was left long ago
            await say_farewell(self._reactor.door, ending=True, grace=self.grace)
        await self.aclose()

    async def _drain(self) -> None:
        reactor = self.reactor
        deadline = time.monotonic() + self.grace
        pause = 0.0
        # Not an event that the last point sets: work may still be on its way from worker threads.
        while (reactor.pending or reactor.inbox or reactor.operations) and time.monotonic() < deadline:
            await anyio.sleep(pause)
            pause = min(0.01, pause + 0.0005)

    def _close(self) -> None:
        if self.closed:
            return
        reactor = self.reactor
        self.closed = True
        _engine._notifier().unregister(reactor)
        # By identity, not through current_token(): an asyncio loop closes generators from its own
        # tasks, but a trio run may already be past the point where it answers.
        for token, runtime in list(_runtimes.items()):
            if runtime is self:
                del _runtimes[token]
        _here.token, _here.runtime = None, None
        operations = [repr(operation) for operation in tuple(reactor.operations)]
        if reactor.door.closed:
            say_late_farewell(reactor.door)
        points = reactor.abandon()
        if points or operations:
            names = ", ".join(operations[:5]) or f"{len(points)} points in flight"
            more = f" and {len(operations) - 5} more" if len(operations) > 5 else ""
            log.warning(
                "aiogpu: after %.1f s of grace the device had not finished: %s%s. Their buffers stay "
                "alive until it has.",
                self.grace,
                names,
                more,
            )

    def watch(
        self,
        engine: Engine,
        stream: Stream,
        event: Event,
        callback: Callable[[BaseException | None], None] | None = None,
        keep: Any = None,
        waiter: Any = None,
    ) -> Point:
        """:meth:`Reactor.watch` from wherever this is: the loop, another thread, after the end.

        A coroutine may be closed by the garbage collector, in any thread and after its loop is gone.
        """
        if self._successor is not None:
            return self._successor.watch(engine, stream, event, callback, keep, waiter)
        reactor = self._reactor
        assert reactor is not None, "nobody gets a runtime before it is entered"
        if self.closed:
            point = Point(engine, event, callback, keep, waiter)
            reactor.orphan([point])
            return point
        if _loops.current_token() is reactor.door.token:
            return reactor.watch(engine, stream, event, callback, keep, waiter)
        return reactor.watch_from_thread(engine, stream, event, callback, keep, waiter)

    # -- what the rooms above use ------------------------------------------------------------------

    @property
    def reactor(self) -> Reactor:
        if self._successor is not None:
            return self._successor.reactor
        if self._reactor is None or self.closed:
            raise RuntimeError(
                "this Runtime is closed"
                if self.closed
                else "this Runtime has not been entered: `async with aiogpu.Runtime() as runtime:`"
            )
        return self._reactor

    def device_now(self) -> torch.device | None:
        """The default device, or ``None`` while only a worker thread may find it out."""
        return self._device or _engine.settled_default()

    def engine_now(self, device: torch.device | None) -> Engine | None:
        """The engine of ``device`` (``None``: the default) if it is ready; fails fast when lost."""
        device = device or self.device_now()
        if device is None:
            return None
        engine = _engine.find_engine(device)
        if engine is not None:
            engine.check()
        return engine

    def engine_blocking(self, device: torch.device | None) -> Engine:
        """The engine of ``device``, made if need be. Worker threads only."""
        engine = make_engine(device or self._device or _engine.default_device(), self.settings)
        engine.check()
        engine.driver.enter_thread()  # a starter thread belongs to none, and goes on with this one's work
        return engine

    async def engine(self, device: torch.device | None) -> Engine:
        """The engine of ``device``; the first time it is made in a worker thread."""
        engine = self.engine_now(device)
        if engine is None:
            engine = await self.in_starter(partial(self.engine_blocking, device))
        return engine

    async def in_starter(self, fn: Callable[[], R]) -> R:
        """Run ``fn`` on a thread that belongs to no engine: there may be none yet."""
        door = self.reactor.door
        waiter = door.waiter()
        settle = door.settler(waiter)
        outcome: list[R] = []

        def job() -> None:
            error: BaseException | None = None
            try:
                outcome.append(fn())
            except BaseException as raised:
                error = raised
            try:
                door.post(partial(settle, error))
            except _loops.DoorClosed:
                pass

        starter().submit(job)
        await door.park(waiter)
        return outcome[0]

    @property
    def limiter(self) -> anyio.CapacityLimiter:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self.workers)
        return self._limiter

    def stats(self) -> Stats:
        """This runtime's counters, and those of its default device."""
        return count(self.reactor, self.inflight, self._engine_if_made(), _engine._notifier().orphans)

    async def reserve(self, nbytes: int | None = None) -> int:
        """Page-lock staging memory of the default device ahead of its use, off the loop's thread.

        Until there are ``nbytes`` of it; default: all of ``staging_bytes``. Returns how many bytes there
        are: fewer where the system gives no more. Otherwise the first large transfers do it, and pay a few
        milliseconds for each chunk. At the start of a server::

            async with aiogpu.Runtime(staging_bytes=256 << 20) as runtime:
                await runtime.reserve()
        """
        engine = await self.engine(None)
        return await self.in_starter(partial(engine.chunks.reserve, nbytes))

    async def trim(self) -> int:
        """Give page-locked memory of the default device that nobody uses back to the system.

        Staging chunks that no transfer has, and what torch's pinned allocator keeps for reuse (for all its
        users). Returns how many bytes. What is needed later is page-locked anew.
        """
        engine = self._engine_if_made()
        return 0 if engine is None else await self.in_starter(engine.trim)

    def _engine_if_made(self) -> Engine | None:
        device = self.device_now()
        return _engine.find_engine(device) if device is not None else None

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open" if self._reactor else "not entered"
        return f"<Runtime on {self._device or 'the default device'}, {state}>"


# -- the running loop's runtime --------------------------------------------------------------------

_runtimes: dict[Any, Runtime] = {}
_starter: WorkerPool | None = None


class _Here(threading.local):
    """The last answer, per thread: a look-up on the path of every await."""

    token: Any = None
    runtime: Runtime | None = None


_here = _Here()


def starter() -> WorkerPool:
    """Threads for the time before an engine exists."""
    global _starter
    if _starter is None:
        _starter = WorkerPool("starter", 16, lambda: None)
    return _starter


def current_runtime() -> Runtime:
    """The running event loop's runtime, made on first use.

    Raises ``RuntimeError`` outside of an event loop.
    """
    token = _loops.current_token()
    if token is not None and token is _here.token:
        runtime = _here.runtime
        assert runtime is not None
        return runtime
    runtime = _runtimes.get(token) if token is not None else None
    if runtime is None:
        _forget_closed_loops()
        runtime = Runtime()
        runtime._open()
        _runtimes[runtime.reactor.door.token] = runtime
    _here.token, _here.runtime = token, runtime
    return runtime


def stats() -> Stats:
    """Counters of the running loop's runtime and its device."""
    return current_runtime().stats()


def _forget_closed_loops() -> None:
    """Loops that were closed without shutting down their async generators tell nobody."""
    for runtime in list(_runtimes.values()):
        if runtime._reactor is not None and runtime._reactor.door.closed:
            runtime._close()


def _after_fork_in_child() -> None:
    global _starter
    _starter = None
    _runtimes.clear()
    _here.token, _here.runtime = None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
