"""For each predicate: a hit while nothing changes, a miss and a sentence when it does; both checks agree."""

from __future__ import annotations

import collections
import enum
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import InputError, UserLocation
from dovetail.guards import (
    ArgumentSource,
    AttributeSource,
    CalleeSource,
    CellSource,
    ComputedSource,
    DictKeys,
    Equals,
    GradSource,
    GuardSet,
    HasNoKey,
    Identity,
    InstanceDictSource,
    ItemSource,
    KeywordSource,
    Leafness,
    Length,
    NoHooks,
    Pinned,
    PinnedSource,
    SameObject,
    SetEquals,
    TypeIs,
    Unbound,
    compile_checker,
)

X = ArgumentSource(0, "L['x']")
HERE = UserLocation("model.py", 31, "forward", "x.view(8, -1)")


def checker_of(*pairs, tensors=(), positional=1):
    guards = GuardSet()
    for source, predicate in pairs:
        guards.add(source, predicate, HERE, "test")
    for source, tensor in tensors:
        guards.add_tensor(source, tensor, HERE)
    guards.set_call_shape(positional, ())
    return compile_checker(guards)


def agree(checker, *args, callee=None, **kwargs):
    """Run both checks, see that they agree, and give the sentences of the slow one."""
    hit = checker.check(callee, args, kwargs)
    failures = checker.explain(callee, args, kwargs)
    assert (hit is None) == bool(failures), (hit, failures, checker.source_code)
    return [str(failure) for failure in failures]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    def __eq__(self, other):
        raise AssertionError("user code was run")

    __hash__ = str.__hash__


class Evil:
    def __eq__(self, other):
        raise AssertionError("user code was run")

    def __hash__(self):
        return 0

    def __getattr__(self, name):
        raise AssertionError("user code was run")

    def __len__(self):
        raise AssertionError("user code was run")

    def __bool__(self):
        raise AssertionError("user code was run")

    def __repr__(self):
        raise AssertionError("user code was run")


CONSTANTS = [
    0, 1, 2, True, False, None, 0.0, -0.0, 1.0, math.nan, math.inf, 1j, complex(0.0, -0.0), complex(math.nan, 1),
    "", "a", b"a", Colour.RED, Colour.BLUE, Level.LOW, torch.float32, torch.float64, torch.device("cpu"),
    torch.device("cpu", 0), torch.strided, torch.contiguous_format, torch.Size([1, 2]), (1, 2), (1, 2.0), (True,
    2), (), slice(1), slice(None, 1.0), slice(True), range(3), range(0, 4, 2), range(0, 3, 2), frozenset({1}),
    frozenset({True}), frozenset(), ((1,), "a"), (0.0,), (-0.0,), ..., NotImplemented, tuple(range(20)), 10**30,
    Evil(), Text("a"), [1], torch.ones(2),
]  # fmt: skip


@pytest.mark.parametrize("position", range(len(CONSTANTS) - 4))
def test_equals_hits_itself_alone(position):
    expected = CONSTANTS[position]
    checker = checker_of((X, Equals(expected)))
    for other_position, other in enumerate(CONSTANTS):
        assert (not agree(checker, other)) == (position == other_position), (expected, other)


def test_equals_refuses_what_is_no_constant():
    for value in CONSTANTS[-4:]:
        with pytest.raises(TypeError):
            Equals(value)


leaves = st.one_of(
    st.integers(-2, 2),
    st.booleans(),
    st.none(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=2),
    st.binary(max_size=1),
)
constants = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.frozensets(leaves, max_size=3), st.builds(slice, inner, inner, inner)
    ),
    max_leaves=5,
)


def reference_same(one, other):
    if type(one) is not type(other):
        return False
    if type(one) is float:
        return (one != one and other != other) or (one == other and math.copysign(1, one) == math.copysign(1, other))
    if type(one) is complex:
        return reference_same(one.real, other.real) and reference_same(one.imag, other.imag)
    if type(one) is tuple:
        return len(one) == len(other) and all(map(reference_same, one, other))
    if type(one) is slice:
        return all(reference_same(getattr(one, n), getattr(other, n)) for n in ("start", "stop", "step"))
    if type(one) is frozenset:
        # In the same order, which a program that goes through them sees.
        return len(one) == len(other) and all(map(reference_same, one, other))
    return one == other


@settings(max_examples=100, deadline=None)
@given(constants, constants)
def test_equals_is_type_and_value(one, other):
    checker = checker_of((X, Equals(one)))
    assert checker.check(None, (one,), {}) is not None
    assert (checker.check(None, (other,), {}) is not None) == reference_same(one, other)
    assert Equals(one).holds(other) == reference_same(one, other)


def test_equals_sentences():
    assert agree(checker_of((X, Equals(8))), 16) == ["`x` was 8, is 16; needed at model.py:31 `x.view(8, -1)`"]
    assert agree(checker_of((X, Equals(1))), True)[0].startswith("`x` was 1, is True")
    assert agree(checker_of((X, Equals(Colour.RED))), Colour.BLUE)[0].startswith("`x` was Colour.RED, is Colour.BLUE")


def test_contradicting_constants():
    guards = GuardSet()
    guards.add(X, Equals(1), None, "")
    guards.add(X, Equals(1), None, "")
    assert len(guards) == 1
    with pytest.raises(ValueError, match="both 1 and True"):
        guards.add(X, Equals(True), None, "")


def test_type_and_identity():
    class Mine:
        pass

    class Child(Mine):
        pass

    value = Mine()
    assert agree(checker_of((X, TypeIs(Mine))), value) == []
    assert "Mine, is " in agree(checker_of((X, TypeIs(Mine))), Child())[0]
    checker = checker_of((X, Identity(value)))
    assert agree(checker, value) == []
    assert agree(checker, Mine()) and agree(checker, None)
    del value  # the guard must not keep it alive, and None must not pass for it
    assert agree(checker, None) and agree(checker, Mine())
    assert agree(checker_of((X, Identity(len))), len) == []
    assert agree(checker_of((X, Identity(len))), max)[0].startswith("`x` was the function len, is the function max")
    assert Identity(len) == Identity(len) and Identity(len) != Identity(max)


@pytest.mark.parametrize(
    "container", [[1, 2], (1, 2), {1: 2, 3: 4}, {1, 2}, frozenset({1, 2}), "ab", collections.deque([1, 2])]
)
@pytest.mark.parametrize("typed", [True, False])
def test_length(container, typed):
    pairs = [(X, Length(2))] + ([(X, TypeIs(type(container)))] if typed else [])
    checker = checker_of(*pairs)
    assert agree(checker, container) == []
    assert agree(checker, type(container)())
    assert agree(checker, Evil())


def test_length_runs_no_user_code():
    class List(list):
        def __len__(self):
            raise AssertionError("user code was run")

    checker = checker_of((X, TypeIs(List)), (X, Length(2)))
    assert agree(checker, List([1, 2])) == [] and agree(checker, List([1]))


@pytest.mark.parametrize("typed", [True, False])
def test_dict_keys(typed):
    marker = object()
    start = {"a": 1, 2: 3, marker: 4}
    checker = checker_of((X, DictKeys(tuple(start))), *([(X, TypeIs(dict))] if typed else []))
    assert agree(checker, dict(start)) == []
    assert "gone: 'a'" in agree(checker, {2: 3, marker: 4})[0]
    assert "another order" in agree(checker, {2: 3, "a": 1, marker: 4})[0]
    assert agree(checker, {"a": 1, 2.0: 3, marker: 4}) and agree(checker, {"a": 1, 2: 3, object(): 4})
    assert agree(checker, {**start, "new": 0})
    assert agree(checker, {"a": 1, 2: 3, Evil(): 4})
    assert agree(checker, [1])
    ordered = collections.OrderedDict(a=1, b=2)
    moved = checker_of((X, DictKeys(("a", "b"))))
    assert agree(moved, ordered) == []
    ordered.move_to_end("a")
    assert agree(moved, ordered)
    empty = checker_of((X, TypeIs(dict)), (X, DictKeys(())))
    assert agree(empty, {}) == [] and agree(empty, {1: 1})


@pytest.mark.parametrize("kind", [dict, None])
def test_has_no_key(kind):
    checker = checker_of((X, HasNoKey("k")), *([(X, TypeIs(kind))] if kind else []))
    assert agree(checker, {"a": 1}) == []
    assert agree(checker, {"k": 1})[0].startswith("`x` had no key 'k', and has one now")
    assert agree(checker, 3)


def test_has_no_key_runs_no_user_code():
    class Dict(dict):
        def __contains__(self, key):
            raise AssertionError("user code was run")

    checker = checker_of((X, TypeIs(Dict)), (X, HasNoKey("k")))
    assert agree(checker, Dict()) == [] and agree(checker, Dict(k=1))


def test_set_equals():
    marker = object()
    for kind in (set, frozenset):
        items = kind({marker, "a", 1})
        checker = checker_of((X, SetEquals(items)), (X, TypeIs(kind)))
        assert agree(checker, items) == [] and agree(checker, items.copy()) == []
        assert agree(checker, kind({True, "a", marker})) and agree(checker, kind({1, "a"}))
        assert agree(checker, kind({1, "a", object()})) and agree(checker, kind({1, "a", marker, 2}))


@pytest.mark.parametrize("table", ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"])
@pytest.mark.parametrize("typed", [True, False])
def test_no_hooks(table, typed):
    module = torch.nn.Linear(2, 2)
    checker = checker_of((InstanceDictSource(X), NoHooks()), *([(X, TypeIs(torch.nn.Linear))] if typed else []))
    assert agree(checker, module) == []
    module.__dict__[table][0] = print
    assert agree(checker, module)[0].startswith(f"`x` had no hooks, and has {table.strip('_')} now")
    assert agree(checker, 3)


def test_cells():
    value = 3

    def function():
        return value  # noqa: F821

    checker = checker_of((CellSource(CalleeSource(), 0), Equals(3)), positional=0)
    assert agree(checker, callee=function) == []
    value = 4
    assert "was 3, is 4" in agree(checker, callee=function)[0]
    unbound = checker_of((CellSource(CalleeSource(), 0).cell, Unbound()), positional=0)
    assert "was unbound" in agree(unbound, callee=function)[0]
    del value
    assert agree(unbound, callee=function) == []
    assert "cannot be read" in agree(checker, callee=function)[0]


def test_cell_object():
    checker = checker_of((ItemSource(AttributeSource(CalleeSource(), "__closure__"), 0), Unbound()), positional=0)

    def outer(bind):
        if bind:
            value = 1
        return lambda: value

    assert agree(checker, callee=outer(False)) == [] and agree(checker, callee=outer(True))


def test_paths():
    class Node:
        def __init__(self):
            self.items = [1, {"k": 2.5}]
            self.w = 7

    node = Node()
    own = InstanceDictSource(X)
    deep = ItemSource(ItemSource(ItemSource(own, "items"), 1), "k")
    assert deep.name == "L['x'].items[1]['k']"
    for extra in ([], [(X, TypeIs(Node))]):
        checker = checker_of((deep, Equals(2.5)), (ItemSource(own, "w"), Equals(7)), *extra)
        assert agree(checker, node) == []
        node.w = 8
        assert agree(checker, node) == ["`x.w` was 7, is 8; needed at model.py:31 `x.view(8, -1)`"]
        node.w = 7
        node.items[1]["k"] = 2
        assert agree(checker, node)
        node.items[1]["k"] = 2.5
        node.items.append(3)
        assert agree(checker, node) == []
        node.items.pop()
        saved, node.items = node.items, []
        assert "IndexError" in agree(checker, node)[0]
        node.items = saved
    assert agree(checker_of((deep, Equals(2.5))), 3)


def test_subclasses_of_containers_are_read_plainly():
    class Dict(dict):
        def __getitem__(self, key):
            raise AssertionError("user code was run")

    class List(list):
        def __getitem__(self, key):
            raise AssertionError("user code was run")

    for value, key in ((Dict(k=1), "k"), (List([1]), 0)):
        for extra in ([], [(X, TypeIs(type(value)))]):
            checker = checker_of((ItemSource(X, key), Equals(1)), *extra)
            assert agree(checker, value) == []


def test_keys_by_identity():
    parameter = torch.nn.Parameter(torch.ones(2))
    source = ItemSource(X, parameter)
    assert source == ItemSource(X, parameter) and source != ItemSource(X, torch.nn.Parameter(torch.ones(2)))
    checker = checker_of((source, Equals(1)), (X, TypeIs(dict)))
    assert agree(checker, {parameter: 1}) == [] and agree(checker, {torch.nn.Parameter(torch.ones(2)): 1})


def test_attributes():
    def function(a, b=2, *, c=3):
        return a

    pinned = PinnedSource(Pinned(function, "function"))
    checker = checker_of(
        (AttributeSource(pinned, "__code__"), Identity(function.__code__)),
        (ItemSource(AttributeSource(pinned, "__defaults__"), 0), Equals(2)),
        (ItemSource(AttributeSource(pinned, "__kwdefaults__"), "c"), Equals(3)),
        positional=0,
    )
    assert agree(checker) == []
    function.__kwdefaults__["c"] = 4
    assert agree(checker)
    function.__kwdefaults__ = None
    assert agree(checker)
    function.__kwdefaults__ = {"c": 3}
    assert agree(checker) == []
    function.__defaults__ = (5,)
    assert agree(checker)
    function.__defaults__ = (2,)
    function.__code__ = (lambda a, b, *, c: b).__code__
    assert agree(checker)


def test_class_and_slot_attributes():
    class Mine:
        scale = 2
        __slots__ = ("slot",)

        @property
        def computed(self):
            raise AssertionError("user code was run")

        @staticmethod
        def helper():
            return 1

    pinned = PinnedSource(Pinned(Mine, "Mine"))
    checker = checker_of(
        (AttributeSource(pinned, "scale"), Equals(2)),
        (AttributeSource(pinned, "helper"), Identity(Mine.helper)),
        (AttributeSource(X, "slot"), Equals(1)),
    )
    value = Mine()
    assert agree(checker, value)
    value.slot = 1
    assert agree(checker, value) == []
    Mine.scale = 3
    assert agree(checker, value)
    Mine.scale = property(lambda self: 2)
    assert agree(checker, value)
    assert agree(checker_of((AttributeSource(X, "computed"), Equals(2))), value)
    del Mine.scale
    assert agree(checker, value)


def test_module_attribute_and_globals():
    import types

    module = types.ModuleType("settings")
    module.limit = 3
    table = {"cfg": {"n": 1}}
    limit = AttributeSource(PinnedSource(Pinned(module, "settings")), "limit")
    number = ItemSource(ItemSource(PinnedSource(Pinned(table, "G")), "cfg"), "n")
    assert (limit.name, number.name) == ("settings.limit", "G['cfg']['n']")
    checker = checker_of((limit, Equals(3)), (number, Equals(1)), positional=0)
    assert agree(checker) == []
    module.limit = 4
    assert agree(checker)
    del module.limit
    module.__getattr__ = lambda name: 3
    assert agree(checker)
    module.limit = 3
    assert agree(checker) == []
    table["cfg"] = {"n": 2}
    assert agree(checker)


def test_module_names():
    root = CalleeSource()
    layer = ItemSource(ItemSource(InstanceDictSource(root), "_modules"), "0")
    weight = ItemSource(ItemSource(InstanceDictSource(layer), "_parameters"), "weight")
    assert weight.name == "self[0].weight"


def test_tensor_metadata():
    base = torch.randn(8, 5)
    checker = checker_of(tensors=[(X, base)])
    same = torch.randn(8, 5)
    assert checker.check(None, (same,), {})[0] is same
    assert agree(checker, torch.randn(16, 5)) == ["`x.shape[0]` was 8, is 16; needed at model.py:31 `x.view(8, -1)`"]
    assert "stride()" in agree(checker, torch.randn(5, 8).t())[0]
    assert "dtype` was torch.float32, is torch.float64" in agree(checker, base.double())[0]
    assert "requires_grad` was False, is True" in agree(checker, torch.randn(8, 5, requires_grad=True))[0]
    assert "device` was cpu, is meta" in agree(checker, base.to("meta"))[0]
    assert "was Tensor, is Parameter" in agree(checker, torch.nn.Parameter(base))[0]
    assert "dim()` was 2, is 1" in agree(checker, torch.randn(8))[0]
    assert "layout" in agree(checker, base.to_sparse())[0]
    assert agree(checker, torch._neg_view(base)) and agree(checker, 3) and agree(checker, None)
    with torch.inference_mode():
        inference = torch.randn(8, 5)
    assert agree(checker, inference)
    single = checker_of(tensors=[(X, torch.randn(1, 3))])
    assert agree(single, torch.randn(1, 3).as_strided((1, 3), (9, 1)))
    empty = checker_of(tensors=[(X, torch.randn(0, 3))])
    assert agree(empty, torch.randn(0, 3)) == [] and agree(empty, torch.randn(0, 4))
    assert agree(checker_of(tensors=[(X, torch.tensor(1.0))]), torch.tensor(2.0)) == []


def test_identity_of_tensors():
    y = ArgumentSource(1, "L['y']")
    one, other = torch.ones(2), torch.ones(2)
    checker = checker_of(tensors=[(X, one), (y, other)], positional=2)
    assert agree(checker, other, one) == []
    assert "were two tensors, and are one now" in agree(checker, one, one)[0]
    guards = GuardSet()
    assert guards.add_tensor(X, one) == 0 and guards.add_tensor(y, one) == 0 and guards.add_tensor(X, one) == 0
    assert guards.tensor_source(0) == X
    tied = compile_checker(guards)
    assert len(tied.check(None, (other, other), {})) == 1
    assert "were one object, and are two now" in agree(tied, one, other)[0]
    with pytest.raises(RuntimeError):
        guards.add_tensor(X, one)


def test_identity_across_arguments_and_globals():
    table = {"w": torch.ones(2)}
    weight = ItemSource(PinnedSource(Pinned(table, "G")), "w")
    checker = checker_of(tensors=[(X, torch.zeros(2)), (weight, table["w"])])
    assert agree(checker, torch.ones(2)) == []
    assert agree(checker, table["w"])


def test_same_object_of_containers():
    y = ArgumentSource(1, "L['y']")
    checker = checker_of((X, TypeIs(list)), (y, SameObject((X,))), positional=2)
    one: list = []
    assert agree(checker, one, one) == [] and agree(checker, one, [])


def test_leaf_and_gradient():
    leaf = torch.ones(2, requires_grad=True)
    other = leaf * 2
    guards = GuardSet()
    index = guards.add_tensor(X, leaf)
    guards.add(GradSource(guards.tensor_source(index)), Equals(None))
    checker = compile_checker(guards)
    assert agree(checker, leaf) == []
    leaf.grad = torch.ones(2)
    assert "`x.grad` was None" in agree(checker, leaf)[0]
    leaf.grad = None
    assert agree(checker_of(tensors=[(X, other)]), leaf) == [
        "`x.is_leaf` was False, is True; needed at model.py:31 `x.view(8, -1)`"
    ]
    assert agree(checker_of((X, Leafness(True)), tensors=[(X, leaf)]), other)
    checker = checker_of((GradSource(X), Identity(None)))
    assert agree(checker, other) == []


def test_separate_memory():
    base = torch.zeros(8)
    y = ArgumentSource(1, "L['y']")
    guards = GuardSet()
    guards.add_tensor(X, base[:4].clone())
    guards.add_tensor(y, torch.zeros(4))
    guards.add_separate_memory(0)
    checker = compile_checker(guards)
    assert agree(checker, torch.zeros(4), torch.zeros(4)) == []
    assert "share its memory" in agree(checker, base[:4], base[2:6])[0]


def test_storage_offset():
    guards = GuardSet()
    index = guards.add_tensor(X, torch.zeros(8)[4:])
    source = guards.tensor_source(index)
    guards.add(ComputedSource(torch.Tensor.storage_offset, (source,), "the offset"), Equals(4))
    checker = compile_checker(guards)
    assert agree(checker, torch.zeros(8)[4:]) == [] and agree(checker, torch.zeros(4))


def test_sparse_is_refused_by_name():
    with pytest.raises(InputError, match="layout"):
        GuardSet().add_tensor(X, torch.ones(2, 2).to_sparse())


def test_frozen_guards_keep_no_tensor_alive():
    import weakref

    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    guards = GuardSet()
    guards.add_tensor(X, tensor)
    checker = compile_checker(guards)
    del tensor
    assert gone() is None and agree(checker, torch.zeros(3)) == []


def test_metadata_changed_before_freezing():
    tensor = torch.zeros(2, 3)
    guards = GuardSet()
    guards.add_tensor(X, tensor)
    tensor.t_()
    checker = compile_checker(guards)
    assert agree(checker, torch.zeros(2, 3)) == [] and agree(checker, tensor)


def test_call_shape():
    guards = GuardSet()
    guards.add(X, Equals(1), None, "")
    guards.add(KeywordSource("b", "L['b']"), Equals(2), None, "")
    guards.add(KeywordSource("a", "L['a']"), Equals(3), None, "")
    guards.set_call_shape(1, ("b", "a"))
    checker = compile_checker(guards)
    assert agree(checker, 1, b=2, a=3) == []
    assert "names of the keyword arguments" in agree(checker, 1, a=3, b=2)[0]
    assert agree(checker, 1, b=2) and agree(checker, 1, 1, b=2, a=3) and agree(checker, b=2, a=3)
    assert agree(checker, 1, b=2, a=4) == ["`a` was 3, is 4"]


def test_weak_identity_in_a_path():
    module = torch.nn.Linear(2, 2)
    table = {"model": module}
    source = ItemSource(PinnedSource(Pinned(table, "G")), "model")
    checker = checker_of((source, Identity(module)), (InstanceDictSource(source), NoHooks()), positional=0)
    assert agree(checker) == []
    del module
    table["model"] = torch.nn.Linear(2, 2)
    assert agree(checker)


def test_identity_is_asked_before_the_length():
    value = [1, 2]
    checker = checker_of((X, Length(2)), (X, Identity(value)))

    class List(list):
        def __len__(self):
            raise AssertionError("user code was run")

    assert agree(checker, value) == [] and agree(checker, List([1, 2]))


def test_shared_prefixes_are_fetched_once():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    root = CalleeSource()
    tensors = []
    pairs = [(root, TypeIs(torch.nn.Sequential)), (InstanceDictSource(root), NoHooks())]
    for name, layer in model.named_children():
        source = ItemSource(ItemSource(InstanceDictSource(root), "_modules"), name)
        pairs += [(source, TypeIs(torch.nn.Linear)), (InstanceDictSource(source), NoHooks())]
        table = ItemSource(InstanceDictSource(source), "_parameters")
        tensors += [(ItemSource(table, key), layer._parameters[key]) for key in ("weight", "bias")]
    checker = checker_of(*pairs, tensors=tensors, positional=0)
    assert agree(checker, callee=model) == []
    assert checker.source_code.count("'_modules'") == 1 and checker.source_code.count("'_parameters'") == 2
    assert [id(tensor) for tensor in checker.check(model, (), {})] == [id(tensor) for tensor in model.parameters()]
    model[1].weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert agree(checker, callee=model) == []
    model[1].weight = model[0].weight
    assert agree(checker, callee=model)
    model[1] = torch.nn.ReLU()
    assert any("was Linear, is ReLU" in sentence for sentence in agree(checker, callee=model))
