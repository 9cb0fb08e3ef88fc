"""``to_device``, ``to_host``, ``copy_`` and ``item``: the calls, their checks, and who carries them out.

Law of this file: a call checks everything that can be refused, then starts the transfer; it submits at most
a few small copies itself, and neither blocks nor allocates much. What goes wrong after the checks is
raised where the operation is awaited.
"""

from __future__ import annotations

from collections.abc import Callable
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
from .peers import PeerCopy
from .plan import Plan, Walking
from .single import download, is_ordinary, own, upload
from .tree import Tree, flatten, flatten_some, tensors_of
from .uploads import Upload, UploadInto

if TYPE_CHECKING:
    import numpy

__all__ = ["copy_", "item", "to_device", "to_host"]

T = TypeVar("T")

#: Parts of containers that a call looks at: less than a millisecond of the loop's thread.
PARTS_AT_ONCE = 500
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
        A tensor of any layout (strided, sparse, nested, quantized, subclasses) or a numpy array, or any
        nesting of dicts, lists, tuples, sets, deques, NamedTuples, dataclasses (also of attrs and
        pydantic), ``SimpleNamespace`` and classes that were given to :func:`~aiogpu.register` or to
        ``torch.utils._pytree``. Container types are kept exactly, and no ``__init__`` or ``__post_init__``
        runs again. What appears twice is moved once, and shared in the result. Of an expanded view only the
        real elements are copied, and spread out on the device. An ``nn.Module``, or an object with a
        ``.to`` of its own, moves itself, off the event loop. Everything else passes by identity, as do
        tensors that are on the device already; an object of another class that holds tensors does so with
        a warning, once per class.
    device:
        Default: the task's device, else the runtime's.
    dtype:
        Convert every tensor, on the device; of sparse and nested ones the values, not the indices.

    Returns
    -------
    Operation
        Its result is complete when the await returns, and usable on any stream. **The source must not
        be written before that** (debug mode checks; sources up to 64 KiB are snapshots). A leaf that
        requires grad gives a leaf that requires grad, a Parameter a Parameter. The results are ordinary
        tensors also inside ``torch.inference_mode()``. Without waiting for the device:
        :meth:`Operation.ordered`.

        A tensor on another GPU is copied from there, behind what that device's current stream held at the
        call; one that is there already and is only converted never leaves the device.

    **Many small leaves** (of a call with more than 16, those up to 64 KiB) are copied together. Their results
    share memory then, up to 1 MiB of it: ``clone()`` what shall outlive the others, and what shall be
    resized in place. Each begins on a multiple of 256 bytes, and has a version counter of its own. Of
    containers with more than 500 parts the call looks at the first 500, a thread at the others: the
    containers, too, must not be changed before the await then, and what is refused among the others
    is raised by it.

    Raises
    ------
    ValueError, TypeError
        Before any work, for what cannot be moved, naming its place (``data['images'][3].mask``): unknown
        devices, meta tensors, tensors that require grad and are not leaves, or have a tangent (forward-mode
        autograd), oneDNN's layout, quantized
        tensors with several elements a byte, numpy arrays with a mask or a dtype that torch lacks,
        conversions that torch lacks, storages, data that contains itself.
    CaptureError
        Inside a CUDA-graph capture.
    DeviceLostError
        At once when the device is lost.
    torch.OutOfMemoryError
        Where it is awaited. Before that the transfer has waited, on a thread and at most 10 seconds, until
        what was in flight on the device had let go of its memory, and has been tried once more.
    """
    runtime = current_runtime()
    _check_dtype("to_device", dtype)
    _refuse_operation("to_device", data)
    where = _device(runtime, device)
    engine = runtime.engine_now(where)
    _refuse_capture("to_device", engine)
    if engine is not None and dtype is None and is_ordinary(data):
        short = upload(runtime, engine, data)
        if short is not None:
            return short

    def stays(tensor: torch.Tensor) -> bool:
        # On the CPU as the device, a copy is a copy, so that the program means the same without a GPU.
        same = where is not None and where.type != "cpu" and tensor.device == where
        return same and (dtype is None or tensor.dtype == dtype)

    tree, more = _begin(runtime, data, "to_device", dtype)
    leaves = Plan(tree, stays)
    walking = None if more is None else Walking(tree, more, lambda tree: Plan(tree, stays))
    operation: Operation[Any] = Operation("to_device", runtime.reactor)
    own(operation)
    _debug(runtime, operation, leaves)
    Upload(runtime, leaves, operation, where, dtype, walking).start(engine)
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
        where page-locking buys nothing. Many small ones are gathered on the device and copied together, as
        :func:`to_device` says, and share memory (page-locked, too) up to 1 MiB of it.

    Raises
    ------
    As :func:`to_device`. ``ValueError`` for ``out`` of another structure or shape, or read-only.
    """
    runtime = current_runtime()
    _check_dtype("to_host", dtype)
    _refuse_operation("to_host", data)
    if dtype is None and out is None and is_ordinary(data):
        engine = _engine_of(runtime, data, "to_host")
        short = None if engine is None else download(runtime, engine, data)
        if short is not None:
            return short
    tree, more = _begin(runtime, data, "to_host", dtype, whole=out is not None)
    engine, on_cpu = _source_engine(runtime, tree)
    _refuse_capture("to_host", engine)

    def stays(tensor: torch.Tensor) -> bool:
        here = tensor.device.type == "cpu" and not on_cpu and out is None
        return here and (dtype is None or tensor.dtype == dtype)

    def make(tree: Tree[Any]) -> Plan[Any]:
        _one_device(tree)  # also of what was not seen yet when the engine was chosen
        return Plan(tree, stays, detached=True)

    walking = None if more is None else Walking(tree, more, make)
    leaves = Plan(tree, stays, detached=True)
    hosts, wrap = (None, None) if out is None else destinations(tree, leaves, out, dtype)
    operation: Operation[Any] = Operation("to_host", runtime.reactor, to_host=True)
    own(operation)
    _debug(runtime, operation, leaves)
    Download(runtime, leaves, operation, dtype=dtype, out=hosts, wrap=wrap, walking=walking).start(engine)
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
    if is_ordinary(tensor):
        engine = _engine_of(runtime, tensor, "item")
        short = None if engine is None else download(runtime, engine, tensor, "item")
        if short is not None:
            return short
    tree = flatten(tensor, verb="item")
    engine, _ = _source_engine(runtime, tree)
    _refuse_capture("item", engine)
    leaves = Plan(tree, _no)
    operation: Operation[Any] = Operation("item", runtime.reactor, to_host=True)
    own(operation)
    Download(runtime, leaves, operation, wrap=lambda hosts, _: hosts[0].item()).start(engine)
    return operation


def copy_(dst: torch.Tensor, src: torch.Tensor) -> Operation[torch.Tensor]:
    """Start ``dst.copy_(src)`` between any two devices, after the current stream's work so far: between two
    GPUs, after that of the current streams of both.

    ``src`` is broadcast to ``dst``'s shape and converted to its dtype, as by ``Tensor.copy_``; autograd
    does not see the copy. The result is ``dst``. Neither may be written, nor ``dst`` read, before the
    await returns; after a cancellation ``dst`` is undefined until ``operation.done()``.

    Raises
    ------
    TypeError, ValueError
        Before any work: not two tensors, shapes that do not broadcast, unsupported layouts, a ``dst``
        whose elements overlap in memory.
    torch.OutOfMemoryError
        Where it is awaited, after a second try, as with :func:`to_device`: for ``dst`` of another dtype or
        order, the bytes land in memory of their own first.
    """
    for name, tensor in (("dst", dst), ("src", src)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"copy_() takes two tensors; {name} is a {type(tensor).__name__}. For containers use "
                "`to_device(data)` or `to_host(data, out=...)`"
            )
    runtime = current_runtime()
    down = dst.device.type == "cpu" and src.device.type != "cpu"
    if is_ordinary(src):
        engine = runtime.engine_now(src.device if down else dst.device)
        _refuse_capture("copy_", engine)
        if engine is None:
            short = None
        elif down:
            short = download(runtime, engine, src, "copy_", dst)
        else:
            short = upload(runtime, engine, src, dst)
        if short is not None:
            return short
    flatten(dst, verb="copy_")  # for its refusals
    _check_destination(dst, src)
    home = src.device if down else dst.device
    where = _device(runtime, home)
    engine = runtime.engine_now(where)
    _refuse_capture("copy_", engine)
    flatten(src, verb="copy_")  # for its refusals
    same = dst.shape == src.shape
    wide = src if same or not down else src.detach().expand(dst.shape)
    leaves = Plan(flatten(wide, verb="copy_", dtype=dst.dtype if down else None), _no)
    operation: Operation[Any] = Operation("copy_", runtime.reactor, to_host=down)
    own(operation)
    _debug(runtime, operation, leaves)
    if down:
        # Broadcast and converted on the device: in host memory it would take time, and a thread.
        Download(runtime, leaves, operation, dtype=dst.dtype, out=[dst], wrap=lambda *_: dst).start(engine)
    elif src.device.type == "cpu":
        UploadInto(runtime, leaves, operation, dst).start(engine)
    elif src.device != dst.device:
        PeerCopy(runtime, leaves, operation, dst, src).start(engine)
    else:
        _copy_within(runtime, operation, dst, src, engine)
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
    places = zip(dst.shape, dst.stride(), strict=True)
    if dst.numel() and any(size > 1 and stride == 0 for size, stride in places):
        raise ValueError("copy_() needs a dst whose elements have memory of their own: use dst.clone()")


def _copy_within(
    runtime: Runtime,
    operation: Operation[Any],
    dst: torch.Tensor,
    src: torch.Tensor,
    engine: Engine | None,
) -> None:
    """Within one device, on the current stream."""

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
        if engine is not None:
            stream = engine.driver.current()
            point = runtime.watch(engine, stream, engine.driver.record(stream), landed, (dst, src))
            operation.submitted(dst, (stream, point))
        else:
            operation.submitted()
            # The copy belongs onto the caller's stream now; what watches over it takes time to make.
            native, event = torch.cuda.current_stream(dst.device), torch.cuda.Event()
            event.record(native)
            starter().submit(partial(watch_first, native, event))
    except BaseException as error:
        operation.fail(error if engine is None else engine.blame(error))


# -- to_host ---------------------------------------------------------------------------------------


def _one_device(tree: Tree[Any]) -> set[torch.device]:
    """The device that the data is on, if any."""
    devices = tree.devices | {t.device for mover in tree.movers for t in tensors_of(mover)}
    devices = {device for device in devices if device.type != "cpu"}
    if len(devices) > 1:
        raise ValueError(
            f"data is on several devices ({', '.join(sorted(map(str, devices)))}): call this once for "
            "each, and await aiogpu.gather(...)"
        )
    return devices


def _source_engine(runtime: Runtime, tree: Tree[Any]) -> tuple[Engine | None, bool]:
    """The engine of the device that the data is on, and whether that device is the CPU."""
    devices = _one_device(tree)
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


def _begin(
    runtime: Runtime, data: Any, verb: str, dtype: torch.dtype | None, *, whole: bool = False
) -> tuple[Tree[Any], Callable[[int], bool] | None]:
    """Take ``data`` apart, as far as the loop's thread has time for it; see :func:`flatten_some`.

    What is left to a thread must be like what has been seen, which decides about streams: tensors, and
    nothing that moves itself. Debug mode wants to know all sources now.
    """
    tree, more = flatten_some(data, verb=verb, dtype=dtype, parts=PARTS_AT_ONCE)
    if more is not None and (whole or runtime.debug or tree.movers or not tree.tensors):
        while not more(PARTS_AT_ONCE):
            pass
        more = None
    return tree, more


def _engine_of(runtime: Runtime, tensor: torch.Tensor, verb: str) -> Engine | None:
    """The engine of the tensor's device (of host memory: the default one), if it is ready to be used."""
    engine = runtime.engine_now(tensor.device if tensor.is_cuda else _device(runtime, None))
    _refuse_capture(verb, engine)
    return engine


def _refuse_operation(verb: str, data: Any) -> None:
    if isinstance(data, Operation):
        raise TypeError(f"{verb}() was given an operation, not its result: {verb}(await ...)")


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


def _debug(runtime: Runtime, operation: Operation[Any], leaves: Plan[Any]) -> None:
    """Debug mode: see whether a source is written before the transfer has ended."""
    if not runtime.debug:
        return
    versions = [(tensor, tensor._version) for tensor in leaves.plain if not tensor.is_inference()]
    operation._checks = lambda: any(tensor._version != version for tensor, version in versions)
