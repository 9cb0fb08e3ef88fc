"""Tensors of files on their way to a device: reading, staging and copying side by side.

Law of this file: what is under way is bounded, whoever consumes it. There is no task and no thread behind an
iteration that nobody continues, so dropping it is all that ending it takes.

Three stages: a worker thread brings a group of tensors into memory (``_safetensors``), ``to_device`` stages
and copies it while the next group is brought in, and the consumer has the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from ._operation import Operation
from ._run_sync import run_sync
from ._safetensors import Entry, Shard
from .transfers.api import to_device

__all__ = ["Bucket", "Place", "Progress", "TensorStream"]

Progress = Callable[[int, int], object]

#: Bytes of tensors that are loaded together, unless one alone has more: large enough that a copy's start
#: costs little, small enough that several are in flight.
_GROUP_BYTES = 64 * 2**20

#: Tensors of a group at most: taking them apart happens on the loop's thread.
_GROUP_TENSORS = 256

#: Bytes of groups in flight, or arrived and not yet consumed; two groups always.
_AHEAD_BYTES = 4 * _GROUP_BYTES


class Bucket(NamedTuple):
    """What goes with one call of ``to_device``."""

    device: torch.device | None
    dtype: torch.dtype | None


Place = Callable[[str, torch.Tensor], Bucket]


class _Arriving(NamedTuple):
    """A tensor on its way: in which operation's result it will be, and where in there."""

    name: str
    nbytes: int
    operation: Operation[Any]
    at: int


class _Group:
    """Tensors that travel together. Holds its files until it has been started, or dropped."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.nbytes = sum(entry.nbytes for entry in entries)
        self.sources: list[torch.Tensor] = []
        self.operations: list[Operation[Any]] = []
        self.arriving: deque[_Arriving] = deque()

    def bring_in(self, stopped: Callable[[], bool]) -> None:
        """In a worker thread. Raises nothing for being stopped: its frames would hold the file."""
        entries = self.entries
        for shard, start, nbytes in _extents(entries):
            shard.bring_in(start, nbytes, stopped)
        for entry in entries:
            self.sources.append(entry.shard.tensor(entry.name, entry.start))
        if stopped():
            self.sources.clear()

    def start(self, place: Place) -> None:
        buckets: dict[Bucket, list[int]] = {}
        for index, (entry, source) in enumerate(zip(self.entries, self.sources, strict=True)):
            buckets.setdefault(place(entry.name, source), []).append(index)
        arriving: dict[int, _Arriving] = {}
        for bucket, indices in buckets.items():
            operation = to_device([self.sources[i] for i in indices], bucket.device, dtype=bucket.dtype)
            self.operations.append(operation)
            for at, index in enumerate(indices):
                entry = self.entries[index]
                arriving[index] = _Arriving(entry.name, entry.nbytes, operation, at)
        self.arriving.extend(arriving[index] for index in range(len(arriving)))
        self._let_go()  # the operations hold the sources until the device is done

    @property
    def arrived(self) -> bool:
        return all(operation.done() for operation in self.operations)

    def drop(self) -> None:
        for operation in self.operations:
            operation._awaited = True  # that nobody awaits it is meant
        self._let_go()

    def _let_go(self) -> None:
        # Not left to the garbage collector: a cancellation's traceback may hold this object for long.
        self.entries = ()
        self.sources.clear()


def _extents(entries: Iterable[Entry]) -> list[tuple[Shard, int, int]]:
    """The places in files that the entries' bytes are in, adjoining ones as one."""
    extents: list[tuple[Shard, int, int]] = []
    for entry in entries:
        if extents and extents[-1][0] is entry.shard and sum(extents[-1][1:]) == entry.start:
            shard, start, nbytes = extents.pop()
            extents.append((shard, start, nbytes + entry.nbytes))
        else:
            extents.append((entry.shard, entry.start, entry.nbytes))
    return extents


class TensorStream(AsyncIterator[tuple[str, torch.Tensor]]):
    """The iterator of :func:`load_safetensors`. One task at a time.

    It needs no closing where the loop holds the only reference; else ``aclose()``, or ``async with``.
    """

    def __init__(
        self,
        find: Callable[[], list[Entry]],
        place: Place,
        progress: Progress | None,
    ) -> None:
        #: What there is to load, in order. Opens files: worker threads only.
        self._find: Callable[[], list[Entry]] | None = find
        self._place = place
        self._progress = progress
        self._to_come: deque[_Group] = deque()
        self._under_way: deque[_Group] = deque()
        self._running = False
        self._closed = False
        self._done_bytes = self._all_bytes = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, torch.Tensor]:
        if self._running:
            raise RuntimeError("this iteration is being continued by another task already: one at a time")
        self._running = True
        try:
            found = await self._next()
        except BaseException:
            self._close()  # also a cancellation, as for an asynchronous generator
            raise
        finally:
            self._running = False
        if found is None:
            self._close()
            raise StopAsyncIteration
        return found

    async def aclose(self) -> None:
        """End it: nothing more is read. What is in flight runs out by itself. From any task of the loop: to
        one that is waiting for the next tensor, it is the end of the iteration."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    async def _next(self) -> tuple[str, torch.Tensor] | None:
        if self._closed:
            return None
        if self._find is not None:
            found = await run_sync(self._found, abandon_on_cancel=True)
            if self._closed:  # by another task, as it may be after each wait
                return None
            self._to_come, self._find = found, None
            self._all_bytes = sum(group.nbytes for group in found)
        await self._fill()
        if not self._under_way:
            return None
        arriving = self._under_way[0].arriving
        name, nbytes, operation, at = arriving[0]
        # Awaited for each tensor anew: whichever stream is current now is the one that will use it.
        tensor: torch.Tensor = (await operation)[at]
        if self._closed:
            return None
        arriving.popleft()
        if not arriving:
            self._under_way.popleft()
        self._done_bytes += nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._all_bytes)
        return name, tensor

    def _found(self) -> deque[_Group]:
        """In a worker thread."""
        find = self._find
        groups = _groups(find()) if find is not None else []
        return deque(() if self._closed else groups)  # closed: nobody takes it, and it must not stay

    async def _fill(self) -> None:
        """Start what may be under way."""
        while self._to_come and self._has_room(self._to_come[0].nbytes):
            group = self._to_come[0]
            await run_sync(group.bring_in, self._is_closed, abandon_on_cancel=True)
            if self._closed:
                return
            self._to_come.popleft()
            self._under_way.append(group)
            group.start(self._place)

    def _has_room(self, nbytes: int) -> bool:
        under_way = self._under_way
        if len(under_way) < 2:
            return True
        if under_way[0].arrived:  # the consumer first: on a cold disk the next group takes its time
            return False
        return sum(group.nbytes for group in under_way) + nbytes <= _AHEAD_BYTES

    def _is_closed(self) -> bool:
        return self._closed

    def _close(self) -> None:
        self._closed = True  # a thread that reads for us looks at it
        self._find = None
        for groups in (self._to_come, self._under_way):
            while groups:
                groups.popleft().drop()

    def __del__(self) -> None:
        if not self._closed:
            self._close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._done_bytes} of {self._all_bytes} bytes"
        return f"<TensorStream, {state}>"


def _groups(entries: Iterable[Entry]) -> list[_Group]:
    groups: list[list[Entry]] = []
    nbytes = 0
    for entry in entries:
        fits = nbytes + entry.nbytes <= _GROUP_BYTES
        if not groups or not fits or len(groups[-1]) == _GROUP_TENSORS:
            groups.append([])
            nbytes = 0
        groups[-1].append(entry)
        nbytes += entry.nbytes
    return [_Group(group) for group in groups]
