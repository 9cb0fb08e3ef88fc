"""Out of device memory: what comes back by itself is waited for, once.

Law of this file: it waits for what is *in flight*, which the device is done with sooner or later, and never
for memory that somebody holds. It waits on a thread that nobody else needs, and for a bounded time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ._engine import Engine
from ._loops import DoorClosed
from ._reactor import Point, Reactor

__all__ = ["PATIENCE", "in_flight", "when_back"]

#: Seconds that one transfer waits for memory in flight before it tries again with what there is.
PATIENCE = 10.0


def in_flight(engine: Engine) -> list[Point]:
    """The points on this device that are pending now, in all loops. From any thread."""
    points: list[Point] = []
    for reactor in _reactors(engine):
        points += reactor.in_flight(engine)
    orphans: Iterable[Any] = tuple(engine.notifier._orphans)
    points += [orphan for orphan in orphans if getattr(orphan, "engine", None) is engine]
    return points


def when_back(engine: Engine, points: list[Point], then: Callable[[], object]) -> None:
    """Call ``then`` on a thread of ours once all ``points`` have let go of what they kept, or after
    :data:`PATIENCE` seconds, or at once when the device is lost."""
    engine.workers.submit(partial(_wait, engine, points, then))


def _wait(engine: Engine, points: list[Point], then: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    # It looks, rather than being told: this happens once in a long while, and a point has one callback.
    while points and engine.lost is None and time.monotonic() < deadline:
        points = [point for point in points if not point.done]
        if points:
            time.sleep(0.001)
    _let_callbacks_return(engine, deadline)
    then()


def _let_callbacks_return(engine: Engine, deadline: float) -> None:
    """A point is off its list, and done, *before* its callback lets go of the last things, all in one go on
    its loop's thread: what is posted there now runs after that."""
    passed = []
    for reactor in _reactors(engine):
        turn = threading.Event()
        try:
            reactor.door.post(turn.set)
        except DoorClosed:
            continue
        passed.append(turn)
    for turn in passed:
        turn.wait(max(0.0, deadline - time.monotonic()))


def _reactors(engine: Engine) -> list[Reactor]:
    return [sleeper for sleeper in tuple(engine.notifier._sleepers) if isinstance(sleeper, Reactor)]
