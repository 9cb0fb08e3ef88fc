"""The pieces of torch's thread-local state: how each is read, written and compared.

Law of this file: reading changes nothing, writing nothing but its piece. Whose modes are on a thread when,
is ``_torchstate``'s.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from operator import eq, is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _device as _device_module
from torch.utils import _python_dispatch as _dispatch_module

__all__ = [
    "ALL",
    "ALL_OFF",
    "MODES",
    "Modes",
    "default_autocast",
    "plain_inference",
    "read_all",
    "read_autograd",
    "read_modes",
    "same",
    "switch",
    "untouched",
]

_C: Any = torch._C
_autograd: Any = _C._autograd

_inference: Callable[[], bool] = _C.is_inference_mode_enabled
_deeper: Callable[[], int] = _C.autocast_increment_nesting
_shallower: Callable[[], int] = _C.autocast_decrement_nesting
_any_autocast: Callable[[], bool] = _C._is_any_autocast_enabled
_function_depth: Callable[[], int] = _C._len_torch_function_stack
_dispatch_depth: Callable[[], int] = _C._len_torch_dispatch_stack
_top_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks
_hooks_allowed: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled
_cache_enabled: Callable[[], bool] = _C.is_autocast_cache_enabled
_set_cache: Callable[[bool], None] = _C.set_autocast_cache_enabled

_Value: TypeAlias = tuple[Any, ...]  # of one part
Modes: TypeAlias = tuple[Any, ...]  # a value for each part


class _Part(NamedTuple):
    """One piece of thread-local state."""

    name: str
    default: Any  # what a new thread has
    read: Callable[[], Any]
    write: Callable[[Any, Any], None]  # (what is there now, what shall be there)
    same: Callable[[Any, Any], bool] = eq


# Torch-function modes: (modes, set_default_device's mode, CURRENT_DEVICE). A mode keeps books of its own in
# __enter__ and __exit__ (DeviceContext slips under the stack and remembers whom it displaced), so modes are
# not left and entered again, only the raw stack is exchanged. torch.compile guards on CURRENT_DEVICE.

_default_device: Any = vars(torch)["_GLOBAL_DEVICE_CONTEXT"]  # a threading.local


def _read_functions() -> _Value:
    modes = tuple([_C._get_function_stack_at(i) for i in range(_function_depth())])
    return modes, getattr(_default_device, "device_context", None), _device_module.CURRENT_DEVICE


def _write_functions(_now: _Value, then: _Value) -> None:  # switch has emptied the stack
    for mode in then[0]:
        _C._push_on_torch_function_stack(mode)
    context, _device_module.CURRENT_DEVICE = then[1:]
    if context is not None:
        _default_device.device_context = context
    elif hasattr(_default_device, "device_context"):
        del _default_device.device_context  # torch 2.9's get_default_device() trips over a None


def _same_stack(a: _Value, b: _Value) -> bool:
    """By identity: a mode may define `==` as it likes. What torch keeps beside a stack does not count."""
    return len(a[0]) == len(b[0]) and all(map(is_, a[0], b[0]))


# Autograd: (inference mode, *settings), the settings that this torch has.

_SETTINGS: list[tuple[str, str, Any]] = [  # getter, setter, default
    ("is_grad_enabled", "_set_grad_enabled", True),
    ("_is_fwd_grad_enabled", "_set_fwd_grad_enabled", True),
    ("_is_multithreading_enabled", "_set_multithreading_enabled", True),
    ("_is_view_replay_enabled", "_set_view_replay_enabled", False),
    ("_is_grad_layout_enforcement_enabled", "_set_grad_layout_enforcement_enabled", True),
    ("_get_graph_exec_group", "_set_graph_exec_group", None),
]
_SETTINGS = [setting for setting in _SETTINGS if hasattr(_C, setting[0])]
_getters: list[Callable[[], Any]] = [getattr(_C, getter) for getter, _, _ in _SETTINGS]
_setters: list[Callable[[Any], None]] = [getattr(_C, setter) for _, setter, _ in _SETTINGS]


def read_autograd() -> _Value:
    return _inference(), *[get() for get in _getters]


def _write_autograd(now: _Value, then: _Value) -> None:
    if now[0] is not then[0]:
        _force_inference(then[0])
        now = read_autograd()
    for put, was, value in zip(_setters, now[1:], then[1:], strict=True):
        if was is not value:
            put(value)


def _force_inference(on: bool) -> None:
    """Inference mode on or off, with nobody left to undo it.

    Torch has no setter, only a C++ guard that puts back, when it dies, the settings and keys it found.
    An opposite guard held over the suspension must die on its own thread, in LIFO order; dropped elsewhere by
    the garbage collector it leaves a mode on for good. So two guards are crossed: the second finds what the
    first has made, and dies last.
    """
    first, second = _C._InferenceMode(on), _C._InferenceMode(on)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)


# Autocast: (nesting, on, dtypes), the last two for each device type. For its cache flag see TorchState.

_DEVICES: tuple[str, ...] = tuple(_C._autocast_supported_devices())
ALL_OFF = (False,) * len(_DEVICES)


def _nesting() -> int:
    _deeper()
    return _shallower()


def _read_autocast() -> _Value:
    on = tuple(map(torch.is_autocast_enabled, _DEVICES)) if _any_autocast() else ALL_OFF
    return _nesting(), on, tuple(map(torch.get_autocast_dtype, _DEVICES))


def _write_autocast(now: _Value, then: _Value) -> None:
    # Only the count moves: torch's own context, counting down to zero, clears the cache of the whole process.
    for _ in range(now[0], then[0]):
        _deeper()
    for _ in range(then[0], now[0]):
        _shallower()
    for device, was_on, on, was, dtype in zip(_DEVICES, now[1], then[1], now[2], then[2], strict=True):
        if was_on is not on:
            torch.set_autocast_enabled(device, on)
        if was is not dtype:
            torch.set_autocast_dtype(device, dtype)


@functools.cache
def default_autocast() -> _Value:
    """From a thread nobody has touched: dtypes differ between versions, whoever asks may be in autocast."""
    found: list[_Value] = []
    thread = threading.Thread(target=lambda: found.append(_read_autocast()), name="aiogpu-torch-defaults")
    thread.start()
    thread.join()
    return found[0]


# Torch-dispatch modes: (modes, notes). Raw pop and push sort infra modes (fake, functional, proxy) into slots
# of their own. The notes are globals that say whether any mode is on; left on by contexts not closed in LIFO
# order, they would make torch.compile do nothing from then on. How many there are depends on the version.

_NOTES = [name for name in vars(_dispatch_module) if name.startswith("_is_in_")]
_tell: Any = getattr(_dispatch_module, "set_is_in_mode_without_ignore_compile_internals", bool)


def _read_dispatch() -> _Value:
    modes = tuple([_C._get_dispatch_stack_at(i) for i in range(_dispatch_depth())])
    return modes, [getattr(_dispatch_module, name) for name in _NOTES]


def _write_dispatch(_now: _Value, then: _Value) -> None:
    for _ in range(_dispatch_depth()):
        _C._pop_torch_dispatch_stack(None)
    for mode in then[0]:
        _C._push_on_torch_dispatch_stack(mode)
    vars(_dispatch_module).update(zip(_NOTES, then[1], strict=True))
    _tell(getattr(_dispatch_module, "_is_in_any_mode_without_ignore_compile_internals", False))


# Saved-tensor hooks: ([pack, unpack, pack, ..., the message that forbids them or None],), outermost first.


def _read_hooks() -> _Value:
    message = _autograd._saved_tensors_hooks_get_disabled_error_message()
    hooks = _take_hooks()  # only the top can be read
    if hooks:
        _write_hooks((), ([*hooks, message],))
    return ([*hooks, message],)


def _take_hooks() -> list[Any]:
    taken: list[Any] = []
    while (pair := _top_hooks(True)) is not None:
        taken = [*pair, *taken]
        _autograd._pop_saved_tensors_default_hooks()
    return taken


def _write_hooks(_now: _Value, then: _Value) -> None:
    _take_hooks()
    *hooks, message = then[0]
    _autograd._saved_tensors_hooks_enable()  # torch refuses to push under a message
    for pack, unpack in zip(hooks[::2], hooks[1::2], strict=True):
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
    if message is not None:  # False: although hooks are there
        _autograd._saved_tensors_hooks_disable(message, *([False] if hooks else []))


MODES = [
    _Part("function modes", ((), None, None), _read_functions, _write_functions, _same_stack),
    _Part(
        "autograd modes", (False, *[default for _, _, default in _SETTINGS]), read_autograd, _write_autograd
    ),
    _Part("autocast", None, _read_autocast, _write_autocast),  # its default: default_autocast()
    _Part("dispatch modes", ((), [False] * len(_NOTES)), _read_dispatch, _write_dispatch, _same_stack),
    _Part("saved-tensor hooks", ([None],), _read_hooks, _write_hooks, _same_stack),
]
ALL = [*MODES, _Part("autocast cache flag", True, _cache_enabled, lambda _, then: _set_cache(then))]


def same(a: Modes, b: Modes) -> bool:
    return all(x is y or part.same(x, y) for part, x, y in zip(MODES, a, b, strict=True))


def switch(parts: list[_Part], now: Modes, then: Modes) -> None:
    # Function modes leave first and come last: some of torch's setters can be overridden, and a user's mode
    # must not see our calls.
    for _ in now[0][0]:
        _C._pop_torch_function_stack()
    for part, a, b in zip(parts[1:], now[1:], then[1:], strict=True):
        if a is not b and not part.same(a, b):
            part.write(a, b)
    if now[0][0] or then[0][0]:
        _write_functions(now[0], then[0])


@functools.cache
def plain_inference() -> _Value:
    """What `read_autograd` says inside inference_mode(), as this torch has it."""
    with torch.inference_mode():
        return read_autograd()


def read_modes(base: Modes, other: Modes) -> Modes:
    """This thread's modes, to be exchanged with `other`. Where both are at the default, the object in `base`
    stands for it; where one is not, dtypes and globals must be read, because they will have to come back."""
    functions, _, off, dispatch, hooks = base
    return (
        functions if other[0] is functions and not _function_depth() else _read_functions(),
        read_autograd(),
        off if other[2] is off and not _any_autocast() and not _nesting() else _read_autocast(),
        dispatch if other[3] is dispatch and not _dispatch_depth() else _read_dispatch(),
        hooks if _top_hooks(True) is None and _hooks_allowed() else _read_hooks(),
    )


def read_all() -> Modes:
    return tuple([part.read() for part in ALL])


def untouched(defaults: Modes) -> bool:
    """Is this thread at torch's defaults, `ALL` but for the cache flag? A third of reading and comparing."""
    return (
        _function_depth() == _dispatch_depth() == _nesting() == 0
        and not _any_autocast() and _top_hooks(True) is None and _hooks_allowed()
        and read_autograd() == defaults[1]
        and tuple(map(torch.get_autocast_dtype, _DEVICES)) == defaults[2][2]
    )  # fmt: skip
