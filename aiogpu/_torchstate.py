"""Torch's thread-local modes, taken off one coroutine and put back at its next step.

The law of this file: whoever runs next on a thread finds exactly the modes it left there, in whatever order
contexts were entered and left in between, whichever thread the next step is on. No streams, no devices here.

Carried with a coroutine (`TorchState`): torch-function modes (`with torch.device`, `set_default_device`),
grad and inference mode and whatever else the guard of inference mode writes (`_SETTINGS`), autocast (on/off
and dtype of each device type, nesting), torch-dispatch modes, saved-tensor hooks.

Not noticed by itself, because every look costs every step of every task 70 ns: one of `_SETTINGS` other than
grad mode, an autocast of another device type than CUDA or a dtype set by hand (`torch.autocast` shows in the
nesting), a message against saved-tensor hooks, changed across an await while none of the above is set. It
stays with the thread, as in plain torch. Worker threads get it (`Snapshot`) and lose it (`scrub`), too.

Not carried. Nothing is ever suspended inside: functorch's levels, jit and export tracing, Python dispatcher,
DisableTorchFunction. The process owns it: anomaly mode, forward-AD levels, sdpa and other backend settings,
default dtype, generators. Torch cannot read it: profiler, `set_flush_denormal`, `use_mem_pool`, OpenMP.
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

__all__ = ["Snapshot", "TorchState", "capture", "scrub"]

_C: Any = torch._C
_autograd: Any = _C._autograd

# Bound once: every step asks most of these twice, and an attribute chain costs as much as the answer.
_grad: Callable[[], bool] = _C.is_grad_enabled
_inference: Callable[[], bool] = _C.is_inference_mode_enabled
_deeper: Callable[[], int] = _C.autocast_increment_nesting
_shallower: Callable[[], int] = _C.autocast_decrement_nesting
_set_grad: Callable[[bool], None] = _C._set_grad_enabled
_cuda_autocast: Callable[[], bool] = (
    _C.is_autocast_enabled
)  # without arguments; half the cost of asking for any
_any_autocast: Callable[[], bool] = _C._is_any_autocast_enabled
_function_depth: Callable[[], int] = _C._len_torch_function_stack
_dispatch_depth: Callable[[], int] = _C._len_torch_dispatch_stack
_top_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks
_hooks_allowed: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled
_cache_enabled: Callable[[], bool] = _C.is_autocast_cache_enabled
_set_cache: Callable[[bool], None] = _C.set_autocast_cache_enabled

_Value: TypeAlias = tuple[Any, ...]  # of one part
_Modes: TypeAlias = tuple[Any, ...]  # a value for each part


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


def _write_functions(_now: _Value, then: _Value) -> None:  # _switch has emptied the stack
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


def _read_autograd() -> _Value:
    return _inference(), *[get() for get in _getters]


def _write_autograd(now: _Value, then: _Value) -> None:
    if now[0] is not then[0]:
        _force_inference(then[0])
        now = _read_autograd()
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
_ALL_OFF = (False,) * len(_DEVICES)


def _nesting() -> int:
    _deeper()
    return _shallower()


def _read_autocast() -> _Value:
    on = tuple(map(torch.is_autocast_enabled, _DEVICES)) if _any_autocast() else _ALL_OFF
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
def _default_autocast() -> _Value:
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


_MODES = [
    _Part("function modes", ((), None, None), _read_functions, _write_functions, _same_stack),
    _Part(
        "autograd modes", (False, *[default for _, _, default in _SETTINGS]), _read_autograd, _write_autograd
    ),
    _Part("autocast", None, _read_autocast, _write_autocast),  # its default: _default_autocast()
    _Part("dispatch modes", ((), [False] * len(_NOTES)), _read_dispatch, _write_dispatch, _same_stack),
    _Part("saved-tensor hooks", ([None],), _read_hooks, _write_hooks, _same_stack),
]
_ALL = [*_MODES, _Part("autocast cache flag", True, _cache_enabled, lambda _, then: _set_cache(then))]


def _same(a: _Modes, b: _Modes) -> bool:
    return all(x is y or part.same(x, y) for part, x, y in zip(_MODES, a, b, strict=True))


def _switch(parts: list[_Part], now: _Modes, then: _Modes) -> None:
    # Function modes leave first and come last: some of torch's setters can be overridden, and a user's mode
    # must not see our calls.
    for _ in now[0][0]:
        _C._pop_torch_function_stack()
    for part, a, b in zip(parts[1:], now[1:], then[1:], strict=True):
        if a is not b and not part.same(a, b):
            part.write(a, b)
    if now[0][0] or then[0][0]:
        _write_functions(now[0], then[0])


_INHERIT: _Modes = ()  # no step yet
_NO_GRAD: _Modes = ("no_grad",)  # torch's defaults but for grad mode: by far the commonest of the others
_INFERENCE: _Modes = ("inference_mode",)  # torch's defaults but for inference mode: the next


@functools.cache
def _plain_inference() -> _Value:
    """What `_read_autograd` says inside inference_mode(), as this torch has it."""
    with torch.inference_mode():
        return _read_autograd()


class TorchState:
    """The modes of one coroutine.

    Every `resume()` is followed by a `suspend()` on the same thread; pairs nest, and the next pair may be on
    another. A pair costs about 0.9 µs while coroutine and thread are at torch's defaults, 1.1 under no_grad,
    5 in inference mode, else 7 to 14.

    A coroutine runs with autocast's weight cache off at every step, even if an earlier one asked for it: the
    cache belongs to the process and knows no streams. A weight cast on one task's stream would be read on
    another's without an edge.
    """

    __slots__ = ("_base", "_cache", "_own", "_settings", "_thread")

    _own: _Modes | None  # the suspended coroutine's modes; None: _base
    _thread: _Modes | None  # the thread's own modes, from a resume() to its suspend(); None: _base
    _base: _Modes | None  # torch's defaults, as the thread of the first step has them
    _settings: _Value  # the thread's own autograd modes, from the resume() of _INFERENCE to its suspend()
    _cache: bool  # the thread's own flag, from a resume() to its suspend()

    def __init__(self) -> None:
        """The first `resume()` takes over what it finds on the thread."""
        self.close()

    # One condition in two places, because a function for it would add a tenth. Less does not do:
    # - autocast(enabled=False) shows in the nesting alone, torch.set_autocast_enabled everywhere but there.
    #   n+1 + n == 1, because no short cut may come between the two halves.
    # - inference_mode() with enable_grad() inside has grad mode on.
    # - Dispatch key sets show inference, autocast and dispatch modes, but cost 340 ns each to read as int.
    # - torch._C._dynamo.guards.GlobalStateGuard compares grad mode and autocast in one call of 170 ns, but
    #   tf32 settings and the number of threads, too.

    def resume(self) -> None:
        """Put the coroutine's modes in place on this thread, and remember the thread's own."""
        self._cache = _cache_enabled()
        own = self._own
        if (
            (own is None or own is _NO_GRAD or own is _INFERENCE)
            and _grad() and not _inference() and _deeper() + _shallower() == 1 and not _cuda_autocast()
            and not _function_depth() and not _dispatch_depth() and _top_hooks(True) is None
        ):  # fmt: skip
            if own is _NO_GRAD:
                _set_grad(False)
            elif own is _INFERENCE:
                self._settings = _read_autograd()
                _force_inference(True)
            _set_cache(False)
            return
        self._resume_slowly()

    def suspend(self) -> None:
        """Note the coroutine's modes, and put the thread's own back exactly."""
        if (
            self._thread is None
            and (not _inference() or (self._own is _INFERENCE and not _grad()))
            and _deeper() + _shallower() == 1 and not _cuda_autocast()
            and not _function_depth() and not _dispatch_depth() and _top_hooks(True) is None
        ):  # fmt: skip
            if _grad():
                self._own = None
            elif _inference():
                _write_autograd(_read_autograd(), self._settings)
            else:
                self._own = _NO_GRAD
                _set_grad(True)
            _set_cache(self._cache)
            return
        self._suspend_slowly()

    def close(self) -> None:
        """The coroutine has ended, and its last `suspend()` is done: let go of its modes."""
        self._own = _INHERIT
        self._thread = self._base = None

    def _resume_slowly(self) -> None:
        if self._base is None:
            self._begin()
        else:
            own = self._base if self._own is None else self._own
            if own is _NO_GRAD:
                no_grad = (False, False, *self._base[1][2:])  # see _read_autograd
                own = (self._base[0], no_grad, *self._base[2:])
            elif own is _INFERENCE:
                own = (self._base[0], _plain_inference(), *self._base[2:])
            self._thread = thread = _read_modes(self._base, own)
            _switch(_MODES, thread, own)
        _set_cache(False)

    def _begin(self) -> None:
        if _defaults is not None and _untouched(_defaults):
            self._base, self._own = _defaults[:-1], None
            return
        modes = tuple([part.read() for part in _MODES])
        off = modes[2] if modes[2][:2] == (0, _ALL_OFF) else _default_autocast()
        defaults = [part.default or off for part in _MODES]
        self._base = tuple(
            [x if p.same(x, y) else y for p, x, y in zip(_MODES, modes, defaults, strict=True)]
        )
        self._own = self._thread = None if _same(modes, self._base) else modes

    def _suspend_slowly(self) -> None:
        assert self._base is not None, "suspend() without resume()"
        thread = self._base if self._thread is None else self._thread
        own = _read_modes(self._base, thread)
        self._own = None if _same(own, self._base) else own
        if own[1] == _plain_inference() and _same((own[0], self._base[1], *own[2:]), self._base):
            self._own = _INFERENCE
        self._thread = None
        _switch(_MODES, own, thread)
        _set_cache(self._cache)


def _read_modes(base: _Modes, other: _Modes) -> _Modes:
    """This thread's modes, to be exchanged with `other`. Where both are at the default, the object in `base`
    stands for it; where one is not, dtypes and globals must be read, because they will have to come back."""
    functions, _, off, dispatch, hooks = base
    return (
        functions if other[0] is functions and not _function_depth() else _read_functions(),
        _read_autograd(),
        off if other[2] is off and not _any_autocast() and not _nesting() else _read_autocast(),
        dispatch if other[3] is dispatch and not _dispatch_depth() else _read_dispatch(),
        hooks if _top_hooks(True) is None and _hooks_allowed() else _read_hooks(),
    )


class Snapshot:
    """Modes of one thread, to be put on others. Immutable: put often, and on several threads at once."""

    __slots__ = ("_modes",)

    def __init__(self, modes: _Modes) -> None:
        self._modes = modes

    def put(self) -> _Modes:
        """In place, autocast's cache off (see TorchState), on a worker thread: at torch's defaults, as
        `scrub` left it, so that those cost 0.1 µs to put. Returns what there was before, for `scrub`."""
        before = self._modes if self._modes is _defaults else _read_all()
        _switch(_ALL, before, self._modes)
        _set_cache(False)
        return before


def _read_all() -> _Modes:
    return tuple([part.read() for part in _ALL])


def _untouched(defaults: _Modes) -> bool:
    """Is this thread at torch's defaults, `_ALL` but for the cache flag? A third of reading and comparing."""
    return (
        _function_depth() == _dispatch_depth() == _nesting() == 0
        and not _any_autocast() and _top_hooks(True) is None and _hooks_allowed()
        and _read_autograd() == defaults[1]
        and tuple(map(torch.get_autocast_dtype, _DEVICES)) == defaults[2][2]
    )  # fmt: skip


#: All of `_ALL` at torch's defaults, once a worker thread has found out what they are.
_defaults: _Modes | None = None


def capture() -> Snapshot:
    """The calling thread's modes."""
    if _defaults is not None and _cache_enabled() and _untouched(_defaults):
        return Snapshot(_defaults)
    return Snapshot(_read_all())


def scrub(before: _Modes | None = None) -> list[str]:
    """Put this thread's modes back to torch's defaults; the names of those that were not. First to
    ``before``, from `put`: what torch keeps beside a stack may be another thread's."""
    global _defaults
    if _defaults is None:
        _defaults = tuple([part.default or _default_autocast() for part in _ALL])
    if before is not None and before is not _defaults:
        _switch(_ALL, _read_all(), before)
    if _untouched(_defaults):
        cached = _cache_enabled()
        _set_cache(True)
        return [] if cached else [_ALL[-1].name]
    now = _read_all()
    _switch(_ALL, now, _defaults)
    return [part.name for part, a, b in zip(_ALL, now, _defaults, strict=True) if not part.same(a, b)]
