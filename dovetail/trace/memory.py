"""How tensors lie in memory."""

from __future__ import annotations

import torch


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a real tensor may share one place in memory.

    >>> may_overlap_itself(torch.ones(3, 1).expand(3, 4)), may_overlap_itself(torch.ones(3, 4).t()[:, ::2])
    (True, False)
    """
    if tensor.numel() < 2:
        return False
    reach = 0
    for step, size in sorted(
        (step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False
