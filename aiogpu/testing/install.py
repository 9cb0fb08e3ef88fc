"""Putting a driver of the test's choice in a device's place.

Law of this file: what is installed for a block is gone after it, and nothing of it may be in flight then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .. import _engine
from .._engine import Engine, EngineSettings
from ..drivers.base import Driver
from .virtual import VirtualDevice

__all__ = ["installed", "virtual_device"]


@contextmanager
def installed(driver: Driver, settings: EngineSettings | None = None) -> Iterator[Engine]:
    """``driver`` serves its device within the block, and is the default device's driver."""
    engine = Engine(driver, settings)
    engine.warm_up()
    before = _engine.install_engine(driver.device, engine)
    default = _engine.settled_default
    _engine.settled_default = lambda: driver.device
    try:
        yield engine
    finally:
        _engine.settled_default = default
        _engine.install_engine(driver.device, before)
        engine.close_threads(5.0)
        driver.close()


@contextmanager
def virtual_device(*, settings: EngineSettings | None = None, **options: Any) -> Iterator[VirtualDevice]:
    """A :class:`VirtualDevice` in the CPU's place within the block, which must contain the event loop.

    ::

        def test_something():
            with virtual_device(auto=False) as device:
                asyncio.run(main(device))
    """
    device = VirtualDevice(**options)
    with installed(device, settings):
        yield device
