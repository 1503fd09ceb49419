"""A list of tensors that holds one of them twice, as ``state_dict().values()`` does of tied weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.differential import check_calls

pytestmark = pytest.mark.usefixtures("quiet")


def average(mean: Tensor, weight: Tensor) -> Tensor:
    torch._foreach_lerp_([mean, mean], [weight, weight], 0.5)
    return mean + 0


def by_another(mean: Tensor, weight: Tensor) -> Tensor:
    torch._foreach_mul_([mean, weight], [weight, mean])
    return mean * weight


def a_row(mean: Tensor, weight: Tensor) -> Tensor:
    made = weight * 1
    torch._foreach_add_([made, made[0]], 1)
    return made


def itself(mean: Tensor, weight: Tensor) -> Tensor:
    torch._foreach_add_([mean, weight], [mean, weight])
    return mean * weight


@pytest.mark.parametrize("function", [average, by_another, a_row, itself])
def test_a_list_that_holds_a_tensor_twice(function: Callable[..., Tensor]) -> None:
    apart, one = (torch.full((2, 2), 3.0), torch.full((2, 2), 5.0)), torch.full((2, 2), 2.0)
    check_calls(function, [apart, (one, one), apart], fullgraph=False)
