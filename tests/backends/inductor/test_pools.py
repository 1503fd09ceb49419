"""Maxima over windows on Inductor, in every layout of the image."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import dovetail
from tests.differential import same

LAYOUTS = {
    "plain": lambda x: x.clone(),
    "last dimensions swapped": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "with gaps": lambda x: torch.cat([x, x], -1)[..., ::2],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dimensions", "window"), [(2, 2), (2, 5), (2, (5, 6)), (2, 7), pytest.param(3, 2), (3, 3), (3, (1, 5, 6))]
)
@pytest.mark.parametrize("padding", [0, 1])
def test_places_and_gradients_are_eagers(dimensions: int, window: object, layout: str, padding: int) -> None:
    if padding and isinstance(window, tuple) and 1 in window:
        padding = 0

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pool = F.max_pool2d if dimensions == 2 else F.max_pool3d
        return pool(x.sin(), window, stride=2, padding=padding, return_indices=True)  # type: ignore[operator, no-any-return]

    image = torch.randn(2, 3, *(9, 8, 7)[-dimensions:], generator=torch.Generator().manual_seed(0))
    seen = []
    for run in (program, dovetail.compile(program, backend="inductor", tiers="wait", fullgraph=True)):
        x = LAYOUTS[layout](image).requires_grad_()
        values, places = run(x)
        (values * torch.arange(values.numel()).view(values.shape)).sum().backward()
        seen.append((values.detach(), places, x.grad))
    same(*seen, exact=False)
