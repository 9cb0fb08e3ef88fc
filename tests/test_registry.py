"""`aiogpu.register`, torch's pytree registrations, and records of every make: types come back exactly."""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import aiogpu
from aiogpu.transfers import registry, strangers
from aiogpu.transfers.tree import flatten, tensors_of


def one(value: float = 1.0) -> torch.Tensor:
    return torch.tensor(value)


def rebuilt(data: Any) -> Any:
    """`data` with every tensor moved, where moving adds 100."""
    tree = flatten(data, verb="to_device")
    return tree.rebuild([leaf.detach() + 100 for leaf in tree.tensors], [])


class Graph:
    """What nobody can guess: its tensors are behind a closure."""

    def __init__(self, nodes: Any, edges: Any, name: str) -> None:
        self._get = lambda: (nodes, edges)
        self.name = name

    @property
    def nodes(self) -> Any:
        return self._get()[0]

    @property
    def edges(self) -> Any:
        return self._get()[1]


def take_apart(graph: Graph) -> tuple[list[Any], str]:
    return [graph.nodes, graph.edges], graph.name


def put_together(children: Any, name: str) -> Graph:
    return Graph(*children, name)


@pytest.fixture
def graph() -> Iterator[Any]:
    with aiogpu.register(Graph, take_apart, put_together) as registration:
        yield registration


# -- aiogpu.register -----------------------------------------------------------------------------------


def test_a_registered_class_moves_as_containers_do(run, anydevice, graph):
    async def main():
        shared = torch.arange(3.0)
        data = {"g": Graph({"x": shared, "n": 3}, (torch.ones(2), None), "first"), "again": shared}
        there = await aiogpu.to_device(data)
        assert type(there["g"]) is Graph
        assert there["g"].name == "first"
        assert there["g"].nodes["x"] is there["again"] is not shared
        assert there["again"].tolist() == [0, 1, 2]
        assert there["g"].edges[0].tolist() == [1, 1]
        back = await aiogpu.to_host(there)
        assert type(back["g"]) is Graph

    run(main)


def test_a_large_one_arrives_complete_though_it_computes_when_put_together(run_asyncio, anydevice):
    """The copies of a CPU device are made on other threads: putting together must not come before."""

    def doubled(children: Any, name: str) -> Graph:
        return Graph(children[0] * 2, children[1], name)

    async def main():
        with aiogpu.register(Graph, take_apart, doubled):
            x = torch.arange(1_000_000)
            for _ in range(5):
                there = await aiogpu.to_device(Graph(x, None, "large"))
                assert torch.equal(there.nodes, x * 2)

    run_asyncio(main)


def test_what_a_registered_object_holds_is_reached_for_lifetimes(graph):
    x, y = one(), one(2)
    assert list(tensors_of([Graph(x, {"y": y}, "g")])) == [x, y]


def test_out_goes_through_registered_classes_too(run_asyncio, anydevice, graph):
    async def main():
        out = Graph(torch.zeros(3), [torch.zeros(2)], "out")
        data = Graph(torch.ones(3), [torch.full((2,), 7.0)], "data")
        assert await aiogpu.to_host(data, out=out) is out
        assert out.nodes.tolist() == [1, 1, 1]
        assert out.edges[0].tolist() == [7, 7]

    run_asyncio(main)


def test_an_error_names_the_way_through_a_registered_object(graph):
    data = {"graphs": [0, Graph(one(), {"mask": torch.ones(1, device="meta")}, "g")]}
    with pytest.raises(ValueError, match=r"data\['graphs'\]\[1\]<child 1>\['mask'\] is a meta tensor"):
        flatten(data, verb="to_device")


def test_a_registered_object_that_holds_no_tensors_passes_by_identity(graph):
    data = Graph(1, 2, "numbers")
    assert rebuilt(data) is data


def test_a_registered_object_that_contains_itself_is_refused(graph):
    nodes: list[Any] = [one()]
    data = Graph(nodes, None, "loop")
    nodes.append(data)
    with pytest.raises(ValueError, match=r"data<child 0>\[1\] is a Graph that contains itself"):
        flatten(data, verb="to_device")


def test_an_entry_comes_before_to_before_a_base_and_before_pytree():
    class Movable(dict):  # type: ignore[type-arg]
        def to(self, device: Any) -> Any:
            raise AssertionError("moved itself")

    torch_knows(Movable, lambda x: pytest.fail("asked pytree"), lambda children, context: None)
    with aiogpu.register(
        Movable, lambda x: (list(x.values()), None), lambda c, _: Movable(x=c[0], by="entry")
    ):
        assert rebuilt(Movable(x=one())) == {"x": 101, "by": "entry"}
        assert [x.item() for x in tensors_of(Movable(x=one()))] == [1]


def test_an_entry_for_a_module_comes_before_the_module():
    class Net(nn.Module):
        pass

    net = Net()
    net.weight = nn.Parameter(torch.ones(2))
    with aiogpu.register(Net, lambda net: ([], None), lambda children, _: net):
        assert list(tensors_of(net)) == []
        assert flatten(net, verb="to_device").movers == []
    assert flatten(net, verb="to_device").movers == [net]


def test_an_entry_holds_for_exactly_its_class(graph):
    class Labelled(Graph):
        pass

    data = Labelled(one(), None, "child")
    data.label = one(2)
    with pytest.warns(UserWarning, match=r"Labelled and holds tensors.*aiogpu\.register"):
        assert flatten(data, verb="to_device").rebuild([], []) is data


def test_an_entry_can_be_taken_back(graph):
    data = Graph(one(), None, "g")
    tree = flatten(data, verb="to_device")
    assert repr(graph) == f"<Registration of {__name__}.Graph, registered>"
    graph.remove()
    graph.remove()
    assert repr(graph).endswith("removed>")
    assert tree.rebuild([one(5)], []).nodes == 5  # was on its way
    assert flatten(data, verb="to_device").tensors == []
    with aiogpu.register(Graph, take_apart, put_together):
        graph.remove()  # of an entry that is not the class's any more
        assert len(flatten(data, verb="to_device").tensors) == 1


def test_registering_twice_is_refused_and_changes_nothing(graph):
    with pytest.raises(ValueError, match=r"Graph is registered already.*`remove\(\)` first"):
        aiogpu.register(Graph, lambda x: ([], None), put_together)
    assert len(flatten(Graph(one(), None, "g"), verb="to_device").tensors) == 1


@pytest.mark.parametrize(
    ("cls", "flatten_", "unflatten", "error", "message"),
    [
        (Graph("", "", ""), take_apart, put_together, TypeError, "takes a class, not a Graph"),
        (Graph, None, put_together, TypeError, "takes a function as flatten, not None"),
        (Graph, take_apart, "put_together", TypeError, "takes a function as unflatten, not a str"),
        (torch.Tensor, take_apart, put_together, ValueError, "Tensor has a meaning of its own"),
        (nn.Parameter, take_apart, put_together, ValueError, "__tensor_flatten__"),
        (dict, take_apart, put_together, ValueError, "dict has a meaning of its own"),
        (OrderedDict, take_apart, put_together, ValueError, "OrderedDict has a meaning of its own"),
        (int, take_apart, put_together, ValueError, "int has a meaning of its own"),
    ],
)
def test_what_cannot_be_registered_is_refused(cls, flatten_, unflatten, error, message):
    with pytest.raises(error, match=rf"register\(\).*{message}"):
        aiogpu.register(cls, flatten_, unflatten)
    assert not registry._entries


@pytest.mark.parametrize(
    ("flat", "said"),
    [
        (None, "it returned None"),
        ([one()], "it returned a list"),
        (([one()],), r"it returned a tuple of 1, \(list\)"),
        ((one(), one()), r"it returned a tuple of 2, \(Tensor, Tensor\)"),
        (({"x": one()}, None), r"it returned a tuple of 2, \(dict, NoneType\)"),
    ],
)
def test_a_flatten_that_returns_something_else_is_named_with_the_place(flat, said):
    with aiogpu.register(Graph, lambda graph: flat, put_together):
        message = rf"flatten of aiogpu\.register\(Graph, \.\.\.\) must return \(children, context\).*{said}"
        with pytest.raises(TypeError, match=message) as caught:
            flatten({"g": Graph(1, 2, "g")}, verb="to_device")
        assert caught.value.__notes__ == ["when to_device() took data['g'] apart"]
        assert list(tensors_of([Graph(1, 2, "g"), x := one()])) == [x]  # never raises


def test_an_unflatten_that_returns_something_else_fails_where_it_is_awaited(run_asyncio, anydevice):
    async def main():
        with aiogpu.register(Graph, take_apart, lambda children, name: None):  # type: ignore[arg-type,return-value]
            operation = aiogpu.to_device(Graph(one(), None, "g"))
            with pytest.raises(TypeError, match=r"must return a Graph; it returned None"):
                await operation

    run_asyncio(main)


def test_what_a_registered_function_raises_comes_to_the_caller(run_asyncio, auto_vd):
    def broken(*_: Any) -> Any:
        raise LookupError("users' own")

    async def main():
        with aiogpu.register(Graph, broken, put_together), pytest.raises(LookupError, match="users' own"):
            aiogpu.to_device([Graph(1, 2, "g")])
        with aiogpu.register(Graph, take_apart, broken):
            operation = aiogpu.to_device([Graph(one(), 2, "g")])
            with pytest.raises(LookupError, match="users' own"):
                await operation
        assert aiogpu.stats().operations == 0

    run_asyncio(main)


def test_registering_from_many_threads_keeps_every_entry():
    classes = [type(f"Class{n}", (), {}) for n in range(64)]
    registrations: list[Any] = []
    start = threading.Barrier(4)

    def work(some: list[type]) -> None:
        start.wait(10)
        registrations.extend(aiogpu.register(cls, lambda x: ([], None), put_together) for cls in some)

    threads = [threading.Thread(target=work, args=(classes[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry._entries.keys() == set(classes)
    for registration in registrations:
        registration.remove()
    assert not registry._entries


def test_one_of_many_threads_gets_the_class():
    got, refused = [], []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(10)
        try:
            got.append(aiogpu.register(Graph, take_apart, put_together))
        except ValueError as error:
            refused.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 3)
    got[0].remove()


# -- torch's pytree ------------------------------------------------------------------------------------


def torch_knows(cls: type, flatten_: Any, unflatten: Any, **options: Any) -> None:
    pytree.register_pytree_node(cls, flatten_, unflatten, **options)


class Page:
    def __init__(self, text: Any, picture: Any) -> None:
        self.text, self.picture = text, picture


class Book:
    def __init__(self, pages: Any) -> None:
        self.pages = pages


torch_knows(Page, lambda p: ([p.picture], p.text), lambda children, text: Page(text, *children))
torch_knows(
    Book,
    lambda book: (book.pages, None),
    lambda pages, _: Book(list(pages)),
    flatten_with_keys_fn=lambda book: ([(pytree.SequenceKey(i), p) for i, p in enumerate(book.pages)], None),
)


def test_a_class_that_torchs_pytree_knows_is_a_container():
    moved = rebuilt({"book": Book([Page("one", one(1)), Page("two", [one(2)])])})
    assert type(moved["book"]) is Book
    assert [(type(page), page.text) for page in moved["book"].pages] == [(Page, "one"), (Page, "two")]
    assert moved["book"].pages[0].picture == 101
    assert moved["book"].pages[1].picture == [102]
    assert [x.item() for x in tensors_of(Book([Page("one", one(3))]))] == [3]


def test_the_way_through_it_is_named_by_its_keys_where_it_has_some():
    book = Book([Page("", 1), Page("", torch.ones(1, device="meta"))])
    with pytest.raises(ValueError, match=r"data\[0\]\[1\]<child 0> is a meta tensor"):
        flatten([book], verb="to_device")


@dataclass
class Point:
    x: Any
    y: Any = None
    norm: Any = field(init=False, default=None)
    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        type(self).made += 1


pytree.register_dataclass(Point)


def test_a_dataclass_registered_as_such_is_still_not_constructed_again():
    """Torch's own functions would run `__post_init__`, and lose what is no argument of `__init__`."""
    point = Point(one())
    point.norm = one(3)
    made = Point.made
    moved = rebuilt([point])[0]
    assert type(moved) is Point
    assert (moved.x, moved.norm, Point.made) == (101, 103, made)
    with pytest.raises(ValueError, match=r"data\.y is a meta tensor"):
        flatten(Point(one(), torch.ones(1, device="meta")), verb="to_device")


@dataclass
class Custom:
    x: Any
    cache: Any = None


torch_knows(Custom, lambda c: ([c.x], None), lambda children, _: Custom(children[0], cache="rebuilt"))


def test_functions_of_the_users_own_come_before_what_the_base_is():
    moved = rebuilt(Custom(one(), cache=one()))
    assert (type(moved), moved.x, moved.cache) == (Custom, 101, "rebuilt")


def test_a_class_that_torch_was_told_is_a_constant_passes_by_identity():
    class Setting:
        def __init__(self) -> None:
            self.x = one()

        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return 1

    pytree.register_constant(Setting)
    data = Setting()
    assert rebuilt(data) is data


# -- Records of every make -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    x: Any
    _secret: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Slotted(Base):
    y: Any = field(default=None, kw_only=True)
    total: Any = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.total + 1)


@dataclass
class WithInit:
    x: Any
    seed: dataclasses.InitVar[int] = 0
    items: list[Any] = field(default_factory=list)

    def __post_init__(self, seed: int) -> None:
        self.items.append(seed)

    @cached_property
    def double(self) -> Any:
        return self.x * 2

    @property
    def y(self) -> Any:
        raise AssertionError("ran the user's code")


@dataclass(init=False)
class OwnInit:
    x: Any

    def __init__(self, *, seed: int) -> None:
        self.x = one(seed)
        self.extra = [one(seed + 1)]


@dataclass(eq=False, order=False, match_args=False)
class Linked:
    value: Any
    next: Any = None


def test_a_frozen_slotted_child_keeps_the_fields_of_its_base():
    moved = rebuilt(Slotted(one(), one(2), y=[one(3)]))
    assert type(moved) is Slotted
    assert (moved.x, moved._secret, moved.y, moved.total) == (101, 102, [103], 1)


def test_what_post_init_and_cached_properties_have_made_is_moved_and_not_made_again():
    data = WithInit(one(), seed=7)
    assert data.double == 2
    moved = rebuilt(data)
    assert (moved.x, moved.__dict__["double"], moved.items) == (101, 102, [7])


def test_a_dataclass_with_an_init_of_its_own_is_not_initialised_again():
    moved = rebuilt(OwnInit(seed=1))
    assert (moved.x, moved.extra) == (101, [102])


def test_a_linked_list_of_records_keeps_its_length_and_a_ring_is_refused():
    last = Linked(one(3))
    moved = rebuilt(Linked(one(1), Linked(one(2), last)))
    assert (moved.value, moved.next.value, moved.next.next.value, moved.next.next.next) == (
        101,
        102,
        103,
        None,
    )
    last.next = last
    with pytest.raises(ValueError, match=r"data\.next\.next is a Linked that contains itself"):
        flatten(Linked(one(), last), verb="to_device")


def test_an_attrs_class_is_a_record():
    attrs = pytest.importorskip("attrs")

    @attrs.define
    class Sample:
        x: Any
        n: Any = attrs.field(default=0, converter=lambda n: n + 1)
        hidden: Any = attrs.field(init=False, default=None)

    @attrs.frozen
    class Frozen(Sample):
        y: Any = None

    @attrs.define(slots=False)
    class Open:
        x: Any

    data = Frozen(one(), 5, one(2))
    moved = rebuilt(data)
    assert type(moved) is Frozen
    assert (moved.x, moved.n, moved.y, moved.hidden) == (101, 6, 102, None)
    loose = Open(one())
    loose.extra = one(4)
    moved = rebuilt(loose)
    assert (moved.x, moved.extra) == (101, 104)


def test_a_pydantic_model_is_a_record():
    pydantic = pytest.importorskip("pydantic")

    class Sample(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, extra="allow", frozen=True)
        x: torch.Tensor
        items: list[Any] = pydantic.Field(default_factory=list)
        _cache: Any = pydantic.PrivateAttr(default=None)

        @pydantic.model_validator(mode="after")
        def check(self) -> Any:
            assert self.x < 50, "validated again"
            return self

    data = Sample(x=one(), items=[one(2)], other=one(3))
    data._cache = one(4)
    moved = rebuilt([data])[0]
    assert type(moved) is Sample
    assert (moved.x, moved.items, moved.other, moved._cache) == (101, [102], 103, 104)
    assert moved.model_fields_set == data.model_fields_set
    assert data.x == 1

    @pydantic.dataclasses.dataclass(config={"arbitrary_types_allowed": True})
    class Record:
        x: torch.Tensor

    assert rebuilt(Record(one())).x == 101


# -- More containers -------------------------------------------------------------------------------------


class Row(NamedTuple):
    image: Any
    label: Any = -1
    tags: tuple[Any, ...] = ()


class Window(deque):  # type: ignore[type-arg]
    def __init__(self, name: str) -> None:
        super().__init__(maxlen=3)
        self.name = name

    def append(self, x: Any) -> None:
        assert len(self) < 3, "ran the user's code"
        super().append(x)


class Bag(set):  # type: ignore[type-arg]
    pass


def test_a_deque_keeps_order_length_limit_and_class():
    moved = rebuilt(deque([one(1), 2, one(3)], maxlen=5))
    assert type(moved) is deque
    assert list(moved) == [101, 2, 103]
    assert moved.maxlen == 5
    window = Window("w")
    window.extend([one(1), one(2)])
    moved = rebuilt(window)
    assert type(moved) is Window
    assert (list(moved), moved.name, moved.maxlen) == ([101, 102], "w", 3)


def test_sets_are_moved_with_their_class():
    x = one()
    moved = rebuilt({"all": {x, 3}, "some": frozenset({x}), "bag": Bag({x}), "x": x})
    assert moved["all"] == {moved["x"], 3}
    assert moved["some"] == frozenset({moved["x"]})
    assert type(moved["some"]) is frozenset
    assert type(moved["bag"]) is Bag
    assert moved["bag"] == {moved["x"]}


def test_a_simple_namespace_is_a_container():
    moved = rebuilt(types.SimpleNamespace(x=one(), n=1))
    assert type(moved) is types.SimpleNamespace
    assert (moved.x, moved.n) == (101, 1)


def test_the_way_to_a_leaf_is_written_as_users_would():
    bad = torch.ones(1, device="meta")
    places: list[tuple[Any, str]] = [
        ({"images": [0, 1, 2, Row(one(), tags=(bad,))]}, r"data['images'][3].tags[0]"),
        (Base({"mask": Linked(bad)}), "data.x['mask'].value"),
        (deque([types.SimpleNamespace(x=bad)]), "data[0].x"),
        ({(1, 2): bad}, "data[...]"),
        (bad, "data"),
    ]
    for data, place in places:
        with pytest.raises(ValueError, match=f"^to_device\\(\\): {re.escape(place)} is a meta tensor"):
            flatten(data, verb="to_device")


def test_an_object_that_torch_moves_by_keyword_only_is_refused_with_what_to_pass():
    with pytest.raises(TypeError, match=r"data\['s'\] is a storage.*pass a tensor"):
        flatten({"s": torch.ones(3).untyped_storage()}, verb="to_device")


@pytest.mark.skipif(sys.platform == "win32", reason="one platform is enough")
def test_a_walk_over_ten_thousand_tensors_makes_no_object_for_each(benchmark_free: Callable[..., int]):
    data = {n: torch.ones(1) for n in range(10_000)}
    assert benchmark_free(lambda: flatten(data, verb="to_device")) < 100


@pytest.fixture
def benchmark_free() -> Callable[..., int]:
    """How many objects that the collector tracks a call leaves alive."""
    import gc

    def count(fn: Callable[[], Any]) -> int:
        gc.collect()
        before = len(gc.get_objects())
        kept = fn()
        after = len(gc.get_objects())
        del kept
        return after - before

    return count


def test_tensors_that_are_keys_stay_and_that_is_said_once():
    strangers._warned.discard(strangers._Keys)
    parameter = one()
    state = {"state": {parameter: {"momentum": one(2)}}}
    with pytest.warns(UserWarning, match=r"to_device\(\): data\['state'\] has tensors for keys"):
        moved = rebuilt(state)
    assert moved["state"][parameter] == {"momentum": 102}
    rebuilt(state)  # silent: warnings are errors


def test_strangers_say_so_once():
    class Stranger:
        def __init__(self) -> None:
            self.x = one()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        flatten([Stranger(), Stranger()], verb="to_device")
        flatten(Stranger(), verb="to_device")
    assert len(seen) == 1
    assert Stranger in strangers._warned
