"""Where a batch is computed: the one thread, or the coroutine, that calls the user's function.

Law of this file: a synchronous function is called in one and the same thread for the lane's lifetime, one
call after the other, and its work on the device is done in that order, too, whatever streams the batches
are on. So models that are compiled, captured, or keep state (a cache, buffers) need nothing more. An
asynchronous function orders its own work: it may be running several times at once.

What goes before and after the call goes with it, in the same thread: one hop there and one back for a batch.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from typing import Any, Protocol

import torch

from .._engine import Engine
from .._errors import bare, fresh
from .._run_sync import run_on
from .._stepwise import stepwise
from .._workers import WorkerPool
from ..drivers.base import Stream

__all__ = ["Job", "Lane", "UserError", "reported", "without_grad"]


class UserError(Exception):
    """Carries what a user's function raised, ready to be handed out, from where it was caught."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def reported(error: Exception, where: str) -> BaseException:
    """``error`` for those who did not call the function that raised it: where it was raised as a note.

    The frames themselves would keep the batch's tensors alive for as long as anybody has the exception.
    A copy: a function may raise one object again and again, which would collect the notes.
    """
    lines = "".join(traceback.format_exception(error))
    twin = bare(fresh(error))
    twin.__cause__ = None  # in the note
    if twin is not error:
        twin.add_note(f"Raised in {where}:\n{lines.rstrip()}")
    return twin


def without_grad() -> AbstractContextManager[None]:
    """Torch's modes for all that is done for a batch, by us and by users' functions.

    Not inference mode: its tensors are not for everybody. It may be on: a caller outside of tasks that awaits
    within it leaves it on for the whole thread meanwhile.
    """
    return _out_of_inference() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _out_of_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


async def _called(fn: Callable[[Any], Any], batch: Any) -> Any:
    with without_grad():
        return await fn(batch)


class Job(Protocol):
    """What a lane carries out. All but :meth:`over` is called where ``fn`` is, on the batch's stream."""

    def wanted(self) -> bool:
        """Does anybody still wait for it? Otherwise it is not computed."""

    def take_batch(self) -> Any:
        """The batch. Nothing else holds it afterwards."""

    def computed(self, output: Any) -> None:
        """The function has returned ``output``."""

    def submitted(self) -> None:
        """Well or badly, nothing more comes onto the stream."""

    def over(self) -> None:
        """On the loop's thread, right after :meth:`submitted`."""


class Lane:
    """Calls ``fn``, sync or async, with one batch after the other."""

    def __init__(self, fn: Callable[[Any], Any], engine: Engine, name: str) -> None:
        self.fn = fn
        self.engine = engine
        self.where = f"the batch function of {name}"
        self.is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
            getattr(fn, "__call__", None)  # noqa: B004 - the method is looked at, not whether there is one
        )
        self.closed = False
        self._threads = WorkerPool(f"batch-{name}", 1, engine.driver.enter_thread)
        #: Where the last call's work is; touched by the lane's thread only.
        self._last: Stream | None = None

    async def carry_out(self, job: Job) -> None:
        """Call ``fn`` on the current task's stream. Raises ``UserError`` for what it raises."""
        if not self.is_async:
            error = await run_on(self._threads, self._in_thread, job, returned=job.over)
            try:
                if error is not None:
                    raise error
            finally:
                del error  # no cycle through the traceback, in which the job would stay
            return
        try:
            with without_grad(), self.engine.driver.relaxed():
                batch = job.take_batch()
            try:
                # In a context of its own: this event-loop task will serve other batches, too.
                coroutine = stepwise(_called(self.fn, batch), copy_context().run)
                del batch
                output = await coroutine
            except Exception as error:
                raise UserError(reported(error, self.where)) from None
            with without_grad(), self.engine.driver.relaxed():
                job.computed(output)
        finally:
            job.submitted()
            job.over()

    def _in_thread(self, job: Job) -> BaseException | None:
        # Returned, and bare: with its frames it would keep the job, in a cycle, where nobody fetches it.
        try:
            self._compute(job)
        except BaseException as error:
            return bare(error)
        return None

    def _compute(self, job: Job) -> None:
        if self.closed or not job.wanted():
            raise RuntimeError("nobody waits for this batch any more")
        here = self.engine.driver.current()  # the function may choose another
        try:
            with without_grad():
                batch = job.take_batch()
                self._after_last(here)
                output = self._output(batch)
                del batch
                job.computed(output)
        finally:
            self._last = here
            job.submitted()

    def _output(self, batch: Any) -> Any:
        try:
            output = self.fn(batch)
        except Exception as error:
            raise UserError(reported(error, self.where)) from None
        if inspect.isawaitable(output):
            if inspect.iscoroutine(output):
                output.close()
            raise TypeError("the batch function returned a coroutine: pass the `async def` function itself")
        return output

    def _after_last(self, here: Stream) -> None:
        """Order this batch's work behind the last one's, which may be on another stream; not its upload."""
        if self._last is not None and not self.engine.driver.eager:
            self.engine.driver.order(here, self._last)

    def close(self) -> None:
        """No more calls; the thread ends when it has returned from the one that it is in."""
        self.closed = True
        self._threads.close(0.0)
