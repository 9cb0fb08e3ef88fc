"""``python -m aiogpu doctor [--json]``: what aiogpu finds here, and what it costs if something is missing.

Law of this file: it only looks. It is the one part that may block: nothing waits for it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys

import torch

from ._engine import Engine, default_device, make_engine


def diagnose() -> tuple[dict[str, str], list[str]]:
    """Facts, and remarks on what could be better."""
    facts = {
        "aiogpu": _version("aiogpu"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "anyio": _version("anyio"),
        "cuda-bindings": _version("cuda-bindings"),
        "uvloop": _version("uvloop"),
        "trio": _version("trio"),
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set"),
    }
    engine = make_engine(default_device())
    facts["device"] = _device_name(engine)
    facts["wake-ups by"] = engine.driver.wake_mechanism
    facts["compute streams"] = str(engine.compute.limit)
    facts["staging memory"] = f"{engine.chunks.limit * engine.chunks.nbytes >> 20} MiB at most"
    facts["page-locked results"] = f"{engine.results.limit >> 20} MiB at most"
    return facts, list(_remarks(engine))


def _remarks(engine: Engine) -> list[str]:
    if engine.device.type == "cpu":
        return ["no CUDA device: the same programs run on the CPU, where copies alone are asynchronous"]
    remarks = []
    missing = getattr(engine.driver, "missing", "")
    if missing:
        remarks.append(
            f"no host callbacks ({missing}): waiter threads take their place, about 0.1 to 0.5 ms later and "
            "for more CPU time. pip install cuda-python"
        )
    if int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")) < 32:
        remarks.append(
            "CUDA_DEVICE_MAX_CONNECTIONS is below 32: with many streams, one that waits can hold up another. "
            "aiogpu sets it where it is the first to use CUDA; else export it"
        )
    if not engine.driver.legacy_orders:
        remarks.append("compute streams do not order themselves with the default stream: edges are explicit")
    return remarks


def _device_name(engine: Engine) -> str:
    if engine.device.type != "cuda":
        return str(engine.device)
    return f"{engine.device} ({torch.cuda.get_device_name(engine.device)}, CUDA {torch.version.cuda})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m aiogpu", description=__doc__.partition(":")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what aiogpu finds on this machine")
    doctor.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    facts, remarks = diagnose()
    if options.json:
        print(json.dumps({**facts, "remarks": remarks}, indent=2))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    for remark in remarks or ["all is as it should be"]:
        print(f"- {remark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
