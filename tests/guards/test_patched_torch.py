"""Functions and methods of torch that a program puts others in the place of, between two calls."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.errors import GraphBreakError

pytestmark = pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")

_VALUES = torch.tensor([[-1.0, 2.0], [0.5, 3.0]])


def _five(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return values * 5


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return value * 7


PATCHES: dict[str, tuple[Any, str, Any, Callable[[], Callable[..., Any]]]] = {
    "a method of Tensor": (Tensor, "relu", _five, lambda: lambda x: x.relu()),
    "a method of Tensor in Python": (Tensor, "norm", _five, lambda: lambda x: x.norm()),
    "a method of Tensor that was asked for": (Tensor, "sin", _five, lambda: lambda x: getattr(x, "sin", abs)()),
    "a method of Tensor in the place of which itself is called": (
        Tensor,
        "sin",
        lambda self, own=Tensor.sin: own(self) * 5,
        lambda: lambda x: x.sin(),
    ),
    "a method of Tensor that an operator does not call": (Tensor, "add", _five, lambda: lambda x: x.add(1) + 1),
    "an operator": (Tensor, "__add__", _five, lambda: lambda x: x + 1),
    "an operator of the right operand": (Tensor, "__rsub__", _five, lambda: lambda x: 1 - x),
    "an operator in place": (Tensor, "__imul__", _five, lambda: lambda x: operator.imul(x.clone(), 2)),
    "an operator that was inherited": (Tensor, "__matmul__", _five, lambda: lambda x: x @ x),
    "a comparison": (Tensor, "__lt__", _five, lambda: lambda x: x < 1),
    "an item": (Tensor, "__getitem__", _five, lambda: lambda x: x[0]),
    "a sign": (Tensor, "__neg__", _five, lambda: lambda x: -x),
    "the length": (Tensor, "__len__", lambda self: 7, lambda: lambda x: x * len(x)),
    "a number made of a tensor": (Tensor, "__float__", lambda self: 7.0, lambda: lambda x: x * float(torch.ones(()))),
    "the items": (Tensor, "__iter__", lambda self: iter([self]), lambda: lambda x: sum(item for item in x)),
    "an operator of Parameter": (
        nn.Parameter,
        "__mul__",
        lambda self, other: other.sin(),
        lambda: lambda x, weight=nn.Parameter(_VALUES): weight * x,
    ),
    "a property of Tensor": (Tensor, "mT", property(_five), lambda: lambda x: x.mT),
    "a function that a module calls": (F, "gelu", _five, nn.GELU),
    "a function that a container's module calls": (F, "relu", _five, lambda: nn.Sequential(nn.Identity(), nn.ReLU())),
    "a function that a function of torch calls": (torch, "tanh", _five, lambda: lambda x: F.hardtanh(torch.tanh(x))),
    "attention inside of a module": (
        F,
        "scaled_dot_product_attention",
        _attention,
        lambda: lambda x, m=nn.MultiheadAttention(2, 1): m(x, x, x, need_weights=False)[0],
    ),
    "how modules are called": (nn.Module, "__call__", lambda self, x: x * 100, nn.Tanh),
    "the forward of a module of torch": (nn.Tanh, "forward", lambda self, x: x * 3, nn.Tanh),
    "a method that modules inherit": (nn.Module, "children", lambda self: [abs], lambda: _sum_of_children),
}


def _sum_of_children(values: Tensor, model: nn.Module = nn.Sequential(nn.Tanh(), nn.ReLU())) -> Tensor:
    for child in model.children():
        values = child(values)
    return values


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_between_two_calls(name: str) -> None:
    owner, attribute, other, make = PATCHES[name]
    torch.manual_seed(0)
    program = make()
    compiled = dovetail.compile(program, backend="aten")

    def both() -> Tensor:
        expected: Tensor = program(_VALUES)
        torch.testing.assert_close(compiled(_VALUES), expected, rtol=0, atol=0)
        return expected

    # Twice: a check that remembers the last hit must see it as well.
    for _ in range(2):
        before = [both() for _ in range(4)][-1]
        with mock.patch.object(owner, attribute, other):
            assert not torch.equal(both(), before)
    assert torch.equal(both(), before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", (torch.optim.SGD, torch.optim.AdamW))
@pytest.mark.parametrize("method", ("step", "zero_grad"))
def test_a_method_of_an_optimizer(kind: type[torch.optim.Optimizer], method: str) -> None:
    def run(compiler: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]

        def step(values: Tensor) -> None:
            optimizer.zero_grad(set_to_none=False)
            model(values).sum().backward()
            optimizer.step()

        compiled, found = compiler(step), []
        for call in range(6):
            with mock.patch.object(kind, method, lambda self, *args, **kwargs: None) if call == 4 else mock.MagicMock():
                compiled(_VALUES)
            found.append(model.weight.sum().item())
        return found

    assert run(lambda step: dovetail.compile(step, backend="aten")) == run(lambda step: step)


def test_a_function_that_an_optimizer_calls() -> None:
    def run(compiler: Callable[[Any], Any]) -> list[float]:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(values: Tensor) -> None:
            optimizer.zero_grad()
            (weight * values).sum().backward()
            optimizer.step()

        compiled, found = compiler(step), []
        for call in range(6):
            with mock.patch("torch.optim.sgd.sgd", lambda *args, **kwargs: None) if call == 4 else mock.MagicMock():
                compiled(_VALUES[0])
            found.append(weight.sum().item())
        return found

    assert run(lambda step: dovetail.compile(step, backend="aten")) == run(lambda step: step)


def test_a_replaced_operator_is_refused_in_one_graph() -> None:
    compiled = dovetail.compile(lambda x: x + 1, backend="aten", fullgraph=True)
    with mock.patch.object(Tensor, "__add__", _five), pytest.raises(GraphBreakError, match="replaced __add__ of"):
        compiled(_VALUES)
    assert torch.equal(compiled(_VALUES), _VALUES + 1)


def test_a_method_of_the_programs_own_that_appears() -> None:
    compiled = dovetail.compile(lambda x: x.thrice() if hasattr(x, "thrice") else x, backend="aten", fullgraph=True)
    assert torch.equal(compiled(_VALUES), _VALUES)
    for factor in (3, 4):
        with mock.patch.object(Tensor, "thrice", lambda self, factor=factor: self * factor, create=True):
            assert torch.equal(compiled(_VALUES), _VALUES * factor)
    assert torch.equal(compiled(_VALUES), _VALUES)
    assert len(compiled.entries) == 3


def test_what_a_replaced_operator_does_happens_once() -> None:
    seen: list[int] = []
    own = Tensor.__add__
    compiled = dovetail.compile(lambda x: (x + 1) * 2, backend="aten")
    with mock.patch.object(Tensor, "__add__", lambda self, other: (seen.append(1), own(self, other))[1]):
        compiled(_VALUES)
        compiled(_VALUES)
    assert seen == [1, 1]


def test_what_pickling_notes_in_a_class_is_no_method_of_the_program():
    compiled = dovetail.compile(torch.sin, backend="aten", fullgraph=True)
    x = torch.ones(2)
    compiled(x)
    torch.Tensor.__slotnames__ = []
    try:
        assert torch.equal(compiled(x), torch.sin(x))
        assert len(compiled.entries) == 1
    finally:
        del torch.Tensor.__slotnames__
