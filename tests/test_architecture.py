"""The architecture, read from the source: who may import what; where threads, loops, drivers may appear."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import aiogpu

PACKAGE = Path(aiogpu.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

#: The rooms from the front door down, as the map in aiogpu/__init__.py has them. A room may use those below
#: it, never one above; rooms in one row are on one level and leave each other alone.
LEVELS = [
    ["testing"],
    ["asgi", "observe.metrics"],
    ["asgi.middleware"],
    ["asgi.exchange", "asgi.lifespan"],
    ["asgi.gate"],
    ["asgi.answers"],
    ["__init__"],
    ["files"],
    ["_tensorstream"],
    ["_safetensors"],
    ["_batching.batcher"],
    ["_batching.service"],
    ["_batching.computing"],
    ["_batching.pipeline"],
    ["_batching.deadlines", "_batching.lane", "_batching.shuttle", "_batching.waiting"],
    ["_batching.handing"],
    ["_batching.collate", "_batching.entry", "_batching.forecast", "_batching.observing", "_batching.sizes"],
    ["_prefetch", "_pipelines"],
    ["_flow.outlet"],
    ["_flow.sources", "_flow.stages"],
    ["_flow.recipes", "_flow.reorder", "_flow.runahead", "_flow.threads"],
    ["_channels", "_decorator"],
    [
        "_blocks",
        "_generators",
        "_handoff",
        "_limiter",
        "_run_sync",
        "_groups",
        "_synchronize",
        "transfers.api",
    ],
    ["transfers.single"],
    ["transfers.downloads", "transfers.out", "transfers.uploads"],
    ["transfers.peers"],
    ["transfers.jobs"],
    ["transfers.staging", "transfers.out"],
    ["transfers.packing"],
    ["transfers.plan"],
    ["_tasks"],
    ["_operation"],
    ["_runtime"],
    ["_stats"],
    ["_capacity"],
    ["_engine"],
    ["_farewells", "_notifier", "_streams"],
    ["_reactor"],
    ["_selfpipe"],
    ["transfers.ring"],
    ["transfers.pinned"],
    ["transfers.crew"],
    ["drivers.cuda", "drivers.cpu"],
    ["drivers.base", "_workers", "_loops", "_torchstate", "_errors", "transfers.tree"],
    ["_settings", "_emit", "_stepwise", "_torchmodes", "transfers.inflight", "drivers.cuda_entries"],
    ["transfers.strangers", "transfers.reach"],
    ["transfers.alike", "transfers.arrays", "transfers.containers"],
    ["transfers.parts", "transfers.registry"],
    ["transfers.segments", "transfers.release", "transfers.submitting", "drivers.sanitizer"],
    [
        "transfers.layout",
        "transfers.hostcopy",
        "drivers.hostmem",
        "drivers.host_allocator",
        "drivers.sanitizer",
    ],
]
#: Packages whose front door holds nothing.
EMPTY = {"_batching", "_flow", "transfers", "drivers", "observe"}

#: Imports that go up on purpose, each with the reason in the source.
UPWARDS: set[tuple[str, str]] = set()


def room(path: Path) -> str:
    parts = [*path.relative_to(PACKAGE).with_suffix("").parts]
    if parts[0] == "testing":
        return "testing"
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path, *, typing_too: bool = False) -> Iterator[str]:
    """Absolute names of what a file imports, wherever in it; not what only type checkers see."""
    hidden = set() if typing_too else set(_type_checking_only(tree(path)))
    package = ["aiogpu", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree(path)):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _type_checking_only(module: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(module):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                yield from ast.walk(each)


def rooms_used(path: Path) -> set[str]:
    known = {name for level in LEVELS for name in level}
    found = set()
    for name in imports(path):
        if name.startswith("aiogpu."):
            short = name.removeprefix("aiogpu.")
            for candidate in (short, short.rpartition(".")[0]):
                if candidate in known:
                    found.add(candidate)
                    break
            else:
                if short.split(".")[0] == "testing":
                    found.add("testing")
    return found - {room(path)}


def level_of(name: str) -> int:
    return next(i for i, level in enumerate(LEVELS) if name in level)


by_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


def test_every_file_has_its_room():
    rooms = {room(path) for path in FILES}
    listed = {name for level in LEVELS for name in level}
    assert rooms - EMPTY - listed - {"__main__"} == set()
    assert listed - rooms == set()


def test_the_map_of_the_house_names_every_room():
    """The map in the front door is what a reader sees first: nothing is missing and nothing is invented."""
    named = set(re.findall(r"(?:^|[ ,])(_?\w+)/?(?=[ ,])", aiogpu.__doc__, re.M))
    for path in FILES:
        top = room(path).split(".")[0]
        if top not in ("__init__", "__main__"):
            assert top in named, f"{top} is not on the map"


@by_file
def test_calls_go_down(path):
    here = room(path)
    if here in EMPTY or here == "__main__":
        assert not rooms_used(path) or here == "__main__"
        return
    for used in rooms_used(path):
        if (here, used) not in UPWARDS:
            assert level_of(used) > level_of(here), f"{here} uses {used}, which is not below it"


def test_the_levels_have_no_exception_that_is_not_needed():
    used = {(room(path), other) for path in FILES for other in rooms_used(path)}
    assert used >= UPWARDS


@by_file
def test_nothing_imports_testing(path):
    if room(path) != "testing":
        assert not [name for name in imports(path, typing_too=True) if name.startswith("aiogpu.testing")]


@by_file
def test_nothing_imports_observe(path):
    """The runtime emits to observers it does not know."""
    if not room(path).startswith("observe"):
        assert not [name for name in imports(path, typing_too=True) if name.startswith("aiogpu.observe")]


#: Where outside things may be imported at run time; every other file does without them.
PLACES = {
    "cuda": {"drivers.cuda_entries"},
    "ctypes": {
        "drivers.cuda",
        "drivers.cuda_entries",
        "drivers.hostmem",
        "_notifier",
        "_selfpipe",
        "transfers.hostcopy",
        "transfers.single",
    },
    "asyncio": {"_loops"},
    "trio": {"_loops"},
    "uvloop": set(),
    "concurrent": {"drivers.cpu", "testing"},
    "queue": {"_workers", "_notifier", "drivers.cuda"},
    "numpy": set(),
    "safetensors": {"_safetensors"},
    "prometheus_client": {"observe.metrics"},
    "starlette": set(),
    "fastapi": set(),
    "pytest": {"testing"},
    "multiprocessing": set(),
    "subprocess": set(),
}


@pytest.mark.parametrize("module", sorted(PLACES))
def test_outside_things_stay_in_their_rooms(module):
    users = {room(path) for path in FILES for name in imports(path) if name.split(".")[0] == module}
    assert users <= PLACES[module]


def test_threads_are_started_in_few_places():
    starters = {
        room(path)
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("threading.Thread", "Thread", "ThreadPoolExecutor")
    }
    assert starters <= {
        "observe.metrics",
        "_workers",
        "_notifier",
        "_torchmodes",
        "drivers.cpu",
        "drivers.cuda",
        "testing",
    }


def test_every_thread_of_ours_is_a_daemon_with_a_name():
    """One that never returns cannot keep the interpreter, and a stack dump says whose it is."""
    for path in FILES:
        for node in ast.walk(tree(path)) if room(path) != "testing" else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "threading.Thread":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert "name" in given, f"{path}:{node.lineno}"
                joined = ".join()" in "\n".join(path.read_text().splitlines()[node.lineno : node.lineno + 4])
                assert given.get("daemon") == "True" or joined, f"{path}:{node.lineno}"


#: One public test class, which is inherited as a whole.
LONGER: dict[str, int] = {}


@by_file
def test_no_file_is_long(path):
    limit = LONGER.get(str(path.relative_to(PACKAGE)), 450)
    assert len(path.read_text().splitlines()) <= limit


@by_file
def test_every_file_opens_with_its_law_or_a_map(path):
    doc = ast.get_docstring(tree(path))
    assert doc, "no docstring"
    if room(path) not in EMPTY | {"__init__", "__main__"} and path.name != "__init__.py":
        assert re.search(r"[Ll]aw of this (file|room)", doc) or room(path) == "testing", "its law is missing"


@by_file
def test_no_device_wide_or_cache_emptying_call(path):
    """C64: these stall everybody; ``synchronize_device`` in a driver is what a user asked for."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert "empty_cache" not in name
            if name.startswith("torch.cuda.") and name.endswith("synchronize"):
                assert room(path) == "drivers.cuda"


def in_a_new_process(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_starts_no_thread_no_context_and_no_optional_library():
    """C75, C41: nothing happens before somebody asks for it."""
    program = """
import sys, threading
import torch
before = set(threading.enumerate())
import aiogpu
assert set(threading.enumerate()) == before
assert not torch.cuda.is_initialized()
optional = {"trio", "uvloop", "numpy", "cuda", "pytest", "prometheus_client", "safetensors", "starlette",
    "aiogpu.asgi", "aiogpu.observe", "aiogpu.testing", "aiogpu.drivers.cuda"}
wrong = optional & set(sys.modules)
runtime = aiogpu.Runtime()
assert set(threading.enumerate()) == before
assert not torch.cuda.is_initialized()
print(sorted(wrong - BASE))
"""
    base = in_a_new_process("import sys, torch, anyio; print(set(sys.modules))")
    assert in_a_new_process(f"BASE = {base}\n{program}") == "[]"


def test_it_works_without_trio_numpy_uvloop_and_cuda_python():
    """None of them is needed: a stub in their place makes every import of them fail."""
    program = """
import sys
for name in ("trio", "uvloop", "numpy", "cuda"):
    sys.modules[name] = None
import warnings
warnings.simplefilter("ignore")
import asyncio, torch, aiogpu
@aiogpu.task
async def main():
    there = await aiogpu.to_device({"x": torch.arange(100_000)})
    total = await aiogpu.run_sync(torch.sum, there["x"])
    return await aiogpu.item(total), (await aiogpu.to_host(there))["x"][-1].item()
print(asyncio.run(main()))
"""
    assert in_a_new_process(program) == str((sum(range(100_000)), 99_999))
