"""Attributes that a program sets on tensors: on inputs, on results of its own, and on both sides of a graph break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import captures, leaf, same

Program = Callable[[torch.Tensor, torch.Tensor], Any]


def _on_an_input(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.mask = y  # type: ignore[attr-defined]
    return x * x.mask  # type: ignore[attr-defined]


def _set_twice(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.scaled = y * 2  # type: ignore[attr-defined]
    x.scaled = x.scaled + 1  # type: ignore[attr-defined]
    return x.scaled  # type: ignore[attr-defined]


def _on_a_result(x: torch.Tensor, y: torch.Tensor) -> Any:
    total = x + y
    total.parts = [1, x * 2]  # type: ignore[attr-defined]
    same_one = total.add_(1)
    return total, same_one.parts[1] * total  # type: ignore[attr-defined]


def _not_on_its_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    total = x + y
    total.kind = "total"  # type: ignore[attr-defined]
    return total, hasattr(total.view(-1), "kind"), hasattr(x, "kind")


def _leads_to_itself(x: torch.Tensor, y: torch.Tensor) -> Any:
    total = x + y
    total.me = total  # type: ignore[attr-defined]
    return [total, {"again": total}], total.me  # type: ignore[attr-defined]


def _seen(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """A tensor as its values and attributes; a tensor met inside itself as a word."""
    if isinstance(value, torch.Tensor):
        if id(value) in inside:
            return "itself"
        return value.detach().clone(), {name: _seen(item, (*inside, id(value))) for name, item in vars(value).items()}
    if isinstance(value, (list, tuple)):
        return [_seen(item, inside) for item in value]
    return {key: _seen(item, inside) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    "program",
    [_on_an_input, _set_twice, _on_a_result, _not_on_its_view, _leads_to_itself],
    ids=lambda item: item.__name__,
)
def test_attributes_are_those_of_eager(program: Program) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    ours, theirs = (leaf(2, 3), leaf(2, 3)), (leaf(2, 3), leaf(2, 3))
    for left, right in zip(ours, theirs, strict=True):
        right.data.copy_(left.data)
    for _ in range(2):
        same(_seen(compiled(*ours)), _seen(program(*theirs)))
        same(_seen(ours), _seen(theirs))
    assert captures(compiled) <= 2


def test_a_count_kept_on_parameters_goes_on() -> None:
    layer = torch.nn.Linear(2, 2)

    def program(x: torch.Tensor) -> torch.Tensor:
        for parameter in layer.parameters():
            parameter.rows = getattr(parameter, "rows", 0) + x.shape[0]  # type: ignore[attr-defined]
        return layer(x)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for rows in (1, 2, 3):
        compiled(torch.ones(rows, 2))
    assert layer.weight.rows == layer.bias.rows == 6  # type: ignore[attr-defined]


def test_an_attribute_outlives_a_graph_break() -> None:
    def program(x: torch.Tensor) -> Any:
        double = x * 2
        double.scale = 5  # type: ignore[attr-defined]
        print(end="")
        return double * double.scale, double  # type: ignore[attr-defined]

    product, double = dovetail.compile(program, backend="aten")(torch.ones(2))
    assert product.tolist() == [10, 10] and double.scale == 5


def test_an_attribute_that_a_class_of_tensors_defines_is_not_set_past_it() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.data = x.detach().double()
        return x + 1

    with pytest.raises(dovetail.errors.GraphBreakError, match=r"\.data of a tensor is set"):
        dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(2))


def test_a_leaf_made_inside_leaves_with_its_attributes_and_its_gradient() -> None:
    def function(x: torch.Tensor) -> Any:
        leaf = (x * 2).detach().requires_grad_()
        leaf.note = ["kept"]
        (leaf * x).sum().backward()
        return leaf

    for backend in ("aten", "eager"):
        found = dovetail.compile(function, backend=backend)(torch.ones(3))
        assert found.note == ["kept"]
        same(function(torch.ones(3)).grad, found.grad)
