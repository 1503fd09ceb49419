"""Equal calls in one graph are made once, where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.passes.decompose import decompose_graph
from tests.differential import same

aten = torch.ops.aten


def count(function: Callable[..., Any], *inputs: Any) -> dict[Any, int]:
    """How often each operator is called in a function's joint graph, after its decomposition by an empty table."""
    joint = dovetail.capture(function, inputs)
    graph = decompose_graph(joint.graph_module, {}, joint.fake_mode).graph
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    return {target: targets.count(target) for target in targets}


def vector() -> torch.Tensor:
    return torch.linspace(0.1, 0.9, 6).reshape(2, 3).requires_grad_()


def three_products(x: torch.Tensor) -> torch.Tensor:
    return x.exp() * x.exp().t().sum() + x.exp()


def with_weights(h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = h.tanh()
        return (h @ q * (h @ k) + h @ v).float()


def with_noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x) * x - torch.rand_like(x) * x


def zeros_of_both_signs(x: torch.Tensor) -> torch.Tensor:
    return 2 * x.copysign(torch.full_like(x, 0.0)) + x.copysign(torch.full_like(x, -0.0))


def ones_of_two_kinds(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, 1, dtype=None) * x / torch.full_like(x, True, dtype=torch.bool)


def a_part_that_is_computed_again(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: y.exp().sin(), x, use_reentrant=False) * x.exp().sin()


def test_equal_calls_are_made_once() -> None:
    assert count(three_products, vector())[aten.exp.default] == 1


def test_casts_of_one_activation() -> None:
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    casts = count(with_weights, torch.randn(5, 4, requires_grad=True), *weights)[aten._to_copy.default]
    # Of the activation (once, where eager casts it three times), of weights and result; of as many gradients as in eager.
    assert casts == 1 + 3 + 1 + (1 + 3 + 3)


@pytest.mark.parametrize("function", [with_noise, zeros_of_both_signs, ones_of_two_kinds])
def test_calls_that_differ_are_made_each(function: Callable[..., Any]) -> None:
    found = count(function, vector())
    assert found.get(aten.rand_like.default, 0) + found.get(aten.full_like.default, 0) == 2


def test_a_checkpointed_part_is_computed_again() -> None:
    assert count(a_part_that_is_computed_again, vector())[aten.exp.default] == 2


def test_results_have_memory_of_their_own() -> None:
    compiled = dovetail.compile(lambda x: (x.exp(), x.exp(), x.exp().sum()), backend="inductor", tiers="wait")
    x = vector()
    one, other, total = compiled(x)
    assert one.data_ptr() != other.data_ptr()
    other.data.zero_()
    total.backward()
    assert torch.allclose(one, x.exp()) and torch.allclose(x.grad, x.exp())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function", [three_products, with_noise, zeros_of_both_signs, ones_of_two_kinds, a_part_that_is_computed_again]
)
def test_the_values_are_eagers(function: Callable[..., Any]) -> None:
    compiled = dovetail.compile(function, backend="inductor", tiers="wait")
    x, y = vector(), vector()
    for _ in range(2):
        torch.manual_seed(1)
        expected = function(x)
        torch.manual_seed(1)
        found = compiled(y)
        expected.sum().backward()
        found.sum().backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(y.grad, x.grad)


def test_a_step_with_casts() -> None:
    def losses(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
        optimizer = torch.optim.SGD(weights, 0.1)

        def step(h: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = with_weights(h, *weights).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        return [run(torch.ones(5, 4) / (number + 1)) for number in range(4)] + weights

    bitwise = losses(dovetail.compile(backend="aten"))
    same(losses(lambda step: step), bitwise)
    for found, expected in zip(losses(dovetail.compile(backend="inductor", tiers="wait")), bitwise, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
