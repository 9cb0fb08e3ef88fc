"""Capacity of a device: how many operations, how many bytes, may be under way at once.

Law of this file: tokens come back when the *device* is done with the work of a block, not when the coroutine
has left it; whatever happens to the coroutine, they come back exactly once. They are granted in the order of
arrival, and nobody overtakes: a large request is not starved by small ones.

A limiter belongs to no event loop. Its books are kept under one lock; whoever returns tokens, in whatever
thread, grants them, and wakes each receiver through the door of the receiver's own loop.
"""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from . import _loops
from ._engine import Engine
from ._errors import CaptureError
from ._loops import Door, DoorClosed
from ._runtime import Runtime, current_runtime
from ._tasks import current_task

if TYPE_CHECKING:
    from ._operation import Operation

__all__ = ["Limiter", "LimiterStatistics", "Slot"]


@dataclass(frozen=True)
class LimiterStatistics:
    """What a limiter has given out now.

    ``borrowed``, ``borrowed_bytes``: slots whose tokens have not come back yet, and their bytes.
    ``waiting``, ``waiting_bytes``: requests in the queue, and theirs.
    """

    borrowed: int
    borrowed_bytes: int
    waiting: int
    waiting_bytes: int


class Limiter:
    """FIFO-fair capacity for work on a device, by number of operations, by bytes, or both.

    ::

        limiter = aiogpu.Limiter(operations=4, bytes=8 * 2**30)

        async def handle(request):
            async with limiter.slot(estimate(request)):     # waits here for its turn
                x = await aiogpu.to_device(request.data)
                y = await aiogpu.run_sync(model, x)
                return await aiogpu.to_host(y)

    Leaving the block does not wait. Its tokens come back when what the task has submitted to its current
    stream, and the transfers it has started in the block, have finished on the device; also after an
    exception, a cancellation, or the end of the loop. Outside of tasks that is the ambient stream, and
    transfers count only if the block has awaited them. On the legacy default stream that takes an event,
    which is a barrier between compute streams: leave the block inside a task.

    It may be made anywhere, also at import, and shared by event loops in several threads. Requests are
    served in the order of their arrival. A waiter that is cancelled leaves no trace. Do not nest slots of one
    limiter in one another: two tasks that each hold one may wait for each other.

    It is no ``limiter`` for :func:`aiogpu.run_sync`, whose tokens count threads and come back when the
    function returns: put the call into a slot instead.

    Parameters
    ----------
    operations:
        How many slots may be held at once, at least 1; ``None``: any number.
    bytes:
        How many bytes they may declare in sum, at least 1; ``None``: any number. They are the caller's
        estimate; nothing is measured.

    Raises
    ------
    ValueError
        Neither limit, or one below 1.
    """

    def __init__(self, operations: int | None = None, bytes: int | None = None) -> None:
        if operations is None and bytes is None:
            raise ValueError(
                "a Limiter needs something to limit: Limiter(operations=4), Limiter(bytes=8 * 2**30), or both"
            )
        self.operations = None if operations is None else _count("operations", operations, least=1)
        self.bytes = None if bytes is None else _count("bytes", bytes, least=1)
        self._borrowed = 0
        self._borrowed_bytes = 0
        #: In order of arrival. An ordered dictionary: cancelled ones leave from the middle.
        self._queue: OrderedDict[_Request, None] = OrderedDict()
        # Re-entrant, as all our locks: a garbage collection may close a suspended task, which returns
        # its tokens in this very thread.
        self._lock = threading.RLock()

    def slot(self, nbytes: int | None = None) -> Slot:
        """``async with limiter.slot(nbytes):`` a block that holds one operation and ``nbytes`` bytes.

        Raises
        ------
        ValueError
            At this call: ``nbytes`` is more than the limiter has, so that it would wait for ever; or not
            given although the limiter counts bytes.
        TypeError
            ``nbytes`` is no integer.
        RuntimeError
            Where the slot is entered a second time.
        CaptureError
            Where it is entered, or left, inside a CUDA-graph capture.
        """
        if nbytes is None:
            if self.bytes is not None:
                raise ValueError(
                    "this Limiter counts bytes: say how many the block will need, limiter.slot(nbytes)"
                )
            nbytes = 0
        nbytes = _count("nbytes", nbytes, least=0)
        if self.bytes is not None and nbytes > self.bytes:
            raise ValueError(
                f"a slot of {nbytes} bytes can never be had from a Limiter of {self.bytes}: split the work "
                "into smaller pieces, or raise Limiter(bytes=...)"
            )
        return Slot(self, nbytes)

    def statistics(self) -> LimiterStatistics:
        """What is borrowed and who waits, now."""
        with self._lock:
            return LimiterStatistics(
                borrowed=self._borrowed,
                borrowed_bytes=self._borrowed_bytes,
                waiting=len(self._queue),
                waiting_bytes=sum(request.nbytes for request in self._queue),
            )

    def __repr__(self) -> str:
        now = self.statistics()
        parts = []
        if self.operations is not None:
            parts.append(f"{now.borrowed} of {self.operations} operations")
        if self.bytes is not None:
            parts.append(f"{now.borrowed_bytes} of {self.bytes} bytes")
        return f"<Limiter, {', '.join(parts)} borrowed, {now.waiting} waiting>"

    async def __aenter__(self) -> NoReturn:
        raise TypeError(
            "a Limiter hands out slots: `async with limiter.slot():`, or limiter.slot(nbytes) to count bytes"
        )

    async def __aexit__(self, *_: object) -> None:
        """Never reached: :meth:`__aenter__` says what to write."""

    def acquire_on_behalf_of(self, borrower: object) -> NoReturn:
        """Says what to write instead of ``run_sync(..., limiter=this)``."""
        raise TypeError(
            "run_sync(limiter=...) takes an anyio.CapacityLimiter, which counts threads. A Limiter's tokens "
            "come back when the device is done: `async with limiter.slot(): await aiogpu.run_sync(...)`"
        )

    acquire_on_behalf_of_nowait = acquire_on_behalf_of  # asked for first

    # -- the books ---------------------------------------------------------------------------------

    def _fits(self, nbytes: int) -> bool:
        return (self.operations is None or self._borrowed < self.operations) and (
            self.bytes is None or self._borrowed_bytes + nbytes <= self.bytes
        )

    def _book(self, nbytes: int) -> None:
        self._borrowed += 1
        self._borrowed_bytes += nbytes

    async def _acquire(self, door: Door, nbytes: int) -> None:
        with self._lock:
            request = None
            if not self._queue and self._fits(nbytes):
                self._book(nbytes)
            else:
                waiter = door.waiter()
                request = _Request(nbytes, door, door.settler(waiter))
                self._queue[request] = None
        try:
            await (door.checkpoint() if request is None else door.park(waiter))
        except BaseException:
            self._withdraw(request, nbytes)
            raise

    def _withdraw(self, request: _Request | None, nbytes: int) -> None:
        """The waiter was cancelled. Was it granted in the same tick, by whatever thread? The lock decides:
        either it is still in the queue, and nobody will grant it any more, or it has tokens to return."""
        with self._lock:
            if request is None:
                self._unbook(nbytes)
            elif request in self._queue:
                del self._queue[request]
            else:
                self._take_back(request)
        self._grant()  # also whoever stood behind a large request that is gone now

    def _unbook(self, nbytes: int) -> None:
        self._borrowed -= 1
        self._borrowed_bytes -= nbytes

    def _take_back(self, request: _Request) -> None:
        """A granted request has nobody to use it. Two may find that out: a coroutine that is being closed,
        and, in another thread, whoever could not wake it because its loop had closed."""
        if request.granted:
            request.granted = False
            self._unbook(request.nbytes)

    def _give_back(self, nbytes: int) -> None:
        """Any thread."""
        with self._lock:
            self._unbook(nbytes)
        self._grant()

    def _grant(self) -> None:
        """Grant what fits, first come first served. Wake-ups are sent without the lock: it is held for a
        few instructions only, so a loop's thread never waits for it."""
        while True:
            with self._lock:
                request = next(iter(self._queue), None)
                if request is None or not self._fits(request.nbytes):
                    return
                del self._queue[request]
                request.granted = True
                self._book(request.nbytes)
            if not request.wake():  # its loop is gone, and its coroutine with it
                with self._lock:
                    self._take_back(request)


class _Request:
    __slots__ = ("door", "granted", "nbytes", "settle")

    def __init__(self, nbytes: int, door: Door, settle: Callable[[BaseException | None], None]) -> None:
        self.nbytes = nbytes
        self.granted = False
        self.door = door
        self.settle = settle

    def wake(self) -> bool:
        """False when there is nobody to wake."""
        if _loops.current_token() is self.door.token:
            self.settle(None)
            return True
        try:
            self.door.post(partial(self.settle, None))
        except DoorClosed:
            return False
        return True


class Slot:
    """One block's share of a :class:`Limiter`; made by :meth:`Limiter.slot`."""

    __slots__ = ("_before", "_engine", "_limiter", "_outstanding", "_runtime", "nbytes")

    def __init__(self, limiter: Limiter, nbytes: int) -> None:
        #: What the block declared, in bytes.
        self.nbytes = nbytes
        self._limiter = limiter
        self._runtime: Runtime | None = None
        #: What must still end on the device before the tokens come back.
        self._outstanding = 0

    async def __aenter__(self) -> None:
        if self._runtime is not None:
            raise RuntimeError("a slot can be entered once: call limiter.slot(...) for each block")
        task = current_task()
        self._runtime = task.runtime if task is not None else current_runtime()
        self._engine: Engine = task.engine if task is not None else await self._runtime.engine(None)
        if self._engine.driver.capturing():
            raise CaptureError(
                "a Limiter's slot cannot be entered while the current stream is being captured into a CUDA "
                "graph: enter it around the capture"
            )
        door = task.door if task is not None else self._runtime.reactor.door
        await self._limiter._acquire(door, self.nbytes)
        # Nothing awaits from here on: no cancellation can come between the tokens and the block.
        self._before = frozenset(task.operations) if task is not None else frozenset()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Awaits nothing: it works in whatever is being cancelled or closed."""
        task = current_task()
        started: list[Operation[Any]] = []
        if task is not None:
            self._engine = task.engine
            started = [operation for operation in tuple(task.operations) if operation not in self._before]
        self._outstanding = 1 + len(started)
        for operation in started:
            operation.when_over(self._one_over)
        self._after_stream(error)

    def _after_stream(self, error: BaseException | None) -> None:
        """The tokens come back behind what the current stream holds now. Children that have ended are in
        there: their parent's stream is ordered behind them."""
        engine = self._engine
        driver = engine.driver
        if driver.capturing():
            self._one_over()  # a capture only notes what is submitted to it, and an event would be noted, too
            if error is None:
                raise CaptureError(
                    "a Limiter's slot was left while the current stream is being captured into a CUDA graph: "
                    "leave it behind the capture"
                )
            return
        assert self._runtime is not None
        stream = driver.current()
        try:
            event = driver.record(stream)
        except BaseException:
            # Nobody can tell any more when the device is done; those who wait shall meet its error, too.
            self._one_over()
            return
        self._runtime.watch(engine, stream, event, self._one_over)

    def _one_over(self, _: BaseException | None = None) -> None:
        """Any thread."""
        limiter = self._limiter
        with limiter._lock:
            self._outstanding -= 1
            if self._outstanding:
                return
        limiter._give_back(self.nbytes)

    def __repr__(self) -> str:
        return f"<Slot of {self.nbytes} bytes of {self._limiter!r}>"


def _count(name: str, given: Any, *, least: int) -> int:
    try:
        value = operator.index(given)
    except TypeError:
        value = None
    if value is None or isinstance(given, bool):
        raise TypeError(f"{name} is a whole number, not {given!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return value
