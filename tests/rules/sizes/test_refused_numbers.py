"""Whole numbers that a function counts up, where torch has no symbol: few captures, none that fails again, eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dovetail
from tests.differential import captures, same

pytestmark = pytest.mark.usefixtures("quiet")
CALLS = 8


class Counting(torch.nn.Module):
    """Counts its calls, and computes with the count."""

    def __init__(self, formula: Callable[[Tensor, Any], Tensor], start: int) -> None:
        super().__init__()
        self.formula, self.count = formula, start
        self.weight = torch.nn.Parameter(torch.tensor([-0.5, 1.5, 0.0, 3.5]))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.formula(x * self.weight, self.count)


def in_place(x: Tensor, n: Any) -> Tensor:
    x = x * 1
    x **= n
    return x


FORMULAS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "power": lambda x, n: x**n,
    "power by a function": lambda x, n: torch.pow(x, n) + x.pow(exponent=n),
    "power in place": in_place,
    "power of whole numbers": lambda x, n: x * torch.arange(4) ** n,
    "power of half precision": lambda x, n: (x.bfloat16() ** n).float(),
    "inverse power": lambda x, n: (x.abs() + 1) ** -n,
    "root": lambda x, n: (x.abs() + 1) ** (1.0 / n),
    "generalised mean": lambda x, n: x.clamp(min=1e-6).pow(n).mean().pow(1.0 / n),
    "base": lambda x, n: n**x,
    "base by a function": lambda x, n: torch.pow(n, x),
    "base of whole numbers": lambda x, n: x * n ** torch.arange(4),
    "falling base": lambda x, n: (1.0 / n) ** x,
    "inverted": lambda x, n: x * ~n,
    "size of an image": lambda x, n: F.interpolate(x.expand(3, 4)[None, None], size=n + 1).sum((0, 1)),
    "sides of an image": lambda x, n: F.interpolate(
        x.expand(3, 4)[None, None], (n + 1, 5), mode="bilinear", align_corners=n > 100
    ),
}


def run(model: Counting, function: Any) -> list[Any]:
    found: list[Any] = []
    for step in range(CALLS):
        x = (torch.arange(4.0) - step).requires_grad_()
        y = function(x)
        y.sum().backward()
        found += [y.detach(), x.grad, model.count]
    return [*found, model.weight.grad]


@pytest.mark.parametrize("start", [-1, 0, 4])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_number_that_is_counted_up(name: str, start: int) -> None:
    if start < 0 and name in ("root", "generalised mean", "falling base"):
        pytest.skip("divided by zero")
    expected, model = Counting(FORMULAS[name], start), Counting(FORMULAS[name], start)
    compiled = dovetail.compile(model, backend="aten")
    for ours, eager in zip(run(model, compiled), run(expected, expected), strict=True):
        same(eager, ours)
    # One that begins again with a symbol; 0, and where it matters 1, have entries of their own.
    assert captures(compiled) <= (5 if start < 0 else 3)


def test_no_attempt_fails_again_for_the_same_reason() -> None:
    def formula(x: Tensor, n: Any) -> Tensor:
        return F.upsample(x.expand(3, 4)[None, None], size=n)

    expected, model = Counting(formula, 2), Counting(formula, 2)
    compiled = dovetail.compile(model, backend="aten")
    for ours, eager in zip(run(model, compiled), run(expected, expected), strict=True):
        same(eager, ours)
    # The first call tries the symbol.
    assert captures(compiled) == CALLS + 2


def test_other_numbers_stay_symbols() -> None:
    class Two(Counting):
        def __init__(self) -> None:
            super().__init__(FORMULAS["power"], 2)
            self.rate = 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.rate *= 0.9
            return F.upsample((x * self.rate)[None], size=self.count)

    expected, model = Two(), Two()
    compiled = dovetail.compile(model, backend="aten")
    found = []
    for size in (2, 3, 4):
        expected.count = model.count = size
        for _ in range(3):
            same(expected(torch.ones(1, 4)), compiled(torch.ones(1, 4)))
        found.append(captures(compiled))
    # A rate that is counted begins again, a size that was seen to change is tried as a symbol once.
    assert found == [2, 4, 5]


def test_an_error_of_the_program_holds_no_number() -> None:
    def formula(x: Tensor, n: Any) -> Tensor:
        return x.expand(n, 4) * n if n != 4 else x.view(n, 4)

    model = Counting(formula, 1)
    compiled = dovetail.compile(model, backend="aten")
    for number in range(2, 9):
        if number == 4:
            with pytest.raises(RuntimeError, match="invalid for input of size"):
                compiled(torch.ones(4))
        else:
            same(model.weight.expand(number, 4) * number, compiled(torch.ones(4)))
    assert captures(compiled) <= 6
