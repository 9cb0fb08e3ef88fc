"""Many leaves looked at together are found to be what each of them is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies as st

from aiogpu.transfers import tree
from aiogpu.transfers.alike import Alike, Likeness, ordinary, runs
from aiogpu.transfers.parts import is_ordinary
from aiogpu.transfers.plan import Plan
from aiogpu.transfers.tree import Tree, flatten, flatten_some

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:.*quantiz"
)


class Sub(torch.Tensor):
    pass


#: What is no ordinary tensor, each in another way.
ODD: dict[str, Callable[[], Any]] = {
    "needs grad": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "subclass": lambda: torch.ones(3).as_subclass(Sub),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "ragged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "raw": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
    "meta": lambda: torch.ones(3, device="meta"),
    "zero": lambda: torch._efficientzerotensor((3,)),
    "array": lambda: numpy.ones(3),
    "number": lambda: 3,
    "list": lambda: [torch.ones(3)],
}
if torch.backends.mkldnn.is_available():
    ODD["oneDNN"] = lambda: torch.ones(3, 3).to_mkldnn()


def plain() -> list[torch.Tensor]:
    x = torch.arange(24.0)
    shapes = [x, x[:12], x.view(4, 6), x.view(4, 6).t(), x[::2], x[:0], x[0], x[:1].expand(24)]
    others = [
        x.to(torch.int64),
        x.to(torch.bool),
        torch.view_as_complex(x.view(12, 2)).conj(),
        torch._neg_view(x),
    ]
    return [*shapes, *others]


def test_ordinary_tensors_of_any_kind_are_taken_together():
    leaves = plain()
    assert all(map(is_ordinary, leaves))
    with torch._C.DisableTorchFunction():
        assert ordinary(leaves, None) is not None


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("place", [0, 7, -1])
def test_one_that_is_not_ordinary_is_seen_among_many(name, place):
    leaves, odd = plain(), ODD[name]()
    with torch._C.DisableTorchFunction():
        assert not is_ordinary(odd)
        assert ordinary([odd] * 20, None) is None
        leaves.insert(place if place >= 0 else len(leaves), odd)
        assert ordinary(leaves, None) is None


kinds = st.lists(st.sampled_from(range(len(plain()))), max_size=60)


@hypothesis.given(kinds, kinds)
@hypothesis.settings(deadline=None)
def test_each_tensor_is_sorted_among_its_like(first, second):
    leaves = [torch.empty_like(plain()[n]) if n < 2 else plain()[n] for n in [*first, *second]]
    alike = Alike()
    for part in (leaves[: len(first)], leaves[len(first) :]):
        alike.extend(runs(part, [torch.float16] * len(part)))
    assert alike.count == len(leaves)
    found = {n: like for like, where in alike.groups.items() for some in where for n in some}
    assert len(found) == sum(len(some) for where in alike.groups.values() for some in where) == len(leaves)
    for number, x in enumerate(leaves):
        expected = Likeness(x.device, x.dtype, torch.float16, x.shape, x.is_contiguous())
        assert found[number] == expected
        assert found[number].nbytes == x.nbytes
    assert alike.nbytes == sum(x.nbytes for x in leaves)
    assert alike.devices == {x.device for x in leaves}


# -- in the walk ---------------------------------------------------------------------------------------------


def walked(data: Any, parts: int, dtype: torch.dtype | None = None) -> Tree[Any]:
    begun, more = flatten_some(data, verb="to_device", parts=parts, dtype=dtype)
    while more is not None and not more(parts):
        pass
    return begun


leaves = st.sampled_from(["tensor", "tensor", "tensor", "same", "number", "array", "parameter", "list"])


@hypothesis.given(st.lists(st.tuples(leaves, st.integers(1, 40)), max_size=8), st.integers(1, 64))
@hypothesis.settings(deadline=None)
def test_a_walk_that_looks_at_many_together_finds_what_one_by_one_does(recipe, parts):
    same, data = torch.ones(2), []
    for kind, count in recipe:
        data += [
            {
                "tensor": lambda: torch.ones(3),
                "same": lambda: same,
                "number": lambda: 7,
                "array": lambda: numpy.ones(2),
                "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
                "list": lambda: [torch.ones(1), same],
            }[kind]()
            for _ in range(count)
        ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "_TOGETHER", 10**9)
        slow = flatten(data, verb="to_device")
    fast = walked(data, parts)
    assert [id(x) for x in fast.tensors] == [id(x) for x in slow.tensors]
    assert [id(x) for x in fast.arrays] == [id(x) for x in slow.arrays]
    assert fast.odd == slow.odd
    assert [(way, id(x)) for way, x in fast.places()] == [(way, id(x)) for way, x in slow.places()]
    moved = [object() for _ in [*slow.tensors, *slow.arrays]]
    assert fast.rebuild(moved, []) == slow.rebuild(moved, [])
    if fast.sort():
        assert fast.alike.count == len(fast.tensors)


def test_many_alike_are_looked_at_together(monkeypatch):
    looks: list[object] = []
    monkeypatch.setattr(tree, "is_ordinary", lambda x: looks.append(x) or is_ordinary(x))
    for data in ([torch.ones(3) for _ in range(100)], {n: torch.ones(n) for n in range(100)}):
        for dtype in (None, torch.float16):
            assert len(walked(data, 40, dtype).tensors) == 100
    assert len(looks) <= 4 * 20


@pytest.mark.parametrize("name", ["meta", "zero"])
def test_the_place_of_what_is_refused_among_many_is_named(name):
    data = [*(torch.ones(2) for _ in range(100)), ODD[name](), *(torch.ones(2) for _ in range(100))]
    with pytest.raises(ValueError, match=r"data\[100\] is "):
        walked(data, 64)


def test_what_cannot_be_converted_is_refused_among_many():
    with pytest.raises(TypeError, match=r"data\[0\] is of dtype torch.float32, which torch cannot convert"):
        walked([torch.ones(2) for _ in range(100)], 64, torch.bits8)


def test_one_that_was_met_before_is_seen_among_many():
    """In another container, and further than one look goes."""
    same = torch.ones(2)
    data = [[torch.ones(2) for _ in range(40)], [*(torch.ones(2) for _ in range(39)), same], [same]]
    data.append([*(torch.ones(2) for _ in range(20)), same, *(torch.ones(2) for _ in range(19))])
    for parts in (40, 64, 10**6):
        found = walked(data, parts)
        assert len(found.tensors) == 40 + 40 + 39
        back = found.rebuild([x + 1 for x in found.tensors], [])
        assert back[1][39] is back[2][0] is back[3][20]


def test_of_many_those_that_are_in_place_stay_and_the_others_move():
    data = [torch.full((3,), n, dtype=(torch.int64, torch.float32)[n % 3 == 0]) for n in range(100)]
    plan: Plan[Any] = Plan(flatten(data, verb="to_device"), lambda x: x.dtype is torch.int64)
    assert [x.dtype for x in plan.plain] == [torch.float32] * 34
    back = plan.rebuild([x + 100 for x in plan.plain], [])
    for number, (x, leaf) in enumerate(zip(back, data, strict=True)):
        if number % 3:
            assert x is leaf
        else:
            assert x.tolist() == [number + 100.0] * 3
