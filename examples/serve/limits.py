"""Untrusted input: everything is checked against what is declared here before anything is allocated for it.

A refusal is a status and one line of reason. No pickle anywhere; nothing a client sends is executed,
imported or used as a size.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np

from model import DARKEST, SIDE

PIXELS = SIDE * SIDE


class Refused(Exception):
    """`status`, and one line for the client."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """What a request may be. Sizes in bytes, times in seconds."""

    json_bytes: int = 16 * 1024
    batch_items: int = 256
    body_seconds: float = 5.0  # for the whole body, however many pieces it comes in
    prompt_characters: int = 1000
    characters: int = 2000
    timeout: float = 10.0  # for an answer of the batcher


LIMITS = Limits()


async def read_body(
    stream: AsyncIterable[bytes], headers: Mapping[str, str], most: int, seconds: float
) -> bytes:
    """The body of a request, at most `most` bytes in at most `seconds`.

    It is complete before the request asks for a place in a batch: a slow client holds nothing but its
    connection.
    """
    declared = headers.get("content-length", "0")
    # A server has checked that it is a number; who else calls this may not have.
    if not declared.isdecimal() or len(declared) > 18 or int(declared) > most:
        raise Refused(413, f"a body may have {most} bytes")
    parts, size = [], 0
    with anyio.move_on_after(seconds) as scope:
        async for part in stream:
            size += len(part)
            if size > most:
                raise Refused(413, f"a body may have {most} bytes")
            parts.append(part)
    if scope.cancelled_caught:
        raise Refused(408, f"the body did not come within {seconds:g} s")
    return b"".join(parts)


def digit_from_json(body: bytes) -> np.ndarray:
    """`{"pixels": [[...], ...]}`, 8 rows of 8 numbers from 0 to 16, as (8, 8) float32."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(422, "not JSON") from None
    rows = data.get("pixels") if isinstance(data, dict) else None
    if not isinstance(rows, list) or len(rows) != SIDE:
        raise Refused(422, f"pixels: {SIDE} rows are expected")
    if not all(isinstance(row, list) and len(row) == SIDE for row in rows):
        raise Refused(422, f"pixels: {SIDE} numbers in each row are expected")
    if not all(_is_shade(x) for row in rows for x in row):
        raise Refused(422, f"pixels: numbers from 0 to {DARKEST:g} are expected")
    return np.array(rows, dtype=np.float32)


def _is_shade(x: Any) -> bool:
    # NaN is JSON to Python, and is in no interval; True is an int to Python.
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= DARKEST


def digits_from_bytes(body: bytes, dtype: str, shape: str, most: int) -> np.ndarray:
    """`n` digits as raw bytes, declared by headers: `x-dtype: uint8`, `x-shape: n,8,8`. (n, 8, 8) uint8."""
    if dtype != "uint8":
        raise Refused(422, "x-dtype: uint8 is expected")
    sizes = shape.split(",")
    if len(sizes) != 3 or not all(size.strip().isdecimal() and len(size) <= 6 for size in sizes):
        raise Refused(422, f"x-shape: n,{SIDE},{SIDE} is expected")
    n, height, width = map(int, sizes)
    if (height, width) != (SIDE, SIDE) or n < 1:
        raise Refused(422, f"x-shape: n,{SIDE},{SIDE} is expected")
    if n > most:
        raise Refused(413, f"a batch may have {most} digits")
    if len(body) != n * PIXELS:
        raise Refused(422, f"the body has {len(body)} bytes, x-shape declares {n * PIXELS}")
    pixels = np.frombuffer(body, dtype=np.uint8).reshape(n, SIDE, SIDE)
    if pixels.max() > DARKEST:
        raise Refused(422, f"pixels from 0 to {DARKEST:g} are expected")
    return pixels


@dataclass(frozen=True)
class Wish:
    """What somebody wants to have written."""

    prompt: str
    characters: int
    temperature: float
    seed: int


def wish(prompt: str, characters: str, temperature: str, seed: str, limits: Limits) -> Wish:
    if not 1 <= len(prompt) <= limits.prompt_characters:
        raise Refused(422, f"prompt: 1 to {limits.prompt_characters} characters are expected")
    return Wish(
        prompt,
        _whole("characters", characters, 1, limits.characters),
        _between("temperature", temperature, 0.1, 2.0),
        _whole("seed", seed, 0, 2**31),
    )


def _whole(name: str, text: str, least: int, most: int) -> int:
    if not text.isdecimal() or len(text) > 10 or not least <= int(text) <= most:
        raise Refused(422, f"{name}: a whole number from {least} to {most} is expected")
    return int(text)


def _between(name: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise Refused(422, f"{name}: a number from {least} to {most} is expected")
    return value
