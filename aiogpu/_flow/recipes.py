"""What a stage is before it runs, and how its arguments are checked.

Law of this file: plain data. A recipe can be run any number of times, on any loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Recipe", "is_async", "named", "whole"]


def is_async(fn: Callable[..., Any]) -> bool:
    """Is ``fn`` an ``async def``, or an object that is called like one?"""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


@dataclass(frozen=True)
class Recipe:
    """What a stage is, before it runs."""

    #: What users call it: ``map(decode)``.
    label: str
    #: Of one item; or, for a flow, of an async iterator of them.
    fn: Callable[[Any], Any]
    #: How many items are worked on at once.
    lanes: int = 1
    #: Results in the order of the items, or as completed.
    ordered: bool = True
    #: Lanes are aiogpu tasks.
    device_lanes: bool = False
    device: torch.device | None = None
    #: Results may be on a device, and unfinished: they are handed over with their stream order.
    hands_over: bool = True
    #: Of each lane: items whose work the device has not finished when the next one is started.
    run_ahead: int | None = None
    #: ``fn`` takes an iterator.
    flow: bool = False
    #: Where it stands: ``pipeline stage 2``, and the line that declared it.
    place: str = ""
    site: str = ""

    @property
    def name(self) -> str:
        """For messages: ``pipeline stage 2, map(decode), declared at app.py:12``."""
        declared = f"declared at {self.site}" if self.site else ""
        return ", ".join(filter(None, (self.place, self.label, declared)))


def named(what: Any) -> str:
    """How messages call a function."""
    if isinstance(what, str):
        return what
    return getattr(what, "__qualname__", None) or type(what).__qualname__


def whole(name: str, value: Any, least: int) -> int:
    """``value``, an int of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return value
