"""What the runtime tells whoever watches it: one list of observers per kind of event.

Law of this file: the runtime does not know who listens, and nobody who does not listen pays: an emitter looks
whether its list is empty, and does nothing else then. Observers are called in the thread where the
thing happens, must be quick and thread-safe, and what they raise is logged and dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["emit", "operation_observers", "request_observers", "wakeup_observers"]

log = logging.getLogger("aiogpu")

#: ``observer(what, nbytes, seconds, error)``: a transfer is over. ``what`` is the call's name, ``seconds``
#: the time since the call, ``error`` what it failed with. From any thread.
operation_observers: list[Callable[[str, int, float, BaseException | None], object]] = []

#: ``observer(seconds)``: a sleeping loop was woken by the device, so long after the notifier's thread had
#: heard of it. On the loop's thread.
wakeup_observers: list[Callable[[float], object]] = []

#: ``observer(status, seconds)``: an HTTP request is over (:mod:`aiogpu.asgi`); 499: its client had gone,
#: 500: an error went on to the server. On the loop's thread.
request_observers: list[Callable[[int, float], object]] = []


def emit(observers: list[Callable[..., object]], *event: Any) -> None:
    """Tell every one of ``observers``."""
    for observer in tuple(observers):
        try:
            observer(*event)
        except Exception:
            log.exception("aiogpu: an observer has failed: %r", observer)
