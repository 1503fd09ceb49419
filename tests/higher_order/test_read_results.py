"""Results that the backward reads itself: in eager, a derivative of the backward reaches their hooks; here it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import HigherOrderGradientError
from tests.differential import CLOSE, same

Tensor = torch.Tensor


def written(x: Tensor) -> Tensor:
    y = x * 1
    return y.exp_()


#: By whether their backward reads the result.
READ = {
    "exp": torch.exp,
    "tanh of a product": lambda x: (x * 2).tanh(),
    "softmax": lambda x: x.softmax(0),
    "in place": written,
    "used inside too": lambda x: (x.exp(), x.exp().sin())[0],
}
NOT_READ = {
    "sin": torch.sin,
    "a view": lambda x: x.exp().view(3, 1).view(3),
    "a product": lambda x: x.exp() * 2,
    "relu": lambda x: (x * x).relu(),
}


def hook(y: Tensor) -> None:
    y.register_hook(lambda gradient: gradient * 2)


def second(function: Callable[[Tensor], Tensor], ask: str) -> Any:
    """The second derivative, where the gradient of the first result is asked for: at first, or behind the first backward."""
    x = torch.tensor([0.5, 1.5, -0.75], dtype=torch.float64, requires_grad=True)
    y = function(x)
    if ask == "hook":
        hook(y)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    if ask == "late hook":
        hook(y)
    elif ask == "retain_grad":
        y.retain_grad()
    elif ask == "grad":
        return torch.autograd.grad(first.sum(), [x, y])
    first.sum().backward()
    return first.detach(), x.grad, y.grad if ask == "retain_grad" else None


@pytest.mark.parametrize("ask", ["hook", "late hook", "retain_grad", "grad"])
@pytest.mark.parametrize("name", READ)
def test_who_asks_for_the_gradient_of_a_read_result_is_told(name: str, ask: str) -> None:
    """What came through the result was missing."""
    compiled = dovetail.compile(READ[name], backend="aten", fullgraph=True)
    with pytest.raises(HigherOrderGradientError, match="reads this result itself"):
        second(compiled, ask)
    same(second(READ[name], "nothing"), second(compiled, "nothing"), exact=CLOSE)


@pytest.mark.parametrize("ask", ["hook", "late hook", "retain_grad", "grad"])
@pytest.mark.parametrize("name", NOT_READ)
def test_other_results_have_eagers_second_derivative(name: str, ask: str) -> None:
    compiled = dovetail.compile(NOT_READ[name], backend="aten", fullgraph=True)
    same(second(NOT_READ[name], ask), second(compiled, ask), exact=CLOSE)


def test_an_input_that_was_written_to_is_such_a_result() -> None:
    compiled = dovetail.compile(lambda x: x.exp_(), backend="aten", fullgraph=True)
    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 1
    compiled(x)
    hook(x)
    (first,) = torch.autograd.grad((x**3).sum(), leaf, create_graph=True)
    with pytest.raises(HigherOrderGradientError):
        first.sum().backward()


def test_a_gradient_that_its_own_backward_reads() -> None:
    """The results of the next order are results too."""
    x = torch.ones(2, requires_grad=True)
    (first,) = torch.autograd.grad(dovetail.compile(torch.tanh, backend="aten")(x).sum(), x, create_graph=True)
    (value,) = torch.autograd.grad((first**2).sum(), x, create_graph=True)
    hook(first)
    (expected,) = torch.autograd.grad(value.sum(), x)
    assert torch.isfinite(expected).all()


def test_a_result_that_no_path_leads_to() -> None:
    """The first gradient has no way to the result but the one that was missing."""
    found = []
    for run in (torch.exp, dovetail.compile(torch.exp, backend="aten")):
        x = torch.ones(2, requires_grad=True)
        y = run(x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        try:
            found.append(torch.autograd.grad(first.sum(), y, allow_unused=True))
        except HigherOrderGradientError as error:
            found.append(str(error))
    assert found[0][0] is not None and "reads this result itself" in found[1]
