"""Whether two computations of the same gradients agree, in each type of numbers."""

from __future__ import annotations

import pytest
import torch

from dovetail.higher_order.backward import agree


@pytest.mark.parametrize(
    ("dtype", "roundings"), [(torch.float64, 1000), (torch.float32, 1000), (torch.bfloat16, 10), (torch.float16, 30)]
)
def test_gradients_that_cancel_out_agree_up_to_roundings_of_the_largest(dtype: torch.dtype, roundings: int) -> None:
    large, none = torch.full((3,), 8.0, dtype=dtype), torch.zeros(3, dtype=dtype)
    within = torch.full_like(none, 8 * roundings * torch.finfo(dtype).eps)
    assert agree([large, within * 0.5], [large, none])
    assert not agree([large, within * 2], [large, none])
    assert not agree([large, large], [large, none])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_another_number_does_not_agree(dtype: torch.dtype) -> None:
    large, half = torch.full((3,), 8.0, dtype=dtype), torch.full((3,), 4.0, dtype=dtype)
    assert not agree([half, large], [large, large])
    assert not agree([large, None], [large, large])
    assert agree([large, None], [large, torch.zeros_like(large)])
