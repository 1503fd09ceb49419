"""Images and signals of several sizes: one graph for all of them, whose results and gradients are eager's, also in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dovetail
from tests.differential import same

torch.manual_seed(0)
WEIGHT = torch.randn(4, 3, 3, 3)


def everything(x: Tensor) -> Tensor:
    """What Inductor makes constants of, and a crop whose strides are not those of a new tensor."""
    small = F.conv2d(x, WEIGHT, stride=2, padding=1).relu()
    large = F.conv_transpose2d(small, WEIGHT, stride=2)[..., : x.shape[2], : x.shape[3]]
    doubled = F.interpolate(F.silu(small), scale_factor=2, mode="nearest")
    pooled = [F.adaptive_avg_pool2d(doubled, 2).flatten(1), F.adaptive_max_pool2d(doubled, 3).flatten(1)]
    return torch.cat([*pooled, (large * x).mean((2, 3))], 1)


def images(x: Tensor) -> Tensor:
    return F.conv2d(x, WEIGHT, padding=1).relu().mean((2, 3))


def channels_last(x: Tensor) -> Tensor:
    return F.conv2d(x.contiguous(memory_format=torch.channels_last), WEIGHT, padding=1).relu() * 2


def signals(x: Tensor) -> Tensor:
    return F.conv1d(x.flatten(2), WEIGHT[:, :, 0], padding=1).relu().mean(2)


def volumes(x: Tensor) -> Tensor:
    return F.conv3d(x[:, None], WEIGHT[:, :1, None], padding=1).relu().mean((2, 3, 4))


def cropped(x: Tensor) -> Tensor:
    return F.conv_transpose2d(x.sin(), WEIGHT[:3], stride=2)[..., 1 : x.shape[2], : x.shape[3]].cos().square()


def gated(x: Tensor) -> Tensor:
    return F.glu(torch.cat([x, x.sin()], 3), 3).sum(1)


PROGRAMS: list[Callable[[Tensor], Tensor]] = [everything, images, channels_last, signals, volumes, cropped, gated]
SIZES = [(8, 10), (12, 14), (14, 10), (20, 22), (10, 16)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_graph_for_all_sizes(program: Callable[[Tensor], Tensor]) -> None:
    compiled = dovetail.compile(program, backend="inductor", fullgraph=True, tiers="wait")
    for height, width in SIZES:
        x = torch.randn(2, 3, height, width, requires_grad=True)
        expected, found = program(x), compiled(x)
        same(expected, found, exact=False)
        same(*(torch.autograd.grad(value.square().sum(), x) for value in (expected, found)), exact=False)
    events = dovetail.events_of(compiled)
    assert events.count("static shapes") == events.count("backend given up") == 0
    # Without the rules: one for each size.
    assert events.count("capture") <= 3
