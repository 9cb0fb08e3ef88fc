"""Torch's race detector for CUDA (``TORCH_CUDA_SANITIZER=1``) in a process with many threads.

Law of this file: it changes nothing about what the sanitizer knows or says, only that its books are kept by
one thread at a time.

The sanitizer numbers all launches of the process, in Python, without a lock: it takes a number, looks at the
stack for a millisecond, and enters *the present* number for the access. If another thread has launched
something meanwhile (a batch made by ``torch.full`` in a loader's thread is enough: every operation counts),
no later wait reaches that number, and the next ordered access is reported as a race.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["enabled", "serialize", "serialize_books"]

#: Where the sanitizer notes who is ordered after whom.
_NOTES = (
    "record_state",
    "stream_wait_for_event",
    "all_streams_wait_for_event",
    "all_streams_wait_for_stream",
    "sync_all_streams",
    "create_stream",
    "create_event",
    "delete_event",
)


def enabled() -> bool:
    """Is the sanitizer on, by its environment variable or by a call?"""
    if os.environ.get("TORCH_CUDA_SANITIZER") == "1":
        return True
    module = getattr(torch.cuda, "_sanitizer", None)
    return bool(module is not None and module.cuda_sanitizer.enabled)


def serialize() -> None:
    """Have the sanitizer of this process enter one launch, or one wait, after the other."""
    module = getattr(torch.cuda, "_sanitizer", None)
    dispatch = getattr(getattr(module, "cuda_sanitizer", None), "dispatch", None)
    handler = getattr(dispatch, "event_handler", None)
    if handler is not None:
        serialize_books(handler)


def serialize_books(handler: Any) -> None:
    """The same for one ``EventHandler`` of torch's; a second time it does nothing."""
    if hasattr(handler, "_aiogpu_lock") or not hasattr(handler, "_handle_kernel_launch"):
        return  # done already, or a torch that works in another way
    # Re-entrant: entering a launch allocates, and a garbage collection may free tensors and record events.
    lock = handler._aiogpu_lock = threading.RLock()

    def locked(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return fn(*args, **kwargs)

        return call

    handler._handle_kernel_launch = locked(handler._handle_kernel_launch)
    syncs = getattr(handler, "syncs", None)
    for name in _NOTES:
        if hasattr(syncs, name):
            setattr(syncs, name, locked(getattr(syncs, name)))
