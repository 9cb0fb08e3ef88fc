"""Virtual time for programs with several tasks: it passes only while nobody has anything else to do.

For programs without threads. With ``Runtime(spin=math.inf)`` the loop asks the device in every iteration, so
after some iterations in which nothing was submitted, nothing will be before time goes on.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel

import aiogpu
from aiogpu.testing import VirtualDevice

__all__ = ["timed"]

#: Loop iterations after which a program without new submissions is taken to be waiting for the device.
QUIET = 60


async def timed(device: VirtualDevice, program: Callable[[], Awaitable[Any]], tick: float) -> float:
    """Virtual seconds that ``program`` takes. Durations should be multiples of ``tick``."""
    ended = False

    async def run() -> None:
        nonlocal ended
        await program()
        ended = True

    async def pass_time() -> None:
        quiet, submitted = 0, -1
        while not ended:
            await anyio.lowlevel.checkpoint()
            quiet = quiet + 1 if submitted == device.submitted else 0
            submitted = device.submitted
            if quiet >= QUIET:
                device.advance(tick)
                quiet = 0

    async with aiogpu.Runtime(spin=math.inf):
        start = device.now
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            group.start_soon(pass_time)
        took = device.now - start
        device.run_all()
    return took
