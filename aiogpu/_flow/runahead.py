"""How far the host may run ahead of a device.

Law of this file: the host never gets so far ahead that a launch blocks (a stream takes about 1020 of
them, the next one stops its thread), and memory stays bounded. An event marks the end of each step's work,
and an old one is awaited before the next step.
"""

from __future__ import annotations

from collections import deque
from typing import cast

import anyio

from .._engine import Engine
from .._errors import fresh
from .._loops import DoorClosed, current_token
from .._runtime import current_runtime
from .._tasks import current_task

__all__ = ["RunAhead"]


class _Mark:
    """The end of one step's work."""

    def __init__(self, engine: Engine) -> None:
        self.error: BaseException | None = None
        self.reached: anyio.Event | None = None
        driver = engine.driver
        stream = driver.current()
        try:
            event = driver.record(stream)
        except Exception as error:
            engine.rethrow(error)
        runtime = current_runtime()
        self._door = runtime.reactor.door
        self.point = runtime.watch(engine, stream, event, self._done)

    def _done(self, error: BaseException | None) -> None:
        self.error = error
        if self.reached is None:
            return
        if current_token() is self._door.token:
            self.reached.set()
        else:  # the runtime has been left before us: this is the notifier's thread
            try:
                self._door.post(self.reached.set)
            except DoorClosed:
                pass

    async def wait(self) -> None:
        # First say that somebody waits, then look: the point is done first, then looks who waits.
        if self.reached is None and not self.point.done:
            self.reached = anyio.Event()
        if not self.point.done:
            await cast(anyio.Event, self.reached).wait()


class RunAhead:
    """At most ``limit`` steps' work is unfinished on the device when :meth:`room` returns."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._marks: deque[_Mark] = deque()

    def mark(self, engine: Engine | None = None) -> None:
        """A step ends here: what the current stream holds now. ``engine``: default, the task's."""
        if engine is None:
            task = current_task()
            engine = task.engine if task is not None else None
        # Without a task and without a device nobody says that there is GPU work, and an event on the
        # default stream would be a barrier over all compute streams.
        if engine is not None and not engine.driver.eager and not engine.driver.capturing():
            self._marks.append(_Mark(engine))

    async def room(self) -> None:
        """Wait until another step's work may be submitted. No checkpoint when it may."""
        while len(self._marks) > self._limit:
            oldest = self._marks[0]
            await oldest.wait()
            if self._marks and self._marks[0] is oldest:
                self._marks.popleft()
            if oldest.error is not None:
                raise fresh(oldest.error)
