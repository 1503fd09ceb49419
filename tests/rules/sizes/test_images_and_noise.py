"""Operators whose own kernels for examples ask for plain sizes: images that are resized, noise of the exponential kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.reports.explanation import compiled_function
from tests.differential import same

PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bilinear": lambda x: F.interpolate(x, size=(8, 9), mode="bilinear", align_corners=False),
    "bilinear by factors": lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "linear": lambda x: F.interpolate(x.flatten(2), scale_factor=1.3, mode="linear"),
    "trilinear": lambda x: F.interpolate(x.unsqueeze(1), size=(5, 6, 7), mode="trilinear"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.5),
    "nearest exact": lambda x: F.interpolate(x, size=7, mode="nearest-exact"),
    "a size of the input": lambda x: F.interpolate(x, size=x.shape[-1] * 2),
    "area": lambda x: F.interpolate(x, size=(3, 3), mode="area"),
    "module": torch.nn.Upsample(scale_factor=2),
    "exponential": lambda x: x * torch.empty_like(x).exponential_(1.5),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, hard=True),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.sampled(6)
def test_two_graphs_for_all_sizes(name: str) -> None:
    program = PROGRAMS[name]
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for size in (2, 3, 5, 4):
        x = torch.randn(size, 3, size + 2, size * 2, generator=torch.Generator().manual_seed(size))
        results = []
        for function in (program, compiled):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(1)
            y = function(leaf)
            (y * torch.arange(float(y.numel())).view(y.shape)).sum().backward()
            results.append((y.detach(), y.stride(), leaf.grad))
        same(*results, f"size {size}")
    assert len(compiled_function(compiled).entries) == 2


def test_a_wrong_size_raises_as_in_eager() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=(8, 8, 8), mode="bilinear")

    compiled = dovetail.compile(program, backend="aten", dynamic=True)
    with pytest.raises(ValueError, match="spatial dimensions"):
        compiled(torch.ones(2, 3, 4, 4))
