"""Resizing by a scale that is not the quotient of the sizes: values and gradients are eager's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import dovetail
from tests.differential import same

_MODES = {1: ("nearest", "linear"), 2: ("nearest", "bilinear", "nearest-exact"), 3: ("nearest", "trilinear")}


@pytest.mark.parametrize(("dims", "mode"), [(dims, mode) for dims, modes in _MODES.items() for mode in modes])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.sampled(15)
def test_scales(dims: int, mode: str, channels_last: bool) -> None:
    layout = torch.channels_last if channels_last and dims == 2 else torch.contiguous_format
    cases = [(size, scale) for size in (3, 5) for scale in (0.75, 1.1, 1.7, 2.0, 2.3)]
    inputs = [
        torch.randn(2, 3, *[size] * dims, dtype=torch.double).contiguous(memory_format=layout).requires_grad_()
        for size, _ in cases
    ]

    def resized(values: list[torch.Tensor]) -> list[torch.Tensor]:
        return [F.interpolate(x, scale_factor=scale, mode=mode) for x, (_, scale) in zip(values, cases, strict=True)]

    compiled = dovetail.compile(resized, backend="inductor", fullgraph=True)
    expected = resized(inputs)
    tangents = [torch.randn_like(item) for item in expected]
    found = compiled(inputs)
    same(expected, found, "values", exact=False)
    same(
        torch.autograd.grad(expected, inputs, tangents),
        torch.autograd.grad(found, inputs, tangents),
        "gradients",
        exact=False,
    )
