"""Weights that a hook in front of ``forward`` computes: ``torch.nn.utils.weight_norm``, ``spectral_norm`` and ``prune``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

import dovetail
from tests.differential import same


def _wrapped(name: str, layer: torch.nn.Linear) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch prefers parametrizations
        choices: dict[str, Callable[[], Any]] = {
            "weight_norm": lambda: torch.nn.utils.weight_norm(layer),
            "spectral_norm": lambda: torch.nn.utils.spectral_norm(layer),
            "pruned": lambda: prune.l1_unstructured(layer, "weight", 0.3),
            "pruned twice": lambda: prune.ln_structured(prune.l1_unstructured(layer, "weight", 0.2), "weight", 1, 2, 0),
        }
        return choices[name]()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "pruned", "pruned twice"])
def test_a_step_trains_in_one_graph(name: str) -> None:
    """The hooks are objects of torch's, whose code was run on a stand-in for the module."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
    results = []
    for compiles in (False, True):
        torch.manual_seed(1)
        first, second = (_wrapped(name, copy.deepcopy(layer)) for layer in layers)
        model = torch.nn.Sequential(first, torch.nn.Tanh(), second)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = dovetail.compile(step, backend="aten", fullgraph=True) if compiles else step
        losses = []
        for index in range(4):
            model.train(index != 2)
            losses.append(run(torch.full((2, 4), 0.1 * index + 0.1)))
        results.append((losses, dict(model.state_dict()), [item.grad for item in model.parameters()]))
    same(*results)


def kept_weight(kernel: int, **options: Any) -> list[list[Any]]:
    """Gradients of a layer that keeps its weight, for an image with channels last: eager's, and those of a compiled call."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = torch.nn.utils.weight_norm(torch.nn.Conv2d(3, 4, kernel))
    compiled = dovetail.compile(layer, fullgraph=True, **options)
    x = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    found = []
    for call in (layer, compiled):
        layer.zero_grad()
        call(x).pow(3).sum().backward()
        found.append([item.grad for item in layer.parameters()])
    return found


@pytest.mark.parametrize("kernel", [1, 3])
def test_images_with_channels_last(kernel: int) -> None:
    """Without a gradient for the kept weight, the convolution's own does not lie as the sum of both would."""
    same(*kept_weight(kernel, backend="aten"))


def test_kernels_of_a_layer_that_keeps_its_weight() -> None:
    """Decompositions hand marks of a node on to others: the backward without a gradient for the weight is lowered all the same."""
    same(*kept_weight(3, backend="inductor", tiers="wait"), exact=False)
