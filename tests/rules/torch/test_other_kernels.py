"""Functions that torch computes by another kernel while they are traced."""

from __future__ import annotations

import operator

import pytest
import torch

from tests.differential import check_calls


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 2), (4, 8, 3)])
def test_pooled_rows_lie_as_eagers(shape: tuple[int, ...], requires_grad: bool) -> None:
    x = torch.rand(shape).transpose(1, 2).requires_grad_(requires_grad)
    check_calls(lambda x: torch.nn.functional.max_pool1d(x, 2), [(x,), (x * 2,)])


def test_a_view_filled_with_a_value_that_has_a_gradient() -> None:
    def fill(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[1:].masked_fill_(x[1:] > 0, value=value)
        y[0].masked_fill_(x[0] > 0, value.exp())
        return y.sin()

    x = torch.arange(2000.0).sin().reshape(4, 500).requires_grad_()
    check_calls(fill, [(x, torch.tensor(0.3, requires_grad=True)), (x, torch.tensor(0.3))])


@pytest.mark.parametrize("batches", [(5, 1), (1, 5), (1, 1), (5, 5)])
@pytest.mark.parametrize("needed", [(False, False), (True, False), (False, True), (True, True)])
def test_products_with_one_matrix_for_the_batch_round_as_eagers(
    batches: tuple[int, int], needed: tuple[bool, bool]
) -> None:
    def products(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        z = x.exp()
        z = z @ y
        return [
            x @ y.mT,
            torch.matmul(x, y),
            x.matmul(y),
            torch.linalg.matmul(x, y),
            operator.matmul(x, y),
            z,
            x.__matmul__(y),
        ]

    def made(scale: float) -> tuple[torch.Tensor, ...]:
        numbers = torch.Generator().manual_seed(0)
        shapes = [(count, 7, 7) for count in batches]
        drawn = [torch.randn(shape, generator=numbers) * scale for shape in shapes]
        return tuple(item.requires_grad_(flag) for item, flag in zip(drawn, needed, strict=True))

    check_calls(products, [made(1.0), made(0.3)])


@pytest.mark.parametrize("needed", [(False, False, False), (True, False, False), (False, False, True)])
def test_attention_with_keys_for_the_batch_rounds_as_eagers(needed: tuple[bool, bool, bool]) -> None:
    numbers = torch.Generator().manual_seed(0)
    shapes = [(3, 5, 8), (1, 6, 8), (1, 6, 8)]
    given = [torch.randn(shape, generator=numbers) for shape in shapes]
    given = [item.requires_grad_(flag) for item, flag in zip(given, needed, strict=True)]
    check_calls(torch.nn.functional.scaled_dot_product_attention, [tuple(given)])
