"""A decomposition of ``nll_loss``'s gradient that compares each element, instead of writing into a tensor of zeros.

Inductor's own decomposition scatters into zeros, which takes the memory of all scores once more (torch 2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MEAN, _NONE = 1, 0


def picked_classes() -> dict[Any, Callable[..., Any]]:
    """Return the decomposition by operator."""
    return {torch.ops.aten.nll_loss_backward.default: nll_loss_backward}


def nll_loss_backward(
    gradient: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Return the gradient of ``nll_loss`` for the scores.

    >>> scores, target = torch.zeros(2, 3), torch.tensor([2, -100])
    >>> nll_loss_backward(torch.tensor(1.0), scores, target, None, 1, -100, torch.tensor(1.0))
    tensor([[ 0.,  0., -1.],
            [ 0.,  0.,  0.]])
    """
    axis = 0 if scores.dim() < 2 else 1
    shape = [1] * scores.dim()
    shape[axis] = scores.shape[axis]
    classes = torch.arange(scores.shape[axis], device=scores.device).view(shape)
    wanted = target.unsqueeze(axis)
    value = gradient / total_weight if reduction == _MEAN else gradient
    if reduction == _NONE and scores.dim() > 1:
        value = value.unsqueeze(axis)
    if weight is not None:
        value = value * weight.view(shape)
    # Selected, not multiplied: the division by a total weight of zero may not reach other elements.
    return torch.where((classes == wanted) & (wanted != ignore_index), -value, 0).to(scores.dtype)
