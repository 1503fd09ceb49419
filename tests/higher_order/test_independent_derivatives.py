"""Second derivatives of one of several independent outputs: writes to what only the others need are nothing to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import Rule, same

Function = Callable[..., Any]


def apart(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.exp() * x).sum(), (y.exp() * y).sum()


def sharing(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.exp() * x * z).sum(), (y.exp() * y * z.sin()).sum()


def chained(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first = x.tanh() * z
    return first.sum(), (first.detach() * y.exp()).pow(3).sum()


#: The inputs that each output is computed from.
OWN = {apart: ({0}, {1}), sharing: ({0, 2}, {1, 2}), chained: ({0, 2}, {0, 1, 2})}


ROUNDED = Rule("close", tolerance=(1e-12, 1e-12), ignored=frozenset({"strides", "is_leaf", "requires_grad"}))


def leaves() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.linspace(0.5, 1.5, 3, dtype=torch.float64).add(k).requires_grad_() for k in range(3))  # type: ignore[return-value]


def attempt(function: Function, which: int, written: int, when: str) -> list[torch.Tensor] | str:
    """Derivatives of one output up to the third order with a write to one input in between, or eager's error."""
    inputs = leaves()
    outputs = function(*inputs)

    def write(moment: str) -> None:
        if moment == when:
            with torch.no_grad():
                inputs[written].mul_(2)

    found: list[torch.Tensor] = []
    try:
        write("at once")
        if when == "after the other's backward":
            outputs[1 - which].backward()
            write("after the other's backward")
        value = outputs[which]
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), inputs[which], create_graph=True)
            found.append(value.detach().clone())
            write("after the first derivative")
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            return "written to"
        if "second time" in str(error):
            return "freed"
        raise
    return found


@pytest.mark.parametrize("when", ["at once", "after the other's backward", "after the first derivative"])
@pytest.mark.parametrize("function", [apart, sharing, chained], ids=lambda item: item.__name__)
@pytest.mark.sampled(4)
def test_a_write_in_between(function: Function, when: str) -> None:
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for which in range(2):
        for written in range(3):
            for _ in range(2):
                expected, actual = attempt(function, which, written, when), attempt(compiled, which, written, when)
                where = f"output {which}, write to input {written}"
                if isinstance(expected, list) and isinstance(actual, list):
                    same(expected, actual, where, ROUNDED)
                elif isinstance(actual, list) or written not in OWN[function][which]:
                    assert expected == actual, where
                else:
                    # The next order is computed from the inputs, of which eager needs some only until it has a result of them.
                    assert actual == (expected if isinstance(expected, str) else "written to"), where
