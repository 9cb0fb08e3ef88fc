"""What `_torchstate` promises: a coroutine's torch modes are its own, a thread's are its own, bit for bit.

Coroutines are generators here, driven as aiogpu's tasks are: resume, one step, suspend.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import timeit
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _device, _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from aiogpu._torchstate import Snapshot, TorchState, capture, scrub

C: Any = torch._C
DEVICES = C._autocast_supported_devices()


# --- modes to enter -----------------------------------------------------------------------------------------


class FunctionMode(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class NeverEqual(FunctionMode):
    def __eq__(self, other: object) -> bool:
        raise AssertionError("modes are compared by identity")

    __hash__ = None  # type: ignore[assignment]


@contextlib.contextmanager
def raw_autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """As code does without the context (and as `torch.autocast("cuda")` refuses to do without a GPU)."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def inference_with_grad() -> Iterator[None]:
    with torch.inference_mode(), torch.enable_grad():
        yield


def hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t, lambda t: t)


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "inference_mode": torch.inference_mode,
    "inference_mode(False)": lambda: torch.inference_mode(False),
    "inference_mode, enable_grad": inference_with_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast half": lambda: torch.autocast("cpu", dtype=torch.half),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast uncached": lambda: torch.autocast("cpu", cache_enabled=False),
    "set_autocast_enabled": lambda: raw_autocast("cuda", torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "device cpu": lambda: torch.device("cpu"),
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "hooks": hooks,
}
# These leave the thread as it is where it is at torch's defaults.
VISIBLE = [name for name in MODES if name not in ("enable_grad", "inference_mode(False)")]
each_mode = pytest.mark.parametrize("name", VISIBLE)

Seen = dict[str, Any]


def look() -> Seen:
    """Everything that is promised, of the calling thread. Modes are named by their identity."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    with ExitStack() as stack:  # hooks can only be read from the top
        message = C._autograd._saved_tensors_hooks_get_disabled_error_message()
        C._autograd._saved_tensors_hooks_enable()
        if message is not None:
            stack.callback(C._autograd._saved_tensors_hooks_disable, message, False)
        pairs: list[Any] = []
        while (pair := C._autograd._top_saved_tensors_default_hooks(True)) is not None:
            pairs.append(pair)
            stack.callback(C._autograd._push_saved_tensors_default_hooks, *pair)
            C._autograd._pop_saved_tensors_default_hooks()
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "forward grad": C._is_fwd_grad_enabled(),
        "autocast": [torch.is_autocast_enabled(d) for d in DEVICES],
        "autocast dtypes": [torch.get_autocast_dtype(d) for d in DEVICES],
        "autocast nesting": nesting,
        "autocast cache": torch.is_autocast_cache_enabled(),
        "functions": [id(C._get_function_stack_at(i)) for i in range(C._len_torch_function_stack())],
        "default device": getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),  # type: ignore[attr-defined]
        "CURRENT_DEVICE": _device.CURRENT_DEVICE,
        "dispatch": [id(C._get_dispatch_stack_at(i)) for i in range(C._len_torch_dispatch_stack())],
        "in dispatch mode": _python_dispatch._is_in_torch_dispatch_mode,
        "hooks": [id(hook) for pair in pairs for hook in pair],
        "message": message,
        "keys included": C._dispatch_tls_local_include_set().raw_repr(),
        "keys excluded": C._dispatch_tls_local_exclude_set().raw_repr(),
        "view replay": C._is_view_replay_enabled(),
        "multithreading": C._is_multithreading_enabled(),
    }


def like_alone(seen: Seen) -> Seen:
    """Comparable between two runs: how many modes and hooks instead of which."""
    counts = {key: len(seen[key]) for key in ("functions", "dispatch", "hooks")}
    return {**seen, **counts, "default device": seen["default device"] is not None}


# --- the driver ---------------------------------------------------------------------------------------------

Body = Generator[None, None, Any]


class Task:
    def __init__(self, body: Body) -> None:
        self.body = body
        self.state = TorchState()

    def _step(self, step: Callable[[], Any]) -> bool:
        """Whether it is still running."""
        self.state.resume()
        try:
            step()
        except StopIteration:
            return False
        finally:
            self.state.suspend()
        return True

    def step(self) -> bool:
        return self._step(lambda: next(self.body))

    def throw(self, error: BaseException) -> bool:
        return self._step(lambda: self.body.throw(error))

    def close(self) -> None:
        self._step(self.body.close)
        self.state.close()


def in_thread(fn: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = look()
    yield
    assert look() == before


def inside(name: str, seen: list[Seen]) -> Body:
    seen.append(look())
    with MODES[name]():
        seen.append(look())
        yield
        seen.append(look())
        yield
        seen.append(look())
    seen.append(look())
    yield
    seen.append(look())


# --- one coroutine, each mode -------------------------------------------------------------------------------


@each_mode
def test_the_coroutine_keeps_its_modes_and_the_thread_never_sees_them(name: str) -> None:
    thread, seen = look(), list[Seen]()
    task = Task(inside(name, seen))
    running = True
    while running:
        running = task.step()
        assert look() == thread
    before, entered, second, third, left, last = seen
    assert before == {**thread, "autocast cache": False}
    assert entered == second == third != before
    assert left == last == before


@each_mode
def test_a_coroutine_that_runs_meanwhile_sees_defaults(name: str) -> None:
    task, other_seen = Task(inside(name, [])), list[Seen]()

    def other() -> Body:
        while True:
            other_seen.append(look())
            yield

    bystander = Task(other())
    bystander.step()
    while task.step():
        bystander.step()
        Task(other()).step()
    bystander.close()
    assert other_seen == [other_seen[0]] * len(other_seen)
    assert other_seen[0] == {**look(), "autocast cache": False}


@each_mode
def test_a_mode_left_open_ends_with_the_coroutine(name: str) -> None:
    contexts = []

    def careless() -> Body:
        contexts.append(MODES[name]())
        contexts[0].__enter__()
        yield

    thread = look()
    task = Task(careless())
    while task.step():
        assert look() == thread
    assert look() == thread
    clean: list[Seen] = []
    following = Task(inside(name, clean))
    following.step()
    following.close()
    assert clean[0] == {**thread, "autocast cache": False}
    # Left in the end, for `torch.inference_mode` holds a guard that acts when it dies.
    task.state.resume()
    contexts[0].__exit__(None, None, None)
    task.state.suspend()


@each_mode
@pytest.mark.parametrize("how", ["throw", "close", "raise"])
def test_an_abrupt_end_leaves_through_the_contexts(name: str, how: str) -> None:
    thread, seen = look(), list[Seen]()

    def body() -> Body:
        before = look()
        try:
            with MODES[name]():
                yield
                if how == "raise":
                    raise KeyError(name)
                yield
        finally:
            seen.extend([before, look()])

    task = Task(body())
    task.step()
    if how == "close":
        task.close()
    else:
        with pytest.raises(KeyError):
            task.throw(KeyError(name)) if how == "throw" else task.step()
    assert look() == thread
    assert seen[0] == seen[1]


@each_mode
def test_each_step_may_be_on_another_thread(name: str) -> None:
    seen: list[Seen] = []
    task = Task(inside(name, seen))
    threads = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    fresh = threads[0].submit(look).result()
    for turn in range(4):
        pool = threads[turn % 2]
        pool.submit(task.step).result()
        assert pool.submit(look).result() == fresh
    for pool in threads:
        pool.shutdown()
    before, entered, second, third, left, last = seen
    assert entered == second == third
    assert before == left == last


@each_mode
def test_closing_on_another_thread_leaves_both_clean(name: str) -> None:
    thread = look()
    task = Task(inside(name, []))
    task.step()
    fresh, after = in_thread(lambda: (look(), task.close(), look()))[::2]
    assert fresh == after
    assert look() == thread


@each_mode
def test_a_suspended_coroutine_can_be_forgotten(name: str) -> None:
    """Nothing of ours undoes a mode when it is collected, on whichever thread."""
    thread = look()
    state = TorchState()
    state.resume()
    context = MODES[name]()
    context.__enter__()
    state.suspend()
    copy = TorchState()
    copy._own, copy._base = state._own, state._base
    state.resume()
    context.__exit__(None, None, None)
    state.suspend()
    state.close()
    del state
    before, after = in_thread(lambda: (look(), copy.close(), gc.collect(), look()))[::3]
    assert before == after
    assert look() == thread


def test_close_lets_go_of_the_modes() -> None:
    state = TorchState()
    mode = FunctionMode()
    gone = weakref.ref(mode)
    state.resume()
    mode.__enter__()
    state.suspend()
    state.close()
    del mode
    gc.collect()
    assert gone() is None


# --- inheriting, nesting ------------------------------------------------------------------------------------


@each_mode
def test_a_new_coroutine_inherits_what_is_on_the_thread_at_its_first_step(name: str) -> None:
    seen: list[Seen] = []

    def body() -> Body:
        while True:
            seen.append(look())
            yield

    task = Task(body())
    with MODES[name]():
        ambient = look()
        task.step()
        assert look() == ambient
        task.step()
        assert look() == ambient
    outside = look()
    task.step()
    assert look() == outside
    assert seen == [{**ambient, "autocast cache": False}] * 3


@each_mode
def test_the_threads_own_later_modes_are_not_the_coroutines(name: str) -> None:
    seen: list[Seen] = []
    task = Task(inside("no_grad", seen))
    task.step()
    with MODES[name]():
        ambient = look()
        for _ in range(3):
            task.step()
            assert look() == ambient
    assert seen[1] == seen[2] == seen[3]
    assert seen[0] == seen[4] == seen[5]


@each_mode
def test_nested_drivers_compose(name: str) -> None:
    inner_seen, outer_seen = list[Seen](), list[Seen]()

    def outer() -> Body:
        with torch.no_grad(), torch.device("meta"):
            outer_seen.append(look())
            inner = Task(inside(name, inner_seen))
            while inner.step():
                outer_seen.append(look())
                yield
            outer_seen.append(look())

    thread = look()
    task = Task(outer())
    while task.step():
        assert look() == thread
    assert outer_seen == [outer_seen[0]] * len(outer_seen)
    assert inner_seen[0] == outer_seen[0]  # inherited
    assert inner_seen[1] == inner_seen[2] == inner_seen[3]
    assert inner_seen[4] == inner_seen[5] == inner_seen[0]


# --- any order ----------------------------------------------------------------------------------------------

Operation = str  # a mode to enter, or "leave", or "suspend"


def program(operations: list[Operation], seen: list[Seen]) -> Body:
    contexts: list[Any] = []
    yield  # the first step only takes over the thread's modes
    for operation in operations:
        if operation == "suspend":
            yield
        elif operation == "leave":
            if contexts:
                contexts.pop().__exit__(None, None, None)
        else:
            context = MODES[operation]()
            # Torch refuses hooks where they are forbidden, and to forbid them where they are.
            with contextlib.suppress(RuntimeError):
                context.__enter__()
                contexts.append(context)
        seen.append(look())
    while contexts:
        contexts.pop().__exit__(None, None, None)
        seen.append(look())


def alone(ambient: list[Operation], operations: list[Operation]) -> list[Seen]:
    """The model: the same program by itself in a thread of its own, never taken apart."""

    def run() -> list[Seen]:
        seen: list[Seen] = []
        with ExitStack() as stack:
            for name in ambient:
                stack.enter_context(MODES[name]())
            torch.set_autocast_cache_enabled(False)
            for _ in program(operations, seen):
                torch.set_autocast_cache_enabled(False)
        return seen

    return in_thread(run)


modes = st.sampled_from(sorted(MODES))
operations = st.lists(
    st.one_of(modes, modes, st.just("leave"), st.just("suspend"), st.just("suspend")), max_size=12
)
no_hooks = st.sampled_from(sorted(set(MODES) - {"hooks"}))


@given(
    programs=st.lists(operations, min_size=2, max_size=4),
    ambient=st.lists(no_hooks, max_size=2),
    schedule=st.lists(
        st.tuples(st.integers(0, 3), st.one_of(st.just("home"), st.just("away"), no_hooks)), max_size=40
    ),
)
@settings(max_examples=150, deadline=None)
def test_interleaved_programs_see_what_each_sees_alone(
    programs: list[list[Operation]], ambient: list[Operation], schedule: list[tuple[int, str]]
) -> None:
    """Steps in any order: under the thread's own modes, under yet another of them, or on another thread."""
    traces: list[list[Seen]] = [[] for _ in programs]
    tasks = {i: Task(program(p, traces[i])) for i, p in enumerate(programs)}

    def step(number: int) -> None:
        before = look()
        if not tasks[number].step():
            tasks.pop(number).state.close()
        assert look() == before

    def run(away: ThreadPoolExecutor) -> None:
        with ExitStack() as stack:
            for name in ambient:
                stack.enter_context(MODES[name]())
            for number in list(tasks):
                step(number)
            for number, where in schedule:
                if number not in tasks:
                    continue
                if where == "away":
                    away.submit(step, number).result()
                    continue
                with contextlib.nullcontext() if where == "home" else MODES[where]():
                    step(number)
            while tasks:
                step(min(tasks))

    with ThreadPoolExecutor(1) as home, ThreadPoolExecutor(1) as away:
        home.submit(run, away).result()
    for trace, operations in zip(traces, programs, strict=True):
        expected = alone(ambient, operations)
        assert [like_alone(seen) for seen in trace] == [like_alone(seen) for seen in expected]


def test_coroutines_that_leave_in_the_order_they_entered() -> None:
    """Not LIFO: by itself torch would leave grad mode off and meta as default device for good."""
    entered: list[Any] = []

    def body(context: Any) -> Body:
        with context:
            entered.append(torch.ones(1).is_meta)
            yield
            entered.append(torch.ones(1).is_meta)

    tasks = [Task(body(torch.device("meta"))), Task(body(torch.no_grad())), Task(body(torch.device("cpu")))]
    for task in tasks:
        assert task.step()
    for task in tasks:
        assert not task.step()
    assert entered == [True, False, False, True, False, False]
    assert _device.CURRENT_DEVICE is None
    assert torch.is_grad_enabled()


def test_what_runs_under_the_modes_behaves_so() -> None:
    weight = torch.ones(2, 2, requires_grad=True)

    def body() -> Generator[None, None, None]:
        with torch.inference_mode():
            yield
            assert (weight + 1).is_inference()
        with torch.autocast("cpu"):
            yield
            assert (weight @ weight).dtype is torch.bfloat16
        with FakeTensorMode() as fake:  # an infra mode has a slot of its own on the stack
            yield
            assert C._get_dispatch_mode(C._TorchDispatchModeKey.FAKE) is fake
            assert type(torch.ones(2)).__name__ == "FakeTensor"
        packed: list[torch.Tensor] = []
        with saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
            yield
            (weight * weight).sum().backward()
        assert packed

    task = Task(body())
    while task.step():
        plain = weight @ weight
        assert plain.requires_grad
        assert plain.dtype is torch.float32
        assert not plain.is_inference()
        assert type(torch.ones(2)) is torch.Tensor


# --- details ------------------------------------------------------------------------------------------------


def test_modes_are_compared_by_identity() -> None:
    task = Task(program(["suspend"], []))
    task.step()
    with NeverEqual(), NeverEqual():
        task.step()
        Task(program(["suspend"], [])).step()


def test_a_users_function_mode_does_not_hear_of_the_exchange() -> None:
    def body() -> Body:
        with FunctionMode() as mode, torch.no_grad(), torch.inference_mode():
            mode.seen.clear()
            yield
            yield
            heard.extend(mode.seen)

    heard: list[str] = []
    task = Task(body())
    with FunctionMode() as threads_mode:
        first = Task(program(["no_grad", "suspend", "suspend"], []))
        first.step()
        first.step()
        threads_mode.seen.clear()
        first.state.resume()
        first.state.suspend()
        assert threads_mode.seen == []
        first.close()
    while task.step():
        pass
    assert heard == []


def test_the_autocast_cache_is_off_at_every_step_and_the_threads_flag_comes_back() -> None:
    flags: list[bool] = []

    def body() -> Body:
        flags.append(torch.is_autocast_cache_enabled())
        yield
        with torch.autocast("cpu"):  # takes the flag it finds
            flags.append(torch.is_autocast_cache_enabled())
        with torch.autocast("cpu", cache_enabled=True):
            assert torch.is_autocast_cache_enabled()
            yield
            flags.append(torch.is_autocast_cache_enabled())
        yield
        flags.append(torch.is_autocast_cache_enabled())

    for own in True, False:
        torch.set_autocast_cache_enabled(own)
        task = Task(body())
        while task.step():
            assert torch.is_autocast_cache_enabled() is own
    torch.set_autocast_cache_enabled(True)
    assert flags == [False] * 8


def test_suspending_inside_autocast_keeps_the_processs_cache() -> None:
    """A clear would take casts from other threads; so the nesting count moves without torch's context."""
    weight = torch.ones(2, 2, requires_grad=True)
    task = Task(inside("autocast", []))
    with torch.autocast("cpu"):
        x = torch.ones(2, 2)
        before = (x @ weight).grad_fn.next_functions[1][0]  # type: ignore[union-attr]
        task.step()
        task.step()
        assert (x @ weight).grad_fn.next_functions[1][0] is before  # type: ignore[union-attr]
    task.close()


def test_the_autocast_dtype_of_the_thread_comes_back() -> None:
    """torch.autocast takes it as its default; here it is one set by hand before the task began."""
    default = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.half)
    try:
        task = Task(inside("autocast", []))
        while task.step():
            assert torch.get_autocast_dtype("cpu") is torch.half
    finally:
        torch.set_autocast_dtype("cpu", default)


def test_set_default_device_is_the_coroutines_own() -> None:
    seen = []

    def body() -> Body:
        with default_device("meta"):
            for _ in range(2):
                seen.append(torch.get_default_device().type)
                yield
        seen.append(torch.get_default_device().type)

    task = Task(body())
    while task.step():
        assert torch.get_default_device().type == "cpu"
        assert torch.ones(1).device.type == "cpu"
    assert seen == ["meta", "meta", "cpu"]


def test_settings_beside_inference_mode_come_back_to_the_thread() -> None:
    """The guard of inference mode writes them, too."""
    task = Task(inside("inference_mode", []))
    with torch.autograd.set_multithreading_enabled(False), torch.autograd._force_original_view_tracking(True):
        thread = look()
        while task.step():
            assert look() == thread


def test_grad_mode_set_as_a_function_is_the_coroutines() -> None:
    seen = []

    def body() -> Body:
        torch.set_grad_enabled(False)
        yield
        seen.append(torch.is_grad_enabled())

    task = Task(body())
    task.step()
    assert torch.is_grad_enabled()
    task.step()
    assert seen == [False]
    assert torch.is_grad_enabled()


# --- worker threads -----------------------------------------------------------------------------------------


def in_worker(snapshot: Snapshot, fn: Callable[[], Any]) -> tuple[Seen, Any, Seen]:
    def job() -> tuple[Seen, Any, Seen]:
        before = look()
        put = snapshot.put()
        try:
            result = fn()
        finally:
            scrub(put)
        return before, result, look()

    return in_thread(job)


@each_mode
def test_a_worker_has_the_callers_modes_and_then_its_own(name: str) -> None:
    with MODES[name]():
        caller = look()
        snapshot = capture()
        for _ in range(2):  # a snapshot is not used up
            before, inside, after = in_worker(snapshot, look)
            assert inside == {**caller, "autocast cache": False}
            assert before == after
        assert look() == caller


@each_mode
def test_what_a_job_changes_does_not_leak_even_when_it_fails(name: str) -> None:
    def job() -> tuple[Seen, Seen]:
        before = look()
        left_open: Any = None

        def fail() -> None:
            nonlocal left_open
            put = snapshot.put()
            try:
                left_open = MODES[name]()
                left_open.__enter__()
                raise ZeroDivisionError
            finally:
                scrub(put)

        with pytest.raises(ZeroDivisionError):
            fail()
        after = look()
        if "inference" in name:  # its guard acts where it dies: let that be in its own thread
            left_open.__exit__(None, None, None)
            scrub()
        return before, after

    with torch.autocast("cpu", dtype=torch.half):
        snapshot = capture()
    before, after = in_thread(job)
    assert before == after


@each_mode
def test_scrub_names_what_a_job_left_and_brings_back_defaults(name: str) -> None:
    def job() -> tuple[Seen, list[str], Seen, list[str]]:
        fresh = look()
        context = MODES[name]()
        context.__enter__()
        leaked, after, again = scrub(), look(), scrub()
        if "inference" in name:
            context.__exit__(None, None, None)
        return fresh, leaked, after, again

    fresh, leaked, after, again = in_thread(job)
    part = {
        "autocast uncached": ["autocast", "autocast cache flag"],
        "set_autocast_enabled": ["autocast"],
        "device": ["function modes"],
        "device cpu": ["function modes"],
        "function mode": ["function modes"],
        "dispatch mode": ["dispatch modes"],
        "hooks": ["saved-tensor hooks"],
    }
    default = ["autocast"] if "autocast" in name else ["autograd modes"]
    assert leaked == part.get(name, default)
    assert again == []
    assert after == fresh


def test_scrub_finds_settings_that_no_step_looks_for() -> None:
    def job() -> list[str]:
        C._set_multithreading_enabled(False)
        C._set_view_replay_enabled(True)
        torch.set_autocast_dtype("cpu", torch.half)
        return [*scrub(), *scrub()]

    assert in_thread(job) == ["autograd modes", "autocast"]


def test_a_worker_gets_settings_that_no_step_looks_for() -> None:
    with torch.autograd.set_multithreading_enabled(False), torch.autograd._force_original_view_tracking(True):
        snapshot = capture()
    before, inside, after = in_worker(snapshot, look)
    assert not inside["multithreading"]
    assert inside["view replay"]
    assert before == after


def test_scrub_knows_torchs_defaults_when_first_asked_inside_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from aiogpu import _torchmodes, _torchstate

    monkeypatch.setattr(_torchstate, "_defaults", None)
    _torchmodes.default_autocast.cache_clear()
    with raw_autocast("cuda", torch.float64):

        def job() -> Seen:
            snapshot.put()
            scrub()
            return look()

        snapshot = capture()
        assert in_thread(job) == in_thread(look)


# --- cost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "no_grad", "inference_mode", "autocast", "device"])
def test_cost_of_a_step(name: str) -> None:
    """Printed (pytest -s); the limit only catches a lost fast path."""
    state = TorchState()
    state.resume()
    context = MODES.get(name, contextlib.nullcontext)()
    context.__enter__()
    state.suspend()

    def steps() -> None:
        for _ in range(1000):
            state.resume()
            state.suspend()

    took_us = min(timeit.repeat(steps, number=1, repeat=20)) * 1e3
    state.resume()
    context.__exit__(None, None, None)
    state.suspend()
    print(f"\nresume + suspend, {name}: {took_us:.2f} µs")
    assert took_us < (5 if name == "plain" else 100)


def test_no_thread_is_left() -> None:
    scrub()
    assert not [t for t in threading.enumerate() if "torch-defaults" in t.name]
