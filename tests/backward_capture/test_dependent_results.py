"""Results of a compiled function of which one was computed from another, in a captured backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def features_and_logits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    features = x.sin()
    return features, features.exp() * x


def with_hook_on_the_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    features = x.sin()
    x.register_hook(lambda gradient: gradient + features)
    return x * 2, features.exp()


def hooked(features: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    features.register_hook(lambda gradient: gradient * 3)
    return logits.sum() + features.sum()


def hooked_only(features: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    features.register_hook(lambda gradient: gradient * 3)
    return logits.sum()


def retained(features: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    features.retain_grad()
    return logits.sum()


LOSSES: list[Loss] = [
    lambda features, logits: logits.sum(),
    lambda features, logits: features.sum(),
    lambda features, logits: (features * logits).sum(),
    hooked,
    hooked_only,
    retained,
]


def gradients(function: Callable[..., Any], losses: list[Loss]) -> list[Any]:
    found = []
    for loss in losses:
        x = torch.linspace(-1.0, 1.0, 4, requires_grad=True)
        features, logits = function(x)
        loss(features, logits).backward()
        found.append((x.grad, features.grad if features.retains_grad else None))
    return found


@pytest.mark.parametrize("function", [features_and_logits, with_hook_on_the_input])
@pytest.mark.parametrize("order", [1, -1])
def test_any_of_the_results_has_a_loss_and_a_hook(function: Callable[..., Any], order: int) -> None:
    losses = (LOSSES + LOSSES[:2])[::order]
    expected = gradients(function, losses)
    compiled = dovetail.compile(function, backend="aten")
    with warnings.catch_warnings(), dovetail.compiled_autograd(backend="aten") as backwards:
        warnings.simplefilter("ignore")
        found = gradients(compiled, losses)
    assert backwards.captures
    assert str(found) == str(expected)


def test_the_gradient_of_the_earlier_result_is_asked_for() -> None:
    def both(function: Callable[..., Any], with_features: bool) -> Any:
        x = torch.linspace(-1.0, 1.0, 4, requires_grad=True)
        features, logits = function(x)
        return torch.autograd.grad(logits.sum(), [x, features] if with_features else [x])

    compiled = dovetail.compile(features_and_logits, backend="aten")
    wanted = [False, True, False, True]
    expected = [both(features_and_logits, flag) for flag in wanted]
    with warnings.catch_warnings(), dovetail.compiled_autograd(backend="aten"):
        warnings.simplefilter("ignore")
        assert str([both(compiled, flag) for flag in wanted]) == str(expected)


def doubled_in_place(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.mul_(2)
    return x * weight, x.sin()


@pytest.mark.parametrize("number", [0, 1])
def test_an_argument_that_is_computed_and_written_to(number: int) -> None:
    def trained(function: Callable[..., Any]) -> Any:
        x, weight = (torch.linspace(1.0, 2.0, 4, requires_grad=True) for _ in range(2))
        function(x * 1, weight)[number].sum().backward()
        return x.grad, weight.grad

    compiled = dovetail.compile(doubled_in_place, backend="aten")
    expected = trained(doubled_in_place)
    with dovetail.compiled_autograd(backend="aten") as backwards:
        assert str(trained(compiled)) == str(expected)
        assert str(trained(compiled)) == str(expected)
    assert backwards.captures


@pytest.mark.parametrize("with_leaf", [False, True])
def test_the_gradient_of_a_tensor_with_a_hook_is_asked_for(with_leaf: bool) -> None:
    def asked() -> Any:
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda gradient: gradient * 10)
        return torch.autograd.grad((y * 3).sum(), [y, x] if with_leaf else [y])

    expected = asked()
    with warnings.catch_warnings(), dovetail.compiled_autograd(backend="aten"):
        warnings.simplefilter("ignore")
        assert str(asked()) == str(expected)
        assert str(asked()) == str(expected)
