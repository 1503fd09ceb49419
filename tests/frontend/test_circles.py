"""Lists, dictionaries and objects that hold themselves: given to a compiled function, read, written, made and returned by it."""

from __future__ import annotations

import copy
import types
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Tensor = torch.Tensor


def _list() -> Any:
    items: list[Any] = [2.0]
    items.append(items)
    return items


def _dictionary() -> Any:
    table: dict[str, Any] = {"a": 2.0}
    table["self"] = table
    return table


def _object() -> Any:
    held = types.SimpleNamespace(v=2.0)
    held.me, held.table = held, {"me": held}
    return held


def _tuple() -> Any:
    items: list[Any] = []
    pair = (items, 2.0)
    items.append(pair)
    return pair


def _deque() -> Any:
    items: deque[Any] = deque([2.0])
    items.append(items)
    return items


def _two() -> Any:
    first: list[Any] = [1.0]
    first.append([2.0, first])
    return first


def _nothing_else() -> Any:
    items: list[Any] = []
    items.append(items)
    return items


MAKERS = [_list, _dictionary, _object, _tuple, _deque, _two, _nothing_else]


def unused(x: Tensor, held: Any) -> Any:
    return x * 2


def returned(x: Tensor, held: Any) -> Any:
    return [x * 2, {"held": held, "pair": (held, x)}]


def read(x: Tensor, held: Any) -> Any:
    if isinstance(held, dict):
        return x * held["self"]["self"]["a"]
    if isinstance(held, types.SimpleNamespace):
        return x * held.me.table["me"].v
    if isinstance(held, tuple):
        return x * held[0][0][1]
    if held[0] is held:
        return x * len(held)
    return x * held[0] * held[1][0]


def written(x: Tensor, held: Any) -> Any:
    target = held[0] if isinstance(held, tuple) else held
    if isinstance(target, dict):
        target["made"], target["again"] = x * 2, held
    elif isinstance(target, types.SimpleNamespace):
        target.made, target.again = x * 2, held
    else:
        target.extend([x * 2, held])
    return x + 1


def made(x: Tensor, held: Any) -> Any:
    items: list[Any] = [x * 2]
    table = {"items": items}
    items.append(table)
    return items[1]["items"][0] + 1, table


def same_object(x: Tensor, held: Any) -> Any:
    return x * 2 if isinstance(held, list) and held[-1] is held else x * 3


def copied(x: Tensor, held: Any) -> Any:
    copy.deepcopy(held)
    return x * 2, copy.copy(held) is held


def _shown(value: Any, met: dict[int, int] | None = None) -> Any:
    """A value as nested tuples, with a number in the place of what was met before."""
    met = {} if met is None else met
    if id(value) in met:
        return met[id(value)]
    if isinstance(value, Tensor):
        return value
    if isinstance(value, types.SimpleNamespace | dict | list | tuple | deque):
        met[id(value)] = len(met)
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        return tuple((name, _shown(item, met)) for name, item in value.items())
    return tuple(_shown(item, met) for item in value) if isinstance(value, list | tuple | deque) else value


@pytest.mark.parametrize("function", [unused, returned, read, written, made, same_object, copied])
@pytest.mark.parametrize("make", MAKERS)
def test_what_holds_itself(make: Callable[[], Any], function: Callable[..., Any]) -> None:
    compiled, mine, others = dovetail.compile(function, backend="aten"), make(), make()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(3):
            x = torch.arange(3.0) + number
            expected, result = function(x, mine), compiled(x, others)
            same(_shown(expected), _shown(result))
            same(_shown(mine), _shown(others))
    assert not any("report this" in str(item.message) for item in told)
    if function is unused:
        assert not told


@pytest.mark.parametrize("make", MAKERS)
def test_a_module_and_a_closure_with_what_holds_itself(make: Callable[[], Any]) -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.table = make(), {"module": self}

        def forward(self, x: Tensor) -> Any:
            return read(x, self.held) * len(self.table)

    mine, others = Holder(), Holder()
    compiled = dovetail.compile(others, backend="aten")
    closure = dovetail.compile(lambda x: read(x, others.held), backend="aten")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(2):
            x = torch.arange(3.0) + number
            same(mine(x), compiled(x))
            same(read(x, mine.held), closure(x))
    assert not any("report this" in str(item.message) for item in told)
