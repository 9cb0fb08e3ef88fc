"""Random programs for the virtual device: trees of tasks with kernels, transfers, failures and cancellations.

A program is race-free by construction: each task owns some cells, deals them out to its children, and touches
a cell only while no running child has it. So at each submission the host knows what a kernel must find there
(``Run.shadow``), and any RaceError or other value is a fault of the runtime.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import torch
from hypothesis import strategies as st

import aiogpu
from aiogpu.testing import VirtualDevice

__all__ = ["Planned", "Program", "Run", "programs"]


class Planned(Exception):
    """A failure that belongs to the program."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What one task does. ``steps``: pairs of a verb and its operand."""

    steps: tuple[tuple[str, Any], ...]
    fails: bool


_SIMPLE = ["write", "read", "worker", "upload", "download", "copy", "item", "pause", "synchronize", "drop"]


def programs() -> st.SearchStrategy[Program]:
    simple = st.tuples(st.sampled_from(_SIMPLE), st.integers(0, 7))

    def program(steps: st.SearchStrategy[Any]) -> st.SearchStrategy[Program]:
        fails = st.integers(0, 9).map(lambda n: n == 0)
        return st.builds(Program, st.lists(steps, max_size=5).map(tuple), fails)

    def extend(children: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
        several = st.lists(children, min_size=1, max_size=3).map(tuple)
        verbs = [
            st.tuples(st.just("await"), children),
            st.tuples(st.just("gather"), several),
            st.tuples(st.just("group"), several),
            st.tuples(st.just("block"), children),
            st.tuples(st.just("cancel"), st.tuples(children, st.integers(0, 6))),
        ]
        return program(st.one_of(simple, *verbs))

    return st.recursive(program(simple), extend, max_leaves=12)


class Run:
    """One execution of a program on a device that is moved, in random order, by hand."""

    def __init__(self, device: VirtualDevice, seed: int) -> None:
        self.device = device
        self.random = random.Random(seed)
        #: Cells of sizes for both ways of transfers, and what each must hold once all submitted work has run.
        self.cells = [torch.zeros(8 if i % 2 else 600, dtype=torch.uint8) for i in range(8)]
        self.shadow = [0] * len(self.cells)
        #: Cells of which a cancelled transfer may still read or write: nobody may touch them any more.
        self.dead: set[int] = set()
        self.problems: list[str] = []
        self.submitted = self.ran = 0
        self.over = False

    # -- the program -------------------------------------------------------------------------------

    async def execute(self, program: Program) -> None:
        task = aiogpu.task(self._task)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._move)
                await self._tolerant(task(program, list(range(len(self.cells)))))
                self.over = True
        except BaseException:
            self.device.run_all()  # nobody moves it any more
            raise

    async def _task(self, program: Program, mine: list[int]) -> None:
        await self._steps(program, mine)

    async def _steps(self, program: Program, mine: list[int]) -> None:
        for verb, operand in program.steps:
            usable = [cell for cell in mine if cell not in self.dead]
            if verb in _SIMPLE:
                if usable:
                    await self._simple(verb, usable[operand % len(usable)])
            else:
                await getattr(self, f"_{verb}")(operand, usable)
        if program.fails:
            raise Planned

    async def _simple(self, verb: str, cell: int) -> None:
        x = self.cells[cell]
        if verb == "write":
            self._write(cell)
        elif verb == "read":
            self._read(cell)
        elif verb == "worker":
            await aiogpu.run_sync(self._write, cell)
        elif verb == "pause":
            await anyio.lowlevel.checkpoint()
        elif verb == "synchronize":
            await aiogpu.synchronize()
            self._equal(x, self.shadow[cell], "synchronize")
        elif verb == "upload":
            source = torch.full_like(x, self.random.randrange(256))
            self._equal(await aiogpu.to_device(source), source[0].item(), "upload")
        elif verb == "download":
            expected = self.shadow[cell]
            self._equal(await self._guarded(cell, aiogpu.to_host(x)), expected, "download")
        elif verb == "item":
            expected = self.shadow[cell]
            if await self._guarded(cell, aiogpu.item(x[:1])) != expected:
                self.problems.append("item")
        elif verb == "copy":
            value = self.random.randrange(256)
            await self._guarded(cell, aiogpu.copy_(x, torch.full_like(x, value)))
            self.shadow[cell] = value
        elif verb == "drop":
            operation = aiogpu.to_device(torch.full_like(x, 1))
            operation._awaited = True  # without a warning: dropping it is what is tried here

    async def _guarded(self, cell: int, operation: Awaitable[Any]) -> Any:
        try:
            return await operation
        except BaseException:
            self.dead.add(cell)
            raise

    async def _await(self, program: Program, cells: list[int]) -> None:
        await self._tolerant(aiogpu.task(self._task)(program, cells))

    async def _gather(self, children: tuple[Program, ...], cells: list[int]) -> None:
        task = aiogpu.task(self._task)
        count = len(children)
        await self._tolerant(aiogpu.gather(*(task(p, cells[i::count]) for i, p in enumerate(children))))

    async def _group(self, children: tuple[Program, ...], cells: list[int]) -> None:
        """All but the first run as tasks, while this one goes on with its own share."""
        task = aiogpu.task(self._task)
        count = len(children)

        async def group() -> None:
            async with anyio.create_task_group() as group:
                for index, program in enumerate(children[1:], 1):
                    group.start_soon(task, program, cells[index::count])
                await self._steps(children[0], cells[::count])

        await self._tolerant(group())

    async def _block(self, program: Program, cells: list[int]) -> None:
        async def block() -> None:
            with aiogpu.stream():
                await self._steps(program, cells)

        await self._tolerant(block())

    async def _cancel(self, operand: tuple[Program, int], cells: list[int]) -> None:
        program, patience = operand
        task = aiogpu.task(self._task)

        async def cancelled() -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(task, program, cells)
                for _ in range(patience):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()

        await self._tolerant(cancelled())

    async def _tolerant(self, awaitable: Awaitable[Any]) -> None:
        try:
            await awaitable
        except Planned:
            pass
        except ExceptionGroup as group:
            _, others = group.split(Planned)
            if others is not None:
                raise others from None

    # -- kernels -----------------------------------------------------------------------------------

    def _write(self, cell: int) -> None:
        x, value = self.cells[cell], self.random.randrange(256)
        self._launch(lambda: x.fill_(value), writes=[x])
        self.shadow[cell] = value

    def _read(self, cell: int) -> None:
        x, expected = self.cells[cell], self.shadow[cell]
        self._launch(lambda: self._equal(x, expected, "kernel"), reads=[x])

    def _launch(self, run: Callable[[], Any], **accesses: Any) -> None:
        def counted() -> None:
            self.ran += 1
            run()

        self.device.launch(counted, **accesses)
        self.submitted += 1

    def _equal(self, x: torch.Tensor, value: float, where: str) -> None:
        if not bool((x == value).all()):
            self.problems.append(f"{where}: {x[0].item()} where {value} must be")

    # -- the device --------------------------------------------------------------------------------

    async def _move(self) -> None:
        """Let streams go on in random order, until all is over."""
        runtime = aiogpu.current_runtime()
        while not (
            self.over and self.device.idle and not (runtime.reactor.pending or runtime.reactor.operations)
        ):
            movable = self.device.movable()
            for _ in range(self.random.randint(0, 3)):
                if movable:
                    self.device.step(self.random.choice(movable))
                    movable = self.device.movable()
            if self.random.random() < 0.3:
                self.device.deliver()
            await anyio.sleep(0 if movable else 0.0002)
