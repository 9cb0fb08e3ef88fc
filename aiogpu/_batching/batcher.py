"""Single calls, computed together.

Law of this file: a call is checked and let in, or refused, at once; then it waits for its one outcome.
Whatever happens to its caller is between the caller and its entry: batches know nothing of callers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import torch

from .. import _loops
from .._engine import Engine, normalize
from .._errors import ClosedError, OverloadedError
from .._flow.outlet import Crew
from .._handoff import Handoff
from .._operation import Operation
from .._runtime import current_runtime
from .._settings import at_least
from .._tasks import current_task
from ..transfers.tree import tensors_of
from .collate import describe
from .computing import Batches
from .entry import Entry
from .lane import Lane
from .observing import BatcherStats, CallEnded, Observer, _live, observers, tell
from .pipeline import Pipeline
from .service import Phase, Service
from .sizes import BatchSizes
from .waiting import WaitingCalls

__all__ = ["Batcher"]

Client = str | int | bytes | None

_numbers = itertools.count(1)

#: What ``retry_after`` says while no batch has told how long one takes, in seconds.
_UNKNOWN = 1.0


class Batcher:
    """Concurrent single calls become calls of ``fn`` with many items at once.

    ::

        async with aiogpu.Batcher(model, max_batch_size=32) as batcher:
            ...
            y = await batcher(x)                    # in each request; x of shape (3, 224, 224), y of (1000,)

    A batch starts as soon as the device would idle, or is full: a lone call does not wait, and under load
    batches fill while the one before is computed. Items are stacked along a new first dimension, leaf by
    leaf (items of different structure, shape or dtype go into different batches), and uploaded once; the
    output's tensors are cut along their first dimension. **Results are views of the batch's output**:
    whoever keeps one keeps the memory of all; ``clone()`` what is to stay. ``fn`` is called under
    ``torch.no_grad()``.

    A result is ordered behind the batch on the caller's stream, and nobody waits on the host for the
    device; a caller outside of any task gets a finished one. A caller that is cancelled, or out of time,
    leaves without harm to its neighbours.

    Parameters
    ----------
    fn:
        Takes a batch and returns its output. A synchronous one is called in a thread of the batcher's own,
        always the same, one call after the other, and its work on the device is done in that order: so
        compiled, captured and stateful models can be used as they are. It must not return memory that its
        next call overwrites (CUDA graphs do: return clones). An ``async def`` may be running
        ``in_flight`` times at once.
    max_batch_size:
        Items in a batch, at most.
    max_delay:
        Seconds that a call may wait for its batch to become full although it could start. Default: none.
    max_queue, max_queue_per_client:
        Calls that may wait, in all and of one ``client`` (default: a quarter of ``max_queue``). Those
        being computed do not count.
    collate, split:
        ``collate(items) -> batch`` takes the list of items, for example to pad them; it runs in a worker
        thread, and what it leaves in host memory is uploaded. ``split(output)`` returns the results, one
        for each item, in order. With ``collate=list, split=list``, ``fn`` takes and returns lists.
    cost, max_cost:
        ``cost(item)`` is a number, 0 or more (tokens, pixels); the costs in a batch sum up to ``max_cost`` at
        most. Called on the event loop: it must be quick.
    sizes:
        Preferred batch sizes, such as ``(1, 2, 4, 8)``, the last one ``max_batch_size``. A batch is padded up
        to the next of them with copies of its last item, whose results are dropped.
    in_flight:
        Batches under way at once, at most: the copies of one run beside the computation of another. One that
        is not full is put together shortly before the one in front of it should be done.
    isolate:
        When a batch fails, compute its halves again, and theirs, until the bad item is alone and only its
        caller gets the error. One bad item among n costs about 2·log2(n) more calls of ``fn``, n bad ones
        2·n, and those who wait wait that much longer.
    to_host:
        Download each batch's output once; results are host tensors. Cheaper than one ``to_host`` per call.
    device:
        Where batches are computed; default: the runtime's device. On the CPU items stay where they are.
    name:
        What statistics and errors call it.
    observer:
        Called with a ``CallEnded`` or ``BatchEnded`` at each end.

    Running out of memory halves the batch, and the limit for batches to come; the limit comes back
    after some that succeed. Only a call that fails alone raises ``torch.OutOfMemoryError``.

    Leaving the block waits until every call has its result; leaving it with an exception (or cancelled)
    closes it: whoever still waits or is computed gets ``ClosedError``. The task that leaves it may be another
    one than the task that has entered it, as with fixtures and lifespans. One batcher serves one event loop.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        *,
        max_batch_size: int,
        max_delay: float | None = None,
        max_queue: int = 1024,
        max_queue_per_client: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        split: Callable[[Any], Sequence[Any]] | None = None,
        cost: Callable[[Any], float] | None = None,
        max_cost: float | None = None,
        sizes: Iterable[int] | None = None,
        in_flight: int = 2,
        isolate: bool = False,
        to_host: bool = False,
        device: torch.device | str | int | None = None,
        name: str | None = None,
        observer: Observer | None = None,
    ) -> None:
        for what, function in (("fn", fn), ("collate", collate), ("split", split), ("cost", cost)):
            if not callable(function) and (what == "fn" or function is not None):
                raise TypeError(f"Batcher({what}=...) takes a function, not a {type(function).__name__}")
        if (cost is None) != (max_cost is None):
            raise ValueError("cost and max_cost belong together: give both or neither")
        self.name = name if name is not None else f"batcher-{next(_numbers)}"
        self._fn = fn
        self._sizes = BatchSizes(max_batch_size, sizes)
        self._max_delay = None if max_delay is None else at_least(0.0, "max_delay", max_delay, None)
        most = int(at_least(1, "max_queue", max_queue, 1024))
        per_client = int(at_least(1, "max_queue_per_client", max_queue_per_client, max(1, most // 4)))
        self._cost = cost
        self._max_cost = math.inf if max_cost is None else float(at_least(0.0, "max_cost", max_cost, None))
        self._queue = WaitingCalls(most, per_client, self._max_cost)
        self._collate = collate
        self._split = split
        self._in_flight = int(at_least(1, "in_flight", in_flight, 2))
        self._isolate = isolate
        self._to_host = to_host
        self._device = None if device is None else normalize(device)
        self._observers = [] if observer is None else [observer]
        self._entered = False
        self._service: Service | None = None
        self._calls = 0
        self._wait_seconds = 0.0
        self._outcomes = dict.fromkeys(("ok", "error", "timeout", "cancelled", "refused", "closed"), 0)

    # -- lifetime ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a Batcher can be entered once; make a new one: async with Batcher(...): ...")
        self._entered = True
        runtime = current_runtime()
        engine = await runtime.engine(self._device)
        lane = Lane(self._fn, engine, self.name)
        pipeline = Pipeline(
            lane, engine, self._collate, self._split, download=self._to_host, threads=self._in_flight
        )
        batches = Batches(self.name, self._sizes, pipeline, runtime, self._observers, isolate=self._isolate)
        service = Service(
            self.name, self._queue, batches, max_delay=self._max_delay, in_flight=self._in_flight
        )
        self._crew = Crew([service.run], lambda _: service.abort())
        self._crew.start()
        self._service = service
        _live.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        service = self._service
        assert service is not None, "left without having been entered"
        try:
            if kind is None:
                await service.drain()
        finally:
            _live.discard(self)
            service.abort()
            await self._crew.end()

    def close(self) -> None:
        """Take no more calls: those that wait get ``ClosedError`` at once, running ones finish.

        For a service that wants to end soon; leaving the block afterwards waits for the running ones.
        """
        if self._service is not None:
            self._service.close()

    @property
    def closed(self) -> bool:
        """Does it take no calls any more?"""
        return self._service is not None and self._service.phase is not Phase.OPEN

    # -- calls -------------------------------------------------------------------------------------

    async def __call__(
        self, item: Any, /, *, timeout: float | None = None, priority: int = 0, client: Client = None
    ) -> Any:
        """The result for one item, computed in a batch with others.

        Parameters
        ----------
        item:
            Tensors and arrays, on the host or the device, in any nesting of dicts, lists, tuples and
            dataclasses; or what ``collate`` takes. Must not be written before the await returns.
        timeout:
            Seconds until ``TimeoutError``. A call that would not make it is refused at once.
        priority:
            Lower is more urgent. Within a priority, in the order of the calls. The longest waiting call is
            passed over by 15 batches in a row at most, so that nobody starves.
        client:
            On whose behalf: an address, a key (str, int or bytes). Clients with calls waiting are served in
            turns, and each may have ``max_queue_per_client`` of them. Calls without one count as one client.

        Raises
        ------
        OverloadedError
            At once: the queue, or the client's share of it, is full, or the predicted wait is longer than
            ``timeout``. ``retry_after`` says in how many seconds to try again.
        TimeoutError
            After ``timeout``.
        ClosedError
            The batcher is closed, or being closed.
        DeviceLostError
            At once when the device is lost.
        ValueError, TypeError
            What cannot be an argument; an item that costs more than ``max_cost``.
        Exception
            Whatever ``fn``, ``collate``, ``split`` or ``cost`` raises: an object of its own for each call,
            with the place it was raised at as a note.
        """
        made = perf_counter()
        self._calls += 1
        entry: Entry | None = None
        outcome = "error"
        try:
            service = self._usable()
            entry = self._let_in(service, item, made, timeout, priority, client)
            del item
            await service.door.park(entry.waiter)
            if entry.expired:
                outcome = "timeout"
            result = entry.outcome()
            outcome = "ok"
            return result
        except OverloadedError:
            outcome = "refused" if entry is None else "error"
            raise
        except ClosedError:
            outcome = "closed"
            raise
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            outcome = "cancelled"
            raise
        finally:
            self._over(entry, outcome, made)

    def _over(self, entry: Entry | None, outcome: str, made: float) -> None:
        self._outcomes[outcome] += 1
        waited = 0.0
        if entry is not None:
            if outcome != "ok":
                assert self._service is not None
                self._service.leave(entry)
            waited = (entry.started or perf_counter()) - made
            self._wait_seconds += waited
        if self._observers or observers:
            tell(self._observers, CallEnded, self.name, outcome, waited, perf_counter() - made)

    def _usable(self) -> Service:
        service = self._service
        if service is None:
            raise RuntimeError(
                "this Batcher has not been entered: `async with aiogpu.Batcher(...) as batcher:`"
            )
        if _loops.current_token() is not service.door.token:
            raise RuntimeError(
                f"{self.name} was entered in another event loop: a Batcher serves one loop; make one for each"
            )
        if service.phase is not Phase.OPEN:
            raise service.closed_error()
        service.engine.check()
        return service

    def _let_in(
        self,
        service: Service,
        item: Any,
        made: float,
        timeout: float | None,
        priority: int,
        client: Client,
    ) -> Entry:
        """Check the call and put it into the queue. Raises before anything has changed."""
        if type(priority) is not int:
            raise TypeError(f"priority is an int (lower is more urgent), not {priority!r}")
        if type(client) not in (type(None), str, int, bytes):
            # Others have a hash and an equality of their own, which might raise in the dispatcher.
            raise TypeError(f"client is a str, an int or bytes, not {client!r}")
        if type(item) is Operation:
            raise TypeError(f"{self.name} was given an operation, not its result: batcher(await ...)")
        cost = 1.0 if self._cost is None else self._cost_of(item)
        reason = self._queue.refusal(client)
        if reason is not None:
            self._refuse(service, reason, service.predicted_wait(priority, client, cost))
        if timeout is not None:
            at_least(0.0, "timeout", timeout, None)
            if service.longest_wait(cost) > timeout:  # else there is no need to look closer
                wait = service.predicted_wait(priority, client, cost)
                if wait > timeout:
                    reason = (
                        f"the predicted wait of {wait:.3g} s is longer than the timeout of {timeout:.3g} s"
                    )
                    self._refuse(service, reason, wait - timeout)
        engine = service.engine
        signature, nbytes = (None, 0) if self._collate is not None else describe(item, engine.device)
        task = current_task()
        # Where work is done when it is submitted there is nothing to order; other devices' tensors apart. Nor
        # is there for an item that is known to be all in host memory: callers share streams, and with an edge
        # the upload of the next batch would wait for whatever else is on theirs.
        if (not engine.driver.eager or torch.cuda.is_initialized()) and self._has_streams(item, engine):
            item = Handoff(item)
        entry = Entry(
            item,
            service.door.waiter(),
            made,
            priority,
            client,
            cost,
            signature,
            nbytes,
            task is not None and task.engine is engine,
        )
        service.submit(entry, timeout)
        return entry

    def _has_streams(self, item: Any, engine: Engine) -> bool:
        """May there be work that the batch must be ordered behind?"""
        if self._collate is not None:
            return True
        tensors = (item,) if type(item) is torch.Tensor else tensors_of(item)
        return any(tensor.is_cuda or tensor.device == engine.device for tensor in tensors)

    def _refuse(self, service: Service, reason: str, wait: float) -> None:
        retry_after = wait if wait > 0 else service.batches.forecast.typical or _UNKNOWN
        raise OverloadedError(
            f"{self.name} is overloaded: {reason}; try again in {retry_after:.3g} s", retry_after
        )

    def _cost_of(self, item: Any) -> float:
        assert self._cost is not None
        cost = at_least(0.0, "the result of cost()", self._cost(item), None)
        if cost > self._max_cost:
            raise ValueError(
                f"an item of cost {cost} does not fit into any batch: max_cost is {self._max_cost}"
            )
        return float(cost)

    # -- what is going on --------------------------------------------------------------------------

    def stats(self) -> BatcherStats:
        """Counters since the start, and what is now. From any thread (numbers may be a moment apart)."""
        service, outcomes = self._service, self._outcomes
        batches = service.batches if service else None
        return BatcherStats(
            waiting=len(self._queue),
            running=len(batches.running) if batches else 0,
            limit=self._sizes.limit,
            predicted_wait=service.longest_wait() if service else 0.0,
            calls=self._calls,
            ok=outcomes["ok"],
            errors=outcomes["error"],
            timeouts=outcomes["timeout"],
            cancelled=outcomes["cancelled"],
            refused=outcomes["refused"],
            closed=outcomes["closed"],
            batches=batches.count if batches else 0,
            items=batches.items if batches else 0,
            padded=batches.padded if batches else 0,
            wait_seconds=self._wait_seconds,
            compute_seconds=batches.seconds if batches else 0.0,
        )

    def __repr__(self) -> str:
        phase = self._service.phase.value if self._service else "not entered"
        running = len(self._service.batches.running) if self._service else 0
        return f"<Batcher {self.name}, {phase}, {len(self._queue)} waiting, {running} batches running>"
