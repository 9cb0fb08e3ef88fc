"""The Prometheus exporter: what it counts, that nothing leaks, and that nobody pays who does not export."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import anyio
import pytest
import torch

prometheus_client = pytest.importorskip("prometheus_client", reason="the metrics extra is not installed")

import aiogpu  # noqa: E402 -- after the skip
from aiogpu import _emit  # noqa: E402
from aiogpu._batching import observing  # noqa: E402
from aiogpu.asgi import StreamMiddleware  # noqa: E402
from aiogpu.observe.metrics import PrometheusMetrics, _LoopLag  # noqa: E402

OBSERVERS = [
    _emit.operation_observers, _emit.wakeup_observers, _emit.request_observers, observing.observers,
]  # fmt: skip


@pytest.fixture
def registry() -> Any:
    return prometheus_client.CollectorRegistry()


@pytest.fixture(autouse=True)
def _nobody_listens_afterwards() -> Any:
    yield
    assert OBSERVERS == [[], [], [], []]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


async def ask(app: Any, path: str = "/") -> None:
    async def receive() -> Any:
        await anyio.sleep_forever()

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    await app(scope, receive, send)


def test_names_have_base_units_and_are_those_that_are_documented(run_asyncio, registry):
    async def main() -> None:
        with PrometheusMetrics(registry, lag_interval=None):
            await aiogpu.to_device(torch.ones(3))
            async with aiogpu.Batcher(double, max_batch_size=2, name="b") as batcher:
                await batcher(torch.ones(1))
                families = list(registry.collect())
        for family in families:
            assert family.documentation
            assert not re.search("_(ms|us|micros|millis|kb|mb)(_|$)", family.name)
            if family.type == "histogram":
                assert family.name.endswith(("_seconds", "_size"))
        names = [family.name + "_total" * (family.type == "counter") for family in families]
        documented = re.findall(r"``(aiogpu_\w+)``", PrometheusMetrics.__doc__ or "")
        assert sorted(documented) == sorted(names)

    run_asyncio(main)


def test_transfers_batches_and_calls_are_counted(run, anydevice, registry):
    async def main() -> None:
        value = registry.get_sample_value
        with PrometheusMetrics(registry, lag_interval=None):
            there = await aiogpu.to_device(torch.ones(256))
            await aiogpu.to_host(there)
            assert value("aiogpu_transfer_seconds_count", {"operation": "to_device"}) == 1
            assert value("aiogpu_transfer_bytes_total", {"operation": "to_device"}) == 1024
            assert value("aiogpu_transfer_seconds_count", {"operation": "to_host"}) == 1
            async with aiogpu.Batcher(double, max_batch_size=4, name="digits") as batcher:
                await aiogpu.gather(*(batcher(torch.ones(1)) for _ in range(4)))
                assert value("aiogpu_batcher_queue_depth", {"batcher": "digits"}) == 0
                assert value("aiogpu_batcher_limit", {"batcher": "digits"}) == 4
            assert value("aiogpu_batcher_calls_total", {"batcher": "digits", "outcome": "ok"}) == 4
            assert value("aiogpu_batcher_wait_seconds_count", {"batcher": "digits"}) == 4
            assert value("aiogpu_batch_size_sum", {"batcher": "digits"}) == 4
            assert value("aiogpu_batch_compute_seconds_count", {"batcher": "digits", "outcome": "ok"}) >= 1
            assert value("aiogpu_batcher_queue_depth", {"batcher": "digits"}) is None, "it has ended"
            assert value("aiogpu_leases_total") > 0
            assert value("aiogpu_device_lost", {"device": "cpu"}) == 0
        assert list(registry.collect()) == []

    run(main)


def test_a_failed_transfer_is_counted_as_one(run, auto_vd, registry):
    seen: list[tuple[str, int, float, BaseException | None]] = []

    def watch(*event: Any) -> None:
        seen.append(event)

    async def main() -> None:
        with PrometheusMetrics(registry, lag_interval=None):
            _emit.operation_observers.append(watch)
            try:
                auto_vd.fail_submit(1, RuntimeError("injected"))
                with pytest.raises(RuntimeError, match="injected"):
                    await aiogpu.to_host(torch.ones(3))
            finally:
                _emit.operation_observers.remove(watch)
            operation = {"operation": "to_host"}
            assert registry.get_sample_value("aiogpu_transfer_errors_total", operation) == 1
            assert registry.get_sample_value("aiogpu_transfer_seconds_count", operation) is None

    run(main)
    ((what, _, seconds, error),) = seen
    assert what == "to_host"
    assert seconds >= 0
    assert str(error) == "injected"


def test_a_call_that_is_cancelled_leaves_no_gauge_behind(run, anydevice, registry, until):
    """Gauges that leak on disconnect: they are read at the scrape, not counted up and down."""
    hold = threading.Event()

    def held(x: torch.Tensor) -> torch.Tensor:
        hold.wait(20)
        return x

    async def main() -> None:
        def depth() -> Any:
            return registry.get_sample_value("aiogpu_batcher_queue_depth", {"batcher": "b"})

        with PrometheusMetrics(registry, lag_interval=None):
            async with aiogpu.Batcher(held, max_batch_size=1, in_flight=1, name="b") as batcher:
                async with anyio.create_task_group() as group:
                    for _ in range(5):
                        group.start_soon(batcher, torch.ones(1))
                    await until(lambda: depth() == 4)
                    group.cancel_scope.cancel()
                assert depth() == 0
                hold.set()
            outcome = {"batcher": "b", "outcome": "cancelled"}
            assert registry.get_sample_value("aiogpu_batcher_calls_total", outcome) == 5

    run(main)


def test_two_batchers_of_one_name_are_one_gauge(run_asyncio, registry):
    async def main() -> None:
        with PrometheusMetrics(registry, lag_interval=None):
            async with aiogpu.Batcher(double, max_batch_size=4, name="b"):
                async with aiogpu.Batcher(double, max_batch_size=3, name="b"):
                    assert registry.get_sample_value("aiogpu_batcher_limit", {"batcher": "b"}) == 7
                    prometheus_client.generate_latest(registry)

    run_asyncio(main)


def test_requests_are_counted_by_what_their_clients_were_told(run, anydevice, registry):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/late":
            raise TimeoutError
        if scope["path"] == "/bug":
            raise ZeroDivisionError
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def gone(scope: Any, receive: Any, send: Any) -> None:
        await anyio.sleep_forever()

    async def main() -> None:
        with PrometheusMetrics(registry, lag_interval=None):
            middleware = StreamMiddleware(app)
            for path in ("/", "/", "/late", "/healthz", "/readyz"):
                await ask(middleware, path)
            with pytest.raises(ZeroDivisionError):
                await ask(middleware, "/bug")
            middleware.drain()
            await ask(middleware)

            async def disconnect() -> Any:
                return {"type": "http.disconnect"}

            scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
            await StreamMiddleware(gone)(scope, disconnect, None)
            counts = {
                sample.labels["status"]: sample.value
                for family in registry.collect()
                for sample in family.samples
                if sample.name == "aiogpu_requests_total"
            }
            assert counts == {"201": 2, "504": 1, "500": 1, "503": 1, "499": 1}
            assert registry.get_sample_value("aiogpu_request_seconds_count") == 6

    run(main)


def test_a_wake_up_by_the_device_is_measured(run, vd, until, registry):
    async def main() -> None:
        async with aiogpu.Runtime(spin=0.0):
            with PrometheusMetrics(registry, lag_interval=None):
                operation = aiogpu.to_host(torch.ones(3))
                await until(lambda: vd.armed)  # the loop sleeps: nothing but a notification wakes it
                vd.run_all()
                await operation
                assert registry.get_sample_value("aiogpu_wakeup_seconds_count") >= 1

    run(main)


def test_a_loop_that_stands_still_shows_as_lag(run, registry, until):
    async def main() -> None:
        lag = registry.get_sample_value
        with PrometheusMetrics(registry, lag_interval=0.001):
            await until(lambda: lag("aiogpu_loop_lag_seconds_count") >= 3)
            asked = lag("aiogpu_loop_lag_seconds_count")
            time.sleep(0.1)  # noqa: ASYNC251 -- what nobody should do
            await until(lambda: lag("aiogpu_loop_lag_seconds_count") > asked)
            late = lag("aiogpu_loop_lag_seconds_count") - lag(
                "aiogpu_loop_lag_seconds_bucket", {"le": "0.03"}
            )
            assert late >= 1

    run(main)


def test_the_lags_thread_ends_with_the_block_and_with_the_loop(run, registry, blocking_until):
    def sampling() -> int:
        return sum(thread.name == "aiogpu-loop-lag" for thread in threading.enumerate())

    async def main() -> None:
        with PrometheusMetrics(registry, lag_interval=0.001):
            assert sampling() == 1
        # And one that nobody stops, whose last question the loop may take with it.
        _LoopLag(aiogpu.current_runtime().reactor.door, 0.0, lambda lag: None)

    run(main)
    blocking_until(lambda: sampling() == 0)


def test_a_second_exporter_is_refused_and_changes_nothing(run_asyncio, registry):
    async def main() -> None:
        with PrometheusMetrics(registry, lag_interval=None):
            before = [len(each) for each in OBSERVERS]
            with pytest.raises(ValueError, match="Duplicated"):
                PrometheusMetrics(registry, lag_interval=None).__enter__()
            assert [len(each) for each in OBSERVERS] == before
            await aiogpu.to_device(torch.ones(3))
            assert registry.get_sample_value("aiogpu_transfer_seconds_count", {"operation": "to_device"}) == 1

    run_asyncio(main)


def test_a_scrape_after_the_runtimes_end_shows_nothing_and_raises_nothing(run_asyncio, registry):
    exporters: list[PrometheusMetrics] = []

    async def main() -> None:
        exporters.append(PrometheusMetrics(registry, lag_interval=None).__enter__())

    run_asyncio(main)
    assert registry.get_sample_value("aiogpu_streams") is None
    exporters[0].__exit__(None, None, None)


def test_an_explicit_runtime_that_takes_over_is_exported_from_then_on(run, anydevice, registry):
    async def main() -> None:
        with PrometheusMetrics(registry, lag_interval=None):
            await aiogpu.to_device(torch.ones(3))
            async with aiogpu.Runtime():
                await aiogpu.to_device(torch.ones(3))
                assert registry.get_sample_value("aiogpu_streams") > 0
            assert registry.get_sample_value("aiogpu_streams") is None

    run(main)


def test_an_observer_that_fails_hurts_nobody(run, anydevice, abandoned):
    def broken(*event: Any) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        for observers in OBSERVERS:
            observers.append(broken)
        try:
            assert (await aiogpu.to_host(await aiogpu.to_device(torch.ones(3)))).tolist() == [1, 1, 1]
        finally:
            for observers in OBSERVERS:
                observers.clear()

    run(main)
    assert any("observer has failed" in line for line in abandoned)


def test_without_a_listener_nothing_is_measured(run_asyncio, monkeypatch):
    """The cost is one look at an empty list."""

    def never(*event: Any) -> None:
        raise AssertionError("emitted although nobody listens")

    from aiogpu import _operation, _reactor

    monkeypatch.setattr(_operation, "emit", never)
    monkeypatch.setattr(_reactor, "emit", never)

    async def main() -> None:
        await aiogpu.to_host(await aiogpu.to_device(torch.ones(3)))

    run_asyncio(main)
