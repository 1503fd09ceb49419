"""The gradient of cross entropy, without a tensor of zeros to scatter into."""

from __future__ import annotations

import pytest
import torch

from dovetail.backends.inductor.decompositions import nll_loss_backward, wanted_decompositions
from tests.differential import same

IGNORED = 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("target", [[1, 0, IGNORED, 3, 1], [IGNORED] * 5, [], 3, IGNORED])
def test_it_is_the_kernels(dtype: torch.dtype, reduction: int, weighted: bool, target: list[int] | int) -> None:
    goal = torch.tensor(target, dtype=torch.int64)
    scores = torch.randn(*goal.shape, 4).to(dtype)
    weight = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=dtype) if weighted else None
    forward = torch.ops.aten.nll_loss_forward.default
    loss, total = forward(scores, goal, weight, reduction, IGNORED)
    gradient = torch.full_like(loss, 1.5)
    arguments = (gradient, scores, goal, weight, reduction, IGNORED, total)
    same(torch.ops.aten.nll_loss_backward.default(*arguments), nll_loss_backward(*arguments), exact=False)


def test_inductor_takes_it() -> None:
    assert wanted_decompositions()[torch.ops.aten.nll_loss_backward.default] is nll_loss_backward
