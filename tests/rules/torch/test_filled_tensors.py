"""Tensors that torch fills in another way while it is traced."""

from __future__ import annotations

import torch

import dovetail
from tests.differential import same


def test_one_hot_is_contiguous() -> None:
    def program(classes: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(classes, num_classes=4)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for classes in (torch.arange(3), torch.arange(4).view(2, 2).T, torch.ones(1, 1, dtype=torch.int64).expand(3, 2)):
        same(program(classes), compiled(classes))
