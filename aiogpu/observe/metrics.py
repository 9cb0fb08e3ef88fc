"""Prometheus metrics (``pip install aiogpu[metrics]``).

Law of this file: gauges are read at the scrape, from what is there; none is counted up at a start and down
at an end, so none can leak when a client disconnects. Histograms and counters are fed by observers, and
there are observers only while somebody exports. Names follow Prometheus: base units, ``_total`` for counters.

    with aiogpu.observe.metrics.PrometheusMetrics():     # in a lifespan, say
        ...                                              # served by prometheus_client as always
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .. import _emit, _engine
from .._batching.observing import BatchEnded, BatcherStats, CallEnded, live_batchers
from .._batching.observing import observers as batcher_observers
from .._loops import Door, DoorClosed
from .._runtime import Runtime, current_runtime

if TYPE_CHECKING:
    from .._batching.batcher import Batcher

__all__ = ["PrometheusMetrics"]

#: Seconds: from what a poll costs to what a large batch takes.
SECONDS = (10e-6, 30e-6, 100e-6, 300e-6, 1e-3, 3e-3, 10e-3, 30e-3, 0.1, 0.3, 1.0, 3.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class PrometheusMetrics:
    """Export the running event loop's runtime, its device and all batchers, within the block.

    ======================================= =========================================================
    ``aiogpu_requests_total``               HTTP requests by ``status``; 499: the client had gone
    ``aiogpu_request_seconds``              from a request's arrival to its end
    ``aiogpu_batcher_queue_depth``          calls that wait now, by ``batcher``
    ``aiogpu_batcher_running``              batches on the device now
    ``aiogpu_batcher_limit``                items a batch may have now (lower after running out of memory)
    ``aiogpu_batcher_calls_total``          ended calls by ``outcome``
    ``aiogpu_batcher_wait_seconds``         a call's time in the queue
    ``aiogpu_batcher_call_seconds``         a call's whole time
    ``aiogpu_batch_size``                   calls in a batch
    ``aiogpu_batch_padding_total``          rows that were added to reach a preferred size
    ``aiogpu_batch_compute_seconds``        a batch's time on the device, by ``outcome``
    ``aiogpu_transfer_seconds``             copies by ``operation``, from call to end
    ``aiogpu_transfer_bytes_total``         what they have moved
    ``aiogpu_transfer_errors_total``        those that have failed
    ``aiogpu_transfers_in_flight``          those that are not over
    ``aiogpu_wakeup_seconds``               from a thread's call to the loop's look; a sample of the wake-ups
    ``aiogpu_loop_lag_seconds``             how late the loop runs what is due at once
    ``aiogpu_streams``                      compute streams opened
    ``aiogpu_streams_in_use``               compute streams leased now
    ``aiogpu_leases_total``                 leases of compute streams
    ``aiogpu_shared_leases_total``          leases that had to share a stream
    ``aiogpu_notifications_total``          notifications that the driver was asked for
    ``aiogpu_staging_bytes``                page-locked staging memory
    ``aiogpu_staging_in_use_bytes``         how much of it transfers have now
    ``aiogpu_pinned_result_bytes``          page-locked results that users hold
    ``aiogpu_device_lost``                  1: restart the process; by ``device``
    ======================================= =========================================================

    Parameters
    ----------
    registry:
        Where; default: ``prometheus_client.REGISTRY``.
    lag_interval:
        Seconds between two measurements of the loop's lag, by a thread; ``None``: none.

    Raises
    ------
    ValueError
        The registry has aiogpu's metrics already: one exporter per registry.
    RuntimeError
        Entered outside of an event loop.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, *, lag_interval: float | None = 0.25
    ) -> None:
        self._registry = REGISTRY if registry is None else registry
        self._lag_interval = lag_interval
        self._exit = ExitStack()
        self._runtime: Runtime | None = None

    def __enter__(self) -> Self:
        runtime = self._runtime = current_runtime()
        with ExitStack() as undo:  # a registry that refuses leaves nothing behind
            self._register(undo, self)
            events = _Events(partial(self._register, undo))
            for observers, observer in events.subscriptions():
                observers.append(observer)
                undo.callback(observers.remove, observer)
            if self._lag_interval is not None:
                lag = _LoopLag(runtime.reactor.door, self._lag_interval, events.loop_lag.observe)
                undo.callback(lag.stop)
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._runtime = None
        self._exit.close()

    def _register(self, undo: ExitStack, collector: Any) -> None:
        self._registry.register(collector)
        undo.callback(self._registry.unregister, collector)

    # -- prometheus_client's interface -------------------------------------------------------------

    def describe(self) -> Iterable[Metric]:
        """The names, without values: a registry refuses a second exporter."""
        return [*_runtime_metrics(None), *_batcher_metrics([])]

    def collect(self) -> Iterator[Metric]:
        """What there is now. From any thread."""
        runtime = self._runtime
        while runtime is not None and runtime._successor is not None:  # an explicit one has taken over
            runtime = self._runtime = runtime._successor
        if runtime is not None and not runtime.closed:
            yield from _runtime_metrics(runtime)
            yield from _batcher_metrics(live_batchers())


# -- gauges: read at the scrape ------------------------------------------------------------------------

_GAUGES = {
    "streams": ("streams", "Compute streams opened"),
    "streams_in_use": ("streams_in_use", "Compute streams leased"),
    "operations": ("transfers_in_flight", "Transfers that are not over"),
    "staging_bytes": ("staging_bytes", "Page-locked staging memory"),
    "staging_bytes_in_use": ("staging_in_use_bytes", "Page-locked staging memory that transfers have"),
    "result_bytes": ("pinned_result_bytes", "Page-locked results that users hold"),
}
_COUNTERS = {
    "leases": ("leases", "Leases of compute streams"),
    "shared": ("shared_leases", "Leases that had to share a stream"),
    "notifications": ("notifications", "Notifications that the driver was asked for"),
}
_BATCHER_GAUGES = {
    "waiting": ("queue_depth", "Calls that wait"),
    "running": ("running", "Batches on the device"),
    "limit": ("limit", "Calls that a batch may have now"),
}


def _runtime_metrics(runtime: Runtime | None) -> Iterator[Metric]:
    stats = runtime.stats() if runtime is not None else None
    for field, (name, text) in _GAUGES.items():
        yield GaugeMetricFamily(f"aiogpu_{name}", text, value=getattr(stats, field, None))
    for field, (name, text) in _COUNTERS.items():
        yield CounterMetricFamily(f"aiogpu_{name}", text, value=getattr(stats, field, None))
    lost = GaugeMetricFamily("aiogpu_device_lost", "1: lost, restart the process", labels=["device"])
    for device, engine in tuple(_engine._engines.items()) if runtime is not None else ():
        lost.add_metric([str(device)], float(engine.lost is not None))
    yield lost


def _batcher_metrics(batchers: Iterable[Batcher]) -> Iterator[Metric]:
    now: dict[str, list[BatcherStats]] = {}
    for batcher in batchers:
        now.setdefault(batcher.name, []).append(batcher.stats())
    for field, (name, text) in _BATCHER_GAUGES.items():
        gauge = GaugeMetricFamily(f"aiogpu_batcher_{name}", text, labels=["batcher"])
        for batcher_name, stats in now.items():  # of one name there may be several
            gauge.add_metric([batcher_name], sum(getattr(each, field) for each in stats))
        yield gauge


# -- events ------------------------------------------------------------------------------------------


class _Events:
    """Histograms and counters, and the observers that feed them."""

    def __init__(self, register: Callable[[Any], None]) -> None:
        def make(kind: Callable[..., Any], name: str, text: str, labels: str = "", **more: Any) -> Any:
            metric = kind(f"aiogpu_{name}", text, labels.split(), registry=None, **more)
            register(metric)
            return metric

        seconds = partial(make, partial(Histogram, buckets=SECONDS))
        total = partial(make, Counter)
        self.loop_lag = seconds("loop_lag_seconds", "How late the loop runs what is due at once")
        self.wakeup = seconds("wakeup_seconds", "From a thread's call to the loop's look (a sample)")
        self.requests = total("requests", "HTTP requests", "status")
        self.request_seconds = seconds("request_seconds", "From a request's arrival to its end")
        self.transfer_seconds = seconds("transfer_seconds", "Copies, from call to end", "operation")
        self.transfer_bytes = total("transfer_bytes", "Bytes that copies have moved", "operation")
        self.transfer_errors = total("transfer_errors", "Copies that have failed", "operation")
        self.calls = total("batcher_calls", "Ended calls", "batcher outcome")
        self.wait = seconds("batcher_wait_seconds", "A call's time in the queue", "batcher")
        self.call_seconds = seconds("batcher_call_seconds", "A call's whole time", "batcher")
        self.size = make(partial(Histogram, buckets=SIZES), "batch_size", "Calls in a batch", "batcher")
        self.padding = total("batch_padding", "Rows added to reach a preferred size", "batcher")
        self.compute = seconds("batch_compute_seconds", "A batch's time on the device", "batcher outcome")

    def subscriptions(self) -> list[tuple[list[Any], Callable[..., object]]]:
        return [
            (_emit.operation_observers, self._operation_over),
            (_emit.wakeup_observers, self.wakeup.observe),
            (_emit.request_observers, self._request_over),
            (batcher_observers, self._batcher_event),
        ]

    def _operation_over(self, what: str, nbytes: int, seconds: float, error: BaseException | None) -> None:
        if error is not None:
            self.transfer_errors.labels(what).inc()
            return
        self.transfer_seconds.labels(what).observe(seconds)
        self.transfer_bytes.labels(what).inc(nbytes)

    def _request_over(self, status: int, seconds: float) -> None:
        self.requests.labels(status).inc()
        self.request_seconds.observe(seconds)

    def _batcher_event(self, event: CallEnded | BatchEnded) -> None:
        if isinstance(event, BatchEnded):
            self.size.labels(event.batcher).observe(event.size)
            self.padding.labels(event.batcher).inc(event.padded)
            self.compute.labels(event.batcher, event.outcome).observe(event.seconds)
        else:
            self.calls.labels(event.batcher, event.outcome).inc()
            self.wait.labels(event.batcher).observe(event.wait_seconds)
            self.call_seconds.labels(event.batcher).observe(event.total_seconds)


class _LoopLag:
    """Asks the loop for a sign of life, again and again, and measures how long that takes.

    From a thread, not with a timer of the loop's: asyncio's have a granularity of a millisecond, and
    the loop need not be woken for a timer that it could not keep anyway. The next question comes after the
    last answer, so a loop that stands still is not flooded.
    """

    def __init__(self, door: Door, interval: float, observe: Callable[[float], object]) -> None:
        self._door = door
        self._interval = interval
        self._observe = observe
        self._answered = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aiogpu-loop-lag", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No further question. Does not wait: the thread may be waiting for this very loop."""
        self._stop.set()
        self._answered.set()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._answered.clear()
            if self._stop.is_set():
                return
            try:
                self._door.post(partial(self._answer, time.perf_counter()))
            except DoorClosed:
                return
            # A loop that closes with the question in its queue never answers, and tells nobody.
            while not self._answered.wait(0.5):
                if self._door.closed:
                    return

    def _answer(self, asked_at: float) -> None:
        self._observe(time.perf_counter() - asked_at)
        self._answered.set()
