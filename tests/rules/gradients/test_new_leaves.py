"""Leaves that a function makes itself: ``points = x.detach().requires_grad_()``, and what of them leaves the function."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Tensor = torch.Tensor


def with_gradient(x: Tensor, net: Any) -> Any:
    points = x.detach().clone().requires_grad_()
    net(points).square().mean().backward()
    return points, points.grad


def detached_with_gradient(x: Tensor, net: Any) -> Any:
    points = x.detach()
    points.requires_grad = True
    net(points).square().mean().backward()
    return points


def kept(x: Tensor, net: Any) -> Any:
    points = x.detach().requires_grad_()
    net(points).sum().backward()
    net.kept = [points, points]
    return net.kept[0] is net.kept[1]


def replaced_cache(x: Tensor, net: Any) -> Any:
    old = net.__dict__.setdefault("cache", {})
    points = x.detach().requires_grad_()
    old["points"] = points
    (slope,) = torch.autograd.grad(net(points).sum(), points, create_graph=True)
    net.__dict__["cache"] = {}
    loss = slope.square().mean()
    loss.backward()
    return loss.detach(), old


def detached(x: Tensor, net: Any) -> Any:
    return x.detach().requires_grad_(), x


def leaf_view(x: Tensor, net: Any) -> Any:
    return x.reshape(-1)[1:].detach().requires_grad_()


ONE_GRAPH = [with_gradient, detached_with_gradient, kept, replaced_cache, detached, leaf_view]


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def differentiates(value: Any) -> None:
    """A leaf that has left the function is one that gradients go to."""
    leaves = [
        leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    roots = [leaf.sin().sum() for leaf in leaves]
    if roots:
        torch.stack(roots).sum().backward(retain_graph=True)


def compared(function: Callable[..., Any], requires_grad: bool, **options: Any) -> Any:
    expected_net, found_net = net(), net()
    compiled = dovetail.compile(function, backend="aten", **options)
    for size in (3, 4):
        inputs = [torch.linspace(-1, 1, 2 * size).reshape(size, 2).requires_grad_(requires_grad) for _ in range(2)]
        expected, found = function(inputs[0], expected_net), compiled(inputs[1], found_net)
        for _ in range(2):
            same(expected, found)
            same(inputs[0].grad, inputs[1].grad)
            for left, right in zip(expected_net.parameters(), found_net.parameters(), strict=True):
                torch.testing.assert_close(left.grad, right.grad)
            same(expected_net.__dict__.get("kept"), found_net.__dict__.get("kept"))
            differentiates(expected)
            differentiates(found)
    return compiled


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("function", ONE_GRAPH)
@pytest.mark.sampled(4)
def test_one_graph(function: Callable[..., Any], requires_grad: bool) -> None:
    compared(function, requires_grad, fullgraph=True)


def beside_what_is_computed(x: Tensor, net: Any) -> Any:
    points = x.detach().clone().requires_grad_()
    return net(points), points


def across_a_break(x: Tensor, net: Any) -> Any:
    points = x.detach()
    points.requires_grad = True
    energy = net(points)
    count = int((x > -9).sum())
    (slope,) = torch.autograd.grad(energy.sum(), points, retain_graph=True)
    return energy / count, slope, points


@pytest.mark.parametrize("function", [beside_what_is_computed, across_a_break])
def test_eager_makes_the_leaf_where_the_graph_cannot_keep_it(function: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dovetail.errors.GraphBreakWarning)
        compiled = compared(function, False)
    assert compiled.entries[0].resume_point is not None
    assert all(part.entries[0].run is not None for part in compiled.continuations())


def test_a_strategy_given_up_keeps_one_graph_apart() -> None:
    with pytest.raises(dovetail.errors.GraphBreakError, match="returned beside what is computed"):
        dovetail.compile(beside_what_is_computed, backend="aten", fullgraph=True)(torch.ones(2, 2), net())
    with pytest.raises(dovetail.errors.CaptureError, match="returned beside what is computed"):
        dovetail.capture(beside_what_is_computed, (torch.ones(2, 2), net()))
