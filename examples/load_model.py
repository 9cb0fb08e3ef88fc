"""A model's weights from a safetensors file, with a progress bar, while a heartbeat goes on.

    python examples/load_model.py [--layers N] [--width N] [--json out.json]

The file is written first. The model is made on the meta device, so that its own weights cost neither time nor
memory, and gets the file's by `load_state_dict(assign=True)`. Needs `pip install aiogpu[examples,files]`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn, TransferSpeedColumn
from safetensors.torch import save_file

import aiogpu
from _show import heartbeat, milliseconds, percentile, print_table, write_json


def network(layers: int, width: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


async def load(path: Path, model: torch.nn.Module, device: torch.device) -> dict[str, float]:
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("weights", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        async with heartbeat() as gaps:
            start = perf_counter()
            await aiogpu.load_state_dict(model, path, assign=True, device=device, progress=show)
            took = perf_counter() - start
    return {"seconds": took, "gap p99": percentile(gaps, 99), "gap max": max(gaps)}


async def main(layers: int, width: int, device: torch.device) -> dict[str, float]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        saved = network(layers, width)
        await aiogpu.run_sync(save_file, saved.state_dict(), path)
        with torch.device("meta"):
            model = network(layers, width)
        measured = await load(path, model, device)
    x = torch.ones(width)
    y = await aiogpu.to_host(model(await aiogpu.to_device(x, device)))
    torch.testing.assert_close(y, saved(x).detach(), rtol=1e-3, atol=1e-3)
    nbytes = sum(parameter.nbytes for parameter in saved.parameters())
    return {"GB/s": nbytes / 1e9 / measured["seconds"], **measured}


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Load a model's weights from a file.")
    parser.add_argument("--layers", type=int, default=60 if cuda else 12)
    parser.add_argument("--width", type=int, default=4096 if cuda else 1024)
    parser.add_argument("--json", type=Path, help="write the seconds, GB/s and the heartbeat's gaps")
    args = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    measured = asyncio.run(main(args.layers, args.width, device))
    rows = [["GB/s", f"{measured['GB/s']:.2f}"]]
    rows += [[name, milliseconds(value)] for name, value in measured.items() if name != "GB/s"]
    print_table(f"{args.layers} linear layers of width {args.width} from a file to {device}", ["", ""], rows)
    write_json(args.json, measured)
