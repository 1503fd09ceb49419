"""Sharp edges of effects, by name; each was a wrong answer once."""

from __future__ import annotations

import collections
import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same


class Slots:
    """Attributes outside of any dictionary."""

    __slots__ = ("count", "items")

    def __init__(self) -> None:
        self.count = 1
        self.items = [1]


class Registry:
    """Attributes of a class."""

    total = 0


class Plus:
    """A descriptor written in Python."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, target: Any, owner: type) -> int:
        return int(getattr(target, self.name, 0))

    def __set__(self, target: Any, value: int) -> None:
        setattr(target, self.name, value + 1)


class Described:
    """Uses the descriptor."""

    value = Plus()


total = 1


def world() -> SimpleNamespace:
    """Everything that the programs below write to."""
    global total
    total = 1
    Registry.total = 0
    shared = [1, 2, 3]
    return SimpleNamespace(
        slots=Slots(),
        described=Described(),
        items=shared,
        shared=shared,
        table={"a": 1, "b": 2},
        letters={1, 2},
        groups=collections.defaultdict(list),
        ordered=collections.OrderedDict(a=1, b=2),
        counts=collections.Counter("aab"),
        seen=1,
    )


def observe(state: SimpleNamespace) -> dict[str, Any]:
    """All of it, as plain values, with the order of keys."""
    found = {name: value for name, value in vars(state).items() if name != "slots"}
    found["orders"] = [list(state.table), list(state.ordered), list(state.groups), list(vars(state))]
    found["slots"] = (state.slots.count, list(state.slots.items))
    found["letters"] = sorted(state.letters)
    found["classes"] = (Registry.total, total)
    found["is shared"] = state.shared is state.items
    return copy.deepcopy(found)


def slots(state: Any, x: torch.Tensor) -> torch.Tensor:
    state.slots.count = state.slots.count + 1
    state.slots.items.append(state.slots.count)
    return x * state.slots.count


def class_attribute(state: Any, x: torch.Tensor) -> torch.Tensor:
    Registry.total += 1
    return x * Registry.total


def descriptor(state: Any, x: torch.Tensor) -> torch.Tensor:
    state.described.value = 3
    return x * state.described.value


def order_of_keys(state: Any, x: torch.Tensor) -> torch.Tensor:
    state.table["c"] = 3
    state.table["a"] = state.table.pop("a")
    state.table.setdefault("z", []).append(1)
    state.table |= {"q": 1}
    state.table.popitem()
    del state.table["b"]
    state.table["b"] = 9
    return x * len(state.table)


def ordered(state: Any, x: torch.Tensor) -> torch.Tensor:
    state.ordered.move_to_end("a")
    state.ordered["c"] = 1
    state.ordered.popitem(last=False)
    return x * len(state.ordered)


def missing_key(state: Any, x: torch.Tensor) -> torch.Tensor:
    state.groups["n"].append(1)
    return x * len(state.groups["m"] + state.groups["n"])


def counter(state: Any, x: torch.Tensor) -> torch.Tensor:
    state.counts.update("bb")
    state.counts["z"] += 1
    return x * state.counts["b"]


def global_name(state: Any, x: torch.Tensor) -> torch.Tensor:
    global total
    total = total + 1
    return x * total


def swapped(state: Any, x: torch.Tensor) -> torch.Tensor:
    state.items, state.shared = state.shared, [0]
    state.items.append(5)
    return x * len(state.items)


def same_value_again(state: Any, x: torch.Tensor) -> torch.Tensor:
    state.seen = state.seen + 1 if len(state.items) > 3 else 7
    state.seen = 1
    state.items.append(1)
    return x * state.seen


def new_list_in_two_places(state: Any, x: torch.Tensor) -> torch.Tensor:
    fresh = [1]
    state.items.append(fresh)
    state.table["a"] = fresh
    fresh.append(2)
    return x


PROGRAMS = [
    slots,
    class_attribute,
    descriptor,
    order_of_keys,
    ordered,
    missing_key,
    counter,
    global_name,
    swapped,
    same_value_again,
    new_list_in_two_places,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_effect(program: Callable[..., Any]) -> None:
    state = world()
    expected = []
    for _ in range(3):
        expected.append((program(state, torch.ones(2)), observe(state)))
    state = world()
    compiled = dovetail.compile(program, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for result, after in expected:
            same(result, compiled(state, torch.ones(2)))
            same(after, observe(state), "state")


def test_a_value_written_again_is_not_dropped() -> None:
    state = SimpleNamespace(seen=1)

    def program(n: int) -> None:
        state.seen = n
        print(end="")
        state.seen = 1

    compiled = dovetail.compile(program, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in (1, 2, 3):
            compiled(n)
            assert state.seen == 1


def test_a_leaf_made_inside_stays_a_leaf() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.nn.Parameter]:
        weight = torch.nn.Parameter(torch.ones(2))
        return (x * weight).sum(), weight

    compiled = dovetail.compile(program, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, weight = compiled(torch.full((2,), 3.0))
    loss.backward()
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((2,), 3.0))


@pytest.mark.parametrize("asked", ["length", "truth", "attributes", "default"])
def test_the_length_of_a_dictionary_that_was_written_to_is_guarded(asked: str) -> None:
    """Found by the fuzzer: how many keys there are after a write depends on which there were before it."""
    table: dict[str, Any] = collections.defaultdict(list) if asked == "default" else {}
    holder = SimpleNamespace()

    def program(x: torch.Tensor) -> torch.Tensor:
        if asked == "default":
            table["k"].append(1)
            return x * len(table)
        if asked == "attributes":
            holder.k = 3
            return x * len(holder.__dict__)
        table["k"] = 1
        return x * (len(table) if asked == "length" else 2 if table else 3)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for keys in ("", "k", "ab", "abk", "", "k"):
        seen = []
        for function in (program, compiled):
            for owned in (table, holder.__dict__):
                owned.clear()
                owned.update({key: [] for key in keys})
            seen.append(float(function(torch.ones(()))))
        assert seen[0] == seen[1]
