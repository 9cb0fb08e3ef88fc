"""Who is let in: started or not, draining or not, how many are in flight.

Law of this file: state only, and no I/O. The lifespan and whoever runs the server change it, every request
asks it.
"""

from __future__ import annotations

import math

import anyio

from .answers import Answer

__all__ = ["Gate"]


class Gate:
    """``with gate:`` one request or websocket is in flight."""

    def __init__(self, retry_after: float, most: float = math.inf) -> None:
        self.retry_after = retry_after
        #: Requests that may be in flight at once.
        self.most = most
        #: Where no lifespan is run nobody says when startup has ended: then it has.
        self.started = True
        self.draining = False
        self.in_flight = 0
        self._idle: anyio.Event | None = None

    def refusal(self) -> Answer | None:
        """What new requests are told; ``None``: they are welcome."""
        if (answer := self.unready()) is not None:
            return answer
        if self.in_flight >= self.most:
            return Answer(429, "too many requests", self.retry_after)
        return None

    def unready(self) -> Answer | None:
        """Why requests should be sent elsewhere; ``None``: they should not."""
        if self.draining:
            return Answer(503, "shutting down", self.retry_after)
        if not self.started:
            return Answer(503, "starting", self.retry_after)
        return None

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        while self.in_flight:
            self._idle = self._idle or anyio.Event()
            await self._idle.wait()

    def __enter__(self) -> None:
        self.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1
        if not self.in_flight and self._idle is not None:
            self._idle.set()
            self._idle = None
