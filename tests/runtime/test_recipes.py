"""Results are taken apart and built again: what is shared stays shared, what leads back to itself leads back to itself."""

from __future__ import annotations

import collections
import copy
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import dovetail
from dovetail.errors import UnbuildableError
from dovetail.guards import ArgumentSource
from dovetail.runtime.effects import EffectRecipe
from dovetail.runtime.recipe import ConstantItem, NumberItem, ObjectItem, Recipe, TensorItem
from dovetail.runtime.recipe_builder import RecipeBuilder
from dovetail.runtime.recipe_code import generate

TENSORS = [torch.ones(1), torch.zeros(2)]


class Pair(NamedTuple):
    left: Any
    right: Any


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self) -> Any:
        return self


class Slotted:
    __slots__ = ("a", "b")


class Names(collections.OrderedDict):
    pass


class Level(int):
    pass


def classify(value: Any) -> Recipe | None:
    if isinstance(value, torch.Tensor):
        return TensorItem(next(at for at, item in enumerate(TENSORS) if item is value))
    if value is None or type(value) in (int, float, str, bool, type, type(len)):
        return ConstantItem(value)
    return None


def again(value: Any) -> Any:
    return generate(RecipeBuilder(classify).build(value))([], TENSORS, None, (), {})


def cycle() -> Any:
    items: list[Any] = [1]
    items.append({"self": items})
    return items


def deep() -> Any:
    value: Any = ()
    for depth in range(150):
        value = [value, depth] if depth % 2 else {"inside": value}
    return value


def slotted() -> Any:
    made = Slotted()
    made.a = [TENSORS[1]]
    return made


def walked_into() -> Any:
    iterator = iter([1, 2, 3])
    next(iterator)
    return iterator


def error() -> Any:
    try:
        raise AttributeError("no such thing", name="thing")
    except AttributeError as raised:
        raised.note = [TENSORS[0]]
        return raised.with_traceback(None)


VALUES: dict[str, Callable[[], Any]] = {
    "tensors": lambda: (TENSORS[0], [TENSORS[1], TENSORS[0]]),
    "a named tuple": lambda: Pair(TENSORS[0], Pair(1, None)),
    "a dictionary": lambda: {"a": TENSORS[0], 2: [True]},
    "a set": lambda: {1, 2, "x"},
    "an ordered dictionary of a class": lambda: Names([("b", 1), ("a", 2)]),
    "a default dictionary": lambda: collections.defaultdict(list, {"a": [1]}),
    "a bounded queue": lambda: collections.deque([1, 2], maxlen=3),
    "a number of a class": lambda: Level(4),
    "a slice": lambda: slice(1, 2, None),
    "an object": lambda: Plain(weight=TENSORS[0], inner=Plain(x=1)),
    "slots": slotted,
    "an iterator": walked_into,
    "a counter": lambda: itertools.count(5),
    "a deep tree": deep,
    "an exception": error,
}


def shown(value: Any, depth: int = 0) -> Any:
    """A value as plain data that can be compared."""
    if isinstance(value, torch.Tensor):
        return next(at for at, item in enumerate(TENSORS) if item is value)
    if isinstance(value, (list, tuple, collections.deque)):
        own = getattr(value, "maxlen", None)
        return type(value), own, [shown(item) for item in value]
    if isinstance(value, dict):
        return type(value), [(key, shown(item)) for key, item in value.items()]
    if isinstance(value, BaseException):
        return type(value), value.args, value.name, shown(value.__dict__)  # type: ignore[attr-defined]
    if isinstance(value, (Plain, Slotted)):
        slots = [(name, shown(getattr(value, name))) for name in ("a",) if hasattr(value, name)]
        return type(value), shown(getattr(value, "__dict__", {})), slots
    if hasattr(value, "__next__"):
        return type(value), [item for item in itertools.islice(copy.copy(value), 3)]
    return type(value), value


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_built_again(name: str) -> None:
    if name == "a counter" and sys.version_info >= (3, 14):
        pytest.skip("iterators of itertools cannot be copied from Python 3.14 on")
    value = VALUES[name]()
    assert shown(again(value)) == shown(value)
    assert again(value) is not value


def test_shared_parts_stay_shared() -> None:
    part = [1]
    first, second, third = again((part, {"again": part}, Plain(part=part)))
    assert first is second["again"] is third.part and first is not part


def test_a_list_in_itself() -> None:
    made = again(cycle())
    assert made[1]["self"] is made


def test_an_object_in_its_own_container() -> None:
    value = Plain(parts=[])
    value.parts.append(value)
    made = again(value)
    assert made.parts[0] is made and made.method().method() is made


def test_functions_that_know_each_other() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    made_even, made_odd = again((even, odd))
    assert made_even(10) and made_odd(7) and not made_odd(4)
    assert made_even is not even and made_even.__closure__[0].cell_contents is made_odd


def test_a_method_and_its_owner_stay_together() -> None:
    owner = Plain()
    made, method = again((owner, owner.method))
    assert method() is made


def test_two_iterators_over_one_list() -> None:
    items = [1, 2, 3]
    first, second = iter(items), iter(items)
    next(second)
    made_items, made_first, made_second = again((items, first, second))
    made_items.append(4)
    assert list(made_first) == [1, 2, 3, 4] and list(made_second) == [2, 3, 4]


def test_an_exception_that_is_its_own_argument_is_refused() -> None:
    error = ValueError()
    error.args = (error,)
    with pytest.raises(UnbuildableError):
        again(error)


def test_modules_are_refused() -> None:
    with pytest.raises(UnbuildableError):
        again([torch.nn.Linear(1, 1)])


def test_numbers_come_after_the_results() -> None:
    finish = generate(RecipeBuilder(lambda value: NumberItem(value) if type(value) is int else None).build((0, 1)))
    # Entry hands them on in reverse order.
    assert finish([], [*TENSORS, "second", "first"], None, (), {}) == ("first", "second")


# --- effects ----------------------------------------------------------------------------------------------------------


def run(effect: EffectRecipe, target: Any, recipe: Recipe | None = None) -> Any:
    return generate(recipe or ConstantItem(None), [effect])([], TENSORS, None, (target,), {})


def of(kind: str, value: Any, deleted: tuple[Any, ...] = ()) -> EffectRecipe:
    return EffectRecipe(ArgumentSource(0, "x"), kind, RecipeBuilder(classify).build(value), deleted)


def test_items_of_dictionaries() -> None:
    plain = {"a": 1, "b": 2}
    run(of("dict", {"b": 3, "c": TENSORS[0]}, ("a",)), plain)
    assert list(plain) == ["b", "c"] and plain["c"] is TENSORS[0]
    run(of("dict", {"b": 5}), plain)
    assert plain["b"] == 5
    ordered = Names([("a", 1), ("b", 2)])
    run(of("ordered dict", {"b": 1, "a": 2}), ordered)
    assert list(ordered.items()) == [("b", 1), ("a", 2)]


def test_lists_sets_queues_and_cells() -> None:
    items = [1, 2]
    run(of("append", [3]), items)
    run(of("list", [items[-1], 7]), items)
    assert items == [3, 7]
    members = {1, 2}
    run(of("set", ([1], [5])), members)
    assert members == {2, 5}
    queue = collections.deque([1], maxlen=2)
    run(of("deque", [8, 9]), queue)
    assert list(queue) == [8, 9]

    def owner() -> Any:
        return held

    held = 1
    assert owner.__closure__ is not None
    run(of("cell", 4), owner.__closure__[0])
    assert owner() == 4


def test_attributes_are_set_past_the_class_and_deleted() -> None:
    target = Plain(gone=1)
    run(of("attribute", {"kept": TENSORS[1]}, ("gone",)), target)
    assert vars(target) == {"kept": TENSORS[1]}


def test_gradients_go_to_the_inputs_at_hand() -> None:
    source = ArgumentSource(0, "x")
    values = ObjectItem(dict, 0, (), ((ConstantItem("grad"), TensorItem(0)),))
    finish = generate(TensorItem(1), [EffectRecipe(source, "attribute", values)], [source])
    weight = torch.ones(1)
    # The argument is not fetched: it is the first input.
    assert finish([weight], TENSORS, None, (), {}) is TENSORS[1]
    assert weight.grad is TENSORS[0]


def test_what_an_effect_and_the_result_share_stays_shared() -> None:
    builder = RecipeBuilder(classify)
    value = [1]
    effect = EffectRecipe(ArgumentSource(0, "x"), "attribute", builder.build({"value": value}))
    target = Plain()
    result = run(effect, target, builder.build((value,)))
    assert result[0] is target.value


class Anything:
    """An object with any attributes."""


class Deletes:
    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)


def _both(x: torch.Tensor) -> Any:
    made = Anything()
    made.first = x  # type: ignore[attr-defined]
    return made, made.__dict__


def _dictionary_first(x: torch.Tensor) -> Any:
    made = Anything()
    made.first = x  # type: ignore[attr-defined]
    return made.__dict__, made


def _inside_itself(x: torch.Tensor) -> Any:
    made = Anything()
    made.own = made.__dict__  # type: ignore[attr-defined]
    return made, made.__dict__


def _written_behind_a_break(x: torch.Tensor) -> Any:
    made = Anything()
    attributes = vars(made)
    print(end="")
    attributes["first"] = x * 2
    return made, attributes


def _deleted_behind_a_break(x: torch.Tensor) -> Any:
    made = Deletes()
    made.first, made.second = 1, x  # type: ignore[attr-defined]
    attributes = made.__dict__
    del made.first  # type: ignore[attr-defined]
    return made, attributes


@pytest.mark.parametrize(
    "function", [_both, _dictionary_first, _inside_itself, _written_behind_a_break, _deleted_behind_a_break]
)
@pytest.mark.usefixtures("quiet")
def test_the_dictionary_of_an_object_is_its_own(function: Any) -> None:
    compiled = dovetail.compile(function, backend="aten")
    for _ in range(2):
        for run in (function, compiled):
            made, attributes = sorted(run(torch.ones(2)), key=lambda item: isinstance(item, dict))
            assert vars(made) is attributes
            expected = [*vars(next(item for item in function(torch.ones(2)) if not isinstance(item, dict)))]
            assert list(attributes) == expected
