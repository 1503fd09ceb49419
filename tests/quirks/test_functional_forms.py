"""Operators in place whose functional form is an overload of another name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dovetail
from dovetail.torch_private.kernels import functional_form
from tests.differential import same

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "form"),
    [
        (aten.pow_.Scalar, aten.pow.Tensor_Scalar),
        (aten.pow_.Tensor, aten.pow.Tensor_Tensor),
        (aten.float_power_.Scalar, aten.float_power.Tensor_Scalar),
        (aten.ldexp_.default, aten.ldexp.Tensor),
        (aten.add_.Tensor, aten.add.Tensor),
        (aten.bernoulli_.float, None),
        (aten.add.Tensor, None),
    ],
)
def test_a_functional_form_takes_the_same_arguments(operator: object, form: object) -> None:
    assert functional_form(operator) is form  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1, 0, 3), (4, 3), (3, 2, 4)])
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.square_(),
        lambda x: x.pow_(2),
        lambda x: x.pow_(x.abs()),
        lambda x: x.ldexp_(torch.tensor(2)),
        lambda x: x.floor_divide_(2),
    ],
)
def test_writes_to_transposed_and_empty_tensors_are_one_graph(
    write: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return write((x + 1).transpose(0, 1))

    x = torch.rand(shape)
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for _ in range(2):
        result = compiled(x)
        same(function(x), result)
        assert result.stride() == function(x).stride()
