"""What a graph with its own backward computes again in it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional

import dovetail
from dovetail.aot.nodes import BACKWARD_RUN
from dovetail.backends.aten import compile_aten
from dovetail.passes.whole_step import compute_again_in_backward
from tests.differential import same


def waves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Between the products, a chain of which every link is needed again."""
    return ((x @ weight).sin().cos().exp() @ weight).tanh()


def one_backward(x: torch.Tensor, weight: torch.Tensor) -> Any:
    return torch.autograd.grad(waves(x, weight).square().sum(), (x, weight))


def two_backwards(x: torch.Tensor, weight: torch.Tensor) -> Any:
    first = torch.autograd.grad(waves(x, weight).sum(), weight)[0]
    second = torch.autograd.grad(waves(x * 2, weight - 0.1 * first).square().sum(), (x, weight))
    return [first, *second]


def second_order(x: torch.Tensor, weight: torch.Tensor) -> Any:
    (slope,) = torch.autograd.grad(waves(x, weight).sum(), x, create_graph=True)
    return [slope.detach(), *torch.autograd.grad(slope.square().sum(), (x, weight))]


def with_dropout(x: torch.Tensor, weight: torch.Tensor) -> Any:
    y = torch.nn.functional.dropout(waves(x, weight), 0.5)
    return torch.autograd.grad((y @ weight).square().sum(), weight)


def read_later(x: torch.Tensor, weight: torch.Tensor) -> Any:
    middle = (x @ weight).sin()
    gradients = torch.autograd.grad((middle.cos() @ weight).sum(), weight)
    return [*gradients, middle.detach() + 1]


def with_a_number(x: torch.Tensor, weight: torch.Tensor) -> Any:
    y = (x @ weight).sin() * x.shape[0]
    return torch.autograd.grad((y.exp() @ weight).sum() / x.shape[0], weight)


FUNCTIONS = [one_backward, two_backwards, second_order, with_dropout, read_later, with_a_number]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(6, 6, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_graph_computes_the_same(function: Any) -> None:
    joint = dovetail.capture(function, inputs())
    arguments = [item.detach() for item in inputs()]
    torch.manual_seed(1)
    expected = joint.graph_module(*arguments)
    again = compute_again_in_backward(joint.graph_module.graph)
    joint.graph_module.graph.lint()
    joint.graph_module.recompile()
    torch.manual_seed(1)
    same(expected, joint.graph_module(*arguments))
    assert all(node.meta[BACKWARD_RUN] >= 0 and node.users for node in again)
    assert not any(torch.Tag.nondeterministic_seeded in node.target.tags for node in again)  # type: ignore[union-attr]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.sampled(4)
def test_results_are_those_of_eager(function: Any, dynamic: bool) -> None:
    # Anything that promises no eager's bits.
    def backend(graph: torch.fx.GraphModule, inputs: Any, *, kind: Any, options: Any) -> Any:
        return compile_aten(graph, inputs, kind=kind)

    compiled = dovetail.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    for _ in range(2):
        sides = []
        for run in (function, compiled):
            torch.manual_seed(5)
            sides.append(run(*inputs()))
        same(*sides, exact=False)


def names_again(function: Any) -> list[str]:
    joint = dovetail.capture(function, inputs())
    return [str(node.target) for node in compute_again_in_backward(joint.graph_module.graph)]


def test_a_chain_between_products_is_computed_from_the_product() -> None:
    # The exponential is an operand of products on both sides, and lies in memory anyway.
    again = names_again(one_backward)
    assert "aten.sin.default" in again
    assert not {"aten.mm.default", "aten.exp.default"} & set(again)


def test_what_is_read_after_the_backward_is_not_computed_again() -> None:
    assert "aten.sin.default" not in names_again(read_later)


def test_nothing_is_computed_again_in_a_graph_that_writes_in_place() -> None:
    joint = dovetail.capture(one_backward, inputs())
    x = joint.graph_module.graph.find_nodes(op="placeholder")[0]
    assert "aten.sin.default" in names_again(one_backward)
    joint.call(torch.ops.aten.copy_.default, x, x)
    assert compute_again_in_backward(joint.graph_module.graph) == []


def test_each_backward_has_a_number_of_its_own() -> None:
    for function, count in ((one_backward, 1), (two_backwards, 2), (second_order, 2)):
        nodes = dovetail.capture(function, inputs()).graph_module.graph.nodes
        numbers = [node.meta[BACKWARD_RUN] for node in nodes if BACKWARD_RUN in node.meta]
        assert len(set(numbers)) == count
        # Between its first and its last node there is nothing else.
        assert numbers == sorted(numbers)


def _of_a_copy(features: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
    return features.exp() @ queue.detach().clone()


def _of_a_view_of_a_copy(features: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
    return features.exp() @ queue.clone().t()


def _of_a_copy_of_a_view(features: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
    return features.exp() @ queue[1:].clone()[:, :2] + queue[0].clone().sin().sum()


def _of_a_product(features: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
    return features.exp() @ (queue * 2).tanh()


def _of_functions_of_a_view(features: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
    return features.exp() * queue.t()[0].cos() + torch.where(queue[:2] > 0, features, features.sin())


def _of_what_is_kept_and_more(features: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
    other = queue.sign().abs().add(0.5)
    return (features * other[:2]).exp() * other[0].sqrt()


@pytest.mark.parametrize(
    "program",
    [
        *(_of_a_copy, _of_a_view_of_a_copy, _of_a_copy_of_a_view),
        *(_of_a_product, _of_functions_of_a_view, _of_what_is_kept_and_more),
    ],
)
@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.once("inductor")
def test_what_is_made_of_data_is_kept_where_the_data_is_written(backend: str, program: Any) -> None:
    """Eager does not keep the data itself, so the program may write to it before the backward."""
    rows = 4 if program is _of_a_copy_of_a_view else 3
    compiled = dovetail.compile(program, backend=backend, fullgraph=True, tiers="wait")
    gradients = []
    for run in (program, compiled):
        torch.manual_seed(0)
        queue, features = torch.randn(rows, 3), torch.randn(2, 3, requires_grad=True)
        for _ in range(3):
            result = run(features, queue)
            queue[:, 1] = 7.0
            result.square().sum().backward()
            queue.mul_(0.5)
        gradients.append(features.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_labels_are_kept_and_not_a_mask_of_all_classes() -> None:
    """Inductor's formula makes the mask without a tangent; eager keeps the labels, so that the mask can be made later."""

    def loss(rows: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(rows.sin(), labels) + functional.binary_cross_entropy(rows.sigmoid(), targets)

    rows = torch.randn(24, 50, requires_grad=True)
    labels, targets = torch.randint(50, (24,)), torch.rand(24, 50)
    compiled = dovetail.compile(loss, backend="inductor", fullgraph=True, tiers="wait")
    result = compiled(rows, labels, targets)
    kept = [value for value in result.grad_fn.saved_tensors if value is not None]
    assert not [value for value in kept if value.dtype == torch.bool]
    result.backward()
    expected = torch.autograd.grad(loss(rows, labels, targets), rows)[0]
    torch.testing.assert_close(rows.grad, expected)
    result = compiled(rows, labels, targets)
    labels.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


class _Queue(torch.nn.Module):
    """What its backward reads of the buffer is how many columns it has, not what they hold."""

    def __init__(self, of_parameter: bool) -> None:
        super().__init__()
        self.offset = torch.nn.Parameter(torch.randn(3), requires_grad=of_parameter)
        self.register_buffer("queue", torch.randn(3, 6))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        rows = features @ self.queue.detach().clone() + self.offset.sum()
        with torch.no_grad():
            self.queue[:, : len(features)] = features.t()[:, :3].detach()
        return rows.square().mean(1)


@pytest.mark.parametrize("of_parameter", [False, True])
@pytest.mark.parametrize("tiers", [pytest.param("never", marks=pytest.mark.slow), "wait"])
@pytest.mark.once("wait")
def test_a_size_is_kept_without_its_tensor(tiers: str, of_parameter: bool) -> None:
    """A tensor of which the backward reads the size alone may be written to before it."""
    torch.manual_seed(0)
    eager = _Queue(of_parameter)
    twin = copy.deepcopy(eager)
    compiled = dovetail.compile(twin, fullgraph=True, dynamic=True, tiers=tiers)
    for rows in (3, 2):
        gradients = []
        for run, model in ((eager, eager), (compiled, twin)):
            torch.manual_seed(rows)
            features = torch.randn(rows, 3, requires_grad=True)
            result = run(features)
            with torch.no_grad():
                model.offset.add_(1)
            result.sum().backward()
            gradients.append((features.grad, model.offset.grad, model.queue))
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)
