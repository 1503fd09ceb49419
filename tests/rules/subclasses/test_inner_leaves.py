"""Inner tensors of wrapper subclasses that are leaves of their own, and attributes of inner wrappers, are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.custom_tensor import ConstantExtraMetadataTensor
from torch.testing._internal.two_tensor import TwoTensor

import dovetail


def leaf(grad: bool = True) -> Tensor:
    return torch.arange(3.0).requires_grad_(grad)


def constant(inner: Tensor, number: int) -> Any:
    made: Any = ConstantExtraMetadataTensor(inner)
    made.constant_attribute = number
    return made


PROGRAMS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "one": (lambda x: x.a * 2, lambda: TwoTensor(leaf(), leaf())),
    "both": (lambda x: x.a * x.b, lambda: TwoTensor(leaf(), leaf())),
    "beside the wrapper": (lambda x: x.a * x, lambda: TwoTensor(leaf(), leaf())),
    "the wrapper alone": (lambda x: x * 2, lambda: TwoTensor(leaf(), leaf())),
    "without a gradient": (lambda x: x.a * 2, lambda: TwoTensor(leaf(False), leaf(False))),
    "one element": (lambda x: x.elem * 2, lambda: constant(leaf(), 3)),
    "nested": (lambda x: x.elem.a * 2, lambda: constant(TwoTensor(leaf(), leaf()), 3)),
}


def parts(value: Any) -> list[Tensor]:
    if isinstance(value, TwoTensor):
        return [value, *parts(value.a), *parts(value.b)]
    return [value, *parts(value.elem)] if isinstance(value, ConstantExtraMetadataTensor) else [value]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_gradients_go_to_the_inner_leaves(name: str) -> None:
    program, make = PROGRAMS[name]

    def run(call: Callable[[Any], Any]) -> Any:
        found = []
        for _ in range(2):
            x = make()
            result = call(x)
            if result.requires_grad:
                result.sum().backward()
            grads = [None if item.grad is None else str(item.grad) for item in parts(x)]
            found.append((str(result.detach()), result.requires_grad, grads))
        return found

    assert run(dovetail.compile(program, backend="aten")) == run(program)


@pytest.mark.filterwarnings("ignore")
def test_an_inner_tensor_that_comes_to_require_a_gradient() -> None:
    compiled = dovetail.compile(lambda x: x.a * 2, backend="aten")
    for grad in (False, True, False, True):
        x = TwoTensor(leaf(grad), leaf(grad))
        result = compiled(x)
        assert result.requires_grad == grad
        if grad:
            result.sum().backward()
            assert x.a.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("grad", [False, True])
def test_attributes_of_an_inner_wrapper_are_its_own(grad: bool) -> None:
    def program(x: Any) -> Any:
        return x.elem.constant_attribute, x.constant_attribute, x * x.elem.constant_attribute

    x = constant(constant(leaf(False), 6), 5).requires_grad_(grad)
    found, expected = dovetail.compile(program, backend="aten")(x), program(x)
    assert found[:2] == expected[:2] == (6, 5)
    assert str(found[2].elem.elem.tolist()) == str(expected[2].elem.elem.tolist())


def test_gradients_of_inner_tensors_that_are_one_number_expanded() -> None:
    def program(x: Any, y: Any) -> Any:
        return x.sin() + (x + y).mean() + (x.a * 2 + y.b).sum()

    found = []
    for function in (program, dovetail.compile(program, backend="aten")):
        x, y = TwoTensor(leaf(False), leaf(False) * 2), TwoTensor(leaf(False) * 3, leaf(False))
        x.requires_grad_()
        y.requires_grad_()
        function(x, y).sum().backward()
        found.append([(str(item.grad), item.grad.a.stride(), item.grad.b.stride()) for item in (x, y)])
    assert found[0] == found[1]
