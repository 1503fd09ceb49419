"""Writes of hooks and custom backwards to tensors that the forward knows are seen by the program and by the next forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import same


class KeptOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.seen.add_(gradient.abs().amax())
        return gradient * 2, None


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(seen)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (seen,) = ctx.saved_tensors
        seen.copy_(torch.maximum(seen, gradient.abs().amax()))
        return gradient / (seen + 1), None


class ViewOfContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.part = seen[:1]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.part.mul_(3)
        return gradient * 2, None


class ByOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        torch.add(ctx.seen, 1, out=ctx.seen)
        ctx.seen[0] = 7
        return gradient * 2, None


class TheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.mul_(3), None


class TheResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.own = x.detach() * 2
        return ctx.own + x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Nobody else has it, but the next backward reads it again.
        return gradient * ctx.own.mul_(2), None


class ItsOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        made = x.cos()
        made.mul_(gradient)
        made[:1] += 0
        return made, None


FUNCTIONS = (ItsOwn, KeptOnContext, Saved, ViewOfContext, ByOut, TheGradient, TheResult)


class Model(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function.apply(self.layer(x), self.seen)  # type: ignore[no-untyped-call]
        return y + self.seen.sum()


def train(function: type[torch.autograd.Function], wrap: Callable[[Any], Any]) -> list[Any]:
    torch.manual_seed(0)
    model = Model(function)
    call, found = wrap(model), []
    for step in range(3):
        x = torch.randn(2, 3, requires_grad=True)
        y = call(x * (step + 1))
        gradient = torch.ones_like(y)
        y.backward(gradient)
        found += [y.detach(), x.grad, gradient, model.seen.clone(), model.layer.weight.grad.clone()]  # type: ignore[union-attr, operator]
    return found


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_training_is_that_of_eager(function: type[torch.autograd.Function], backend: str) -> None:
    expected = train(function, lambda model: model)
    found = train(function, lambda model: dovetail.compile(model, backend=backend))
    assert all(map(torch.equal, found, expected))


def test_a_write_to_its_own_tensor_breaks_no_graph() -> None:
    expected = train(ItsOwn, lambda model: model)
    found = train(ItsOwn, lambda model: dovetail.compile(model, backend="aten", fullgraph=True))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_the_next_backward_of_a_call_reads_what_the_last_one_wrote(function: type[torch.autograd.Function]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        seen, x = torch.zeros(3), torch.arange(3.0, requires_grad=True)
        y = wrap(lambda x: function.apply(x, seen))(x)  # type: ignore[no-untyped-call]
        found: list[Any] = []
        for _ in range(3):
            try:
                found += torch.autograd.grad(y, x, torch.ones(3), retain_graph=True)
            except RuntimeError as error:
                found.append("modified by an inplace operation" in str(error))
        return [*found, seen]

    same(run(lambda function: function), run(lambda function: dovetail.compile(function, backend="aten")))


def test_the_error_names_the_tensor() -> None:
    with pytest.raises(GraphBreakError, match=r"writes to self\.seen"):
        train(KeptOnContext, lambda model: dovetail.compile(model, backend="aten", fullgraph=True))


@pytest.mark.filterwarnings("ignore")
def test_a_hook_that_writes_a_tensor_of_the_program() -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        history = torch.zeros(4)

        def function(x: Tensor) -> Tensor:
            y = x * 2
            y.register_hook(lambda gradient: history.add_(gradient))
            return (y * history.cos()).sum()

        call, found = wrap(function), []
        for _ in range(3):
            x = torch.arange(4.0, requires_grad=True)
            call(x).backward()
            found += [x.grad, history.clone()]
        return found

    expected = run(lambda function: function)
    assert all(map(torch.equal, run(lambda function: dovetail.compile(function, backend="aten")), expected))
