"""Channels: anyio's memory object streams, whose items carry their stream order.

Law of this file: who waits for whom, closing, cloning and every error are anyio's. An item is handed over as
of the sender's current streams when ``send`` is called, and whoever receives it is ordered after that point.
A channel lives on one event loop.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from weakref import WeakSet

import anyio
from anyio.abc import AsyncResource, ObjectReceiveStream, ObjectSendStream
from anyio.streams.memory import (
    MemoryObjectReceiveStream,
    MemoryObjectSendStream,
    MemoryObjectStreamStatistics,
)

from ._errors import CaptureError
from ._handoff import Handoff
from ._loops import current_token
from ._runtime import current_runtime
from ._tasks import current_task

__all__ = ["ReceiveChannel", "SendChannel", "create_channel"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class _Parcel(Handoff[T]):
    __slots__ = ("__weakref__",)

    def empty(self) -> None:
        """Nobody can take it any more. What the device still uses is kept by the points in flight."""
        del self._value
        self._tensors, self._points = [], []


class _Shared(Generic[T]):
    """What all ends of one channel have in common."""

    def __init__(self) -> None:
        #: The event loop that used it first.
        self.token: Any = None
        #: What was sent and has not been received; weakly, as those that have been received are nobody's.
        self.parcels: WeakSet[_Parcel[T]] = WeakSet()
        #: Tasks inside of ``receive``. Some may have been given an item that they have not taken yet.
        self.receiving = 0
        #: All receiving ends are closed.
        self.broken = False

    def check(self) -> None:
        token = current_token()
        if self.token is None:
            self.token = token
        if token is None or token is not self.token:
            raise RuntimeError(
                "a channel belongs to the event loop that used it first; this is another loop, or a thread "
                "without one. From a function that aiogpu.run_sync() runs, return the value and send it in "
                "the coroutine, which is ordered after the function. Between loops, pass values that are "
                "finished (`await aiogpu.synchronize()`) through a queue.Queue"
            )

    def pack(self, item: T) -> _Parcel[T]:
        self.check()
        parcel = _Parcel(item)
        self.parcels.add(parcel)
        return parcel

    def drop_undeliverable(self) -> None:
        """What was left when the last receiving end was closed: senders that stay would keep it."""
        if self.broken and not self.receiving:
            left, self.parcels = tuple(self.parcels), WeakSet()
            for parcel in left:
                parcel.empty()


class _End(AsyncResource):
    """What both ends can do."""

    _inner: MemoryObjectSendStream[Any] | MemoryObjectReceiveStream[Any]
    _shared: _Shared[Any]

    def close(self) -> None:
        """Close this end; does not wait. When the last sending end is closed, receivers get what is left and
        then ``anyio.EndOfStream``. When the last receiving end is, senders get ``anyio.BrokenResourceError``,
        and what is left is let go of."""
        before = self.statistics()
        if before.tasks_waiting_send or before.tasks_waiting_receive:
            self._shared.check()  # they will be woken
        self._inner.close()
        self._shared.broken = not self.statistics().open_receive_streams
        self._shared.drop_undeliverable()

    async def aclose(self) -> None:
        """The same as :meth:`close`."""
        self.close()

    def statistics(self) -> MemoryObjectStreamStatistics:
        """Items held, limit, open ends and waiting tasks: anyio's numbers."""
        return self._inner.statistics()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"<{type(self).__name__}, {now.current_buffer_used} of {now.max_buffer_size} items, "
            f"{now.open_send_streams} sending and {now.open_receive_streams} receiving ends open>"
        )


class SendChannel(_End, ObjectSendStream[T_contra]):
    """The sending end of :func:`create_channel`: ``send``, ``send_nowait``, ``clone``, ``close``.

    Everything is as in ``anyio.streams.memory.MemoryObjectSendStream``, with its exceptions:
    ``anyio.ClosedResourceError`` (this end is closed), ``BrokenResourceError`` (the other one is),
    ``WouldBlock``.
    """

    _inner: MemoryObjectSendStream[_Parcel[T_contra]]

    def __init__(self, inner: MemoryObjectSendStream[Any], shared: _Shared[Any]) -> None:
        self._inner = inner
        self._shared = shared

    async def send(self, item: T_contra) -> None:
        """Send ``item`` as of the current streams now; waits while the channel is full, not for the device.

        Cancelled by a scope while it waits, it has not sent anything. (asyncio's own ``Task.cancel``, and so
        ``asyncio.timeout``, may come in the tick after the item was taken: with anyio's streams that is
        not undone. ``anyio.fail_after`` is safe.) Raises ``CaptureError`` inside a graph capture.
        """
        await self._inner.send(self._shared.pack(item))

    def send_nowait(self, item: T_contra) -> None:
        """Send ``item``; raises ``anyio.WouldBlock`` when nobody waits for it and the channel is full."""
        self._inner.send_nowait(self._shared.pack(item))

    def clone(self) -> SendChannel[T_contra]:
        """Another sending end, to be closed on its own."""
        return SendChannel(self._inner.clone(), self._shared)


class ReceiveChannel(_End, ObjectReceiveStream[T_co]):
    """The receiving end of :func:`create_channel`: ``receive``, ``receive_nowait``, ``async for``, ``clone``.

    Everything is as in ``anyio.streams.memory.MemoryObjectReceiveStream``, with its exceptions:
    ``anyio.ClosedResourceError`` (this end is closed), ``EndOfStream`` (the other one is), ``WouldBlock``.
    """

    _inner: MemoryObjectReceiveStream[_Parcel[T_co]]

    def __init__(self, inner: MemoryObjectReceiveStream[Any], shared: _Shared[Any]) -> None:
        self._inner = inner
        self._shared = shared

    async def receive(self) -> T_co:
        """The next item; the current streams are ordered after its sender, and keep its memory.

        Cancelled by a scope while it waits, it has taken nothing. (asyncio's own ``Task.cancel``, and so
        ``asyncio.timeout``, may come in the tick after an item was handed over: with anyio's streams that
        item is lost. ``anyio.fail_after`` is safe.) Raises ``CaptureError`` inside a graph capture.
        """
        shared = self._shared
        shared.check()
        _refuse_capture()
        shared.receiving += 1
        try:
            return (await self._inner.receive()).take()
        finally:
            shared.receiving -= 1
            shared.drop_undeliverable()

    def receive_nowait(self) -> T_co:
        """The next item; raises ``anyio.WouldBlock`` when there is none."""
        self._shared.check()
        _refuse_capture()
        return self._inner.receive_nowait().take()

    def clone(self) -> ReceiveChannel[T_co]:
        """Another receiving end, to be closed on its own; each item goes to one of them."""
        return ReceiveChannel(self._inner.clone(), self._shared)


class create_channel(tuple[SendChannel[T], ReceiveChannel[T]]):
    """A pair ``(send, receive)`` that carries values between tasks, tensors with their stream order.

    ::

        send, receive = aiogpu.create_channel[torch.Tensor](max_items=2)

        @aiogpu.task
        async def produce():
            with send:
                async for x in source:
                    await send.send(f(x))       # no waiting for the device

        @aiogpu.task
        async def consume():
            async for y in receive:
                g(y)                            # on this task's stream, behind f(x)

    Both ends work like those of ``anyio.create_memory_object_stream``. Whoever receives an item is ordered
    after what its sender had submitted when it sent it, and after nothing else; so the sender must not write
    to an item's tensors afterwards. Any value, not only tensors, orders its receiver after its sender.

    Parameters
    ----------
    max_items:
        How many items it holds before ``send`` waits: 0 (each is handed to a receiver that waits) or more,
        or ``math.inf``.

    Raises
    ------
    ValueError
        When ``max_items`` is no such number.
    """

    def __new__(  # type: ignore[misc]
        cls, max_items: float
    ) -> tuple[SendChannel[T], ReceiveChannel[T]]:
        whole = isinstance(max_items, int) and not isinstance(max_items, bool) and max_items >= 0
        if not whole and max_items != math.inf:
            raise ValueError(f"max_items is a number of items, 0 or more, or math.inf, not {max_items!r}")
        send, receive = anyio.create_memory_object_stream[_Parcel[T]](max_items)
        shared = _Shared[T]()
        return SendChannel(send, shared), ReceiveChannel(receive, shared)


def _refuse_capture() -> None:
    task = current_task()
    engine = task.engine if task is not None else current_runtime().engine_now(None)
    if engine is not None and engine.driver.capturing():
        raise CaptureError(
            "a channel's item would order the current stream, which is being captured into a CUDA graph, "
            "after work outside of it: receive it before or after the capture"
        )
