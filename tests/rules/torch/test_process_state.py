"""Modes that a function enters of the kinds that a capture is made of."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

import dovetail


def _fake(size: int) -> tuple[bool, bool, torch.Size]:
    with FakeTensorMode():
        made = torch.empty(size, size)
        product = made @ made
    return isinstance(made, FakeTensor), isinstance(product, FakeTensor), product.shape


def _functional(size: int) -> bool:
    x = torch.ones(size)
    with FunctionalTensorMode():
        return isinstance(FunctionalTensor.to_functional(x) + 1, FunctionalTensor)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("program", "size"), [(_fake, 3), (_fake, 200000), (_functional, 3)])
def test_a_mode_of_the_capture_is_entered(program: object, size: int) -> None:
    """Tensors that the function made under ``FakeTensorMode`` were plain ones, with memory."""
    assert callable(program)
    assert dovetail.compile(program, backend="aten")(size) == program(size)
