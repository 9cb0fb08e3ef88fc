"""aiogpu: await a GPU.

An asyncio, uvloop and trio runtime for PyTorch: coroutines get CUDA streams of their own, and are resumed
when the GPU has finished, while the event loop stays free.

A map of the house, from the front door down; calls go down, completions come up through one door:

    _tasks, _blocks          coroutine ↔ stream: @task, fork and join, stream(), share()
    _handoff                 a value on its way between two tasks, with its stream order
    _run_sync                blocking code on own threads, as if it ran in the coroutine
    _groups                  gather, amap (structured concurrency itself is anyio's)
    transfers/               to_device, to_host, copy_, item; staging through page-locked memory
    _synchronize             waiting for streams, events, devices
    _operation               the awaitable handle of a transfer, its life as a table
    _runtime                 one per event loop: settings, lifetime
    _engine                  one per device and process: streams, memory, threads, lost or not
    _streams, _workers       stream leases; own threads
    _reactor                 completions in, wake-ups out: poll while busy, interrupt when idle
    _notifier                the thread that a driver's callbacks wake
    _loops                   the door into asyncio and trio
    _torchstate              torch's thread-local modes, made task-local
    drivers/                 the contract with a device; CUDA and CPU
    _errors                  what can go wrong, whose fault, what to do

    testing/                 for users' tests, too: the virtual device, the conformance suite
"""

from ._blocks import current_stream, device, share, stream
from ._errors import AiogpuError, CaptureError, DeviceError, DeviceLostError
from ._groups import amap, gather
from ._operation import Operation
from ._run_sync import run_sync
from ._runtime import Runtime, Stats, current_runtime, stats
from ._synchronize import synchronize
from ._tasks import task
from .transfers.api import copy_, item, to_device, to_host

__version__ = "0.1.0"

__all__ = [
    "AiogpuError",
    "CaptureError",
    "DeviceError",
    "DeviceLostError",
    "Operation",
    "Runtime",
    "Stats",
    "amap",
    "copy_",
    "current_runtime",
    "current_stream",
    "device",
    "gather",
    "item",
    "run_sync",
    "share",
    "stats",
    "stream",
    "synchronize",
    "task",
    "to_device",
    "to_host",
]
