"""The virtual device: a GPU with a virtual clock, latches and faults on demand, for tests without one.

Law of this file: nothing happens unless the test lets it. Tensors are ordinary CPU tensors; "kernels"
are functions given to :meth:`VirtualDevice.launch`, which run when their stream reaches them. So a value
that is read early really is stale, and a buffer that is freed early really is overwritten.

Every access is also checked for order, with vector clocks as race detectors do it: each stream counts
its commands, an event carries its stream's knowledge of all others, a wait merges it, and what the host
has *seen* complete is known to everything that it submits afterwards. A read or write that is not
ordered after the last write of the same memory raises :class:`RaceError` at its submission.

The default stream has CUDA's legacy semantics: it and the compute streams order each other; copy
streams are non-blocking and take no part.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from ..drivers.base import Driver, Event, Signal, Stream, StreamKind

__all__ = ["Latch", "RaceError", "VirtualDevice", "VirtualFault"]

Notifications = Literal["prompt", "never", "early", "twice", "late"]
Clock = dict[int, int]


class RaceError(AssertionError):
    """Two accesses to one memory are not ordered by streams, events or the host."""


class VirtualFault(RuntimeError):
    """The sticky error of a virtual device."""


class _VirtualEvent:
    __slots__ = ("clock", "done", "generation", "listeners")

    def __init__(self) -> None:
        self.done = True  # like an event that was never recorded
        self.generation = 0
        self.clock: Clock = {}
        self.listeners: list[Signal] = []


class Latch:
    """Holds a stream until :meth:`release`."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.released = False

    def release(self) -> None:
        with self._device._changed:
            self.released = True
            self._device._run_if_auto()


class _Command:
    __slots__ = ("duration", "event", "generation", "kind", "latch", "name", "run")

    def __init__(self, kind: str, name: str, **fields: Any) -> None:
        self.kind = kind
        self.name = name
        self.duration: float = fields.get("duration", 0.0)
        self.run: Callable[[], object] | None = fields.get("run")
        self.event: _VirtualEvent | None = fields.get("event")
        self.generation: int = fields.get("generation", 0)
        self.latch: Latch | None = fields.get("latch")


class _Queue:
    def __init__(self, number: int, kind: StreamKind | Literal["default"]) -> None:
        self.number = number
        self.kind = kind
        self.commands: deque[_Command] = deque()
        self.finish: float | None = None  # virtual time at which the running head ends
        self.clock: Clock = {}


class VirtualDevice(Driver):
    """A driver whose streams move only when told to.

    Parameters
    ----------
    auto:
        Run whatever can run as soon as it is submitted (virtual time does not matter then). With
        ``auto=False`` the test calls :meth:`advance`, :meth:`step` or :meth:`run_all`.
    copy_seconds:
        Virtual duration of one copy.
    races:
        Check the order of all accesses (see the module).
    """

    wake_mechanism = "virtual"

    def __init__(self, *, auto: bool = True, copy_seconds: float = 0.0, races: bool = True) -> None:
        self.device = torch.device("cpu")
        self.auto = auto
        self.copy_seconds = copy_seconds
        self.races = races
        self.now = 0.0
        self.notifications: Notifications = "prompt"
        self.is_capturing = False
        self.pinned_bytes = 0
        self._pinned: set[int] = set()
        self.pin_failures = 0  # the next so many calls of pinned() fail
        self.armed = 0
        self.submitted = 0
        self.log: list[tuple[str, int]] = []
        self._fault: BaseException | None = None
        self._failures: dict[int, BaseException] = {}
        self._late: list[Signal] = []
        self._queues: list[_Queue] = []
        self._host_clock: Clock = {}
        self._writes: dict[int, tuple[int, int]] = {}
        self._reads: dict[int, dict[int, int]] = {}
        self._local = threading.local()
        self._changed = threading.Condition(threading.RLock())
        self._default = self._open("default")

    # -- what tests do with it ---------------------------------------------------------------------

    def launch(
        self,
        run: Callable[[], object] | None = None,
        *,
        duration: float = 0.0,
        reads: Iterable[torch.Tensor] = (),
        writes: Iterable[torch.Tensor] = (),
        stream: Stream | None = None,
        name: str = "kernel",
    ) -> None:
        """Submit a kernel to the current (or given) stream: ``duration`` virtual seconds, then ``run``."""
        queue = (stream or self.current()).native
        self._submit(queue, _Command("run", name, run=run, duration=duration), reads, writes)

    def latch(self, stream: Stream | None = None) -> Latch:
        """Hold the current (or given) stream at this point."""
        latch = Latch(self)
        self._submit((stream or self.current()).native, _Command("latch", "latch", latch=latch))
        return latch

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` of virtual time pass; what ends in it, ends in order."""
        with self._changed:
            target = self.now + seconds
            while True:
                self._settle()
                ends = [q.finish for q in self._queues if q.finish is not None]
                if not ends or min(ends) > target:
                    break
                self.now = min(ends)
            self.now = target
            self._settle()

    def run_all(self) -> None:
        """Run until nothing can move any more (latches still hold)."""
        with self._changed:
            while True:
                self._settle()
                ends = [q.finish for q in self._queues if q.finish is not None]
                if not ends:
                    return
                self.now = max(self.now, min(ends))

    def movable(self) -> list[Stream]:
        """The streams whose head could run now, for tests that choose the order."""
        with self._changed:
            return [
                Stream(self.device, q.number, q)
                for q in self._queues
                if self._fault is None and q.commands and self._unblocked(q.commands[0])
            ]

    def step(self, stream: Stream) -> None:
        """Run one stream's head, whatever its duration."""
        with self._changed:
            self._finish_head(stream.native)

    @property
    def idle(self) -> bool:
        """Nothing is queued anywhere."""
        with self._changed:
            return not any(q.commands for q in self._queues)

    def fault(self, error: BaseException | None = None) -> None:
        """Break the device for good: nothing runs any more, every call raises."""
        with self._changed:
            self._fault = error or VirtualFault("virtual device: unspecified launch failure")
            self._changed.notify_all()

    def fail_submit(self, nth: int, error: BaseException) -> None:
        """The ``nth`` submission from now on (1 is the next) raises ``error``."""
        self._failures[self.submitted + nth] = error

    def deliver(self) -> None:
        """Post the notifications that ``notifications="late"`` has held back."""
        late, self._late = self._late, []
        for signal in late:
            signal.post()

    # -- the contract ------------------------------------------------------------------------------

    def open_stream(self, kind: StreamKind, priority: int = 0) -> Stream:
        return self._open(kind)

    def record(self, stream: Stream) -> Event:
        event = _VirtualEvent()
        event.done = False
        queue: _Queue = stream.native
        with self._changed:
            event.generation += 1
            event.clock = self._tick(queue)
            self._submit(queue, _Command("record", "record", event=event, generation=event.generation))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        queue: _Queue = stream.native
        with self._changed:
            self._submit(queue, _Command("wait", "wait", event=event, generation=event.generation))
            _merge(queue.clock, event.clock)

    def query(self, event: Event) -> bool:
        with self._changed:
            if self._fault is not None:
                raise self._fault
            if event.done:
                _merge(self._host_clock, event.clock)
            return bool(event.done)

    def arm(self, event: Event, signal: Signal) -> Any:
        with self._changed:
            self.armed += 1
            if self.notifications == "early":
                signal.post()
            if event.done:
                self._notify(signal)
            else:
                event.listeners.append(signal)
        return event

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        def run() -> None:
            with torch.inference_mode(dst.is_inference()), torch.no_grad():
                dst.copy_(src)

        command = _Command("run", "copy", run=run, duration=self.copy_seconds)
        self._submit(stream.native, command, [src], [dst])

    def pinned(self, nbytes: int, touch: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        if self.pin_failures > 0:
            self.pin_failures -= 1
            raise RuntimeError("virtual device: cannot page-lock memory")
        self.pinned_bytes += nbytes
        return self.pin(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))

    def close(self) -> None:
        pass

    def swap(self, raw: Any) -> Any:
        saved = getattr(self._local, "stream", self._default)
        self._local.stream = raw
        return saved

    def restore(self, saved: Any) -> Any:
        raw = self._local.stream
        self._local.stream = saved
        return raw

    def current(self) -> Stream:
        stream: Stream = getattr(self._local, "stream", self._default)
        return stream

    def adopt(self, native: Any) -> Stream:
        return native if isinstance(native, Stream) else self._default

    def is_default(self, stream: Stream) -> bool:
        return stream is self._default

    def capturing(self) -> bool:
        return self.is_capturing

    def synchronize(self, event: Event) -> None:
        with self._changed:
            self._changed.wait_for(lambda: event.done or self._fault is not None)
            self.query(event)

    def synchronize_device(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.idle or self._fault is not None)
            if self._fault is not None:
                raise self._fault

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declare a host tensor's memory page-locked."""
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def lost(self, error: BaseException) -> bool:
        return isinstance(error, VirtualFault)

    # -- how it moves ------------------------------------------------------------------------------

    def _open(self, kind: StreamKind | Literal["default"]) -> Stream:
        queue = _Queue(len(self._queues), kind)
        self._queues.append(queue)
        stream = Stream(self.device, None, queue)
        stream.raw = stream
        return stream

    def _submit(
        self,
        queue: _Queue,
        command: _Command,
        reads: Iterable[torch.Tensor] = (),
        writes: Iterable[torch.Tensor] = (),
    ) -> None:
        with self._changed:
            self.submitted += 1
            failure = self._failures.pop(self.submitted, None) or self._fault
            if failure is not None:
                raise failure
            self._legacy_edges(queue)
            if command.kind in ("run", "latch"):
                _merge(queue.clock, self._host_clock)
                self._check(queue, reads, writes)
            self.log.append((command.name, queue.number))
            queue.commands.append(command)
            self._run_if_auto()

    def _legacy_edges(self, queue: _Queue) -> None:
        """The default stream waits for all blocking streams, and they for it."""
        if queue.kind == "copy":
            return
        others = [q for q in self._queues if q is not queue and q.kind != "copy"]
        if queue.kind != "default":
            others = [q for q in others if q.kind == "default"]
        for other in others:
            _merge(queue.clock, other.clock)
            if other.commands:
                event = _VirtualEvent()
                event.done = False
                other.commands.append(_Command("record", "legacy", event=event))
                queue.commands.append(_Command("wait", "legacy", event=event))

    def _tick(self, queue: _Queue) -> Clock:
        _merge(queue.clock, self._host_clock)
        queue.clock[queue.number] = queue.clock.get(queue.number, 0) + 1
        return dict(queue.clock)

    def _check(self, queue: _Queue, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        if not self.races:
            return
        clock = self._tick(queue)
        now = clock[queue.number]

        def seen(stream: int, time: int) -> bool:
            return clock.get(stream, 0) >= time

        for tensor in reads:
            place = self._place(tensor)
            if place in self._writes and not seen(*self._writes[place]):
                raise RaceError(f"stream {queue.number} reads what stream {self._writes[place][0]} writes")
            self._reads.setdefault(place, {})[queue.number] = now
        for tensor in writes:
            place = self._place(tensor)
            unseen = [s for s, t in self._reads.get(place, {}).items() if not seen(s, t)]
            if place in self._writes and not seen(*self._writes[place]):
                unseen.append(self._writes[place][0])
            if unseen:
                raise RaceError(f"stream {queue.number} writes what streams {unseen} still use")
            self._writes[place] = (queue.number, now)
            self._reads.pop(place, None)

    def _place(self, tensor: torch.Tensor) -> int:
        """What names a tensor's memory: its storage, but a staging block is a piece of a larger one."""
        storage = tensor.untyped_storage().data_ptr()
        return tensor.data_ptr() if storage in self._pinned else storage

    def forget(self, tensor: torch.Tensor) -> None:
        """The host wrote ``tensor`` or reuses its memory: older accesses say nothing about it."""
        place = self._place(tensor)
        self._writes.pop(place, None)
        self._reads.pop(place, None)

    def _run_if_auto(self) -> None:
        if self.auto:
            self.run_all()
        else:
            self._changed.notify_all()

    def _unblocked(self, head: _Command) -> bool:
        if head.latch is not None:
            return head.latch.released
        if head.kind == "wait":
            assert head.event is not None
            return head.event.done or head.event.generation != head.generation
        return True

    def _settle(self) -> None:
        """Start and end whatever can at the present virtual time."""
        moved = self._fault is None
        while moved:
            moved = False
            for queue in self._queues:
                while queue.commands and self._unblocked(queue.commands[0]):
                    if queue.finish is None:
                        queue.finish = self.now + queue.commands[0].duration
                    if queue.finish > self.now:
                        break
                    self._finish_head(queue)
                    moved = True

    def _finish_head(self, queue: _Queue) -> None:
        command = queue.commands.popleft()
        queue.finish = None
        if command.run is not None:
            command.run()
        if command.kind == "record":
            event = command.event
            assert event is not None
            event.done = True
            listeners, event.listeners = event.listeners, []
            for signal in listeners:
                self._notify(signal)
        self._changed.notify_all()

    def _notify(self, signal: Signal) -> None:
        if self.notifications == "late":
            self._late.append(signal)
        elif self.notifications != "never":
            signal.post()
            if self.notifications == "twice":
                signal.post()


def _merge(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if into.get(stream, 0) < time:
            into[stream] = time
