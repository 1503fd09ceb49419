"""A function whose loop breaks the graph over and over runs as it is; what is around it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail
from dovetail.face.continuation import MANY_PARTS

pytestmark = pytest.mark.usefixtures("quiet")
_EVENT = "loop left to eager"


class Scaled(torch.optim.Optimizer):
    """Asks for a number of every parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                scale = max(0.05, p.norm() / p.numel() ** 0.5)
                p.sub_(p.grad * scale, alpha=group["lr"] / state["step"])


def _training(compile_: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(4 + at % 3, 4 + (at + 1) % 3, bias=at % 2 == 0) for at in range(12))
    model = torch.nn.Sequential(*layers)
    optimizer, x = Scaled(model.parameters()), torch.randn(3, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    function = compile_(step)
    losses = [function(x).detach() for _ in range(5)]
    return function, [*losses, *model.parameters()]


def test_an_optimizer_that_asks_for_a_number_of_every_parameter() -> None:
    _, expected = _training(lambda step: step)
    compiled, got = _training(lambda step: dovetail.compile(step, backend="aten"))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    events = dovetail.events_of(compiled)
    assert events.count(_EVENT) == 1
    captures = events.count("capture")
    compiled(torch.randn(3, 4))
    assert events.count("capture") == captures
    assert any("runs eagerly" in str(event) for event in events.events if event.name == "graph break")


def _asking(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum().item() > 0 else x * 3


def _short(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2 * MANY_PARTS):
        x = _asking(x).sin()
    return x


def _long(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2 * MANY_PARTS):
        x = _asking(x)
        for _ in range(40):
            x = x.sin()
    return x


def _items(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for _ in range(2 * MANY_PARTS):
        x = _asking(x).sin()
        yield x


def _sum(x: torch.Tensor) -> torch.Tensor:
    return torch.stack(list(_items(x))).sum(0)


def _raises(x: torch.Tensor) -> torch.Tensor:
    for at in range(2 * MANY_PARTS):
        x = _asking(x).sin()
        if at == 2 * MANY_PARTS - 2:
            raise ValueError(f"round {at}")
    return x


@pytest.mark.parametrize(
    ("inner", "is_left"), [(_short, True), (_long, False), (_sum, False)], ids=["short", "long", "generator"]
)
def test_only_loops_of_small_parts(inner: Callable[[torch.Tensor], torch.Tensor], is_left: bool) -> None:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x.cos()) + x

    compiled = dovetail.compile(outer, backend="aten")
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, requires_grad=True)
        expected, got = outer(x), compiled(x)
        assert torch.equal(expected, got)
        assert torch.equal(*(torch.autograd.grad(item.sum(), x)[0] for item in (expected, got)))
    assert dovetail.events_of(compiled).count(_EVENT) == is_left


def test_the_compiled_function_itself_is_not_left() -> None:
    compiled = dovetail.compile(_short, backend="aten")
    x = torch.randn(3)
    assert torch.equal(compiled(x), _short(x)) and torch.equal(compiled(x), _short(x))
    assert dovetail.events_of(compiled).count(_EVENT) == 0


def test_errors_in_the_loop() -> None:
    compiled = dovetail.compile(lambda x: _raises(x.cos()), backend="aten")
    for _ in range(3):
        with pytest.raises(ValueError, match=f"round {2 * MANY_PARTS - 2}"):
            compiled(torch.ones(2))


def test_a_reset_begins_anew() -> None:
    compiled = dovetail.compile(lambda x: _short(x.cos()), backend="aten")
    x = torch.randn(3)
    assert torch.equal(compiled(x), _short(x.cos()))
    assert dovetail.events_of(compiled).count(_EVENT) == 1
    compiled.forget_entries()
    assert torch.equal(compiled(x), _short(x.cos()))
    assert dovetail.events_of(compiled).count(_EVENT) == 2
