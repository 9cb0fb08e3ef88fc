"""The two models that are served, trained at the first start on data that ships with scikit-learn.

`Digits` reads scanned handwritten digits; `Writer` continues a text, one character after another, and has
learned that from scikit-learn's descriptions of its datasets. Weights are cached as safetensors: numbers
only, no pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SEED = 0
SIDE = 8  # a digit has 8 × 8 pixels, 0 (white) to 16 (black)
DARKEST = 16.0

Told = Callable[[float], object]  # how much has been done, 0 to 1
M = TypeVar("M", bound=nn.Module)


class Digits(nn.Module):
    """(n, 8, 8) pixels, 0 to 16, to (n, 10) probabilities."""

    def __init__(self) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> list[nn.Module]:
            return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

        self.layers = nn.Sequential(
            *block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 128), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(128 * 2 * 2, 10),
        )  # fmt: skip

    def forward(self, pixels: Tensor) -> Tensor:
        return self.logits(pixels).softmax(1)

    def logits(self, pixels: Tensor) -> Tensor:
        scores: Tensor = self.layers(pixels.unsqueeze(1).float() / DARKEST)
        return scores


class Writer(nn.Module):
    """A recurrent network over printable ASCII, one character at a time."""

    CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(self.CHARACTERS), 48)
        self.cell = nn.GRU(48, width, batch_first=True)
        self.out = nn.Linear(width, len(self.CHARACTERS))

    def forward(self, characters: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(n, time) characters to (n, time, 96) scores of the next ones, and the state after them."""
        hidden, state = self.cell(self.embed(characters), state)
        return self.out(hidden), state

    @torch.inference_mode()
    def step(
        self, characters: Tensor, state: Tensor | None, generator: torch.Generator, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Read (1, time) characters, draw the next one: ((1, 1) character, state). Waits for no device."""
        scores, state = self(characters, state)
        # Drawn by the Gumbel-max trick (Gumbel 1954): argmax needs no check of its input on the host.
        uniform = torch.rand(scores.shape[-1], generator=generator, device=scores.device)
        noise = -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))
        return (scores[:, -1] / temperature + noise).argmax(-1, keepdim=True), state

    @classmethod
    def encode(cls, text: str) -> list[int]:
        """Characters as numbers; those it does not know are left out."""
        return [cls.CHARACTERS.index(c) for c in text if c in cls.CHARACTERS]


# -- training ------------------------------------------------------------------------------------------


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Scans and labels to learn from, scans and labels held back."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels.astype(np.float32).reshape(-1, SIDE, SIDE)
    split = train_test_split(pixels, labels, test_size=0.25, stratify=labels, random_state=SEED)
    return split[0], split[2], split[1], split[3]


def text() -> str:
    """Some 100 KB of English: the descriptions of scikit-learn's datasets."""
    folder = resources.files("sklearn.datasets.descr")
    pages = sorted((page for page in folder.iterdir() if page.name.endswith(".rst")), key=lambda p: p.name)
    return "\n\n".join(page.read_text(encoding="utf-8") for page in pages)


def train_digits(device: torch.device, told: Told, *, epochs: int = 15) -> Digits:
    pixels, labels, _, _ = digits()
    x, y = torch.from_numpy(pixels).to(device), torch.from_numpy(labels).to(device)
    model = Digits().to(device)
    per_epoch = math.ceil(len(x) / 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
    for epoch in range(epochs):
        for chosen in torch.randperm(len(x)).to(device).split(64):
            loss = nn.functional.cross_entropy(model.logits(x[chosen]), y[chosen])
            _learn(optimizer, loss)
            schedule.step()
        told((epoch + 1) / epochs)
    return model


def train_writer(device: torch.device, told: Told, *, steps: int = 250, length: int = 64) -> Writer:
    characters = torch.tensor(Writer.encode(text()), device=device)
    model = Writer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    window = torch.arange(length + 1, device=device)
    for step in range(steps):
        starts = torch.randint(len(characters) - length - 1, (32, 1)).to(device)
        batch = characters[starts + window]
        scores, _ = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        _learn(optimizer, loss)
        schedule.step()
        told((step + 1) / steps)
    return model


def _learn(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# -- the cache -----------------------------------------------------------------------------------------


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "aiogpu-serve"


def trained(
    kind: type[M], train: Callable[..., M], folder: Path, device: torch.device, told: Told, **how: int
) -> M:
    """A trained `kind`: from the cache, or trained now and put there. Blocks: for a worker thread."""
    recipe = json.dumps([kind.__name__, how, [list(p.shape) for p in kind().parameters()]])
    path = folder / f"{kind.__name__.lower()}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.safetensors"
    if path.exists():
        model = kind().to(device)
        model.load_state_dict(load_file(path, device=str(device)))
    else:
        # Module calls draw from torch's global generator: forked, so that nobody else's numbers change.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = train(device, told, **how)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file({name: x.cpu().contiguous() for name, x in model.state_dict().items()}, unfinished)
        unfinished.replace(path)  # whole or not at all, also with several servers starting
    return model.eval()


def accuracy(model: Digits, device: torch.device) -> float:
    """The part of the held-back digits that is recognized."""
    _, _, pixels, labels = digits()
    with torch.inference_mode():
        answers = model(torch.from_numpy(pixels).to(device)).argmax(1).cpu().numpy()
    return float((answers == labels).mean())
