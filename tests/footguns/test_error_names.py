"""Errors that Python raises for tensors name the types that the program has, not those of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, m: m + x,
    "add the other way": lambda x, m: x + m,
    "sum": lambda x, m: sum([m], x),
    "max": lambda x, m: max(x, m),
    "sorted": lambda x, m: sorted([x, m]),
    "text": lambda x, m: "a" + x,
    "join": lambda x, m: "".join([x]),
    "list": lambda x, m: [1] + x,  # noqa: RUF005
    "call": lambda x, m: x(3),
    "attribute": lambda x, m: x.missing,
    "index": lambda x, m: [1, 2][x.sum() * 1.5],
}


# What C has taken out of a list is known as a tensor only.
CASES = [(name, torch.Tensor) for name in PROGRAMS]
CASES += [(name, torch.nn.Parameter) for name in PROGRAMS if name not in ("sum", "max", "sorted")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_text_is_that_of_eager(name: str, kind: type) -> None:
    program = PROGRAMS[name]

    def function(x: Any, m: Any) -> str:
        try:
            program(x, m)
        except (TypeError, AttributeError) as error:
            return str(error)
        return "nothing was raised"

    x = torch.nn.Parameter(torch.ones(3)) if kind is torch.nn.Parameter else torch.ones(3)
    expected = function(x, torch)
    assert expected != "nothing was raised"
    compiled = dovetail.compile(function, backend="aten")
    assert [compiled(x, torch) for _ in range(3)] == [expected] * 3
