"""The middleware: an aiogpu task around every request, and what its errors and its end mean to the client.

Law of this file: pure ASGI through anyio; no framework, no server, no event loop is known by name.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import anyio
import torch

from .. import _engine
from .._decorator import task
from .._emit import emit, request_observers
from .._engine import Engine, normalize
from .._runtime import Runtime, current_runtime
from .._stepwise import stepwise
from .answers import Answer, App, Message, Receive, Scope, Send, explain, refuse_websocket, respond
from .exchange import Exchange, note
from .gate import Gate
from .lifespan import serve_lifespan

__all__ = ["StreamMiddleware"]

#: What nginx writes into its log for a client that did not wait for its answer. Nobody gets to see it.
CLIENT_CLOSED_REQUEST = 499


class StreamMiddleware:
    """An ASGI application around another: each HTTP request and websocket is an :func:`aiogpu.task`.

    * Each request runs on a leased stream, with torch state of its own, until the application returns: a
      streaming response keeps its stream until its body has ended.
    * A client that disconnects before its answer is complete cancels its request's work (logged as
      499). Work that the device has already been given goes on; its buffers stay alive.
    * Websockets are not cancelled: their applications are told by ``receive``, as always. They clean up
      there (Starlette's ``except WebSocketDisconnect``), which a cancellation in some other ``await`` would
      skip; and to see a disconnect that nobody asks for, one would have to read the messages before it, and
      undo the server's back-pressure. Whoever wants work to end with its client runs it in a task group
      beside ``receive``.
    * ``/healthz`` answers 200, or 503 once a device is lost: restart the process. ``/readyz`` answers
      503 also before startup has ended and while draining: send requests elsewhere.
    * The lifespan opens a :class:`aiogpu.Runtime` before the application starts, and drains it after
      the application has shut down. Applications that know no lifespan need none.
    * An error that leaves the application before its response has started becomes a status:
      ``OverloadedError`` 429 with ``Retry-After``; ``DeviceLostError``, ``ClosedError`` and running out of
      memory 503; ``TimeoutError`` 504. Any other error goes on to the server. Once a response has started its
      status is out: the error is logged and goes on to the server, which cuts the response off.
    * While draining, every new request gets 503; while ``max_in_flight`` are under way, 429, before its body
      is read and before the application hears of it.

    Middleware inside this one that runs the endpoint in an event-loop task of its own (Starlette's
    ``BaseHTTPMiddleware``) takes the endpoint out of the request's stream. Add this middleware first, so
    that it is the innermost; or decorate the endpoints with :func:`aiogpu.task`: their edges to the
    request are found by themselves. Endpoints that are ordinary functions run in the framework's
    threads, on the default stream: correct, but they take turns.

    Parameters
    ----------
    app:
        The application.
    runtime:
        Makes the runtime that the lifespan opens, such as ``lambda: aiogpu.Runtime(spin=math.inf)``.
        Default: ``aiogpu.Runtime()``, or the one that is already open on the loop.
    device, priority:
        As of :func:`aiogpu.task`.
    max_in_flight:
        HTTP requests and websockets that the application may have at once; ``None``: any number. What a
        :class:`aiogpu.Batcher` may have waiting and computing, and some more: then nobody is refused there
        after his body has been read and parsed.
    healthz, readyz:
        Paths of the two probes; ``None``: no such probe.
    retry_after:
        Seconds that refused clients are told to wait where nothing better is known.

    Raises
    ------
    TypeError, ValueError
        What cannot be an argument: a ``Runtime`` in place of a function that makes one, say.
    """

    def __init__(
        self,
        app: App,
        *,
        runtime: Callable[[], Runtime] | None = None,
        device: torch.device | str | int | None = None,
        priority: int = 0,
        max_in_flight: int | None = None,
        healthz: str | None = "/healthz",
        readyz: str | None = "/readyz",
        retry_after: float = 1.0,
    ) -> None:
        if not callable(app):
            raise TypeError(f"StreamMiddleware goes around an ASGI application, not around {app!r}")
        if runtime is not None and not callable(runtime):
            raise TypeError(
                "StreamMiddleware(runtime=...) takes a function that makes the Runtime, for one belongs to "
                "an event loop, and the server's does not run yet: "
                f"runtime=lambda: aiogpu.Runtime(...), not {type(runtime).__name__}(...)"
            )
        for name, path in (("healthz", healthz), ("readyz", readyz)):
            if path is not None and not path.startswith("/"):
                raise ValueError(f"{name} is a path, such as '/{path}', not {path!r}; None: no such probe")
        self.app = app
        self._make_runtime = runtime
        self._device = None if device is None else normalize(device)
        self._healthz, self._readyz = healthz, readyz
        if max_in_flight is not None and (type(max_in_flight) is not int or max_in_flight < 1):
            raise ValueError(f"max_in_flight is a number of requests, 1 or more, not {max_in_flight!r}")
        self._gate = Gate(retry_after, math.inf if max_in_flight is None else max_in_flight)
        self._in_task = task(device=self._device, priority=priority)(_run)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        kind = scope["type"]
        if kind == "http":
            await self._http(scope, receive, send)
        elif kind == "websocket":
            await self._websocket(scope, receive, send)
        elif kind == "lifespan":
            await serve_lifespan(self.app, scope, receive, send, self._gate, self._make_runtime, self._device)
        else:
            await self.app(scope, receive, send)

    # -- for whoever runs the server ---------------------------------------------------------------

    def drain(self) -> None:
        """From now on refuse new requests with 503, and be not ready; those in flight go on.

        For a signal handler, some seconds before the server stops to accept: balancers look at
        ``/readyz`` only now and then. Shutting down does it, too.
        """
        self._gate.draining = True

    @property
    def draining(self) -> bool:
        """New requests are refused."""
        return self._gate.draining

    @property
    def in_flight(self) -> int:
        """Requests and websockets that the application has now, background work after the response
        included."""
        return self._gate.in_flight

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._gate.idle()

    # -- requests ----------------------------------------------------------------------------------

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        probe = self._probe(scope)
        answer = probe or self._gate.refusal()
        if answer is not None:
            await respond(scope, send, answer)
            if probe is None:
                emit(request_observers, answer.status, 0.0)
            return
        exchange = Exchange(scope, receive, send, self._explain)
        with self._gate:
            with anyio.CancelScope() as ended_by_disconnect:
                exchange.open(ended_by_disconnect)
                try:
                    await stepwise(self._call(scope, exchange.receive, exchange.send), exchange.step)
                except Exception as raised:
                    exchange.error = raised
                finally:
                    exchange.close()
                await exchange.unwatched()
        try:
            await self._conclude(exchange)
        finally:
            if request_observers:
                emit(request_observers, exchange.status or 500, exchange.age)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._engine()
        if engine is not None and engine.lost is not None:
            # Whoever needs no device is still served; whoever does meets the error.
            await self.app(scope, receive, send)
        else:
            await self._in_task(_Call(self.app, scope, receive, send))

    async def _conclude(self, exchange: Exchange) -> None:
        """The application has ended: say how, if it could not say so itself."""
        error, exchange.error = exchange.error, None
        try:
            if exchange.gone and not exchange.complete:
                # With an error, if any, that most likely says the same.
                exchange.status = CLIENT_CLOSED_REQUEST
                note(exchange, CLIENT_CLOSED_REQUEST, "the client disconnected")
            elif error is not None:
                await self._tell(exchange, error)
        finally:
            del (
                error
            )  # it knows this frame: in a cycle it would keep the tensors of the frames it came through

    async def _tell(self, exchange: Exchange, error: Exception) -> None:
        try:
            answer = self._explain(error)
            if answer is None:
                raise error
            if exchange.started and not exchange.complete:
                note(exchange, answer.status, "too late for this status", error, logging.WARNING)
                raise error
            note(exchange, answer.status, answer.reason, error)
            if not exchange.complete:
                exchange.status = answer.status
                await respond(exchange.scope, exchange.send_raw, answer)
        finally:
            del error

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._gate.refusal()
        accepted = over = False

        async def heard() -> Message:
            nonlocal over
            message = await receive()
            over = over or message["type"] == "websocket.disconnect"
            return message

        async def tracked(message: Message) -> None:
            nonlocal accepted, over
            accepted = accepted or message["type"] == "websocket.accept"
            over = over or message["type"] in ("websocket.close", "websocket.http.response.start")
            await send(message)

        if answer is None:
            try:
                with self._gate:
                    await self._call(scope, heard, tracked)
                return
            except Exception as error:
                answer = self._explain(error)
                if answer is None:
                    raise
        if not over:  # else there is nobody to be told, and servers take a second end for a mistake
            await refuse_websocket(scope, send, answer, accepted)

    # -- what is said ------------------------------------------------------------------------------

    def _probe(self, scope: Scope) -> Answer | None:
        """The answer to a health or readiness probe; touches no device."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        if path not in (self._healthz, self._readyz):
            return None
        lost = [str(engine.device) for engine in tuple(_engine._engines.values()) if engine.lost is not None]
        if lost:
            return Answer(503, f"device lost: {', '.join(lost)}")
        if path == self._healthz:
            return Answer(200, "ok")
        return self._gate.unready() or Answer(200, "ready")

    def _engine(self) -> Engine | None:
        device = self._device or current_runtime().device_now()
        return None if device is None else _engine.find_engine(device)

    def _explain(self, error: BaseException) -> Answer | None:
        return explain(error, self._engine(), self._gate.retry_after)


class _Call:
    """What a request's task is given: one opaque thing. A scope is full of containers, a server's state
    among them, and the task would look through an argument for tensors to keep."""

    __slots__ = ("app", "receive", "scope", "send")

    def __init__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self.app, self.scope, self.receive, self.send = app, scope, receive, send


async def _run(call: _Call) -> None:
    await call.app(call.scope, call.receive, call.send)
