"""Two virtual devices of one machine: streams and a current stream each, and one race detector for both.

Tensors of virtual devices are CPU tensors, so a book is kept of where they are: :meth:`Two.on_first`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from aiogpu import _engine
from aiogpu._engine import Engine
from aiogpu.testing import VirtualDevice, virtual_device
from aiogpu.transfers import api, peers

__all__ = ["Two", "two_devices"]

#: What their engines are found by. The second's tensors are made on the CPU, which this names, too.
FIRST, SECOND = torch.device("xpu", 0), torch.device("cpu", 0)


class _Second(VirtualDevice):
    """It knows what the first one knows, and its events are the first one's."""

    def __init__(self, first: VirtualDevice) -> None:
        self._first = first
        super().__init__(auto=False)
        self.device = SECOND
        self._changed = first._changed
        self._host_clock, self._writes, self._reads = first._host_clock, first._writes, first._reads
        self._pinned = first._pinned

    def _open(self, kind: Any) -> Any:
        stream = super()._open(kind)
        stream.native.number += 1000  # of the whole machine
        stream.device = SECOND
        return stream


class Two:
    def __init__(self, first: VirtualDevice, second: VirtualDevice, engines: list[Engine]) -> None:
        self.first, self.second = first, second
        self.engines = engines
        self._on_first: set[int] = set()

    def on_first(self, tensor: torch.Tensor) -> torch.Tensor:
        self._on_first.add(tensor.untyped_storage().data_ptr())
        return tensor

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        if tensor.is_meta:
            return tensor.device
        return FIRST if tensor.untyped_storage().data_ptr() in self._on_first else torch.device("cpu")

    def run_all(self) -> None:
        while not (self.first.idle and self.second.idle):
            before = self._queued()
            self.first.run_all()
            self.second.run_all()
            if self._queued() == before:
                return  # latches

    def _queued(self) -> int:
        return sum(len(queue.commands) for device in (self.first, self.second) for queue in device._queues)


@contextmanager
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    """The first is the default device; ``to_device(x, "second")`` copies to the second."""
    with virtual_device(auto=False) as first:
        second = _Second(first)
        engines = [_engine.make_engine(torch.device("cpu")), Engine(second)]
        engines[1].warm_up()
        two = Two(first, second, engines)
        device, is_ordinary = api._device, api.is_ordinary
        monkeypatch.setattr(
            api, "_device", lambda runtime, d: SECOND if d == "second" else device(runtime, d)
        )
        monkeypatch.setattr(peers, "device_of", two.device_of)
        monkeypatch.setattr("aiogpu.transfers.uploads.device_of", two.device_of)
        monkeypatch.setattr(api, "is_ordinary", lambda x: is_ordinary(x) and two.device_of(x) != FIRST)
        monkeypatch.setattr(peers, "_introduced", set())
        for key, engine in zip((FIRST, SECOND), engines, strict=True):
            _engine.install_engine(key, engine)
        try:
            yield two
        finally:
            for key in (FIRST, SECOND):
                _engine.install_engine(key, None)
            engines[1].close_threads(5.0)
            second.close()
