"""For tests, users' too: a device without a device.

* :class:`VirtualDevice`: a virtual clock, latches, faults on demand, and a race detector.
* :func:`virtual_device`: put one in the CPU's place for a block.
* :mod:`aiogpu.testing.conformance`: what every driver must do, as a pytest class.
"""

from .install import installed, virtual_device
from .virtual import Latch, RaceError, VirtualDevice, VirtualFault

__all__ = ["Latch", "RaceError", "VirtualDevice", "VirtualFault", "installed", "virtual_device"]
