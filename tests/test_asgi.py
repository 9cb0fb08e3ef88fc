"""The ASGI middleware: a stream for every request, its end, its errors, the runtime's lifetime.

No server here: a :class:`Wire` is a server's side of one request, so that a test decides when each message
comes. ``test_serve.py`` does the same over real sockets.
"""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from _kernels import cell, read, write

import aiogpu
from aiogpu import _engine, _errors
from aiogpu.asgi import StreamMiddleware
from aiogpu.asgi.exchange import _declares_body
from aiogpu.testing import VirtualDevice

Message = dict[str, Any]


class Wire:
    """A server's side of one connection: what comes in is told, what goes out is kept.

    As servers do, it says ``http.disconnect`` when the client has gone, and also after the response.
    """

    def __init__(self, path: str = "/", *body: bytes, kind: str = "http", **scope: Any) -> None:
        headers = [(b"transfer-encoding", b"chunked")] if body else []
        self.scope = {
            "type": kind, "method": "POST" if body else "GET", "path": path, "headers": headers,
            "http_version": "1.1", "asgi": {"version": "3.0", "spec_version": "2.4"}, **scope,
        }  # fmt: skip
        self.incoming: deque[Message] = deque()
        if kind == "http":
            for i, part in enumerate(body or (b"",)):
                self.incoming.append(
                    {"type": "http.request", "body": part, "more_body": i + 1 < len(body or (b"",))}
                )
        self.sent: list[Message] = []
        self.received = 0
        self._gone = False
        self._changed = anyio.Event()

    def tell(self, message: Message) -> None:
        self.incoming.append(message)
        self._change()

    def disconnect(self) -> None:
        self._gone = True
        self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def receive(self) -> Message:
        self.received += 1
        while not self.incoming and not self._gone:
            await self._changed.wait()
        return self.incoming.popleft() if self.incoming else {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.disconnect()

    async def through(self, app: Any) -> Wire:
        await app(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int | None:
        return next((m["status"] for m in self.sent if m["type"].endswith("response.start")), None)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(next(m["headers"] for m in self.sent if m["type"].endswith("response.start")))

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)


async def reply(send: Any, body: bytes = b"ok", status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def app_of(endpoint: Callable[..., Awaitable[Any]]) -> Any:
    """An application that answers every request with ``endpoint()``'s result, and has no lifespan."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await reply(send, str(await endpoint()).encode())

    return app


def in_a_task_of_its_own(app: Any) -> Any:
    """Middleware such as Starlette's ``BaseHTTPMiddleware``: the endpoint runs in a task it starts."""

    async def middleware(scope: Any, receive: Any, send: Any) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(app, scope, receive, send)

    return middleware


def stream_now(device: VirtualDevice) -> int:
    return device.current().native.number


# -- streams and state ---------------------------------------------------------------------------------


def test_requests_that_are_there_at_once_have_streams_of_their_own(run, auto_vd):
    seen: dict[int, set[int]] = {}
    gate: list[anyio.Event] = []

    async def endpoint() -> int:
        me = len(seen)
        seen[me] = {stream_now(auto_vd)}
        if len(seen) == 4:
            gate[0].set()
        await gate[0].wait()
        seen[me].add(stream_now(auto_vd))
        return me

    async def main() -> None:
        gate.append(anyio.Event())
        app = StreamMiddleware(app_of(endpoint))
        wires = await aiogpu.gather(*(Wire().through(app) for _ in range(4)))
        assert sorted(wire.body for wire in wires) == [b"0", b"1", b"2", b"3"]
        assert stream_now(auto_vd) == 0

    run(main)
    assert all(len(streams) == 1 for streams in seen.values()), "a request's stream has changed"
    assert len(set().union(*seen.values()) - {0}) == 4


def test_torch_state_of_a_request_stays_its_own(run, anydevice):
    async def endpoint() -> bool:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # and never back: a guard that was not closed
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        assert not torch.is_grad_enabled()
        return before

    async def main() -> None:
        app = StreamMiddleware(app_of(endpoint))
        for wire in await aiogpu.gather(*(Wire().through(app) for _ in range(5))):
            assert wire.body == b"True"
        assert torch.is_grad_enabled()

    run(main)


def test_a_streaming_response_keeps_its_stream_until_its_body_has_ended(run, auto_vd, engine, until):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def tokens() -> Any:
            for i in range(3):
                await more[0].acquire()
                yield f"{i} on {stream_now(auto_vd)}\n".encode()

        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for token in tokens():
            await send({"type": "http.response.body", "body": token, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    more: list[anyio.Semaphore] = []

    async def main() -> None:
        more.append(anyio.Semaphore(0))
        wire = Wire()
        async with anyio.create_task_group() as group:
            group.start_soon(wire.through, StreamMiddleware(app))
            for i in range(3):
                await until(lambda i=i: len(wire.sent) == i + 1)
                assert engine().compute.in_use == 1
                more[0].release()
        assert engine().compute.in_use == 0
        lines = wire.body.decode().split("\n")[:3]
        assert len({line.partition(" on ")[2] for line in lines} - {"0"}) == 1

    run(main)


def test_a_decorated_endpoint_in_a_task_of_inner_middleware_has_its_edges(run, vd):
    """Starlette's BaseHTTPMiddleware starts the endpoint as a task; the context variable finds the request.

    The virtual device raises at any access that is not ordered.
    """
    x = cell()
    seen: list[float] = []

    @aiogpu.task
    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        read(vd, x, seen)  # after what the middleware did before
        write(vd, x, 2.0)
        await reply(send)

    async def middleware(scope: Any, receive: Any, send: Any) -> None:
        write(vd, x, 1.0)
        await in_a_task_of_its_own(endpoint)(scope, receive, send)
        await anyio.lowlevel.checkpoint()
        read(vd, x, seen)  # and the request after its endpoint
        write(vd, x, 3.0)

    async def main() -> None:
        wire = await Wire().through(StreamMiddleware(middleware))
        assert wire.status == 200
        vd.run_all()

    run(main)
    assert seen == [1.0, 2.0]


def test_innermost_the_middleware_takes_in_an_endpoint_that_is_not_decorated(run, auto_vd):
    async def endpoint() -> int:
        await anyio.lowlevel.checkpoint()
        return stream_now(auto_vd)

    async def main() -> None:
        wire = await Wire().through(in_a_task_of_its_own(StreamMiddleware(app_of(endpoint))))
        assert wire.body != b"0"

    run(main)


def starlette_app(*middleware: Any, handler: Any = None, route: Any) -> Any:
    applications = pytest.importorskip("starlette.applications", reason="the serve extra is not installed")
    from starlette.middleware import Middleware
    from starlette.routing import Route

    handlers = {} if handler is None else {Exception: handler}
    return applications.Starlette(
        routes=[Route("/", route, methods=["GET", "POST"])],
        middleware=[Middleware(each) for each in middleware],
        exception_handlers=handlers,
    )


@pytest.fixture
def base_http() -> Any:
    pytest.importorskip("starlette", reason="the serve extra is not installed")
    from starlette.middleware.base import BaseHTTPMiddleware

    class Tagging(BaseHTTPMiddleware):
        async def dispatch(self, request: Any, call_next: Any) -> Any:
            response = await call_next(request)
            response.headers["x-tag"] = "yes"
            return response

    return Tagging


def test_starlettes_base_middleware_works_inside_and_outside(run, auto_vd, base_http):
    from starlette.responses import PlainTextResponse

    async def plain(request: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return PlainTextResponse(str(stream_now(auto_vd)))

    @aiogpu.task
    async def decorated(request: Any) -> Any:
        return await plain(request)

    async def main() -> None:
        outermost = StreamMiddleware(starlette_app(base_http, route=decorated))
        innermost = starlette_app(base_http, StreamMiddleware, route=plain)
        for app in (outermost, innermost):
            wire = await Wire(state={}).through(app)
            assert wire.status == 200
            assert wire.headers[b"x-tag"] == b"yes"
            assert wire.body != b"0"

    run(main)


# -- what comes in -------------------------------------------------------------------------------------


async def echo(scope: Any, receive: Any, send: Any) -> None:
    parts, more = [], True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        parts.append(message["body"])
        more = message["more_body"]
    await reply(send, b"".join(parts) or b"nothing")


@pytest.mark.parametrize("parts", [(), (b"one",), (b"one", b"two", b"", b"three")])
def test_every_message_of_a_body_reaches_the_application(run, anydevice, parts):
    async def main() -> None:
        assert (await Wire("/", *parts).through(StreamMiddleware(echo))).body == (
            b"".join(parts) or b"nothing"
        )

    run(main)


def test_a_body_that_was_not_announced_reaches_the_application_whole(run, anydevice):
    """HTTP/2: no content-length, no transfer-encoding, and yet a body. The watch has read its beginning."""

    async def main() -> None:
        wire = Wire("/", b"one", b"two", b"three")
        wire.scope["headers"] = []
        app = StreamMiddleware(delayed(echo))
        assert (await wire.through(app)).body == b"onetwothree"

    run(main)


def delayed(app: Any) -> Any:
    async def later(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        await app(scope, receive, send)

    return later


def test_a_body_is_never_read_before_the_application_asks(run, anydevice):
    """Reading ahead would undo the server's back-pressure, and answer ``Expect: 100-continue``."""

    async def main() -> None:
        wire = Wire("/", b"one", b"two")
        before: list[int] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            before.append(wire.received)
            await receive()
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            before.append(wire.received)
            await reply(send)

        await wire.through(StreamMiddleware(app))
        assert before == [0, 1]

    run(main)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([], False),
        ([(b"content-length", b"0")], False),
        ([(b"content-length", b"5")], True),
        ([(b"host", b"x"), (b"transfer-encoding", b"chunked")], True),
        ([(b"expect", b"100-continue")], True),
    ],
)
def test_a_body_is_announced_by_its_headers(headers, body):
    assert _declares_body(headers) is body


def test_asking_whether_the_client_is_there_takes_nothing_away(run, anydevice):
    """Starlette's ``request.is_disconnected()`` calls receive in a cancelled scope."""

    async def main() -> None:
        wire = Wire("/", b"one", b"two")
        answers = []

        async def is_disconnected(receive: Any) -> bool:
            message: Message = {}
            with anyio.CancelScope() as scope:
                scope.cancel()
                message = await receive()
            return message.get("type") == "http.disconnect"

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await echo(scope, receive, lambda message: anyio.lowlevel.checkpoint())
            answers.append(await is_disconnected(receive))
            answers.append(await is_disconnected(receive))
            await reply(send)
            await anyio.lowlevel.checkpoint()
            answers.append((await receive())["type"])

        await wire.through(StreamMiddleware(app))
        assert answers == [False, False, "http.disconnect"]

    run(main)


# -- the client goes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [(), (b"one", b"two")], ids=["no body", "a body that was read"])
def test_a_disconnect_cancels_the_requests_work(run, vd, until, caplog, body):
    """C70, C72: the wait ends at once, the buffers stay until the device is done with them."""
    ended: list[str] = []
    kept: list[weakref.ref[torch.Tensor]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        x = cell()
        kept.append(weakref.ref(x))
        try:
            await child(x)
        finally:
            ended.append("app")

    @aiogpu.task
    async def child(x: torch.Tensor) -> None:
        latches.append(vd.latch())
        write(vd, x, 1.0)
        try:
            await aiogpu.to_host(x)
        finally:
            ended.append("child")

    latches: list[Any] = []

    async def main() -> None:
        wire = Wire("/", *body)
        with caplog.at_level(logging.INFO, "aiogpu.asgi"):
            async with anyio.create_task_group() as group:
                group.start_soon(wire.through, StreamMiddleware(app))
                await until(lambda: latches)
                vd.run_all()
                assert not ended
                wire.disconnect()
        # The request is over, and the device has not moved.
        assert ended == ["child", "app"]
        assert wire.sent == []
        gc.collect()
        assert kept[0]() is not None
        latches[0].release()
        vd.run_all()
        await until(lambda: gc.collect() is not None and kept[0]() is None)

    run(main)
    assert "499" in caplog.text


def test_a_disconnect_is_seen_after_a_task_of_the_applications_has_read_the_body(run, anydevice, until):
    """The application itself makes no step between the end of the body and the disconnect."""
    read: list[bool] = []
    ended: list[bool] = []

    async def reader(receive: Any) -> None:
        while (await receive())["more_body"]:
            await anyio.lowlevel.checkpoint()
        read.append(True)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(reader, receive)
                await anyio.sleep_forever()
        finally:
            ended.append(True)

    async def main() -> None:
        wire = Wire("/", b"one", b"two")
        async with anyio.create_task_group() as group:
            group.start_soon(wire.through, StreamMiddleware(app))
            await until(lambda: read)
            assert not ended
            wire.disconnect()
        assert ended == [True]

    run(main)


def test_a_request_that_never_waits_is_not_watched(run, anydevice, monkeypatch):
    """A task for the watch would cost more than such a request."""
    watches = []

    async def quick(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        await reply(send)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await anyio.lowlevel.checkpoint()
        await reply(send)

    async def main() -> None:
        await aiogpu.synchronize()  # the engine is there: nor does the middleware wait
        door = aiogpu.current_runtime().reactor.door
        spawn = type(door).spawn
        monkeypatch.setattr(type(door), "spawn", lambda *args: (watches.append(1), spawn(*args))[1])
        assert (await Wire().through(StreamMiddleware(quick))).status == 200
        assert not watches
        assert (await Wire().through(StreamMiddleware(slow))).status == 200
        assert watches == [1]

    run(main)


def test_nobody_asks_the_server_any_more_when_the_request_is_over(run, anydevice):
    asking = 0

    async def receive() -> Message:
        nonlocal asking
        asking += 1
        try:
            await anyio.sleep_forever()
        finally:
            asking -= 1
        raise AssertionError

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        assert asking == 1
        await reply(send)

    async def main() -> None:
        wire = Wire()
        for _ in range(3):
            await StreamMiddleware(app)(wire.scope, receive, wire.send)
            assert asking == 0

    run(main)


def test_a_disconnect_during_the_body_is_told_to_the_application(run, anydevice, caplog):
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["more_body"]
        told.append((await receive())["type"])
        raise RuntimeError("as Starlette's ClientDisconnect does")

    async def main() -> None:
        wire = Wire("/", b"one", b"two")
        wire.incoming.pop()
        wire.disconnect()
        with caplog.at_level(logging.INFO, "aiogpu.asgi"):
            await wire.through(StreamMiddleware(app))
        assert wire.sent == []

    run(main)
    assert told == ["http.disconnect"]
    assert "499" in caplog.text


def test_what_an_application_does_after_its_response_is_not_cancelled(run, anydevice, until, caplog):
    """Background tasks: the server says ``http.disconnect`` after a complete response, too."""
    done: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        done.append(True)

    async def main() -> None:
        with caplog.at_level(logging.INFO, "aiogpu.asgi"):
            await Wire().through(StreamMiddleware(app))

    run(main)
    assert done == [True]
    assert "499" not in caplog.text


def test_a_disconnect_ends_a_streaming_response(run, anydevice, until):
    closed: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await anyio.lowlevel.checkpoint()
        finally:
            closed.append(True)

    async def main() -> None:
        wire = Wire()
        async with anyio.create_task_group() as group:
            group.start_soon(wire.through, StreamMiddleware(app))
            await until(lambda: len(wire.sent) > 3)
            wire.disconnect()
        assert closed == [True]

    run(main)


def test_a_server_that_fails_to_receive_fails_the_application_only(run, anydevice):
    async def main() -> None:
        async def broken() -> Message:
            raise OSError("the server's")

        met: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await anyio.lowlevel.checkpoint()
            try:
                await receive()
            except OSError as error:
                met.append(str(error))
            await reply(send)

        wire = Wire()
        await StreamMiddleware(app)(wire.scope, broken, wire.send)
        assert met == ["the server's"]
        assert wire.status == 200

    run(main)


def test_after_a_thousand_bad_ends_nothing_is_left(run, auto_vd, engine, caplog):
    """C72: disconnects, time-outs and errors at random; C46: what they held is let go of."""
    rng = random.Random(1)
    tensors: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        x = torch.ones(8)
        tensors.add(x)
        fate = rng.choice(["well", "well", "timeout", "error", "late"])
        for _ in range(rng.randrange(4)):
            there = await aiogpu.to_device(x)
            await aiogpu.to_host(there)
        if fate == "timeout":
            raise TimeoutError
        if fate == "late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if fate in ("error", "late"):
            raise ZeroDivisionError
        await reply(send)

    async def one(middleware: Any, limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            wire = Wire()
            async with anyio.create_task_group() as group:

                async def request() -> None:
                    try:
                        await wire.through(middleware)
                    except ZeroDivisionError:
                        pass

                group.start_soon(request)
                for _ in range(rng.randrange(12)):
                    await anyio.lowlevel.checkpoint()
                if rng.random() < 0.5:
                    wire.disconnect()

    async def main() -> None:
        middleware = StreamMiddleware(app)
        limiter = anyio.CapacityLimiter(50)
        async with anyio.create_task_group() as group:
            for _ in range(1000 if run.loop == "asyncio" else 300):
                group.start_soon(one, middleware, limiter)
        assert middleware.in_flight == 0
        await aiogpu.synchronize(torch.device("cpu"))
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        gc.collect()
        assert len(tensors) == 0
        assert engine().compute.in_use == 0
        assert aiogpu.stats().operations == 0

    run(main)


# -- what is said --------------------------------------------------------------------------------------


def raising(error: BaseException) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise error

    return app


ERRORS = [
    (lambda: _errors.OverloadedError("secret", retry_after=2.3), 429),
    (lambda: aiogpu.DeviceLostError("secret"), 503),
    (lambda: torch.OutOfMemoryError("secret"), 503),
    (lambda: aiogpu.ClosedError("secret"), 503),
    (lambda: TimeoutError("secret"), 504),
    (lambda: ExceptionGroup("secret", [TimeoutError("secret")]), 504),
    (lambda: ExceptionGroup("secret", [TimeoutError(), torch.OutOfMemoryError("secret")]), 504),
]
IDS = ["overloaded", "lost", "out of memory", "closed", "timeout", "group", "mixed group"]


@pytest.mark.parametrize(("make", "status"), ERRORS, ids=IDS)
def test_an_error_has_its_status_and_says_one_line(run_asyncio, anydevice, make, status):
    async def main() -> None:
        wire = await Wire().through(StreamMiddleware(raising(make())))
        assert wire.status == status
        assert wire.body.count(b"\n") == 1
        assert b"secret" not in wire.body
        if status == 429:
            assert wire.headers[b"retry-after"] == b"3"
        if status == 503:
            assert wire.headers[b"retry-after"] == b"1"

    run_asyncio(main)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        ExceptionGroup("x", [TimeoutError(), ValueError()]),
        anyio.ClosedResourceError(),  # some stream of the application's own
    ],
)
def test_any_other_error_goes_on_to_the_server(run, anydevice, error):
    async def main() -> None:
        wire = Wire()
        with pytest.raises(type(error)) as caught:
            await wire.through(StreamMiddleware(raising(error)))
        assert caught.value is error
        assert wire.sent == []

    run(main)


def test_calls_of_a_batcher_that_is_closed_are_to_be_tried_elsewhere(run, anydevice, until):
    """At a shutdown: the one that waits, and the one that comes later."""

    async def main() -> None:
        async with aiogpu.Batcher(lambda x: x, max_batch_size=2, max_delay=1000.0) as batcher:
            app = StreamMiddleware(app_of(lambda: batcher(torch.ones(2))))
            waiting = Wire()
            async with anyio.create_task_group() as group:
                group.start_soon(waiting.through, app)
                await until(lambda: batcher.stats().waiting == 1)
                batcher.close()
            late = await Wire().through(app)
        for wire in (waiting, late):
            assert (wire.status, wire.body) == (503, b"shutting down\n")
            assert wire.headers[b"retry-after"] == b"1"

    run(main)


def test_a_status_that_is_out_stays_and_the_error_is_logged_and_goes_on(run, anydevice, abandoned, caplog):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise TimeoutError

    async def main() -> None:
        wire = Wire()
        with pytest.raises(TimeoutError):
            await wire.through(StreamMiddleware(app))
        assert wire.status == 200

    run(main)
    assert "too late" in caplog.text


@pytest.mark.parametrize("outermost", [True, False])
def test_a_frameworks_own_500_does_not_hide_the_status(run_asyncio, anydevice, outermost):
    """Starlette's outermost layer answers errors it does not know with 500, then raises them."""

    async def route(request: Any) -> Any:
        raise TimeoutError("secret")

    async def main() -> None:
        if outermost:
            app = StreamMiddleware(starlette_app(route=route))
        else:
            app = starlette_app(StreamMiddleware, route=route)
        wire = await Wire(state={}).through(app)
        assert [m["type"] for m in wire.sent] == ["http.response.start", "http.response.body"]
        assert wire.status == 504
        assert b"secret" not in wire.body

    run_asyncio(main)


def test_an_applications_own_handler_wins(run_asyncio, anydevice):
    async def route(request: Any) -> Any:
        raise TimeoutError

    async def handler(request: Any, error: Any) -> Any:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse("mine", status_code=418)

    async def main() -> None:
        app = starlette_app(route=route)
        app.add_exception_handler(TimeoutError, handler)
        assert (await Wire(state={}).through(StreamMiddleware(app))).status == 418

    run_asyncio(main)


def test_an_error_that_was_answered_keeps_no_tensor(run, anydevice, caplog):
    """C66: not even until the next garbage collection."""
    alive: list[weakref.ref[torch.Tensor]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        x = torch.ones(8)
        alive.append(weakref.ref(x))
        raise torch.OutOfMemoryError("injected")

    async def main() -> None:
        gc.disable()
        try:
            await Wire().through(StreamMiddleware(app))
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            assert alive[0]() is None
        finally:
            gc.enable()

    run(main)


# -- probes, and a lost device -------------------------------------------------------------------------


def test_the_probes_say_that_the_device_is_lost_and_the_rest_is_still_served(run, auto_vd, abandoned):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/cpu":
            await reply(send, b"still here")
        else:
            there = await aiogpu.to_device(torch.ones(3))
            await reply(send, str((await aiogpu.to_host(there)).tolist()).encode())

    async def main() -> None:
        middleware = StreamMiddleware(app)

        async def get(path: str) -> Wire:
            return await Wire(path).through(middleware)

        assert (await get("/gpu")).body == b"[1.0, 1.0, 1.0]"
        for probe in ("/healthz", "/readyz"):
            assert (await get(probe)).status == 200
        auto_vd.fault()
        for _ in range(2):
            wire = await get("/gpu")
            assert wire.status == 503
            assert wire.body == b"the device is lost\n"
        for probe in ("/healthz", "/readyz"):
            wire = await get(probe)
            assert wire.status == 503
            assert b"device lost: cpu" in wire.body
        assert (await get("/cpu")).body == b"still here"

    run(main)


def test_torchs_own_error_for_a_lost_device_counts_as_one(run, auto_vd, abandoned, engine):
    async def main() -> None:
        auto_vd.fault()
        with pytest.raises(RuntimeError) as caught:
            auto_vd.launch()
        # As it comes out of a call that aiogpu has not made.
        wire = await Wire().through(StreamMiddleware(raising(caught.value)))
        assert wire.status == 503
        assert engine().lost is not None

    run(main)


def test_probes_can_be_elsewhere_or_nowhere(run_asyncio, anydevice):
    async def main() -> None:
        app = app_of(lambda: anyio.lowlevel.checkpoint())
        moved = StreamMiddleware(app, healthz="/live", readyz=None)
        assert (await Wire("/live").through(moved)).body == b"ok\n"
        assert (await Wire("/mounted/live", root_path="/mounted").through(moved)).body == b"ok\n"
        for path in ("/healthz", "/readyz"):
            assert (await Wire(path).through(moved)).body == b"None"

    run_asyncio(main)


def test_a_probe_is_answered_while_every_worker_is_busy(run, anydevice):
    """C43: 50 inferences are held; the loop is free."""
    import threading

    hold, inside = threading.Event(), threading.Semaphore(0)

    def inference() -> None:
        inside.release()
        hold.wait(20)

    async def endpoint() -> None:
        await aiogpu.run_sync(inference, limiter=limiters[0])

    limiters: list[anyio.CapacityLimiter] = []

    async def main() -> None:
        limiters.append(anyio.CapacityLimiter(50))
        app = StreamMiddleware(app_of(endpoint))
        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(Wire().through, app)
            try:
                for _ in range(50):
                    while not inside.acquire(blocking=False):
                        await anyio.lowlevel.checkpoint()
                assert (await Wire("/healthz").through(app)).status == 200
                assert app.in_flight == 50
            finally:
                hold.set()

    run(main)


# -- lifetime ------------------------------------------------------------------------------------------


class Lifespan:
    """A server's side of the lifespan protocol."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.messages: list[str] = []
        self._stop = anyio.Event()
        self._changed = anyio.Event()
        self._asked = 0
        self.watched: aiogpu.Runtime | None = None
        self.closed_when_told: list[bool] = []

    async def receive(self) -> Message:
        self._asked += 1
        if self._asked == 1:
            return {"type": "lifespan.startup"}
        await self._stop.wait()
        return {"type": "lifespan.shutdown"}

    async def send(self, message: Message) -> None:
        self.said.append(message["type"].removeprefix("lifespan."))
        if self.watched is not None:
            self.closed_when_told.append(self.watched.closed)
        self.messages.append(message.get("message", ""))
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def started(self) -> None:
        while not self.said:
            await self._changed.wait()

    def stop(self) -> None:
        self._stop.set()

    async def through(self, app: Any) -> None:
        await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, self.receive, self.send)


def lifespan_app(log: list[Any], fail: str = "") -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await reply(send)
            return
        for phase in ("startup", "shutdown"):
            assert (await receive())["type"] == f"lifespan.{phase}"
            log.append((phase, aiogpu.current_runtime().spin))
            if phase == fail:
                await send({"type": f"lifespan.{phase}.failed", "message": "the application's own"})
                raise RuntimeError("the application's own")
            await send({"type": f"lifespan.{phase}.complete"})

    return app


async def no_lifespan(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "http", "only HTTP here"
    await reply(send)


async def silent_about_lifespan(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await reply(send)


def test_the_runtime_is_open_from_before_the_startup_until_after_the_shutdown(run, anydevice):
    log: list[Any] = []

    async def main() -> None:
        server = Lifespan()
        app = StreamMiddleware(lifespan_app(log), runtime=lambda: aiogpu.Runtime(spin=0.125))
        async with anyio.create_task_group() as group:
            group.start_soon(server.through, app)
            await server.started()
            mine = server.watched = aiogpu.current_runtime()
            assert mine.spin == 0.125
            assert (await Wire("/readyz").through(app)).status == 200
            server.stop()
        assert server.said == ["startup.complete", "shutdown.complete"]
        assert server.closed_when_told == [True], "the server may end the process once it is told"

    run(main)
    assert log == [("startup", 0.125), ("shutdown", 0.125)]


@pytest.mark.parametrize("app", [no_lifespan, silent_about_lifespan])
def test_an_application_without_a_lifespan_needs_none(run, anydevice, app):
    async def main() -> None:
        server = Lifespan()
        middleware = StreamMiddleware(app, runtime=lambda: aiogpu.Runtime(spin=0.125))
        async with anyio.create_task_group() as group:
            group.start_soon(server.through, middleware)
            await server.started()
            assert (await Wire().through(middleware)).status == 200
            mine = aiogpu.current_runtime()
            server.stop()
        assert server.said == ["startup.complete", "shutdown.complete"]
        assert mine.spin == 0.125
        assert mine.closed

    run(main)


def test_a_runtime_that_cannot_be_opened_fails_the_startup_with_its_reason(run, anydevice, abandoned):
    async def main() -> None:
        def broken() -> aiogpu.Runtime:
            return aiogpu.Runtime(streams=0)

        server = Lifespan()
        await server.through(StreamMiddleware(lifespan_app([]), runtime=broken))
        assert server.said == ["startup.failed"]
        assert "streams must be at least 1" in server.messages[0]

    run(main)


def test_what_is_no_runtime_fails_the_startup_and_says_what_was_expected(run, anydevice, abandoned):
    async def main() -> None:
        server = Lifespan()
        await server.through(StreamMiddleware(lifespan_app([]), runtime=lambda: 3))  # type: ignore[arg-type]
        assert server.said == ["startup.failed"]
        assert "returned 3, not an aiogpu.Runtime" in server.messages[0]

    run(main)


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"runtime": aiogpu.Runtime()}, TypeError, r"runtime=lambda: aiogpu\.Runtime\(\.\.\.\)"),
        ({"app": "main:app"}, TypeError, "around an ASGI application, not around 'main:app'"),
        ({"healthz": "live"}, ValueError, "such as '/live'"),
        ({"readyz": ""}, ValueError, "None: no such probe"),
        ({"max_in_flight": 0}, ValueError, "max_in_flight is a number of requests, 1 or more, not 0"),
        ({"max_in_flight": 1.5}, ValueError, "not 1.5"),
    ],
)
def test_what_cannot_be_an_argument_is_refused_with_what_can(arguments, error, told):
    with pytest.raises(error, match=told):
        StreamMiddleware(**{"app": no_lifespan, **arguments})


@pytest.mark.parametrize("phase", ["startup", "shutdown"])
def test_an_application_that_fails_says_so_itself_and_the_runtime_is_closed(run, anydevice, phase):
    async def main() -> None:
        server = Lifespan()
        server.stop()
        with pytest.raises(RuntimeError, match="the application's own"):
            await server.through(StreamMiddleware(lifespan_app([], fail=phase)))
        assert server.said[-1] == f"{phase}.failed"
        async with aiogpu.Runtime():  # the loop's explicit one is gone
            pass

    run(main)


def test_an_open_runtime_is_used_and_left_open(run, anydevice):
    async def main() -> None:
        async with aiogpu.Runtime(spin=0.25) as mine:
            server = Lifespan()
            server.stop()
            log: list[Any] = []
            await server.through(StreamMiddleware(lifespan_app(log)))
            assert log == [("startup", 0.25), ("shutdown", 0.25)]
            assert not mine.closed

    run(main)


def test_before_its_startup_has_ended_nobody_is_ready(run, anydevice, until):
    async def main() -> None:
        may_start = anyio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await reply(send)
                return
            await receive()
            await may_start.wait()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})

        server, app = Lifespan(), StreamMiddleware(slow)
        async with anyio.create_task_group() as group:
            group.start_soon(server.through, app)
            await until(lambda: server._asked == 1)
            assert (await Wire("/healthz").through(app)).status == 200
            assert (await Wire("/readyz").through(app)).status == 503
            assert (await Wire("/").through(app)).status == 503
            may_start.set()
            await server.started()
            assert (await Wire("/readyz").through(app)).status == 200
            assert (await Wire("/").through(app)).status == 200
            server.stop()

    run(main)


def test_more_requests_than_may_be_in_flight_get_429_before_anything_of_theirs_is_read(run, anydevice, until):
    async def main() -> None:
        finish, heard = anyio.Event(), []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            heard.append(scope["path"])
            await finish.wait()
            await reply(send)

        middleware = StreamMiddleware(app, max_in_flight=2, retry_after=3)
        first, second = Wire("/1"), Wire("/2")
        async with anyio.create_task_group() as group:
            group.start_soon(first.through, middleware)
            group.start_soon(second.through, middleware)
            await until(lambda: middleware.in_flight == 2)
            late = await Wire("/3", b"a", b"body").through(middleware)
            assert (late.status, late.body, late.received) == (429, b"too many requests\n", 0)
            assert late.headers[b"retry-after"] == b"3"
            socket = Wire("/4", kind="websocket", extensions={"websocket.http.response": {}})
            await socket.through(middleware)
            assert socket.status == 429
            assert (await Wire("/readyz").through(middleware)).status == 200, "a burst is no reason to leave"
            finish.set()
            await middleware.idle()
            assert (await Wire("/5").through(middleware)).status == 200
        assert sorted(heard) == ["/1", "/2", "/5"]
        assert first.status == second.status == 200

    run(main)


@pytest.mark.parametrize("how", ["drain()", "shutdown"])
def test_while_draining_requests_in_flight_end_and_new_ones_get_503(run, anydevice, until, how):
    async def main() -> None:
        finish = anyio.Event()
        inner = lifespan_app(log := [])

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await finish.wait()
            await inner(scope, receive, send)

        server, middleware, early = Lifespan(), StreamMiddleware(app), Wire()
        async with anyio.create_task_group() as group:
            group.start_soon(server.through, middleware)
            await server.started()
            group.start_soon(early.through, middleware)
            await until(lambda: middleware.in_flight == 1)
            if how == "drain()":
                middleware.drain()
            else:
                server.stop()
                await until(lambda: middleware._gate.draining)
            late = await Wire().through(middleware)
            assert late.status == 503
            assert late.body == b"shutting down\n"
            assert late.headers[b"retry-after"] == b"1"
            assert (await Wire("/readyz").through(middleware)).status == 503
            assert (await Wire("/healthz").through(middleware)).status == 200
            assert [phase for phase, _ in log] == ["startup"], "the application waits for its requests"
            finish.set()
            await middleware.idle()
            server.stop()
        assert early.status == 200
        assert server.said == ["startup.complete", "shutdown.complete"]

    run(main)


def test_shutting_down_does_not_wait_for_ever(run, anydevice, abandoned, until):
    """C74: bounded, and it says what was left."""

    async def main() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert scope["type"] == "http"
            await anyio.sleep_forever()

        server = Lifespan()
        middleware = StreamMiddleware(app, runtime=lambda: aiogpu.Runtime(grace=0.02))
        async with anyio.create_task_group() as requests:
            async with anyio.create_task_group() as group:
                group.start_soon(server.through, middleware)
                await server.started()
                requests.start_soon(Wire().through, middleware)
                await until(lambda: middleware.in_flight == 1)
                server.stop()
            assert server.said == ["startup.complete", "shutdown.complete"]
            requests.cancel_scope.cancel()

    run(main)
    assert any("1 requests were still in flight" in line for line in abandoned)


# -- websockets ----------------------------------------------------------------------------------------


def test_a_websocket_has_a_stream_of_its_own_and_reads_its_disconnect_itself(run, auto_vd):
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            seen.append((message["text"], stream_now(auto_vd)))
            await send({"type": "websocket.send", "text": message["text"]})
        seen.append(message["type"])

    async def main() -> None:
        wire = Wire(kind="websocket")
        wire.tell({"type": "websocket.connect"})
        wire.tell({"type": "websocket.receive", "text": "a"})
        wire.tell({"type": "websocket.disconnect", "code": 1000})
        await wire.through(StreamMiddleware(app))
        assert [m["type"] for m in wire.sent] == ["websocket.accept", "websocket.send"]

    run(main)
    assert seen[0][0] == "a"
    assert seen[0][1] != 0
    assert seen[1] == "websocket.disconnect"


def test_a_websockets_application_is_told_of_the_disconnect_and_not_cancelled(run, anydevice, until):
    """It cleans up where it is told (``except WebSocketDisconnect``): a cancellation would skip that. And
    nothing is read that it has not asked for: a message that it has not taken holds the client back."""
    finish: list[anyio.Event] = []
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        await finish[0].wait()  # work for the client
        while not told or told[-1] != "websocket.disconnect":
            told.append((await receive())["type"])

    async def main() -> None:
        finish.append(anyio.Event())
        wire = Wire(kind="websocket")
        wire.tell({"type": "websocket.connect"})
        async with anyio.create_task_group() as group:
            group.start_soon(wire.through, StreamMiddleware(app))
            await until(lambda: wire.sent)
            wire.tell({"type": "websocket.receive", "text": "a"})
            wire.tell({"type": "websocket.disconnect", "code": 1001})
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            assert wire.received == 1
            finish[0].set()
        assert told == ["websocket.receive", "websocket.disconnect"]

    run(main)


@pytest.fixture(params=["plain", "denial response"])
def extensions(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {} if request.param == "plain" else {"websocket.http.response": {}}


def test_a_websocket_is_refused_while_draining(run, anydevice, extensions):
    async def main() -> None:
        app = StreamMiddleware(no_lifespan)
        app.drain()
        wire = Wire(kind="websocket", extensions=extensions)
        await wire.through(app)
        if extensions:
            assert wire.status == 503
            assert wire.body == b"shutting down\n"
        else:
            assert wire.sent == [{"type": "websocket.close", "code": 1013, "reason": "shutting down"}]

    run(main)


def test_an_error_in_an_open_websocket_closes_it_with_try_again_later(run, anydevice):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        raise TimeoutError("secret")

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        wire = Wire(kind="websocket", extensions={"websocket.http.response": {}})
        await wire.through(StreamMiddleware(app))
        assert wire.sent[1] == {"type": "websocket.close", "code": 1013, "reason": "timed out"}
        with pytest.raises(ZeroDivisionError):
            await Wire(kind="websocket").through(StreamMiddleware(broken))

    run(main)


@pytest.mark.parametrize("who", ["client", "application", "denial"])
def test_a_websocket_that_is_over_is_not_closed_again(run, anydevice, who):
    """Servers answer a second end with an error, which would hide the first."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if who == "denial":
            await send({"type": "websocket.http.response.start", "status": 403, "headers": []})
        else:
            await send({"type": "websocket.accept"})
            if who == "application":
                await send({"type": "websocket.close"})
            else:
                assert (await receive())["type"] == "websocket.disconnect"
        raise TimeoutError("late")

    async def main() -> None:
        wire = Wire(kind="websocket", extensions={"websocket.http.response": {}})
        wire.tell({"type": "websocket.connect"})
        wire.tell({"type": "websocket.disconnect", "code": 1001})
        await wire.through(StreamMiddleware(app))
        assert len(wire.sent) == (2 if who == "application" else 1)

    run(main)


def test_other_protocols_pass_through(run_asyncio, anydevice):
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    async def main() -> None:
        await Wire(kind="webtransport").through(StreamMiddleware(app))

    run_asyncio(main)
    assert seen == ["webtransport"]


def test_a_request_costs_no_walk_through_the_servers_state(run_asyncio, anydevice, monkeypatch):
    """A scope holds what the lifespan put there: models, caches. The task must not search it for tensors."""
    from aiogpu import _tasks

    walked: list[Any] = []
    walk = _tasks.tensors_of
    monkeypatch.setattr(_tasks, "tensors_of", lambda x: (walked.append(x), walk(x))[1])

    async def main() -> None:
        wire = Wire(state={"cache": {"x": torch.ones(3)}})
        await wire.through(StreamMiddleware(app_of(lambda: anyio.lowlevel.checkpoint())))
        assert not [x for x in walked if wire.scope is x or (isinstance(x, list) and wire.scope in x)]

    run_asyncio(main)


def test_the_engine_is_made_at_startup_and_not_in_the_first_request(run_asyncio):
    async def main() -> None:
        server = Lifespan()
        async with anyio.create_task_group() as group:
            group.start_soon(server.through, StreamMiddleware(no_lifespan))
            await server.started()
            runtime = aiogpu.current_runtime()
            assert runtime.device_now() is not None
            assert _engine.find_engine(runtime.device_now()) is not None
            server.stop()

    run_asyncio(main)
