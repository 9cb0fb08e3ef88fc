"""Blocking and launch-heavy code, on aiogpu's own threads, as if it ran in the coroutine.

Law of this file: the function sees the caller's current stream, torch modes and context variables; what it
changes of them stays behind. A call waits for its token before it is handed to a thread, so a
cancelled one leaves nothing queued; a running one is waited for, or, abandoned, keeps stream and token until
it returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel

from . import _torchstate
from ._engine import Engine
from ._loops import Door, DoorClosed
from ._runtime import Runtime, current_runtime
from ._streams import Lease
from ._tasks import Task, current_task
from ._workers import WorkerPool

__all__ = ["run_on", "run_sync"]

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


class _Call:
    """One call on its way through a worker thread."""

    __slots__ = (
        "args", "context", "engine", "error", "everywhere", "fn", "landed", "leases", "modes", "result",
        "returned", "settle", "stream",
    )  # fmt: skip

    def __init__(self, engine: Engine, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.engine = engine
        self.fn: Callable[..., Any] | None = fn
        self.args = args
        self.stream = engine.driver.current()
        self.everywhere = engine.driver.everywhere()
        self.modes = _torchstate.capture()
        self.context = copy_context()
        #: While the call is abandoned: the task's lease, and what the task kept alive for the device. A
        #: list: both threads may take it out, one gets it.
        self.leases: list[tuple[Lease, Any]] = []
        self.result: Any = None
        self.error: BaseException | None = None
        self.returned = False  # set in the worker thread
        self.landed = False  # set on the loop's thread
        self.settle: Callable[[BaseException | None], None] | None = None

    def run(self, returned: Callable[[Any], None], tell: Callable[[], None]) -> None:
        """In the worker thread. Raises nothing: every outcome belongs to the waiter."""
        driver = self.engine.driver
        try:
            with driver.on_all(self.everywhere):
                before = self.modes.put()
                try:
                    assert self.fn is not None
                    self.result = self.context.run(self.fn, *self.args)
                finally:
                    _torchstate.scrub(before)
        except BaseException as error:
            self.error = error
        finally:
            keep = (self.fn, self.args)
            self.fn, self.args = None, ()
            returned(keep)
            del keep  # before the waiter goes on; and this frame is in the traceback of what fn raised
            tell()

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
    submitted here. Signature and rules are those of ``anyio.to_thread.run_sync`` (keyword arguments go
    through ``functools.partial``); the threads are others.

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
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"run_sync() runs blocking functions; {fn.__qualname__} is an `async def`: await it")
    runtime = current_runtime()
    task = current_task()
    engine = task.engine if task is not None else await runtime.engine(None)
    engine.check()
    limiter = limiter or runtime.limiter
    borrower = object()
    # Not at once acquire_on_behalf_of(): it makes a turn of the loop also where there is room, and the
    # call waits for its thread in any case.
    await anyio.lowlevel.checkpoint_if_cancelled()
    try:
        limiter.acquire_on_behalf_of_nowait(borrower)
    except anyio.WouldBlock:
        await limiter.acquire_on_behalf_of(borrower)
    # From here to the hand-over nothing awaits: a cancellation cannot lose the token in between.
    call = _Call(engine, fn, args)
    del fn, args
    release = partial(limiter.release_on_behalf_of, borrower)
    return await _carry_out(  # type: ignore[no-any-return]
        call, runtime, task, engine.workers, release, abandon_on_cancel
    )


async def run_on(
    workers: WorkerPool,
    fn: Callable[[*Arguments], R],
    *args: *Arguments,
    returned: Callable[[], object] | None = None,
) -> R:
    """:func:`run_sync` on threads of the caller's own, which bound and order the calls themselves.

    ``returned()`` is called on the loop's thread when the function has returned, before anybody is woken;
    also when it was abandoned meanwhile. On cancellation the function is abandoned.
    """
    runtime = current_runtime()
    task = current_task()
    engine = task.engine if task is not None else await runtime.engine(None)
    engine.check()
    call = _Call(engine, fn, args)
    del fn, args
    return await _carry_out(  # type: ignore[no-any-return]
        call, runtime, task, workers, returned or _nothing, abandon_on_cancel=True
    )


def _nothing() -> None:
    pass


async def _carry_out(
    call: _Call,
    runtime: Runtime,
    task: Task | None,
    workers: WorkerPool,
    release: Callable[[], object],
    abandon_on_cancel: bool,
) -> Any:
    """Hand ``call`` to a thread of ``workers`` and wait for it; ``release()`` when it has returned."""
    door = runtime.reactor.door

    def on_loop() -> None:
        call.landed = True
        release()
        if call.settle is not None:
            call.settle(None)

    def returned(keep: Any) -> None:
        call.returned = True
        _return_lease(runtime, call, keep)

    def tell() -> None:
        try:
            door.post(on_loop)
        except DoorClosed:
            pass

    try:
        workers.submit(partial(call.run, returned, tell))
    except BaseException:
        release()
        raise
    try:
        await _wait(door, call, abandon_on_cancel)
    except BaseException:
        if not call.landed and task is not None:  # it is still running, or has just returned
            task.lease.hold()
            call.leases.append((task.lease, task.keep))
            if call.returned:  # whichever thread takes the lease out gives it back
                _return_lease(runtime, call, None)
        raise
    return call.outcome()


def _return_lease(runtime: Runtime, call: _Call, keep: Any) -> None:
    """The abandoned function has returned: its stream is busy, and what it used is kept, until what it
    submitted has ended."""
    try:
        lease, kept = call.leases.pop()
    except IndexError:
        return
    try:
        event = call.engine.driver.record(call.stream)
    except Exception:  # nobody can tell any more when the device is done with it
        call.engine.leaked.append((keep, kept))
        lease.release(None)
    else:
        lease.release(runtime.watch(call.engine, call.stream, event, keep=(keep, kept)))


async def _wait(door: Door, call: _Call, abandon: bool) -> None:
    """Wait until the function has returned; raise a cancellation, if one came, only then, or, to ``abandon``
    the function, at once.

    The shield keeps anyio's and trio's level cancellation out; the loop outlasts asyncio's native
    ``Task.cancel``, from which no scope can shield, and which cancels the very future that we wait for.
    """
    if abandon:
        waiter = door.waiter()
        call.settle = door.settler(waiter)
        await door.park(waiter)
        return
    cancellation: BaseException | None = None
    scope = anyio.CancelScope(shield=True)
    scope.__enter__()
    try:
        while not call.landed:
            waiter = door.waiter()
            call.settle = door.settler(waiter)
            try:
                await door.park(waiter)
            except GeneratorExit:
                # A coroutine that is being closed cannot wait: the function is abandoned. Nor can it leave
                # a scope, which only the task that entered it may do; the scope goes down with its task.
                raise
            except BaseException as error:
                cancellation = error
    except GeneratorExit:
        raise
    except BaseException as error:
        if scope.__exit__(type(error), error, error.__traceback__):
            return
        raise
    scope.__exit__(None, None, None)
    if cancellation is not None:
        raise cancellation
