"""Users' blocking functions, called from a block that may be left at any moment.

Law of this file: leaving waits for a function that is running, as ``run_sync`` does, but not for ever: after
the runtime's ``grace`` it is named in a warning and left to its thread. What runs in these threads is
never the reason why a program hangs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import anyio

from .._loops import Door, DoorClosed
from .._run_sync import run_sync
from .._runtime import current_runtime

__all__ = ["in_thread", "is_cancellation", "log"]

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")
log = logging.getLogger("aiogpu")


def is_cancellation(error: BaseException, what: str) -> bool:
    """Does ``error`` end this task because its block is being left? Everything else is a failure of ``what``.

    A user's coroutine may raise ``CancelledError`` of its own accord (it awaited something that was
    cancelled). That is a failure, too, and must reach whoever waits for the result. A failure while the
    block is being left has nobody to go to, and is logged.
    """
    if isinstance(error, GeneratorExit):
        return True
    being_left = anyio.current_effective_deadline() == -math.inf
    if being_left and isinstance(error, anyio.get_cancelled_exc_class()):
        return True
    if being_left:
        log.warning("aiogpu: %s failed while its block was being left: %r", what, error)
    return False


class _Call:
    """A function, and whether it runs: asked by the loop's thread, answered by the function's."""

    def __init__(self, door: Door, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._door = door
        self._fn: Callable[..., Any] | None = fn
        self._args = args
        self.started = self.ended = self.withdrawn = False
        self.error: BaseException | None = None
        self._notify: Callable[[], None] | None = None

    def __call__(self) -> Any:
        fn, args = self._fn, self._args
        self._fn, self._args = None, ()
        self.started = True
        # Whoever withdraws it sets the flag before it reads `started`: one of both sees the other.
        if self.withdrawn or fn is None:
            return self._end()
        try:
            return fn(*args)
        except BaseException as error:
            self.error = error
            raise
        finally:
            del fn, args
            self._end()

    def _end(self) -> None:
        # Ended first, then look who waits; the waiter first says that it waits, then looks.
        self.ended = True
        if self._notify is not None:
            try:
                self._door.post(self._notify)
            except DoorClosed:
                pass

    async def join(self, seconds: float) -> bool:
        """Wait until it has returned, at most ``seconds``, whatever is cancelled meanwhile."""
        returned = anyio.Event()
        self._notify = returned.set
        if not self.ended:
            with anyio.move_on_after(seconds, shield=True):
                await returned.wait()
        return self.ended


async def in_thread(
    fn: Callable[[*Arguments], R],
    *args: *Arguments,
    what: str,
    limiter: anyio.CapacityLimiter,
    on_cancel: Callable[[], object] | None = None,
) -> R:
    """``run_sync(fn, *args)``; a cancellation waits for ``fn``, but at most the runtime's ``grace``.

    ``what``: its name in warnings. ``on_cancel`` is called at once, and tells ``fn`` to make haste.
    """
    runtime = current_runtime()
    call = _Call(runtime.reactor.door, fn, args)
    del fn, args
    try:
        return await run_sync(call, limiter=limiter, abandon_on_cancel=True)
    except BaseException as error:
        # A coroutine cannot raise a StopIteration: Python makes a RuntimeError of it.
        if call.ended and call.error is not None and (error is call.error or error.__cause__ is call.error):
            call.error = None
            raise
        call.withdrawn = True
        if on_cancel is not None:
            on_cancel()
        if call.started and not isinstance(error, GeneratorExit):
            await _join(call, runtime.grace, what)
        raise


async def _join(call: _Call, grace: float, what: str) -> None:
    if not await call.join(grace):
        log.warning(
            "aiogpu: %s had not returned %.1f s after its block was left. Its thread goes on until it "
            "returns, and cleans up then.",
            what,
            grace,
        )
    elif call.error is not None:
        log.warning("aiogpu: %s failed while its block was being left: %r", what, call.error)
    call.error = None
