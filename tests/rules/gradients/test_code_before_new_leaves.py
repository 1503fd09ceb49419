"""Hooks and custom backwards on the way to leaves that a function makes, and does not return: they run in each backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

Tensor = torch.Tensor

#: What the programs below note while a backward runs.
noted: list[Any] = []


class Noting(torch.autograd.Function):
    """Doubles, and notes its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        noted.append(float(gradient.sum()))
        return gradient * 2


def made() -> Tensor:
    return torch.linspace(0.5, 1.5, 3, requires_grad=True)


def hook_on_the_leaf(x: Tensor) -> Tensor:
    weight = made()
    weight.register_hook(lambda gradient: noted.append(float(gradient.sum())))
    return (x * weight).sum()


def hook_between(x: Tensor) -> Tensor:
    middle = made().exp()
    middle.register_hook(lambda gradient: noted.append(gradient.tolist()))
    return (x * middle).sum()


def hook_after_the_addition(x: Tensor) -> Tensor:
    weight = made()
    weight.register_post_accumulate_grad_hook(lambda leaf: noted.append(leaf.grad.tolist()))
    return (x * weight).sum()


def hook_on_a_node(x: Tensor) -> Tensor:
    middle = made().exp()
    middle.grad_fn.register_hook(lambda results, gradients: noted.append(len(results)))
    return (x * middle).sum()


def hook_before_a_node(x: Tensor) -> Tensor:
    middle = made().exp()
    middle.grad_fn.register_prehook(lambda gradients: noted.append(gradients[0].tolist()))
    return (x * middle).sum()


def custom_backward(x: Tensor) -> Tensor:
    return (x * Noting.apply(made())).sum()


def custom_backward_of_nothing_else(x: Tensor) -> Tensor:
    return Noting.apply(made()).sum()


@pytest.mark.parametrize(
    "function",
    [
        hook_on_the_leaf,
        hook_between,
        hook_after_the_addition,
        hook_on_a_node,
        hook_before_a_node,
        custom_backward,
        custom_backward_of_nothing_else,
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_code_of_the_program_runs(function: Callable[[Tensor], Tensor], inside: bool) -> None:
    def program(x: Tensor) -> Tensor:
        result = function(x)
        if inside:
            noted.append("forward")
            print(end="")  # breaks the graph: by now nothing but the result knows of the leaf
            result.backward()
        return result

    found = []
    for run in (program, dovetail.compile(program, backend="aten")):
        x = torch.linspace(-1, 1, 3).requires_grad_()
        noted.clear()
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", dovetail.errors.GraphBreakWarning)
                result = run(x)
            if not inside:
                result.backward()
        found.append((list(noted), None if x.grad is None else x.grad.tolist(), float(result.detach())))
    assert found[0] == found[1]
    assert len(found[0][0]) == 3 * (1 + inside)


def test_one_graph_says_what_is_in_its_way() -> None:
    compiled = dovetail.compile(custom_backward, backend="aten", fullgraph=True)
    with pytest.raises(dovetail.errors.GraphBreakError, match="leads to tensors only that the function makes"):
        compiled(torch.ones(3, requires_grad=True))


def test_a_leaf_of_which_nothing_is_seen_stays_in_the_graph() -> None:
    def with_hook_on_both(x: Tensor) -> Tensor:
        product = x * made()
        product.register_hook(lambda gradient: gradient * 3)
        return product.sum()

    for program in (with_hook_on_both, lambda x: (x * made()).sum()):
        compiled = dovetail.compile(program, backend="aten", fullgraph=True)
        inputs = [torch.linspace(-1, 1, 3).requires_grad_() for _ in range(2)]
        program(inputs[0]).backward()
        compiled(inputs[1]).backward()
        assert inputs[0].grad is not None and torch.equal(inputs[0].grad, inputs[1].grad)


def beside_a_new_leaf(x: Tensor) -> Any:
    return x * 2, made() * 3


def beside_two_results_of_a_new_leaf(x: Tensor) -> Any:
    leaf = made()
    return x.exp(), leaf.exp(), leaf.sin().sum()


@pytest.mark.parametrize("function", [beside_a_new_leaf, beside_two_results_of_a_new_leaf])
@pytest.mark.parametrize("computed", [False, True])
def test_results_of_a_new_leaf_beside_those_of_an_input(function: Callable[[Tensor], Any], computed: bool) -> None:
    found = []
    for run in (function, dovetail.compile(function, backend="aten", fullgraph=True)):
        x = torch.linspace(-1, 1, 3).requires_grad_()
        results = run(x.sin() if computed else x)
        for result in reversed(results):
            result.sum().backward()
        assert x.grad is not None
        found.append(([result.requires_grad for result in results], x.grad.tolist()))
    assert found[0] == found[1]


def whole_view(x: Tensor) -> Tensor:
    return torch.ones(3).view(3).requires_grad_()


def part_of_a_constant(x: Tensor) -> Tensor:
    return torch.arange(4.0)[1:].requires_grad_()


def view_without_recording(x: Tensor) -> Tensor:
    with torch.no_grad():
        found = x.sin().view(-1)
    return found.requires_grad_()


def used_behind_a_break(x: Tensor) -> Any:
    leaf = torch.zeros(2, 3).reshape(3, 2)[0].requires_grad_()
    print(end="")
    return leaf, leaf * 2 + 1


def view_that_takes_no_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.view(-1).detach()


@pytest.mark.parametrize(
    "function",
    [whole_view, part_of_a_constant, view_without_recording, used_behind_a_break, view_that_takes_no_gradient],
)
def test_a_leaf_that_is_a_view_takes_its_gradient(function: Callable[[Tensor], Any]) -> None:
    found = []
    for run in (function, dovetail.compile(function, backend="aten")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dovetail.errors.GraphBreakWarning)
            result = run(torch.linspace(-1, 1, 3).requires_grad_())
        leaf, end = result if isinstance(result, tuple) else (result, result * 2)
        if end.requires_grad:
            end.sum().backward()
        gradient = None if leaf.grad is None else leaf.grad.tolist()
        found.append((gradient, leaf.requires_grad, leaf.is_leaf, leaf._is_view(), leaf.tolist(), end.tolist()))
    assert found[0] == found[1]
