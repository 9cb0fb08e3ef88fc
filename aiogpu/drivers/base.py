"""The contract between aiogpu and a device: eight verbs, and a few that have a default.

Law of this file: a driver orders and observes work, it never decides. It knows nothing of event loops,
tasks or waiters. All verbs may be called from any thread; none of them blocks on the device, except
:meth:`Driver.synchronize`, which only worker threads call.

The verbs: ``open_stream``, ``record``, ``wait`` (order after), ``query``, ``arm`` (ask for a
notification), ``copy``, ``pinned`` (page-locked memory), ``close``.

Guarantees that the conformance suite (:mod:`aiogpu.testing.conformance`) checks for every driver:

* Work on one stream runs in the order of its submission.
* ``query(record(s))`` is true only when everything submitted to ``s`` before the record has finished.
* ``wait(s, e)`` orders what is submitted to ``s`` afterwards behind what ``e`` had recorded *at that
  moment*; recording ``e`` again later changes nothing. An event may therefore be recycled as soon as
  the wait is submitted, and no chain of waits can form a cycle.
* A notification is a hint: it may be late, doubled or missing. Only ``query`` is the truth.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal, Protocol

import torch

__all__ = ["Driver", "Event", "Signal", "Stream", "StreamKind"]

StreamKind = Literal["compute", "copy"]

#: What :meth:`Driver.record` returns. Opaque to everybody but its driver.
Event = Any


class Signal(Protocol):
    """Where notifications go. ``function(argument)``, addresses of a C function and of what it takes, does
    the same as :meth:`post` on a thread without Python; 0 where there is none."""

    function: int
    argument: int

    def post(self) -> None: ...


class Stream:
    """One in-order queue of a device, ours or adopted.

    ``raw`` is the driver's compact name for it: what is swapped in and out of the thread at every task
    step, and what two handles of the same queue have in common. ``native`` is the object users know
    (``torch.cuda.Stream``).
    """

    __slots__ = ("device", "native", "raw")

    def __init__(self, device: torch.device, raw: Any, native: Any) -> None:
        self.device = device
        self.raw = raw
        self.native = native

    def __repr__(self) -> str:
        name = id(self) if self.raw is self else self.raw
        return f"<Stream {name} on {self.device}>"


class Driver(abc.ABC):
    """One device's verbs. See the module for what must hold."""

    device: torch.device

    #: How notifications are made, for diagnostics: "host callback", "waiter thread", ...
    wake_mechanism: str = "none"

    #: Whether compute streams and the thread's default stream order each other without an event
    #: (CUDA's *blocking* streams do). Where not, tasks make that edge explicitly.
    legacy_orders: bool = True

    #: Whether another thread may be capturing a graph, which queries must not disturb.
    captures: ClassVar[bool] = False

    #: Whether submitted compute runs at once on the calling thread (the CPU).
    eager: ClassVar[bool] = False

    # -- the eight verbs ---------------------------------------------------------------------------

    @abc.abstractmethod
    def open_stream(self, kind: StreamKind, priority: int = 0) -> Stream:
        """A new stream, never closed before the process ends (handles are reused by drivers)."""

    @abc.abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event that completes when everything submitted to ``stream`` so far has finished."""

    @abc.abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Order whatever is submitted to ``stream`` from now on after ``event`` as recorded now."""

    @abc.abstractmethod
    def query(self, event: Event) -> bool:
        """Has it completed? Never blocks. Raises what the device reports, also for earlier work."""

    @abc.abstractmethod
    def arm(self, event: Event, signal: Signal) -> Any:
        """Post ``signal`` once when ``event`` completes, without holding up the event's stream.

        Returns a token to give to :meth:`disarm` once the event was *seen* complete; ``None`` when no
        notification could be had now, and one should be asked for again later.
        """

    @abc.abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Submit ``dst.copy_(src)`` to ``stream``; host memory must be page-locked and dense."""

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: Stream) -> None:
        """:meth:`copy` of each ``(dst, src)``."""
        for dst, src in pairs:
            self.copy(dst, src, stream)

    def copy_and_wait(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """:meth:`copy`, finished on return, with what was in front of it. Worker threads only."""
        self.copy(dst, src, stream)
        event = self.record(stream)
        self.synchronize(event)
        self.recycle(event)

    @abc.abstractmethod
    def pinned(self, nbytes: int, touch: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        """Page-locked host memory: a 1-D ``uint8`` tensor. May take long: worker threads only.

        ``touch(block)`` writes to every page of a block. A driver that page-locks pages which exist already
        calls it first: several threads take page faults faster than the driver does.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Stop threads of the driver's own. Streams and memory stay until the process ends."""

    # -- the thread's current stream ---------------------------------------------------------------

    @abc.abstractmethod
    def swap(self, raw: Any) -> Any:
        """Make ``raw`` the calling thread's current stream; returns what :meth:`restore` needs."""

    @abc.abstractmethod
    def restore(self, saved: Any) -> Any:
        """Undo a :meth:`swap`; returns the ``raw`` that was current until now."""

    @abc.abstractmethod
    def current(self) -> Stream:
        """The calling thread's current stream on this device."""

    @abc.abstractmethod
    def adopt(self, native: Any) -> Stream:
        """The stream behind a user's stream object, or behind a ``raw``."""

    def everywhere(self) -> Any:
        """The calling thread's current device and streams, on all devices: for :meth:`on_all`."""
        return self.current().raw

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Within the block, ``stream`` is the calling thread's current stream."""
        return self.on_all(stream.raw)

    @contextmanager
    def on_all(self, everywhere: Any) -> Iterator[None]:
        """Within the block, the calling thread has what another one had at :meth:`everywhere`."""
        saved = self.swap(everywhere)
        try:
            yield
        finally:
            self.restore(saved)

    # -- verbs with a default ----------------------------------------------------------------------

    def disarm(self, token: Any) -> None:
        """The armed event was seen complete; the token's resources may be used again."""

    def recycle(self, event: Event) -> None:
        """The caller is done with ``event``; it may be handed out by ``record`` again."""

    def order(self, after: Stream, before: Stream) -> None:
        """An edge: what comes next on ``after`` runs behind what is on ``before`` now."""
        if after.raw != before.raw:
            event = self.record(before)
            self.wait(after, event)
            self.recycle(event)

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """``tensor`` is used on ``stream``, too: do not reuse its memory before that is done."""

    def is_default(self, stream: Stream) -> bool:
        """Is this the stream that a thread has when nobody chose one?"""
        return False

    def capturing(self) -> bool:
        """Is the calling thread's current stream being captured into a graph? Never raises."""
        return False

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """A block that must not disturb a graph capture that another thread has running."""
        yield

    def enter_thread(self) -> None:
        """Called once at the start of each of aiogpu's own threads."""

    def synchronize(self, event: Event) -> None:
        """Block the calling *worker* thread until ``event`` has completed."""
        raise TypeError(f"{type(self).__name__} cannot block on an event")

    def synchronize_device(self) -> None:
        """Block the calling *worker* thread until everything submitted to the device has finished."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Can the device copy from or to this host tensor without staging?"""
        return True

    def result_memory(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Page-locked host memory for a result, dense in the order that ``stride`` tells.

        ``None`` when there is none to be had: the caller then uses ordinary memory. Worker threads only.
        """
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")

    def unpin(self, block: torch.Tensor) -> None:
        """Undo :meth:`pinned`, all of one block, which the device no longer uses. Worker threads only."""

    def empty_result_cache(self) -> int:
        """Give back page-locked memory that :meth:`result_memory` has made and nobody holds any more;
        returns how many bytes that were. Worker threads only."""
        return 0

    def near_cpus(self) -> frozenset[int]:
        """The CPUs whose memory is near the device; empty where that makes no difference."""
        return frozenset()

    def lost(self, error: BaseException) -> bool:
        """Does ``error`` mean that the device's context is broken for good?"""
        return False
