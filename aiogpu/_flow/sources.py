"""Where items come from: any iterable, sync or async, read ahead of its consumer by a bounded number.

Law of this file: a sync source never sees the event loop. Whatever it does (entering it, ``iter``, every
``next``, closing it) is done in one thread, which is its own until the end: loaders, database cursors and
CUDA decoders may insist on that. An async source lives in one task of its own, for the same reason.

An item may be *begun* when there is a credit for it. That bounds memory by what exists, not by what has
been handed over, and because there may be several, a source never waits for the loop between two items.
"""

from __future__ import annotations

import abc
import copy
import inspect
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from time import perf_counter
from typing import Any, Generic, TypeVar, cast

import anyio

from .._decorator import task
from .._handoff import Handoff
from .._loops import Door, DoorClosed
from .._runtime import current_runtime
from .reorder import ReorderBuffer
from .threads import in_thread, is_cancellation, log

__all__ = ["Source", "check_source", "open_source"]

T = TypeVar("T")

#: Seconds after which a source that waits for a credit looks whether its loop is still there.
_LOOK_S = 0.5


class Source(abc.ABC, Generic[T]):
    """An iterable that is read into a buffer, by :meth:`run`, for as long as it has credits."""

    def __init__(self, kind: str, blame: Callable[[BaseException, int], BaseException]) -> None:
        self.kind = kind
        self.name = f"the source, a {kind},"
        #: Adds to an error what it is about: the number of the item that failed.
        self._blame = blame
        self.items = 0
        #: Items that the source has been asked for, the present one included.
        self.begun = 0
        #: Seconds spent making items, and waiting for credits.
        self.busy = 0.0
        self.held_back = 0.0

    @abc.abstractmethod
    def grant(self) -> None:
        """One more item may be begun."""

    @abc.abstractmethod
    async def run(self, into: ReorderBuffer[T]) -> None:
        """Put every item into ``into``, in order, and close it, with the failure if there is one."""


def check_source(source: object, verb: str) -> None:
    """Raise ``TypeError`` for what cannot be iterated, with what to write instead."""
    kind = type(source)
    if any(hasattr(kind, name) for name in ("__aiter__", "__aenter__", "__iter__", "__getitem__")):
        return
    if inspect.iscoroutine(source):
        source.close()
        remedy = "a coroutine: await it first, or write an async generator (`async def` with `yield`)"
    elif inspect.isgeneratorfunction(source) or inspect.isasyncgenfunction(source):
        remedy = f"a function that makes a generator: call it, {verb}({source.__qualname__}(...))"
    elif isinstance(source, type):
        remedy = f"the class {source.__qualname__}: make an instance"
    else:
        remedy = f"a {kind.__qualname__}, which can be iterated neither with `for` nor with `async for`"
    raise TypeError(f"{verb}() takes any sync or async iterable as its source, not {remedy}")


def open_source(
    source: Iterable[T] | AsyncIterable[T],
    credits: int,
    blame: Callable[[BaseException, int], BaseException],
    *,
    stateful: bool = False,
) -> Source[T]:
    """``source``, read ahead by ``credits`` items. ``stateful``: with its state after each of them."""
    kind = type(source).__qualname__
    if _is_async(source):
        return _AsyncSource(cast(AsyncIterable[T], source), credits, kind, blame, stateful)
    return _ThreadSource(cast(Iterable[T], source), credits, kind, blame, stateful)


def _is_async(source: Any) -> bool:
    """What can be iterated either way is read in a thread: the async way of a progress bar, for example, only
    wraps the sync one, and would block the loop. (``iterable_awaitable``: tqdm's, around an async source.)"""
    kind = type(source)
    if hasattr(kind, "__iter__") and not getattr(source, "iterable_awaitable", False):
        return False
    return hasattr(kind, "__aiter__") or hasattr(kind, "__aenter__")


def _state(source: Any) -> Any:
    # A copy: the source goes on, and may change what it gave out.
    return copy.deepcopy(source.state_dict())


class _ThreadSource(Source[T]):
    """A sync iterable, in a thread."""

    def __init__(
        self,
        source: Iterable[T],
        credits: int,
        kind: str,
        blame: Callable[[BaseException, int], BaseException],
        stateful: bool,
    ) -> None:
        super().__init__(kind, blame)
        self._source = source
        self._stateful = stateful
        self._credits = threading.Semaphore(credits)
        self._stopping = False
        self._arrived: deque[tuple[T, Any]] = deque()
        self._announced = False

    def grant(self) -> None:
        self._credits.release()

    def _stop(self) -> None:
        self._stopping = True
        self._credits.release()  # it may be waiting for one

    async def run(self, into: ReorderBuffer[T]) -> None:
        error: BaseException | None = None
        read = partial(self._read, current_runtime().reactor.door, into)
        try:
            # A limiter of its own: a source that lives long must not take a token from short calls.
            await in_thread(read, what=self.name, limiter=anyio.CapacityLimiter(1), on_cancel=self._stop)
        except BaseException as raised:
            if is_cancellation(raised, self.name):
                raise
            error = self._blame(raised, self.items + len(self._arrived))
        finally:
            self._stop()
        self._take_in(into)
        into.close(error)
        del error

    # -- in the thread -----------------------------------------------------------------------------

    def _read(self, door: Door, into: ReorderBuffer[T]) -> None:
        with ExitStack() as stack:
            if self._stopping:
                return
            source = self._source
            iterator: Iterator[T] | None = iter(_enter(source, stack))
            # A list, so that the last reference can be dropped in this thread: a DataLoader's iterator
            # ends its worker processes when it goes.
            held = [iterator]
            stack.callback(_close, held)
            del iterator
            while self._credit(door):
                start = perf_counter()
                self.begun += 1
                try:
                    item = next(held[0])  # type: ignore[arg-type]
                except StopIteration:
                    self.begun -= 1
                    return
                state = _state(source) if self._stateful else None
                self.busy += perf_counter() - start
                self._arrived.append((item, state))
                del item, state  # while it waits, this frame must not keep an item
                # Appended first, then announced. The loop's thread clears the mark first, then looks:
                # what it does not find there was announced after the mark had been cleared.
                if not self._announced:
                    self._announced = True
                    try:
                        door.post(partial(self._take_in, into))
                    except DoorClosed:
                        return

    def _credit(self, door: Door) -> bool:
        start = perf_counter()
        # A loop that was closed in the middle of everything tells nobody.
        while not self._credits.acquire(timeout=_LOOK_S):
            if door.closed:
                return False
        self.held_back += perf_counter() - start
        return not self._stopping

    # -- on the loop's thread ----------------------------------------------------------------------

    def _take_in(self, into: ReorderBuffer[T]) -> None:
        self._announced = False
        while self._arrived:
            item, state = self._arrived.popleft()
            entry = into.reserve()
            entry.state = state
            self.items += 1
            entry.fill(item)
            del item, state, entry


def _enter(source: Any, stack: ExitStack) -> Any:
    """Enter what wants to be entered. An iterator, or a file, has been opened by whoever passes it."""
    kind = type(source)
    entered = None
    if hasattr(kind, "__enter__") and not hasattr(kind, "__next__"):
        entered = stack.enter_context(source)
    elif hasattr(kind, "auto_stop"):  # SPDL's pipelines: starts and stops their thread
        stack.enter_context(source.auto_stop())
    return entered if hasattr(type(entered), "__iter__") else source


def _close(held: list[Any]) -> None:
    iterator = held.pop()
    close = getattr(iterator, "close", None)
    if callable(close):
        close()


class _AsyncSource(Source[T]):
    """An async iterable, in a task."""

    def __init__(
        self,
        source: AsyncIterable[T],
        credits: int,
        kind: str,
        blame: Callable[[BaseException, int], BaseException],
        stateful: bool,
    ) -> None:
        super().__init__(kind, blame)
        self._source = source
        self._stateful = stateful
        self._credits = anyio.Semaphore(credits)

    def grant(self) -> None:
        self._credits.release()

    async def run(self, into: ReorderBuffer[T]) -> None:
        error: BaseException | None = None
        try:
            await self._read(into)
        except BaseException as raised:
            if is_cancellation(raised, self.name):
                raise
            error = self._blame(raised, self.items)
        into.close(error)
        del error

    # A task: items may be made on the device, by the source itself or by tasks that it awaits.
    @task
    async def _read(self, into: ReorderBuffer[T]) -> None:
        async with AsyncExitStack() as stack:
            kind = type(self._source)
            if hasattr(kind, "__aenter__") and not hasattr(kind, "__anext__"):
                iterator: AsyncIterator[T] = aiter(await stack.enter_async_context(self._source))  # type: ignore[arg-type]
            else:
                iterator = aiter(self._source)
            stack.push_async_callback(self._close, iterator)
            while True:
                start = perf_counter()
                await self._credits.acquire()
                self.held_back += perf_counter() - start
                start = perf_counter()
                self.begun += 1
                try:
                    item = await anext(iterator)
                except StopAsyncIteration:
                    self.begun -= 1
                    return
                self.busy += perf_counter() - start
                state = _state(self._source) if self._stateful else None
                value = Handoff(item)
                entry = into.reserve()
                entry.state = state
                self.items += 1
                entry.fill(value)
                del item, value, state, entry

    async def _close(self, iterator: AsyncIterator[T]) -> None:
        aclose = getattr(iterator, "aclose", None)
        if aclose is None:
            return
        grace = current_runtime().grace
        with anyio.move_on_after(grace, shield=True) as scope:
            await aclose()
        if scope.cancelled_caught:
            log.warning("aiogpu: %s had not closed %.1f s after its block was left", self.name, grace)
