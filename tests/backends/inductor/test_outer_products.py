"""Products over a single column, as products of elements."""

from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail.backends.inductor.decompositions import outer_products

_aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (1, 5), (7, 1), (1, 1), (0, 3)])
@pytest.mark.sampled(8)
def test_values_are_the_matrix_products(dtype: torch.dtype, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    one, other = torch.randn(rows, 1, dtype=dtype), torch.randn(1, columns, dtype=dtype)

    def program(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.mm(one, other).tanh() * 2

    compiled = dovetail.compile(program, backend="inductor", fullgraph=True)
    torch.testing.assert_close(compiled(one, other), program(one, other))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0])
def test_values_that_are_not_finite_meet_every_factor(value: float) -> None:
    one, other = torch.tensor([[value], [1.0]]), torch.tensor([[0.0, -2.0, float("inf")]])
    compiled = dovetail.compile(lambda a, b: a @ b + 1, backend="inductor", fullgraph=True)
    torch.testing.assert_close(compiled(one, other), one @ other + 1, equal_nan=True)


@pytest.mark.parametrize(("features", "outputs"), [(1, 8), (8, 1), (1, 1), (3, 4)])
@pytest.mark.sampled(4)
def test_gradients_of_layers_with_one_input_or_output(features: int, outputs: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(features, outputs).double()
    x = torch.randn(16, features, dtype=torch.float64, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layer(x).tanh().square().sum()

    expected = torch.autograd.grad(loss(x), [x, *layer.parameters()])
    compiled = dovetail.compile(loss, backend="inductor", fullgraph=True)
    for found, right in zip(torch.autograd.grad(compiled(x), [x, *layer.parameters()]), expected, strict=True):
        torch.testing.assert_close(found, right)


def test_only_the_product_over_one_column_is_taken_apart() -> None:
    rules, given = outer_products({}), torch.ones(3)
    assert rules[_aten.mm.default](torch.ones(4, 2), torch.ones(2, 3)) is NotImplemented
    assert rules[_aten.addmm.default](given, torch.ones(4, 2), torch.ones(2, 3)) is NotImplemented
    # Factors, and sums in half precision, are the library's.
    assert rules[_aten.addmm.default](given, torch.ones(4, 1), torch.ones(1, 3), beta=0) is NotImplemented
    assert rules[_aten.addmm.default](given.half(), torch.ones(4, 1).half(), torch.ones(1, 3).half()) is NotImplemented
    assert torch.equal(rules[_aten.addmm.default](given, torch.ones(4, 1), torch.ones(1, 3)), torch.full((4, 3), 2.0))


def test_what_it_leaves_alone_goes_to_the_rule_before() -> None:
    before = {
        _aten.mm.default: lambda one, other: "mm",
        _aten.addmm.default: lambda start, one, other, **factors: factors,
    }
    rules = outer_products(before)
    assert rules[_aten.mm.default](torch.ones(4, 2), torch.ones(2, 3)) == "mm"
    assert rules[_aten.addmm.default](torch.ones(3), torch.ones(4, 1), torch.ones(1, 3), alpha=2) == {"alpha": 2}


@pytest.mark.slow
def test_a_symbolic_number_of_columns_is_no_column() -> None:
    compiled = dovetail.compile(lambda a, b: (a @ b).sin(), backend="inductor", dynamic=True)
    for columns in (2, 3, 1):
        a, b = torch.randn(4, columns), torch.randn(columns, 5)
        torch.testing.assert_close(compiled(a, b), (a @ b).sin())
