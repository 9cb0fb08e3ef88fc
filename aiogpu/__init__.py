"""aiogpu: await a GPU.

An asyncio, uvloop and trio runtime for PyTorch: coroutines get CUDA streams of their own, and are resumed
when the GPU has finished, while the event loop stays free.

A map of the house, from the front door down; calls go down, completions come up through one door:

    _decorator               @task: what may be decorated, and what stays of it
    _generators              async generators as tasks: edges at every item
    _tasks, _blocks          coroutine ↔ stream: fork and join, stream(), share()
    files                    weights from safetensors files: load_safetensors, load_state_dict
    _tensorstream            their tensors on the way to a device
    _safetensors             what is in the files, and how it comes into memory
    _prefetch                the next batches are loaded and uploaded while this one is used
    _pipelines               stages written as a chain, and run side by side
    _flow/                   what both are made of: sources, buffers, stages
    _channels                values between tasks, with their stream order
    _handoff                 one value on its way between two tasks
    _run_sync                blocking code on own threads, as if it ran in the coroutine
    _limiter                 capacity: how much may be under way on a device
    _batching/               Batcher: many single calls become one call of a function
    _groups                  gather, amap (structured concurrency itself is anyio's)
    transfers/               to_device, to_host, copy_, item; staging through page-locked memory
    _synchronize             waiting for streams, events, devices
    _operation               the awaitable handle of a transfer, its life as a table
    _runtime                 one per event loop: settings, lifetime
    _stats                   what can be counted
    _capacity                out of device memory: what comes back by itself is waited for
    _engine                  one per device and process: streams, memory, threads, lost or not
    _streams, _workers       stream leases; own threads
    _reactor                 completions in, wake-ups out: poll while busy, interrupt when idle
    _selfpipe                the way from a driver's callback into a sleeping loop
    _notifier                the watchdog: a thread that looks when nobody calls
    _loops, _farewells       the door into asyncio and trio; what is closed before it is
    _torchstate              torch's thread-local modes, made task-local
    _torchmodes              each of these modes: reading, writing, comparing
    drivers/                 the contract with a device; CUDA and CPU
    _emit                    what observers are told
    _stepwise                a coroutine, step by step
    _settings                reading arguments and environment variables
    _errors                  what can go wrong, whose fault, what to do

    asgi/                    each request of a web application on a stream of its own
    observe/                 what watches from outside: metrics
    testing/                 for users' tests, too: the virtual device, the conformance suite
"""

from ._batching.batcher import Batcher
from ._batching.observing import BatchEnded, BatcherStats, CallEnded
from ._blocks import current_stream, device, share, stream
from ._channels import ReceiveChannel, SendChannel, create_channel
from ._decorator import task
from ._errors import (
    AiogpuError,
    CaptureError,
    ClosedError,
    DeviceError,
    DeviceLostError,
    OverloadedError,
)
from ._groups import amap, gather
from ._limiter import Limiter
from ._operation import Operation
from ._pipelines import StageStats, pipeline
from ._prefetch import PrefetchStats, prefetch
from ._run_sync import run_sync
from ._runtime import Runtime, Stats, current_runtime, stats
from ._synchronize import synchronize
from .files import load_safetensors, load_state_dict
from .transfers.api import copy_, item, to_device, to_host
from .transfers.registry import register

__version__ = "0.1.0"

__all__ = [
    "AiogpuError",
    "BatchEnded",
    "Batcher",
    "BatcherStats",
    "CallEnded",
    "CaptureError",
    "ClosedError",
    "DeviceError",
    "DeviceLostError",
    "Limiter",
    "Operation",
    "OverloadedError",
    "PrefetchStats",
    "ReceiveChannel",
    "Runtime",
    "SendChannel",
    "StageStats",
    "Stats",
    "amap",
    "copy_",
    "create_channel",
    "current_runtime",
    "current_stream",
    "device",
    "gather",
    "item",
    "load_safetensors",
    "load_state_dict",
    "pipeline",
    "prefetch",
    "register",
    "run_sync",
    "share",
    "stats",
    "stream",
    "synchronize",
    "task",
    "to_device",
    "to_host",
]
