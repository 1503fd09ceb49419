"""Gradients bitwise as eager's, however the tangent lies in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dovetail

Tensor = torch.Tensor


def reversed_dims(value: Tensor) -> Tensor:
    order = tuple(reversed(range(value.dim())))
    return value.permute(order).contiguous().permute(order)


TANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda g: g,
    "expanded": lambda g: torch.tensor(0.7).expand(g.shape),
    "reversed": reversed_dims,
    "last two swapped": lambda g: g.transpose(-1, -2).contiguous().transpose(-1, -2),
    "row expanded": lambda g: g[:1].expand(g.shape),
    "gaps": lambda g: torch.stack([g, g], -1)[..., 0],
}


class ChannelsLast(nn.Module):
    """Its input, with the channels last in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm 1d": (lambda: nn.BatchNorm1d(6), (5, 6)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(6), (4, 6, 5, 3)),
    "linear": (lambda: nn.Linear(6, 9), (15, 6)),
    "linear 3d": (lambda: nn.Linear(6, 9), (3, 15, 6)),
    "instance norm": (lambda: nn.InstanceNorm2d(6, affine=True), (4, 6, 5, 3)),
    "rms norm": (lambda: nn.RMSNorm(6), (15, 6)),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.ReLU()), (4, 6, 5, 3)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (4, 6, 9, 7)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (3, 7, 8)),
    "resized channels last": (
        lambda: nn.Sequential(ChannelsLast(), nn.Conv2d(64, 3, 1), nn.Upsample(None, 4.0, "bilinear")),
        (2, 64, 9, 7),
    ),
    "pooled to a size": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.AdaptiveAvgPool2d((3, 2))), (4, 6, 9, 7)),
    "shuffled pixels": (lambda: nn.Sequential(nn.Conv2d(6, 8, 1), nn.PixelShuffle(2)), (4, 6, 9, 7)),
    "padded": (
        lambda: nn.Sequential(nn.ReflectionPad2d(2), nn.Conv2d(6, 8, 1), nn.ReplicationPad2d(1), nn.GELU()),
        (4, 6, 9, 7),
    ),
    "activations": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.GLU(), nn.Mish(), nn.Hardswish(), nn.ELU()),
        (15, 6),
    ),
    "flattened": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Flatten()), (3, 5, 6)),
}


def compare(
    program: Callable[..., Tensor],
    inputs: list[Tensor],
    tangent: Callable[[Tensor], Tensor],
    runs: Any,
    keeps_strides: bool = True,
) -> None:
    found: list[list[Tensor]] = []
    for run in (program, runs):
        torch.manual_seed(1)
        result = run(*inputs)
        wanted = [item for item in inputs if item.requires_grad]
        if isinstance(program, nn.Module):
            wanted += list(program.parameters())
        torch.manual_seed(2)
        found.append(list(torch.autograd.grad(result, wanted, tangent(torch.randn(result.shape)))))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        # A gradient that has gaps in memory where the tangent is contiguous keeps those.
        assert one.stride() == other.stride() or not keeps_strides


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sampled(4)
def test_modules(name: str) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make()
    compiled = dovetail.compile(module, backend="aten", fullgraph=True)
    for tangent in TANGENTS.values():
        compare(module, [torch.randn(shape, requires_grad=True)], tangent, compiled)


def written_rows(x: Tensor, y: Tensor) -> Tensor:
    z = x * y
    z[:, 1:3] = y.exp()
    z[2] *= 3
    return (z / z.norm(dim=1, keepdim=True)).t()


PROGRAMS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "itself": (lambda x: x + 0, [(4, 6)]),
    "view": (lambda x: (x * 2).view(2, 2, 6).permute(2, 0, 1), [(4, 6)]),
    "whole view": (lambda x: x.view(24, 1).clone(), [(4, 6)]),
    "cat": (lambda x, y: torch.cat([x, y]), [(4, 6), (2, 6)]),
    "stack": (lambda x, y: torch.stack([x, y], 1), [(4, 6), (4, 6)]),
    "products": (lambda x, y: (x @ y).relu() @ y.t(), [(4, 6), (6, 3)]),
    "batched": (lambda x, y: torch.einsum("bij,kj->kbi", x, y), [(2, 4, 6), (3, 6)]),
    "pool": (lambda x: F.max_pool2d(F.pad(x, (1, 1)), 2).flip(0), [(2, 3, 6, 6)]),
    "sums": (lambda x: x.sum(1, keepdim=True) / x.norm(dim=1, keepdim=True), [(4, 6)]),
    "softmax": (lambda x: x.log_softmax(-1) + x.softmax(0), [(4, 6)]),
    "written rows": (written_rows, [(4, 6), (4, 1)]),
    "patches": (lambda x: F.unfold(x * x, 2).transpose(1, 2), [(2, 3, 5, 5)]),
    "trace": (lambda x: x.trace() * x, [(4, 4)]),
    "types": (lambda x: x.double().tanh().float(), [(4, 6)]),
    "needs its layout": (lambda x: (x * 1).as_strided((3, 2), (2, 1)) * 2, [(4, 6)]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    program, shapes = PROGRAMS[name]
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for tangent in TANGENTS.values():
        inputs = [torch.randn(shape).abs().add(0.1).requires_grad_() for shape in shapes]
        compare(program, inputs, tangent, compiled, name not in ("stack", "pool"))


def test_a_custom_backward_sees_the_layout_that_it_was_captured_for() -> None:
    class Contiguous(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.contiguous().view(-1).mul(2).view(gradient.shape)

    def program(x: Tensor) -> Tensor:
        return Contiguous.apply(x.sin()).cos()  # type: ignore[no-any-return, no-untyped-call]

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for tangent in TANGENTS.values():
        compare(program, [torch.randn(4, 6, requires_grad=True)], tangent, compiled)


@pytest.mark.parametrize("sizes", [(3, 5, 7)])
def test_symbolic_sizes_retained_graphs_and_second_derivatives(sizes: tuple[int, ...]) -> None:
    linear = nn.Linear(6, 4)
    compiled = dovetail.compile(linear, backend="aten", fullgraph=True)
    for size in sizes:
        found = []
        for run in (linear, compiled):
            x = torch.linspace(-1, 1, size * 6).reshape(size, 6).requires_grad_()
            result = run(x)
            gradients = [
                *torch.autograd.grad(result.mean(), x, retain_graph=True),
                *torch.autograd.grad(result.t().sum(), x),
            ]
            (slope,) = torch.autograd.grad(run(x).square().mean(), x, create_graph=True)
            found.append([*gradients, *torch.autograd.grad(slope.sum(), linear.weight)])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def test_another_backend_after_aten_gets_tangents_in_the_promised_layout() -> None:
    given: list[tuple[int, ...]] = []

    def strict(graph: torch.fx.GraphModule, inputs: Any, *, kind: str, options: Any) -> Any:
        def run(values: list[Any]) -> list[Any]:
            if kind == "backward":
                given.extend(value.stride() for value in values)
            return list(graph(*values))

        return run

    x = torch.randn(4, 3, requires_grad=True)
    joint = dovetail.capture(lambda x: x.sin(), (x,))
    joint.compile("aten")
    joint.compile(strict)(x).sum().backward()
    assert (0, 0) not in given
    assert (3, 1) in given
