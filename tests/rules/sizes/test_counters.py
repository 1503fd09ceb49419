"""Numbers that a function itself counts up: one entry serves all of them, from the first call on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail

CALLS = 6


class Counting(torch.nn.Module):
    """Counts its calls, and computes with the count."""

    def __init__(self, formula: Callable[[torch.Tensor, Any], torch.Tensor], start: float) -> None:
        super().__init__()
        self.formula, self.count = formula, start
        self.weight = torch.nn.Parameter(torch.tensor([0.5, 1.5, 2.5, 3.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.formula(x * self.weight, self.count)


FORMULAS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "not used": lambda x, n: x * 2,
    "factor": lambda x, n: x * n,
    "divisor": lambda x, n: x / n,
    "correction of Adam": lambda x, n: x / (1 - 0.999**n) ** 0.5,
    "cosine": lambda x, n: x * 0.5 * (1 + math.cos(math.pi * n / 100)),
    "warm-up": lambda x, n: x * min(1.0, n / 100),
    "size": lambda x, n: x + torch.ones(n, 4).sum(0),
    "slice": lambda x, n: x[: n + 4] * 3,
    "roll": lambda x, n: x.roll(n),
    "tensor": lambda x, n: x * torch.tensor(n),
    "fill": lambda x, n: x + torch.full_like(x, n),
    "scale of an operator": lambda x, n: x.add(x, alpha=n + 1),
    "random numbers": lambda x, n: F.dropout(x, 0.5) * n,
}


def run(model: Counting, function: Any) -> list[Any]:
    """What a few training steps leave behind."""
    torch.manual_seed(0)
    found: list[Any] = []
    for step in range(CALLS):
        x = (torch.arange(4.0) + step).requires_grad_()
        y = function(x)
        y.sum().backward()
        found += [y.detach(), x.grad, model.count]
    return [*found, model.weight.grad, torch.get_rng_state()]


def entries(compiled: Any) -> int:
    return dovetail.events_of(compiled).count("recompile") + 1


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("name", FORMULAS)
def test_one_entry_serves_all_counts(name: str, start: int) -> None:
    expected = Counting(FORMULAS[name], start)
    model = Counting(FORMULAS[name], start)
    compiled = dovetail.compile(model, backend="aten")
    for ours, eager in zip(run(model, compiled), run(expected, expected), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    assert entries(compiled) == 1


def test_a_float_that_decays() -> None:
    class Decaying(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count *= 0.9
            return x * self.weight * self.count

    expected, model = Decaying(FORMULAS["factor"], 2.0), Decaying(FORMULAS["factor"], 2.0)
    compiled = dovetail.compile(model, backend="aten")
    for ours, eager in zip(run(model, compiled), run(expected, expected), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    assert entries(compiled) == 1


def test_each_side_of_a_branch_has_an_entry() -> None:
    def every_third(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n if n % 3 == 0 else x + n

    expected, model = Counting(every_third, 0), Counting(every_third, 0)
    compiled = dovetail.compile(model, backend="aten")
    for ours, eager in zip(run(model, compiled), run(expected, expected), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    assert entries(compiled) == 2


@pytest.mark.parametrize("place", ["attribute", "item", "list", "global", "cell", "slot"])
def test_wherever_the_count_is(place: str) -> None:
    class Slotted:
        __slots__ = ("count",)

    space: dict[str, Any] = {"count": 0}
    exec("def counted(x):\n    global count\n    count += 1\n    return x * count", space)
    table, row, slotted = {"count": 0}, [0], Slotted()
    slotted.count = 0
    model = Counting(FORMULAS["factor"], 0)

    def with_item(x: torch.Tensor) -> torch.Tensor:
        table["count"] += 1
        return x * table["count"]

    def with_list(x: torch.Tensor) -> torch.Tensor:
        row[0] += 1
        return x * row[0]

    def with_slot(x: torch.Tensor) -> torch.Tensor:
        slotted.count += 1
        return x * slotted.count

    def cell() -> Callable[[torch.Tensor], torch.Tensor]:
        count = 0

        def counted(x: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return x * count

        return counted

    functions: dict[str, Any] = {
        "attribute": lambda x: model(x) / model.weight.detach(),
        "item": with_item,
        "list": with_list,
        "global": space["counted"],
        "cell": cell(),
        "slot": with_slot,
    }
    compiled = dovetail.compile(functions[place], backend="aten")
    for step in range(1, CALLS):
        assert torch.equal(compiled(torch.ones(4)), torch.full((4,), float(step)))
    assert entries(compiled) == 1


def test_the_counts_of_an_optimizer_of_ones_own() -> None:
    class Decayed(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if not state:
                        state["step"], state["mean"] = 0, torch.zeros_like(parameter)
                    state["step"] += 1
                    state["mean"].lerp_(parameter.grad, 0.1)
                    parameter.sub_(state["mean"] / (1 - 0.9 ** state["step"]), alpha=group["lr"])

    def train(compile: Callable[[Any], Any]) -> tuple[Any, list[torch.Tensor]]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        optimizer = Decayed(layer.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        compiled = compile(step)
        return compiled, [compiled(torch.randn(4, 3)) for _ in range(CALLS)] + list(layer.parameters())

    _, expected = train(lambda function: function)
    compiled, found = train(lambda function: dovetail.compile(function, backend="aten"))
    assert all(map(torch.equal, found, expected))
    # The first step makes the state, all others have one.
    assert entries(compiled) == 2


def test_the_captured_graph_of_a_call_keeps_its_number() -> None:
    joint = dovetail.capture(Counting(FORMULAS["factor"], 3), (torch.ones(4),))
    assert joint.num_primals == 2


def test_numbers_stay_constants_where_shapes_are_to_be_static() -> None:
    model = Counting(FORMULAS["factor"], 3)
    compiled = dovetail.compile(model, backend="aten", dynamic=False)
    for _ in range(3):
        compiled(torch.ones(4))
    assert entries(compiled) == 3


def test_items_of_a_deque_that_move_up_stay_constants() -> None:
    recent = deque([1, 2, 3], maxlen=3)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        recent.append(recent[0] + 3)
        return x * recent[0]

    compiled = dovetail.compile(rotated, backend="aten", fullgraph=True)
    for expected in (2.0, 3.0, 4.0, 5.0):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), expected))
