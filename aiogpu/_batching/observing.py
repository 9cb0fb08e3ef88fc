"""What batchers tell those who watch.

Law of this file: watching changes nothing. Events are made only while somebody listens; a listener that
raises is logged and the batch goes on. What is *now* (calls waiting, batches running) is asked for, never
counted up and down, so that no gauge can be left behind by a caller who has gone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batcher import Batcher

__all__ = ["BatchEnded", "BatcherStats", "CallEnded", "Observer", "live_batchers", "observers", "tell"]

log = logging.getLogger("aiogpu")


@dataclass(frozen=True)
class CallEnded:
    """One call of a batcher is over.

    ``outcome``: "ok", "error", "timeout", "cancelled", "refused" (``OverloadedError``) or "closed".
    ``wait_seconds``: until its batch started, or until it left the queue; ``total_seconds``: until its end.
    """

    batcher: str
    outcome: str
    wait_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class BatchEnded:
    """One batch is over, on the device too.

    ``size``: calls in it; ``padded``: rows added to reach a preferred size. ``seconds``: from its start
    (stacking, upload) to its end on the device. ``outcome``: "ok", or "error" when any of its calls failed.
    """

    batcher: str
    size: int
    padded: int
    seconds: float
    outcome: str


Observer = Callable[["CallEnded | BatchEnded"], object]


@dataclass(frozen=True)
class BatcherStats:
    """Counters of one batcher since its start, and what is now.

    Now: ``waiting`` calls, ``running`` batches, ``limit``: the most calls that a batch may have (lowered for
    a while after running out of memory), ``predicted_wait``: in seconds, for a call made now.

    Calls: ``calls`` made; those that are over: ``ok``, ``errors``, ``timeouts``, ``cancelled``, ``refused``
    (``OverloadedError``), ``closed``. Batches: ``batches`` computed (attempts, where one was split),
    ``items``: calls in them, ``padded``: rows added to reach a preferred size. Sums, in seconds:
    ``wait_seconds``: of calls until their batch started; ``compute_seconds``: of batches from their start to
    their end on the device.
    """

    waiting: int
    running: int
    limit: int
    predicted_wait: float
    calls: int
    ok: int
    errors: int
    timeouts: int
    cancelled: int
    refused: int
    closed: int
    batches: int
    items: int
    padded: int
    wait_seconds: float
    compute_seconds: float


#: Listeners to all batchers of the process. Called on the batchers' loop threads.
observers: list[Observer] = []

_live: weakref.WeakSet[Batcher] = weakref.WeakSet()


def live_batchers() -> list[Batcher]:
    """The batchers that are entered now: ask them for ``name`` and ``stats()``. From any thread."""
    while True:
        try:
            return list(_live)
        except RuntimeError:
            continue  # another thread has entered one in the middle of it


def tell(own: Sequence[Observer], kind: Callable[..., Any], *what: Any) -> None:
    """Make an event of ``kind`` and call all listeners with it. The caller has looked that there are any."""
    event = kind(*what)
    for observer in (*own, *observers):
        try:
            observer(event)
        except Exception:
            log.exception("aiogpu: an observer of batchers raised; the batcher goes on")
