"""``to_device``, ``to_host``, ``copy_`` and ``item``: the calls, their checks, and who carries them out.

Law of this file: a call checks everything that can be refused, then starts the transfer; it submits at most
a few small copies itself, and neither blocks nor allocates much. What goes wrong after the checks is
raised where the operation is awaited.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from .._engine import Engine, normalize
from .._errors import CaptureError
from .._operation import Operation
from .._runtime import Runtime, current_runtime, starter
from .._tasks import current_task
from .downloads import Download
from .out import destinations
from .plan import Plan
from .tree import Tree, flatten, tensors_of
from .uploads import Upload, UploadInto

if TYPE_CHECKING:
    import numpy

__all__ = ["copy_", "item", "to_device", "to_host"]

T = TypeVar("T")
Device = torch.device | str | int


@overload
def to_device(
    data: numpy.ndarray[Any, Any], device: Device | None = None, *, dtype: torch.dtype | None = None
) -> Operation[torch.Tensor]: ...


@overload
def to_device(data: T, device: Device | None = None, *, dtype: torch.dtype | None = None) -> Operation[T]: ...


def to_device(data: Any, device: Device | None = None, *, dtype: torch.dtype | None = None) -> Any:
    """Start copying ``data`` to a device; ``await`` the result for the copy.

    ::

        x = await aiogpu.to_device(batch)

    Parameters
    ----------
    data:
        A tensor or numpy array of any shape, or any nesting of dicts, lists, tuples, NamedTuples and
        dataclasses of them. Container types are kept exactly. An ``nn.Module``, or an object with a
        ``.to`` of its own, moves itself, off the event loop. Everything else passes by identity, as do
        tensors that are on the device already.
    device:
        Default: the task's device, else the runtime's.
    dtype:
        Convert every tensor, on the device.

    Returns
    -------
    Operation
        Its result is complete when the await returns, and usable on any stream. **The source must not
        be written before that** (debug mode checks; sources up to 64 KiB are snapshots). A leaf that
        requires grad gives a leaf that requires grad, a Parameter a Parameter. The results are ordinary
        tensors also inside ``torch.inference_mode()``.

    Raises
    ------
    ValueError, TypeError
        Before any work, for what cannot be moved: unknown devices, meta tensors, tensors that require
        grad and are not leaves, sparse, nested and quantized layouts, numpy dtypes that torch lacks.
    CaptureError
        Inside a CUDA-graph capture.
    DeviceLostError
        At once when the device is lost.
    torch.OutOfMemoryError
        Where it is awaited.
    """
    runtime = current_runtime()
    _check_dtype("to_device", dtype)
    where = _device(runtime, device)
    engine = runtime.engine_now(where)
    _refuse_capture("to_device", engine)

    def stays(tensor: torch.Tensor) -> bool:
        # On the CPU as the device, a copy is a copy, so that the program means the same without a GPU.
        same = where is not None and where.type != "cpu" and tensor.device == where
        return same and (dtype is None or tensor.dtype == dtype)

    leaves = Plan(flatten(data, verb="to_device"), stays)
    operation: Operation[Any] = Operation("to_device", runtime.reactor)
    _own(operation)
    _debug(runtime, operation, leaves)
    Upload(runtime, leaves, operation, where, dtype).start(engine)
    return operation


@overload
def to_host(
    data: numpy.ndarray[Any, Any], *, dtype: torch.dtype | None = None, out: Any = None
) -> Operation[torch.Tensor]: ...


@overload
def to_host(data: T, *, dtype: torch.dtype | None = None, out: Any = None) -> Operation[T]: ...


def to_host(data: Any, *, dtype: torch.dtype | None = None, out: Any = None) -> Any:
    """Start copying ``data`` to host memory, after the current stream's work so far.

    ::

        y = await aiogpu.to_host(logits)          # complete when it arrives; nobody blocked

    Parameters
    ----------
    data:
        As for :func:`to_device`. Tensors that are in host memory already pass as they are, detached.
    dtype:
        Convert every tensor, on the device, before the copy.
    out:
        Copy into these tensors (or writable numpy arrays) instead: the same nesting and shapes as
        ``data``. The result is ``out``. After a cancellation their content is undefined until
        ``operation.done()``.

    Returns
    -------
    Operation
        CPU tensors, detached from autograd, complete when the await returns. Results above 64 KiB are
        page-locked while the runtime's ``pinned_bytes`` last; smaller ones are in ordinary memory,
        where page-locking buys nothing.

    Raises
    ------
    As :func:`to_device`. ``ValueError`` for ``out`` of another structure or shape, or read-only.
    """
    runtime = current_runtime()
    _check_dtype("to_host", dtype)
    tree = flatten(data, verb="to_host")
    engine, on_cpu = _source_engine(runtime, tree)
    _refuse_capture("to_host", engine)

    def stays(tensor: torch.Tensor) -> bool:
        here = tensor.device.type == "cpu" and not on_cpu and out is None
        return here and (dtype is None or tensor.dtype == dtype)

    leaves = Plan(tree, stays, detached=True)
    hosts, wrap = (None, None) if out is None else destinations(tree, leaves, data, out, dtype)
    operation: Operation[Any] = Operation("to_host", runtime.reactor)
    _own(operation)
    _debug(runtime, operation, leaves)
    Download(runtime, leaves, operation, dtype=dtype, out=hosts, wrap=wrap).start(engine)
    return operation


def item(tensor: torch.Tensor) -> Operation[Any]:
    """Start reading a tensor of one element; ``await`` it for the Python number.

    ::

        loss = await aiogpu.item(loss)            # instead of loss.item(), which blocks

    Raises ``TypeError`` for what is no tensor, ``ValueError`` for more or fewer elements than one.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"item() takes a tensor, not a {type(tensor).__name__}")
    if tensor.numel() != 1:
        raise ValueError(
            f"item() takes a tensor of one element, not {tensor.numel()} (shape {tuple(tensor.shape)}): "
            "use `await aiogpu.to_host(tensor)`"
        )
    runtime = current_runtime()
    tree = flatten(tensor, verb="item")
    engine, _ = _source_engine(runtime, tree)
    _refuse_capture("item", engine)
    leaves = Plan(tree, _no)
    operation: Operation[Any] = Operation("item", runtime.reactor)
    _own(operation)
    Download(runtime, leaves, operation, wrap=lambda hosts, _: hosts[0].item()).start(engine)
    return operation


def copy_(dst: torch.Tensor, src: torch.Tensor) -> Operation[torch.Tensor]:
    """Start ``dst.copy_(src)`` between any two devices, after the current stream's work so far.

    ``src`` is broadcast to ``dst``'s shape and converted to its dtype, as by ``Tensor.copy_``; autograd
    does not see the copy. The result is ``dst``. Neither may be written, nor ``dst`` read, before the
    await returns; after a cancellation ``dst`` is undefined until ``operation.done()``.

    Raises
    ------
    TypeError, ValueError
        Before any work: not two tensors, shapes that do not broadcast, unsupported layouts, a ``dst``
        whose elements overlap in memory.
    """
    for name, tensor in (("dst", dst), ("src", src)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"copy_() takes two tensors; {name} is a {type(tensor).__name__}. For containers use "
                "`to_device(data)` or `to_host(data, out=...)`"
            )
    runtime = current_runtime()
    flatten(dst, verb="copy_")  # for its refusals
    _check_destination(dst, src)
    down = dst.device.type == "cpu" and src.device.type != "cpu"
    home = src.device if down else dst.device
    where = _device(runtime, home)
    engine = runtime.engine_now(where)
    _refuse_capture("copy_", engine)
    flatten(src, verb="copy_")  # for its refusals
    same = dst.shape == src.shape
    leaves = Plan(flatten(src if same or not down else src.detach().expand(dst.shape), verb="copy_"), _no)
    operation: Operation[Any] = Operation("copy_", runtime.reactor)
    _own(operation)
    _debug(runtime, operation, leaves)
    if down:
        # Broadcast and converted on the device: in host memory it would take time, and a thread.
        Download(runtime, leaves, operation, dtype=dst.dtype, out=[dst], wrap=lambda *_: dst).start(engine)
    elif src.device.type == "cpu":
        UploadInto(runtime, leaves, operation, dst).start(engine)
    else:
        _copy_across(runtime, operation, dst, src, engine)
    return operation


# -- copy_ -----------------------------------------------------------------------------------------


def _no(_: torch.Tensor) -> bool:
    return False


def _check_destination(dst: torch.Tensor, src: torch.Tensor) -> None:
    # Not torch.broadcast_shapes: its first call imports sympy, two seconds on the loop's thread.
    extra = len(dst.shape) - len(src.shape)
    fits = extra >= 0 and all(s in (1, d) for s, d in zip(src.shape, dst.shape[extra:], strict=True))
    if not fits:
        raise ValueError(
            f"copy_() cannot broadcast src of shape {tuple(src.shape)} to dst of shape {tuple(dst.shape)}"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(dst.shape, dst.stride(), strict=True)):
        raise ValueError("copy_() needs a dst whose elements have memory of their own: use dst.clone()")


def _copy_across(
    runtime: Runtime,
    operation: Operation[Any],
    dst: torch.Tensor,
    src: torch.Tensor,
    engine: Engine | None,
) -> None:
    """Device to device, on the current streams: torch orders both sides of a peer copy."""

    def landed(error: BaseException | None) -> None:
        if error is None:
            operation.complete(dst)
        else:
            operation.fail(error)

    def watch_first(native: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        try:
            engine = runtime.engine_blocking(normalize(dst.device))
            runtime.watch(engine, engine.driver.adopt(native), event, landed, (dst, src))
        except BaseException as error:
            operation.fail(error)

    try:
        with torch.inference_mode(dst.is_inference()), torch.no_grad():
            dst.copy_(src, non_blocking=True)
        operation.submitted()
        if engine is not None:
            stream = engine.driver.current()
            runtime.watch(engine, stream, engine.driver.record(stream), landed, (dst, src))
        else:
            # The copy belongs onto the caller's stream now; what watches over it takes time to make.
            native, event = torch.cuda.current_stream(dst.device), torch.cuda.Event()
            event.record(native)
            starter().submit(partial(watch_first, native, event))
    except BaseException as error:
        operation.fail(error if engine is None else engine.blame(error))


# -- to_host ---------------------------------------------------------------------------------------


def _source_engine(runtime: Runtime, tree: Tree[Any]) -> tuple[Engine | None, bool]:
    """The engine of the device that the data is on, and whether that device is the CPU."""
    reached = [*tree.tensors, *(t for mover in tree.movers for t in tensors_of(mover))]
    devices = {tensor.device for tensor in reached if tensor.device.type != "cpu"}
    if len(devices) > 1:
        raise ValueError(
            f"data is on several devices ({', '.join(sorted(map(str, devices)))}): call this once for "
            "each, and await aiogpu.gather(...)"
        )
    task = current_task()
    where = task.engine.device if task is not None else runtime.device_now()
    if devices:
        (where,) = devices
    elif where is None:
        where = torch.device("cpu")  # host data, and nobody has touched a GPU yet
    engine = runtime.engine_now(normalize(where))
    if engine is None and where.type == "cpu":
        engine = runtime.engine_blocking(where)  # the CPU's engine is a few objects
    return engine, where.type == "cpu"


# -- shared ----------------------------------------------------------------------------------------


def _check_dtype(verb: str, dtype: Any) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{verb}(dtype=...) takes a torch.dtype such as torch.float16, not {dtype!r}")


def _device(runtime: Runtime, device: Device | None) -> torch.device | None:
    if device is not None:
        if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
            raise TypeError(f"{device!r} is not a device: write 'cuda', 'cuda:0', 'cpu' or a torch.device")
        return normalize(device)
    task = current_task()
    return task.engine.device if task is not None else runtime.device_now()


def _refuse_capture(verb: str, engine: Engine | None) -> None:
    if engine is not None and engine.driver.capturing():
        raise CaptureError(
            f"aiogpu.{verb}() was called while the current stream is being captured into a CUDA graph: "
            "a host callback or a staging buffer would be captured with it. Copy into static inputs "
            "before the capture or before each replay."
        )


def _own(operation: Operation[Any]) -> None:
    """The task that starts a transfer ends after it."""
    task = current_task()
    if task is not None:
        operation._owner = task.operations
        task.operations.add(operation)


def _debug(runtime: Runtime, operation: Operation[Any], leaves: Plan[Any]) -> None:
    """Debug mode: see at the await whether a source was written in the meantime."""
    if not runtime.debug:
        return
    versions = [(tensor, tensor._version) for tensor in leaves.plain if not tensor.is_inference()]

    def check(finished: Operation[Any]) -> None:
        for tensor, version in versions:
            if tensor._version != version:
                frame = _caller()
                started = "{}:{}".format(*finished._site)
                raise RuntimeError(
                    f"a source of {finished._what}() (started at {started}) was written in place before "
                    f"the await at {frame}: the copy may hold a mixture. Await it first, or pass a clone."
                )

    operation._checks = check


def _caller() -> str:
    """The innermost coroutine frame outside aiogpu."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("aiogpu."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
