"""The CPU driver: the same program without a GPU.

Law of this file: compute runs at once on the calling thread, as torch does it on a CPU; *copies* are
queued, run in order on worker threads, and are real copies, so that a program which forgets to await
one fails here as it would on a GPU. (Copies of a few microseconds are made at once.)

A queue is a chain of commands. A thread drains it until the head is a wait for an event that has not
completed; the event's completion then starts the drain again, so that no thread is ever parked in a
queue (two queues waiting for each other's events would otherwise need two threads, N queues N).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .base import Driver, Event, Signal, Stream, StreamKind
from .hostmem import pages

#: Bytes up to which a copy is made on the calling thread.
_AT_ONCE = 64 * 1024

__all__ = ["CommandQueue", "CpuDriver", "HostEvent"]


class HostEvent:
    """A point in a :class:`CommandQueue`. Completes once; callbacks run in the completing thread."""

    __slots__ = ("_callbacks", "_done", "_lock", "error")

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._done = False
        self._callbacks: list[Callable[[], None]] = []
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._done

    def complete(self, error: BaseException | None = None) -> None:
        with self._lock:
            if self._done:
                return
            self._done, self.error = True, error
            callbacks, self._callbacks = self._callbacks, []
            self._lock.notify_all()
        for callback in callbacks:
            callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    def block(self, timeout: float | None = None) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: self._done, timeout)


class CommandQueue:
    """An in-order queue of host commands: run a function, complete an event, wait for an event."""

    def __init__(self, run_soon: Callable[[Callable[[], None]], None]) -> None:
        self._run_soon = run_soon
        self._lock = threading.RLock()
        self._commands: deque[tuple[str, Any]] = deque()
        self._draining = False
        self._failure: BaseException | None = None

    @property
    def idle(self) -> bool:
        # A failure that no event has taken yet keeps it busy: the next event must carry it.
        return not self._commands and not self._draining and self._failure is None

    def put(self, kind: str, payload: Any) -> None:
        """``kind`` is "run" (a function), "complete" or "wait" (a :class:`HostEvent`)."""
        with self._lock:
            self._commands.append((kind, payload))
            if self._draining:
                return
            self._draining = True
        self._run_soon(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._commands:
                    self._draining = False
                    return
                kind, payload = self._commands[0]
                if kind == "wait" and not payload.done:
                    # Still marked as draining: only the event's completion may start the next drain.
                    break
                self._commands.popleft()
            self._execute(kind, payload)
        payload.when_done(lambda: self._run_soon(self._drain))

    def _execute(self, kind: str, payload: Any) -> None:
        if kind == "run":
            try:
                payload()
            except BaseException as error:
                # Reported at the next event, as a device does it: the queue itself goes on.
                self._failure = error
        elif kind == "complete":
            failure, self._failure = self._failure, None
            payload.complete(failure)


class CpuDriver(Driver):
    """Compute on the calling thread, copies on worker threads."""

    eager = True
    wake_mechanism = "worker thread"

    def __init__(self, device: torch.device | None = None, *, threads: int = 2) -> None:
        self.device = device or torch.device("cpu")
        self._executor: ThreadPoolExecutor | None = None
        self._threads = threads
        self._lock = threading.RLock()
        self._local = threading.local()
        self._default = self.open_stream("compute")

    def _run_soon(self, fn: Callable[[], None]) -> None:
        with self._lock:
            if self._executor is None:  # no thread before the first copy
                self._executor = ThreadPoolExecutor(self._threads, "aiogpu-cpu-copy")
            self._executor.submit(fn)

    def open_stream(self, kind: StreamKind, priority: int = 0) -> Stream:
        stream = Stream(self.device, None, CommandQueue(self._run_soon))
        stream.raw = stream  # nothing more compact to swap than the stream itself
        return stream

    def record(self, stream: Stream) -> Event:
        event = HostEvent()
        if stream.native.idle:
            event.complete()
        else:
            stream.native.put("complete", event)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        if not event.done:
            stream.native.put("wait", event)

    def query(self, event: Event) -> bool:
        if event.done and event.error is not None:
            raise event.error
        return bool(event.done)

    def arm(self, event: Event, signal: Signal) -> Any:
        event.when_done(signal.post)
        return event

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        def run() -> None:
            with torch.inference_mode(dst.is_inference()), torch.no_grad():
                dst.copy_(src)

        if dst.numel() * dst.element_size() <= _AT_ONCE and stream.native.idle:
            run()  # a few microseconds, less than any hand-over to a thread
        else:
            stream.native.put("run", run)

    def pinned(self, nbytes: int, touch: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        block = pages(nbytes)
        if touch is not None:
            touch(block)
        return block

    def close(self) -> None:
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)

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
        if isinstance(native, Stream):
            return native
        return self._default  # torch.cpu.Stream is a placeholder: there is one queue, the thread

    def is_default(self, stream: Stream) -> bool:
        return stream is self._default

    def synchronize(self, event: Event) -> None:
        event.block()
        self.query(event)
