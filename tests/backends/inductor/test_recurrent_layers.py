"""Layers of recurrent networks read their input in the order of its memory, which a compiler may have laid out otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dovetail
from tests.differential import same


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("width", [5, 8])
def test_an_input_that_lies_otherwise(kind: type[nn.RNNBase], width: int) -> None:
    """The rows of a layer with ``width`` features were read from the columns of a view."""
    layer = kind(3, width, batch_first=True)
    compiled = dovetail.compile(lambda x: layer(x.transpose(1, 2))[0], backend="inductor", fullgraph=True, tiers="wait")
    x = torch.randn(2, 3, 4, requires_grad=True)
    expected, found = layer(x.transpose(1, 2))[0], compiled(x)
    same(expected, found, exact=False)
    leaves = [x, *layer.parameters()]
    same(*(torch.autograd.grad(value.square().sum(), leaves) for value in (expected, found)), exact=False)
