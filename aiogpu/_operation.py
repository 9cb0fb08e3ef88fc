"""The awaitable handle of one transfer.

Law of this file: ``await`` means *finished*. An operation starts when it is made, not when it is awaited; it
can be awaited by many tasks, many times, from any loop; and it holds on to nothing itself: what the
device still uses is kept by the points and jobs in flight, whether anybody waits or not.

Its life, as a table (:data:`TRANSITIONS`); what is not in it cannot happen, except that in a final state
every late or doubled completion is ignored:

    QUEUED     --SUBMIT-->    IN_FLIGHT     the device has all of it: ``ordered()`` returns from here on
    QUEUED     --COMPLETE-->  DONE          there was nothing for the device to do
    QUEUED     --FAIL-->      FAILED        it could not be submitted
    IN_FLIGHT  --COMPLETE-->  DONE
    IN_FLIGHT  --FAIL-->      FAILED        the device reported an error
"""

from __future__ import annotations

import enum
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from . import _loops
from ._emit import emit, operation_observers
from ._errors import CaptureError, bare, fresh
from ._loops import Door, DoorClosed
from ._runtime import current_runtime
from .drivers.base import Driver, Stream

if TYPE_CHECKING:
    from ._reactor import Point, Reactor

__all__ = ["TRANSITIONS", "Happening", "Operation", "State"]

T = TypeVar("T")


class State(enum.Enum):
    __hash__ = object.__hash__  # enum's own is a function in Python
    QUEUED = "queued"
    IN_FLIGHT = "in flight"
    DONE = "done"
    FAILED = "failed"


class Happening(enum.Enum):
    __hash__ = object.__hash__
    SUBMIT = "submit"
    COMPLETE = "complete"
    FAIL = "fail"


TRANSITIONS: dict[tuple[State, Happening], State] = {
    (State.QUEUED, Happening.SUBMIT): State.IN_FLIGHT,
    (State.QUEUED, Happening.COMPLETE): State.DONE,
    (State.QUEUED, Happening.FAIL): State.FAILED,
    (State.IN_FLIGHT, Happening.COMPLETE): State.DONE,
    (State.IN_FLIGHT, Happening.FAIL): State.FAILED,
}
_FINAL = (State.DONE, State.FAILED)
_REMEDY = "what `await operation` returns"
_SUBMITTED = (State.IN_FLIGHT, *_FINAL)


class Operation(Generic[T]):
    """A transfer that has been started. ``await`` it for its result.

    * ``await operation`` returns when the value is complete: usable at once, on whatever stream or
      thread comes next. It is a checkpoint (others run, a cancellation is noticed), also when the
      operation has long finished.
    * ``await operation.ordered()`` returns earlier, when the work has been handed to the device: the
      value is usable on the current stream.
    * Cancelling a waiter ends the wait, not the transfer: submitted device work cannot be withdrawn.
      Buffers stay alive until the device is done with them.
    * A failure is raised in every waiter, as an exception object of its own.
    * An operation that nobody ever awaited warns, with the line that started it.
    """

    __slots__ = (
        "__weakref__",
        "_awaited",
        "_born",
        "_checks",
        "_driver",
        "_end",
        "_error",
        "_homes",
        "_lease",
        "_lock",
        "_moved",
        "_nbytes",
        "_over",
        "_owner",
        "_reactor",
        "_site",
        "_spoiled",
        "_state",
        "_to_host",
        "_told",
        "_value",
        "_waiters",
        "_what",
    )

    def __init__(self, what: str, reactor: Reactor, *, to_host: bool = False, site: int = 2) -> None:
        frame = sys._getframe(site)
        self._site = (frame.f_code.co_filename, frame.f_lineno)
        self._what = what
        self._nbytes = 0
        self._born = time.monotonic()
        self._reactor = reactor
        self._state = State.QUEUED
        self._value: T | None = None
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        #: Who waits, and for which states.
        self._waiters: list[_Waiter] = []
        self._over: list[Callable[[], object]] = []
        self._awaited = False
        # Result tensors on the device, and the streams their memory is already known to be used on.
        self._driver: Driver | None = None
        self._moved: list[torch.Tensor] = []
        self._homes: set[Any] = set()
        #: The result is for the host, which no stream order can make wait.
        self._to_host = to_host
        #: While in flight: the stream that the last event was recorded on, and its point.
        self._end: tuple[Stream, Point] | None = None
        #: Debug mode: have the sources been written since the call?
        self._checks: Callable[[], bool] | None = None
        self._spoiled = False
        self._told = False
        #: Unfinished operations of the task that started this one (see ``_tasks``), and its stream.
        self._owner: set[Operation[Any]] | None = None
        self._lease: Stream | None = None
        reactor.operations[self] = None

    # -- for users ---------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, Any, T]:
        self._awaited = True
        yield from self._finished(self._door())
        if self._error is not None:
            raise fresh(self._error)
        if self._checks is not None or self._spoiled:
            self._check_sources()
        if self._moved:
            self._hand_over()
        return cast(T, self._value)

    def __bool__(self) -> bool:
        # Or `if item(flag):` would always be taken.
        raise TypeError(f"{self._what}() gave an operation, not its result, which is {_REMEDY}")

    if not TYPE_CHECKING:  # type checkers find out by themselves, and better

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"an operation has no attribute {name!r}; its result may have, which is {_REMEDY}",
                name=name,
                obj=self,
            )

    def ordered(self) -> Coroutine[Any, Any, T]:
        """Wait until the work has been handed to the device; use the result on the current stream.

        ::

            x = await aiogpu.to_device(batch).ordered()     # the copy may still be running
            y = model(x)                                    # behind it, on this stream

        The current stream of the awaiting task (or thread) is ordered after the transfer, as of the
        moment this returns, and the result's memory is kept for it; nothing waits on the host for the
        device. On any *other* stream, and in host code, the result is usable only after ``await
        operation``. **The source must stay unwritten until** :meth:`done`. A failure of the device later on
        is raised by ``await operation``, and by whatever meets it first.

        Any number of tasks may wait, in any loop, before or after the end. It is one checkpoint for
        what the call has submitted itself (up to 64 KiB, a page-locked tensor up to 1 MiB on its way to the
        device, mostly a ``copy_`` from page-locked memory); other transfers are handed over by a thread. On
        the CPU, where work runs at once on the calling thread, it is the same as ``await operation``.

        Raises
        ------
        TypeError
            At once, for results in host memory (``to_host``, ``item``, a ``copy_`` to the host): no stream
            order makes the host wait.
        CaptureError
            The current stream is being captured into a CUDA graph, and the transfer has not finished.
        torch.OutOfMemoryError, ...
            What the submission failed with; each waiter gets an exception object of its own.
        """
        if self._to_host:
            raise TypeError(
                f"{self._what}() has its result in host memory, where it cannot be used before it is "
                "finished: write `await op` instead of `await op.ordered()`"
            )
        self._awaited = True
        return self._wait_ordered()

    async def _wait_ordered(self) -> T:
        await self._reach(self._door(), _SUBMITTED)
        with self._lock:  # another loop's thread may complete it right here
            state, value, error, end = self._state, self._value, self._error, self._end
        if state is State.IN_FLIGHT and (end is None or end[1].engine.driver.eager):
            return await self  # streams do not order what comes next
        if error is not None:
            raise fresh(error)
        self._check_sources()
        if end is not None:
            self._follow(*end)
        self._hand_over()
        return cast(T, value)

    def _door(self) -> Door:
        """The running loop's: it may be another one's coroutine that waits."""
        door = self._reactor.door
        return door if _loops.current_token() is door.token else current_runtime().reactor.door

    def done(self) -> bool:
        """Has it finished, on the device and in host memory, well or badly?"""
        return self._state in _FINAL

    def __repr__(self) -> str:
        age = time.monotonic() - self._born
        name, line = self._site
        return (
            f"<Operation {self._what}, {_size(self._nbytes)}, {self._state.value}, "
            f"{age * 1e3:.1f} ms old, started at {name}:{line}>"
        )

    def __del__(self) -> None:
        if not self._awaited:
            failure = f" It failed: {self._error!r}" if self._error is not None else ""
            self._warn(f"was never awaited: nobody knows when its result is complete.{failure}")
        elif self._spoiled and not self._told:
            self._warn("had a source that was written in place before it was done(): a mixture, perhaps.")

    def _warn(self, what: str) -> None:
        message = f"aiogpu.{self._what}(...) {what}"
        warnings.warn_explicit(message, RuntimeWarning, *self._site, source=self)

    # -- for those who carry it out ----------------------------------------------------------------

    def submitted(self, value: T | None = None, end: tuple[Stream, Point] | None = None) -> None:
        """The device has it. From any thread.

        ``value``: what it will complete with, where that is known; ``end``: the stream that the last
        event was recorded on, and the point that waits for it.
        """
        self._happen(Happening.SUBMIT, value, end=end)

    def launched(self, value: T | None, end: tuple[Stream, Point] | None) -> None:
        """:meth:`submitted`, while nobody else knows of it."""
        self._state, self._value, self._end = State.IN_FLIGHT, value, end

    def complete(self, value: T) -> None:
        """It has finished; wakes the waiters. From any thread."""
        self._happen(Happening.COMPLETE, value)

    def fail(self, error: BaseException) -> None:
        """It has failed; wakes the waiters. From any thread."""
        self._happen(Happening.FAIL, error=bare(error))

    def when_over(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once the state is final: now, or in whichever thread makes it so."""
        with self._lock:
            if self._state not in _FINAL:
                self._over.append(callback)
                return
        callback()

    def moved(self, driver: Driver, tensors: list[torch.Tensor], homes: set[Any]) -> None:
        """``tensors`` is new device memory, known to be used on the streams ``homes``."""
        self._driver, self._moved, self._homes = driver, tensors, homes

    def _happen(
        self,
        happening: Happening,
        value: T | None = None,
        *,
        error: BaseException | None = None,
        end: tuple[Stream, Point] | None = None,
    ) -> None:
        over: list[Callable[[], object]] = []
        with self._lock:
            if self._state in _FINAL:
                return
            state = self._state = TRANSITIONS[self._state, happening]
            self._value, self._error, self._end = value, error, end
            waiters = self._waiters
            if waiters:
                self._waiters = [waiter for waiter in waiters if state not in waiter.states]
                waiters = [waiter for waiter in waiters if state in waiter.states]
            if state in _FINAL:
                over, self._over = self._over, []
        if state in _FINAL:
            self._end_well_or_badly()
        for callback in over:  # first: whoever is woken finds its capacity given back
            callback()
        here = _loops.current_token() if waiters else None
        for waiter in waiters:
            if waiter.door.token is here:
                waiter.settle(None)
            else:
                try:
                    waiter.door.post(partial(waiter.settle, None))
                except DoorClosed:
                    pass  # the waiter's loop is gone, and the waiter with it

    def _end_well_or_badly(self) -> None:
        self._reactor.operations.pop(self, None)
        if operation_observers:
            age = time.monotonic() - self._born
            emit(operation_observers, self._what, self._nbytes, age, self._error)
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.discard(self)
        # Now, not at the await: once it is done the sources may be written.
        checks, self._checks = self._checks, None
        self._spoiled = self._spoiled or (checks is not None and checks())

    def _finished(self, door: Door) -> Any:
        """Wait until the state is final; raises nothing but a cancellation."""
        return self._reach(door, _FINAL)

    @coroutine
    def _reach(self, door: Door, states: tuple[State, ...]) -> Generator[Any, Any, None]:
        """Wait until the state is one of ``states``: a checkpoint; raises nothing but a cancellation."""
        # Where the reactor looks before a coroutine that has let others run goes on, the device may well
        # be done by then: a small copy takes less than one round of the loop, and parking for it another one.
        if self._state in states or (door.looks_in_a_turn and self._state is State.IN_FLIGHT):
            yield from door.checkpoint()  # type: ignore[misc]
            if self._state in states:
                return
        with self._lock:
            pending = self._state not in states
            if pending:
                parked = door.waiter()
                waiter = _Waiter(door, door.settler(parked), states)
                self._waiters.append(waiter)
        if not pending:
            yield from door.checkpoint()  # type: ignore[misc]
            return
        try:
            yield from door.park(parked)  # type: ignore[misc]
        except BaseException:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
            raise

    # -- streams -----------------------------------------------------------------------------------

    def _follow(self, stream: Stream, point: Point) -> None:
        """Order the current stream after the end on ``stream``, unless that has come."""
        driver = point.engine.driver
        here = driver.current()
        # None once it is done. A recycled event that another thread has recorded anew orders too much,
        # never too little.
        event = point.event
        if here.raw != stream.raw and event is not None:
            if driver.capturing():
                raise CaptureError(
                    f"ordered() of {self._what}() cannot order a stream that is being captured into a CUDA "
                    "graph after a transfer outside of it: `await op` before the capture"
                )
            try:
                driver.wait(here, event)
            except Exception as error:
                point.engine.rethrow(error)
        owner = self._owner
        if owner is not None and self._lease is not None and here.raw == self._lease.raw:
            # Its task's own stream goes on after it, and so does the task's end: on the device, with
            # nobody waiting on the host. From another stream nobody knows where that leads.
            owner.discard(self)

    # -- debug mode --------------------------------------------------------------------------------

    def _check_sources(self) -> None:
        checks = self._checks  # None once it is over
        if self._spoiled or (checks is not None and checks()):
            self._spoiled = self._told = True
            raise RuntimeError(
                "a source of {}() (started at {}:{}) was written in place before the await at {}: the copy "
                "may hold a mixture. Await it first, or pass a clone.".format(
                    self._what, *self._site, _caller()
                )
            )

    def _hand_over(self) -> None:
        """The waiter's current stream will use the result: let the allocator know.

        No event is needed for the order, the value is finished. But memory that was allocated on a
        copy stream goes back to that stream when it is freed, and the next upload would overwrite it
        under the waiter's kernels.
        """
        if self._driver is None or not self._moved:
            return
        stream = self._driver.current()
        if stream.raw not in self._homes:
            for tensor in self._moved:
                self._driver.keep(tensor, stream)
            self._homes.add(stream.raw)


class _Waiter:
    """A parked coroutine, and what wakes it: one of ``states``."""

    __slots__ = ("door", "settle", "states")

    def __init__(
        self, door: Door, settle: Callable[[BaseException | None], None], states: tuple[State, ...]
    ) -> None:
        self.door = door
        self.settle = settle
        self.states = states


def _caller() -> str:
    """The innermost coroutine frame outside aiogpu."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("aiogpu."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError
