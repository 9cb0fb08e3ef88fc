"""gather and amap: anyio's rules, and operations are welcome."""

from __future__ import annotations

import asyncio
import gc
import inspect

import anyio
import pytest
import torch

import aiogpu


async def after(event, value):
    await event.wait()
    return value


async def fail(error):
    await anyio.lowlevel.checkpoint()
    raise error


# -- gather ------------------------------------------------------------------------------------------


def test_gather_gives_a_tuple_in_the_order_of_its_arguments(run, anydevice):
    async def main():
        first, second = anyio.Event(), anyio.Event()

        async def releases():
            second.set()
            await anyio.lowlevel.checkpoint()
            first.set()
            return "c"

        result = await aiogpu.gather(after(first, "a"), after(second, "b"), releases())
        assert result == ("a", "b", "c")
        assert type(result) is tuple

    run(main)


def test_gather_takes_operations_and_other_awaitables(run, anydevice):
    class Custom:
        def __await__(self):
            return anyio.lowlevel.checkpoint().__await__()

    async def main():
        x = torch.arange(3)
        a, b, c = await aiogpu.gather(aiogpu.to_device(x), aiogpu.item(x.sum()), Custom())
        assert torch.equal(a, x)
        assert (b, c) == (3, None)

    run(main)


def test_gather_takes_asyncios_tasks_and_futures(run_asyncio, anydevice):
    async def main():
        future = asyncio.get_running_loop().create_future()
        future.set_result(1)
        task = asyncio.ensure_future(asyncio.sleep(0, 2))
        assert await aiogpu.gather(future, task) == (1, 2)

    run_asyncio(main)


def test_gather_of_nothing_is_an_empty_tuple(run):
    async def main():
        assert await aiogpu.gather() == ()

    run(main)


def test_the_first_failure_cancels_the_rest_and_comes_in_a_group(run, anydevice):
    log = []

    async def waits():
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            log.append("cancelled")
            raise

    async def main():
        error = KeyError("on purpose")
        with pytest.raises(ExceptionGroup) as caught:
            await aiogpu.gather(waits(), fail(error), waits())
        assert caught.value.exceptions == (error,)
        assert log == ["cancelled", "cancelled"]

    run(main)


def test_several_failures_come_in_one_group(run, anydevice):
    async def main():
        with pytest.raises(ExceptionGroup) as caught:
            await aiogpu.gather(fail(KeyError(1)), fail(ValueError(2)))
        kinds = {type(error) for error in caught.value.exceptions}
        assert kinds <= {KeyError, ValueError}
        assert kinds

    run(main)


def test_a_cancelled_gather_cancels_all_and_is_not_wrapped(run, anydevice):
    async def main():
        with anyio.move_on_after(0.001) as scope:
            await aiogpu.gather(anyio.sleep_forever(), anyio.sleep_forever())
        assert scope.cancelled_caught

    run(main)


def test_gather_refuses_what_is_no_awaitable_before_anything_starts(run, recwarn):
    async def never():
        raise AssertionError("it ran")

    async def main():
        with pytest.raises(TypeError, match=r"gather\(\) takes awaitables, not a list.*gather\(\*list\)"):
            await aiogpu.gather(never(), [never])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="not a function: call the coroutine function"):
            await aiogpu.gather(never(), never)  # type: ignore[arg-type]
        gc.collect()

    run(main)
    assert not recwarn.list


def test_coroutines_that_a_failure_kept_from_starting_are_closed(run, recwarn):
    async def main():
        with anyio.CancelScope() as scope:
            scope.cancel()
            late = [anyio.sleep(1) for _ in range(3)]
            await aiogpu.gather(*late)
        assert {inspect.getcoroutinestate(coroutine) for coroutine in late} == {inspect.CORO_CLOSED}

    run(main)
    assert not recwarn.list


# -- amap --------------------------------------------------------------------------------------------


async def double(x):
    await anyio.lowlevel.checkpoint()
    return 2 * x


@pytest.mark.parametrize("limit", [None, 1, 3, 100])
def test_amap_gives_a_list_in_the_order_of_its_items(run, anydevice, limit):
    async def slow_start(x):
        for _ in range(10 - x):
            await anyio.lowlevel.checkpoint()
        return 2 * x

    async def main():
        result = await aiogpu.amap(slow_start, range(10), limit=limit)
        assert result == [2 * x for x in range(10)]
        assert type(result) is list
        assert await aiogpu.amap(double, [], limit=limit) == []

    run(main)


def test_amap_takes_verbs_as_they_are(run, anydevice):
    async def main():
        xs = [torch.full((3,), i) for i in range(5)]
        for x, y in zip(xs, await aiogpu.amap(aiogpu.to_device, xs, limit=2), strict=True):
            assert torch.equal(x, y)

    run(main)


@pytest.mark.parametrize("limit", [1, 4])
def test_amap_runs_as_many_at_once_as_its_limit_says(run, anydevice, limit):
    running = most = 0

    async def work(x):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        running -= 1

    async def main():
        await aiogpu.amap(work, range(20), limit=limit)

    run(main)
    assert most == limit


def test_amap_takes_items_from_a_generator_as_calls_begin(run, anydevice):
    taken, ended = 0, 0

    def items():
        nonlocal taken
        for i in range(20):
            taken += 1
            assert taken - ended <= 3, "taken far ahead of use"
            yield i

    async def work(x):
        nonlocal ended
        await anyio.lowlevel.checkpoint()
        ended += 1
        return x

    async def main():
        assert await aiogpu.amap(work, items(), limit=2) == list(range(20))

    run(main)


def test_amaps_first_failure_cancels_the_rest_and_takes_no_more_items(run, anydevice):
    taken = []

    def items():
        for i in range(100):
            taken.append(i)
            yield i

    async def work(x):
        await anyio.lowlevel.checkpoint()
        if x == 3:
            raise KeyError(x)
        if x > 3:
            await anyio.sleep_forever()
        return x

    async def main():
        with pytest.raises(ExceptionGroup) as caught:
            await aiogpu.amap(work, items(), limit=2)
        assert [str(error) for error in caught.value.exceptions] == ["3"]
        assert len(taken) <= 7

    run(main)


def test_an_error_of_the_items_themselves_ends_amap(run, anydevice):
    def items():
        yield 1
        raise ZeroDivisionError("the iterator's own")

    async def main():
        for limit in (None, 2):
            with pytest.raises(ExceptionGroup) as caught:
                await aiogpu.amap(double, items(), limit=limit)
            assert caught.group_contains(ZeroDivisionError)

    run(main)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "2"])
def test_a_limit_is_a_number_of_calls(run_asyncio, limit):
    async def main():
        with pytest.raises(ValueError, match="limit is the number of calls at once, 1 or more, not"):
            await aiogpu.amap(double, [1], limit=limit)

    run_asyncio(main)


def test_amap_takes_a_function_first(run_asyncio):
    async def main():
        with pytest.raises(TypeError, match=r"amap\(\) takes a coroutine function and its items, not a list"):
            await aiogpu.amap([1], double)  # type: ignore[arg-type]

    run_asyncio(main)
