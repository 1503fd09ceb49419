"""Methods and operators of containers with what they do not take: the errors are Python's own, and nothing is written."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import captures, check_calls, clone_inputs, same

MAKERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [3, 1, 3],
    "tuple": lambda: (3, 1, 3),
    "dict": lambda: {3: 1, 1: 3},
    "set": lambda: {3, 1},
    "ordered": lambda: collections.OrderedDict({3: 1, 1: 3}),
    "deque": lambda: collections.deque([3, 1, 3]),
}
METHODS = {
    "list": ("count", "index", "remove", "append", "insert", "pop", "__setitem__", "__contains__", "__getitem__"),
    "tuple": ("count", "index", "__contains__"),
    "dict": ("get", "pop", "setdefault", "__getitem__", "__setitem__", "__contains__", "update"),
    "set": ("add", "discard", "remove", "union", "__contains__"),
    "ordered": ("get", "move_to_end", "__getitem__"),
    "deque": ("count", "index", "remove", "appendleft"),
}
ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((3,), {}),
    ((3, 1), {}),
    ((3, 1, 3), {}),
    ((3, 0, 1, 2), {}),
    ((3,), {"default": 7}),
]


def answer(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  (what a wrong call raises is what is compared)
        return type(error), str(error)


@pytest.mark.parametrize("kind", MAKERS)
def test_methods_take_as_many_arguments_as_python_says(kind: str) -> None:
    make = MAKERS[kind]

    def program(x: torch.Tensor) -> Any:
        results = []
        for name in METHODS[kind]:
            for args, kwargs in ARGUMENTS:
                container = make()
                try:
                    result = getattr(container, name)(*args, **kwargs)
                except (TypeError, ValueError, KeyError, IndexError) as error:
                    result = type(error)
                results.append((name, args, result, container))
        return x + 1, results

    expected = program(torch.ones(2))
    found = dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(2))
    assert found[1] == expected[1]


@pytest.mark.parametrize("name", ["count", "remove"])
def test_the_error_of_a_wrong_count_is_pythons(name: str) -> None:
    held = [3, 1, 3]

    def program(x: torch.Tensor) -> torch.Tensor:
        getattr(held, name)(3, 1)
        return x

    compiled = dovetail.compile(program, backend="aten")
    x = torch.ones(2)
    assert answer(lambda: compiled(x)) == answer(lambda: program(x))
    assert held == [3, 1, 3]


class Reflecting:
    def __ror__(self, left: Any) -> Any:
        return "or", sorted(left)

    def __rxor__(self, left: Any) -> Any:
        return "xor", sorted(left)


class OwnSet(set):  # type: ignore[type-arg]
    pass


RIGHTS = [{1: 2, 5: 6}.keys(), {1: 2}.items(), {1, 2}, frozenset({2}), OwnSet({1}), {1: 2}, [1], Reflecting(), 1]


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
@pytest.mark.parametrize("function", [operator.ior, operator.iand, operator.isub, operator.ixor])
@pytest.mark.parametrize("make", [lambda: {1, 3}, lambda: OwnSet({1}), lambda: {1: 2}.keys(), lambda: {1: 2}])
def test_what_a_container_does_not_take_in_place_the_other_operand_is_asked_for(
    make: Callable[[], Any], function: Callable[[Any, Any], Any]
) -> None:
    for right in RIGHTS:

        def program(x: torch.Tensor, right: Any = right) -> Any:
            left = first = make()
            left = function(left, right)
            return x + 1, left, first, left is first

        compiled = dovetail.compile(program, backend="aten")
        expected = answer(lambda program=program: program(torch.ones(2))[1:])  # type: ignore[misc]
        found = answer(lambda compiled=compiled: compiled(torch.ones(2))[1:])  # type: ignore[misc]
        assert found == expected, right
        assert type(found[0]) is type(expected[0])


def test_names_are_gathered_from_keys_in_one_graph() -> None:
    tables = {"weight": torch.ones(2), "bias": torch.ones(2)}

    def program(x: torch.Tensor) -> Any:
        names = {"weight"}
        names |= tables.keys()
        names -= {"other": 1}.keys()
        return x * len(names), sorted(names)

    x, names = dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(2))
    assert names == ["bias", "weight"] and x.tolist() == [2.0, 2.0]


def _unpacked(x: torch.Tensor, group: dict[str, Any]) -> Any:
    merged = {**group, "lr": 0.5}
    return x * merged["step"] + merged["weight"], merged


def _made_anew(x: torch.Tensor, group: dict[str, Any]) -> Any:
    copied = dict(group, other=1)
    del copied["weight"]
    return x * copied["step"], copied


def _written_first(x: torch.Tensor, group: dict[str, Any]) -> Any:
    group["seen"] = group["step"] * 2
    group["lr"] = 0.25
    merged = {**group}
    return x * merged["seen"] * merged["lr"], list(merged)


def _scaled(x: torch.Tensor, step: int = 0, **others: Any) -> Any:
    return x * step + others["weight"], others["lr"]


def _handed_over(x: torch.Tensor, group: dict[str, Any]) -> Any:
    return _scaled(x, **group)


@pytest.mark.parametrize("program", [_unpacked, _made_anew, _written_first, _handed_over])
def test_a_number_that_changes_is_unpacked_with_its_dictionary(program: Callable[..., Any]) -> None:
    """``{**group}``, as optimizers write it: the step of a group is another one at each call, and needs no graph of its own."""
    weight = torch.ones(3)
    calls = [(torch.ones(2, 3), {"step": number, "lr": 0.1, "weight": weight}) for number in range(8)]
    compiled = check_calls(program, calls)
    assert captures(compiled) <= 4
    in_another_order = (torch.ones(2, 3), {"lr": 0.1, "step": 9, "weight": weight})
    same(program(*clone_inputs(in_another_order)), compiled(*clone_inputs(in_another_order)))
