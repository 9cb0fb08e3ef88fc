"""What tests of the batcher share: batch functions that stand still, and callers whose outcome is kept."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
import torch

import aiogpu
from aiogpu._batching import service

__all__ = ["Box", "Calls", "Clock", "Held", "HeldInThread", "Left", "calling", "lists", "ones"]


def lists(fn: Callable[[list[Any]], list[Any]], **settings: Any) -> aiogpu.Batcher:
    """A batcher whose function takes and returns lists: items of any kind."""
    return aiogpu.Batcher(fn, collate=list, split=list, **settings)


class Box:
    """Something that is not looked into: neither stacked nor uploaded."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Held:
    """A batch function whose calls stand still, each until it is let go; it returns what it gets."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self._events: list[anyio.Event] = []
        self.open = False

    async def __call__(self, batch: Any) -> Any:
        event = anyio.Event()
        self.batches.append(batch)
        self._events.append(event)
        if not self.open:
            await event.wait()
        return batch

    def let_go(self, *which: int) -> None:
        """Calls by their number; without one, all calls, of now and later."""
        self.open = self.open or not which
        for index in which or range(len(self._events)):
            self._events[index].set()


class HeldInThread:
    """The same as a synchronous function."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.threads: set[int] = set()
        self.go = threading.Event()

    def __call__(self, batch: Any) -> Any:
        self.batches.append(batch)
        self.threads.add(threading.get_ident())
        assert self.go.wait(20)
        return batch


class Left(Exception):
    """In place of the error of a caller that was cancelled."""


class Calls:
    """Callers in a task group of their own; what became of each is kept by its item."""

    def __init__(self, batcher: aiogpu.Batcher, group: anyio.abc.TaskGroup) -> None:
        self.batcher = batcher
        self.group = group
        self.results: dict[Any, Any] = {}
        self.errors: dict[Any, BaseException] = {}
        self.order: list[Any] = []
        self._scopes: dict[Any, anyio.CancelScope] = {}

    def start(self, *keys: Any, item: Any = None, **options: Any) -> None:
        """A call for each key, with the key as the item unless another is given."""
        for key in keys:
            self.group.start_soon(self._call, key, key if item is None else item, options)

    async def started(self, *keys: Any, **options: Any) -> None:
        """The same, and each call has reached the batcher, in this order."""
        for key in keys:
            before = self.batcher.stats().calls
            self.start(key, **options)
            while self.batcher.stats().calls == before:
                await anyio.lowlevel.checkpoint()

    def cancel(self, key: Any) -> None:
        self._scopes[key].cancel()

    async def _call(self, key: Any, item: Any, options: dict[str, Any]) -> None:
        with anyio.CancelScope() as scope:
            self._scopes[key] = scope
            try:
                self.results[key] = await self.batcher(item, **options)
            except anyio.get_cancelled_exc_class():
                self.errors[key] = Left()  # not the error itself: its frames hold the item
                raise
            except Exception as error:
                self.errors[key] = error
            finally:
                self.order.append(key)


class Clock:
    """The batcher's clock, moved on by tests: nobody waits for real time, and no machine is too slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        monkeypatch.setattr(service, "perf_counter", lambda: time.perf_counter() + self.ahead)

    def advance(self, batcher: aiogpu.Batcher, seconds: float) -> None:
        self.ahead += seconds
        assert batcher._service is not None
        batcher._service.look(service.perf_counter())  # its own alarm knows nothing of it


@contextlib.asynccontextmanager
async def calling(batcher: aiogpu.Batcher) -> AsyncIterator[Calls]:
    """The batcher, entered, with callers; all of them are over at the end of the block."""
    async with batcher:
        async with anyio.create_task_group() as group:
            await anyio.lowlevel.checkpoint()  # the dispatcher has started, and waits for what comes
            yield Calls(batcher, group)


def ones(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape or (2,), float(value))
