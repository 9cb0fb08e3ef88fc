"""The awaitable handle of one transfer.

Law of this file: ``await`` means *finished*. An operation starts when it is made, not when it is awaited; it
can be awaited by many tasks, many times, from any loop; and it holds on to nothing itself: what the
device still uses is kept by the points and jobs in flight, whether anybody waits or not.

Its life, as a table (:data:`TRANSITIONS`); what is not in it cannot happen, except that in a final state
every late or doubled completion is ignored:

    QUEUED     --SUBMIT-->    IN_FLIGHT     the device has it
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
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from . import _loops
from ._errors import bare, fresh
from ._loops import Door, DoorClosed
from ._runtime import current_runtime
from .drivers.base import Driver

if TYPE_CHECKING:
    from ._reactor import Reactor

__all__ = ["TRANSITIONS", "Happening", "Operation", "State"]

T = TypeVar("T")


class State(enum.Enum):
    QUEUED = "queued"
    IN_FLIGHT = "in flight"
    DONE = "done"
    FAILED = "failed"


class Happening(enum.Enum):
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


class Operation(Generic[T]):
    """A transfer that has been started. ``await`` it for its result.

    * ``await operation`` returns when the value is complete: usable at once, on whatever stream or
      thread comes next. It is a checkpoint (others run, a cancellation is noticed), also when the
      operation has long finished.
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
        "_error",
        "_homes",
        "_lock",
        "_moved",
        "_nbytes",
        "_owner",
        "_reactor",
        "_site",
        "_state",
        "_value",
        "_waiters",
        "_what",
    )

    def __init__(self, what: str, reactor: Reactor, *, site: int = 2) -> None:
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
        self._waiters: list[tuple[Door, Callable[[BaseException | None], None]]] = []
        self._awaited = False
        # Result tensors on the device, and the streams their memory is already known to be used on.
        self._driver: Driver | None = None
        self._moved: list[torch.Tensor] = []
        self._homes: set[Any] = set()
        #: Debug mode: what to verify about the sources once finished.
        self._checks: Callable[[Operation[Any]], None] | None = None
        #: Unfinished operations of the task that started this one (see ``_tasks``).
        self._owner: set[Operation[Any]] | None = None
        reactor.operations[self] = None

    # -- for users ---------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, Any, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        self._awaited = True
        token = _loops.current_token()
        door = self._reactor.door
        if token is not door.token:  # another loop's coroutine waits for it
            door = current_runtime().reactor.door
        await self._finished(door)
        if self._error is not None:
            raise fresh(self._error)
        if self._checks is not None:
            self._checks(self)
        self._hand_over()
        return cast(T, self._value)

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
            name, line = self._site
            failure = f" It failed: {self._error!r}" if self._error is not None else ""
            warnings.warn_explicit(
                f"aiogpu.{self._what}(...) was never awaited: nobody knows when its result is complete."
                f"{failure}",
                RuntimeWarning,
                name,
                line,
                source=self,
            )

    # -- for those who carry it out ----------------------------------------------------------------

    def submitted(self) -> None:
        """The device has it."""
        self._happen(Happening.SUBMIT)

    def complete(self, value: T) -> None:
        """It has finished; wakes the waiters. From any thread."""
        self._happen(Happening.COMPLETE, value)

    def fail(self, error: BaseException) -> None:
        """It has failed; wakes the waiters. From any thread."""
        self._happen(Happening.FAIL, error=bare(error))

    def moved(self, driver: Driver, tensors: list[torch.Tensor], homes: set[Any]) -> None:
        """``tensors`` is new device memory, known to be used on the streams ``homes``."""
        self._driver, self._moved, self._homes = driver, tensors, homes

    def _happen(
        self, happening: Happening, value: T | None = None, *, error: BaseException | None = None
    ) -> None:
        with self._lock:
            if self._state in _FINAL:
                return
            self._state = TRANSITIONS[self._state, happening]
            if self._state not in _FINAL:
                return
            self._value, self._error = value, error
            waiters, self._waiters = self._waiters, []
        self._reactor.operations.pop(self, None)
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.discard(self)
        here = _loops.current_token() if waiters else None
        for door, settle in waiters:
            if door.token is here:
                settle(None)
            else:
                try:
                    door.post(partial(settle, None))
                except DoorClosed:
                    pass  # the waiter's loop is gone, and the waiter with it

    async def _finished(self, door: Door) -> None:
        """Wait until the state is final; raises nothing but a cancellation."""
        with self._lock:
            pending = self._state not in _FINAL
            if pending:
                waiter = door.waiter()
                entry = (door, door.settler(waiter))
                self._waiters.append(entry)
        if not pending:
            await door.checkpoint()
            return
        try:
            await door.park(waiter)
        except BaseException:
            with self._lock:
                if entry in self._waiters:
                    self._waiters.remove(entry)
            raise

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


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError
