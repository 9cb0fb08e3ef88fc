"""The same service over gRPC: grpc.aio, without generated code.

    python examples/serve/grpc_app.py [--port N] [--device cpu|cuda] [--quick]

Messages are safetensors: named arrays with declared shapes and types, numbers only. A client needs no .proto:

    channel = grpc.aio.insecure_channel("127.0.0.1:8001")
    classify = channel.unary_unary("/aiogpu.Digits/Classify")
    answer = load(await classify(save({"pixels": pixels}), timeout=1.0))["digits"]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import safetensors
import torch
from safetensors.torch import save

import aiogpu
from app import Service, Settings, load
from limits import Refused, digits_from_bytes, wish
from model import cache_folder

SERVICE = "aiogpu.Digits"

log = logging.getLogger("aiogpu.serve")

#: What a client is told, instead of an exception's text.
CODES: dict[type[BaseException], tuple[grpc.StatusCode, str]] = {
    aiogpu.OverloadedError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests"),
    aiogpu.DeviceLostError: (grpc.StatusCode.UNAVAILABLE, "the device is lost"),
    aiogpu.ClosedError: (grpc.StatusCode.UNAVAILABLE, "shutting down"),
    torch.OutOfMemoryError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "out of memory"),
    TimeoutError: (grpc.StatusCode.DEADLINE_EXCEEDED, "timed out"),
}

Handler = Callable[[bytes, Any], Awaitable[Any]]


def told(handler: Handler) -> Handler:
    """Each call on a stream of its own, and its errors as statuses. A client that cancels, cancels it."""
    in_task = aiogpu.task(handler)  # type: ignore[arg-type]

    async def wrapper(message: bytes, context: Any) -> Any:
        try:
            return await in_task(message, context)
        except Refused as refused:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, refused.reason)
        except tuple(CODES) as error:
            code, reason = next(CODES[kind] for kind in CODES if isinstance(error, kind))
            await context.abort(code, reason)
        except Exception:  # gRPC would tell the client its text
            log.exception("a call has failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")

    return wrapper


def pixels_of(message: bytes, most: int) -> np.ndarray:
    """The one array of a message, checked."""
    try:
        arrays = dict(safetensors.deserialize(message))
    except safetensors.SafetensorError:
        raise Refused(422, "not safetensors") from None
    found = arrays.get("pixels")
    if found is None or len(arrays) != 1:
        raise Refused(422, "one array is expected, pixels")
    dtype = "uint8" if found["dtype"] == "U8" else str(found["dtype"])
    return digits_from_bytes(bytes(found["data"]), dtype, ",".join(map(str, found["shape"])), most)


def client_of(context: Any) -> str:
    """Whose share of the places a call takes: the address, without the port that each connection has anew."""
    address: str = context.peer().rpartition(":")[0]  # such as ipv4:127.0.0.1:40312
    return address


def handlers(service: Service) -> grpc.GenericRpcHandler:
    limits = service.limits

    @told
    async def classify(message: bytes, context: Any) -> bytes:
        """{"pixels": (n, 8, 8) uint8} to {"digits": (n,) int64}. A single one joins other calls' batch."""
        pixels = pixels_of(message, limits.batch_items)
        if len(pixels) > 1:
            digits = await service.classify_batch(pixels, client_of(context))
        else:
            one = pixels[0].astype(np.float32)
            digits = [(await service.classify(one, client_of(context)))["digit"]]
        return save({"digits": torch.tensor(digits)})

    @told
    async def write(message: bytes, context: Any) -> None:
        """A prompt in UTF-8, to a stream of messages, one character each."""
        wanted = wish(message.decode("utf-8", "replace"), "200", "0.7", "0", limits)
        text = service.write(wanted.prompt, wanted.characters, wanted.temperature, wanted.seed)
        with service.texts.place(client_of(context)):
            async with aclosing(text):
                async for character in text:
                    await context.write(character.encode())

    methods = {
        "Classify": grpc.unary_unary_rpc_method_handler(classify),
        "Write": grpc.unary_stream_rpc_method_handler(write),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def server(service: Service) -> grpc.aio.Server:
    """Without a port yet."""
    options = [("grpc.max_receive_message_length", 64 * 1024), ("grpc.so_reuseport", 0)]
    made = grpc.aio.server(options=options, maximum_concurrent_rpcs=4096)
    made.add_generic_rpc_handlers((handlers(service),))
    return made


async def main(args: argparse.Namespace) -> None:
    settings = Settings(args.device, args.quick, args.cache)
    async with aiogpu.Runtime(args.device):
        service = await load(settings)
        async with service.batcher:
            serving = server(service)
            port = serving.add_insecure_port(f"{args.host}:{args.port}")
            await serving.start()
            print(f"serving on {args.host}:{port}", flush=True)
            stop = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            await stop.wait()
            await serving.stop(grace=10)  # new calls are refused, those in flight end


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve two small models over gRPC.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001, help="0: any free one")
    parser.add_argument("--device", type=torch.device, help="default: cuda if there is one")
    parser.add_argument("--quick", action="store_true", help="hardly train: for tests")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="where weights are kept")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(asyncio.run(main(arguments())))
