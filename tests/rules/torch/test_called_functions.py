"""Functions of torch whose answers change while the compiled function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import dovetail
from dovetail.errors import EagerFallbackWarning

Tensor = torch.Tensor


class AsksWhetherTheGraphIsKept(torch.autograd.Function):
    """Another gradient where the graph is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (2 if torch._C._autograd._get_current_graph_task_keep_graph() else 3)


class AsksForTheTask(torch.autograd.Function):
    """Another gradient outside of a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (2 if torch._C._current_graph_task_id() == -1 else 3)


def twice_inside(x: Tensor) -> list[Tensor]:
    y = AsksWhetherTheGraphIsKept.apply(x).sum()
    return [torch.autograd.grad(y, x, retain_graph=keeps)[0] for keeps in (True, False)]


def twice_outside(x: Tensor) -> Tensor:
    return AsksWhetherTheGraphIsKept.apply(x).sum()


def the_task(x: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(AsksForTheTask.apply(x).sum(), x)]


def forward_mode(x: Tensor) -> list[Any]:
    found = [forward_ad._is_fwd_grad_enabled()]
    with forward_ad._set_fwd_grad_enabled(False):
        found.append(forward_ad._is_fwd_grad_enabled())
    return [x * 2, *found]


@pytest.mark.parametrize("function", [twice_inside, twice_outside, the_task, forward_mode])
def test_the_answer_is_eagers(function: Callable[[Tensor], Any]) -> None:
    def outcome(called: Callable[[Tensor], Any]) -> list[Any]:
        x = torch.ones(2, requires_grad=True)
        found = called(x)
        if isinstance(found, list):
            return [item.tolist() if isinstance(item, Tensor) else item for item in found]
        return [torch.autograd.grad(found, x, retain_graph=keeps)[0].tolist() for keeps in (True, False)]

    with pytest.warns(EagerFallbackWarning, match="asks for what changes while the function runs") as warned:
        found = outcome(dovetail.compile(function, backend="aten"))
    assert found == outcome(function)
    assert not any("report this" in str(item.message) for item in warned)
