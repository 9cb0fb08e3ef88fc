"""The decorator ``task``: what users write, checked before anything runs.

Law of this file: a decorated function stays what it was for everybody who looks at it, coroutine function or
async generator function, with its name and signature. What is neither is refused, with the way out.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch

from ._engine import normalize
from ._generators import TaskGenerator
from ._tasks import _call

__all__ = ["task"]

P = ParamSpec("P")
R = TypeVar("R")
Y = TypeVar("Y")
S = TypeVar("S")


class _Decorator(Protocol):
    """What ``task(device=..., priority=...)`` returns."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, fn: Callable[P, AsyncGenerator[Y, S]], /) -> Callable[P, AsyncGenerator[Y, S]]: ...
    @overload
    def __call__(self, fn: Callable[P, AsyncIterator[Y]], /) -> Callable[P, AsyncIterator[Y]]: ...


@overload
def task(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Callable[P, Coroutine[Any, Any, R]]: ...
@overload
def task(fn: Callable[P, AsyncGenerator[Y, S]], /) -> Callable[P, AsyncGenerator[Y, S]]: ...
@overload
def task(fn: Callable[P, AsyncIterator[Y]], /) -> Callable[P, AsyncIterator[Y]]: ...
@overload
def task(*, device: torch.device | str | int | None = None, priority: int = 0) -> _Decorator: ...


def task(
    fn: Callable[..., Any] | None = None,
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

    An ``async def`` with ``yield`` stays an async generator function. Each generator is a task of its own
    between its first item and its end: whoever asks for an item is ordered after the generator's work so
    far, and the generator goes on after what its consumer had submitted when it asked; what is set inside
    it stays inside across a ``yield``. One that nobody can reach any more, after a ``break``, is closed at
    once, its cleanup included, and at the latest when the task that iterated it ends.

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

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(fn):
            return _generator_function(fn, wanted, priority)
        _check_coroutine_function(fn)

        @functools.wraps(fn)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            arguments = [args, kwargs]
            del args, kwargs
            return await _call(fn, arguments, wanted, priority)

        return wrapper

    return decorate if fn is None else decorate(fn)


def _generator_function(
    fn: Callable[..., AsyncGenerator[Y, S]], device: torch.device | None, priority: int
) -> Callable[..., AsyncGenerator[Y, S]]:
    """A function that returns a :class:`TaskGenerator`, and says that it is an async generator function.

    A real one around ``fn``'s would do, but for its end: event loops finalise a real async generator
    themselves, some time after nobody can reach it any more (trio in a cancelled scope, with a warning), and
    it cannot learn that this is so. Whether a function is an async generator function is told by a flag of
    its code, which the interpreter reads nowhere else.
    """

    def make(*args: Any, **kwargs: Any) -> AsyncGenerator[Y, S]:
        return TaskGenerator(fn, args, kwargs, device, priority)

    code = make.__code__.replace(co_flags=make.__code__.co_flags | inspect.CO_ASYNC_GENERATOR)
    flagged = types.FunctionType(code, make.__globals__, make.__name__, None, make.__closure__)
    return functools.wraps(fn)(flagged)


def _check_coroutine_function(fn: Any) -> None:
    if inspect.iscoroutinefunction(fn):
        return
    name = getattr(fn, "__qualname__", repr(fn))
    inner = inspect.unwrap(fn) if callable(fn) else fn
    if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
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
