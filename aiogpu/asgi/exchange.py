"""One HTTP request and its response, watched for the client's disconnect.

Law of this file: no message is taken from the application. What the watch has to read it hands on, and it
never reads ahead of a body, so that a server's back-pressure, and its ``100 Continue``, stay what they were.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import Any

import anyio

from .._loops import Door
from .._runtime import current_runtime
from .answers import Answer, Message, Receive, Scope, Send, respond

__all__ = ["Exchange", "note"]

log = logging.getLogger("aiogpu.asgi")


class _Watch:
    """The task that waits for the disconnect. Not one of a task group's: those cost five times as much."""

    __slots__ = ("cancel", "door", "over")

    def __init__(self, door: Door) -> None:
        self.door = door
        self.over = door.waiter()
        self.cancel: Callable[[], object]

    def ended(self) -> None:
        self.door.settle(self.over, None)


class Exchange:
    """One request and its response.

    ``receive`` has two readers, the application and the watch, and servers expect one. While the body
    comes in, the application reads, and is told of a disconnect itself. After that nothing but the
    disconnect can come: the watch reads, and the application waits for what the watch has. A request
    that declares no body is watched at once (its endpoint may never read): the one message that
    may come first is held for the application.

    The watch is a task, which costs as much as a small request. It is started when the application
    suspends, for before that nothing can come; many never do.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, explain: Callable[[BaseException], Answer | None]
    ) -> None:
        self.scope = scope
        self.send_raw = send
        self._receive = receive
        self._explain = explain
        self._born = time.monotonic()
        self._cancel_scope: anyio.CancelScope | None = None  # the application's, while it is open
        self._watching = False  # what comes next is the watch's, once it is there
        self._watch: _Watch | None = None  # it is there
        self._reading = self._stepping = False  # the application is
        self._held: Message | None = None
        self._changed: anyio.Event | None = None
        self.gone: Message | None = None
        self.error: Exception | None = None
        #: What the client was told, or 499; ``None``: nothing, the server does.
        self.status: int | None = None
        self.started = self.complete = self.replaced = False

    @property
    def age(self) -> float:
        """Seconds since the request came in."""
        return time.monotonic() - self._born

    def open(self, scope: anyio.CancelScope) -> None:
        """The application is about to run within ``scope``, which a disconnect cancels."""
        self._cancel_scope = scope
        self._watching = not _declares_body(self.scope["headers"])

    def step(self, step: Callable[[Any], Any], value: Any) -> Any:
        """Make one step of the application."""
        self._stepping = True
        try:
            yielded = step(value)
        finally:
            self._stepping = False
        self._watch_if_due()
        return yielded

    def close(self) -> None:
        """It has ended. The watch ends soon, too."""
        self._cancel_scope = None
        self._watching = False
        if self._watch is not None:
            self._watch.cancel()
            self._wake()  # whoever the application has left behind asks the server itself

    async def unwatched(self) -> None:
        """Wait until nobody of ours asks the server any more."""
        if self._watch is not None:
            await self._watch.door.park(self._watch.over)

    # -- in ----------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        while True:
            if self._held is not None:
                message, self._held = self._held, None
                return message
            if self.gone is not None:
                return self.gone
            if self._watch is None or not self._watching:
                break
            self._changed = self._changed or anyio.Event()
            await self._changed.wait()
        self._reading = True
        try:
            message = await self._receive()
            self._look_at(message)
            return message
        finally:
            self._reading = False
            self._watch_if_due()

    def _look_at(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self._watching = False
            self.gone = message
            if not self.complete and self._cancel_scope is not None:
                self._cancel_scope.cancel()
        else:  # with more to come it is not the watch's to read (HTTP/2 declares nothing)
            self._watching = not message.get("more_body", False) and self._cancel_scope is not None

    def _watch_if_due(self) -> None:
        # Not only where the application suspends: a task that it has started may read, while it waits.
        if self._watching and self._watch is None and not self._reading and not self._stepping:
            door = current_runtime().reactor.door
            self._watch = watch = _Watch(door)
            watch.cancel = door.spawn(self._wait_for_disconnect, copy_context(), watch.ended)

    async def _wait_for_disconnect(self) -> None:
        while self._watching:
            try:
                message = await self._receive()
            except Exception:  # the application shall meet it, when it asks
                self._watching = False
            else:
                self._look_at(message)
                if self.gone is None:
                    self._held = message
            self._wake()
        self._watch = None

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    # -- out ---------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        if self.replaced:
            return  # the rest of a response that has been replaced
        kind = message["type"]
        if kind == "http.response.start":
            # Frameworks turn errors they do not know into 500 themselves, while they handle them:
            # Starlette's outermost layer, around which we may stand, does.
            handled = sys.exception() if message["status"] == 500 else None
            answer = self._explain(handled) if handled is not None else None
            if answer is not None:
                self.replaced = self.complete = True
                self.status = answer.status
                await respond(self.scope, self.send_raw, answer)
                return
            self.started = True
            self.status = message["status"]
        elif kind in ("http.response.body", "http.response.pathsend"):
            # First noted, then sent: the server may tell the watch before this call returns.
            self.complete = not message.get("more_body", False)
        await self.send_raw(message)


def _declares_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """A body is announced, or the client waits to be asked for one (reading is asking)."""
    return any(
        name == b"transfer-encoding" or name == b"expect" or (name == b"content-length" and value != b"0")
        for name, value in headers
    )


def note(
    exchange: Exchange,
    status: int,
    reason: str,
    error: Exception | None = None,
    level: int = logging.INFO,
) -> None:
    if log.isEnabledFor(level):
        scope = exchange.scope
        why = f" ({type(error).__name__}: {error})" if error is not None else ""
        text = "%s %s: %d, %s after %.1f ms%s"
        log.log(level, text, scope["method"], scope["path"], status, reason, exchange.age * 1e3, why)
