"""Drivers: what a device must be able to do for aiogpu, once per kind of device.

``base`` is the contract, ``cuda`` and ``cpu`` are the two real ones; the virtual one for tests is in
:mod:`aiogpu.testing`. Raw driver handles and ``cuda.bindings`` appear in ``cuda`` and ``cuda_entries`` alone.
"""
