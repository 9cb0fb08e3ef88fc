"""Weights from safetensors files onto a device, and into a model.

Law of this file: whatever can be wrong with files, names and shapes is found before anything is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _IncompatibleKeys

from ._engine import normalize
from ._run_sync import run_sync
from ._safetensors import Entry, StrPath, find_shards, require_package, select
from ._synchronize import synchronize
from ._tensorstream import Bucket, Progress, TensorStream

__all__ = ["load_safetensors", "load_state_dict"]

Device = torch.device | str | int


def load_safetensors(
    path: StrPath | Iterable[StrPath],
    device: Device | None = None,
    *,
    dtype: torch.dtype | None = None,
    names: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> TensorStream:
    """Load the tensors of safetensors files, one after the other, while the next ones are on their way.

    ::

        async for name, tensor in aiogpu.load_safetensors("model.safetensors", "cuda"):
            state[name] = tensor            # complete, and the loop was never blocked

    Needs the ``safetensors`` package: ``pip install aiogpu[files]``. Files are mapped, never unpickled.

    Parameters
    ----------
    path:
        A ``.safetensors`` file, several of them, or a ``.safetensors.index.json`` whose shards are beside it.
        They must not change while they are being read.
    device:
        Where to; default: the task's device, else the runtime's. On the CPU, tensors are copies, too.
    dtype:
        Convert floating-point tensors to it, on the device, as ``nn.Module.to(dtype)`` does; others stay.
    names:
        Load only these.
    progress:
        Called with ``(bytes so far, bytes in all)``, of the files' own dtypes, after each tensor.

    Returns
    -------
    TensorStream
        An asynchronous iterator over ``(name, tensor)`` in the order of the files' bytes. At most 256 MiB,
        or two tensors, are under way or waiting to be consumed. Leaving the loop early, by ``break``, an
        exception or a cancellation, ends it: nothing more is read, what is in flight runs out, the
        files are closed.

    Raises
    ------
    ImportError
        At the call: the package is missing.
    TypeError
        At the call.
    ValueError
        Before the first tensor: a file is damaged, incomplete or no safetensors file; it has a dtype that
        this torch lacks; a name is missing, or in several files; the index does not fit its shards.
    OSError
        Before the first tensor: a file cannot be opened. Later: it cannot be read.
    torch.OutOfMemoryError, DeviceLostError, ...
        As from :func:`to_device`.
    """
    require_package()
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"load_safetensors(dtype=...) takes a torch.dtype, not {dtype!r}")
    if isinstance(names, str):
        raise TypeError(f"names is a list of names: write names=[{names!r}]")
    wanted = None if names is None else frozenset(names)
    where = None if device is None else normalize(device)

    def place(_: str, tensor: torch.Tensor) -> Bucket:
        return Bucket(where, dtype if tensor.is_floating_point() else None)

    return TensorStream(partial(_find, _paths(path), wanted), place, progress)


def _find(path: StrPath | list[StrPath], names: frozenset[str] | None) -> list[Entry]:
    return select(find_shards(path), names)


def _paths(path: Any) -> StrPath | list[StrPath]:
    if isinstance(path, str | os.PathLike):
        return path
    try:
        paths = list(path)
    except TypeError:
        raise TypeError(f"path is a file's name, or a list of names, not {path!r}") from None
    for each in paths:
        if not isinstance(each, str | os.PathLike):
            raise TypeError(f"path is a file's name, or a list of names; this one is {each!r}")
    return paths


async def load_state_dict(
    model: torch.nn.Module,
    path: StrPath | Iterable[StrPath],
    *,
    strict: bool = True,
    assign: bool = False,
    device: Device | None = None,
    progress: Progress | None = None,
) -> _IncompatibleKeys:
    """Load safetensors files into ``model``, while other coroutines run.

    ::

        await aiogpu.load_state_dict(model, "model.safetensors.index.json")

        with torch.device("meta"):                  # no memory for weights that are replaced anyway
            model = Model(config)
        await aiogpu.load_state_dict(model, path, assign=True, device="cuda")

    Names, shapes and files are checked first: a model that does not fit is left as it was. A device error, a
    read error or a cancellation later on leaves a model partly loaded, unless ``assign``. Nobody should use
    the model meanwhile. On return all weights are complete.

    Parameters
    ----------
    model:
        Its parameters and buffers may be on several devices. Tied weights may be in the files once.
    path, progress:
        As for :func:`load_safetensors`.
    strict:
        Refuse missing and unexpected names, as ``Module.load_state_dict``.
    assign:
        As there: the loaded tensors become the model's, with the files' dtypes, instead of being copied into
        its memory, which stays as it is until all have arrived. Needed for a model on the meta device.
    device:
        With ``assign``: where to; default: where the model's tensors are, and for meta ones the task's
        device, else the runtime's.

    Modules that take part in loading (hooks, a ``_load_from_state_dict`` of their own, tensor subclasses) get
    all tensors at once, by ``model.load_state_dict``: what does not fit is found by it, and without
    ``assign`` the device holds them twice meanwhile.

    Returns
    -------
    NamedTuple
        ``missing_keys`` and ``unexpected_keys``, as ``Module.load_state_dict``.

    Raises
    ------
    RuntimeError
        As ``Module.load_state_dict``: names that are missing or unexpected (``strict``), shapes that differ.
    ValueError
        ``device`` without ``assign``; a meta model without ``assign``; and as :func:`load_safetensors`, as
        all the rest.
    """
    require_package()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"load_state_dict() loads into a torch.nn.Module, not a {type(model).__name__}")
    if device is not None and not assign:
        raise ValueError(
            "load_state_dict(device=...) is for tensors that replace the model's: pass assign=True, or "
            "move the model first with `await aiogpu.to_device(model, device)`"
        )
    where = None if device is None else normalize(device)
    entries = await run_sync(_find, _paths(path), None, abandon_on_cancel=True)
    fit = await run_sync(_Fit, model, entries, where, assign)
    fit.check(strict)
    stream = TensorStream(partial(fit.wanted, entries), fit.place, progress)
    del entries  # the stream closes the files
    async with stream:
        if fit.plain and not assign:
            async for name, tensor in stream:
                if tensor.device.type == "cpu":  # where copying keeps the thread busy
                    await run_sync(fit.put, name, tensor)
                else:
                    fit.put(name, tensor)
            found = _IncompatibleKeys(fit.missing, fit.unexpected)
        else:
            found = await fit.hand_over({name: tensor async for name, tensor in stream}, strict, assign)
    for settled in fit.devices:
        await synchronize(torch.cuda.current_stream(settled) if settled.type == "cuda" else None)
    return found


class _Fit:
    """How a model and the tensors of files go together. Made in a worker thread: models may be large."""

    def __init__(
        self, model: torch.nn.Module, entries: list[Entry], device: torch.device | None, assign: bool
    ) -> None:
        self._model = model
        self._device = device
        self.own: dict[str, Any] = model.state_dict(keep_vars=True)
        tensors = [x for x in self.own.values() if isinstance(x, torch.Tensor)]
        self.plain = _is_plain(model, self.own)
        self.devices = {tensor.device for tensor in tensors if not tensor.is_meta}
        if not assign and any(tensor.is_meta for tensor in tensors):
            raise ValueError(
                "the model has tensors on the meta device, which nothing can be copied into: pass assign=True"
            )
        shapes = {entry.name: entry.shape for entry in entries}
        #: Names that the files lack -> another name of the very same tensor that they have.
        self.tied = self._find_tied(shapes)
        optional = {
            f"{prefix}num_batches_tracked"  # as in torch: files may be older than this buffer
            for prefix, module in _named_modules(model)
            if isinstance(module, _NormBase)
        }
        self.missing = [x for x in self.own if x not in shapes and x not in self.tied and x not in optional]
        self.unexpected = [name for name in shapes if name not in self.own]
        self._misfits = [
            (name, tuple(self.own[name].shape), shape)
            for name, shape in shapes.items()
            if isinstance(self.own.get(name), torch.Tensor) and tuple(self.own[name].shape) != shape
        ]

    def _find_tied(self, shapes: dict[str, Any]) -> dict[str, str]:
        there = {id(tensor): name for name, tensor in self.own.items() if name in shapes}
        lacking = (name for name in self.own if name not in shapes)
        return {name: there[id(self.own[name])] for name in lacking if id(self.own[name]) in there}

    def check(self, strict: bool) -> None:
        """Raise what ``Module.load_state_dict`` would, before anything is loaded."""
        if not self.plain:
            return  # hooks may rename, split and add: only the modules themselves can tell
        wrong = []
        if strict and self.missing:
            wrong.append(f"Missing key(s) in state_dict: {_listed(self.missing)}.")
        if strict and self.unexpected:
            wrong.append(f"Unexpected key(s) in state_dict: {_listed(self.unexpected)}.")
        wrong += [
            f"size mismatch for {name}: the file has {list(theirs)}, the model {list(ours)}."
            for name, ours, theirs in self._misfits
        ]
        if wrong:
            lines = "\n\t".join(wrong)
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self._model).__name__}; nothing was loaded"
                f"{' (strict=False allows missing and unexpected keys)' if strict else ''}:\n\t{lines}"
            )

    def wanted(self, entries: list[Entry]) -> list[Entry]:
        return [entry for entry in entries if entry.name in self.own or not self.plain]

    def place(self, name: str, _: torch.Tensor) -> Bucket:
        ours = self.own.get(name)
        if self._device is None and isinstance(ours, torch.Tensor) and not ours.is_meta:
            return Bucket(ours.device, None)
        return Bucket(self._device, None)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Into the memory that the model has."""
        with torch.no_grad():
            self.own[name].copy_(tensor)

    async def hand_over(
        self, state: dict[str, torch.Tensor], strict: bool, assign: bool
    ) -> _IncompatibleKeys:
        """All have arrived: let the modules take them."""
        self.devices |= {tensor.device for tensor in state.values()}
        for name, other in self.tied.items():
            ours = self.own[name]
            if assign and isinstance(ours, torch.nn.Parameter):  # the same object twice stays tied
                state[other] = torch.nn.Parameter(state[other], requires_grad=ours.requires_grad)
            state[name] = state[other]
        load = partial(self._model.load_state_dict, state, strict=strict, assign=assign)
        found = await run_sync(load)
        unexpected = self.unexpected if self.plain else found.unexpected_keys
        return _IncompatibleKeys(found.missing_keys, unexpected)


def _named_modules(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules(remove_duplicate=False):
        yield f"{name}." if name else "", module


def _is_plain(model: torch.nn.Module, own: dict[str, Any]) -> bool:
    """Is loading nothing but copying tensors of equal names?"""
    return all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in own.values()) and all(
        map(_loads_plainly, model.modules())
    )


def _loads_plainly(module: torch.nn.Module) -> bool:
    base, cls = torch.nn.Module, type(module)
    return (
        cls._load_from_state_dict in (base._load_from_state_dict, _NormBase._load_from_state_dict)
        and cls._save_to_state_dict is base._save_to_state_dict
        and cls.load_state_dict is base.load_state_dict
        and cls.state_dict is base.state_dict
        and not module._load_state_dict_pre_hooks
        and not module._load_state_dict_post_hooks
        and not module._state_dict_hooks
        and not module._state_dict_pre_hooks
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")
