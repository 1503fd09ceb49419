"""Weak references to tensors, which a capture would keep alive."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakWarning
from tests.differential import same

WEIGHT = torch.nn.Parameter(torch.ones(2))
TO_WEIGHT = weakref.ref(WEIGHT)


def dropped(x: torch.Tensor) -> Any:
    value = x * 2
    reference = weakref.ref(value)
    del value
    return x + 1, reference() is None


def kept(x: torch.Tensor) -> Any:
    value = x * 2
    reference = weakref.ref(value)
    return reference() is value, value + 1


@pytest.mark.parametrize("program", [dropped, kept], ids=lambda item: item.__name__)
def test_a_tensor_of_the_functions_own(program: Any) -> None:
    with pytest.warns(GraphBreakWarning, match="weak reference"):
        same(program(torch.ones(2)), dovetail.compile(program, backend="aten")(torch.ones(2)))


def test_tensors_that_existed_before() -> None:
    def program(x: torch.Tensor) -> Any:
        return TO_WEIGHT() * weakref.ref(x)(), TO_WEIGHT() is WEIGHT  # type: ignore[operator]

    same(program(torch.ones(2)), dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(2)))
