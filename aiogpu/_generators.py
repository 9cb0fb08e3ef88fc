"""Async generators as tasks: the same stepping as a coroutine's, with edges at every item.

Law of this file: what is true of a task at its start and end is true of a generator at every item. Whoever
asks is ordered after the generator's work so far, the generator after what its consumer had submitted when
it asked, and each has its own stream and torch modes. The consumer is whoever asks, perhaps another task each
time; a generator that goes on is ordered after the last one, too, since it may reuse the item's memory.

A generator that has been started ends exactly once: exhausted, failed, closed by its user, or *left*, when
nobody can reach it any more. Python tells that last case to a hook of the generator's own (the one through
which event loops finalise theirs; ours are not theirs, because their cleanup must run with the task's state
in place). Then a task of the loop closes it, with awaits that work, unless the task that iterated it ends
before and does so itself. When the loop shuts down, those that are still suspended are closed before the
runtime is.

The hook may run in any thread, at any allocation, after the loop is gone: it only takes notes and posts.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeVar

import anyio
import torch

from ._errors import CaptureError
from ._farewells import farewells
from ._loops import Door, DoorClosed
from ._runtime import current_runtime
from ._tasks import LeftOpen, Task, _current, _drive, abort, begin, wind_up
from .transfers.tree import tensors_of

__all__ = ["TaskGenerator"]

Y = TypeVar("Y")
S = TypeVar("S")

log = logging.getLogger("aiogpu")

_END: Any = object()


class _Life:
    """What is known of a generator apart from itself, which may be garbage while this is used."""

    __slots__ = (
        "before",
        "busy",
        "closer",
        "closing",
        "consumer",
        "ended",
        "hooked",
        "name",
        "task",
        "waiters",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        #: From the first step on.
        self.task: Task | None = None
        #: The task that asked last; the one before, until the generator has been ordered after it, too.
        self.consumer: Task | None = None
        self.before: Task | None = None
        self.busy = False
        self.ended = False
        self.hooked = False
        #: Once it has been left: what closes it in a task of the loop's own; the scope around its closing.
        self.closer: Coroutine[Any, Any, None] | None = None
        self.closing: anyio.CancelScope | None = None
        #: Who waits for the end of its closing.
        self.waiters: list[Callable[[BaseException | None], None]] = []


#: Started and not ended. Weakly, and by numbers: a life leads to whatever its generator's arguments lead to,
#: and a generator that is held only by what it holds itself is for the garbage collector to find.
_open: dict[int, weakref.ref[TaskGenerator[Any, Any]]] = {}

#: Those that were left and are not closed yet. Nobody else holds them.
_left: dict[_Life, AsyncGenerator[Any, Any]] = {}


class TaskGenerator(AsyncGenerator[Y, S], LeftOpen):
    """A call of an async generator function that is decorated with :func:`aiogpu.task`.

    ``async for``, ``asend``, ``athrow`` and ``aclose`` are those of any async generator.
    """

    __slots__ = ("__weakref__", "_call", "_inner", "_life", "_where")

    def __init__(
        self,
        fn: Callable[..., AsyncGenerator[Y, S]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device | None,
        priority: int,
    ) -> None:
        self._inner: Any = fn(*args, **kwargs)
        self._life = _Life(getattr(fn, "__qualname__", repr(fn)))
        self._call: Any = (fn, args, kwargs)
        self._where = (device, priority)

    # -- the protocol ------------------------------------------------------------------------------

    def __anext__(self) -> Coroutine[Any, Any, Y]:
        return self._step("asend", [None])

    def asend(self, value: S) -> Coroutine[Any, Any, Y]:
        return self._step("asend", [value])

    def athrow(self, *error: Any) -> Coroutine[Any, Any, Y]:
        return self._step("athrow", [*error])

    async def aclose(self) -> None:
        __tracebackhide__ = True
        try:
            await self._step("aclose", [])
        except StopAsyncIteration:
            pass

    def __getattr__(self, name: str) -> Any:
        """``ag_frame``, ``__qualname__`` and the like are the generator's own."""
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        life = self._life
        started = "running" if life.busy else "suspended" if life.task else "not started"
        return f"<TaskGenerator {life.name}, {'ended' if life.ended else started}>"

    # -- steps -------------------------------------------------------------------------------------

    async def _step(self, method: str, arguments: list[Any]) -> Y:
        """``arguments`` is emptied: a traceback through here must not keep tensors."""
        __tracebackhide__ = True
        life = self._life
        if life.busy:
            raise RuntimeError(f"{method}(): asynchronous generator is already running")
        if life.closing is not None and not life.ended:
            await _closed(life)  # by the end of the loop
        life.busy = True
        try:
            if life.task is None and not life.ended:
                await self._start(method, arguments)
            if life.ended:
                return await _first(life, self._inner, method, arguments)  # type: ignore[no-any-return]
            consumer = _living(_current.get())
            if consumer is not life.consumer:
                life.before, life.consumer = life.consumer, consumer
            return await _next(life, self._inner, method, arguments)  # type: ignore[no-any-return]
        finally:
            life.busy = False

    async def _start(self, method: str, arguments: list[Any]) -> None:
        life = self._life
        if method != "asend":  # its body never runs
            life.ended = True
        elif arguments[0] is not None:
            raise TypeError("can't send non-None value to a just-started async generator")
        else:
            task = await begin(life.name, *self._where)
            life.task = task
            call, self._call = self._call, None
            task.hold(*call)
            _open[id(life)] = weakref.ref(self)


async def _next(life: _Life, inner: Any, method: str, arguments: list[Any]) -> Any:
    """The next item, safe to use for whoever asked; raises ``StopAsyncIteration`` at the end."""
    __tracebackhide__ = True
    task, consumer = life.task, life.consumer
    assert task is not None
    while True:
        item = await _advance(life, inner, method, arguments)
        if item is _END:
            raise StopAsyncIteration
        if task.driver.eager:
            return item
        try:
            waiting = _hand_over(task, item, consumer)
            if waiting is not None:
                await waiting
            return item
        except BaseException as error:
            # A lost device, or a cancellation in the wait for a finished item: as if it had come while the
            # generator itself was waiting.
            method, arguments = "athrow", [error]


def _hand_over(task: Task, item: Any, consumer: Task | None) -> Awaitable[None] | None:
    """Order the consumer after the generator, and mark the item as used there. What this returns must be
    awaited: like a task's result, an item for somebody who has no stream is finished first."""
    device = task.engine.device
    tensors = [tensor for tensor in tensors_of(item) if tensor.device == device]
    if not tensors or (consumer is not None and not consumer.driver.eager):
        task.yielded(tensors, consumer=consumer)
        return None
    door = current_runtime().reactor.door
    waiter = door.waiter()
    task.yielded(tensors, waiter, consumer=consumer)
    return door.park(waiter)


async def _advance(life: _Life, inner: Any, method: str, arguments: list[Any]) -> Any:
    """Run the generator to its next ``yield``, or to its end, which ends the task."""
    __tracebackhide__ = True
    task, consumer = life.task, life.consumer
    assert task is not None
    if not task.driver.eager:
        if task.driver.capturing():
            raise CaptureError(
                "an async generator cannot go on while the current stream is being captured into a CUDA "
                "graph: take its items before or after the capture"
            )
        try:
            task.fork(consumer)
            if life.before is not None:
                before, life.before = life.before, None
                task.fork(before)  # who may still be using the last item
            _keep(task, arguments)
        except Exception as error:  # a lost device: the generator shall see it, and clean up
            method, arguments = "athrow", [error]
    token = _current.set(task)
    try:
        try:
            if life.hooked:
                step = getattr(inner, method)(*arguments)
            else:
                step = _first(life, inner, method, arguments)
            item = await _drive(task, step)
            if method != "aclose":
                return item
        except StopAsyncIteration:
            pass
        if task.operations or task.left:
            await wind_up(task)
    except BaseException as error:
        if inner.ag_frame is not None and method != "aclose":
            raise  # refused, not run: athrow() of something that is no exception
        try:
            await abort(task, error, consumer)
        finally:
            _end(life)
        raise
    finally:
        arguments.clear()
        try:
            _current.reset(token)
        except ValueError:
            pass  # closed by the garbage collector, in some other context
    _end(life)
    task.finish([], consumer=consumer)
    return _END


def _end(life: _Life) -> None:
    life.ended = True
    _open.pop(id(life), None)


def _first(life: _Life, inner: Any, method: str, arguments: list[Any]) -> Any:
    """The awaitable of a step, when it may be the first: then a generator remembers who finalises it."""
    life.hooked = True
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=None, finalizer=partial(_leave, life))
    try:
        return getattr(inner, method)(*arguments)
    finally:
        sys.set_asyncgen_hooks(*hooks)


def _keep(task: Task, sent: list[Any]) -> None:
    """What is sent to the generator is used on its stream, too."""
    if not sent or sent[0] is None:
        return
    for tensor in tensors_of(sent):
        if tensor.device == task.engine.device:
            for stream in task.streams():
                task.driver.keep(tensor, stream)


def _living(task: Task | None) -> Task | None:
    while task is not None and task.end is not None:
        task = task.parent
    return task


# -- generators that nobody can reach ------------------------------------------------------------------


def _leave(life: _Life, inner: AsyncGenerator[Any, Any]) -> None:
    """Python's finalisation hook: ``inner`` is garbage, and alive again for as long as it is in here."""
    task, consumer = life.task, life.consumer
    if life.ended or task is None or sys.is_finalizing():
        return
    _open.pop(id(life), None)
    _left[life] = inner
    if consumer is not None and consumer.end is None and consumer.door is task.door:
        if consumer.left is None:
            consumer.left = {}
        consumer.left[life] = partial(_close, life)
    try:
        task.door.post(partial(_close_soon, life, copy_context()))
    except DoorClosed:
        _close_now(life)


def _close_soon(life: _Life, context: Context) -> None:
    """On the loop's thread, in its next iteration."""
    if life.closing is None and life in _left and life.task is not None:
        closer = life.closer = _close(life, shield=True)
        try:
            life.task.door.spawn(lambda: closer, context)
        except RuntimeError:  # a trio run that takes no new tasks any more
            _close_now(life)


async def _close(life: _Life, *, shield: bool = False) -> None:
    """Close a generator that was left, or wait until whoever is at it has done so.

    A task of the loop's own is shielded: trio cancels those before it lets the runtime end, which waits for
    them for a while. On asyncio, ``run()`` cancels it like all that still runs then.
    """
    inner = _left.get(life)
    if life.closing is not None:
        if not shield:  # else nobody waits for this task
            await _closed(life)
    elif inner is not None:
        try:
            with anyio.CancelScope(shield=shield) as life.closing:
                await _close_suspended(life, inner)
        finally:
            _forget(life)


async def _close_suspended(life: _Life, inner: AsyncGenerator[Any, Any]) -> None:
    task = life.task
    assert task is not None
    while task.driver.capturing():  # noqa: ASYNC110 - undecorated code awaits within a capture; it tells nobody
        await anyio.sleep(0.001)
    life.consumer = _living(life.consumer)
    try:
        if not life.ended:  # the garbage collector may close those who wait in it in any order
            await _advance(life, inner, "aclose", [])
    except Exception as error:
        log.error(
            "aiogpu: the cleanup of the async generator %s, which was left before its end, has failed, and "
            "there is nobody to raise that in. With `async with contextlib.aclosing(generator)` there is.",
            life.name,
            exc_info=error,
        )


def _forget(life: _Life) -> None:
    _left.pop(life, None)
    life.closer = None
    if life.consumer is not None and life.consumer.left:
        life.consumer.left.pop(life, None)
    waiters, life.waiters = life.waiters, []
    for settle in waiters:
        settle(None)


async def _closed(life: _Life) -> None:
    """Wait for the end of a closing. A cancellation of whoever waits cancels the cleanup's own waits, as if
    it were awaited right here; so the wait goes on until it has ended."""
    assert life.task is not None
    door = life.task.door
    cancellation: BaseException | None = None
    while life in _left:
        waiter = door.waiter()
        life.waiters.append(door.settler(waiter))
        try:
            with anyio.CancelScope(shield=cancellation is not None):
                await door.park(waiter)
        except GeneratorExit:
            raise
        except BaseException as error:
            cancellation = error
            if life.closing is not None:
                life.closing.cancel()
    if cancellation is not None:
        raise cancellation


def _close_now(life: _Life) -> None:
    """The loop is gone: the cleanup runs up to its first wait, with the state in place."""
    closer, life.closer = life.closer, None
    inner = _left.get(life)
    try:
        if closer is not None:
            closer.close()
        if inner is not None and not life.ended:
            closing = _close_suspended(life, inner)
            closing.send(None)
            closing.close()
    except (StopIteration, RuntimeError):
        pass  # it has ended, or waits on although it was closed
    finally:
        _forget(life)


async def _farewell(door: Door, everything: bool) -> None:
    """A runtime closes: first what was left, and, if its loop ends, what is suspended."""
    if everything and not door.closed:
        for generator in [reference() for reference in tuple(_open.values())]:
            if generator is not None and (task := generator._life.task) is not None and task.door is door:
                while generator._life.busy:  # noqa: ASYNC110 - asked by one that the loop closes beside us
                    await anyio.sleep(0.001)
                if not generator._life.ended:
                    _left[generator._life] = generator._inner
    for life in tuple(_left):
        if life.task is not None and life.task.door is door:
            if door.closed:
                _close_now(life)
            else:
                await _close(life)


farewells.append(_farewell)
