"""A global variable that a function of another module writes, and that is then read as an attribute of that module."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError

counter: Any = 1
HERE = sys.modules[__name__]


def count_up(x: torch.Tensor) -> torch.Tensor:
    global counter
    counter += 1
    return x * counter


def put(value: Any) -> None:
    global counter
    counter = value


def take_away() -> None:
    global counter
    del counter


def read_after_it_was_counted(x: torch.Tensor) -> Any:
    return count_up(x) * HERE.counter


def read_before_and_after(x: torch.Tensor) -> Any:
    before = HERE.counter
    put(before + 3)
    return x * before, HERE.counter, count_up(x), HERE.counter


def a_tensor_is_put_there(x: torch.Tensor) -> Any:
    put(x.sin())
    return HERE.counter + 1, getattr(HERE, "counter").cos()  # noqa: B009


def taken_away_and_put_back(x: torch.Tensor) -> Any:
    take_away()
    was_there = hasattr(HERE, "counter"), getattr(HERE, "counter", 7)
    put(4)
    return x * HERE.counter, was_there


@pytest.mark.parametrize(
    "function", [read_after_it_was_counted, read_before_and_after, a_tensor_is_put_there, taken_away_and_put_back]
)
def test_the_module_has_what_its_function_wrote(function: Callable[..., Any]) -> None:
    def told(call: Callable[..., Any]) -> str:
        put(1)
        results = [str((call(torch.ones(2) * number), counter)) for number in (1, 2)]
        put(6)
        return str([*results, str((call(torch.ones(2)), counter))])

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert told(compiled) == told(function)


def test_another_value_of_the_variable_is_another_entry() -> None:
    compiled = dovetail.compile(read_after_it_was_counted, backend="aten", fullgraph=True)
    for value in (1, 1.5, True, 2):
        put(value)
        found = compiled(torch.ones(2))
        put(value)
        assert str(found) == str(read_after_it_was_counted(torch.ones(2)))


def test_a_write_from_outside_of_the_module_is_a_break() -> None:
    def outside(x: torch.Tensor) -> torch.Tensor:
        HERE.counter = 5
        return x * counter

    with pytest.raises(GraphBreakError, match="counter of .* is set"):
        dovetail.compile(outside, backend="aten", fullgraph=True)(torch.ones(2))
    put(1)
    assert str(dovetail.compile(outside, backend="aten")(torch.ones(2))) == str(outside(torch.ones(2)))
