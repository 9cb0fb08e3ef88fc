"""The lifespan protocol, spoken with the server on behalf of an application that may not know it.

Law of this file: the runtime is open before the application hears of the startup, and closed after the
application has said the last it has to say; every way out of here closes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
import torch

from .._runtime import Runtime, current_runtime
from .answers import App, Message, Receive, Scope, Send
from .gate import Gate

__all__ = ["serve_lifespan"]

log = logging.getLogger("aiogpu.asgi")


async def serve_lifespan(
    app: App,
    scope: Scope,
    receive: Receive,
    send: Send,
    gate: Gate,
    make_runtime: Callable[[], Runtime] | None,
    device: torch.device | None,
) -> None:
    """From the server's startup message to the answer to its shutdown message."""
    gate.started = gate.draining = False
    startup = await receive()
    try:
        runtime, ours = await _open(make_runtime, device)
    except Exception as error:
        log.error("aiogpu: the runtime could not be opened: %s", error)
        await send({"type": "lifespan.startup.failed", "message": f"aiogpu: {error}"})
        return
    life = _Lifespan(app, startup, receive, send, gate, runtime, ours)
    try:
        await life.run(scope)
    finally:
        await life.close()


async def _open(
    make_runtime: Callable[[], Runtime] | None, device: torch.device | None
) -> tuple[Runtime, bool]:
    """The loop's runtime, with its device started, and whether it is ours to close."""
    runtime = current_runtime()
    ours = make_runtime is not None or not runtime._explicit
    if ours:
        runtime = (make_runtime or Runtime)()
        if not isinstance(runtime, Runtime):
            raise TypeError(
                f"StreamMiddleware(runtime=...): the function returned {runtime!r}, "
                "not an aiogpu.Runtime that has not been entered"
            )
        await runtime.__aenter__()
    try:
        await runtime.engine(device)  # CUDA's start takes seconds: not in the first request
    except BaseException:
        if ours:
            await runtime.aclose()
        raise
    return runtime, ours


class _Lifespan:
    def __init__(
        self,
        app: App,
        startup: Message,
        receive: Receive,
        send: Send,
        gate: Gate,
        runtime: Runtime,
        ours: bool,
    ) -> None:
        self._app = app
        self._startup: Message | None = startup
        self._gate = gate
        self._receive = receive
        self._send = send
        self._runtime: Runtime | None = runtime if ours else None
        self._grace = runtime.grace
        self._asked_to_stop = False
        self._over = False

    async def run(self, scope: Scope) -> None:
        error: Exception | None = None
        try:
            await self._app(scope, self.receive, self.send)
        except Exception as raised:
            error = raised
        if self._over:
            if error is not None:
                raise error
            return
        if not self._gate.started:
            # "If an exception is raised ... the server must continue", says the specification: this
            # is how an application tells that it has no lifespan. One that did ask for the message
            # may have meant something else.
            level = logging.DEBUG if self._startup is not None else logging.WARNING
            log.log(level, "aiogpu: the application has no lifespan: %r", error)
            error = None
            await self.send({"type": "lifespan.startup.complete"})
        elif error is not None:
            log.error("aiogpu: the application's lifespan has failed", exc_info=error)
        if not self._asked_to_stop:
            self._startup = None
            await self.receive()
        await self.send({"type": "lifespan.shutdown.complete"})

    async def receive(self) -> Message:
        if self._startup is not None:
            message, self._startup = self._startup, None
            return message
        message = await self._receive()
        if message["type"] == "lifespan.shutdown":
            self._asked_to_stop = True
            await self._settle()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            self._gate.started = True
        else:  # startup has failed, shutdown is complete or has failed: the end in any case
            self._over = True
            await self.close()
        await self._send(message)

    async def close(self) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await runtime.aclose()

    async def _settle(self) -> None:
        """Refuse what is new, wait for what is in flight, but not for ever."""
        self._gate.draining = True
        with anyio.move_on_after(self._grace):
            await self._gate.idle()
        if self._gate.in_flight:
            log.warning("aiogpu: %d requests were still in flight at shutdown", self._gate.in_flight)
