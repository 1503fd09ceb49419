"""What Inductor writes in place is written before anything reads it: random masks, and sums at indices."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import dovetail
from tests.differential import compare_call

PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normalised": lambda x: functional.dropout(functional.layer_norm(x, x.shape[-1:]), 0.3),
    "centred": lambda x: functional.dropout(x - x.mean(-1, keepdim=True), 0.3),
    "scaled": lambda x: functional.dropout(x / (x.var(-1, keepdim=True) + 1).sqrt(), 0.3),
    "twice": lambda x: functional.dropout(
        functional.dropout(functional.layer_norm(x, x.shape[-1:]), 0.3).softmax(1), 0.2
    ),
    "weighted": lambda x: torch.bernoulli(x.detach().sigmoid()) * functional.dropout(x - x.amax(1, keepdim=True), 0.1),
    "features": lambda x: functional.dropout1d(functional.layer_norm(x, x.shape[-1:]), 0.4),
    "alpha": lambda x: functional.alpha_dropout(functional.layer_norm(x, x.shape[-1:]), 0.4, training=True),
    "unused": lambda x: (functional.dropout(x, 0.5), functional.dropout(x - x.mean(), 0.5))[1],
}


QUICK = "unused"
CASES = [
    pytest.param(name, needs_gradient, marks=() if needs_gradient and name == QUICK else pytest.mark.slow)
    for name in PROGRAMS
    for needs_gradient in (True, False)
]


@pytest.mark.parametrize(("name", "needs_gradient"), CASES)
def test_a_mask_is_filled_before_it_is_read(name: str, needs_gradient: bool) -> None:
    compiled = dovetail.compile(PROGRAMS[name], backend="inductor", fullgraph=True)
    for rows in (3, 5) if name == "normalised" else (3,):
        x = torch.randn(rows, 4, 16, requires_grad=needs_gradient)
        compare_call(PROGRAMS[name], compiled, (x,), exact=False)


INDICES = torch.tensor([0, 2, 2, 1])


def _centred_times(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    scaled = other / 0.7
    return torch.stack([(x - x.mean(-1, keepdim=True)) * scaled, scaled])


SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "index_add": lambda x: _centred_times(x, torch.zeros_like(x).index_add(1, INDICES, x[:, :4].exp())),
    "scatter_add": lambda x: _centred_times(
        x, torch.zeros_like(x).scatter_add(1, INDICES[None, :, None].expand(3, 4, 16), x[:, :4].exp())
    ),
    "index_put": lambda x: _centred_times(
        x[0], torch.zeros_like(x[0]).index_put((INDICES,), x[1, :4], accumulate=True)
    ),
}


@pytest.mark.parametrize(
    "name", ["scatter_add", *(pytest.param(name, marks=pytest.mark.slow) for name in SUMS if name != "scatter_add")]
)
@pytest.mark.slow
def test_a_sum_at_indices_is_there_before_it_is_read(name: str) -> None:
    compiled = dovetail.compile(SUMS[name], backend="inductor", fullgraph=True)
    compare_call(SUMS[name], compiled, (torch.randn(3, 6, 16, requires_grad=True),), exact=False)


@pytest.mark.slow
def test_a_layer_of_a_transformer_that_trains() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True, norm_first=True)
    twin = copy.deepcopy(layer)
    compiled = dovetail.compile(twin, backend="inductor", fullgraph=True)
    for seed in range(3):
        x = torch.randn(2, 6, 16)
        losses = []
        for model, call in ((layer, layer), (twin, compiled)):
            torch.manual_seed(seed)
            loss = call(x).square().mean()
            model.zero_grad()
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1])
        for one, other in zip(layer.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


TWICE = torch.tensor([1, 1])
#: A tensor that nobody reads later is written in place, with numbers or indices that lie in it.
OWN_PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda y: y.index_add(0, TWICE, y[:2]),
    "all": lambda y: y.index_add(0, torch.tensor([1, 1, 0, 0]), y),
    "columns": lambda y: y.t().index_add(0, TWICE, y.t()[:2]),
    "several": lambda y: torch.stack([y.index_add(0, TWICE, y[:2]), y.index_put((TWICE,), y[2:], accumulate=True)]),
    "moved": lambda y: y.cumsum(0).index_put((torch.tensor([1, 2, 3]),), y.cumsum(0)[:3]),
    "indices": lambda y: (y[:, 0].long() * 0 + torch.arange(4).flip(0)).index_put((y[:2, 0].long(),), y[2:, 0].long()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_PARTS)
@pytest.mark.sampled(2)
def test_parts_are_put_into_their_own_tensor(name: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return OWN_PARTS[name](x.sqrt())

    compiled = dovetail.compile(program, backend="inductor", tiers="wait", fullgraph=True)
    x = torch.arange(20.0).view(4, 5) % 7 + 1
    for needs_gradient in (True, False):
        compare_call(program, compiled, (x.clone().requires_grad_(needs_gradient),), exact=False)
