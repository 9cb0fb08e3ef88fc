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

from collections.abc import Callable
from typing import Any

import torch

from ._torchmodes import (
    ALL,
    ALL_OFF,
    MODES,
    Modes,
    default_autocast,
    plain_inference,
    read_all,
    read_autograd,
    read_modes,
    same,
    switch,
    untouched,
)

__all__ = ["Snapshot", "TorchState", "capture", "scrub"]

_C: Any = torch._C
_autograd: Any = _C._autograd

# Bound once: every step asks most of these twice, and an attribute chain costs as much as the answer.
_grad: Callable[[], bool] = _C.is_grad_enabled
_inference: Callable[[], bool] = _C.is_inference_mode_enabled
_deeper: Callable[[], int] = _C.autocast_increment_nesting
_shallower: Callable[[], int] = _C.autocast_decrement_nesting
_set_grad: Callable[[bool], None] = _C._set_grad_enabled
# Without arguments: of CUDA; half the cost of asking for any.
_cuda_autocast: Callable[[], bool] = _C.is_autocast_enabled
_function_depth: Callable[[], int] = _C._len_torch_function_stack
_dispatch_depth: Callable[[], int] = _C._len_torch_dispatch_stack
_top_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks
_cache_enabled: Callable[[], bool] = _C.is_autocast_cache_enabled
_set_cache: Callable[[bool], None] = _C.set_autocast_cache_enabled
_InferenceMode: Any = _C._InferenceMode


_INHERIT: Modes = ()  # no step yet
_NO_GRAD: Modes = ("no_grad",)  # torch's defaults but for grad mode: by far the commonest of the others
_INFERENCE: Modes = ("inference_mode",)  # torch's defaults but for inference mode: the next


class TorchState:
    """The modes of one coroutine.

    Every `resume()` is followed by a `suspend()` on the same thread; pairs nest, and the next pair may be on
    another. A pair costs about 0.9 µs while coroutine and thread are at torch's defaults, 1.1 under no_grad,
    2 in inference mode, else 7 to 14.

    A coroutine runs with autocast's weight cache off at every step, even if an earlier one asked for it: the
    cache belongs to the process and knows no streams. A weight cast on one task's stream would be read on
    another's without an edge.
    """

    __slots__ = ("_base", "_cache", "_guard", "_own", "_thread")

    _own: Modes | None  # the suspended coroutine's modes; None: _base
    _thread: Modes | None  # the thread's own modes, from a resume() to its suspend(); None: _base
    _base: Modes | None  # torch's defaults, as the thread of the first step has them
    _guard: Any  # of inference mode, from the resume() of _INFERENCE to its suspend(), so on one thread
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
                self._guard = guard = _InferenceMode(True)
                guard.__enter__()
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
            if not _inference():
                self._own = None if _grad() else _NO_GRAD
            if self._guard is not None:
                self._leave()  # the thread's own grad mode comes back with it
            elif self._own is _NO_GRAD:
                _set_grad(True)
            _set_cache(self._cache)
            return
        self._suspend_slowly()

    def close(self) -> None:
        """The coroutine has ended, and its last `suspend()` is done: let go of its modes."""
        self._own = _INHERIT
        self._thread = self._base = self._guard = None

    def _leave(self) -> None:
        """The guard of resume() puts back what it found there, also after a guard of the coroutine's has died
        meanwhile, which put back what *that* had found."""
        guard, self._guard = self._guard, None
        guard.__exit__(None, None, None)

    def _resume_slowly(self) -> None:
        if self._base is None:
            self._begin()
        else:
            own = self._base if self._own is None else self._own
            if own is _NO_GRAD:
                no_grad = (False, False, *self._base[1][2:])  # see read_autograd
                own = (self._base[0], no_grad, *self._base[2:])
            elif own is _INFERENCE:
                own = (self._base[0], plain_inference(), *self._base[2:])
            self._thread = thread = read_modes(self._base, own)
            switch(MODES, thread, own)
        _set_cache(False)

    def _begin(self) -> None:
        if _defaults is not None and untouched(_defaults):
            self._base, self._own = _defaults[:-1], None
            return
        modes = tuple([part.read() for part in MODES])
        off = modes[2] if modes[2][:2] == (0, ALL_OFF) else default_autocast()
        defaults = [part.default or off for part in MODES]
        self._base = tuple([x if p.same(x, y) else y for p, x, y in zip(MODES, modes, defaults, strict=True)])
        self._own = self._thread = None if same(modes, self._base) else modes

    def _suspend_slowly(self) -> None:
        assert self._base is not None, "suspend() without resume()"
        thread = self._base if self._thread is None else self._thread
        own = read_modes(self._base, thread)
        self._own = None if same(own, self._base) else own
        if own[1] == plain_inference() and same((own[0], self._base[1], *own[2:]), self._base):
            self._own = _INFERENCE
        if self._guard is not None:
            self._leave()
            own = (own[0], read_autograd(), *own[2:])
        self._thread = None
        switch(MODES, own, thread)
        _set_cache(self._cache)


class Snapshot:
    """Modes of one thread, to be put on others. Immutable: put often, and on several threads at once."""

    __slots__ = ("_modes",)

    def __init__(self, modes: Modes) -> None:
        self._modes = modes

    def put(self) -> Modes:
        """In place, autocast's cache off (see TorchState), on a worker thread: at torch's defaults, as
        `scrub` left it, so that those cost 0.1 µs to put. Returns what there was before, for `scrub`."""
        before = self._modes if self._modes is _defaults else read_all()
        switch(ALL, before, self._modes)
        _set_cache(False)
        return before


#: All of `ALL` at torch's defaults, once a worker thread has found out what they are.
_defaults: Modes | None = None


def capture() -> Snapshot:
    """The calling thread's modes."""
    if _defaults is not None and _cache_enabled() and untouched(_defaults):
        return Snapshot(_defaults)
    return Snapshot(read_all())


def scrub(before: Modes | None = None) -> list[str]:
    """Put this thread's modes back to torch's defaults; the names of those that were not. First to
    ``before``, from `put`: what torch keeps beside a stack may be another thread's."""
    global _defaults
    if _defaults is None:
        _defaults = tuple([part.default or default_autocast() for part in ALL])
    if before is not None and before is not _defaults:
        switch(ALL, read_all(), before)
    if untouched(_defaults):
        cached = _cache_enabled()
        _set_cache(True)
        return [] if cached else [ALL[-1].name]
    now = read_all()
    switch(ALL, now, _defaults)
    return [part.name for part, a, b in zip(ALL, now, _defaults, strict=True) if not part.same(a, b)]
