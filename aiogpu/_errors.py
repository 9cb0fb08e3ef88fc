"""What can go wrong, whose fault it is, and what to do.

Law of this file: an error class carries the blame, its message carries the remedy. Misuse raises the
built-in ``TypeError``/``ValueError``/``RuntimeError``; running out of memory stays torch's own exception;
cancellation is never wrapped. Only what a caller may want to tell apart has a class here.
"""

from __future__ import annotations

import copy

import anyio
import torch

__all__ = [
    "AiogpuError",
    "CaptureError",
    "ClosedError",
    "DeviceError",
    "DeviceLostError",
    "OverloadedError",
    "is_out_of_memory",
]

#: How others than torch's allocator, which has a class for it, say that they got no device memory.
_NO_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class AiogpuError(Exception):
    """Base of every error that aiogpu itself defines."""


class DeviceError(AiogpuError, RuntimeError):
    """The device reported an error for work that was submitted to it.

    Device errors are asynchronous: the operation that raises may only be the first one that *looked*
    after earlier work failed. The message names the oldest operations that were pending.
    """


class DeviceLostError(DeviceError):
    """The device's context is broken for good (an illegal access, a device-side assert, ...).

    CUDA calls such an error *sticky*: every later call in this process fails as well. Nothing in the
    process can repair it; restart the process. ``__cause__`` is the first error that was seen.
    """


class CaptureError(AiogpuError, RuntimeError):
    """An aiogpu call was made while the current stream is being captured into a CUDA graph.

    Raised before the stream is touched, so the capture stays valid.
    """


class OverloadedError(AiogpuError):
    """There is no room for this call now: it was refused at once, and nothing was started for it.

    ``retry_after``: an estimate, in seconds, of when there may be room. Try again then, or shed the load;
    an HTTP service answers 429 or 503 with ``Retry-After``.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClosedError(AiogpuError, anyio.ClosedResourceError):
    """What this call was made to takes no more calls: it is closed, or being closed.

    Nothing is wrong with the call: another process, or this one once it has started again, would take it. An
    HTTP service answers 503.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Has device memory run out, whoever noticed?

    cuBLAS's and cuDNN's handles and workspaces, and launches that need local memory, report it as a plain
    ``RuntimeError`` (torch's ``aten/src/ATen/cuda/Exceptions.h`` and ``c10/cuda/CUDAException.h``).
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def bare(error: BaseException) -> BaseException:
    """``error`` without traceback and context: their frames would keep tensors alive.

    Not even a user's innermost frame can stay: it leads back to the frames that called it.
    """
    error.__context__ = None
    return error.with_traceback(None)


def fresh(error: BaseException) -> BaseException:
    """A copy of ``error`` for one waiter.

    An operation may be awaited by many tasks. Raising one exception object in each of them would splice
    their tracebacks together and let one waiter's ``raise ... from`` change what the others see.
    """
    try:
        twin = copy.copy(error)
    except Exception:
        twin = _without_constructor(error)
    if type(twin) is not type(error):
        return error
    if hasattr(error, "__notes__"):
        twin.__notes__ = [*error.__notes__]  # a list of its own, so that add_note() stays with one waiter
    twin.__cause__ = error.__cause__
    twin.__suppress_context__ = True
    return twin.with_traceback(None)


def _without_constructor(error: BaseException) -> BaseException:
    """A copy of an exception whose constructor does not take its own ``args``."""
    try:
        twin = type(error).__new__(type(error), *error.args)
        twin.__dict__.update(error.__dict__)
    except Exception:
        return error
    return twin
