"""The server that `serving.py` asks: one process, one model, and every contender at a path of its own.

`python -m benchmarks._serving_app LAYERS WIDTH TOKENS` prints its port, and ends when its input does. Pure
ASGI on uvicorn: what a framework adds would be the same for all of them, and would hide the differences.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio.to_thread
import torch
import uvicorn
from torch import Tensor, nn

import aiogpu
import aiogpu.asgi

FEATURES = 32  # of a token
CLASSES = 16
MAX_BATCH, MAX_QUEUE, BATCHES = 64, 512, 2
TIMEOUT_S = 5.0

Handler = Callable[[bytes], Awaitable[Tensor]]


class Block(nn.Module):
    """A transformer's, written out: about a dozen launches, whatever the size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        heads = max(1, width // 64)
        q, k, v = self.qkv(self.before(x)).view(n, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, width)
        x = x + self.out(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def network(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = (Block(width) for _ in range(layers))
    return nn.Sequential(nn.Linear(FEATURES, width), *blocks, nn.Linear(width, CLASSES)).eval()


class Contenders:
    """Handlers: bytes of a (tokens, FEATURES) float32 array in, its (CLASSES,) scores on the host out."""

    def __init__(self, layers: int, width: int, tokens: int, device: torch.device) -> None:
        self.tokens = tokens
        self.device = device
        self.model = network(layers, width).to(device)
        self.batcher = aiogpu.Batcher(
            self.forward, max_batch_size=MAX_BATCH, max_queue=MAX_QUEUE, to_host=True, name="bench",
            in_flight=BATCHES, max_queue_per_client=MAX_QUEUE,  # one address is all of them here
        )  # fmt: skip

    def parse(self, body: bytes) -> Tensor:
        return torch.frombuffer(bytearray(body), dtype=torch.float32).view(self.tokens, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scores: Tensor = self.model(x)[:, -1]
            return scores

    def blocking(self, body: bytes) -> Tensor:
        return self.forward(self.parse(body)[None].to(self.device)).cpu()[0]

    async def cpu(self, body: bytes) -> Tensor:
        return self.blocking(body)

    async def to_thread(self, body: bytes) -> Tensor:
        return await asyncio.to_thread(self.blocking, body)

    async def def_(self, body: bytes) -> Tensor:
        """What Starlette does with an endpoint that is an ordinary function."""
        return await anyio.to_thread.run_sync(self.blocking, body)

    async def plain_aiogpu(self, body: bytes) -> Tensor:
        x = await aiogpu.to_device(self.parse(body)[None], self.device)
        return (await aiogpu.to_host(await aiogpu.run_sync(self.forward, x)))[0]

    async def batched(self, body: bytes) -> Tensor:
        scores: Tensor = await self.batcher(self.parse(body), timeout=TIMEOUT_S)
        return scores


def application(contenders: Contenders) -> Any:
    mine: dict[str, Handler] = {"/aiogpu": contenders.plain_aiogpu, "/batcher": contenders.batched}
    theirs: dict[str, Handler] = {
        "/cpu": contenders.cpu, "/to_thread": contenders.to_thread, "/def": contenders.def_,
    }  # fmt: skip

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
        elif scope["path"] == "/stats":
            await reply(send, stats())
        else:
            handler = mine.get(scope["path"]) or theirs[scope["path"]]
            asked = await body(receive)
            start = time.perf_counter()
            scores = await handler(asked)
            await reply(send, scores.tolist(), time.perf_counter() - start)

    most = MAX_QUEUE + BATCHES * MAX_BATCH
    middleware = aiogpu.asgi.StreamMiddleware(inner, max_in_flight=most)

    async def lifespan(receive: Any, send: Any) -> None:
        await receive()
        async with contenders.batcher:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    def stats() -> dict[str, float]:
        batcher, runtime = contenders.batcher.stats(), aiogpu.stats()
        return {
            "rss_MB": _resident_mb(),
            "gpu_MB": torch.cuda.memory_reserved() / 1e6 if contenders.device.type == "cuda" else 0.0,
            "in_flight": middleware.in_flight,
            "streams_in_use": max(0, runtime.streams_in_use - BATCHES),  # without those that batches keep
            "operations": runtime.operations,
            "waiting": batcher.waiting,
            "running": batcher.running,
            "batches": batcher.batches,
            "items": batcher.items,
        }

    async def app(scope: Any, receive: Any, send: Any) -> None:
        # Without anything of ours around them, and around the look at the server: it must get through.
        if scope["type"] == "http" and (scope["path"] in theirs or scope["path"] == "/stats"):
            await inner(scope, receive, send)
        else:
            await middleware(scope, receive, send)

    return app


async def body(receive: Any) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ConnectionError("the client has gone")
        parts.append(message["body"])
        more = message.get("more_body", False)
    return b"".join(parts)


async def reply(send: Any, what: object, seconds: float = 0.0) -> None:
    """With the time that the handler took, in the header that browsers know for it (W3C's Server Timing)."""
    text = json.dumps(what).encode()
    headers = [
        (b"content-length", str(len(text)).encode()),
        (b"server-timing", b"handler;dur=%.3f" % (seconds * 1e3)),  # ms
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def _resident_mb() -> float:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 1e6
    except OSError:  # the most there ever was
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


async def main(layers: int, width: int, tokens: int) -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    contenders = Contenders(layers, width, tokens, device)
    config = uvicorn.Config(
        application(contenders), port=0, log_level="critical", lifespan="on", access_log=False
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    if server.started:
        gc.collect()
        gc.freeze()  # torch's half a million objects: a collection through them stops everybody for 100 ms
        threading.Thread(target=_end_with_parent, args=[server], daemon=True).start()
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await running


def _end_with_parent(server: uvicorn.Server) -> None:
    """However the benchmark ends, its server does not stay."""
    sys.stdin.read()
    server.should_exit = True


def run() -> None:
    factory = None
    try:
        import uvloop
    except ImportError:
        pass
    else:
        factory = uvloop.new_event_loop
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(*map(int, sys.argv[1:4])))


if __name__ == "__main__":
    run()
