"""Gradients and results that cannot be traced bit for bit run as opaque operators; sizes that depend on data are checked."""

from __future__ import annotations

import warnings

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError, OutgrownError
from tests.differential import compare_call, same


def _both(function, *values):
    """Compare the results and gradients of a call with eager's; returns the compiled function."""
    compiled = dovetail.compile(function, fullgraph=True, backend="aten")
    return lambda *given: _same_gradients(function, compiled, *(given or values))


def _same_gradients(function, compiled, *values):
    compare_call(function, compiled, [value.clone().requires_grad_(value.is_floating_point()) for value in values])
    return compiled


MATRIX = torch.tensor([[0.3, 1.7, -2.1], [0.0, 1.7, 0.11], [0.9, -0.4, 1.7]])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.prod(),
        lambda x: x.prod(-1, keepdim=True),
        lambda x: torch.prod(x, 0, dtype=torch.float64),
        lambda x: (x * 3).max() + x.min(),
        lambda x: x.sin().median() * x.nanmedian(),
        lambda x: x.masked_fill(x > 0.5, x.mean()),
        lambda x: torch.cov(x),
        lambda x: torch.corrcoef(x.exp()),
        lambda x: torch.nn.functional.gaussian_nll_loss(x, x.cos(), x.square()),
    ],
)
def test_gradients_are_eagers_to_the_last_bit(function) -> None:
    compiled = _both(function, MATRIX)()
    _same_gradients(function, compiled, MATRIX.flip(0) * 1.3)


def test_a_gradient_inside_goes_through_the_opaque_operator() -> None:
    def penalty(x):
        (gradient,) = torch.autograd.grad(x.prod() + x.max(), x, create_graph=True)
        return gradient.square().sum()

    value = MATRIX.flatten()[:4] + 0.5
    _both(penalty, value)()


def test_a_capture_without_a_backend_keeps_the_traced_formula() -> None:
    joint = dovetail.capture(lambda x: x.prod(), (torch.rand(3, requires_grad=True),))
    assert joint.inexact == ("ProdBackward0",)
    assert not joint.graph.find_nodes(op="call_function", target=torch.ops.dovetail.whole_call.default)


def test_an_opaque_result_of_another_size_runs_the_call_eagerly() -> None:
    def function(x):
        return torch.nn.functional.one_hot(x) * 2

    compiled = dovetail.compile(function, fullgraph=True, backend="aten")
    for values in ([0, 1, 2], [2, 2, 1]):
        same(function(torch.tensor(values)), compiled(torch.tensor(values)))
    for _ in range(2):
        same(function(torch.tensor([3, 0, 0])), compiled(torch.tensor([3, 0, 0])))


def test_sizes_that_depend_on_data_are_one_graph() -> None:
    def function(x):
        positive = x[x > 0]
        return (positive * 2).mean() + torch.stack([positive, positive.exp()]).sum()

    compiled = dovetail.compile(function, fullgraph=True, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for values in ([1.0, 2.0, 3.0, -4.0], [1.0, 2.0, -3.0, -4.0], [1.0, 2.0, 3.0, 4.0]):
            _same_gradients(function, compiled, torch.tensor(values))
    _same_gradients(function, compiled, torch.tensor([1.0, -2.0, -3.0, -4.0]))


def test_a_call_that_has_outgrown_its_graph_draws_eagers_random_numbers() -> None:
    def function(x):
        noise = torch.rand(3)
        return x[x > 0].sum() * 2 + noise.sum(), torch.nonzero(x) + 1

    compiled = dovetail.compile(function, fullgraph=True, backend="aten")
    compiled(torch.tensor([1.0, 2.0, 3.0]))
    value = torch.tensor([1.0, 0.0, 0.0])
    torch.manual_seed(3)
    expected, state = function(value), torch.get_rng_state()
    torch.manual_seed(3)
    same(expected, compiled(value))
    assert torch.equal(state, torch.get_rng_state())


def test_a_branch_on_such_a_size_is_still_refused() -> None:
    def function(x):
        found = torch.nonzero(x)
        return found + 1 if found.shape[0] > 2 else found

    with pytest.raises(GraphBreakError):
        dovetail.compile(function, fullgraph=True, backend="aten")(torch.ones(4))


def test_functions_that_are_not_pure_are_not_called_whole() -> None:
    with pytest.raises(GraphBreakError):
        dovetail.compile(lambda x: torch.tensor_split(x, torch.tensor([1, 2])), fullgraph=True, backend="aten")(
            torch.ones(4)
        )


def test_reflected_operators_called_by_name() -> None:
    _both(lambda x: x.__rsub__(3.0) + x.__rpow__(2.0) + x.__rmatmul__(x), torch.rand(3, 3))()


def test_the_error_says_what_has_outgrown() -> None:
    assert "runs eagerly" in str(OutgrownError("sizes", advice="the call runs eagerly"))
