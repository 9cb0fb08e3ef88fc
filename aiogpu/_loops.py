"""The non-blocking door into asyncio and trio.

Law of this file: it is the only one that knows which event loop runs. Everybody else has a *door*:
park a coroutine, wake it, call a function soon on the loop's thread, post one from any thread. Posting
to a loop that has closed raises :class:`DoorClosed` and nothing else; that is the one late case.

anyio has no such layer: its portals run coroutines (200-400 µs a hop), its events cost 20 µs. On the path
of every wake-up this is what aiogpu exists for; everything structured is left to anyio.
"""

from __future__ import annotations

import abc
import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import trio

__all__ = ["Door", "DoorClosed", "current_token", "open_door"]


class DoorClosed(RuntimeError):
    """The event loop is gone."""


def _nothing() -> None:
    pass


class Door(abc.ABC):
    """What one event loop can do for aiogpu."""

    #: Identifies the loop; compared by identity.
    token: Any

    #: Callbacks run in a context of their own. A poll that was scheduled from a task would otherwise
    #: run in that task's context for ever, and keep it alive.
    context: Context

    #: Has a function that was given to :meth:`soon` run by the time that :meth:`checkpoint` returns?
    looks_in_a_turn = False

    @abc.abstractmethod
    def waiter(self) -> Any:
        """A fresh one-shot parking place for one coroutine of this loop."""

    @abc.abstractmethod
    def park(self, waiter: Any) -> Awaitable[None]:
        """Wait until ``waiter`` is settled; raises the error that it is settled with."""

    @abc.abstractmethod
    def settle(self, waiter: Any, error: BaseException | None) -> None:
        """Wake ``waiter``, on the loop's thread; late calls do nothing."""

    def settler(self, waiter: Any) -> Callable[[BaseException | None], None]:
        """:meth:`settle` as a function of the error alone."""
        return partial(self.settle, waiter)

    @abc.abstractmethod
    def soon(self, fn: Callable[[], object]) -> None:
        """Call ``fn`` in the next iteration of the loop. Loop thread only."""

    @abc.abstractmethod
    def post(self, fn: Callable[[], object]) -> None:
        """Call ``fn`` on the loop's thread; from any thread. Raises :class:`DoorClosed`."""

    @abc.abstractmethod
    def spawn(
        self,
        fn: Callable[[], Coroutine[Any, Any, None]],
        context: Context,
        over: Callable[[], object] = _nothing,
    ) -> Callable[[], object]:
        """Run ``fn``, which raises nothing but a cancellation, as a task of the loop's own. Loop thread only.
        ``over`` is called at its end, also when it was cancelled before it began. Returns what cancels it.
        Raises ``RuntimeError`` when the loop takes none any more."""

    @abc.abstractmethod
    def on_readable(
        self, fd: int, fn: Callable[[], object], over: Callable[[], object]
    ) -> Callable[[], None]:
        """From now on call ``fn``, which empties ``fd``, on the loop's thread whenever ``fd`` can be read.

        Returns what ends that; ``over`` is called when it has. ``NotImplementedError`` where the loop cannot.
        """

    @abc.abstractmethod
    def checkpoint(self) -> Awaitable[None]:
        """Let others run, and notice a cancellation."""

    @abc.abstractmethod
    def on_close(self, cleanup: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``cleanup`` when the loop shuts down in good order."""

    @property
    @abc.abstractmethod
    def closed(self) -> bool: ...


class AsyncioDoor(Door):
    """asyncio and uvloop."""

    looks_in_a_turn = True  # first come, first served

    def __init__(self) -> None:
        self.token: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.context = Context()
        self.waiter = self.token.create_future  # type: ignore[method-assign]
        self._closer: AsyncGenerator[None, None] | None = None
        self._spawned: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly

    def waiter(self) -> asyncio.Future[None]:
        return self.token.create_future()

    def park(self, waiter: asyncio.Future[None]) -> Awaitable[None]:
        return waiter

    def settle(self, waiter: asyncio.Future[None], error: BaseException | None) -> None:
        if not waiter.done():  # else its task was cancelled in the meantime
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def soon(self, fn: Callable[[], object]) -> None:
        self.token.call_soon(fn, context=self.context)

    def post(self, fn: Callable[[], object]) -> None:
        try:
            self.token.call_soon_threadsafe(fn, context=self.context)
        except RuntimeError as error:
            raise DoorClosed from error

    def spawn(
        self,
        fn: Callable[[], Coroutine[Any, Any, None]],
        context: Context,
        over: Callable[[], object] = _nothing,
    ) -> Callable[[], object]:
        task = self.token.create_task(fn(), context=context)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard, context=self.context)
        task.add_done_callback(lambda _: over(), context=self.context)
        return task.cancel

    def on_readable(
        self, fd: int, fn: Callable[[], object], over: Callable[[], object]
    ) -> Callable[[], None]:
        self.context.run(self.token.add_reader, fd, fn)  # the handle copies the current context

        def stop() -> None:
            if not self.token.is_closed():
                self.token.remove_reader(fd)
            over()

        return stop

    @coroutine
    def checkpoint(self) -> Generator[None, None, None]:
        yield  # as asyncio.sleep(0)

    def on_close(self, cleanup: Callable[[], Coroutine[Any, Any, None]]) -> None:
        # asyncio.run and uvloop.run close every async generator that was started on the loop before
        # they close the loop: the one hook they have. One step by hand starts it.
        async def closer() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                await cleanup()

        self._closer = closer()
        first: Any = self._closer.asend(None)
        try:
            first.send(None)
        except StopIteration:
            pass

    @property
    def closed(self) -> bool:
        return self.token.is_closed()


class _TrioWaiter:
    __slots__ = ("done", "error", "task")

    def __init__(self) -> None:
        self.task: trio.lowlevel.Task | None = None
        self.done = False
        self.error: BaseException | None = None


class TrioDoor(Door):
    """trio. One system task stands in for ``call_soon``, which trio does not have."""

    def __init__(self) -> None:
        import trio

        self._trio = trio
        self.token = trio.lowlevel.current_trio_token()
        self.context = Context()
        self._due: list[Callable[[], object]] = []
        self._pump_parked: trio.lowlevel.Task | None = None
        self._cleanup: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._closed = False
        self._readers: set[trio.CancelScope] = set()
        trio.lowlevel.spawn_system_task(self._pump, name="aiogpu reactor", context=self.context)

    async def _pump(self) -> None:
        lowlevel = self._trio.lowlevel
        try:
            while True:
                due, self._due = self._due, []
                for fn in due:
                    fn()
                if self._due:
                    await lowlevel.checkpoint()
                else:
                    self._pump_parked = lowlevel.current_task()
                    try:
                        await lowlevel.wait_task_rescheduled(self._abort_pump)
                    finally:
                        self._pump_parked = None
        finally:
            # System tasks are cancelled once everything else has ended: the loop is closing.
            with self._trio.CancelScope(shield=True):
                if self._cleanup is not None:
                    # The cleanup still waits through this door: a second pump serves it.
                    async with self._trio.open_nursery() as nursery:
                        nursery.start_soon(self._pump_until_closed)
                        await self._cleanup()
                        self._closed = True
                        self._kick()
            self._closed = True
            for scope in tuple(self._readers):
                scope.cancel()

    async def _pump_until_closed(self) -> None:
        while not self._closed:
            due, self._due = self._due, []
            for fn in due:
                fn()
            await self._trio.sleep(0 if self._due else 0.001)

    def _abort_pump(self, _: Any) -> trio.lowlevel.Abort:
        self._pump_parked = None
        succeeded: trio.lowlevel.Abort = self._trio.lowlevel.Abort.SUCCEEDED
        return succeeded

    def _kick(self) -> None:
        if self._pump_parked is not None:
            task, self._pump_parked = self._pump_parked, None
            self._trio.lowlevel.reschedule(task)

    def waiter(self) -> _TrioWaiter:
        return _TrioWaiter()

    async def park(self, waiter: _TrioWaiter) -> None:
        lowlevel = self._trio.lowlevel
        if waiter.done:
            await lowlevel.checkpoint()
        else:
            waiter.task = lowlevel.current_task()
            succeeded: trio.lowlevel.Abort = lowlevel.Abort.SUCCEEDED

            def abort(_: Any) -> trio.lowlevel.Abort:
                waiter.task = None
                return succeeded

            await lowlevel.wait_task_rescheduled(abort)
        if waiter.error is not None:
            raise waiter.error

    def settle(self, waiter: _TrioWaiter, error: BaseException | None) -> None:
        if not waiter.done:
            waiter.done, waiter.error = True, error
            if waiter.task is not None:
                task, waiter.task = waiter.task, None
                self._trio.lowlevel.reschedule(task)

    def soon(self, fn: Callable[[], object]) -> None:
        self._due.append(fn)
        self._kick()

    def post(self, fn: Callable[[], object]) -> None:
        try:
            self.token.run_sync_soon(fn)
        except self._trio.RunFinishedError as error:
            raise DoorClosed from error

    def spawn(
        self,
        fn: Callable[[], Coroutine[Any, Any, None]],
        context: Context,
        over: Callable[[], object] = _nothing,
    ) -> Callable[[], object]:
        scope = self._trio.CancelScope()

        async def run() -> None:
            try:
                with scope:
                    await fn()
            finally:
                over()

        self._trio.lowlevel.spawn_system_task(run, name="aiogpu", context=context)
        return scope.cancel

    def on_readable(
        self, fd: int, fn: Callable[[], object], over: Callable[[], object]
    ) -> Callable[[], None]:
        # Shielded: the cleanup, when all system tasks have been cancelled, still waits for the device.
        scope = self._trio.CancelScope(shield=True)
        self._readers.add(scope)

        async def read() -> None:
            try:
                with scope:
                    while not self._closed:
                        await self._trio.lowlevel.wait_readable(fd)
                        fn()
            finally:
                self._readers.discard(scope)
                over()

        self._trio.lowlevel.spawn_system_task(read, name="aiogpu wake-ups", context=self.context)
        return scope.cancel

    async def checkpoint(self) -> None:
        await self._trio.lowlevel.checkpoint()

    def on_close(self, cleanup: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._cleanup = cleanup

    @property
    def closed(self) -> bool:
        return self._closed


def _in_trio() -> bool:
    # Without these another thread is importing it right now, and nobody runs it yet.
    lowlevel = getattr(sys.modules.get("trio"), "lowlevel", None)
    ask: Callable[[], bool] | None = getattr(lowlevel, "in_trio_task", None)
    return ask is not None and ask()


def current_token() -> Any:
    """What identifies the running event loop, or ``None``."""
    # trio first: in guest mode, an asyncio loop runs in the same thread. Without trio imported this
    # is one dictionary look-up.
    if "trio" in sys.modules and _in_trio():
        return sys.modules["trio"].lowlevel.current_trio_token()
    return asyncio._get_running_loop()


def open_door() -> Door:
    """The door into the running event loop."""
    token = current_token()
    if token is None:
        raise RuntimeError(
            "aiogpu needs a running event loop in this thread: call this from a coroutine, started with "
            "asyncio.run(main()), uvloop.run(main()), trio.run(main) or anyio.run(main). A worker thread "
            "(run_sync, to_thread, a web framework's `def` endpoint) has none: await it in the coroutine "
            "around it, or make the endpoint an `async def`"
        )
    return AsyncioDoor() if isinstance(token, asyncio.AbstractEventLoop) else TrioDoor()
