"""The public surface as data: what is exported, documented and typed is one and the same list."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiogpu
import aiogpu.testing

ROOT = Path(aiogpu.__file__).parent.parent

#: A change here is a change of the public interface: it belongs into the changelog.
SIGNATURES = {
    "to_device": "(data, device=None, *, dtype=None)",
    "to_host": "(data, *, dtype=None, out=None)",
    "copy_": "(dst, src)",
    "item": "(tensor)",
    "synchronize": "(target=None)",
    "task": "(fn=None, /, *, device=None, priority=0)",
    "gather": "(*awaitables)",
    "pipeline": "(source, *, buffer=1)",
    "prefetch": (
        "(source, *, depth=2, device=None, transform=None, workers=None, ordered=True, run_ahead=2, "
        "stateful=False)"
    ),
    "amap": "(fn, items, *, limit=None)",
    "stream": "(stream=None, *, device=None, priority=0)",
    "current_stream": "(device=None)",
    "device": "()",
    "run_sync": "(fn, *args, abandon_on_cancel=False, limiter=None)",
    "share": "(x)",
    "create_channel": "(max_items)",
    "register": "(cls, flatten, unflatten)",
    "current_runtime": "()",
    "stats": "()",
    "load_safetensors": "(path, device=None, *, dtype=None, names=None, progress=None)",
    "load_state_dict": "(model, path, *, strict=True, assign=False, device=None, progress=None)",
    "Limiter": "(operations=None, bytes=None)",
    "Batcher": (
        "(fn, *, max_batch_size, max_delay=None, max_queue=1024, max_queue_per_client=None, collate=None, "
        "split=None, cost=None, max_cost=None, sizes=None, in_flight=2, isolate=False, to_host=False, "
        "device=None, name=None, observer=None)"
    ),
    "Runtime": (
        "(device=None, *, streams=None, spin=None, staging_bytes=None, pinned_bytes=None, workers=None, "
        "max_inflight_bytes=None, grace=None, wake=None, debug=None)"
    ),
}
#: Names whose call is no business of users.
TYPES = {
    "Operation",
    "Stats",
    "AiogpuError",
    "CaptureError",
    "ClosedError",
    "DeviceError",
    "DeviceLostError",
    "BatchEnded",
    "BatcherStats",
    "CallEnded",
    "OverloadedError",
    "PrefetchStats",
    "ReceiveChannel",
    "SendChannel",
    "StageStats",
}


def public_names(module: Any) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


def bare(signature: inspect.Signature) -> str:
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(parameters))


def test_all_is_what_is_defined_and_sorted():
    assert set(aiogpu.__all__) == public_names(aiogpu)
    assert aiogpu.__all__ == sorted(aiogpu.__all__)
    assert len(set(aiogpu.__all__)) == len(aiogpu.__all__)
    assert set(aiogpu.testing.__all__) == public_names(aiogpu.testing)


def test_signatures_are_what_users_rely_on():
    assert {name: bare(inspect.signature(getattr(aiogpu, name))) for name in SIGNATURES} == SIGNATURES
    assert SIGNATURES.keys() | TYPES == set(aiogpu.__all__)


@pytest.mark.parametrize("name", aiogpu.__all__)
def test_every_public_name_has_a_docstring_of_its_own(name):
    thing = getattr(aiogpu, name)
    assert inspect.getdoc(thing)
    assert thing.__doc__
    assert inspect.getdoc(thing) != inspect.getdoc(type(thing))
    for attribute, value in vars(thing).items() if isinstance(thing, type) else ():
        if not attribute.startswith("_") and inspect.isfunction(value):
            assert value.__doc__, f"{name}.{attribute}"


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_every_parameter_is_annotated(name):
    thing = getattr(aiogpu, name)
    maker = "__new__" if "__new__" in vars(thing) else "__init__"
    function = getattr(thing, maker) if isinstance(thing, type) else inspect.unwrap(thing)
    parameters = [*inspect.signature(function).parameters.values()]
    signature = inspect.signature(function)
    missing = [p for p in parameters if p.name not in ("self", "cls") and p.annotation is p.empty]
    assert not missing
    assert signature.return_annotation is not signature.empty


@pytest.mark.parametrize(
    "name", sorted({"to_device", "to_host", "copy_", "item", "task", "run_sync", "synchronize"})
)
def test_calls_document_what_they_raise(name):
    assert re.search(r"\bRaises\b", getattr(aiogpu, name).__doc__)


def test_every_setting_of_the_runtime_is_documented():
    for parameter in inspect.signature(aiogpu.Runtime).parameters:
        assert re.search(rf"\b{parameter}\b", aiogpu.Runtime.__doc__), parameter


def test_every_counter_is_documented():
    missing = [
        name for name in aiogpu.Stats.__dataclass_fields__ if f"``{name}``" not in aiogpu.Stats.__doc__
    ]
    assert not missing


def test_what_modules_declare_is_there():
    for info in pkgutil.walk_packages(aiogpu.__path__, "aiogpu."):
        if not info.ispkg and not info.name.endswith(("__main__", ".cuda")):
            module = importlib.import_module(info.name)
            assert not [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)], (
                info.name
            )


def test_the_version_is_the_packages():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{aiogpu.__version__}"' in text


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "aiogpu" / "py.typed").exists()


def test_star_import_gives_the_public_names_only():
    program = "from aiogpu import *; print(sorted(n for n in dir() if not n.startswith('_')))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == str(sorted(aiogpu.__all__))


def test_nothing_public_hides_where_it_comes_from():
    """Pickles, tracebacks and documentation name the module that defines a thing."""
    for name in aiogpu.__all__:
        thing = getattr(aiogpu, name)
        module = importlib.import_module(thing.__module__)
        assert getattr(module, name) is thing
