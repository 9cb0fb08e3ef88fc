"""Coroutine ↔ stream: a task is a call that runs on a leased stream, with torch state of its own.

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

import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch

from ._engine import Engine
from ._errors import CaptureError
from ._operation import Operation
from ._reactor import Point
from ._runtime import Runtime, current_runtime
from ._torchstate import TorchState
from .drivers.base import Driver, Event, Stream
from .transfers.tree import tensors_of

__all__ = ["LeftOpen", "Task", "abort", "begin", "current_task", "wind_up"]

R = TypeVar("R")

_current: ContextVar[Task | None] = ContextVar("aiogpu_task", default=None)


def current_task() -> Task | None:
    """The task whose step is running on this thread; ``None`` in undecorated code."""
    task = _current.get()
    return task if task is not None and task.running == get_ident() else None


class LeftOpen:
    """An argument that ends when nobody can reach it any more, and so must not be kept for the device."""

    __slots__ = ()


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
        "left",
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
        #: How to close what it has begun to iterate and left: the task does not end before that.
        self.left: dict[Any, Callable[[], Coroutine[Any, Any, None]]] | None = None
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

    def fork(self, parent: Task | None) -> None:
        """Order this task after what ``parent``, or the code around it, has submitted."""
        driver = self.driver
        self.engine.check()
        ambient = driver.current()
        sources = []
        if not driver.is_default(ambient) or not driver.legacy_orders:
            sources.append((driver, ambient))
        # A parent that has ended may still be running on the device.
        if parent is not None and parent.running != get_ident() and not (parent.driver.eager or driver.eager):
            sources.append((parent.driver, parent.driver.adopt(parent.raw)))
        for source, before in sources:
            after = [s for s in self.streams() if source is not driver or s.raw != before.raw]
            if after:
                event = source.record(before)
                for stream in after:
                    driver.wait(stream, event)
                source.recycle(event)

    def streams(self) -> list[Stream]:
        """The lease's, and, inside of a block, the one chosen there."""
        stream = self.lease.stream
        return [stream] if stream.raw == self.raw else [stream, self.driver.adopt(self.raw)]

    def record(self) -> Event:
        """An event behind everything that the task has submitted so far."""
        driver, stream = self.driver, self.lease.stream
        driver.order(stream, driver.adopt(self.raw))
        return driver.record(stream)

    def finish(
        self, tensors: list[torch.Tensor], waiter: Any = None, *, consumer: Task | None = None
    ) -> Point:
        """The coroutine has ended: record the end, order the parent (a generator: whoever asked for the
        next item) after it, give the stream back."""
        stream = self.lease.stream
        keep, self.keep = self.keep, None
        self.modes.close()
        try:
            event = self.record()
        except BaseException as error:
            self.engine.leaked.append(keep)
            self.lease.release(None)
            self.engine.rethrow(error)
        if waiter is None and self.driver.eager and self._is_done(event):
            point = Point(self.engine, event, None, keep)
            point.finish(None)  # a turn of the loop, and of the reactor, less
        else:
            point = self.runtime.watch(self.engine, stream, event, None, keep, waiter)
        self.end = point
        parent = self.parent = self.living_parent()
        try:
            self._join_parent(point, tensors, consumer or parent)
        finally:
            self.lease.release(point)
        return point

    def _is_done(self, event: Event) -> bool:
        try:
            return self.driver.query(event)
        except Exception:
            return False  # the reactor shall meet it

    def yielded(
        self, tensors: list[torch.Tensor], waiter: Any = None, *, consumer: Task | None = None
    ) -> None:
        """A generator has an item: order whoever asked for it behind the work so far."""
        event = self.record()
        if waiter is None and (consumer is None or consumer.running == get_ident()):
            point = Point(self.engine, event)
            self._join_parent(point, tensors, consumer)
            point.finish(None)  # the edges are made, nobody waits: the event may serve again
        else:
            runtime = current_runtime()  # not the task's, if its loop is another one
            point = runtime.watch(self.engine, self.lease.stream, event, waiter=waiter)
            self._join_parent(point, tensors, consumer)

    def _join_parent(self, point: Point, tensors: list[torch.Tensor], parent: Task | None) -> None:
        """Order whoever goes on after this task behind it, and mark its results as used there."""
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

    def hold(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the call uses until the end event. Containers may be emptied while the device still
        reads what was in them. Modules are not walked: their parameters live as long as they do."""
        values = [x for x in (*args, *kwargs.values()) if not isinstance(x, LeftOpen)]
        boxes = [x for x in values if isinstance(x, list | dict | set)]
        self.keep = (fn, values, list(tensors_of(boxes)) if boxes else [])

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


async def begin(name: str, device: torch.device | None, priority: int) -> Task:
    """A task of the running loop, not forked yet; its parent is whoever is running."""
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
    return Task(name, runtime, engine, parent, priority)


async def _call(
    fn: Callable[..., Coroutine[Any, Any, R]],
    arguments: list[Any],
    device: torch.device | None,
    priority: int,
) -> R:
    """One call of a task. ``arguments`` is emptied: a traceback through here must not keep tensors."""
    __tracebackhide__ = True
    task = await begin(fn.__qualname__, device, priority)
    task.keep = (fn, *arguments)
    token = None
    try:
        task.fork(_current.get())
        token = _current.set(task)
        args, kwargs = arguments
        coroutine = _with_status(task, fn, args, kwargs)
        task.hold(fn, args, kwargs)
        arguments.clear()
        del args, kwargs
        result = await _drive(task, coroutine)
        if task.operations or task.left:
            await wind_up(task)
    except BaseException as error:
        await abort(task, error)
        raise
    finally:
        arguments.clear()
        if token is not None:
            try:
                _current.reset(token)
            except ValueError:
                pass  # closed by the garbage collector, in some other context
    return await _result(task, result)


async def wind_up(task: Task) -> None:
    """The coroutine has returned, and left things open behind which the task must end."""
    if task.left:
        await _drive(task, _close_left(task))
    for operation in tuple(task.operations):  # never awaited: the end is ordered after them all the same
        await operation._finished(task.door)


async def abort(task: Task, error: BaseException, consumer: Task | None = None) -> None:
    """The coroutine has failed with ``error``, or was cancelled or closed: end the task."""
    for operation in tuple(task.operations):
        operation._awaited = True  # whoever failed or was cancelled does not owe an await
    try:
        if task.left and not isinstance(error, GeneratorExit):  # a coroutine that is closed cannot wait
            await _drive(task, _close_left(task))
    finally:
        try:
            task.finish([], consumer=consumer)
        except Exception:
            pass  # the device is lost, too; the task's own exception tells more


async def _close_left(task: Task) -> None:
    while task.left:
        try:
            _, close = task.left.popitem()
        except KeyError:
            return  # another thread has just closed the last one
        await close()


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
