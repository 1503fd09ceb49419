"""Custom backwards that get some of their gradients only, as the program uses some of the results only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Tensor = torch.Tensor


class Asks(torch.autograd.Function):
    """Its backward looks which gradients there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor:
        return (first if first is not None else 0) + (second * 7 if second is not None else 100)


class NotLinear(torch.autograd.Function):
    """Zeros are another gradient to it than none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return first * 2 + second.cos() * x


def returned(function: Any, x: Tensor) -> tuple[Tensor, ...]:
    first, second = function.apply(x)
    return first, second.sin(), second


def scalars(function: Any, x: Tensor) -> tuple[Tensor, ...]:
    first, second = function.apply(x * x)
    return first.sum(), second.sum(), first.exp()


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1), (2,)], ids=str)
@pytest.mark.parametrize("shape", [returned, scalars])
@pytest.mark.parametrize("function", [Asks, NotLinear])
def test_a_custom_backward_gets_the_gradients_that_there_are(
    function: Any, shape: Callable[..., Any], used: tuple[int, ...]
) -> None:
    """It was the part of the graph, recorded with all gradients, that is left without the others."""
    found = []
    for run in (shape, dovetail.compile(shape, backend="aten", fullgraph=True)):
        x = torch.tensor([0.5, -1.5], requires_grad=True)
        results = run(function, x)
        sum(results[place].sum() for place in used).backward()  # type: ignore[union-attr]
        found.append(x.grad)
    same(found[0], found[1])


class OfTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        return a.clone(), b.clone()


class ReadsMore(OfTwo):
    """Given one gradient only, it reads what it does not read otherwise."""

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Tensor, None]:
        a, b = ctx.saved_tensors
        if second is None:
            assert first is not None
            return first * a, None
        return second * 2 if first is None else first * second * b, None


class OnlyAsks(OfTwo):
    """It asks whether there is a gradient, and does not read that."""

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Tensor, None]:
        a, b = ctx.saved_tensors
        return (a if second is None else b) * (3 if first is None else first), None


class Ignores(torch.autograd.Function):
    """Its gradients are those of the second result only, zeros where there are none."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[None, Tensor]:
        return None, second * 2


@pytest.mark.parametrize("function", [ReadsMore, OnlyAsks, Ignores])
def test_a_custom_backward_that_does_not_read_all_gradients(function: Any) -> None:
    """Inputs that only such a backward reads had the values of fresh memory."""

    def program(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        first, second = function.apply(a * 2, b)
        return first, second.sin()

    found = []
    for run in (program, dovetail.compile(program, backend="aten", fullgraph=True)):
        a, b = (torch.tensor(item, requires_grad=True) for item in ([0.5, -1.5], [2.0, 3.0]))
        results = run(a, b)
        for used in (results[:1], results[1:], results, results[:1]):
            given = [torch.full_like(item, 0.5) for item in used]
            found.append(torch.autograd.grad(used, (a, b), given, retain_graph=True, allow_unused=True))
    same(found[:4], found[4:])


class Constant(torch.autograd.Function):
    """Its backward does not depend on its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * 10


def constant(x: Tensor) -> tuple[Tensor, ...]:
    return Constant.apply(x).sum(), (x * 3).sum()


def saved_itself(x: Tensor) -> tuple[Tensor, ...]:
    h = x * 2
    h.register_hook(lambda gradient: x)
    return h.sum(), (x * 3).sum()


def stacked(x: Tensor) -> tuple[Tensor, ...]:
    first, second = x.unbind()
    return Constant.apply(first), second * 3


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("function", [constant, saved_itself, stacked])
def test_what_depends_on_no_gradient_is_there_where_its_backward_runs(
    function: Callable[[Tensor], Any], used: tuple[int, ...]
) -> None:
    """It was lost where another output had no gradient, and there where its own had none."""
    found = []
    for run in (function, dovetail.compile(function, backend="aten", fullgraph=True)):
        x = torch.tensor([0.5, -1.5], requires_grad=True)
        results = run(x)
        found.append(torch.autograd.grad([results[place] for place in used], x, allow_unused=True))
    same(found[0], found[1])


def test_a_hook_of_several_results_runs_where_one_has_no_gradient() -> None:
    """It waited for the other, which is a result of the same node."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    found: list[list[Any]] = []
    for run in (function, dovetail.compile(function, backend="aten", fullgraph=True)):
        seen: list[Any] = []
        first, second = run(torch.ones(2, requires_grad=True))
        torch.autograd.graph.register_multi_grad_hook((first, second), seen.append)
        (first.sum() * 2 + second.sum()).backward(retain_graph=True)
        second.sum().backward()
        found.append(seen)
    same(found[0], found[1])


def test_a_hook_reads_what_its_tensor_is_not_computed_from() -> None:
    """A backward in an autocast block, or one that is differentiated itself, had fresh memory in the place of that."""

    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = a * 2
        y.register_hook(lambda gradient: gradient * b)
        return y.sin(), b.exp(), a @ a

    found: list[Any] = []
    for run in (function, dovetail.compile(function, backend="aten", fullgraph=True)):
        a, b = torch.full((2, 2), 1.5, requires_grad=True), torch.full((2, 2), 3.0, requires_grad=True)
        first, _, last = run(a, b)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for result in (first, last):
                found.append(torch.autograd.grad(result.sum(), a, retain_graph=True))
        (gradient,) = torch.autograd.grad(first.sum(), a, create_graph=True)
        found.append(torch.autograd.grad(gradient.sum(), (a, b)))
    same(found[:3], found[3:])
