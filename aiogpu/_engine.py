"""One engine per device and process: its driver, streams, memory, threads, and whether it is lost.

Law of this file: engines are shared by all event loops of the process and never torn down stream by stream
(an ``ExternalStream`` does not own its handle, and drivers reuse handles). Making one may take seconds
(the CUDA context), so it happens off the loop's thread; finding one is a dictionary look-up.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from ._errors import DeviceError, DeviceLostError, fresh
from ._notifier import Notifier, PosixSignal, ThreadSignal
from ._streams import StreamPool
from ._workers import StagingThreads, WorkerPool
from .drivers.base import Driver
from .drivers.cpu import CpuDriver
from .drivers.hostmem import pin_thread_to
from .transfers.crew import Crew
from .transfers.pinned import BlockPool, Budget, StagingMemory
from .transfers.release import let_go
from .transfers.ring import Ring

__all__ = ["Engine", "EngineSettings", "default_device", "find_engine", "install_engine", "make_engine"]

#: Bytes of one slot for small transfers. Up to this size a copy into page-locked memory takes a few
#: microseconds, less than any hand-over to a thread.
SLOT_BYTES = 64 * 1024
_SLOTS = 128

#: Bytes of one staging chunk, the most that is page-locked at once: registering 16 MiB whose pages exist
#: stops other threads' launches for 1.1 ms, 4 MiB for 0.5. Smaller ones cost more submissions.
CHUNK_BYTES = 8 * 1024 * 1024

#: Threads that copy one transfer at the same time, and what part of the cores that is at most: with more of
#: them each gets the GIL, and a chunk, later (H200, 16 cores, 64 MB/256 MB/1 GB: 17/31/45 GB/s with
#: 10, 16/29/42 with 12, 15/28/35 with 14).
_COPY_THREADS, _OF_CORES = 10, 5 / 8
#: Transfers carried out at once, of either kind (short, long). They wait most of the time.
_STAGING_THREADS = 64


@dataclass(frozen=True)
class EngineSettings:
    """What the first user of a device decides for the process.

    Parameters
    ----------
    streams:
        Compute streams per priority.
    staging_bytes:
        Page-locked bytes that staging may take: chunks of 8 MiB (smaller ones for less than 16 MiB in
        all), page-locked when they are first needed or reserved ahead; 0: none, the driver stages. Besides
        these, 8 MiB for small transfers.
    pinned_bytes:
        Page-locked bytes that results of downloads may take, what torch keeps of them for reuse counted;
        beyond it they come in ordinary memory.
    wake:
        "auto", "callback" or "thread": how CUDA tells the host (see :mod:`aiogpu.drivers.cuda`).
    """

    streams: int = 8
    staging_bytes: int = 128 * 1024 * 1024
    pinned_bytes: int = 4 * 1024 * 1024 * 1024
    wake: str = "auto"


class Engine:
    """A device as this process uses it."""

    def __init__(self, driver: Driver, settings: EngineSettings | None = None) -> None:
        settings = settings or EngineSettings()
        self.driver = driver
        self.device = driver.device
        self.settings = settings
        self.lost: DeviceLostError | None = None
        #: Points that were pending when the device was lost, with the buffers they keep.
        self.leaked: list[Any] = []
        self.notifier = _notifier()
        self.compute = StreamPool(driver, "compute", settings.streams)
        self.uploads = StreamPool(driver, "copy", 4)
        # A download waits for its producer on its copy stream: more streams, fewer that wait behind
        # a producer that is not theirs.
        self.downloads = StreamPool(driver, "copy", 12)
        # For downloads through chunks a thread waits, with chunks in hand: no producer is on their streams.
        self.chunked = StreamPool(driver, "copy", 4)
        # Streams that wait for users' events.
        self.sides = StreamPool(driver, "copy", 8)
        self.results = Budget(settings.pinned_bytes, driver.empty_result_cache)
        self._near = driver.near_cpus()
        copy_threads = min(_COPY_THREADS, math.ceil((len(self._near) or _cores()) * _OF_CORES))
        self.crew = Crew(copy_threads, self._enter_near)
        # Torch's own copies between different orders of memory: one thread besides those that ask.
        self.reordering = Crew(2, self._enter_near, "reorder")
        self.memory = StagingMemory(driver, self.crew)
        self.slots = BlockPool(self.memory, SLOT_BYTES, _SLOTS)
        self.chunks = Ring(driver, self.memory, *_chunks(settings.staging_bytes))
        self.staging = StagingThreads(_STAGING_THREADS, CHUNK_BYTES, self._enter_near)
        self._releasing = WorkerPool("release", 1, lambda: None)
        self.workers = WorkerPool("worker", 10_000, driver.enter_thread)  # bounded by limiters

    def warm_up(self) -> None:
        """Open all streams and page-lock the slots, off the loop's thread.

        Opening a stream takes 10 µs, but now and then the driver makes it wait for the device to be idle.
        """
        for pool in (self.compute, self.uploads, self.downloads, self.chunked, self.sides):
            pool.open()
        self.compute.open(-1)
        self.slots.reserve(_SLOTS)

    def trim(self) -> int:
        """Give page-locked memory that nobody uses back to the system; returns how many bytes. May take
        long: not on a loop's thread."""
        freed = self.chunks.trim() + self.driver.empty_result_cache()
        self.results.forget_kept()
        return freed

    def let_go(self, values: list[Any]) -> None:
        """Drop ``values``, which may take the system long, on a thread of its own."""
        try:
            self._releasing.submit(partial(let_go, values))
        except RuntimeError:  # the interpreter is exiting
            values.clear()

    def close_threads(self, timeout: float) -> None:
        """End all threads of this engine, for tests: no transfer and no call may be under way."""
        for pool in (self.staging, self.crew, self.reordering, self._releasing, self.workers):
            pool.close(timeout)

    def _enter_near(self) -> None:
        """What a thread touches first is placed in memory near it: staging belongs near the device."""
        pin_thread_to(self._near)
        self.driver.enter_thread()

    @property
    def signal(self) -> PosixSignal | ThreadSignal:
        return self.notifier.signal

    def check(self) -> None:
        """Fail fast once the device is lost."""
        if self.lost is not None:
            raise fresh(self.lost)

    def fault(self, cause: BaseException, oldest: Sequence[str] = ()) -> BaseException:
        """The error that waiters get for ``cause``, which the device reported.

        The first sticky one marks the device as lost and wakes every loop, so that it reaches all
        pending waits at once. Each caller gets a copy: whoever raises one writes to it.
        """
        if self.lost is not None:
            return fresh(self.lost)
        if isinstance(cause, DeviceError | torch.OutOfMemoryError):
            return cause
        pending = "; oldest pending operations: " + ", ".join(oldest) if oldest else ""
        if not self.driver.lost(cause):
            error = DeviceError(
                f"{self.device}: {_first_line(cause)}. Device errors are asynchronous: work that was "
                f"submitted earlier may be the cause{pending}"
            )
            error.__cause__ = cause
            return error
        lost = DeviceLostError(
            f"{self.device} is lost: {_first_line(cause)}. Work that was submitted earlier than what "
            f"raises here may be the cause{pending}. No call on this device can succeed any more: "
            "restart the process. To find the kernel, run with CUDA_LAUNCH_BLOCKING=1."
        )
        lost.__cause__ = cause
        self.lost = lost  # complete: other threads read it without a lock
        self.signal.post()
        return fresh(lost)

    def blame(self, error: BaseException) -> BaseException:
        """What a failed *submission* means: the device's fault, or the submission's own."""
        if self.lost is not None or self.driver.lost(error):
            return self.fault(error)
        return error

    def rethrow(self, error: BaseException) -> NoReturn:
        """Raise what a failed submission means; its cause stays the device's own error."""
        blamed = self.blame(error)
        try:
            raise blamed from blamed.__cause__
        finally:
            del blamed, error  # no cycle through the traceback, in which tensors would stay

    def __repr__(self) -> str:
        state = "lost" if self.lost else "ready"
        return f"<Engine {self.device}, {state}, {self.driver.wake_mechanism}>"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chunks(staging_bytes: int) -> tuple[int, int]:
    """Bytes of one chunk, and how many: two at least, so that one can be filled while the other flies."""
    nbytes = min(CHUNK_BYTES, staging_bytes // 2 // 64 * 64)  # any dtype fits at its start
    return (nbytes, staging_bytes // nbytes) if nbytes else (CHUNK_BYTES, 0)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


# -- the process's engines -----------------------------------------------------------------------------

_engines: dict[torch.device, Engine] = {}
_lock = threading.Lock()
_the_notifier: Notifier | None = None
_forked_with: list[str] = []
_default: torch.device | None = None


def _notifier() -> Notifier:
    global _the_notifier
    if _the_notifier is None:
        _the_notifier = Notifier()
    return _the_notifier


def find_engine(device: torch.device) -> Engine | None:
    """The engine of ``device`` if it has been made."""
    return _engines.get(device)


def make_engine(device: torch.device, settings: EngineSettings | None = None) -> Engine:
    """The engine of ``device``, made now if need be. May take seconds: not on a loop's thread."""
    with _lock:
        engine = _engines.get(device)
        if engine is None:
            engine = Engine(_make_driver(device, settings or EngineSettings()), settings)
            engine.warm_up()
            _engines[device] = engine
        return engine


def install_engine(device: torch.device, engine: Engine | None) -> Engine | None:
    """Put ``engine`` in ``device``'s place (``None``: nobody); returns who was there. For tests."""
    global _default
    with _lock:
        before = _engines.pop(device, None)
        if engine is not None:
            _engines[device] = engine
        _default = None
        return before


def _make_driver(device: torch.device, settings: EngineSettings) -> Driver:
    if device.type == "cpu":
        return CpuDriver(device)
    if device.type == "cuda":
        if str(device) in _forked_with or (_forked_with and torch.cuda._is_in_bad_fork()):
            raise RuntimeError(
                "this process was forked after its parent had used CUDA through aiogpu, and CUDA does "
                "not survive a fork. Start it with multiprocessing's 'spawn' or 'forkserver' method, "
                "or fork before the first use of the GPU."
            )
        if not torch.cuda.is_available():
            built = "sees none" if torch.backends.cuda.is_built() else "was built without CUDA"
            raise ValueError(
                f"there is no CUDA device here for {device}: this torch ({torch.__version__}) {built}. Leave "
                "the device out, or write 'cpu': the same program runs there. `python -m aiogpu doctor` "
                "tells more"
            )
        from .drivers.cuda import CudaDriver

        if not torch.cuda.is_initialized():
            # Must be in place before the driver starts. With the default of 8, streams that wait for
            # an event hold up unrelated ones from 64 streams on.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        return CudaDriver(device, wake=settings.wake)
    raise ValueError(
        f"aiogpu has no driver for {device}: use 'cuda', 'cuda:<index>' or 'cpu'. Work on other devices "
        "can run in `await aiogpu.run_sync(fn)`."
    )


def default_device() -> torch.device:
    """The current CUDA device, else the CPU. May initialise the driver: not on a loop's thread."""
    global _default
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
    _default = torch.device("cpu")
    return _default


def settled_default() -> torch.device | None:
    """:func:`default_device` where it can be told without asking the CUDA driver, else ``None``."""
    return _current_cuda() if torch.cuda.is_initialized() else _default


def _current_cuda() -> torch.device:
    """The current device of initialised CUDA; part of every call that names none."""
    index = torch._C._cuda_getDevice()
    return _named.get(index) or _named.setdefault(index, torch.device("cuda", index))


#: Devices by index, and by names that mean the same at any time.
_named: dict[int | str | torch.device, torch.device] = {}


def normalize(device: torch.device | str | int) -> torch.device:
    """``device`` with its index; raises ``ValueError``/``TypeError`` for what cannot be a device."""
    if isinstance(device, str | torch.device) and (known := _named.get(device)) is not None:
        return known
    if isinstance(device, int) and not 0 <= device < max(1, torch.cuda.device_count()):
        # torch would keep the lowest byte: a stream's handle could become cuda:0.
        raise ValueError(
            f"there is no device {device}. Integers are device indices, never handles: wrap a stream's "
            "handle in torch.cuda.ExternalStream(handle)"
        )
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{device!r} is not a device: write 'cuda', 'cuda:0', 'cpu' or a torch.device") from None
    if found.type == "cuda" and found.index is None:
        return _current_cuda() if torch.cuda.is_initialized() else torch.device("cuda", 0)
    if found.type == "cpu":
        found = torch.device("cpu")
    elif found.type != "cuda":
        raise ValueError(f"aiogpu has no driver for {found}: use 'cuda', 'cuda:<index>' or 'cpu'")
    if not isinstance(device, int):
        _named[device] = found
    return found


def _after_fork_in_child() -> None:
    """The child has none of the parent's threads, and no right to its CUDA context."""
    global _engines, _lock, _the_notifier, _default
    _forked_with.extend(str(device) for device in _engines if device.type == "cuda")
    _lock = threading.Lock()
    # The parent's objects are left alone: destroying its streams or events here would touch CUDA.
    _graveyard.append((_engines, _the_notifier))
    _engines, _the_notifier, _default = {}, None, None


_graveyard: list[Any] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
