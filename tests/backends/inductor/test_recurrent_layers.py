"""oneDNN's layers of an LSTM in graphs that Inductor compiles: they are called as in eager, which is to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.torch_private import compilers as private_compilers
from tests.differential import same

pytestmark = pytest.mark.skipif(private_compilers.cpp_compiler() is None, reason="needs a C++ compiler")

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.LSTM(4, 5),
    "dropout": lambda: nn.LSTM(4, 5, num_layers=2, dropout=0.5),
    "both directions": lambda: nn.LSTM(4, 5, bidirectional=True, batch_first=True),
    "no bias": lambda: nn.LSTM(4, 5, bias=False),
}


def _train(network: nn.Module, wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    """Losses and weights of a few steps; the state goes from step to step."""
    optimizer = torch.optim.SGD(network.parameters(), 0.1)

    def loss_of(x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        out, state = network(x, state)
        return out.square().sum(), state

    call, found, state = wrap(loss_of), [], None
    for step in range(4):
        torch.manual_seed(step)
        loss, state = call(torch.randn(3, 3, 4), state)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = tuple(item.detach() for item in state)
        found.append((loss.detach(), state))
    with torch.no_grad():
        found.append(call(torch.randn(3, 3, 4), state))
    return [found, [item.detach() for item in network.parameters()]], call


@pytest.mark.parametrize("name", NETWORKS)
def test_steps(name: str) -> None:
    """The kernels run: nothing is left to operators."""
    torch.manual_seed(0)
    network = NETWORKS[name]()
    expected, _ = _train(copy.deepcopy(network), lambda call: call)
    actual, compiled = _train(network, lambda call: dovetail.compile(call, backend="inductor", tiers="wait"))
    same(expected, actual, exact="close")
    assert not dovetail.events_of(compiled).count("backend given up")


def test_whole_step() -> None:
    """Layer and backward are in one graph."""
    found = []
    for wrap in (lambda call: call, lambda call: dovetail.compile(call, backend="inductor", tiers="wait")):
        torch.manual_seed(0)
        network = nn.LSTM(4, 5)
        optimizer = torch.optim.Adam(network.parameters())

        @wrap
        def step(x: torch.Tensor, network: nn.Module = network, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = network(x)[0].square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        found.append([[step(torch.ones(3, 2, 4)) for _ in range(4)], [item.detach() for item in network.parameters()]])
    same(*found, exact="close")
