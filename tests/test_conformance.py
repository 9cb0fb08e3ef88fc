"""Every driver passes the public conformance suite; that keeps the virtual one honest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from aiogpu.drivers.base import Driver, Stream
from aiogpu.drivers.cpu import CpuDriver, HostEvent
from aiogpu.testing import VirtualDevice
from aiogpu.testing.conformance import DriverConformance


class TestCpu(DriverConformance):
    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        driver = CpuDriver()
        yield driver
        driver.close()

    def hold(self, driver: Driver, stream: Stream) -> Callable[[], object]:
        # Not a blocked copy thread: the driver has two, and tests hold streams while others go on.
        event = HostEvent()
        driver.wait(stream, event)
        return event.complete


class TestCpuWithOneThread(TestCpu):
    """Queues that wait for each other must not need a thread each."""

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        driver = CpuDriver(threads=1)
        yield driver
        driver.close()


class TestVirtual(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return VirtualDevice()

    def hold(self, driver: Driver, stream: Stream) -> Callable[[], object]:
        assert isinstance(driver, VirtualDevice)
        return driver.latch(stream).release


class TestVirtualByHand(TestVirtual):
    """Nothing moves but in `settle`; copies take their (virtual) time."""

    @pytest.fixture
    def driver(self) -> Driver:
        return VirtualDevice(auto=False, copy_seconds=0.01)

    def settle(self, driver: Driver) -> None:
        assert isinstance(driver, VirtualDevice)
        driver.run_all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda(DriverConformance):
    wake = "auto"

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        from aiogpu.drivers.cuda import CudaDriver

        driver = CudaDriver(torch.device("cuda", torch.cuda.current_device()), wake=self.wake)
        # A first sleep loads its kernel, which takes longer than a test's hold.
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        yield driver
        torch.cuda.synchronize()
        driver.close()

    def hold(self, driver: Driver, stream: Stream) -> Callable[[], object]:
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            pytest.skip("every launch blocks until it has finished: no stream can be held")
        with driver.on(stream):
            torch.cuda._sleep(500_000_000)  # about 0.25 s on current devices
        return lambda: None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCudaWithWaiterThreads(TestCuda):
    wake = "thread"
