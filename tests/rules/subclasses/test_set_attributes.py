"""Attributes that a program sets on tensor subclasses which wrap others, and reads from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import dovetail
from tests.differential import same

pytestmark = pytest.mark.usefixtures("quiet")


def _set_number(x: Any, other: torch.Tensor) -> Any:
    x.scale = 3
    return x * x.scale


def _set_tensor(x: Any, other: torch.Tensor) -> Any:
    x.scale = other * 2
    return x * 2


def _count(x: Any, other: torch.Tensor) -> Any:
    x.scale = (x.scale if hasattr(x, "scale") else 0) + 1
    return x * x.scale


def _read(x: Any, other: torch.Tensor) -> Any:
    return x * getattr(x, "scale", 7)


def _set_twice_with_a_break(x: Any, other: torch.Tensor) -> Any:
    x.scale = 2
    y = x * x.scale
    torch._dynamo.graph_break()
    x.scale = x.scale + 1
    return y * x.scale


def _set_on_a_result(x: Any, other: torch.Tensor) -> Any:
    y = x * 2
    y.scale = 5
    return y * y.scale, y


def _set_a_part(x: Any, other: torch.Tensor) -> Any:
    x.a = other
    return x * 2


def _seen(function: Callable[..., Any], compile: Callable[[Any], Any]) -> list[Any]:
    torch.manual_seed(0)
    run, found = compile(function), []
    x = TwoTensor(torch.randn(3), torch.randn(3))
    other = torch.randn(3)
    for kept in (False, True, True, 4, other):
        if kept is False:
            x = TwoTensor(torch.randn(3), torch.randn(3))
        elif kept is not True:
            x.scale = kept
        result = run(x, other)
        results = result if isinstance(result, tuple) else (result,)
        # The attributes of the results, and what is left on the input, whose parts are looked at too.
        found.append([(item.a, item.b, getattr(item, "scale", None)) for item in results])
        found.append((x.a, x.b, getattr(x, "scale", None), list(x.__dict__)))
    return found


@pytest.mark.parametrize(
    "function", [_set_number, _set_tensor, _count, _read, _set_twice_with_a_break, _set_on_a_result, _set_a_part]
)
def test_attributes_of_wrappers_are_eagers(function: Callable[..., Any]) -> None:
    same(_seen(function, lambda item: item), _seen(function, dovetail.compile(backend="aten")))


@pytest.mark.parametrize("function", [_set_number, _set_tensor, _count, _read])
def test_attributes_of_inputs_stay_in_the_graph(function: Callable[..., Any]) -> None:
    same(_seen(function, lambda item: item), _seen(function, dovetail.compile(backend="aten", fullgraph=True)))


@pytest.mark.parametrize("function", [_set_on_a_result, _set_a_part])
def test_what_no_graph_can_set_is_refused_in_one_graph(function: Callable[..., Any]) -> None:
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    with pytest.raises(dovetail.errors.DovetailError, match="of a TwoTensor is set"):
        compiled(TwoTensor(torch.randn(3), torch.randn(3)), torch.randn(3))
