"""Device to host.

Law of this file: a download runs after what the caller's stream held at the call. A small one goes onto that
stream, into a page-locked slot, and from there into ordinary memory once it has landed. A large one goes to
a leased copy stream that waits for the caller's, straight into page-locked memory: at once if that is the
caller's own, else from a thread, which may have to allocate it. Where it is not to be had, the download goes
through chunks into ordinary memory. For that the staging thread must wait for each chunk, and hundreds
of copies would fill a copy stream: these start only when the producer has finished, so that no thread of
ours ever waits for users' kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .._engine import Engine
from .._operation import Operation
from .._runtime import Runtime
from ..drivers.base import Event, Stream
from .jobs import (
    SMALL_LEAVES,
    Job,
    dense_copy,
    dense_strides,
    give_slots,
    in_slot,
    submit_slot_copy,
    take_slots,
)
from .plan import Plan, Walking, neutral
from .staging import same_order
from .tree import as_tensor

__all__ = ["Download"]

#: Copies of one transfer that may be queued behind a producer that still runs. A stream takes about 1020
#: commands; whoever submits one more waits inside of CUDA, and may hold a lock there that others want.
_COMMANDS = 256


class Download(Job):
    """One ``to_host`` or ``item`` call, or a ``copy_`` to the host.

    ``out``: where to, one host tensor per source; ``None``: new memory. ``wrap(hosts, movers)`` makes the
    result.
    """

    def __init__(
        self,
        runtime: Runtime,
        plan: Plan[Any],
        operation: Operation[Any],
        *,
        dtype: torch.dtype | None = None,
        out: Sequence[torch.Tensor] | None = None,
        wrap: Callable[[list[torch.Tensor], list[Any]], Any] | None = None,
        walking: Walking[Any] | None = None,
    ) -> None:
        super().__init__(runtime, plan, operation, walking)
        self.dtype = dtype
        self.out = out
        self._wrap = wrap

    def start(self, engine: Engine | None) -> None:
        if engine is None:
            # The device's engine is not there yet, but its stream is: what it holds at the call counts.
            self.note_callers_stream(self._device())
            self._start_large(None, self._run_first)
            return
        try:
            caller = engine.driver.current()
            if self.small_converted:
                with neutral(), engine.driver.relaxed():
                    if self._start_small(engine, caller):
                        return
            ready = engine.driver.record(caller)
            with neutral(), engine.driver.relaxed():
                hosts = self._hosts(engine) if self._may_go_at_once(engine) else None
        except BaseException as error:
            self.fail(engine, error)
            return
        on_thread = partial(self._run_large, engine, caller, ready)
        if hosts is None:
            self._start_large(engine, on_thread)
        else:
            again = partial(self._run_behind, engine, caller)  # `ready` is another's by then
            self.at_once(engine, partial(self._direct, engine, hosts, caller, ready), again)

    def _may_go_at_once(self, engine: Engine) -> bool:
        """Into memory of the caller's that runs no code of users'; and none of it from host memory, which the
        call itself would have to copy."""
        plain = self.out is not None and all(type(host) is torch.Tensor for host in self.out)
        there = all(source.device == engine.device for source in self.plan.plain)
        return plain and there and self.may_go_at_once(engine)

    def _start_large(self, engine: Engine | None, work: Callable[[], None]) -> None:
        if self.walking is not None:
            self.walk_first(engine, self.walking, partial(self.in_thread, engine, work))
        else:
            self.in_thread(engine, work, waits=engine is None or not self._only_submits(engine))

    def _only_submits(self, engine: Engine) -> bool:
        """Straight into page-locked memory; where that is not to be had, what waits comes later."""
        plan = self.plan
        few = plan.leaves <= SMALL_LEAVES and not plan.movers and not plan.arrays
        return few and self.out is None and not engine.driver.eager

    def _start_small(self, engine: Engine, stream: Stream) -> bool:
        sources = [dense_copy(self._converted(i, s)) for i, s in enumerate(self.plan.plain)]
        slots = take_slots(engine, sources)
        if slots is None:
            return False
        release = partial(give_slots, engine, slots)
        with self.custody(engine, stream, (slots, sources), release):
            free = iter(slots)
            for source in sources:
                if source.numel():
                    submit_slot_copy(engine, stream, source, next(free), up=False)
            self.land(engine, stream, partial(self._unpack, sources, slots), (slots, sources), release)
        return True

    def _unpack(self, sources: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> Any:
        """The bytes have landed in the slots: hand out copies, in ordinary memory."""
        free = iter(slots)
        hosts = []
        with neutral():
            for index, source in enumerate(sources):
                host = self._destination(index, source)
                if source.numel():
                    with torch.inference_mode(host.is_inference()):
                        host.copy_(in_slot(next(free), source))
                hosts.append(host)
            return self._wrapped([*hosts, *self._arrays()], [])

    def _arrays(self) -> list[torch.Tensor]:
        """Numpy arrays are in host memory already: copied there, as everything is. May be large."""
        copies = []
        for index, array in enumerate(self.plan.arrays, len(self.plan.plain)):
            source = as_tensor(array)
            copy = self._destination(index, source.to(self.dtype) if self.dtype else source)
            copies.append(copy.copy_(source))
        return copies

    def _destination(self, index: int, like: torch.Tensor) -> torch.Tensor:
        if self.out is not None:
            return self.out[index]
        return torch.empty_like(like, device="cpu")

    def _converted(self, index: int, source: torch.Tensor) -> torch.Tensor:
        """``dtype`` is converted on the device: doing it on the way down falls back to blocking copies."""
        source, dtype = self.plan.gather(index, source), self.plan.dtype_of(index)
        return source if dtype is None else source.to(dtype)

    def _run_first(self) -> None:
        engine = self.runtime.engine_blocking(self._device())
        self._run_behind(engine, self.callers_stream(engine))

    def _run_behind(self, engine: Engine, caller: Stream) -> None:
        self._run_large(engine, caller, engine.driver.record(caller))

    def _device(self) -> torch.device | None:
        return self.plan.plain[0].device if self.plan.plain else None

    def _run_large(self, engine: Engine, caller: Stream, ready: Event) -> None:
        if self.out is None:
            self.pack(lambda: self.plan.plain, engine.device)
        hosts = self._hosts(engine)
        if hosts is not None and len(hosts) <= _COMMANDS:
            self._direct(engine, hosts, caller, ready)
            return
        work = partial(self._staged, engine, caller)
        if hosts is not None:  # more than may wait on a copy stream for a kernel of the user's
            work = partial(self._direct, engine, hosts, caller)

        def start(error: BaseException | None) -> None:
            if error is not None:
                self.operation.fail(error)
            else:
                self.in_thread(engine, work)

        self.runtime.watch(engine, caller, ready, start, self)

    def _hosts(self, engine: Engine) -> list[torch.Tensor] | None:
        """Page-locked, dense destinations for everything; ``None`` if it must go through chunks."""
        if self.out is not None:
            direct = all(
                engine.driver.is_pinned(host) and same_order(host, source)
                for host, source in zip(self.out, self.plan.plain, strict=False)  # arrays come last
            )
            return list(self.out[: len(self.plan.plain)]) if direct and not engine.driver.eager else None
        hosts = []
        for index, source in enumerate(self.plan.plain):
            host = self._page_locked(engine, source, self.plan.dtype_of(index) or source.dtype)
            if host is None:
                return None
            hosts.append(host)
        return hosts

    def _page_locked(self, engine: Engine, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        # Torch's pinned allocator rounds up to a power of two.
        nbytes = 1 << max(0, source.numel() * dtype.itemsize - 1).bit_length()
        if not engine.results.claim(nbytes):
            return None
        host = engine.driver.result_memory(source.shape, dense_strides(source), dtype)
        if host is None:
            engine.results.give_back(nbytes)
        else:
            engine.results.track(host, nbytes)
        return host

    def _direct(
        self, engine: Engine, hosts: list[torch.Tensor], caller: Stream, ready: Event | None = None
    ) -> None:
        """``ready``: the producer's end; ``None`` once it has come."""
        with self.lane(engine, engine.downloads) as lane:
            if ready is not None:
                engine.driver.wait(lane.stream, ready)
                engine.driver.recycle(ready)
            movers = self._move_movers(engine, caller)
            arrays = self._arrays()
            with engine.driver.on(lane.stream):
                lane.held.append(self.plan)  # conversions read it on the lane's stream
                for index, (host, source) in enumerate(zip(hosts, self.plan.plain, strict=True)):
                    lane.download(host, _in_order_of(host, self._converted(index, source)))
            if movers:
                engine.driver.order(lane.stream, caller)
            self.land_lane(engine, lane, self._finish([*hosts, *arrays], movers))

    def _staged(self, engine: Engine, caller: Stream) -> None:
        with self.lane(engine, engine.chunked) as lane:
            movers = self._move_movers(engine, caller)
            with engine.driver.on(lane.stream):
                lane.held.append(self.plan)
                sources = [dense_copy(self._converted(*each)) for each in enumerate(self.plan.plain)]
                hosts = [self._destination(*each) for each in enumerate(sources)]
                lane.download_all_through_chunks(list(zip(hosts, sources, strict=True)))
            hosts += self._arrays()
            self.land_lane(engine, lane, self._finish(hosts, movers))

    def _move_movers(self, engine: Engine, caller: Stream) -> list[Any]:
        if not self.plan.movers:
            return []
        options: dict[str, Any] = {} if self.dtype is None else {"dtype": self.dtype}
        with engine.driver.on(caller):
            return self.move_movers(lambda mover: mover.to("cpu", **options))

    def _wrapped(self, hosts: list[torch.Tensor], movers: list[Any]) -> Any:
        return (self._wrap or self.plan.rebuild)(hosts, movers)

    def _finish(self, hosts: list[torch.Tensor], movers: list[Any]) -> Callable[[], Any]:
        """What makes the result. Of many leaves it is made here and now: the loop's thread has no time for
        it. Code of users', which may look at values, runs when these have arrived."""

        def finish() -> Any:
            with neutral():
                return self._wrapped(hosts, movers)

        if not self.plan.in_slabs or self.plan.wraps:
            return finish
        result = finish()
        return lambda: result


def _in_order_of(host: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``source`` on its device, in the order of memory of dense ``host``. A conversion may change it."""
    if same_order(host, source):
        return source
    there = torch.empty_strided(host.shape, host.stride(), dtype=source.dtype, device=source.device)
    return there.copy_(source)
