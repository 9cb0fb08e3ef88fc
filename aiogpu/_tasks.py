"""Coroutine ↔ stream: every call of a task runs on a leased stream, with torch state of its own.

Law of this file: a task is an ordinary coroutine. :func:`_drive` stands between it and the event loop: at
every step it puts the task's stream and torch modes in place, and the thread's own back afterwards, and
yields on what the coroutine yields. So every framework works that can run a coroutine.

Fork and join are edges between streams, found by themselves. A context variable names the logical task;
every way of starting a coroutine copies or shares its parent's context, so a child finds its parent at its
first step, forks from it there, and leaves its end behind. The parent is ordered after ended children
before each of its steps, and, because a plainly awaited child ends *within* a step of its parent,
at the moment of such an end.

Who holds what: a task's function and arguments stay alive until the device has reached its end event.
Results cross to the parent's stream and are marked as used there.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import partial
from threading import get_ident
from typing import Any, ParamSpec, TypeVar, overload

import torch

from ._engine import Engine, normalize
from ._errors import CaptureError
from ._operation import Operation
from ._reactor import Point
from ._runtime import Runtime, current_runtime
from ._torchstate import TorchState
from .drivers.base import Driver, Stream
from .transfers.tree import tensors_of

__all__ = ["Task", "current_task", "task"]

P = ParamSpec("P")
R = TypeVar("R")

_current: ContextVar[Task | None] = ContextVar("aiogpu_task", default=None)


def current_task() -> Task | None:
    """The task whose step is running on this thread; ``None`` in undecorated code."""
    task = _current.get()
    return task if task is not None and task.running == get_ident() else None


class Task:
    """One call of a decorated coroutine function."""

    __slots__ = (
        "door",
        "driver",
        "end",
        "ended",
        "engine",
        "keep",
        "lease",
        "modes",
        "name",
        "operations",
        "parent",
        "raw",
        "running",
        "runtime",
    )

    def __init__(
        self, name: str, runtime: Runtime, engine: Engine, parent: Task | None, priority: int
    ) -> None:
        self.name = name
        self.runtime = runtime
        self.door = runtime.reactor.door  # also when the runtime is left before the task ends
        self.engine = engine
        self.driver: Driver = engine.driver
        self.end: Point | None = None
        self.parent = parent
        self.parent = self.living_parent()
        self.lease = engine.compute.lease(priority)
        #: The current stream as of the last suspension: the lease's, or one chosen in a block.
        self.raw: Any = self.lease.stream.raw
        self.modes = TorchState()
        #: Identity of the thread that runs a step right now, else 0.
        self.running = 0
        #: Ends of children that the next step must be ordered after. Children of another loop's thread
        #: append, too (atomic). A list: an empty deque takes 600 bytes.
        self.ended: list[Point] = []
        #: Transfers that were started by this task and have not finished.
        self.operations: set[Operation[Any]] = set()
        self.keep: Any = None

    # -- edges -------------------------------------------------------------------------------------

    def join_ended(self) -> None:
        """Before a step: order it after children that have ended since the last one."""
        while self.ended:
            try:
                point = self.ended.pop()
            except IndexError:
                return  # a child's thread has just taken out the last one: it was done
            self._after(point, self.driver.adopt(self.raw))

    def _after(self, point: Point, current: Stream) -> None:
        """Order this task's streams after ``point``."""
        # None once it is done: another thread may finish it right here. A recycled event that has
        # been recorded anew orders too much, never too little.
        event = point.event
        if event is not None and not self.driver.eager and not point.engine.driver.eager:
            self.driver.wait(current, event)
            if current.raw != self.lease.stream.raw:
                self.driver.wait(self.lease.stream, event)

    def fork(self) -> None:
        """Order this task after what its parent, or the code around it, has submitted."""
        driver, stream = self.driver, self.lease.stream
        self.engine.check()
        ambient = driver.current()
        sources = []
        if not driver.is_default(ambient) or not driver.legacy_orders:
            sources.append((driver, ambient))
        # A parent that has ended may still be running on the device.
        parent = _current.get()
        if parent is not None and parent.running != get_ident() and not (parent.driver.eager or driver.eager):
            sources.append((parent.driver, parent.driver.adopt(parent.raw)))
        for source, before in sources:
            if source is driver:
                driver.order(stream, before)
            else:
                event = source.record(before)
                driver.wait(stream, event)
                source.recycle(event)

    def finish(self, tensors: list[torch.Tensor], waiter: Any = None) -> Point:
        """The coroutine has ended: record the end, order the parent after it, give the stream back."""
        driver, stream = self.driver, self.lease.stream
        keep, self.keep = self.keep, None
        self.modes.close()
        try:
            driver.order(stream, driver.adopt(self.raw))
            event = driver.record(stream)
        except BaseException as error:
            self.engine.leaked.append(keep)
            self.lease.release(None)
            raise self.engine.blame(error) from None
        point = self.runtime.watch(self.engine, stream, event, None, keep, waiter)
        self.end = point
        try:
            self._join_parent(point, tensors)
        finally:
            self.lease.release(point)
        return point

    def _join_parent(self, point: Point, tensors: list[torch.Tensor]) -> None:
        """Order whoever goes on after this task behind it, and mark its results as used there."""
        parent = self.parent = self.living_parent()
        at_once: list[Stream] = []
        ambient = self.driver.current()
        # Blocking streams order the default stream. A mark there would become an event on the legacy
        # stream when the tensor is freed: a barrier over all compute streams.
        if not (self.driver.legacy_orders and self.driver.is_default(ambient)):
            at_once.append(ambient)
        later: list[Stream] = []
        if parent is not None and not parent.driver.eager:
            if parent.running == get_ident():
                # A plainly awaited child: the parent goes on within this very step.
                at_once += [parent.driver.current(), parent.lease.stream]
            else:
                later = [parent.driver.adopt(parent.raw), parent.lease.stream]
                parent.add_ended(point)
        users = {stream.raw: stream for stream in (*at_once, *later)}
        users.pop(self.lease.stream.raw, None)
        for stream in {stream.raw: stream for stream in at_once}.values():
            if point.event is not None and not self.driver.eager:
                self.driver.wait(stream, point.event)
        for tensor in tensors:
            for stream in users.values():
                self.driver.keep(tensor, stream)

    def living_parent(self) -> Task | None:
        """The nearest ancestor that has not ended. Ended ones are let go of: a task that starts its own
        successor, for ever, would keep them all."""
        parent = self.parent
        while parent is not None and parent.end is not None:
            parent = parent.parent
        return parent

    def add_ended(self, point: Point) -> None:
        self.ended.append(point)
        if len(self.ended) % 64 == 0:  # a parent that never steps, such as a server's main
            # One by one: a new list in the old one's place would lose what another thread appends
            # meanwhile, and with it an edge.
            for each in tuple(self.ended):
                if each.done:
                    try:
                        self.ended.remove(each)
                    except ValueError:
                        pass  # another thread was first


@types.coroutine
def _drive(task: Task, coroutine: Coroutine[Any, Any, R]) -> Generator[Any, Any, R]:
    """Step ``coroutine`` with the task's state in place. Works for send, throw and close alike.

    The one place where every microsecond is paid by every await: names are bound outside the loop, and
    nothing is called that could be written out.
    """
    __tracebackhide__ = True
    swap, restore = task.driver.swap, task.driver.restore
    resume, suspend = task.modes.resume, task.modes.suspend
    ended = task.ended
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        saved = swap(task.raw)
        resume()
        task.running = get_ident()
        try:
            if ended:
                try:
                    task.join_ended()
                except Exception as error:  # a lost device: the coroutine shall see it, and clean up
                    step, value = coroutine.throw, task.engine.blame(error)
            yielded = step(value)
        except StopIteration as stop:
            result: R = stop.value
            return result
        finally:
            value = None
            task.running = 0
            suspend()
            task.raw = restore(saved)
        try:
            value = yield yielded
            step = coroutine.send
        except BaseException as error:
            # GeneratorExit, too: a suspended task that is closed runs its cleanup with its own state
            # in place. Guards that are dropped elsewhere leave their modes on for good.
            step, value = coroutine.throw, error


async def _call(
    fn: Callable[..., Coroutine[Any, Any, R]],
    arguments: list[Any],
    device: torch.device | None,
    priority: int,
) -> R:
    """One call of a task. ``arguments`` is emptied: a traceback through here must not keep tensors."""
    __tracebackhide__ = True
    runtime = current_runtime()
    parent = _current.get()
    if device is None and parent is not None:
        device = parent.engine.device
    engine = runtime.engine_now(device) or await runtime.engine(device)
    if not engine.compute.is_open(priority):
        await runtime.in_starter(partial(engine.compute.open, priority))
    if engine.driver.capturing():
        raise CaptureError(
            "an aiogpu task cannot start while the current stream is being captured into a CUDA graph: "
            "call the undecorated function inside the capture, or start the task before it"
        )
    task = Task(fn.__qualname__, runtime, engine, parent, priority)
    task.keep = (fn, *arguments)
    token = None
    try:
        task.fork()
        token = _current.set(task)
        args, kwargs = arguments
        coroutine = _with_status(task, fn, args, kwargs)
        # Containers may be emptied while the device still reads what was in them. Modules are not
        # walked: their parameters live as long as they do.
        boxes = [x for x in (*args, *kwargs.values()) if isinstance(x, list | dict | set)]
        task.keep = (fn, args, kwargs, list(tensors_of(boxes)))
        arguments.clear()
        del args, kwargs, boxes
        result = await _drive(task, coroutine)
        for operation in tuple(task.operations):  # never awaited: the end is ordered after them all the same
            await operation._finished(task.door)
    except BaseException:
        for operation in tuple(task.operations):
            operation._awaited = True  # whoever failed or was cancelled does not owe an await
        _finish_failed(task)
        raise
    finally:
        arguments.clear()
        if token is not None:
            try:
                _current.reset(token)
            except ValueError:
                pass  # closed by the garbage collector, in some other context
    return await _result(task, result)


def _finish_failed(task: Task) -> None:
    try:
        task.finish([])
    except Exception:
        pass  # the device is lost, too; the task's own exception tells more


async def _result(task: Task, result: R) -> R:
    """End ``task`` well: its result is safe to use, in order and in memory, for whoever gets it."""
    tensors = [t for t in tensors_of(result) if t.device == task.engine.device]
    parent = task.living_parent()
    # Whoever has no stream that could be ordered behind it gets a result that is finished.
    finished = (parent is None or parent.driver.eager) and tensors and not task.driver.eager
    if not finished:
        task.finish(tensors)
        return result
    door = task.door
    waiter = door.waiter()
    task.finish(tensors, waiter)
    await door.park(waiter)
    return result


class _Status:
    """A ``task_status`` (anyio's, trio's) whose ``started(value)`` is an edge to the parent."""

    def __init__(self, task: Task, inner: Any) -> None:
        self._task = task
        self._inner = inner

    def started(self, value: Any = None) -> None:
        task = self._task
        parent = task.parent
        if parent is not None and parent.end is None and not (task.driver.eager or parent.driver.eager):
            stream = task.driver.current()
            event = task.driver.record(stream)
            point = task.runtime.watch(task.engine, stream, event)
            parent.add_ended(point)
            for tensor in tensors_of(value):
                task.driver.keep(tensor, parent.lease.stream)
        self._inner.started(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _with_status(
    task: Task, fn: Callable[..., Coroutine[Any, Any, R]], args: Any, kwargs: Any
) -> Coroutine[Any, Any, R]:
    status = kwargs.get("task_status")
    if hasattr(status, "started"):
        kwargs = {**kwargs, "task_status": _Status(task, status)}
    return fn(*args, **kwargs)


@overload
def task(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Callable[P, Coroutine[Any, Any, R]]: ...


@overload
def task(
    *, device: torch.device | str | int | None = None, priority: int = 0
) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]: ...


def task(
    fn: Callable[P, Coroutine[Any, Any, R]] | None = None,
    /,
    *,
    device: torch.device | str | int | None = None,
    priority: int = 0,
) -> Any:
    """Make each call of an ``async def`` run on a stream of its own, with torch state of its own.

    ::

        @aiogpu.task
        async def classify(image):
            x = await aiogpu.to_device(image)
            y = await aiogpu.run_sync(model, x)
            return (await aiogpu.to_host(y)).tolist()

    The result stays a coroutine function with the same signature. Within a call, the current stream is
    one that was leased for it, and what it sets of torch's thread-local state (``no_grad``,
    ``autocast``, ``inference_mode``, ``with torch.device(...)``, function modes) is there after every
    await and never visible to any other coroutine.

    A call starts, on the device, after everything that its parent task had submitted when it took its
    first step; the parent is ordered after it when it has ended, however it was started and awaited. A
    call without a parent returns device tensors only once they are finished.

    Parameters
    ----------
    device:
        Where it runs; default: its parent's device, else the runtime's.
    priority:
        As in torch: lower is more urgent (usually -1 or 0 on CUDA; ``torch.cuda.Stream.priority_range``).

    Raises
    ------
    TypeError
        When ``fn`` is not an ``async def`` function.
    """
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise TypeError(f"priority is an int (lower is more urgent), not {priority!r}")
    wanted = None if device is None else normalize(device)

    def decorate(fn: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        _check_coroutine_function(fn)

        @functools.wraps(fn)
        async def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            __tracebackhide__ = True
            arguments = [args, kwargs]
            del args, kwargs
            return await _call(fn, arguments, wanted, priority)

        return wrapper

    return decorate if fn is None else decorate(fn)


def _check_coroutine_function(fn: Any) -> None:
    if inspect.iscoroutinefunction(fn):
        return
    name = getattr(fn, "__qualname__", repr(fn))
    inner = inspect.unwrap(fn) if callable(fn) else fn
    if inspect.isasyncgenfunction(inner):
        reason = "an async generator; put its consumer into a task instead"
    elif inspect.iscoroutinefunction(inner):
        reason = (
            "an `async def` wrapped by a decorator that does not await it. torch.no_grad(), "
            "torch.inference_mode() and torch.autocast() as decorators do nothing to an `async def`: "
            "write `with torch.no_grad():` inside the function"
        )
    elif callable(fn):
        reason = "not an `async def`; call it with `await aiogpu.run_sync(fn, ...)` inside a task"
    else:
        reason = f"a {type(fn).__name__}; write @aiogpu.task or @aiogpu.task(device=..., priority=...)"
    raise TypeError(f"aiogpu.task decorates `async def` functions; {name} is {reason}")
