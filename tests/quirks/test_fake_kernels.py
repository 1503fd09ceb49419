"""Results of operators have the strides in the trace that they have in eager, so that views of them can be taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.face.loading import load_rules
from dovetail.trace.modes import FakeMode
from tests.differential import same

aten = torch.ops.aten


def permuted() -> torch.Tensor:
    return torch.rand(2, 4, 3, 5).transpose(1, 2)


def statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(*x.shape[:-1], 1), torch.rand(*x.shape[:-1], 1)


CALLS: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    "batch_norm": lambda x: (
        aten._native_batch_norm_legit_functional.default,
        (x, None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5),
    ),
    "batch_norm_backward": lambda x: (
        aten.native_batch_norm_backward.default,
        (torch.rand_like(x), x, None, None, None, torch.zeros(3), torch.ones(3), True, 1e-5, [True, False, False]),
    ),
    "mse_loss_backward": lambda x: (aten.mse_loss_backward.default, (torch.tensor(1.0), x, torch.rand_like(x), 1)),
    "huber_loss_backward": lambda x: (
        aten.huber_loss_backward.default,
        (torch.tensor(1.0), x, torch.rand_like(x), 1, 1.0),
    ),
    "layer_norm_backward": lambda x: (
        aten.native_layer_norm_backward.default,
        (x, torch.rand_like(x), [5], *statistics(x), None, None, [True, False, False]),
    ),
    "elu_backward": lambda x: (aten.elu_backward.default, (torch.rand(x.shape), 1.0, 1.0, 1.0, False, x)),
    "elu_backward alike": lambda x: (aten.elu_backward.default, (torch.rand_like(x), 1.0, 1.0, 1.0, False, x)),
    "hardswish_backward": lambda x: (aten.hardswish_backward.default, (torch.rand(x.shape), x)),
    "softplus_backward": lambda x: (aten.softplus_backward.default, (torch.rand(x.shape), x, 1, 20)),
    "log_sigmoid": lambda x: (aten.log_sigmoid_forward.default, (x,)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_strides(name: str, channels_last: bool) -> None:
    x = permuted()
    operator, args = CALLS[name](x.contiguous(memory_format=torch.channels_last) if channels_last else x)
    load_rules()
    mode = FakeMode()
    real = operator(*args)
    with mode:
        fake = operator(*[mode.from_tensor(item) if isinstance(item, torch.Tensor) else item for item in args])
    first, other = (item if isinstance(item, torch.Tensor) else item[0] for item in (real, fake))
    assert first.stride() == other.stride() and first.shape == other.shape


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_view_of_a_normalised_permuted_tensor(dynamic: bool | None) -> None:
    norm = torch.nn.BatchNorm1d(3)
    twin = copy.deepcopy(norm)

    def program(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x.transpose(1, 2)).transpose(1, 2).reshape(-1, 3) ** 2

    compiled = dovetail.compile(program, backend="aten", fullgraph=True, dynamic=dynamic)
    x = torch.randn(2, 5, 3)
    results = []
    for function, module in ((program, norm), (compiled, twin)):
        leaf = x.clone().requires_grad_()
        y = function(module, leaf)
        y.sum().backward()
        results.append((y.detach(), leaf.grad, dict(module.state_dict())))
    same(*results)


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_tangent_left_out_changes_the_strides_of_a_sum(backend: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prediction = (x @ w).transpose(1, 2) * 1.5
        return prediction, F.mse_loss(prediction, y)

    x, w, y = torch.randn(2, 5, 4), torch.randn(4, 3), torch.randn(2, 3, 5)
    gradients = []
    for function in (program, dovetail.compile(program, backend=backend, fullgraph=True)):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        function(*leaves, y)[1].backward()
        gradients.append([leaf.grad for leaf in leaves])
    same(*gradients, exact=backend == "aten")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strides", [(4, 1, 4, 4), (4, 1, 1, 1), (4, 1, 8, 8), (4, 1, 1, 4)])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_normalised_image_of_one_pixel(batch: int, strides: tuple[int, ...]) -> None:
    """It lies in both memory formats; what asks for one behind the norm (a resize after pooling) must get eager's."""

    def pooled(x: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.batch_norm(x, torch.zeros(4), torch.ones(4), training=batch > 1)
        larger = torch.nn.functional.interpolate(normed.relu(), size=(2, 2), mode="bilinear")
        return larger * larger.stride(1)

    x = torch.empty_strided((batch, 4, 1, 1), strides).normal_().requires_grad_()
    wanted = pooled(x)
    found = dovetail.compile(pooled, backend="aten", fullgraph=True)(x)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(wanted.square().sum(), x)[0])
