"""Floats that change from call to call, as tensors: Inductor takes no others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.backends.common.outputs import own_copy
from dovetail.backends.inductor.decompositions import Decompositions
from dovetail.backends.inductor.float_inputs import floats_as_tensors
from dovetail.torch_private import tracing as private_tracing
from tests.differential import backward, random_state, same, set_seed

#: Programs that compute floats from a size.
PROGRAMS: list[Callable[[Tensor], Any]] = [
    lambda x: x * (x.shape[0] / (x.shape[0] - 1)),
    lambda x: x.sum() * (1 / x.shape[0]) - x * (2.5 * x.shape[0]),
    lambda x: x * (x.shape[0] / 3) ** 0.5 + math.sqrt(x.shape[0]),
    lambda x: x * (1.0 / torch.sym_float(x.shape[0])) + torch.sym_float(x.shape[0] * 2),
    lambda x: torch.nn.functional.batch_norm(x, torch.zeros(3), torch.ones(3), training=True, momentum=0.3),
]


#: Programs that are given a float that changes, as a schedule does.
SCHEDULED: list[Callable[[Tensor, float], Any]] = [
    lambda x, rate: x * torch.full((3,), rate),
    lambda x, rate: (torch.full((3,), 4 * rate, dtype=torch.int64), torch.copysign(x, torch.full((3,), -0.0 * rate))),
    lambda x, rate: torch.clamp_min(x, rate) + torch.clamp_max(x, -rate),
    lambda x, rate: rate**x + (-x) % rate + torch.fmod(x, rate),
    lambda x, rate: torch.div(x, rate, rounding_mode="floor") + torch.div(x, rate, rounding_mode="trunc"),
]


#: Programs with functions that take a float by value, taken apart or called as they are.
BY_VALUE: list[Callable[[Tensor, float], Any]] = [
    lambda x, rate: (F.huber_loss(x, x.flip(0), delta=rate), F.smooth_l1_loss(x, x.flip(0) * 2, beta=rate)),
    lambda x, rate: F.cross_entropy(x, torch.tensor([0, 2, 1, 1]), label_smoothing=rate),
    lambda x, rate: (
        F.layer_norm(x, (3,), eps=rate),
        F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True, momentum=rate),
    ),
    lambda x, rate: (
        F.elu(x, rate),
        F.hardshrink(x, rate),
        F.softshrink(x, rate),
        x.abs() ** rate,
        torch.lerp(x, -x, rate),
    ),
    lambda x, rate: F.dropout(x, rate) + torch.empty(4, 3).normal_(0, rate) + torch.empty(3).uniform_(-rate, rate),
    lambda x, rate: (F.multi_margin_loss(x, torch.tensor([0, 2, 1, 1]), margin=rate), F.pad(x, (1, 1), value=rate)),
    lambda x, rate: (torch.arange(3) * rate + x, torch.arange(4) < rate, torch.addmm(x @ x.t(), x, x.t(), beta=rate)),
    lambda x, rate: (torch.nan_to_num(x.log(), nan=rate), torch.logit(x.sigmoid(), rate / 10)),
]


def _recorded(rewritten: list[torch.fx.GraphModule], **options: Any) -> dovetail.backends.Backend:
    """A backend that runs graphs without floats, which it leaves in ``rewritten``."""

    def compile(graph: torch.fx.GraphModule, inputs: Any, *, kind: Any, options: Any) -> Callable[[list[Any]], Any]:
        own = own_copy(graph, private_tracing.lazy_graph_module)
        floats_as_tensors(own)
        rewritten.append(own)
        return lambda given: list(torch.fx.Interpreter(own).run(*given))

    return dovetail.backends.Backend("floats", compile, data_sizes=True, **options)


@pytest.mark.parametrize("number", range(len(SCHEDULED)))
def test_numbers_of_a_schedule(number: int) -> None:
    function, rewritten = SCHEDULED[number], []
    compiled = dovetail.compile(function, backend=_recorded(rewritten), fullgraph=True)
    x = torch.linspace(-2, 3, 12).view(4, 3)
    for rate in (0.9, 0.75, 0.6, 0.45):
        same(function(x, rate), compiled(x, rate), exact=False)
    assert dovetail.events_of(compiled).count("capture") == 2
    values = [node.meta.get("val") for node in rewritten[-1].graph.nodes]
    assert not any(isinstance(value, torch.SymFloat) for value in values)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(len(BY_VALUE)))
def test_numbers_that_functions_take_by_value(number: int) -> None:
    function, rewritten = BY_VALUE[number], []
    backend = _recorded(rewritten, decompositions=Decompositions)
    compiled = dovetail.compile(function, backend=backend, fullgraph=True)
    for seed, rate in enumerate((0.9, 0.75, 0.6, 0.45)):
        found = []
        for run in (function, compiled):
            set_seed(seed)
            x = torch.linspace(-2, 3, 12).view(4, 3).requires_grad_()
            result = run(x, rate)
            backward(result)
            found.append((result, x.grad, random_state()))
        same(*found, exact=False)
    assert dovetail.events_of(compiled).count("capture") == 2
    values = [node.meta.get("val") for graph in rewritten[-2:] for node in graph.graph.nodes]
    assert not any(isinstance(value, torch.SymFloat) for value in values)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_numbers_made_of_sizes(number: int) -> None:
    function, rewritten = PROGRAMS[number], []
    compiled = dovetail.compile(function, backend=_recorded(rewritten), dynamic=True, fullgraph=True)
    for size in (4, 5, 9):
        x = torch.randn(size, 3)
        same(function(x), compiled(x), exact=False)
    assert dovetail.events_of(compiled).count("capture") == 1
    values = [node.meta.get("val") for graph in rewritten for node in graph.graph.nodes]
    assert values and not any(isinstance(value, torch.SymFloat) for value in values)


def _mean_of_squares(x: Tensor) -> Tensor:
    return nn.functional.mse_loss(x, x.detach().flip(0))


def _groups(x: Tensor) -> Tensor:
    return nn.functional.group_norm(x[None].transpose(1, 2), 3).exp()


@pytest.mark.parametrize("function", [_mean_of_squares, _groups])
@pytest.mark.sampled(2)
def test_gradients_that_divide_by_a_size_get_kernels(function: Callable[[Tensor], Tensor]) -> None:
    compiled = dovetail.compile(function, backend="inductor", tiers="wait", dynamic=True, fullgraph=True)
    for size in (4, 7):
        inputs = [torch.linspace(-1, 2, size * 3).view(size, 3).square().requires_grad_() for _ in range(2)]
        for run, x in zip((function, compiled), inputs, strict=True):
            run(x).sum().backward()
        same(inputs[0].grad, inputs[1].grad, exact=False)
    assert dovetail.events_of(compiled).count("capture") == 1


@pytest.mark.slow
def test_batch_norm_at_many_batch_sizes_is_compiled_twice() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    compiled = dovetail.compile(models[1], backend="inductor", tiers="wait", fullgraph=True)
    for size in (5, 6, 7, 9):
        x = torch.randn(size, 4, dtype=torch.float64)
        for model in (models[0], compiled):
            model.zero_grad()
            model(x).exp().sum().backward()
        same(models[0].state_dict(), models[1].state_dict(), exact=False)
        same(
            [item.grad for item in models[0].parameters()], [item.grad for item in models[1].parameters()], exact=False
        )
    assert dovetail.events_of(compiled).count("capture") == 2


#: Programs that read a number from a tensor of one element.
READ: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, one: x.sum() * one.item(),
    lambda x, one: x * one.item() + 1,
    lambda x, one: (x - one.item() * 2).square(),
]
#: Adam's update of a parameter without dimensions (a learnt temperature).
UPDATES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, one: x.addcdiv(x.sin(), x.exp(), value=-one.item()),
    lambda x, one: x.addcmul(x, x.cos(), value=one.item() * 3),
    lambda x, one: x.add(x.sin(), alpha=one.item() * 3),
]


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("number", range(len(UPDATES)))
def test_numbers_that_scale_tensors_without_dimensions(number: int, shape: tuple[int, ...]) -> None:
    """The number's own type does not count."""
    function, rewritten = UPDATES[number], []
    compiled = dovetail.compile(function, backend=_recorded(rewritten), fullgraph=True)
    for value in (0.5, 0.75, 2.0):
        x, one = torch.full(shape, 0.3), torch.tensor(value)
        same(function(x, one), compiled(x, one), exact="close")
    assert rewritten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("number", range(len(READ)))
def test_numbers_of_tensors_with_dimensions(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Their dimensions count neither for the shape nor for the dtype of a result."""
    function, rewritten = READ[number], []
    compiled = dovetail.compile(function, backend=_recorded(rewritten), fullgraph=True)
    x = torch.linspace(-2, 3, 12, dtype=dtype)
    for value in (0.5, 0.75, 2.0):
        one = torch.full(shape, value)
        same(function(x, one), compiled(x, one), exact="close")
    assert rewritten
