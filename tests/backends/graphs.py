"""Hand-made ATen graphs for the tests of backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dovetail.errors import UserLocation
from dovetail.torch_private import tracing as private_tracing


def make_graph(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[torch.fx.GraphModule, list[Any], Any]:
    """A flat ATen graph of ``function``, the fake inputs and the fake mode."""
    fake_mode = private_tracing.FakeTensorMode()
    fakes = [fake_mode.from_tensor(value.detach(), static_shapes=True) for value in inputs]
    with fake_mode, torch.no_grad():
        graph = make_fx(torch.func.functionalize(function))(*fakes)
    for node in graph.graph.nodes:
        node.meta["phase"] = "forward"
        node.meta["user_line"] = UserLocation("train.py", 7)
    return graph, fakes, fake_mode


def mlp(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[Any]:
    """Two outputs, a None, and an input handed through."""
    hidden = torch.nn.functional.gelu(torch.addmm(b, x, w.t()))
    normal = torch.nn.functional.layer_norm(hidden, (hidden.shape[-1],))
    return [normal.softmax(-1), None, hidden.sum(0), w]


def mlp_inputs() -> list[torch.Tensor]:
    """Inputs for :func:`mlp`."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=generator) for size in ((5, 8), (6, 8), (6,))]
