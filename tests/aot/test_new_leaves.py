"""Tensors that the function makes with requires_grad and hands out: leaves of their own, with the gradients they got inside."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Tensor = torch.Tensor


def detached(x: Tensor) -> Any:
    return x.detach().requires_grad_(), x * 2


def part(x: Tensor) -> Any:
    return x.detach()[1:].requires_grad_(), x[1:]


def turned(x: Tensor) -> Any:
    return (x.detach().reshape(2, 2).t().requires_grad_(),)


def by_data(x: Tensor) -> Any:
    return x.data.requires_grad_(), x.data


def two(x: Tensor) -> Any:
    return x.detach().requires_grad_(), x.detach().requires_grad_(), x.detach()


def beside_its_origin(x: Tensor) -> Any:
    y = x * 2
    return y.detach()[:2].requires_grad_(), y


def beside_what_follows(x: Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    return leaf, (leaf * x).sum()


def part_beside_what_follows(x: Tensor) -> Any:
    leaf = x.detach()[:2].requires_grad_()
    return leaf, (leaf * x[:2]).sum()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "function", [detached, part, turned, by_data, two, beside_its_origin, beside_what_follows, part_beside_what_follows]
)
def test_detached_leaves_in_the_memory_of_another_tensor(function: Callable[..., Any], requires_grad: bool) -> None:
    def run(function: Callable[..., Any]) -> list[Any]:
        x = torch.arange(4.0).requires_grad_(requires_grad)
        results = function(x)
        seen: list[Any] = [item.is_leaf for item in results]
        for item in reversed(results):
            if item.requires_grad:
                (item * 3).sum().backward()
        seen += [item.grad for item in results if item.is_leaf]
        with torch.no_grad():
            results[0].add_(1)
        return [*seen, x.grad, x, results]

    compiled = dovetail.compile(function, backend="aten")
    for _ in range(2):
        same(run(function), run(compiled))
    if "beside" not in function.__name__:
        assert dovetail.events_of(compiled).count("graph break") == 0


def made(x: Tensor) -> Any:
    leaf = torch.zeros(4, requires_grad=True)
    ((leaf + x) ** 2).sum().backward()
    return leaf


def copied(x: Tensor) -> Any:
    leaf = x.detach().clone().requires_grad_()
    (leaf * leaf * x).sum().backward()
    (leaf * 3).sum().backward()
    return leaf


def shared(x: Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    (leaf * leaf).sum().backward()
    return leaf, x + 1


def with_its_gradient(x: Tensor) -> Any:
    leaf = x.detach().clone().requires_grad_()
    (leaf * leaf).sum().backward()
    return [leaf, {"leaf": leaf}, leaf.grad]


@pytest.mark.parametrize("function", [made, copied, shared, with_its_gradient])
def test_a_leaf_leaves_with_its_gradient(function: Callable[..., Any]) -> None:
    def run(function: Callable[..., Any]) -> list[Any]:
        x = torch.linspace(0, 1, 4).requires_grad_()
        found = function(x)
        leaf = found if isinstance(found, Tensor) else found[0]
        seen = [leaf.is_leaf, leaf.grad.clone(), None if x.grad is None else x.grad.clone()]
        if isinstance(found, list):
            assert found[1]["leaf"] is leaf and found[2] is leaf.grad
        (leaf * 5).sum().backward()
        return [*seen, leaf.grad, leaf, x.grad]

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for _ in range(2):
        same(run(function), run(compiled))


def test_a_leaf_in_a_dictionary_that_was_replaced() -> None:
    cache = types.SimpleNamespace(store={})
    first = cache.store

    def step(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        cache.store["x"] = x
        (slope,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        cache.store = {}
        loss = slope.square().sum()
        loss.backward()
        return loss.detach()

    compiled = dovetail.compile(step, backend="aten", fullgraph=True)
    for function in (step, compiled, compiled):
        first.clear()
        cache.store = first
        loss = function(torch.ones(3))
        assert loss == 27.0 and cache.store == {} and list(first) == ["x"]
        assert torch.equal(first["x"].grad, torch.full((3,), 36.0))


def test_the_last_item_of_a_list_that_was_empty_is_set() -> None:
    seen: list[Any] = []

    def function(x: Tensor) -> Tensor:
        seen.append(x)
        seen[-1] = None
        return x * len(seen)

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    assert seen == [None]


def unrecorded_part(x: Tensor) -> Any:
    with torch.no_grad():
        return x[1:], x.view_as(x).view(-1)


def unrecorded_part_written(x: Tensor) -> Any:
    with torch.no_grad():
        x.mul_(2)
        return x[1:]


def unrecorded_part_of_result(x: Tensor) -> Any:
    y = (x * 2)[1:]
    with torch.no_grad():
        return y, y[1:]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(4).requires_grad_(),
        lambda: torch.ones(5)[:4].requires_grad_(),
        lambda: torch.nn.Parameter(torch.ones(5)[:4]),
        lambda: torch.ones(5, requires_grad=True)[:4],
        lambda: torch.ones(5)[:4],
    ],
    ids=["leaf", "leaf that is a view", "parameter", "view of a leaf", "view"],
)
@pytest.mark.parametrize("function", [unrecorded_part, unrecorded_part_written, unrecorded_part_of_result])
def test_an_unrecorded_view_requires_a_gradient_where_the_base_of_its_base_does(
    function: Callable[..., Any], make: Callable[[], Tensor]
) -> None:
    compiled = dovetail.compile(function, backend="aten")
    compiled(torch.ones(4).requires_grad_())  # what is known of one input says nothing of the next
    same(function(make()), compiled(make()))


def flag_of_unrecorded_part_set(x: Tensor) -> Any:
    with torch.no_grad():
        part = x[1:]
    return part.requires_grad_()


def flag_of_unrecorded_part_read(x: Tensor) -> Any:
    with torch.no_grad():
        part = x[1:]
        return part * 2 if part.requires_grad else part * 3


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("function", [flag_of_unrecorded_part_set, flag_of_unrecorded_part_read])
def test_the_flag_of_an_unrecorded_view_is_that_of_the_base_of_its_base(function: Callable[..., Any]) -> None:
    """A leaf that is a view requires a gradient, and its base none."""
    compiled = dovetail.compile(function, backend="aten")
    for make in (
        lambda: torch.ones(4).requires_grad_(),
        lambda: torch.ones(5)[:4].requires_grad_(),
        lambda: torch.ones(4),
        lambda: torch.ones(5)[:4].requires_grad_(),
        lambda: torch.ones(4).requires_grad_(),
    ):
        same(function(make()), compiled(make()))
