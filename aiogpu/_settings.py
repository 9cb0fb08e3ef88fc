"""Reading settings: from the environment, and from arguments that may be wrong.

Law of this file: a setting that cannot be meant is refused with its name and what it must be.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["at_least", "from_environment"]

R = TypeVar("R")


def from_environment(name: str, kind: Callable[[str], R], default: R) -> R:
    """``AIOGPU_<name>`` as a ``kind``, or ``default`` where it is not set."""
    text = os.environ.get(f"AIOGPU_{name}")
    if text is None:
        return default
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"AIOGPU_{name}={text!r} is not a valid {kind.__name__}") from None


def at_least(least: Any, name: str, given: Any, default: Any) -> Any:
    """``given``, or ``default`` for ``None``: a number that is not below ``least``."""
    value = default if given is None else given
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise TypeError(f"{name} is a number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return value
