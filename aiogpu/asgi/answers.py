"""Which error is which status, and how it is said.

Law of this file: a client is told a status and one line, never an exception's text or a stack trace. Only
what tells a client something (try elsewhere, try later) has a status here; any other error is not ours.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

from .._engine import Engine
from .._errors import ClosedError, DeviceLostError, OverloadedError, is_out_of_memory

__all__ = ["Answer", "App", "Message", "Receive", "Scope", "Send", "explain", "refuse_websocket", "respond"]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Answer(NamedTuple):
    """What a client is told: a status and one line, never an exception's text or a stack trace."""

    status: int
    reason: str
    retry_after: float | None = None  # seconds


def explain(error: BaseException, engine: Engine | None, retry_after: float) -> Answer | None:
    """What the client is told about ``error``; ``None``: nothing that is ours to say."""
    if isinstance(error, BaseExceptionGroup):
        answers = [explain(each, engine, retry_after) for each in error.exceptions]
        told = [answer for answer in answers if answer is not None]
        return max(told, key=lambda answer: answer.status) if len(told) == len(answers) else None
    if engine is not None and isinstance(error, RuntimeError) and engine.driver.lost(error):
        error = engine.fault(error)  # torch's own error, seen first by a call of the user's
    if isinstance(error, OverloadedError):
        return Answer(429, "too many requests", error.retry_after)
    if isinstance(error, DeviceLostError):
        return Answer(503, "the device is lost", retry_after)
    if isinstance(error, ClosedError):
        return Answer(503, "shutting down", retry_after)
    if is_out_of_memory(error):
        return Answer(503, "out of memory", retry_after)
    if isinstance(error, TimeoutError):
        return Answer(504, "timed out")
    return None


def _headers(scope: Scope, answer: Answer, body: bytes) -> list[tuple[bytes, bytes]]:
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    if answer.retry_after is not None:
        # Whole seconds, says RFC 9110; at least one, for 0 means "at once" to everybody.
        seconds = max(1, math.ceil(answer.retry_after)) if math.isfinite(answer.retry_after) else 1
        headers.append((b"retry-after", str(seconds).encode()))
    return headers


async def respond(scope: Scope, send: Send, answer: Answer) -> None:
    body = answer.reason.encode() + b"\n"
    start = {
        "type": "http.response.start",
        "status": answer.status,
        "headers": _headers(scope, answer, body),
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def refuse_websocket(scope: Scope, send: Send, answer: Answer, accepted: bool) -> None:
    if not accepted and "websocket.http.response" in scope.get("extensions", {}):
        body = answer.reason.encode() + b"\n"
        kind = "websocket.http.response"
        headers = _headers(scope, answer, body)
        await send({"type": f"{kind}.start", "status": answer.status, "headers": headers})
        await send({"type": f"{kind}.body", "body": body})
    else:  # 1013: try again later; before the handshake servers make a 403 of it
        await send({"type": "websocket.close", "code": 1013, "reason": answer.reason})
