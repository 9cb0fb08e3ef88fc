"""No await needs a lock that a thread inside the CUDA driver may hold, nor the GIL from a driver's thread.

Threads that enter CUDA and keep the GIL (``ctypes.PyDLL``), beside awaits that are all announced by callbacks
(``spin=0``). A program that wedges prints all stacks and fails.
"""

from __future__ import annotations

import ctypes
import time

import anyio
import pytest
import torch

import aiogpu
from aiogpu._engine import Engine

from ._tools import (
    ON_GPU,
    Slow,
    asynchronous,
    needs_bindings,
    needs_linux,
    program,
    succeeds,
    tick,
    unsanitized,
)
from .conftest import Loop

pytestmark = [pytest.mark.timeout(90), *ON_GPU, needs_linux, pytest.mark.timing]

#: 8 tasks x 2500 awaits; every one is announced, none found by polling.
AWAITS = """
import ctypes, gc
sys.setswitchinterval(5e-5)  # the loop's thread must get the GIL back between two calls of the others

@aiogpu.task
async def awaiter(count):
    for _ in range(count):
        torch.cuda._sleep(200_000)  # 0.1 ms: still running when the loop looks, so it must be told
        await aiogpu.synchronize()

async def main(tasks, count, wake):
    async with aiogpu.Runtime(wake=wake, spin=0.0) as runtime:
        await aiogpu.synchronize("cuda")
        started.set()
        begin = time.perf_counter()
        await asyncio.gather(*[awaiter(count) for _ in range(tasks)])
        print(tasks * count, "awaits in", time.perf_counter() - begin, "s;", runtime.stats())
        assert runtime.stats().notifications > count / 2, "hardly anything was announced: nothing was tested"

started, stop = threading.Event(), threading.Event()
failures = []

def disturb(work):
    def loop():
        started.wait()
        calls = 0
        try:
            while not stop.is_set():
                work()
                calls += 1
        except BaseException as error:
            failures.append(repr(error))
        finally:
            counts.append(calls)
    return loop

counts = []

def run(works, tasks, count, wake="auto"):
    threads = [threading.Thread(target=disturb(work), daemon=True) for work in works]
    for thread in threads: thread.start()
    asyncio.run(main(tasks, count, wake))
    stop.set()
    for thread in threads: thread.join(10)
    assert not any(thread.is_alive() for thread in threads), "a disturbing thread hangs"
    assert not failures, failures
    print("calls of the disturbing threads:", counts)
    assert min(counts) >= 50, counts
    print("ALL RIGHT")
"""

KEEPS_THE_GIL = (
    AWAITS
    + """
cuda = ctypes.PyDLL("libcuda.so.1")  # PyDLL: the GIL is kept during the call
pointer, address = ctypes.c_void_p, ctypes.c_uint64
cuda.cuCtxSetCurrent.argtypes = [pointer]
cuda.cuEventCreate.argtypes = [ctypes.POINTER(pointer), ctypes.c_uint]
cuda.cuEventRecord.argtypes = [pointer, pointer]
cuda.cuEventQuery.argtypes = [pointer]
cuda.cuEventDestroy_v2.argtypes = [pointer]
cuda.cuMemAlloc_v2.argtypes = [ctypes.POINTER(address), ctypes.c_size_t]
cuda.cuMemFree_v2.argtypes = [address]
cuda.cuMemcpyHtoD_v2.argtypes = [address, pointer, ctypes.c_size_t]
cuda.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(pointer), ctypes.c_int]

def check(code, *allowed):
    assert code in (0, *allowed), f"CUDA error {code}"

torch.zeros(1, device="cuda")
context = pointer()
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
here = threading.local()
bytes_ = ctypes.create_string_buffer(64)

def enter():
    if not hasattr(here, "event"):
        check(cuda.cuCtxSetCurrent(context))
        here.event = pointer()
        check(cuda.cuEventCreate(ctypes.byref(here.event), 2))

def events():
    enter()
    check(cuda.cuEventRecord(here.event, None))
    check(cuda.cuEventQuery(here.event), 600)  # 600: not ready
    fresh = pointer()
    check(cuda.cuEventCreate(ctypes.byref(fresh), 2))
    check(cuda.cuEventDestroy_v2(fresh))
    time.sleep(0)

def memory():
    enter()
    there = address()
    check(cuda.cuMemAlloc_v2(ctypes.byref(there), 4096))
    check(cuda.cuMemcpyHtoD_v2(there, ctypes.addressof(bytes_), 64))
    check(cuda.cuMemFree_v2(there))  # waits for the device
    time.sleep(0)

run([events, events, memory, memory], tasks=8, count=2500, wake=WAKE)
"""
)


@pytest.mark.parametrize("wake", ["auto", "thread"])
def test_threads_that_keep_the_gil_inside_cuda_do_not_wedge_twenty_thousand_awaits(
    cycles: float, wake: str
) -> None:
    """C29, with callbacks and with waiter threads. A callback that wants the GIL hangs here for ever."""
    body = KEEPS_THE_GIL.replace("WAKE", repr(wake))
    succeeds(program(body, cycles=cycles, limit=75.0))


DESTRUCTORS = (
    AWAITS
    + """
import warnings

def tensors():
    kept = [torch.empty(1000 * (i + 1), device="cuda") for i in range(8)]
    other = torch.cuda.Stream()
    for tensor in kept:
        tensor.record_stream(other)
    del kept

def events():
    for _ in range(8):
        event = torch.cuda.Event()
        event.record()
    time.sleep(0)

def pinned():
    x = torch.empty(100_000, dtype=torch.uint8, pin_memory=True)
    y = x.to("cuda", non_blocking=True)
    del x, y
    torch.cuda.empty_cache()

def garbage():
    ring = [torch.empty(100, device="cuda")]
    ring.append(ring)
    del ring
    gc.collect(0)
    time.sleep(0)

run([tensors, events, pinned, garbage], tasks=8, count=750)
"""
)


def test_destructors_in_other_threads_do_not_wedge_awaits(cycles: float) -> None:
    """C30: tensors, events and page-locked buffers made and dropped, caches emptied, garbage collected."""
    succeeds(program(DESTRUCTORS, cycles=cycles, limit=60.0))


def test_events_are_pooled_not_made_for_every_await(run: Loop, engine: Engine) -> None:
    """C30: 3000 awaits by 8 tasks leave a handful of events in the pool, and make no new ones."""
    made: list[torch.cuda.Event] = []

    @aiogpu.task
    async def awaiter(count: int) -> None:
        for _ in range(count):
            torch.cuda._sleep(1000)
            await aiogpu.synchronize()

    async def main() -> None:
        await aiogpu.gather(*[awaiter(20) for _ in range(8)])
        real = torch.cuda.Event

        def counted(*args: bool, **kwargs: bool) -> torch.cuda.Event:
            event = real(*args, **kwargs)
            made.append(event)
            return event

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "Event", counted)
            await aiogpu.gather(*[awaiter(375) for _ in range(8)])

    run(main)
    limit = 64 if engine.driver.wake_mechanism == "host callback" else 3000
    assert len(made) <= limit, f"{len(made)} events were made for 3000 awaits"


# -- what a notification costs the stream ----------------------------------------------------------


@asynchronous
@unsanitized
@needs_bindings
@pytest.mark.parametrize("way", ["pipe", "semaphore"])
def test_a_notification_runs_while_another_thread_keeps_the_gil(
    way: str, run_asyncio: Loop, slow: Slow, engine: Engine
) -> None:
    """Law 3: neither the callback nor the stream waits for the GIL, which is kept for 200 ms here."""
    if engine.driver.wake_mechanism != "host callback":
        pytest.skip(f"no host callbacks: this process uses a {engine.driver.wake_mechanism}")
    keep_gil = ctypes.PyDLL(None).usleep
    times = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    first, second, called = times

    @aiogpu.task
    async def main() -> None:
        for event in times:  # torch makes an event at its first record
            event.record(torch.cuda.current_stream())
        stream = engine.driver.current()
        await aiogpu.synchronize()
        slow(20)
        first.record(stream.native)
        point = engine.driver.record(stream)
        signal = aiogpu.current_runtime().reactor.pipe if way == "pipe" else engine.signal
        assert signal is not None
        notification = engine.driver.arm(point, signal)
        called.record(notification.native)  # behind the callback
        torch.cuda._sleep(1000)
        second.record(stream.native)
        begin = time.perf_counter()
        keep_gil(200_000)
        assert time.perf_counter() - begin > 0.15
        await aiogpu.synchronize()
        called.synchronize()
        engine.driver.disarm(notification)
        engine.driver.recycle(point)

    run_asyncio(main)
    assert first.elapsed_time(second) < 5, f"the stream stood still for {first.elapsed_time(second):.1f} ms"
    assert first.elapsed_time(called) < 5, f"the callback took {first.elapsed_time(called):.1f} ms to run"


@asynchronous
@unsanitized
def test_a_blocked_loop_does_not_delay_work_that_is_queued(
    run_asyncio: Loop, slow: Slow, engine: Engine
) -> None:
    """C33: an awaited point in the middle, and a loop that is busy elsewhere when it is reached."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    @aiogpu.task
    async def main() -> None:
        one = torch.ones((), device="cuda")
        begin.record(torch.cuda.current_stream())
        slow(20)
        operation = aiogpu.item(one)
        before = aiogpu.stats().notifications
        while aiogpu.stats().notifications == before:  # until the reactor sleeps, with this stream armed
            await tick()
        slow(20)
        end.record(torch.cuda.current_stream())
        time.sleep(0.3)  # noqa: ASYNC251 - the loop stands still; the device must not
        assert await operation == 1

    run_asyncio(main)
    assert begin.elapsed_time(end) < 55, f"40 ms of queued work took {begin.elapsed_time(end):.1f} ms"


@asynchronous
@unsanitized
def test_awaits_on_other_streams_do_not_slow_a_stream_down(run_asyncio: Loop, slow: Slow) -> None:
    """C33: 1000 launches, with and without 10 tasks that await beside them: within 10 %."""

    @aiogpu.task
    async def thousand() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream()
        slow(25)  # all launches are queued before the first one runs: their cost on the host is left out
        begin.record(stream)
        for _ in range(980):
            slow(0.02)
        end.record(stream)
        queued_in_time = not begin.query()
        while not end.query():
            await anyio.sleep(0.001)
        return begin.elapsed_time(end) if queued_in_time else float("inf")

    running = [True]

    @aiogpu.task
    async def awaiter() -> None:
        while running:
            slow(2)
            await aiogpu.synchronize()

    async def main() -> tuple[float, float]:
        alone = min([await thousand() for _ in range(4)])
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(awaiter)
            await anyio.sleep(0.02)
            # More tasks than streams share, in order: the busy ones must not be on this task's stream.
            beside = min([await other() for _ in range(4)])
            running.clear()
        return alone, beside

    other = aiogpu.task(priority=-1)(thousand.__wrapped__)  # type: ignore[attr-defined]
    alone, beside = run_asyncio(main)
    assert alone != float("inf"), "too slow a machine: 980 launches took longer than 25 ms"
    assert beside < 1.10 * alone, f"1000 launches: {alone:.2f} ms alone, {beside:.2f} ms beside 10 awaits"
