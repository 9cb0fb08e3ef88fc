"""What can be counted: the fields of :class:`Stats`, and where each comes from.

Law of this file: reading only. Asking costs microseconds and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._engine import Engine
    from ._reactor import Reactor
    from .transfers.inflight import InFlight

__all__ = ["Stats", "count"]


@dataclass(frozen=True)
class Stats:
    """Counters of one runtime and of the devices it uses, since their start.

    ``looks``: rounds of polling. ``notifications``: host callbacks that were armed. ``pending``: points
    waited for now. ``operations``: transfers that are not over; ``inflight_bytes``: bytes of those that
    have started, ``waiting_transfers``: those that ``max_inflight_bytes`` holds back. ``streams``: compute
    streams opened; ``streams_in_use``, ``leases``, ``shared``: leases now, ever, and those that had to
    share a stream.
    ``staging_bytes``, ``staging_bytes_in_use``: page-locked staging memory, in bytes, and how much of it
    transfers have now; ``staging_allocations``: how often memory was page-locked for it (after warm-up
    this stands still); ``staging_waits``: how often a large transfer had to wait for its turn in it.
    ``result_bytes``: page-locked results that users hold; ``result_cache_bytes``: what torch keeps of them
    for reuse; ``ordinary_results``: results that came in ordinary memory because ``pinned_bytes`` were
    spent. ``wake``: how the device's completions are announced. ``orphans``: points whose loop has closed.
    """

    looks: int
    notifications: int
    pending: int
    operations: int
    inflight_bytes: int
    waiting_transfers: int
    streams: int
    streams_in_use: int
    leases: int
    shared: int
    staging_bytes: int
    staging_bytes_in_use: int
    staging_allocations: int
    staging_waits: int
    result_bytes: int
    result_cache_bytes: int
    ordinary_results: int
    orphans: int
    wake: str


def count(reactor: Reactor, inflight: InFlight, engine: Engine | None, orphans: int) -> Stats:
    """The counters of a runtime, and of its default device if that is in use."""
    pool = engine.compute if engine else None
    blocks = (engine.slots, engine.chunks) if engine else ()
    return Stats(
        looks=reactor.looks,
        notifications=reactor.notifications,
        pending=reactor.pending,
        operations=len(reactor.operations),
        inflight_bytes=inflight.nbytes,
        waiting_transfers=inflight.waiting,
        streams=pool.opened if pool else 0,
        streams_in_use=pool.in_use if pool else 0,
        leases=pool.leases if pool else 0,
        shared=pool.shared if pool else 0,
        staging_bytes=sum(pool.allocated_bytes for pool in blocks),
        staging_bytes_in_use=sum(pool.used_bytes for pool in blocks),
        staging_allocations=engine.memory.allocations if engine else 0,
        staging_waits=engine.chunks.waits if engine else 0,
        result_bytes=engine.results.held if engine else 0,
        result_cache_bytes=engine.results.kept if engine else 0,
        ordinary_results=engine.results.refused if engine else 0,
        orphans=orphans,
        wake=engine.driver.wake_mechanism if engine else "not started",
    )
