"""Tensors on the meta device: they have no data, and the program may have a use for their sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dovetail
from tests.differential import same


def test_an_ensemble_whose_template_has_no_data() -> None:
    models = [nn.Linear(3, 2) for _ in range(4)]
    parameters, buffers = torch.func.stack_module_state(models)
    template = copy.deepcopy(models[0]).to("meta")

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        def one(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(template, (parameters, buffers), (x,))

        return torch.func.vmap(one, in_dims=(0, None))(parameters, x).pow(2).sum()

    compiled = dovetail.compile(loss, backend="aten", fullgraph=True)
    for batch in (2, 3, 5):
        x = torch.randn(batch, 3)
        expected, actual = loss(parameters, x), compiled(parameters, x)
        same(expected, actual)
        leaves = list(parameters.values())
        for left, right in zip(torch.autograd.grad(expected, leaves), torch.autograd.grad(actual, leaves), strict=True):
            same(left, right)


def test_sizes_and_gradients_without_data() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to("meta")
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    for batch in (2, 3, 5):
        result = compiled(torch.ones(batch, 3, device="meta"))
        assert result.shape == (batch, 2) and result.is_meta
        result.sum().backward()
    assert model[0].weight.grad.shape == (4, 3) and model[0].weight.grad.is_meta


def test_data_and_none_do_not_mix() -> None:
    model = nn.Linear(3, 2)
    compiled = dovetail.compile(lambda model, x: model(x), backend="aten")
    template = copy.deepcopy(model).to("meta")
    x = torch.ones(2, 3)
    same(model(x), compiled(model, x))
    assert compiled(template, x.to("meta")).is_meta
    with pytest.raises(RuntimeError, match="meta is not on the expected device"):
        compiled(template, x)
    same(model(x), compiled(model, x))
