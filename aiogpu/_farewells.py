"""What the rooms above have open on an event loop, closed before its runtime is.

Law of this file: a runtime does not know who uses it. Whoever keeps something open between two awaits
registers one coroutine function here; it is given the loop's door, and whether the loop ends.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from ._loops import Door

__all__ = ["farewells", "say_farewell", "say_late_farewell"]

farewells: list[Callable[[Door, bool], Coroutine[Any, Any, None]]] = []


async def say_farewell(door: Door, *, ending: bool, grace: float) -> None:
    """Close what is open on a loop that still runs; after ``grace`` seconds its waits are cancelled."""
    with anyio.move_on_after(grace, shield=True):
        for farewell in farewells:
            await farewell(door, ending)


def say_late_farewell(door: Door) -> None:
    """The same when the loop is gone: up to the first wait."""
    for farewell in farewells:
        try:
            farewell(door, True).send(None)
        except StopIteration:
            pass
