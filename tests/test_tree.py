"""What the walk over users' data promises: exact types back, nothing missed, nothing refused late."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from typing import Any, NamedTuple
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_map

from aiogpu.transfers import strangers
from aiogpu.transfers.arrays import as_tensor
from aiogpu.transfers.tree import Tree, explode, flatten, flatten_some, tensors_of


def rebuilt(data: Any, *, verb: str = "to_device") -> Any:
    """`data` with every leaf moved, where moving adds 100."""
    tree = flatten(data, verb=verb)
    leaves = [*tree.tensors, *(as_tensor(array) for array in tree.arrays)]
    return tree.rebuild([leaf.detach() + 100 for leaf in leaves], [mover.to("cpu") for mover in tree.movers])


def one(value: float = 1.0) -> torch.Tensor:
    return torch.tensor(value)


# -- Containers --------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any = "default"


class Ordered(Pair):
    """A NamedTuple subclass with a `__new__` of its own, which must not run again, and an attribute."""

    def __new__(cls, *, left: Any, right: Any) -> Ordered:
        return super().__new__(cls, min(left, right), max(left, right))


class Record(dict):  # type: ignore[type-arg]
    """A dict whose class insists on an argument, refuses writes and lies about its items."""

    def __init__(self, name: str, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.name = name

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("ran the user's code")

    def __iter__(self) -> Any:
        raise AssertionError("ran the user's code")

    keys = values = items = update = copy = __iter__  # type: ignore[assignment]


class Loud(OrderedDict):  # type: ignore[type-arg]
    armed = False

    def __setitem__(self, key: Any, value: Any) -> None:
        assert not self.armed, "ran the user's code"
        super().__setitem__(key, value)


class Batch(list):  # type: ignore[type-arg]
    __slots__ = ("__private", "mask", "unset")

    def __init__(self, items: Any, mask: Any) -> None:
        super().__init__(items)
        self.mask = mask
        self.__private = mask

    @property
    def private(self) -> Any:
        return self.__private


def test_a_dict_keeps_its_keys_order_and_other_values():
    data = {"x": one(), 3: "name", None: None}
    moved = rebuilt(data)
    assert type(moved) is dict
    assert list(moved) == ["x", 3, None]
    assert moved["x"] == 101
    assert moved[3] is data[3]


def test_an_ordered_dict_keeps_an_order_that_was_changed():
    data = OrderedDict(a=one(1), b=one(2))
    data.move_to_end("a")
    moved = rebuilt(data)
    assert type(moved) is OrderedDict
    assert list(moved.items()) == [("b", 102), ("a", 101)]


def test_a_subclass_of_ordered_dict_is_filled_without_its_setitem():
    data = Loud(a=one(1), b=one(2))
    data.note = one(3)
    with mock.patch.object(Loud, "armed", True):
        moved = rebuilt(data)
    assert type(moved) is Loud
    assert list(moved.values()) == [101, 102]
    assert moved.note == 103


def test_a_defaultdict_keeps_its_factory():
    moved = rebuilt(defaultdict(list, x=one()))
    assert type(moved) is defaultdict
    assert moved["x"] == 101
    assert moved["new"] == []


def test_a_dict_subclass_keeps_type_and_attributes_and_none_of_its_code_runs():
    data = Record("batch", {"x": one()})
    data.extra = [one(2)]
    moved = rebuilt(data)
    assert type(moved) is Record
    assert moved.name == "batch"
    assert moved.extra == [102]
    assert dict.__getitem__(moved, "x") == 101


def test_a_counter_keeps_its_type():
    assert type(rebuilt([one(), Counter(a=2)])[1]) is Counter


def test_user_dict_and_user_list_are_containers():
    moved = rebuilt(UserDict(x=UserList([one()])))
    assert type(moved) is UserDict
    assert type(moved["x"]) is UserList
    assert moved["x"][0] == 101


def test_a_list_subclass_keeps_its_slots():
    moved = rebuilt(Batch([one()], one(2)))
    assert type(moved) is Batch
    assert moved == [101]
    assert moved.mask == 102
    assert moved.private is moved.mask
    assert not hasattr(moved, "unset")


def test_a_tuple_stays_a_tuple():
    moved = rebuilt((one(), "x", None))
    assert type(moved) is tuple
    assert moved == (101, "x", None)


def test_a_named_tuple_keeps_its_type_and_defaults():
    moved = rebuilt(Pair(one()))
    assert type(moved) is Pair
    assert moved == (101, "default")
    assert type(rebuilt(namedtuple("Old", "a b")(one(), 1))).__name__ == "Old"


def test_a_named_tuple_subclass_with_its_own_new_is_not_constructed_again():
    data = Ordered(left=one(2), right=one(1))
    data.note = one(3)
    moved = rebuilt(data)
    assert type(moved) is Ordered
    assert moved == (101, 102)
    assert moved.note == 103


def test_what_torch_max_returns_keeps_its_type():
    data = torch.ones(2, 2).max(0)
    moved = rebuilt(data)
    assert type(moved) is type(data)
    assert moved.values.tolist() == [101, 101]


@pytest.mark.parametrize(
    "data",
    [
        None,
        1,
        "text",
        b"bytes",
        1.5,
        torch.float32,
        torch.device("cpu"),
        torch.Size([2]),
        object(),
        torch.Tensor,
    ],
)
def test_what_is_no_leaf_passes_by_identity(data):
    assert rebuilt(data) is data
    assert rebuilt([one(), data])[1] is data


@pytest.mark.parametrize("data", [[1, "a"], {"a": (1, 2)}, (1, [2]), Pair(1), np.float32(1)])
def test_a_container_without_leaves_passes_by_identity(data):
    assert rebuilt(data) is data
    assert rebuilt({"x": one(), "rest": data})["rest"] is data


def test_the_callers_containers_are_never_changed():
    data = {"x": [one(), {"y": (one(2),)}]}
    before = copy.copy(data), list(data["x"])
    moved = rebuilt(data)
    assert data == before[0]
    assert data["x"] == before[1]
    assert moved["x"] is not data["x"]
    assert data["x"][0] == 1


def test_a_change_while_the_leaves_are_on_their_way_does_not_reach_the_result():
    data = {"x": one(), "rest": [one(2)]}
    tree = flatten(data, verb="to_device")
    data["rest"].append("late")
    data.clear()
    assert tree.rebuild(tree.tensors, []) == {"x": 1, "rest": [2]}


def test_rebuild_can_be_called_again_and_gives_fresh_containers():
    tree = flatten([one()], verb="to_device")
    first, second = tree.rebuild([1], []), tree.rebuild([2], [])
    assert first == [1]
    assert second == [2]


def test_rebuild_refuses_a_wrong_number_of_leaves():
    tree = flatten([one()], verb="to_device")
    with pytest.raises(ValueError, match="one moved leaf for each"):
        tree.rebuild([], [])
    with pytest.raises(ValueError, match="one moved leaf for each"):
        tree.rebuild([1], [2])


# -- Dataclasses -------------------------------------------------------------------------------------------


def never() -> Any:
    raise AssertionError("ran the user's code")


@dataclasses.dataclass
class Plain:
    x: Any
    n: int = 3
    derived: Any = dataclasses.field(init=False, default=None)
    seed: dataclasses.InitVar[int] = 0

    def __post_init__(self, seed: int) -> None:
        if type(seed) is not int:
            never()
        self.derived = self.x * 2 if isinstance(self.x, torch.Tensor) else None
        self.calls = getattr(self, "calls", 0) + 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Frozen:
    x: Any
    name: str = "frozen"


@dataclasses.dataclass
class Child(Plain):
    y: Any = None


@dataclasses.dataclass
class Both(OrderedDict):  # type: ignore[type-arg]
    """As the model outputs of transformers: fields that are also items."""

    logits: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


def test_a_dataclass_is_rebuilt_without_running_its_post_init():
    data = Plain(one(), n=5, seed=7)
    data.derived = one(9)
    moved = rebuilt(data)
    assert type(moved) is Plain
    assert (moved.x, moved.n, moved.derived, moved.calls) == (101, 5, 109, 1)
    assert data.x == 1


def test_a_frozen_dataclass_with_slots_is_rebuilt():
    moved = rebuilt(Frozen(x=[one()]))
    assert type(moved) is Frozen
    assert moved.x == [101]
    assert moved.name == "frozen"
    with pytest.raises(dataclasses.FrozenInstanceError):
        moved.name = "other"
    assert weakref.ref(moved)() is moved


def test_an_inherited_dataclass_keeps_the_fields_of_both():
    moved = rebuilt(Child(one(), y=one(2)))
    assert type(moved) is Child
    assert (moved.x, moved.derived, moved.y) == (101, 102, 102)


def test_a_dataclass_that_is_also_a_dict_moves_fields_and_items_as_one():
    moved = rebuilt(Both(one()))
    assert type(moved) is Both
    assert moved.logits == 101
    assert moved["logits"] is moved.logits


def test_a_dataclass_itself_is_a_value():
    assert rebuilt([one(), Plain])[1] is Plain


# -- Sharing, depth, cycles --------------------------------------------------------------------------------


def test_a_tensor_that_appears_twice_is_moved_once_and_appears_twice():
    x = one()
    tree = flatten({"a": x, "b": [x]}, verb="to_device")
    assert len(tree.tensors) == 1
    moved = tree.rebuild([one(5)], [])
    assert moved["a"] is moved["b"][0]


def test_leaves_are_listed_in_order_of_first_appearance():
    a, b, c = one(1), one(2), one(3)
    tree = flatten([a, {"x": (b, a)}, Frozen(x=c), b], verb="to_device")
    assert [id(x) for x in tree.tensors] == [id(a), id(b), id(c)]


def test_a_container_that_appears_twice_stays_one_container():
    inner = [one()]
    moved = rebuilt({"a": inner, "b": inner})
    assert moved["a"] is moved["b"]


def test_sharing_costs_no_exponential_walk():
    data: Any = [one()]
    for _ in range(200):
        data = [data, data]
    assert len(flatten(data, verb="to_device").tensors) == 1


@pytest.mark.parametrize("depth", [500, 20_000])
def test_deep_nesting_works(depth):
    data: Any = one()
    for level in range(depth):
        data = [data] if level % 2 else {"k": data}
    moved = rebuilt(data)
    assert [x.tolist() for x in tensors_of(data)] == [1]
    while not isinstance(moved, torch.Tensor):
        moved = moved[0] if type(moved) is list else moved["k"]
    assert moved == 101


def test_data_that_contains_itself_is_refused_by_name():
    data: Any = {"x": [one()]}
    data["x"].append(data)
    with pytest.raises(ValueError, match=r"to_device\(\): data\['x'\]\[1\] is a dict that contains itself"):
        flatten(data, verb="to_device")
    assert len(list(tensors_of(data))) == 1


leaves = st.one_of(
    st.floats(-5, 5).map(torch.tensor),
    st.integers(),
    st.none(),
    st.text(max_size=3),
    st.just(torch.Size([1])),
)
nestings = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=4).map(OrderedDict),
        st.dictionaries(st.text(max_size=2), inner, max_size=4).map(lambda d: defaultdict(int, d)),
        st.builds(Pair, inner, inner),
        inner.map(lambda x: Frozen(x=x)),
        inner.map(lambda x: Batch([x], x)),
    ),
    max_leaves=25,
)


def same_shape(a: Any, b: Any, moved: dict[int, torch.Tensor]) -> bool:
    if isinstance(a, torch.Tensor):
        return b is moved[id(a)]
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_shape(a[k], b[k], moved) for k in a)
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(same_shape(x, y, moved) for x, y in zip(a, b, strict=True))
    if isinstance(a, Frozen):
        return a.name == b.name and same_shape(a.x, b.x, moved)
    return a is b


@hypothesis.given(nestings, st.integers(1, 5))
@hypothesis.settings(deadline=None)
def test_any_nesting_comes_back_with_each_leaf_in_its_place(data, pieces):
    tree = flatten(data, verb="to_device")
    moved = {id(x): x + 1 for x in tree.tensors}
    assert same_shape(data, tree.rebuild(list(moved.values()), []), moved)
    begun, more = flatten_some(data, verb="to_device", parts=pieces)
    while more is not None and not more(pieces):
        pass
    assert [id(x) for x in begun.tensors] == [id(x) for x in tree.tensors]
    assert same_shape(data, begun.rebuild(list(moved.values()), []), moved)
    assert {id(x) for x in tensors_of(data)} == set(moved)


# -- Movers and strangers ----------------------------------------------------------------------------------


class Mover:
    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, device: Any) -> Mover:
        return Mover(self.x + 100)


class MovingDict(dict):  # type: ignore[type-arg]
    def to(self, device: Any) -> str:
        return "moved itself"


def test_an_object_with_its_own_to_is_left_to_it_before_containers():
    assert rebuilt([MovingDict(x=one()), Mover(1)])[0] == "moved itself"
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    tree = flatten({"p": packed}, verb="to_device")
    assert tree.movers == [packed]
    assert not tree.tensors


def test_a_module_is_a_mover_once():
    module = nn.Linear(2, 2)
    tree = flatten([module, module], verb="to_device")
    assert tree.movers == [module]
    assert tree.rebuild([], ["m"]) == ["m", "m"]


def test_a_class_or_an_object_that_answers_to_any_name_is_no_mover():
    data = [torch.Tensor, Mover, mock.MagicMock()]
    assert flatten(data, verb="to_device").movers == []


def stranger_with(**attributes: Any) -> Any:
    return type("Stranger", (), {"__init__": lambda self: self.__dict__.update(attributes)})()


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize(
    "make",
    [
        lambda: types.MappingProxyType({"x": one()}),
        lambda: {"x": one()}.values(),
        lambda: ChainMap({"x": one()}),
        lambda: stranger_with(x=one()),
        lambda: stranger_with(x=np.ones(1)),
        lambda: stranger_with(items=[one(), one()]),
        lambda: stranger_with(items={"x": one()}),
        lambda: type("Slots", (Slotted,), {})(one()),
    ],
)
def test_a_stranger_that_holds_tensors_passes_by_identity_with_one_warning_per_type(make):
    data = make()
    strangers._warned.discard(type(data))
    message = (
        rf"to_host\(\): data\[0\] is a .*\.{type(data).__name__} and holds tensors.*aiogpu\.register.*dict"
    )
    with pytest.warns(UserWarning, match=message) as seen:
        assert flatten([data], verb="to_host").rebuild([], [])[0] is data
    assert [warning.filename for warning in seen] == [__file__]
    flatten([data], verb="to_host")  # silent: warnings are errors


@pytest.mark.parametrize("make", [lambda: (x for x in [one()]), lambda: map(abs, [one()])])
def test_an_iterator_is_not_consumed_but_said_to_be_unused(make):
    data = make()
    strangers._warned.discard(type(data))
    with pytest.warns(
        UserWarning, match=r"data is a .* handed through unused; pass a list of what it yields"
    ):
        assert flatten(data, verb="to_device").rebuild([], []) is data
    assert next(data) == 1


def test_many_strangers_of_one_type_are_not_all_looked_into():
    """A list of 100 000 annotations must not hold up the event loop."""
    looked = []

    class Annotation:
        __slots__ = ("text",)

        def __init__(self) -> None:
            self.text = "cat"

    data = [Annotation() for _ in range(1000)]
    with mock.patch.object(strangers, "attributes", lambda x: looked.append(x) or []):
        flatten(data, verb="to_device")
    assert len(looked) < 20


def test_where_warnings_are_errors_a_stranger_is_refused_every_time():
    data = stranger_with(x=one())
    for _ in range(2):
        with pytest.raises(UserWarning, match="holds tensors"):
            flatten(data, verb="to_device")


@pytest.mark.parametrize(
    "data",
    [
        object(),
        {1, 2},
        deque("ab"),
        stranger_with(x=1),
        threading.Lock(),
        iter([1]),
        never,
        types,
        Slotted(1),
    ],
)
def test_a_stranger_without_tensors_passes_silently(data):
    assert rebuilt([one(), data])[1] is data


# -- Refusals ----------------------------------------------------------------------------------------------


def quietly(make: Any) -> Any:
    """torch warns, once per process, when prototype layouts are made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def sparse(layout: torch.layout) -> torch.Tensor:
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return quietly(lambda: torch.eye(4).to_sparse(layout=layout, **blocks))


COMPRESSED = [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]


def nested(layout: torch.layout) -> torch.Tensor:
    return quietly(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout))


@pytest.mark.parametrize("layout", [torch.sparse_coo, *COMPRESSED])
def test_a_sparse_tensor_is_one_leaf(layout):
    x = sparse(layout)
    assert flatten([x], verb="to_device").tensors == [x]
    with pytest.raises(TypeError, match=rf"copy_\(\): data\[0\] is a {layout} tensor, which copy_ does not"):
        flatten([x], verb="copy_")
    with pytest.raises(TypeError, match=rf"item\(\): .*{layout}.*to_host.*to_dense\(\)\.item"):
        flatten(x, verb="item")


def test_a_meta_tensor_is_refused():
    with pytest.raises(ValueError, match=r"data is a meta tensor, which holds no data.*empty_like"):
        flatten(torch.ones(2, device="meta"), verb="to_device")


def test_a_parameter_without_data_yet_is_refused():
    with pytest.raises(ValueError, match=r"UninitializedParameter.*first forward"):
        flatten(nn.UninitializedParameter(), verb="to_device")


def test_a_tensor_inside_an_autograd_graph_is_refused_for_to_device_with_two_ways_out():
    x = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(ValueError, match="requires grad and is not a leaf") as caught:
        flatten(Frozen(x=x), verb="to_device")
    assert "data.x requires grad" in str(caught.value)
    assert "`x.detach()`" in str(caught.value)
    assert "`await aiogpu.run_sync(x.to, device)`" in str(caught.value)
    for verb in ("to_host", "copy_"):
        assert flatten([x], verb=verb).tensors[0] is x


def test_the_place_in_deep_data_is_named_by_its_end():
    data: Any = [torch.ones(1, device="meta")]
    for _ in range(100):
        data = {"k": data}
    with pytest.raises(ValueError, match=r"data\.\.\.(\['k'\]){7}\[0\] is a meta"):
        flatten(data, verb="to_device")


def test_a_subclass_or_mode_has_no_say_in_the_walk():
    class Touchy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("ran the user's code")

    x, first = torch.ones(2).as_subclass(Touchy), one()
    with torch.device("meta"):
        assert flatten([x], verb="to_device").tensors[0] is x
        assert next(tensors_of([x])) is x
        exploded = explode(x)
        tree, more = flatten_some([first, [x], x], verb="to_device", parts=1)
        assert more is not None
        while not more(1):
            pass
        assert tree.tensors[1] is x
    assert exploded is not None
    assert type(exploded.rewrap(exploded.plain)) is Touchy


# -- numpy -------------------------------------------------------------------------------------------------


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def assert_shares(array: np.ndarray) -> torch.Tensor:
    x = as_tensor(array)
    assert x.data_ptr() == address(array)
    assert x.shape == array.shape
    assert x.tolist() == array.tolist()
    return x


def assert_copies(array: np.ndarray) -> torch.Tensor:
    assert flatten(array, verb="to_device").arrays[0] is array  # not converted on the loop
    x = as_tensor(array)
    assert not array.size or x.data_ptr() != address(array)
    assert x.shape == array.shape
    assert x.tolist() == array.tolist()
    return x


def test_arrays_come_back_as_tensors_each_once_and_after_the_tensors():
    a = np.arange(3.0)
    tree: Tree[Any] = flatten([a, one(), {"again": a}], verb="to_device")
    assert len(tree.arrays) == 1
    assert tree.arrays[0] is a
    assert tree.rebuild(["tensor", "array"], []) == ["array", "tensor", {"again": "array"}]


@pytest.mark.parametrize("code", "?bBhHiIlLqQefdFD")
def test_every_dtype_that_torch_has_shares_memory(code):
    array = np.arange(4).astype(code)
    assert flatten(array, verb="to_device").arrays
    x = assert_shares(array)
    assert str(x.dtype) == f"torch.{array.dtype.name.replace('longlong', 'int64')}"


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (0, 5), (3, 4)])
def test_every_shape_shares_memory(shape):
    array = np.ones(shape, np.float32)
    x = as_tensor(array)
    assert x.shape == shape
    assert x.tolist() == array.tolist()
    assert not array.size or x.data_ptr() == address(array)
    backwards = array[tuple(slice(None, None, -1) for _ in shape)]
    assert as_tensor(backwards).shape == shape


def test_strided_arrays_share_memory():
    array = np.arange(24.0).reshape(4, 6)
    assert_shares(array.T)
    assert_shares(array[::2, 1::3])
    assert_shares(array[0])


def test_read_only_arrays_share_memory_without_a_warning(tmp_path):
    array = np.arange(3.0)
    array.flags.writeable = False
    assert_shares(array)
    assert not array.flags.writeable
    np.save(tmp_path / "a.npy", np.arange(5))
    assert_shares(np.load(tmp_path / "a.npy", mmap_mode="r"))
    assert_shares(np.frombuffer(b"1234", np.uint8))
    assert_shares(np.array(7.0)[...])


def test_broadcast_arrays_share_memory_without_a_warning_and_stay_broadcast():
    assert assert_shares(np.broadcast_to(np.arange(3.0), (1000, 3))).stride() == (0, 1)
    first, _second = np.broadcast_arrays(np.ones(3), np.ones((2, 3)))
    assert_shares(first)


def test_a_tensor_keeps_the_memory_of_its_read_only_array_alive():
    class Owner(np.ndarray):
        pass

    array = np.arange(1000.0).view(Owner)
    array.flags.writeable = False
    alive = weakref.ref(array)
    x = as_tensor(array)
    del array
    assert alive() is not None
    assert x[-1] == 999
    del x
    assert alive() is None


def test_negative_strides_foreign_byte_order_and_crooked_items_are_copied_exactly():
    array = np.arange(24.0).reshape(4, 6)
    assert_copies(array[::-1])
    assert_copies(array[:, ::-2])
    assert_copies(array.astype(">f8"))
    assert_copies(array.astype(">c16").T)
    records = np.zeros(4, np.dtype([("a", "i1"), ("b", "<f4")]))
    records["b"] = [1, 2, 3, 4]
    assert_copies(records["b"])
    assert_copies(np.frombuffer(bytes(9), np.float32, offset=1))
    assert_copies(np.array(1.0, ">f4"))


def test_a_copy_of_a_broadcast_array_is_as_small_as_its_elements():
    array = np.broadcast_to(np.arange(3.0, dtype=">f8"), (1 << 40, 3))
    x = as_tensor(array)
    assert x.shape == array.shape
    assert x[-1].tolist() == [0, 1, 2]
    assert x.untyped_storage().nbytes() == 24


def test_array_subclasses_become_tensors():
    assert assert_shares(np.arange(4).reshape(2, 2).view(type("Sub", (np.ndarray,), {}))).shape == (2, 2)


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([None]), "object"),
        (np.array(["a"]), "<U1"),
        (np.array([b"a"]), r"\|S1"),
        (np.zeros(1, [("a", "i4")]), "a"),
        (np.array(["2020-01-01"], "M8[D]"), r"datetime64\[D\]"),
        (np.array([1], "m8[s]"), r"timedelta64\[s\]"),
        (np.zeros(1, np.longdouble), "float128|longdouble"),
    ],
)
def test_an_array_that_torch_has_no_dtype_for_is_refused_with_its_dtype_and_place(array, dtype):
    with pytest.raises(
        TypeError, match=rf"to_device\(\): data\['x'\] is a numpy array of dtype .*({dtype}).*tolist"
    ):
        flatten({"x": array}, verb="to_device")


def test_a_masked_array_is_refused_rather_than_stripped_of_its_mask():
    with pytest.raises(TypeError, match=r"MaskedArray.*filled"):
        flatten(np.ma.masked_array([1, 2], [True, False]), verb="to_device")


def test_without_numpy_everything_else_works():
    code = """if True:
        import sys, warnings
        sys.modules["numpy"] = None
        warnings.simplefilter("ignore")  # torch's own, about numpy
        import torch
        warnings.simplefilter("error")
        from aiogpu.transfers.tree import explode, flatten, tensors_of
        x = torch.ones(2, requires_grad=True)
        tree = flatten({"x": [x, 1, object()]}, verb="to_device")
        assert tree.tensors[0] is x and not tree.arrays
        assert tree.rebuild([5], [])["x"][:2] == [5, 1]
        assert next(tensors_of([x])) is x and explode(x)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)


# -- Everything that data reaches --------------------------------------------------------------------------


def reached(data: Any) -> list[int]:
    return [x.data_ptr() for x in tensors_of(data)]


@pytest.mark.parametrize(
    "data", [None, 1, "text", 2.5, [], {}, (), object(), np.ones(2), types, never, torch.Tensor]
)
def test_what_holds_no_tensors_reaches_none(data):
    assert list(tensors_of(data)) == []
    assert list(tensors_of([data])) == []


def test_every_container_is_walked_and_each_tensor_comes_once():
    a, b, c, d, e = (torch.full((1,), float(n)) for n in range(5))
    data = {"a": a, "b": [b, a], "c": Frozen(x=c), "d": Batch([a], d), "e": {e}, "f": deque([a, b])}
    assert [x.item() for x in tensors_of(data)] == [0, 1, 2, 3, 4]


def test_a_module_reaches_parameters_buffers_and_gradients():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Embedding(3, 2, sparse=True))
    module[0](torch.ones(1, 2)).sum().backward()
    module[2](torch.tensor([1])).sum().backward()
    expected = {x.data_ptr() for x in [*module.parameters(), *module.buffers()]}
    expected |= {p.grad.data_ptr() for p in module[0].parameters() if p.grad is not None}
    expected.add(module[2].weight.grad._values().data_ptr())
    assert expected <= set(reached([module]))
    assert all(x.layout is torch.strided for x in tensors_of(module))


def test_a_scripted_module_reaches_its_parameters():
    module = quietly(lambda: torch.jit.script(nn.Linear(2, 2)))
    assert set(reached(module)) == {p.data_ptr() for p in module.parameters()}


def test_the_gradient_of_a_leaf_and_a_retained_one_are_reached():
    leaf = torch.ones(2, requires_grad=True)
    middle = leaf * 2
    middle.retain_grad()
    end = (middle * 3).sum()
    end.backward()
    assert reached(leaf) == [leaf.data_ptr(), leaf.grad.data_ptr()]
    assert reached(middle) == [middle.data_ptr(), middle.grad.data_ptr()]
    assert reached([end]) == [end.data_ptr()]


def test_objects_with_a_to_are_opened_and_those_without_are_not():
    class Store(Mover):
        pass

    x, y = one(1), one(2)
    assert reached(Mover(Store({"x": [x]}))) == [x.data_ptr()]
    assert reached([Slotted(y)]) == []
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert reached(packed) == [packed.data.data_ptr(), packed.batch_sizes.data_ptr()]


@pytest.mark.parametrize("layout", COMPRESSED)
def test_compressed_sparse_tensors_reach_their_components(layout):
    x = sparse(layout)
    plain = (
        (x.crow_indices(), x.col_indices())
        if layout in (torch.sparse_csr, torch.sparse_bsr)
        else (x.ccol_indices(), x.row_indices())
    )
    assert reached(x) == [part.data_ptr() for part in (*plain, x.values())]


def test_coo_and_nested_tensors_reach_their_components():
    x = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True).requires_grad_()
    assert reached(x) == [x._indices().data_ptr(), x._values().data_ptr()]
    assert not any(part.requires_grad for part in tensors_of(x))
    jagged = nested(torch.jagged)
    assert jagged.values().data_ptr() in reached(jagged)
    assert jagged.offsets().data_ptr() in reached(jagged)
    strided = nested(torch.strided)
    assert reached([strided]) == [strided.data_ptr()]


def test_tensors_of_never_raises():
    class Broken(torch.Tensor):
        def __tensor_flatten__(self) -> Any:
            raise RuntimeError

    dead = weakref.proxy(Mover(1))
    x = one()
    assert reached([torch.ones(1).as_subclass(Broken), dead, mock.MagicMock(), iter([]), x]) == [x.data_ptr()]


def test_strangers_to_pickle_are_walked():
    class Unpicklable(Mover):
        def __getstate__(self) -> Any:
            never()

        def __reduce_ex__(self, protocol: Any) -> Any:
            never()

    x = one()
    assert reached(Unpicklable(x)) == [x.data_ptr()]


# -- Subclasses --------------------------------------------------------------------------------------------


class Scaled(torch.Tensor):
    """A wrapper as torch.compile asks for: two inner tensors, no memory of its own."""

    data_: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, unit: str) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, unit: str) -> None:
        self.data_, self.scale, self.unit = data, scale, unit

    def __tensor_flatten__(self) -> Any:
        return ["data_", "scale"], self.unit

    @staticmethod
    def __tensor_unflatten__(inner: Any, unit: Any, size: Any, stride: Any) -> Scaled:
        assert inner["data_"].shape == size
        assert inner["data_"].stride() == stride
        return Scaled(inner["data_"], inner["scale"], unit)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].data_, args[0].scale, args[0].unit)
        raise NotImplementedError(func)


class Opaque(torch.Tensor):
    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype)

    def __init__(self, elem: torch.Tensor) -> None:
        self.elem = elem

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Boxes(torch.Tensor):
    """As torchvision's: memory of its own, and attributes."""

    format: str


class Weight(nn.Parameter):
    pass


def through(x: torch.Tensor) -> Any:
    """`x` exploded, its plain parts moved (plus 100), and made whole again."""
    exploded = explode(x)
    assert exploded is not None
    assert all(type(part) is torch.Tensor and not part.requires_grad for part in exploded.plain)
    return exploded.rewrap([part + 100 for part in exploded.plain])


def test_a_plain_tensor_explodes_into_itself():
    x = torch.ones(2)
    exploded = explode(x)
    assert exploded is not None
    assert exploded.plain[0] is x
    y = torch.zeros(2)
    assert exploded.rewrap([y]) is y


def test_a_leaf_that_requires_grad_gives_a_leaf_that_requires_grad():
    x = torch.ones(2, requires_grad=True)
    moved = through(x)
    assert moved.requires_grad
    assert moved.is_leaf
    assert type(moved) is torch.Tensor
    (moved * 2).sum().backward()
    assert x.grad is None


def test_a_non_leaf_comes_back_detached():
    assert not through(torch.ones(2, requires_grad=True) * 2).requires_grad


def test_a_leaf_converted_to_integers_requires_no_grad_any_more():
    exploded = explode(torch.ones(2, requires_grad=True))
    assert exploded is not None
    assert not exploded.rewrap([exploded.plain[0].int()]).requires_grad


@pytest.mark.parametrize("cls", [nn.Parameter, Weight])
@pytest.mark.parametrize("grad", [True, False])
def test_a_parameter_stays_a_parameter_with_its_attributes(cls, grad):
    x = cls(torch.ones(2)).requires_grad_(grad)
    x.tag = "decoder"
    moved = through(x)
    assert type(moved) is type(x)
    assert isinstance(moved, cls)
    assert moved.tag == "decoder"
    assert moved.requires_grad is grad
    assert moved.is_leaf
    assert not moved._is_view()
    assert moved.tolist() == [101, 101]


def test_a_plain_subclass_comes_back_with_its_class_and_attributes():
    x = torch.ones(2, 4).t().as_subclass(Boxes)
    x.format = "XYXY"
    moved = through(x)
    assert type(moved) is Boxes
    assert moved.format == "XYXY"
    assert moved.stride() == x.stride()


def test_a_wrapper_subclass_is_moved_by_its_inner_tensors():
    x = Scaled(torch.ones(2, 3).t(), one(4), "m")
    assert flatten([x], verb="to_device").tensors[0] is x
    moved = through(x)
    assert type(moved) is Scaled
    assert moved.unit == "m"
    assert moved.data_.tolist() == [[101, 101]] * 3
    assert moved.scale == 104
    assert moved.stride() == x.stride()
    assert reached([x]) == [x.data_.data_ptr(), x.scale.data_ptr()]


def test_a_wrapper_in_a_wrapper_is_exploded_to_the_bottom():
    x = Scaled(Scaled(torch.ones(2), one(2), "inner"), one(3), "outer")
    moved = through(x)
    assert type(moved.data_) is Scaled
    assert (moved.data_.unit, moved.data_.scale, moved.scale) == ("inner", 102, 103)
    assert reached(x) == [x.data_.data_.data_ptr(), x.data_.scale.data_ptr(), x.scale.data_ptr()]


def test_a_wrapper_that_is_a_parameter_stays_one():
    x = nn.Parameter(Scaled(torch.ones(2), one(2), "m"))
    moved = through(x)
    assert type(moved) is Scaled
    assert isinstance(moved, nn.Parameter)
    assert moved.requires_grad
    assert moved.is_leaf


def test_only_its_own_to_can_move_a_subclass_that_hides_its_data():
    x = Opaque(one())
    assert explode(x) is None
    assert explode(Scaled(x, one(), "m")) is None
    assert flatten([x], verb="to_device").tensors[0] is x
    assert reached(x) == [x.elem.data_ptr()]


def test_a_tree_without_movers_and_arrays_maps_as_torchs_own_pytree_does():
    data = {"a": [one(1), (one(2), None)], "b": OrderedDict(c=one(3))}
    assert rebuilt(data) == tree_map(lambda x: x + 100 if isinstance(x, torch.Tensor) else x, data)
