"""Blocking and launch-heavy code, on aiogpu's own threads, as if it ran in the coroutine.

Law of this file: the function sees the caller's current stream, torch modes and context variables; what it
changes of them stays behind. A call waits for its token before it is handed to a thread, so a
cancelled one leaves nothing queued; a running one is waited for, or, abandoned, keeps stream and token until
it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import anyio

from . import _torchstate
from ._engine import Engine
from ._loops import Door, DoorClosed
from ._runtime import Runtime, current_runtime
from ._streams import Lease
from ._tasks import current_task

__all__ = ["run_sync"]

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


class _Call:
    """One call on its way through a worker thread."""

    def __init__(self, engine: Engine, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.engine = engine
        self.fn: Callable[..., Any] | None = fn
        self.args = args
        self.stream = engine.driver.current()
        self.modes = _torchstate.capture()
        self.context = copy_context()
        #: The task's lease while the call is abandoned. A list: both threads may take it out, one gets it.
        self.leases: list[Lease] = []
        self.result: Any = None
        self.error: BaseException | None = None
        self.returned = False  # set in the worker thread
        self.landed = False  # set on the loop's thread
        self.settle: Callable[[BaseException | None], None] | None = None

    def run(self, returned: Callable[[], None]) -> None:
        """In the worker thread. Raises nothing: every outcome belongs to the waiter."""
        driver = self.engine.driver
        try:
            with driver.on(self.stream), self.modes.applied():
                assert self.fn is not None
                self.result = self.context.run(self.fn, *self.args)
        except BaseException as error:
            self.error = error
        finally:
            self.fn, self.args = None, ()
            _torchstate.scrub()
            returned()

    def outcome(self) -> Any:
        try:
            if self.error is not None:
                raise self.error
            return self.result
        finally:
            self.error = self.result = None  # no cycle through the traceback


async def run_sync(
    fn: Callable[[*Arguments], R],
    *args: *Arguments,
    abandon_on_cancel: bool = False,
    limiter: anyio.CapacityLimiter | None = None,
) -> R:
    """Run ``fn(*args)`` in one of aiogpu's threads, on this task's stream and with its torch state.

    ::

        y = await aiogpu.run_sync(model, x)       # launching 300 layers takes the loop's thread 5 ms
        await aiogpu.run_sync(loss.backward)

    The await ends when the function returns: work that it submitted is on the stream, as if it had been
    submitted here. Signature and rules are those of ``anyio.to_thread.run_sync``; the threads are not.

    Parameters
    ----------
    abandon_on_cancel:
        On cancellation, leave the function running and return. Until it returns it keeps its token and
        the task's stream. Otherwise a running function is waited for.
    limiter:
        Bounds how many run at once; default: the runtime's ``workers``.

    Raises
    ------
    Whatever ``fn`` raises.
    """
    if not callable(fn):
        raise TypeError(f"run_sync() takes a function and its arguments, not a {type(fn).__name__}")
    runtime = current_runtime()
    task = current_task()
    engine = task.engine if task is not None else await runtime.engine(None)
    limiter = limiter or runtime.limiter
    borrower = object()
    await limiter.acquire_on_behalf_of(borrower)
    # From here to the hand-over nothing awaits: a cancellation cannot lose the token in between.
    call = _Call(engine, fn, args)
    del fn, args
    door = runtime.reactor.door

    def on_loop() -> None:
        call.landed = True
        limiter.release_on_behalf_of(borrower)
        if call.settle is not None:
            call.settle(None)

    def returned() -> None:
        call.returned = True
        _return_lease(runtime, call)
        try:
            door.post(on_loop)
        except DoorClosed:
            pass

    try:
        engine.workers.submit(partial(call.run, returned))
    except BaseException:
        limiter.release_on_behalf_of(borrower)
        raise
    try:
        await _wait(door, call, abandon_on_cancel)
    except BaseException:
        if abandon_on_cancel and task is not None:
            task.lease.hold()
            call.leases.append(task.lease)
            if call.returned:  # in the meantime: whichever thread takes the lease out gives it back
                _return_lease(runtime, call)
        raise
    return call.outcome()  # type: ignore[no-any-return]


def _return_lease(runtime: Runtime, call: _Call) -> None:
    """The abandoned function has returned: its stream is busy until what it submitted has ended."""
    try:
        lease = call.leases.pop()
    except IndexError:
        return
    try:
        event = call.engine.driver.record(call.stream)
    except Exception:
        lease.release(None)
    else:
        lease.release(runtime.watch(call.engine, call.stream, event))


async def _wait(door: Door, call: _Call, abandon: bool) -> None:
    """Wait until the function has returned; raise a cancellation, if one came, only then.

    The shield keeps anyio's and trio's level cancellation out; the loop outlasts asyncio's native
    ``Task.cancel``, from which no scope can shield, and which cancels the very future that we wait for.
    """
    cancellation: BaseException | None = None
    with anyio.CancelScope(shield=not abandon):
        while not call.landed:
            waiter = door.waiter()
            call.settle = door.settler(waiter)
            try:
                await door.park(waiter)
            except BaseException as error:
                if abandon:
                    raise
                cancellation = error
    if cancellation is not None:
        raise cancellation
