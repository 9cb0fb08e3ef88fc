"""The batcher when things go wrong: exactly those are hurt whom it concerns, and the rest goes on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import traceback
import weakref

import anyio
import pytest
import torch
from _batches import Calls, Held, HeldInThread, calling, lists, ones

import aiogpu


class Picky(Exception):
    """Its constructor does not take its own args: copying it the usual way fails."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.a = a


async def together(batcher: aiogpu.Batcher, *items: object) -> Calls:
    """Call with all items, so that they make one batch."""
    async with anyio.create_task_group() as group:
        await anyio.lowlevel.checkpoint()
        calls = Calls(batcher, group)
        await calls.started(*items)
    return calls


# -- exceptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_an_exception_reaches_exactly_its_batch_and_each_caller_has_its_own(run, asynchronous):
    def fn(items):
        if "bad" in items:
            raise Picky(1, 2)
        return items

    async def afn(items):
        return fn(items)

    async def main():
        async with lists(afn if asynchronous else fn, max_batch_size=2, max_delay=1000) as batcher:
            calls = await together(batcher, "a", "bad", "c", "d")
        assert calls.results == {"c": "c", "d": "d"}
        first, second = calls.errors["a"], calls.errors["bad"]
        assert type(first) is type(second) is Picky
        assert first is not second
        assert (str(first), first.a) == ("1 and 2", 1)
        first.add_note("mine")
        assert len(second.__notes__) == 1
        assert "raise Picky(1, 2)" in second.__notes__[0]  # where it was raised, as text
        assert batcher.stats().errors == 2

    run(main)


def test_what_the_exception_was_raised_in_is_let_go_of(run, blocking_until):
    """Stored exceptions must not keep the batch: its tensors are in the frames."""
    dead = []

    def fn(x):
        dead.append(weakref.ref(x))
        y = x + 1
        dead.append(weakref.ref(y))
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    async def main():
        async with aiogpu.Batcher(fn, max_batch_size=4) as batcher:
            with pytest.raises(ValueError, match="outer") as caught:
                await batcher(ones(1))
        text = "".join(traceback.format_exception(caught.value))
        assert "KeyError: 'inner'" in text
        assert "y = x + 1" not in text
        return caught.value

    error = run(main)
    gc.collect()
    blocking_until(lambda: [ref() for ref in dead] == [None, None])  # the thread is on its way out
    assert error.__notes__


def test_one_bad_item_is_isolated(run):
    calls_of_fn = []

    def fn(items):
        calls_of_fn.append(len(items))
        if 5 in items:
            raise ValueError("five")
        return items

    async def main():
        async with lists(fn, max_batch_size=8, max_delay=1000, isolate=True) as batcher:
            return await together(batcher, *range(8))

    calls = run(main)
    assert set(calls.errors) == {5}
    assert calls.results == {i: i for i in range(8) if i != 5}
    assert calls_of_fn == [8, 4, 4, 2, 1, 1, 2]


def test_without_isolation_a_batch_is_computed_once(run):
    calls_of_fn = []

    def fn(items):
        calls_of_fn.append(len(items))
        raise ValueError

    async def main():
        async with lists(fn, max_batch_size=8, max_delay=1000) as batcher:
            return await together(batcher, *range(8))

    assert len(run(main).errors) == 8
    assert calls_of_fn == [8]


@pytest.mark.parametrize(
    "raised",
    [asyncio.CancelledError(), StopIteration(3), GeneratorExit(), StopAsyncIteration()],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_exceptions_that_mean_something_to_the_loop_do_no_harm(run, asynchronous, raised):
    """A function may await something that was cancelled: that cancels neither its callers nor the batcher."""

    def fn(items):
        if "bad" in items:
            raise raised
        return items

    async def afn(items):
        return fn(items)

    async def main():
        async with lists(afn if asynchronous else fn, max_batch_size=1) as batcher:
            with pytest.raises((RuntimeError, StopAsyncIteration)):
                await batcher("bad")
            assert await batcher("good") == "good"

    run(main)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_program_that_shall_end_ends(run, asynchronous):
    def fn(items):
        raise SystemExit(3)

    async def afn(items):
        fn(items)

    async def main():
        async with lists(afn if asynchronous else fn, max_batch_size=1) as batcher:
            with pytest.raises((RuntimeError, aiogpu.ClosedError, anyio.get_cancelled_exc_class())):
                await batcher("x")
            await anyio.sleep(5)

    with pytest.raises((SystemExit, BaseExceptionGroup)) as caught:
        run.bare(main)
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SystemExit)


@pytest.mark.parametrize(
    ("output", "match"),
    [
        (torch.ones(3, 2), r"a tensor of shape \(3, 2\) for a batch of 2"),
        (torch.tensor(1.0), r"a tensor of shape \(\) for a batch of 2"),
        ({"a": torch.ones(2), "b": [1, 2, 3]}, "a list of 3 values for a batch of 2"),
    ],
)
def test_a_wrong_number_of_results_is_an_error_that_says_so(run, output, match):
    async def main():
        async with aiogpu.Batcher(lambda x: output, max_batch_size=2, max_delay=1000) as batcher:
            calls = await together(batcher, 1, 2)
        assert len(calls.errors) == 2
        for error in calls.errors.values():
            with pytest.raises(ValueError, match=match):
                raise error

    run(main)


def test_hooks_that_raise_hurt_exactly_their_batch(run):
    """The known failure: an exception in the size function kills the loop."""

    def cost(item):
        if item == "cost":
            raise ZeroDivisionError
        return {"nan": float("nan"), "none": None, "negative": -1}.get(item, 1)

    def collate(items):
        if "collate" in items:
            raise LookupError
        return items

    def split(output):
        if "split" in output:
            raise LookupError
        return iter(output) if "few" not in output else []

    async def main():
        batcher = aiogpu.Batcher(
            lambda items: items, max_batch_size=1, collate=collate, split=split, cost=cost, max_cost=9
        )
        async with batcher:
            for item, error in (
                ("cost", ZeroDivisionError),
                ("nan", TypeError),
                ("none", TypeError),
                ("negative", ValueError),
                ("collate", LookupError),
                ("split", LookupError),
                ("few", ValueError),
            ):
                with pytest.raises(error):
                    await batcher(item)
                assert await batcher("good") == "good"
            with pytest.raises(ValueError, match="0 results for a batch of 1"):
                await batcher("few")

    run(main)


def test_calls_after_its_scope_was_cancelled_are_served(run):
    """Until the block is left: whoever cleans up in it may need a last answer."""

    async def main():
        with anyio.CancelScope() as scope:
            async with lists(lambda items: items, max_batch_size=1) as batcher:
                scope.cancel()
                try:
                    await anyio.lowlevel.checkpoint()
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.lowlevel.checkpoint()
                        assert await batcher("late") == "late"

    run(main)


def test_an_integer_too_large_for_a_tensor_hurts_its_own_call_only(run, until):
    """JSON knows integers of any size; no client shall spoil the others' batch."""

    async def main():
        held = Held()
        async with calling(aiogpu.Batcher(held, max_batch_size=3, in_flight=1)) as calls:
            await calls.started(0)
            await until(lambda: held.batches)
            await calls.started(1, 2**70, 3)  # together, if they could
            held.let_go()
        assert calls.results == {0: 0, 1: 1, 3: 3}
        assert set(calls.errors) == {2**70}

    run(main)


def test_a_mistake_in_the_dispatcher_ends_those_who_wait_and_not_the_dispatcher(run, until, abandoned):
    async def main():
        async with calling(lists(lambda items: items, max_batch_size=1)) as calls:
            queue = calls.batcher._queue
            take = queue.take

            def broken(*_):
                queue.take = take
                raise LookupError("a bug of ours")

            queue.take = broken
            await calls.started("hurt")
            await until(lambda: calls.errors)
            await calls.started("next")
        assert isinstance(calls.errors["hurt"], LookupError)
        assert calls.results == {"next": "next"}

    run(main)
    assert "could not start a batch" in abandoned[0]


# -- callers who leave -----------------------------------------------------------------------------


def test_a_cancelled_call_leaves_the_queue_with_its_tensors(run, until):
    """C46: cancel storms must not pile up memory behind a busy worker."""

    async def main():
        held = HeldInThread()
        async with calling(aiogpu.Batcher(held, max_batch_size=1, in_flight=1)) as calls:
            calls.start("running", item=0)
            await until(lambda: held.batches)
            dead = []
            for i in range(100):
                item = torch.ones(10)
                dead.append(weakref.ref(item))
                await calls.started(i, item=item)
                del item
            for i in range(100):
                calls.cancel(i)
            await until(lambda: len(calls.errors) == 100)
            gc.collect()
            assert not any(ref() is not None for ref in dead)
            assert calls.batcher.stats().waiting == 0
            group = calls.batcher._queue._groups
            assert not group  # not even shells
            held.go.set()
        assert calls.results == {"running": 0}

    run(main)


def test_a_cancelled_call_never_hurts_its_neighbours(run, until):
    """Cancelled while waiting, while its batch is collated, computed or split: the others get their own."""

    async def main():
        held = Held()
        async with calling(lists(held, max_batch_size=4, in_flight=1)) as calls:
            await calls.started("first")
            await until(lambda: held.batches)
            await calls.started("a", "b", "c", "d", "e")
            calls.cancel("b")  # while it waits
            await until(lambda: "b" in calls.errors)
            held.let_go(0)
            await until(lambda: len(held.batches) == 2)
            calls.cancel("a")  # while it is computed
            calls.cancel("d")
            await until(lambda: "a" in calls.errors and "d" in calls.errors)
            held.let_go()
        assert held.batches == [["first"], ["a", "c", "d", "e"]]
        assert calls.results == {"first": "first", "c": "c", "e": "e"}

    run(main)


def test_a_batch_whose_callers_have_all_left_is_not_computed(run, until):
    """Under a storm of disconnects the device has better things to do."""

    async def main():
        held = HeldInThread()
        async with calling(lists(held, max_batch_size=1, in_flight=2)) as calls:
            await calls.started("a")
            await until(lambda: held.batches)
            await calls.started("b")
            await until(lambda: calls.batcher.stats().running == 2)
            calls.cancel("b")
            await until(lambda: calls.errors)
            await calls.started("c")
            held.go.set()
        assert held.batches == [["a"], ["c"]]
        assert calls.results == {"a": "a", "c": "c"}

    run(main)


def test_isolation_does_not_compute_those_who_have_left(run, until):
    async def main():
        seen, held = [], Held()

        async def fn(items):
            seen.append(list(items))
            if len(items) > 1:
                await held(items)
                raise ValueError
            return items

        async with calling(lists(fn, max_batch_size=4, max_delay=1000, isolate=True)) as calls:
            await calls.started(*"abcd")
            await until(lambda: held.batches)
            calls.cancel("a")
            calls.cancel("b")
            calls.cancel("d")
            await until(lambda: len(calls.errors) == 3)
            held.let_go()
        assert seen == [["a", "b", "c", "d"], ["c"]]
        assert calls.results == {"c": "c"}

    run(main)


def test_a_cancellation_in_the_tick_of_the_result_has_one_outcome(run, until):
    async def main():
        held = Held()
        async with calling(lists(held, max_batch_size=2, max_delay=1000)) as calls:
            for round_ in range(30):
                pair = (round_, 0), (round_, 1)
                await calls.started(*pair)
                await until(lambda r=round_: len(held.batches) > r)
                held._events[-1].set()
                for _ in range(round_ % 10):
                    await anyio.lowlevel.checkpoint()
                calls.cancel(pair[0])
                await until(lambda p=pair: set(p) <= set(calls.order))
                assert calls.results[pair[1]] == pair[1]
                assert (pair[0] in calls.results) + (pair[0] in calls.errors) == 1
        stats = calls.batcher.stats()
        assert stats.ok + stats.cancelled == stats.calls == 60

    run(main)


def test_asyncios_own_cancellation_leaves_too(run_asyncio):
    async def main():
        held = Held()
        async with lists(held, max_batch_size=1, in_flight=1) as batcher:
            tasks = [asyncio.create_task(batcher(i)) for i in range(3)]
            while not held.batches:
                await asyncio.sleep(0)
            for task in tasks[:2]:
                task.cancel()
            done = await asyncio.gather(*tasks[:2], return_exceptions=True)
            assert [type(error) for error in done] == [asyncio.CancelledError] * 2
            held.let_go()
            assert await tasks[2] == 2
        assert batcher.stats().cancelled == 2

    run_asyncio(main)


def test_a_loop_that_is_torn_down_does_not_hang(run_asyncio):
    """``asyncio.run`` cancels all tasks at its end, the batcher's children among them."""

    async def main():
        held = Held()

        async def serve():
            async with lists(held, max_batch_size=1) as batcher:
                await batcher("x")

        task = asyncio.create_task(serve())
        while not held.batches:
            await asyncio.sleep(0)
        return task

    task = run_asyncio.bare(main)
    assert task.cancelled()


@pytest.mark.parametrize("ticks", range(8))
def test_leaving_with_an_error_in_whatever_tick_leaves_no_caller_behind(run, ticks):
    """A batch's task that is cancelled before its first step never gets to tell its callers anything."""

    async def main():
        held, ended = Held(), []
        batcher = lists(held, max_batch_size=1)

        async def call():
            with pytest.raises(aiogpu.ClosedError):
                await batcher("x")
            ended.append(True)

        async def serve(group):
            async with batcher:
                await anyio.lowlevel.checkpoint()
                group.start_soon(call)
                for _ in range(ticks):
                    await anyio.lowlevel.checkpoint()
                raise LookupError

        async with anyio.create_task_group() as group:
            with pytest.raises(LookupError):
                await serve(group)
        assert ended == [True]

    run(main)


# -- memory ----------------------------------------------------------------------------------------


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory (injected)")


@pytest.mark.usefixtures("anydevice")
def test_running_out_of_memory_halves_the_batch_and_goes_on(run):
    sizes = []

    def fn(x):
        sizes.append(len(x))
        if len(x) > 2:
            raise out_of_memory()
        return x * 2

    async def main():
        async with aiogpu.Batcher(fn, max_batch_size=8, max_delay=1000) as batcher:
            async with anyio.create_task_group() as group:
                await anyio.lowlevel.checkpoint()
                calls = Calls(batcher, group)
                for i in range(8):
                    await calls.started(i, item=ones(i))
            assert all(torch.equal(calls.results[i], ones(2 * i)) for i in range(8))
            assert batcher.stats().limit == 2  # what has fitted
            await together(batcher, 1, 2)
        return batcher.stats()

    assert run(main).limit == 2
    assert sizes == [8, 4, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory",
    ],
)
def test_memory_that_a_library_ran_out_of_halves_as_well(run, text):
    """cuBLAS and cuDNN take memory of their own, and torch reports it as a plain RuntimeError."""
    sizes = []

    def fn(items):
        sizes.append(len(items))
        if len(items) > 1 or items == [3]:
            raise RuntimeError(text)
        return items

    async def main():
        async with lists(fn, max_batch_size=4, max_delay=1000) as batcher:
            return await together(batcher, *range(4))

    calls = run(main)
    assert calls.results == {0: 0, 1: 1, 2: 2}
    assert str(calls.errors[3]) == text
    assert sizes == [4, 2, 1, 1, 1, 1]


def test_the_limit_comes_back_after_a_while(run):
    fits = []

    def fn(items):
        if not fits and len(items) > 1:
            raise out_of_memory()
        return items

    async def main():
        async with lists(fn, max_batch_size=4, max_delay=0.001) as batcher:
            await together(batcher, 1, 2, 3, 4)
            assert batcher.stats().limit == 1
            fits.append(True)
            limits = []
            for i in range(70):
                await batcher(i)
                limits.append(batcher.stats().limit)
        assert limits[:20] == [1] * 20
        assert limits[-1] == 4
        assert set(limits) == {1, 2, 4}

    run(main)


@pytest.mark.usefixtures("anydevice")
def test_only_a_call_that_does_not_fit_alone_fails_and_nothing_is_kept(run):
    """C66, C67: the stored exception keeps no memory, and the next request finds it free."""
    dead = []

    def fn(x):
        workspace = x + 1
        dead.append(weakref.ref(workspace))
        if (x >= 100).any():
            raise out_of_memory()
        return x

    async def main():
        async with aiogpu.Batcher(fn, max_batch_size=4, max_delay=1000) as batcher:
            async with anyio.create_task_group() as group:
                await anyio.lowlevel.checkpoint()
                calls = Calls(batcher, group)
                for i in (1, 2, 100, 3):
                    await calls.started(i, item=ones(i))
            assert set(calls.results) == {1, 2, 3}
            assert isinstance(calls.errors[100], torch.OutOfMemoryError)
            gc.collect()
            assert not any(ref() is not None for ref in dead)
            await anyio.lowlevel.checkpoint()
        return calls.errors[100]

    run(main)


@pytest.mark.parametrize("size", [1, 8])
def test_memory_that_another_batch_has_is_waited_for(run, size):
    """C67: a batch that does not fit beside its neighbour fits alone, and nobody fails."""
    free = size
    waited = False

    async def main():
        async def fn(items):
            nonlocal free
            if len(items) > free:
                raise out_of_memory()
            free -= len(items)
            turns = 0
            # Beside a full batch nobody fits, and the other calls are there by then: so the first full one
            # stays until somebody waits for its memory.
            while turns < 20 or (len(items) == size and not waited):
                turns += 1
                await anyio.lowlevel.checkpoint()
            free += len(items)
            return items

        async with lists(fn, max_batch_size=size, in_flight=3) as batcher:
            batches = batcher._service.batches
            until_alone = batches._alone

            async def alone(batch):
                nonlocal waited
                waited = True
                await until_alone(batch)

            batches._alone = alone
            calls = await together(batcher, *range(5 * size))
            assert not calls.errors
            assert calls.results == {i: i for i in range(5 * size)}
            assert not batches.short

    run(main)
    assert waited


def test_a_call_that_does_not_fit_alone_fails_also_beside_others(run):
    tried = []

    async def fn(items):
        tried.append(items)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        if items[0] % 2:
            raise out_of_memory()
        return items

    async def main():
        async with lists(fn, max_batch_size=1, in_flight=3) as batcher:
            calls = await together(batcher, *range(9))
            assert set(calls.results) == {0, 2, 4, 6, 8}
            assert all(isinstance(error, torch.OutOfMemoryError) for error in calls.errors.values())

    run(main)


def test_a_batch_that_waits_for_memory_ends_with_the_batcher(run, until):
    held = anyio.Event()

    async def fn(items):
        if items == ["first"]:
            await held.wait()
        raise out_of_memory()

    async def main():
        async with anyio.create_task_group() as group:
            with contextlib.suppress(LookupError):
                async with lists(fn, max_batch_size=1) as batcher:
                    calls = Calls(batcher, group)
                    await calls.started("first", "second")
                    await until(lambda: batcher._service.batches.short)
                    raise LookupError
        assert {type(error) for error in calls.errors.values()} == {aiogpu.ClosedError}

    run(main)


def test_memory_that_runs_out_in_collate_halves_as_well(run):
    def collate(items):
        if len(items) > 1:
            raise out_of_memory()
        return items

    async def main():
        batcher = aiogpu.Batcher(lambda x: x, max_batch_size=4, max_delay=1000, collate=collate, split=list)
        async with batcher:
            return (await together(batcher, *range(4))).results

    assert run(main) == {i: i for i in range(4)}


def test_with_preferred_sizes_no_half_is_tried_that_is_padded_to_the_same(run):
    sizes = []

    def fn(items):
        sizes.append(len(items))
        raise out_of_memory()

    async def main():
        async with lists(fn, max_batch_size=8, sizes=(4, 8), max_delay=1000) as batcher:
            calls = await together(batcher, *range(8))
            assert batcher.stats().limit == 4
            return calls.errors

    assert len(run(main)) == 8
    assert sizes == [8, 4, 4]


# -- the device ------------------------------------------------------------------------------------


def test_a_lost_device_fails_all_at_once_and_later_calls_too(run, vd, until):
    async def main():
        batches = []

        async def fn(items):
            batches.append(items)
            vd.latch()
            await aiogpu.synchronize()
            return items

        async with calling(lists(fn, max_batch_size=1, in_flight=2)) as calls:
            await calls.started(*range(5))
            await until(lambda: len(batches) == 2)
            vd.fault()
            await until(lambda: len(calls.errors) == 5)
            assert {type(error) for error in calls.errors.values()} == {aiogpu.DeviceLostError}
            assert len({id(error) for error in calls.errors.values()}) == 5
            with pytest.raises(aiogpu.DeviceLostError):
                await calls.batcher("later")

    run(main)


def test_a_sticky_error_that_the_function_meets_is_the_devices(run, vd):
    from aiogpu.testing import VirtualFault

    def fn(items):
        vd.fault(VirtualFault("an illegal memory access was encountered"))
        vd.launch()

    async def main():
        async with lists(fn, max_batch_size=1) as batcher:
            for _ in range(2):
                with pytest.raises(aiogpu.DeviceLostError):
                    await batcher("x")

    run(main)
