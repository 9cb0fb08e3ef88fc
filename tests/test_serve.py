"""examples/serve, driven over real HTTP on the loopback interface: server, models, limits, load, shutdown.

Most tests run uvicorn on the loop of the test; one starts the program as ``make serve`` does.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

for _needed in ("fastapi", "uvicorn", "safetensors", "sklearn", "rich"):
    pytest.importorskip(_needed, reason="the serve extra is not installed")

import aiogpu  # noqa: E402 -- after the skip

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "serve"))

import admission  # noqa: E402 -- the example, found by the line above
import app as service  # noqa: E402
import limits  # noqa: E402
import load  # noqa: E402
import model  # noqa: E402
from client import Connection, Reply, request  # noqa: E402

CPU = torch.device("cpu")
BATCHES = 2  # under way at once in the example's batcher, which keeps their streams


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    """As the example does. Small layers on a busy machine: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


class Served:
    """A running server and its port."""

    def __init__(self, app: Any, port: int, server: Any) -> None:
        self.app = app
        self.port = port
        self.server = server

    def connect(self) -> Connection:
        return Connection("127.0.0.1", self.port)

    async def ask(self, method: str, target: str, body: bytes = b"", **headers: str) -> Reply:
        async with self.connect() as connection:
            return await connection.ask(request(method, target, body, **headers))

    async def classify(self, pixels: Any) -> Reply:
        body = json.dumps({"pixels": pixels}).encode()
        return await self.ask("POST", "/classify", body, content_type="application/json")


@asynccontextmanager
async def serving(cache: Path, **changes: Any) -> Any:
    """The example on a free port of this loop. Ends by the way it ends on SIGTERM."""
    settings = service.Settings(CPU, quick=True, cache=cache, **changes)
    app = service.make_app(settings)
    server = service.server(app, "127.0.0.1", 0, pause=0.0)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
        if running.done():
            running.result()
    try:
        yield Served(app, server.servers[0].sockets[0].getsockname()[1], server)
    finally:
        if not app.draining:
            server.handle_exit(signal.SIGTERM, None)
        await running


def drive(run: Any, cache: Path, body: Callable[[Served], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        async with serving(cache, **changes) as served:
            await body(served)

    run(main, limit=50)


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest, run_asyncio: Any) -> Any:
    """What uvicorn runs on."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    run_asyncio.loop = request.param
    return run_asyncio


def some_digits(n: int = 8) -> tuple[Any, list[int]]:
    pixels, labels, _, _ = model.digits()
    return pixels[:n], labels[:n].tolist()


# -- it serves -----------------------------------------------------------------------------------------


def test_single_and_batched_requests_get_the_models_own_answers(loop, cache):
    """C49: concurrent requests on one model, each gets its own answer."""
    pixels, _ = some_digits(64)

    async def body(served: Served) -> None:
        with torch.inference_mode():
            truth = model.Digits.forward(
                served.app.app.state.service.digits, torch.from_numpy(pixels)
            ).argmax(1)
        replies = await asyncio.gather(*(served.classify(each.tolist()) for each in pixels))
        assert [reply.status for reply in replies] == [200] * 64
        assert [json.loads(reply.body)["digit"] for reply in replies] == truth.tolist()
        batch = await served.ask(
            "POST", "/classify/batch", pixels.astype("uint8").tobytes(), x_dtype="uint8", x_shape="64,8,8"
        )
        assert json.loads(batch.body) == truth.tolist()
        stats = served.app.app.state.service.batcher.stats()
        assert stats.ok == 64
        assert stats.batches < 64, "concurrent requests were not put together"

    drive(loop, cache, body)


def test_text_comes_one_character_at_a_time_and_others_are_served_meanwhile(loop, cache):
    pixels, _ = some_digits(1)

    async def body(served: Served) -> None:
        async with served.connect() as connection:
            reader = await connection.send(request("GET", "/write?prompt=The+data&characters=40&seed=7"))
            status, headers = await connection.head(reader)
            assert status == 200
            assert headers["transfer-encoding"] == "chunked"
            chunks = [await connection.chunk(reader)]
            assert (await served.classify(pixels[0].tolist())).status == 200
            while chunk := await connection.chunk(reader):
                chunks.append(chunk)
        assert len(chunks) == 40
        assert all(len(chunk) == 1 for chunk in chunks)
        # The same seed writes the same text, also beside others that write.
        again = await asyncio.gather(
            *(served.ask("GET", f"/write?prompt=The+data&characters=40&seed={seed}") for seed in (7, 8, 7))
        )
        assert again[0].body == again[2].body == b"".join(chunks)
        assert again[1].body != again[0].body

    drive(loop, cache, body)


def test_metrics_and_probes_are_served(loop, cache):
    pytest.importorskip("prometheus_client", reason="the metrics extra is not installed")
    pixels, _ = some_digits(1)

    async def body(served: Served) -> None:
        await served.classify(pixels[0].tolist())
        page = (await served.ask("GET", "/metrics")).body.decode()
        assert 'aiogpu_batcher_calls_total{batcher="digits",outcome="ok"} 1.0' in page
        assert 'aiogpu_requests_total{status="200"} 1.0' in page
        for probe in ("/healthz", "/readyz"):
            assert (await served.ask("GET", probe)).status == 200

    drive(loop, cache, body)


def test_the_dashboard_shows_metrics_that_exist():
    metrics = pytest.importorskip("aiogpu.observe.metrics", reason="the metrics extra is not installed")
    dashboard = json.loads((ROOT / "examples/serve/dashboard.json").read_text())
    documented = set(re.findall(r"``(aiogpu_\w+)``", metrics.PrometheusMetrics.__doc__))
    shown = set()
    for panel in dashboard["panels"]:
        assert panel["title"]
        for target in panel.get("targets", []):
            shown |= set(re.findall(r"aiogpu_\w+", target["expr"]))
    assert shown
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in shown} <= documented


# -- untrusted input -----------------------------------------------------------------------------------

ROW = [0.0] * 8
GOOD = {"pixels": [ROW] * 8}


NO_DIGITS = [
    b"",
    b"{",
    b"[" * 10_000,
    b"null",
    b"\xff\xfe",
    b'{"pixels": 3}',
    json.dumps({"pixels": [ROW] * 7}).encode(),
    json.dumps({"pixels": [ROW] * 7 + [[*ROW, 1]]}).encode(),
    json.dumps({"pixels": [ROW] * 7 + [[*ROW[:7], "1"]]}).encode(),
    json.dumps({"pixels": [ROW] * 7 + [[*ROW[:7], [1]]]}).encode(),
    json.dumps({"pixels": [ROW] * 7 + [[*ROW[:7], True]]}).encode(),
    json.dumps({"pixels": [ROW] * 7 + [[*ROW[:7], float("nan")]]}).encode(),
    json.dumps({"pixels": [ROW] * 7 + [[*ROW[:7], float("inf")]]}).encode(),
    json.dumps({"pixels": [ROW] * 7 + [[*ROW[:7], 17]]}).encode(),
    b'{"pixels": [[1e999' + b"]]}",
    b'{"pixels": ' + b"9" * 5000 + b"}",
]


def test_a_digit_that_is_none_is_refused_with_one_line():
    for body in NO_DIGITS:
        with pytest.raises(limits.Refused) as refused:
            limits.digit_from_json(body)
        assert refused.value.status == 422, body[:80]
        assert "\n" not in refused.value.reason
    assert limits.digit_from_json(json.dumps(GOOD).encode()).shape == (8, 8)


async def read(*parts: bytes, headers: dict[str, str] | None = None, most: int = 100) -> bytes:
    async def stream() -> Any:
        for part in parts:
            yield part

    return await limits.read_body(stream(), headers or {}, most, 5.0)


NO_BATCHES = [
    ("float32", "1,8,8", 64, 422),
    ("", "1,8,8", 64, 422),
    ("O", "1,8,8", 64, 422),
    ("uint8", "", 64, 422),
    ("uint8", "1,8", 64, 422),
    ("uint8", "1,8,8,1", 64, 422),
    ("uint8", "1,4,16", 64, 422),
    ("uint8", "-1,8,8", 64, 422),
    ("uint8", "0,8,8", 0, 422),
    ("uint8", "²,8,8", 64, 422),
    ("uint8", "2,8,8", 64, 422),
    ("uint8", "9999999999999,8,8", 64, 422),
    ("uint8", "257,8,8", 257 * 64, 413),
]


def test_declared_shapes_and_types_are_checked_before_anything_is_made_of_them():
    for dtype, shape, size, status in NO_BATCHES:
        with pytest.raises(limits.Refused) as refused:
            limits.digits_from_bytes(b"\0" * size, dtype, shape, 256)
        assert refused.value.status == status, (dtype, shape)
    assert limits.digits_from_bytes(b"\0" * 128, "uint8", "2,8,8", 256).shape == (2, 8, 8)


def test_pixels_that_are_too_dark_are_refused():
    with pytest.raises(limits.Refused, match="0 to 16"):
        limits.digits_from_bytes(b"\x11" * 64, "uint8", "1,8,8", 256)


NO_WISHES: list[dict[str, str]] = [
    {"prompt": ""}, {"prompt": "x" * 1001}, {"characters": "0"}, {"characters": "2001"},
    {"characters": "1e3"}, {"characters": "-1"}, {"temperature": "nan"}, {"temperature": "0"},
    {"temperature": "x"}, {"seed": "99999999999"}, {"seed": "-1"},
]  # fmt: skip


def test_a_wish_beyond_the_limits_is_refused():
    good = {"prompt": "The", "characters": "10", "temperature": "0.7", "seed": "1"}
    assert limits.wish(**good, limits=limits.LIMITS).characters == 10
    for wrong in NO_WISHES:
        with pytest.raises(limits.Refused) as refused:
            limits.wish(**{**good, **wrong}, limits=limits.LIMITS)
        assert refused.value.status == 422, wrong


def test_a_body_is_counted_whatever_its_headers_say():
    assert asyncio.run(read(b"x" * 60, b"y" * 40)) == b"x" * 60 + b"y" * 40
    for headers in ({"content-length": "101"}, {"content-length": "9" * 30}, {"content-length": "-1"}):
        with pytest.raises(limits.Refused):
            asyncio.run(read(b"", headers=headers))
    with pytest.raises(limits.Refused, match="100 bytes"):
        asyncio.run(read(b"x" * 60, b"y" * 41))


def test_an_endless_body_is_cut_off_by_size():
    taken = 0

    async def endless() -> Any:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 10

    with pytest.raises(limits.Refused):
        asyncio.run(limits.read_body(endless(), {}, 100, 60.0))
    assert taken == 11


def test_refusals_over_the_wire_are_one_line_and_no_stack_trace(loop, cache):
    async def body(served: Served) -> None:
        batch = {"x_dtype": "float64", "x_shape": "1,8,8"}
        for reply, status in (
            (await served.ask("POST", "/classify", b"{"), 422),
            (await served.ask("POST", "/classify", b"x" * 20_000), 413),
            (await served.ask("POST", "/classify/batch", b"x" * 64, **batch), 422),
            (await served.ask("POST", "/classify/batch", b"x" * 20_000, **batch), 413),
            (await served.ask("GET", "/write?prompt="), 422),
        ):
            assert reply.status == status
            assert reply.body.count(b"\n") == 1
            assert b"Traceback" not in reply.body

    drive(loop, cache, body)


def test_endless_headers_are_cut_off(loop, cache):
    async def body(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000)
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()

    drive(loop, cache, body)


def test_a_slow_body_holds_no_place_in_a_batch_and_is_ended(loop, cache, until):
    pixels, _ = some_digits(1)

    async def body(served: Served) -> None:
        async with served.connect() as slow:
            whole = request("POST", "/classify", json.dumps(GOOD).encode())
            reader = await slow.send(whole[:-10])  # and no more
            await until(lambda: served.app.in_flight == 1)
            assert served.app.app.state.service.batcher.stats().calls == 0
            assert (await served.classify(pixels[0].tolist())).status == 200
            reply = await slow.read(reader)
            assert reply.status == 408
        await until(lambda: served.app.in_flight == 0)

    drive(loop, cache, body, limits=limits.Limits(body_seconds=0.3))


def test_one_client_cannot_take_the_whole_queue(loop, cache, until):
    """The greedy one meets 429 with Retry-After, the modest one is served."""
    import threading

    pixels, _ = some_digits(1)
    wire = json.dumps({"pixels": pixels[0].tolist()}).encode()

    async def body(served: Served) -> None:
        running = served.app.app.state.service
        hold, digits = threading.Event(), running.digits

        def held(batch: torch.Tensor) -> Any:
            hold.wait(20)
            return digits(batch)

        running.digits = held

        async def ask(client: str) -> Reply:
            return await served.ask("POST", "/classify", wire, x_client=client)

        async with asyncio.TaskGroup() as group:
            greedy = [group.create_task(ask("greedy")) for _ in range(40)]
            await until(lambda: any(task.done() for task in greedy))
            modest = group.create_task(ask("modest"))
            await until(lambda: running.batcher.stats().calls == 41)
            # The greedy one has what two batches of two took at once, and a quarter of the queue.
            assert 40 - 4 - 4 <= running.batcher.stats().refused <= 40 - 4
            hold.set()
        refused = [task.result() for task in greedy if task.result().status == 429]
        assert refused
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        assert modest.result().status == 200
        assert sum(task.result().status == 200 for task in greedy) + len(refused) == 40

    drive(loop, cache, body, max_queue=16, max_batch_size=2, client_header="x-client")


@pytest.mark.parametrize("route", ["/classify/batch", "/write"])
def test_one_client_cannot_take_all_places_of_a_route(run_asyncio, cache, until, route):
    """What goes past the batcher has the same rule: a quarter for one client, 429 for what is beyond."""
    import threading

    async def body(served: Served) -> None:
        running, hold = served.app.app.state.service, threading.Event()
        for name in ("digits", "writer"):
            setattr(running, name, Held(getattr(running, name), hold))

        async def ask(client: str) -> Reply:
            if route == "/write":
                return await served.ask("GET", "/write?prompt=The&characters=3", x_client=client)
            return await served.ask(
                "POST", route, b"\0" * 128, x_dtype="uint8", x_shape="2,8,8", x_client=client
            )

        places = running.texts if route == "/write" else running.batches
        async with asyncio.TaskGroup() as group:
            greedy = [group.create_task(ask("greedy")) for _ in range(10)]
            await until(lambda: sum(task.done() for task in greedy) == 8)
            assert places.taken == {"greedy": 2}
            others = [group.create_task(ask(f"modest {i}")) for i in range(6)]
            await until(lambda: places.taken.total() == 8)
            late = await ask("late")
            hold.set()
        statuses = sorted(task.result().status for task in greedy)
        assert statuses == [200] * 2 + [429] * 8
        assert [task.result().status for task in others] == [200] * 6
        assert late.status == 429, "there are no more places than that"
        assert late.headers["retry-after"] == "1"
        assert late.body == b"too many requests\n"
        assert not places.taken
        assert (await ask("greedy")).status == 200

    drive(run_asyncio, cache, body, places=8, client_header="x-client")


class Held:
    """A model that computes nothing before it may."""

    def __init__(self, model: Any, hold: Any) -> None:
        self.model, self.hold = model, hold

    def __call__(self, *inputs: Any) -> Any:
        self.hold.wait(20)
        return self.model(*inputs)

    def step(self, *inputs: Any) -> Any:
        self.hold.wait(20)
        return self.model.step(*inputs)


def test_a_place_is_free_again_however_its_request_has_ended():
    places = admission.Admission("places", 2, 1)
    with pytest.raises(ZeroDivisionError), places.place("a"):
        raise ZeroDivisionError
    with places.place("a"), pytest.raises(aiogpu.OverloadedError, match="one client may have 1") as refused:
        with places.place("a"):
            pytest.fail("it is let in twice")
    assert 0 < refused.value.retry_after <= 1
    with places.place("a"), places.place("b"), pytest.raises(aiogpu.OverloadedError, match="all 2 places"):
        with places.place("c"):
            pytest.fail("it is let in although all places are taken")
    assert not places.taken


# -- clients that go, and load -------------------------------------------------------------------------


def test_a_client_that_goes_away_leaves_nothing_behind(loop, cache, until):
    """C72, over real sockets: in the middle of a text, before an answer, before the end of a body."""
    pixels, _ = some_digits(1)
    body_ = json.dumps({"pixels": pixels[0].tolist()}).encode()

    async def body(served: Served) -> None:
        for i in range(30):
            async with served.connect() as connection:
                match i % 3:
                    case 0:
                        reader = await connection.send(request("GET", "/write?prompt=The&characters=2000"))
                        await connection.head(reader)
                        await connection.chunk(reader)
                    case 1:
                        await connection.send(request("POST", "/classify", body_))
                    case 2:
                        await connection.send(request("POST", "/classify", body_)[:-5])
        await until(lambda: served.app.in_flight == 0)
        assert (await served.classify(pixels[0].tolist())).status == 200
        assert aiogpu.stats().streams_in_use <= BATCHES
        assert not served.app.app.state.service.texts.taken
        stats = served.app.app.state.service.batcher.stats()
        assert stats.waiting == stats.running == 0

    drive(loop, cache, body)


def test_the_load_generator_checks_what_it_is_told(loop, cache, tmp_path, capsys):
    from rich.console import Console

    async def body(served: Served) -> None:
        asks = load.digits_asks()
        told = []
        closed = await load.closed_loop(
            "127.0.0.1", served.port, asks, clients=8, requests=100, told=lambda: told.append(1)
        )
        assert closed.counts == {200: 100}
        assert len(told) == 100
        assert closed.wrong < 50, "a hardly trained model is better than guessing"
        opened = await load.open_loop("127.0.0.1", served.port, asks, rate=400, requests=60)
        assert opened.counts == {200: 60}
        assert opened.percentile(50) <= opened.percentile(99) <= opened.elapsed
        timed = await load.open_loop("127.0.0.1", served.port, asks, rate=400, seconds=0.1)
        assert set(timed.counts) == {200}
        assert 0.1 <= timed.elapsed < 10
        wrong = [load.Ask(asks[0].wire, lambda answer: False)]
        assert (await load.closed_loop("127.0.0.1", served.port, wrong, clients=1, requests=3)).wrong == 3
        load.report(opened, Console(width=100))
        assert "200" in capsys.readouterr().out
        picture = tmp_path / "plot.png"
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            assert not load.plot(closed, picture, "title")
        else:
            assert load.plot(closed, picture, "title")
            assert picture.stat().st_size > 1000

    drive(loop, cache, body)


def test_a_load_generators_requests_that_nobody_answers_are_counted(run_asyncio):
    async def main() -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            asks = [load.Ask(request("GET", "/"), lambda answer: True)]
            outcome = await load.open_loop("127.0.0.1", nobody.getsockname()[1], asks, rate=1000, requests=5)
        assert outcome.counts == {0: 5}

    run_asyncio(main)


# -- the end -------------------------------------------------------------------------------------------


def test_at_sigterm_what_is_in_flight_ends_and_what_is_new_gets_503(loop, cache):
    async def body(served: Served) -> None:
        async with served.connect() as early, served.connect() as late:
            reader = await early.send(request("GET", "/write?prompt=The&characters=600"))
            await early.head(reader)
            served.server.handle_exit(signal.SIGTERM, None)
            for _ in range(400):  # longer than uvicorn takes to close its door
                assert await early.chunk(reader)
            refused = await late.ask(request("POST", "/classify", json.dumps(GOOD).encode()))
            assert refused.status == 503
            assert (await late.ask(request("GET", "/readyz"))).status == 503
            assert (await late.ask(request("GET", "/healthz"))).status == 200
            characters = 400
            while await early.chunk(reader):
                characters += 1
            assert characters == 600

    drive(loop, cache, body)


def test_a_request_that_does_not_end_does_not_keep_the_service(loop, cache, until):
    """C74: a client that reads a long text very slowly, say."""

    async def body(served: Served) -> None:
        served.server.config.timeout_graceful_shutdown = 0.01
        with served.app._gate:
            served.server.handle_exit(signal.SIGTERM, None)
            await until(lambda: served.server.should_exit)

    drive(loop, cache, body)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.timeout(120)
def test_the_program_starts_serves_and_ends_well(cache):
    """As ``make serve`` starts it; C74: SIGTERM ends it, and soon."""
    command = [sys.executable, "-W", "error", "-u", str(ROOT / "examples/serve/app.py")]
    options = ["--port", "0", "--device", "cpu", "--quick", "--cache", str(cache), "--pause", "0"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    with subprocess.Popen(
        command + options,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said = ""
            assert process.stdout is not None
            while not (found := re.search(r"running on http://127.0.0.1:(\d+)", said)):
                line = process.stdout.readline()
                assert line, f"it has ended:\n{said}"
                said += line
            port = int(found[1])

            async def ask() -> Reply:
                async with Connection("127.0.0.1", port) as connection:
                    return await connection.ask(request("POST", "/classify", json.dumps(GOOD).encode()))

            reply = asyncio.run(ask())
            assert reply.status == 200, said
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=40)
        finally:
            process.kill()
    assert process.returncode == 0, said + rest
    assert "Application shutdown complete" in rest
    assert "Traceback" not in said + rest


# -- the how-to page -----------------------------------------------------------------------------------

PAGE = (ROOT / "docs/how-to/serve-with-fastapi.md").read_text(encoding="utf-8")


def snippet(name: str) -> str:
    return PAGE.split(f"<!-- {name} -->\n```python\n", 1)[1].split("```", 1)[0]


@pytest.mark.parametrize("name", ["before", "after", "batched"])
def test_the_pages_programs_serve(run_asyncio, name):
    import uvicorn

    async def main() -> None:
        names: dict[str, Any] = {"__name__": "page"}
        exec(compile(snippet(name), f"{name}.py", "exec", dont_inherit=True), names)
        config = uvicorn.Config(names["app"], port=0, log_level="warning", lifespan="on")
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
            assert not running.done()
        port = server.servers[0].sockets[0].getsockname()[1]
        pixels = [float(i % 7) for i in range(64)]
        body = json.dumps({"pixels": pixels}).encode()
        wire = request("POST", "/classify", body, content_type="application/json")
        async with Connection("127.0.0.1", port) as connection:
            reply = await connection.ask(wire)
            probe = await connection.ask(request("GET", "/healthz"))
        server.should_exit = True
        await running
        assert reply.status == 200
        assert int(reply.body) == int(names["model"](torch.tensor([pixels])).argmax())
        assert probe.status == (404 if name == "before" else 200)

    run_asyncio(main)


def test_the_page_changes_five_lines():
    import difflib

    lines = difflib.ndiff(snippet("before").splitlines(), snippet("after").splitlines())
    assert sum(line.startswith("+ ") for line in lines) == 5


def test_every_program_on_the_page_is_python():
    for block in PAGE.split("```python\n")[1:]:
        compile(block.split("```", 1)[0], "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


# -- the models' weights -------------------------------------------------------------------------------


def test_weights_are_trained_once_and_read_back_without_pickle(tmp_path):
    trainings = []

    def train(device: torch.device, told: Any, *, epochs: int) -> model.Digits:
        trainings.append(epochs)
        return model.Digits()

    first, second = (
        model.trained(model.Digits, train, tmp_path, CPU, lambda done: None, epochs=1) for _ in range(2)
    )
    assert trainings == [1]
    assert not second.training
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".safetensors"
    model.trained(model.Digits, train, tmp_path, CPU, lambda done: None, epochs=2)
    assert trainings == [1, 2], "another recipe has weights of its own"


def test_training_teaches_something(cache):
    told: list[float] = []
    digits = model.trained(model.Digits, model.train_digits, cache / "few", CPU, told.append, epochs=2)
    assert model.accuracy(digits, CPU) > 0.85
    assert told[-1] == 1.0


# -- gRPC ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_the_grpc_variant_serves_the_same(run_asyncio, cache, until, monkeypatch, abandoned):
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    from safetensors.torch import load as arrays
    from safetensors.torch import save

    import grpc_app

    pixels, _ = some_digits(20)
    messages = [save({"pixels": torch.from_numpy(each[None].astype("uint8"))}) for each in pixels]
    running = []

    async def broken(*_: Any) -> None:
        raise LookupError("secret")

    async def main() -> None:
        async with aiogpu.Runtime(CPU):
            made = await service.load(service.Settings(CPU, quick=True, cache=cache))
            running.append(made)
            with torch.inference_mode():
                truth = made.digits(torch.from_numpy(pixels)).argmax(1)
            async with made.batcher:
                server = grpc_app.server(made)
                port = server.add_insecure_port("127.0.0.1:0")
                await server.start()
                try:
                    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                        await talk(channel, truth)
                    await until(lambda: aiogpu.stats().streams_in_use <= BATCHES)
                    assert not made.texts.taken
                    assert not made.batches.taken
                finally:
                    await server.stop(grace=5)

    async def talk(channel: Any, truth: torch.Tensor) -> None:
        classify = channel.unary_unary("/aiogpu.Digits/Classify")
        answers = await asyncio.gather(*(classify(message, timeout=20) for message in messages))
        assert torch.cat([arrays(answer)["digits"] for answer in answers]).equal(truth)
        whole = save({"pixels": torch.from_numpy(pixels.astype("uint8"))})
        assert arrays(await classify(whole, timeout=20))["digits"].equal(truth)
        text = [each async for each in channel.unary_stream("/aiogpu.Digits/Write")(b"The data", timeout=20)]
        assert len(text) == 200
        for wrong in (b"", b"x" * 100, save({"pixels": torch.zeros(1, 8, 8)}), save({})):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await classify(wrong, timeout=20)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "\n" not in caught.value.details()
        with monkeypatch.context() as patch:
            patch.setattr(running[0], "classify", broken)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await classify(messages[0], timeout=20)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
        # A client that goes away in the middle of a text.
        call = channel.unary_stream("/aiogpu.Digits/Write")(b"The data", timeout=20)
        await call.read()
        call.cancel()

    run_asyncio(main, limit=60)
