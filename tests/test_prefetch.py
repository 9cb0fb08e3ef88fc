"""prefetch: every batch once and in order, bounded, and nothing left running."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from _clockwork import timed
from _kernels import go, read
from torch.utils.data import DataLoader, Dataset, IterableDataset

import aiogpu

LIMIT = 20.0


class Numbers:
    """A sync source that notes which thread does what, and can be stopped at one ``next``."""

    def __init__(self, count: int, *, stop_at: int = -1, fail_at: int = -1) -> None:
        self.count, self.stop_at, self.fail_at = count, stop_at, fail_at
        self.asked = self.closed = 0
        self.threads: set[int] = set()
        self.stuck, self.go_on = threading.Event(), threading.Event()

    def __iter__(self) -> Any:
        try:
            for number in range(self.count):
                self.threads.add(threading.get_ident())
                self.asked += 1
                if number == self.stop_at:
                    self.stuck.set()
                    assert self.go_on.wait(LIMIT)
                if number == self.fail_at:
                    raise KeyError("on purpose")
                yield torch.full((8,), number)
        finally:
            self.threads.add(threading.get_ident())
            self.closed += 1


async def numbers(count: int) -> Any:
    for number in range(count):
        await anyio.lowlevel.checkpoint()
        yield torch.full((8,), number)


async def collect(batches: Any) -> list[int]:
    return [int(batch[0]) async for batch in batches]


async def put_into(got: list[Any], items: Any) -> None:
    async for item in items:
        got.append(item)


async def double(batch: torch.Tensor) -> torch.Tensor:
    await anyio.lowlevel.checkpoint()
    return batch * 2


# -- every batch, once, in order -----------------------------------------------------------------------

SOURCES = {
    "a generator": lambda: iter(Numbers(11)),
    "an iterable": lambda: Numbers(11),
    "a list": lambda: [torch.full((8,), number) for number in range(11)],
    "an async generator": lambda: numbers(11),
    "a DataLoader": lambda: DataLoader(range(11), collate_fn=lambda items: torch.full((8,), items[0])),
    "another prefetch": lambda: aiogpu.prefetch(Numbers(11)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_batch_comes_exactly_once_and_in_order(run, anydevice, source):
    """C20: the last one included."""

    @aiogpu.task
    async def main():
        async with aiogpu.prefetch(SOURCES[source](), device="cpu") as batches:
            return await collect(batches)

    assert run(main) == list(range(11))


@pytest.mark.parametrize("depth", [1, 2, 7, 20])
@pytest.mark.parametrize("transform", [None, lambda batch: batch * 2, double], ids=["none", "sync", "async"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_whatever_the_depth_the_transform_and_the_device(run_asyncio, anydevice, depth, transform, device):
    async def main():
        async with aiogpu.prefetch(Numbers(11), depth=depth, transform=transform, device=device) as batches:
            return await collect(batches)

    assert run_asyncio(main) == [number * (2 if transform else 1) for number in range(11)]


def test_an_empty_source_gives_nothing(run, anydevice):
    async def main():
        async with aiogpu.prefetch([], device="cpu") as batches:
            assert await collect(batches) == []
            assert await collect(batches) == [], "the end is the end"

    run(main)


def test_several_consumers_share_the_batches(run, anydevice):
    async def main():
        got: list[list[int]] = []

        async def consume(batches):
            got.append(await collect(batches))

        async with aiogpu.prefetch(Numbers(40), depth=3, device="cpu") as batches:
            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(consume, batches)
        assert sorted(itertools.chain(*got)) == list(range(40))
        assert all(part == sorted(part) for part in got)

    run(main)


def test_it_can_be_entered_once_per_epoch_but_not_twice_at_once(run, anydevice):
    async def main():
        loader = aiogpu.prefetch(Numbers(3), device="cpu")
        for _ in range(2):
            async with loader as batches:
                assert await collect(batches) == [0, 1, 2]
                with pytest.raises(RuntimeError, match="running already"):
                    await loader.__aenter__()

    run(main)


def test_as_completed_a_slow_transform_does_not_hold_up_the_others(run, anydevice):
    async def main():
        release = threading.Event()

        def transform(batch):
            assert batch[0] != 0 or release.wait(LIMIT)
            return batch

        async with aiogpu.prefetch(Numbers(4), depth=4, transform=transform, ordered=False) as batches:
            first = [int((await anext(batches))[0]) for _ in range(3)]
            release.set()
            assert sorted(first) == [1, 2, 3]
            assert await collect(batches) == [0]

    run(main)


def test_in_order_a_slow_transform_holds_up_the_others_only_in_their_coming(run, anydevice, until):
    async def main():
        release = threading.Event()
        done = []

        def transform(batch):
            assert batch[0] != 0 or release.wait(LIMIT)
            done.append(int(batch[0]))
            return batch

        async with aiogpu.prefetch(Numbers(4), depth=4, transform=transform) as batches:
            await until(lambda: batches.stats().ready == 3)
            assert sorted(done) == [1, 2, 3]
            release.set()
            assert await collect(batches) == [0, 1, 2, 3]

    run(main)


# -- threads -------------------------------------------------------------------------------------------


def test_the_loop_goes_on_while_the_source_is_in_next(run, anydevice, until):
    """C20: ``next`` may take as long as it likes."""
    source = Numbers(3, stop_at=1)

    async def main():
        ticks = 0
        async with aiogpu.prefetch(source, device="cpu") as batches:
            assert (await anext(batches))[0] == 0
            await until(source.stuck.is_set)
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
                ticks += 1
            source.go_on.set()
            assert await collect(batches) == [1, 2]
        assert ticks == 100

    run(main)


class Bar:
    """Can be iterated either way, as ``tqdm.auto.tqdm`` can: the async way calls ``next`` where it is."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.iterable_awaitable = hasattr(source, "__anext__")

    def __iter__(self) -> Any:
        return iter(self.source)

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self.source) if self.iterable_awaitable else next(self.source)
        except StopIteration:
            raise StopAsyncIteration from None


def test_a_source_of_both_kinds_does_not_block_the_loop(run, anydevice):
    """C20: a progress bar around a loader."""
    source = Numbers(5)

    async def main():
        loops = threading.get_ident()
        async with aiogpu.prefetch(Bar(iter(source))) as batches:
            assert await collect(batches) == list(range(5))
        assert loops not in source.threads
        async with aiogpu.prefetch(Bar(numbers(5))) as batches:
            assert await collect(batches) == list(range(5))

    run(main)


def test_a_sync_source_lives_in_one_thread_which_is_not_the_loops(run, anydevice):
    source = Numbers(30)

    async def main():
        async with aiogpu.prefetch(source, transform=lambda batch: batch) as batches:
            async for batch in batches:
                if batch[0] == 20:
                    break

    run(main)
    assert source.closed == 1
    assert len(source.threads) == 1
    assert threading.get_ident() not in source.threads


def test_transforms_run_several_at_a_time_and_never_more_than_workers(run, anydevice):
    async def main():
        together = threading.Barrier(3)
        lock = threading.Lock()
        now = most = 0

        def transform(batch):
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            together.wait(LIMIT)  # passes only if three of them are here at once
            with lock:
                now -= 1
            return batch

        async with aiogpu.prefetch(Numbers(12), depth=6, workers=3, transform=transform) as batches:
            assert await collect(batches) == list(range(12))
        assert most == 3

    run(main)


def test_it_works_while_the_default_thread_pool_is_full(run_asyncio, anydevice):
    """C44: aiogpu has threads of its own."""

    async def main():
        release = threading.Event()
        loop = asyncio.get_running_loop()
        blocked = [loop.run_in_executor(None, release.wait, LIMIT) for _ in range(64)]
        try:
            async with aiogpu.prefetch(Numbers(5), device="cpu", transform=lambda batch: batch) as batches:
                assert await collect(batches) == list(range(5))
        finally:
            release.set()
            await asyncio.gather(*blocked)

    run_asyncio(main)


def test_what_a_transform_changes_of_torchs_modes_stays_in_its_call(run, anydevice):
    """C53."""
    seen = []

    def transform(batch):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        return batch

    async def main():
        async with aiogpu.prefetch(Numbers(6), workers=1, transform=transform) as batches:
            await collect(batches)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")

    run(main)
    assert seen == [(True, False)] * 6


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(
    "fork" not in torch.multiprocessing.get_all_start_methods(), reason="starting workers takes seconds here"
)
def test_a_dataloader_with_worker_processes(run_asyncio):
    async def main():
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context="fork")
        async with aiogpu.prefetch(loader, device="cpu") as batches:
            whole = torch.cat([batch async for batch in batches])
        assert whole.tolist() == [number**2 for number in range(18)]
        async with aiogpu.prefetch(loader, device="cpu") as batches:
            await anext(batches)
        gc.collect()
        assert not torch.multiprocessing.active_children(), "its processes ended with its iterator"

    run_asyncio(main)


class Squares(Dataset):
    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index**2)


def test_an_iterable_dataset_as_webdataset_has_it(run_asyncio, anydevice):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from Numbers(5)

    async def main():
        async with aiogpu.prefetch(Stream(), device="cpu") as batches:
            assert await collect(batches) == list(range(5))

    run_asyncio(main)


# -- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_a_sources_error_comes_behind_all_batches_before_it(run, anydevice, depth):
    """C20: the producer has long failed when the first batch is taken."""
    source = Numbers(9, fail_at=4)

    async def main():
        got = []
        async with aiogpu.prefetch(source, depth=depth, device="cpu") as batches:
            with pytest.raises(KeyError, match="on purpose") as caught:
                await put_into(got, batches)
            assert caught.value.__notes__ == ["aiogpu: prefetch, the source, item 4"]
            assert await collect(batches) == [], "after its error it is over"
        assert [int(batch[0]) for batch in got] == [0, 1, 2, 3]

    run(main)
    assert source.closed == 1


def test_an_async_sources_error_too(run, anydevice):
    closed = []

    async def source():
        try:
            yield torch.zeros(8)
            raise KeyError("on purpose")
        finally:
            closed.append(True)

    async def main():
        async with aiogpu.prefetch(source(), device="cpu") as batches:
            assert (await anext(batches))[0] == 0
            with pytest.raises(KeyError) as caught:
                await anext(batches)
            assert caught.value.__notes__ == ["aiogpu: prefetch, the source, item 1"]

    run(main)
    assert closed == [True]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_transforms_error_names_the_transform_and_the_batch(run, anydevice, kind):
    source = Numbers(100)

    def fails(batch):
        if batch[0] == 3:
            raise ValueError("cannot augment")
        return batch

    async def fails_later(batch):
        await anyio.lowlevel.checkpoint()
        return fails(batch)

    async def main():
        got = []
        transform = fails if kind == "sync" else fails_later
        async with aiogpu.prefetch(source, depth=4, transform=transform, device="cpu") as batches:
            with pytest.raises(ValueError, match="cannot augment") as caught:
                await put_into(got, batches)
        assert [int(batch[0]) for batch in got] == [0, 1, 2]
        assert caught.value.__notes__ == [f"aiogpu: prefetch, transform={transform.__qualname__}, item 3"]

    run(main)
    assert source.closed == 1


@pytest.mark.parametrize("kind", ["async", "sync", "source"])
def test_a_stop_iteration_out_of_place_is_a_failure_not_the_end(run, anydevice, abandoned, kind):
    """A transform that asks another iterator, which has come to its end: no batch may be missing silently."""
    others = numbers(1)

    async def with_another(batch):
        return batch, await anext(others)

    def with_none(batch):
        return batch, next(iter(()))

    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            raise StopAsyncIteration

    transform = {"async": with_another, "sync": with_none, "source": None}[kind]

    async def main():
        source = Source() if kind == "source" else numbers(3)
        async with aiogpu.prefetch(source, transform=transform, workers=1) as batches:
            with pytest.raises(RuntimeError, match="Stop") as caught:
                async for _ in batches:
                    pass
        assert f"item {1 if kind == 'async' else 0}" in caught.value.__notes__[0]

    run(main)
    assert abandoned == []  # and it has not "failed while its block was being left"


def test_what_cannot_be_uploaded_names_the_batch(run, anydevice):
    def batches_of_changing_structure():
        yield {"x": torch.zeros(3)}
        yield [torch.zeros(3), "text", None]
        yield torch.zeros(3, device="meta")

    async def main():
        got = []
        async with aiogpu.prefetch(batches_of_changing_structure(), device="cpu") as batches:
            with pytest.raises((TypeError, ValueError), match="meta") as caught:
                await put_into(got, batches)
        assert caught.value.__notes__ == ["aiogpu: prefetch, upload to cpu, item 2"]
        assert [type(batch) for batch in got] == [dict, list]

    run(main)


def test_a_transform_that_cancels_itself_is_a_failure_not_a_hang(run_asyncio, anydevice):
    async def transform(batch):
        raise asyncio.CancelledError

    async def main():
        async with aiogpu.prefetch(Numbers(5), transform=transform) as batches:
            with pytest.raises(asyncio.CancelledError):
                await anext(batches)
            assert await collect(batches) == []

    run_asyncio(main)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"source": 3}, TypeError, "prefetch.. takes any sync or async iterable .* not a int"),
        ({"source": numbers}, TypeError, r"a function that makes a generator: call it, prefetch\(numbers"),
        ({"source": Numbers}, TypeError, "the class Numbers: make an instance"),
        ({"depth": 0}, ValueError, "depth must be at least 1, not 0"),
        ({"depth": 2.0}, TypeError, "depth is a whole number, not 2.0"),
        ({"workers": 0}, ValueError, "workers must be at least 1"),
        ({"run_ahead": -1}, ValueError, "run_ahead must be at least 0"),
        ({"transform": 3}, TypeError, "transform is a function of one batch, not a int"),
        ({"device": "mars"}, ValueError, "is not a device"),
        ({"stateful": True}, TypeError, "needs a source with a state_dict"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_call(arguments, error, match):
    with pytest.raises(error, match=match):
        aiogpu.prefetch(**{"source": [1, 2], **arguments})


def test_a_coroutine_is_refused_and_closed():
    async def load():
        return [1]

    with pytest.raises(TypeError, match="a coroutine: await it first"):
        aiogpu.prefetch(load())


# -- leaving -------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("how", ["break", "exception", "anyio", "native"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_leaving_ends_the_source(run, anydevice, until, how, kind):
    """C20: its ``finally`` has run when the block is left; the block's own exception comes out as it is."""
    source = Numbers(10_000)
    closed = []

    async def endless():
        try:
            for number in range(10_000):
                await anyio.lowlevel.checkpoint()
                yield torch.full((8,), number)
        finally:
            closed.append(True)

    error = Stop("from the block")
    reached = []

    async def consume():
        made = source if kind == "sync" else endless()
        async with aiogpu.prefetch(made, device="cpu", transform=lambda batch: batch) as batches:
            async for batch in batches:
                if batch[0] == 5:
                    if how == "break":
                        break
                    if how == "exception":
                        raise error
                    reached.append(True)
                    await anyio.sleep_forever()

    async def main():
        if how == "exception":
            with pytest.raises(Stop) as caught:
                await consume()
            assert caught.value is error
        elif how == "anyio":
            async with anyio.create_task_group() as group:
                group.start_soon(consume)
                await until(lambda: reached)
                group.cancel_scope.cancel()
        elif how == "native":
            task = asyncio.ensure_future(consume())
            await until(lambda: reached)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await consume()
        assert source.closed == 1 if kind == "sync" else closed == [True]

    if how == "native" and run.is_trio:
        pytest.skip("trio has no Task.cancel")
    run(main)


def test_leaving_waits_for_a_running_next_and_then_closes_the_source(run, anydevice, until):
    source = Numbers(3, stop_at=1)

    async def main():
        async with anyio.create_task_group() as group:

            async def consume():
                async with aiogpu.prefetch(source) as batches:
                    await anext(batches)
                    await until(source.stuck.is_set)

            group.start_soon(consume)
            await until(source.stuck.is_set)
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
            assert source.closed == 0
            source.go_on.set()
        assert source.closed == 1

    run(main)


def test_a_next_that_does_not_return_is_named_and_left_to_its_thread(
    run, anydevice, until, short_grace, abandoned
):
    """Leaving is bounded, whatever the source does; its cleanup runs when its ``next`` returns."""
    source = Numbers(3, stop_at=1)

    async def main():
        async with aiogpu.prefetch(source) as batches:
            await anext(batches)
            await until(source.stuck.is_set)
        assert source.closed == 0
        assert abandoned == [
            "aiogpu: the source, a Numbers, had not returned 0.1 s after its block was left. Its thread goes "
            "on until it returns, and cleans up then."
        ]
        source.go_on.set()
        await until(lambda: source.closed)

    run(main)


def test_an_async_source_that_does_not_close_is_named(run, anydevice, short_grace, abandoned):
    async def stubborn():
        try:
            yield 1
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.2)

    async def main():
        async with aiogpu.prefetch(Holds(stubborn())) as batches:
            assert await anext(batches) == 1

    class Holds:
        """Its ``__anext__`` returns at a cancellation; only its ``aclose`` takes long."""

        def __init__(self, inner):
            self.inner, self.count = inner, 0

        def __aiter__(self):
            return self

        async def __anext__(self):
            self.count += 1
            if self.count == 1:
                return await anext(self.inner)
            await anyio.sleep_forever()

        async def aclose(self):
            try:
                await anyio.sleep(LIMIT)
            finally:
                await self.inner.aclose()

    run(main)
    assert len(abandoned) == 1
    assert "the source, a " in abandoned[0]
    assert "had not closed" in abandoned[0]


def test_a_transform_that_does_not_return_is_named(run, anydevice, until, short_grace, abandoned):
    running, release = threading.Event(), threading.Event()

    def stuck(batch):
        running.set()
        assert release.wait(LIMIT)
        return batch

    async def main():
        async with aiogpu.prefetch(Numbers(3), workers=1, transform=stuck):
            await until(running.is_set)
        release.set()

    run(main)
    assert [line.split(" had not")[0] for line in abandoned] == [
        f"aiogpu: prefetch, transform={stuck.__qualname__}"
    ]


def test_what_the_sources_cleanup_raises_is_not_lost(run, anydevice, abandoned):
    def bad():
        try:
            yield from range(1000)
        finally:
            raise RuntimeError("cannot close")

    async def main():
        async with aiogpu.prefetch(bad()) as batches:
            assert await anext(batches) == 0

    run(main)
    (line,) = abandoned
    assert "failed while its block was being left: RuntimeError('cannot close')" in line


def test_a_cancelled_wait_for_a_batch_loses_none(run, anydevice):
    """C20, C46: the consumer may give up waiting and come back."""

    async def main():
        got = []
        async with aiogpu.prefetch(Numbers(30), device="cpu") as batches:
            for ticks in itertools.cycle(range(7)):  # sooner, or later, than the batch comes
                if len(got) == 30:
                    break
                scope = anyio.CancelScope()
                async with anyio.create_task_group() as group:

                    async def take(scope=scope):
                        with scope:
                            got.append(int((await anext(batches))[0]))

                    group.start_soon(take)
                    for _ in range(ticks):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
        assert got == list(range(30))

    run(main)


@pytest.mark.parametrize("transform", [None, lambda batch: batch])
def test_whoever_else_waits_when_the_block_is_left_learns_of_the_end(run, anydevice, until, transform):
    source = Numbers(5, stop_at=2)
    got: list[Any] = []

    async def main():
        async with anyio.create_task_group() as group:
            async with aiogpu.prefetch(source, transform=transform) as batches:
                group.start_soon(put_into, got, batches)
                await until(source.stuck.is_set)
                await until(lambda: len(got) == 2)
                source.go_on.set()
        assert [batch async for batch in batches] == []

    run(main)
    assert [int(batch[0]) for batch in got] == list(range(len(got)))


@pytest.mark.parametrize("arguments", [{}, {"transform": lambda batch: batch}, {"device": "cpu"}])
def test_after_the_block_no_batch_is_kept(run, anydevice, until, arguments):
    """Its iterator may live on, for its statistics, and with it ``depth`` batches in the device's memory."""
    alive: weakref.WeakSet[Batch] = weakref.WeakSet()

    def source():
        while True:
            batch = Batch()
            alive.add(batch)
            yield batch
            del batch

    async def main():
        async with aiogpu.prefetch(source(), depth=3, **arguments) as batches:
            await until(lambda: batches.stats().ready == 3)
        await until(lambda: not alive)
        stats = batches.stats()
        assert (stats.ready, stats.begun) == (0, 0)

    gc.disable()
    try:
        run(main)
    finally:
        gc.enable()


@pytest.mark.parametrize("decorated", [True, False])
def test_a_block_inside_of_an_async_generator_may_be_left_in_another_task(run, anydevice, until, decorated):
    """After a ``break``, event loops and aiogpu close generators in tasks of their own."""
    if run.is_trio and not decorated:
        pytest.skip("trio closes async generators in a cancelled scope, with a warning")
    source = Numbers(10_000)

    async def generate():
        async with aiogpu.prefetch(source) as batches:
            async for batch in batches:
                yield batch

    make = aiogpu.task(generate) if decorated else generate

    async def main():
        async for batch in make():
            if batch[0] == 3:
                break
        gc.collect()
        await until(lambda: source.closed)

    run(main)
    assert source.closed == 1


def test_when_everything_behind_it_is_cancelled_the_consumer_does_not_wait_for_ever(run_asyncio, anydevice):
    """A graceful shutdown that cancels all tasks but its own, which is the consumer; also before what runs
    behind the block has taken its first step."""

    async def main(started):
        async with aiogpu.prefetch(Numbers(10_000)) as batches:
            if started:
                await anext(batches)
            for each in asyncio.all_tasks() - {asyncio.current_task()}:
                each.cancel()
            with pytest.raises((RuntimeError, asyncio.CancelledError), match=r"cancelled all tasks|^$"):
                async for _ in batches:
                    pass

    run_asyncio.bare(main, True)
    run_asyncio.bare(main, False)


def test_a_loop_that_is_closed_in_the_middle_leaves_no_source_behind(anydevice, monkeypatch, blocking_until):
    """It tells nobody: its tasks are neither cancelled nor closed."""
    monkeypatch.setattr("aiogpu._flow.sources._LOOK_S", 0.01)
    source = Numbers(100)

    async def main():
        async with aiogpu.prefetch(source) as batches:
            await anext(batches)
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    task._log_destroy_pending = False

    async def wait():
        while source.asked < 3:
            await asyncio.sleep(0)

    loop.run_until_complete(wait())
    for each in asyncio.all_tasks(loop):
        each._log_destroy_pending = False
    loop.close()
    blocking_until(lambda: source.closed)


# -- bounds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("transform", [False, True])
def test_at_most_depth_batches_exist_beside_the_consumers(run, anydevice, depth, transform):
    """C20, C63: counted where they are made, at the moment when there are most of them."""
    alive: weakref.WeakSet[Batch] = weakref.WeakSet()
    most = 0

    def make():
        nonlocal most
        batch = Batch()
        alive.add(batch)
        most = max(most, len(alive))
        return batch

    def source():
        for _ in range(40):
            yield make()

    async def main():
        kwargs: dict[str, Any] = {"transform": lambda batch: batch} if transform else {}
        async with aiogpu.prefetch(source(), depth=depth, device="cpu", **kwargs) as batches:
            for _ in range(40):
                batch = await anext(batches)
                assert len(alive) <= depth + 1
                del batch
        return most

    gc.disable()
    try:
        assert run(main) <= depth + 1
    finally:
        gc.enable()


def test_nothing_is_held_back_of_batches_that_were_handed_over(run, anydevice, until):
    """Not by the source's thread either, while it makes the next one."""
    alive: weakref.WeakSet[Batch] = weakref.WeakSet()
    stuck, go_on = threading.Event(), threading.Event()

    def source():
        for _ in range(2):
            yield noted()
        stuck.set()
        assert go_on.wait(LIMIT)

    def noted():
        batch = Batch()
        alive.add(batch)
        return batch

    async def main():
        async with aiogpu.prefetch(source(), device="cpu", transform=lambda batch: batch) as batches:
            await anext(batches)
            await anext(batches)
            await until(stuck.is_set)
            await until(lambda: not alive, 5)
            go_on.set()

    gc.disable()
    try:
        run(main)
    finally:
        gc.enable()


class Batch:
    """Something that passes by identity, and whose life can be watched."""


def test_the_source_is_not_asked_for_more_than_depth_batches(run, anydevice, until):
    source = Numbers(20)

    async def main():
        async with aiogpu.prefetch(source, depth=3) as batches:
            await until(lambda: batches.stats().ready == 3)
            assert source.asked == 3
            await anext(batches)
            await until(lambda: batches.stats().ready == 3)
            assert source.asked == 4
            stats = batches.stats()
            assert (stats.batches, stats.ready, stats.begun, stats.depth) == (1, 3, 0, 3)
            assert stats.source_seconds > 0

    run(main)


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_the_host_runs_ahead_of_the_device_by_a_bounded_number_of_batches(run, vd, until, run_ahead):
    """C63: the device stands still; the consumer launches and asks for more."""
    launched = 0

    @aiogpu.task
    async def consume():
        nonlocal launched
        async with aiogpu.prefetch(range(10), run_ahead=run_ahead) as batches:
            async for _ in batches:
                vd.launch(duration=1.0)
                launched += 1
        return batches.stats()

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            for so_far in range(run_ahead + 1, 10):
                await until(lambda n=so_far: launched >= n)
                for _ in range(30):
                    await anyio.lowlevel.checkpoint()
                assert launched == so_far
                vd.advance(1.0)  # one kernel ends
            vd.auto = True
            vd.run_all()

    run(main)
    assert launched == 10


def test_a_consumer_that_waits_for_the_device_outlives_its_runtime(run, vd, until, short_grace, abandoned):
    """The notifier's thread wakes it then, through the loop's door."""
    launched = 0

    @aiogpu.task
    async def consume():
        nonlocal launched
        async with aiogpu.prefetch(range(3), run_ahead=0) as batches:
            async for _ in batches:
                vd.launch(duration=1.0)
                launched += 1

    async def main():
        async with anyio.create_task_group() as group:
            async with aiogpu.Runtime():
                group.start_soon(consume)
                await until(lambda: launched == 1)
                for _ in range(30):
                    await anyio.lowlevel.checkpoint()
            vd.auto = True
            await anyio.to_thread.run_sync(vd.run_all)
            await until(lambda: launched == 3)

    run(main)


def test_the_upload_of_the_next_batch_runs_beside_this_ones_kernel(run, vd):
    """C19: twenty batches, upload and kernel a second each, in far less than forty seconds."""
    vd.copy_seconds, vd.races = 1.0, False  # memory is used again, which would look like a race

    @aiogpu.task
    async def consume():
        async with aiogpu.prefetch(numbers(20), device="cpu") as batches:
            async for batch in batches:
                vd.launch(duration=1.0, reads=[batch])
            await aiogpu.synchronize()

    async def main():
        return await timed(vd, consume, tick=0.25)

    assert run(main) <= 20 * 1.15


# -- order and memory ----------------------------------------------------------------------------------


def test_a_batch_is_there_before_it_is_read_and_kept_for_the_consumers_stream(run, vd, moving, monkeypatch):
    """The race detector looks at the order, ``keep`` is what would guard the memory."""
    kept: dict[int, set[Any]] = {}
    monkeypatch.setattr(
        vd, "keep", lambda tensor, stream: kept.setdefault(tensor.data_ptr(), set()).add(stream.raw)
    )
    seen: list[float] = []

    @aiogpu.task
    async def consume():
        held = list(Numbers(6))  # memory that is used again would look like a race
        here = vd.current().raw
        async with aiogpu.prefetch(held[:], device="cpu") as batches:
            async for batch in batches:
                read(vd, batch[:1], seen)
                assert here in kept[batch.data_ptr()]
                held.append(batch)
        await aiogpu.synchronize()

    with moving(vd):
        run(consume)
    assert seen == [0, 1, 2, 3, 4, 5]


def test_what_an_async_source_makes_on_the_device_is_safe_to_read(run, vd):
    """Its task writes on a stream of its own, and the consumer's kernels are ordered behind it."""
    held = []
    seen: list[float] = []

    async def source():
        for number in range(4):
            x = torch.zeros(1)
            held.append(x)
            vd.launch(lambda x=x, n=number: x.fill_(n), writes=[x])
            yield x

    @aiogpu.task
    async def consume():
        async with aiogpu.prefetch(source(), run_ahead=4) as batches:
            async for batch in batches:
                read(vd, batch, seen)

    go(run, vd, consume)
    assert seen == [0, 1, 2, 3]


def test_a_lost_device_reaches_the_consumer(run, vd, abandoned):
    async def main():
        async with aiogpu.prefetch(Numbers(50), device="cpu") as batches:
            for _ in range(3):
                await anext(batches)
            vd.fault()
            with pytest.raises(aiogpu.DeviceLostError):
                await collect(batches)

    vd.auto = True
    run(main)


# -- resume --------------------------------------------------------------------------------------------


class Resumable:
    """As torchdata's StatefulDataLoader: it goes on behind the state that it was given."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.state = {"next": 0}

    def __iter__(self) -> Any:
        while self.state["next"] < self.count:
            self.state["next"] += 1
            yield self.state["next"] - 1

    def state_dict(self) -> dict[str, int]:
        return self.state  # not even a copy

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


@pytest.mark.parametrize("transform", [None, lambda batch: batch])
def test_the_state_is_that_of_the_batch_that_was_handed_over(run, anydevice, until, transform):
    async def main():
        source = Resumable(20)
        async with aiogpu.prefetch(source, depth=4, stateful=True, transform=transform) as batches:
            with pytest.raises(RuntimeError, match="no batch has been handed over"):
                batches.state_dict()
            first = [await anext(batches) for _ in range(7)]
            await until(lambda: batches.stats().ready == 4)
            state = batches.state_dict()
        assert source.state["next"] == 11, "the source itself is ahead"
        again = Resumable(20)
        again.load_state_dict(state)
        async with aiogpu.prefetch(again, stateful=True) as batches:
            rest = [batch async for batch in batches]
        assert first + rest == list(range(20))

    run(main)


def test_without_stateful_there_is_no_state_to_be_wrong(run_asyncio, anydevice):
    async def main():
        async with aiogpu.prefetch(Resumable(3)) as batches:
            await anext(batches)
            with pytest.raises(RuntimeError, match="stateful=True"):
                batches.state_dict()

    run_asyncio(main)
    with pytest.raises(ValueError, match="needs ordered=True"):
        aiogpu.prefetch(Resumable(3), stateful=True, ordered=False)


# -- sources that want to be entered -------------------------------------------------------------------


class Managed(Numbers):
    """A context manager that can be iterated within its block only."""

    inside = False
    entered: int | None = None
    left: int | None = None

    def __enter__(self) -> Managed:
        self.entered, self.inside = threading.get_ident(), True
        return self

    def __exit__(self, *_: object) -> None:
        self.left, self.inside = threading.get_ident(), False

    def __iter__(self) -> Any:
        for item in super().__iter__():
            assert self.inside
            yield item


def test_a_context_manager_is_entered_and_left_in_the_sources_thread(run, anydevice):
    source = Managed(30)

    async def main():
        async with aiogpu.prefetch(source) as batches:
            assert (await anext(batches))[0] == 0

    run(main)
    assert {source.entered, source.left} == source.threads


def test_a_pipeline_with_auto_stop_is_started_and_stopped(run, anydevice):
    """As SPDL has it."""
    from contextlib import contextmanager

    class Pipeline(Numbers):
        log: list[str]

        @contextmanager
        def auto_stop(self):
            self.log = ["start"]
            try:
                yield
            finally:
                self.log.append("stop")

    source = Pipeline(4)

    async def main():
        async with aiogpu.prefetch(source, device="cpu") as batches:
            assert await collect(batches) == [0, 1, 2, 3]

    run(main)
    assert source.log == ["start", "stop"]


def test_an_async_context_manager_is_entered_and_left_in_one_task(run, anydevice):
    tasks = []

    class Managed:
        async def __aenter__(self):
            tasks.append(anyio.get_current_task().id)
            return self

        async def __aexit__(self, *_):
            tasks.append(anyio.get_current_task().id)

        def __aiter__(self):
            return numbers(50)

    async def main():
        async with aiogpu.prefetch(Managed(), device="cpu") as batches:
            assert (await anext(batches))[0] == 0
        assert tasks[0] == tasks[1] != anyio.get_current_task().id

    run(main)
