"""Fixtures of the tests on a GPU."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest
import torch

from aiogpu import _engine
from aiogpu._engine import Engine

from ._tools import Slow, Together, has_module, measure_cycles

#: Seconds that one run of a loop may take.
LIMIT = 45.0

Program = Callable[..., Awaitable[Any]]


class Loop:
    """``run(fn, *args)``: call the async function on a new event loop of one kind."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, fn: Program, *args: Any, limit: float = LIMIT) -> Any:
        async def limited() -> Any:
            with anyio.fail_after(limit):
                return await fn(*args)

        if self.name == "trio":
            import trio

            return trio.run(limited)
        factory = None
        if self.name == "uvloop":
            import uvloop

            factory = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(limited())


def _kind(name: str) -> Any:
    missing = name != "asyncio" and not has_module(name)
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{name} is not installed"))


@pytest.fixture(params=[_kind("asyncio"), _kind("uvloop"), _kind("trio")])
def run(request: pytest.FixtureRequest) -> Loop:
    return Loop(request.param)


@pytest.fixture
def run_asyncio() -> Loop:
    """Where the kind of loop makes no difference to the device, and minutes count."""
    return Loop("asyncio")


@pytest.fixture(scope="session")
def cycles() -> float:
    return measure_cycles()


@pytest.fixture(scope="session")
def slow(cycles: float) -> Slow:
    return Slow(cycles)


@pytest.fixture
def engine() -> Engine:
    """The engine of the current CUDA device. Made here, off any loop's thread."""
    return _engine.make_engine(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest, cycles: float) -> Together:
    # Processes that share the device take turns on it, and each one's kernels last as long as all of them.
    # A fault has to strike while the other kernels of its process run, and could come last; an end within
    # five seconds has to wait for them.
    few = {"test_faults": 1, "test_exit": 4, "test_fallback": 4}
    return Together(cycles, at_once=few.get(request.module.__name__.rpartition(".")[2], 12))


@pytest.fixture
def abandoned() -> Iterator[list[str]]:
    """The warnings that aiogpu logs in this test, which expects some."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("aiogpu"), Collector(logging.WARNING)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
