"""One call that waits for its batch, and its only outcome.

Law of this file: an entry ends once; whoever comes first wins, everybody later is ignored.

    WAITING --start--> RUNNING     its batch is computed; neighbours depend on its place, not on its caller
    WAITING --end-->   OVER        refused after all, the caller has left, the batcher is closed
    RUNNING --end-->   OVER        its batch has an outcome, or the caller has left

What it holds of tensors is dropped at the end: the caller's input, and, by the caller, the result.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Any

from .._errors import fresh
from .._handoff import Handoff
from .._loops import Door

__all__ = ["Entry", "State"]


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


class Entry:
    """A call's item and caller, from the call to its outcome."""

    __slots__ = (
        "born",
        "client",
        "cost",
        "error",
        "expired",
        "follows",
        "handoff",
        "item",
        "nbytes",
        "number",
        "priority",
        "result",
        "signature",
        "started",
        "state",
        "tag",
        "waiter",
    )

    #: What the queue orders it by; set when it is put there.
    number: int
    tag: float

    def __init__(
        self,
        item: Any,
        waiter: Any,
        born: float,
        priority: int = 0,
        client: Hashable = None,
        cost: float = 1.0,
        signature: Hashable = None,
        nbytes: float = 0,
        follows: bool = False,
    ) -> None:
        #: The caller's item, or a ``Handoff`` of it.
        self.item = item
        self.waiter = waiter
        self.born = born
        self.priority = priority
        self.client = client
        self.cost = cost
        self.signature = signature
        self.nbytes = nbytes
        #: The caller has a stream that can be ordered behind the batch: it need not wait on the host.
        self.follows = follows
        self.state = State.WAITING
        self.started = 0.0
        self.result: Any = None
        self.handoff: Handoff[Any] | None = None
        self.error: BaseException | None = None
        self.expired = False

    def start(self, now: float) -> None:
        """It leaves the queue as part of a batch."""
        self.state = State.RUNNING
        self.started = now

    def value(self) -> Any:
        """In the batch's task: the item; the current stream is ordered behind the caller's."""
        item = self.item
        return item.take() if isinstance(item, Handoff) else item

    def succeed(self, door: Door, result: Any, handoff: Handoff[Any] | None) -> None:
        """Its outcome is ``result``, part of the output that ``handoff`` hands over."""
        if self._end():
            self.result, self.handoff = result, handoff
            door.settle(self.waiter, None)

    def fail(self, door: Door, error: BaseException) -> None:
        """Its outcome is an exception of its own, like ``error``."""
        if self._end():
            self.error = error
            # Not settled with the error: an asyncio future refuses StopIteration, and complains of
            # errors that a caller who has left never fetches.
            door.settle(self.waiter, None)

    def expire(self, door: Door, error: TimeoutError) -> None:
        """Its time is over."""
        self.expired = self.expired or self.state is not State.OVER
        self.fail(door, error)

    def leave(self) -> None:
        """The caller has gone. A result that came all the same is dropped."""
        self._end()
        self.result = self.handoff = self.error = None

    def outcome(self) -> Any:
        """In the caller, once settled: the result, ordered behind the batch on the current stream."""
        error, result, handoff = self.error, self.result, self.handoff
        self.error = self.result = self.handoff = None
        if error is not None:
            raise fresh(error)
        if handoff is not None:
            handoff.take()
        return result

    def _end(self) -> bool:
        if self.state is State.OVER:
            return False
        self.state = State.OVER
        self.item = None
        return True
