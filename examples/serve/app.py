"""A web service on one device: FastAPI, uvicorn, aiogpu.

    python examples/serve/app.py [--host H] [--port N] [--device cpu|cuda] [--quick]

    POST /classify      {"pixels": [[...]]}                 one digit; concurrent requests become one batch
    POST /classify/batch    raw uint8, x-shape: n,8,8       many digits at once
    GET  /write?prompt=The+data&characters=200              text, one character at a time as it is made
    GET  /healthz, /readyz, /metrics

All routes share one rule (admission.py, and the batcher's queue): so many at once, of one client a quarter,
429 with Retry-After for the others. The first start trains the models (see model.py). On SIGTERM or Ctrl-C
the service stops being ready, refuses what is new, finishes what it has, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import fastapi
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from rich.progress import Progress

import aiogpu
import aiogpu.asgi
from admission import Admission
from limits import LIMITS, PIXELS, Limits, Refused, digit_from_json, digits_from_bytes, read_body, wish
from model import Digits, Writer, cache_folder, train_digits, train_writer, trained

try:
    import prometheus_client

    from aiogpu.observe.metrics import PrometheusMetrics
except ImportError:  # then there is no /metrics
    prometheus_client = None


@dataclass(frozen=True)
class Settings:
    """How this service is to run."""

    device: torch.device | None = None
    quick: bool = False  # hardly trained, for tests
    cache: Path = field(default_factory=cache_folder)
    limits: Limits = LIMITS
    max_batch_size: int = 64
    max_queue: int = 1024
    places: int = 64  # for batches at once, and for texts: those that go past the batcher
    client_header: str | None = None  # set by a proxy of one's own; anybody can send a header

    @property
    def training(self) -> tuple[dict[str, int], dict[str, int]]:
        return ({"epochs": 2}, {"steps": 10}) if self.quick else ({}, {})


class Service:
    """The models on the device, and what of them needs state: the batcher."""

    def __init__(self, settings: Settings, digits: Digits, writer: Writer) -> None:
        self.limits = settings.limits
        self.digits = digits
        self.writer = writer
        self.device = next(writer.parameters()).device
        share = max(1, settings.places // 4)  # of one client, as in the batcher
        self.batches = Admission("batches", settings.places, share)
        self.texts = Admission("texts", settings.places, share)
        self.batcher = aiogpu.Batcher(
            self.recognize, max_batch_size=settings.max_batch_size, max_queue=settings.max_queue,
            to_host=True, name="digits",
        )  # fmt: skip

    def recognize(self, pixels: torch.Tensor) -> torch.Tensor:
        """(n, 8, 8) pixels to (n, 10) probabilities. In a thread, on the caller's stream."""
        with torch.inference_mode():
            return self.digits(pixels)

    async def classify(self, pixels: np.ndarray, client: str) -> dict[str, Any]:
        scores = await self.batcher(torch.from_numpy(pixels), timeout=self.limits.timeout, client=client)
        return {"digit": int(scores.argmax()), "probability": round(float(scores.max()), 4)}

    async def classify_batch(self, pixels: np.ndarray, client: str) -> list[int]:
        with self.batches.place(client):
            there = await aiogpu.to_device(pixels)
            scores = await aiogpu.run_sync(self.recognize, there)
            digits: list[int] = (await aiogpu.to_host(scores.argmax(1))).tolist()
            return digits

    async def write(self, prompt: str, characters: int, temperature: float, seed: int) -> AsyncGenerator[str]:
        """Each character as soon as it is made; while the device works on one, others are served.

        Whoever iterates it holds a place of `texts` meanwhile.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        read = await aiogpu.to_device(torch.tensor([Writer.encode(prompt) or [0]]))
        state = None
        for _ in range(characters):
            read, state = await aiogpu.run_sync(self.writer.step, read, state, generator, temperature)
            yield Writer.CHARACTERS[int(await aiogpu.item(read))]


async def load(settings: Settings) -> Service:
    """Trained models, on the device of the running runtime. The loop stays free, so /healthz answers."""
    device = settings.device or aiogpu.device()
    models = []
    with Progress(transient=True) as progress:
        for kind, train, how in zip(
            (Digits, Writer), (train_digits, train_writer), settings.training, strict=True
        ):
            bar = progress.add_task(f"{kind.__name__}: training", total=1.0)
            told = partial(_update, progress, bar)
            models.append(
                await aiogpu.run_sync(partial(trained, kind, train, settings.cache, device, told, **how))
            )
            progress.update(bar, completed=1.0)
    await aiogpu.synchronize(device)
    return Service(settings, *models)


def _update(progress: Progress, bar: Any, done: float) -> None:
    progress.update(bar, completed=done)


class Text(StreamingResponse):
    """A text that has its place from its first character to its last, or until its client has gone.

    Taken before the response starts: a refusal is still a 429.
    """

    def __init__(self, text: AsyncIterator[str], place: AbstractContextManager[None]) -> None:
        super().__init__(text, media_type="text/plain; charset=utf-8")
        self.place = place

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # A client that hardly reads cannot keep it: the longest text fits into the server's write buffer.
        with self.place:
            await super().__call__(scope, receive, send)


def make_app(settings: Settings) -> aiogpu.asgi.StreamMiddleware:
    limits = settings.limits

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        with ExitStack() as stack:
            if prometheus_client is not None:
                registry = api.state.registry = prometheus_client.CollectorRegistry()
                stack.enter_context(PrometheusMetrics(registry))
            service = api.state.service = await load(settings)
            async with service.batcher:
                yield

    api = FastAPI(title="aiogpu example", lifespan=lifespan)

    @api.exception_handler(Refused)
    async def refuse(request: Request, refused: Refused) -> Response:
        return PlainTextResponse(refused.reason + "\n", refused.status)

    @api.post("/classify")
    async def classify(request: Request) -> dict[str, Any]:
        body = await read_body(request.stream(), request.headers, limits.json_bytes, limits.body_seconds)
        return await request.app.state.service.classify(digit_from_json(body), client_of(request))

    @api.post("/classify/batch")
    async def classify_batch(request: Request) -> list[int]:
        most = limits.batch_items * PIXELS
        body = await read_body(request.stream(), request.headers, most, limits.body_seconds)
        declared = (request.headers.get(name, "") for name in ("x-dtype", "x-shape"))
        pixels = digits_from_bytes(body, *declared, limits.batch_items)
        return await request.app.state.service.classify_batch(pixels, client_of(request))

    @api.get("/write")
    async def write(
        request: Request, prompt: str = "", characters: str = "200", temperature: str = "0.7", seed: str = "0"
    ) -> Response:
        wanted = wish(prompt, characters, temperature, seed, limits)
        running = request.app.state.service
        text = running.write(wanted.prompt, wanted.characters, wanted.temperature, wanted.seed)
        return Text(text, running.texts.place(client_of(request)))

    @api.get("/metrics")
    async def metrics(request: Request) -> Response:
        if prometheus_client is None:
            raise Refused(404, "prometheus_client is not installed")
        page = prometheus_client.generate_latest(request.app.state.registry)
        return Response(page, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    def client_of(request: Request) -> str:
        """Whose share of the queue a request takes."""
        named = request.headers.get(settings.client_header) if settings.client_header else None
        return named or (request.client.host if request.client else "")

    return aiogpu.asgi.StreamMiddleware(
        api, runtime=partial(aiogpu.Runtime, settings.device), device=settings.device
    )


class Server(uvicorn.Server):
    """uvicorn, with a pause between the signal and the closed door.

    uvicorn closes the listening socket at the signal. Balancers learn from /readyz, some seconds later,
    that this service is going; until then they send requests, which deserve an answer. A second signal
    ends the pause.
    """

    def __init__(self, config: uvicorn.Config, app: aiogpu.asgi.StreamMiddleware, pause: float) -> None:
        super().__init__(config)
        self._app = app
        self._pause = pause
        self._loop = asyncio.get_running_loop()
        self._leaving: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._app.draining or sig not in (signal.SIGTERM, signal.SIGINT):
            super().handle_exit(sig, frame)
        else:
            self._app.drain()
            self._loop.call_soon_threadsafe(self._leave)  # from a signal handler: wakes the loop

    def _leave(self) -> None:
        self._leaving = asyncio.create_task(self._finish())

    async def _finish(self) -> None:
        logging.getLogger("uvicorn.error").info("Draining: %d requests in flight", self._app.in_flight)
        await asyncio.sleep(self._pause)
        # As long again, uvicorn waits; what has not ended then is cancelled: a client that hardly reads
        # its text must not keep the service from ending.
        with anyio.move_on_after(self.config.timeout_graceful_shutdown):
            await self._app.idle()
        self.should_exit = True


def server(app: aiogpu.asgi.StreamMiddleware, host: str, port: int, pause: float = 1.0) -> Server:
    """A server for the running loop: `await server(...).serve()`."""
    config = uvicorn.Config(
        app, host=host, port=port, access_log=False,
        # Untrusted clients: there is a limit to how many connections there are, and those that have had
        # an answer are closed when they are idle. h11 has a limit to the size of headers (64 KB), the
        # faster httptools has none. Connections that never ask for anything are a proxy's to close.
        http="h11", timeout_keep_alive=30, limit_concurrency=4096, timeout_graceful_shutdown=10,
    )  # fmt: skip
    return Server(config, app, pause)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve two small models.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--device", type=torch.device, help="default: cuda if there is one")
    parser.add_argument("--quick", action="store_true", help="hardly train: for tests")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="where weights are kept")
    parser.add_argument(
        "--pause", type=float, default=1.0, help="seconds between SIGTERM and the closed door"
    )
    parser.add_argument("--client-header", help="whose requests they are, as a proxy of your own says")
    return parser.parse_args()


async def main(args: argparse.Namespace) -> None:
    settings = Settings(args.device, args.quick, args.cache, client_header=args.client_header)
    await server(make_app(settings), args.host, args.port, args.pause).serve()


def run() -> None:
    args = arguments()
    # One thread computes such small layers faster than several that wait for each other.
    torch.set_num_threads(1)
    factory = None
    if sys.platform != "win32":
        try:
            import uvloop
        except ImportError:
            pass
        else:
            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(args))


if __name__ == "__main__":
    print(f"fastapi {fastapi.__version__}, uvicorn {uvicorn.__version__}, torch {torch.__version__}")
    run()
