"""Objects that native functions of torch's are given: they are called, or their attributes are read."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import functorch
import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import dovetail
from tests.differential import same


def without_tangents(x: torch.Tensor) -> torch.Tensor:
    def squared(x: torch.Tensor) -> torch.Tensor:
        with forward_ad._set_fwd_grad_enabled(False):
            y = x**2
        return x - y

    return torch.func.jvp(squared, (x,), (torch.ones_like(x),))[1]


def made_functional(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    function, weights = functorch.make_functional(torch.nn.Linear(3, 2))
    return function(weights, x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [without_tangents, made_functional])
def test_an_object_with_call_keeps_its_attributes(program: Any) -> None:
    compiled = dovetail.compile(program, backend="aten")
    for _ in range(2):
        same(program(torch.ones(3)), compiled(torch.ones(3)))
    assert "AttributeError" not in str(dovetail.events_of(compiled))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counted = torch.nn.Buffer(torch.ones(1))
        self.tied = self.counted
        self.hidden = torch.nn.Buffer(torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.counted + 2 * self.tied + self.hidden


def test_a_buffer_made_by_the_function() -> None:
    def program(x: torch.Tensor) -> Any:
        module = Tied()
        found = torch.func.functional_call(module, {"counted": x}, x, tie_weights=True)
        return found, list(module.state_dict()), isinstance(module.tied, torch.nn.Buffer), list(module._buffers)

    compiled = dovetail.compile(program, backend="aten")
    assert str(program(torch.ones(1))) == str(compiled(torch.ones(1)))


def test_a_buffer_that_is_given_a_second_name() -> None:
    module = Tied()

    def program(x: torch.Tensor) -> Any:
        module.again = module.counted
        module.plain = x * 2
        return list(module._buffers), module.again + x

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    names, result = compiled(torch.ones(1))
    assert names == ["counted", "tied", "hidden", "again"]
    assert module.again is module.counted
    assert "plain" in module.__dict__
    assert result.item() == 2


def test_a_partial_that_leaves_the_function_keeps_its_attributes() -> None:
    def program(x: torch.Tensor) -> Any:
        made: Any = functools.partial(torch.add, alpha=2)
        made.name, made.seen = "twice", x * 2
        return made

    made = dovetail.compile(program, backend="aten")(torch.ones(2))
    assert made.name == "twice"
    assert torch.equal(made.seen, torch.full((2,), 2.0))
    assert torch.equal(made(torch.ones(2), torch.ones(2)), torch.full((2,), 3.0))


@pytest.mark.filterwarnings("ignore")
def test_a_parameter_without_a_shape() -> None:
    def program() -> Any:
        made = torch.nn.UninitializedParameter()
        return type(made).__name__, isinstance(made, torch.nn.Parameter)

    compiled = dovetail.compile(program, backend="aten")
    assert compiled() == program()
    assert "capture failed" not in str(dovetail.events_of(compiled))


def test_apply_of_a_class_is_code_of_the_program() -> None:
    """What a custom function writes while torch runs it is not written twice where the graph breaks."""
    calls = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            calls.append("forward")
            return x * 2

        @staticmethod
        def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
            calls.append("jvp")
            return tangent * 2

    def checked(x: torch.Tensor) -> bool:
        options = {"check_undefined_grad": False, "check_backward_ad": False, "check_batched_grad": False}
        return torch.autograd.gradcheck(Doubled.apply, (x,), check_forward_ad=True, **options)

    x = torch.rand(2, dtype=torch.float64, requires_grad=True)
    assert checked(x)
    expected, calls = calls, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert dovetail.compile(checked, backend="aten")(x)
    assert calls == expected
