"""Calls that stay whole in a graph for all sizes: two captures, and eager's numbers and gradients to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import compilations, same

SIZES = ((2, 6), (3, 9), (5, 8))


class Recurrent(torch.nn.Module):
    """A recurrent network with something before and after it, and perhaps with a state that requires a gradient."""

    def __init__(self, network: torch.nn.Module, has_state: bool = False) -> None:
        super().__init__()
        self.network = network
        self.before = torch.nn.Linear(4, 4)
        self.states = torch.nn.Parameter(torch.randn(4, 1, 5)) if has_state else None

    def forward(self, x: torch.Tensor) -> Any:
        value = self.before(x)
        if self.states is None:
            out, final = self.network(value)
        else:
            network: Any = self.network
            batch = x.shape[0] if network.batch_first else x.shape[1]
            state = self.states[: network.num_layers * (1 + network.bidirectional)].expand(-1, batch, -1).contiguous()
            out, final = self.network(value, (state, state * 2) if isinstance(network, torch.nn.LSTM) else state)
        return torch.tanh(out), final


NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "GRU": lambda: Recurrent(torch.nn.GRU(4, 5)),
    "deep GRU": lambda: Recurrent(torch.nn.GRU(4, 5, num_layers=2, bidirectional=True, batch_first=True)),
    "GRU with a state": lambda: Recurrent(torch.nn.GRU(4, 5, num_layers=2, dropout=0.3, bidirectional=True), True),
    "GRU without bias": lambda: Recurrent(torch.nn.GRU(4, 5, bias=False)),
    "GRU of doubles": lambda: Recurrent(torch.nn.GRU(4, 5, num_layers=2)).double(),
    "LSTM of doubles": lambda: Recurrent(torch.nn.LSTM(4, 5, batch_first=True), True).double(),
    "LSTM": lambda: Recurrent(torch.nn.LSTM(4, 5, batch_first=True)),
    "LSTM with dropout": lambda: Recurrent(torch.nn.LSTM(4, 5, num_layers=3, dropout=0.5)),
    "deep LSTM": lambda: Recurrent(torch.nn.LSTM(4, 5, num_layers=2, bidirectional=True), True),
    "LSTM with a projection": lambda: Recurrent(torch.nn.LSTM(4, 5, num_layers=2, proj_size=3)),
    "RNN": lambda: Recurrent(torch.nn.RNN(4, 5, batch_first=True), True),
    "RNN with relu": lambda: Recurrent(torch.nn.RNN(4, 5, nonlinearity="relu", num_layers=2)),
}


def step(function: Any, module: torch.nn.Module, x: torch.Tensor) -> Any:
    """Results and gradients of one call, from one seed."""
    torch.manual_seed(1)
    module.zero_grad()
    x = x.clone().requires_grad_()
    found = function(x)
    leaves = [item for item in torch.utils._pytree.tree_leaves(found) if item.requires_grad]
    sum(((item * 1.5).sin().sum() for item in leaves), torch.zeros(())).backward()
    return found, x.grad, {name: value.grad for name, value in module.named_parameters()}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sampled(4)
def test_a_recurrent_network_has_one_graph_for_all_sizes(name: str) -> None:
    torch.manual_seed(0)
    module = NETWORKS[name]()
    twin = copy.deepcopy(module)
    compiled = dovetail.compile(twin, backend="aten", fullgraph=True)
    for size in SIZES:
        x = torch.randn(*size, 4, dtype=next(module.parameters()).dtype)
        same(step(module, module, x), step(compiled, twin, x))
    assert compilations(compiled) == 2


def test_a_recurrent_network_in_inference() -> None:
    module = torch.nn.LSTM(4, 5, num_layers=2, dropout=0.5).eval()
    compiled = dovetail.compile(module, backend="aten", fullgraph=True)
    with torch.no_grad():
        for size in SIZES:
            x = torch.randn(*size, 4)
            same(module(x), compiled(x))
    assert compilations(compiled) == 2


def test_a_second_derivative_through_a_recurrent_network() -> None:
    torch.manual_seed(0)
    network = torch.nn.GRU(4, 5)

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(network(x)[0].square().sum(), x, create_graph=True)
        return gradient.square().sum()

    def outer(function: Any, x: torch.Tensor) -> Any:
        network.zero_grad()
        value = function(x)
        value.backward()
        return value, x.grad, [item.grad for item in network.parameters()]

    compiled = dovetail.compile(penalty, backend="aten", fullgraph=True)
    for size in SIZES:
        x = torch.randn(*size, 4)
        expected = outer(penalty, x.clone().requires_grad_())
        # The two terms of each gradient are added up in another order.
        same(expected, outer(compiled, x.clone().requires_grad_()), exact=False)
    assert compilations(compiled) == 2


def test_a_second_derivative_over_a_recurrent_network() -> None:
    torch.manual_seed(0)
    network = torch.nn.GRU(4, 5, batch_first=True)
    compiled = dovetail.compile(network, backend="aten", fullgraph=True)

    def penalty(function: Any, x: torch.Tensor) -> Any:
        network.zero_grad()
        (gradient,) = torch.autograd.grad(function(x)[0].square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return gradient, x.grad, [item.grad for item in network.parameters()]

    for size in SIZES[:3]:
        x = torch.randn(*size, 4)
        expected = penalty(network, x.clone().requires_grad_())
        same(expected, penalty(compiled, x.clone().requires_grad_()), exact=False)


def test_a_result_without_a_gradient_has_symbolic_zeros() -> None:
    def program(x: torch.Tensor) -> Any:
        first, second = torch.cat([x, x * 2]).sin().split([x.shape[0], x.shape[0]])
        return first * 1, second * 1

    compiled = dovetail.compile(program, backend="aten", fullgraph=True, dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        gradients = []
        for function in (program, compiled):
            leaf = x.clone().requires_grad_()
            function(leaf)[1].sum().backward()
            gradients.append(leaf.grad)
        same(*gradients)


@pytest.mark.slow
def test_inductor_takes_a_whole_call() -> None:
    torch.manual_seed(0)
    module = NETWORKS["GRU with a state"]()
    module.eval()
    compiled = dovetail.compile(module, backend="inductor", fullgraph=True)
    for size in SIZES[:2]:
        x = torch.randn(*size, 4)
        same(step(module, module, x), step(compiled, module, x), exact=False)


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN])
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True, "dropout": 0.5}])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(8)
def test_a_packed_sequence(kind: Any, settings: dict[str, Any]) -> None:
    # Traced into operators it ended the process: the C++ reads memory that a traced tensor has not.
    torch.manual_seed(0)
    network = kind(4, 5, **settings)
    pack, pad = torch.nn.utils.rnn.pack_padded_sequence, torch.nn.utils.rnn.pad_packed_sequence

    def program(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        out, state = network(pack(x, lengths, enforce_sorted=False))
        return pad(out)[0], state

    compiled, captured = dovetail.compile(program, backend="aten"), []
    for length, batch in ((6, 3), (7, 4), (9, 2), (8, 3), (5, 4)):
        x = torch.randn(length, batch, 4)
        lengths = torch.randint(1, length + 1, (batch,))
        lengths[0] = length
        found = [step(lambda x, one=one: one(x, lengths), network, x) for one in (program, compiled)]
        same(*found)
        captured.append(dovetail.events_of(compiled).count("capture"))
    assert captured[-1] == captured[-2]


@pytest.mark.filterwarnings("ignore")
def test_a_packed_sequence_under_autocast() -> None:
    network = torch.nn.GRU(4, 5)

    def program(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return network(torch.nn.utils.rnn.pack_padded_sequence(x, lengths))[1]

    compiled = dovetail.compile(program, backend="aten")
    for length in (6, 7, 9):
        x, lengths = torch.randn(length, 3, 4), torch.tensor([length, 3, 1])
        same(program(x, lengths), compiled(x, lengths))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lengths", [[5, 3, 2], torch.tensor([5, 3, 2])])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_packed_sequence_outside_of_a_network(lengths: Any, batch_first: bool) -> None:
    def program(x: torch.Tensor) -> Any:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x * 2, lengths, batch_first=batch_first)
        return torch.tanh(packed.data), packed.batch_sizes

    compiled, whole = (dovetail.compile(program, backend="aten", fullgraph=is_whole) for is_whole in (False, True))
    for width in (4, 6, 7):
        x = torch.randn(3, 5, width) if batch_first else torch.randn(5, 3, width)
        same(*[step(one, torch.nn.Identity(), x) for one in (program, compiled)])
        same(program(x), whole(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_batch_sizes_of_a_packed_sequence_are_read(fullgraph: bool) -> None:
    """The data decides how many there are, and they are whole numbers: torch's fake kernel knows of neither."""

    def program(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        first = torch.zeros(2, packed.batch_sizes[0], dtype=x.dtype)
        return packed.batch_sizes.shape[0] * x.sum(), packed.batch_sizes * 2, packed.data * 2, first

    compiled = dovetail.compile(program, backend="aten", fullgraph=fullgraph)
    for length, lengths in (
        (5, [5, 3, 2]),
        (5, [4, 3, 2]),
        (5, [1, 1, 2]),
        (6, [3, 2, 1]),
        (6, [6, 6, 6]),
        (6, [1, 1, 1]),
    ):
        x = torch.arange(length * 6.0).view(length, 3, 2)
        same(program(x, torch.tensor(lengths)), compiled(x, torch.tensor(lengths)))


def test_a_state_of_another_batch_is_eagers_error() -> None:
    network = torch.nn.GRU(4, 5)

    def program(x: torch.Tensor, state: torch.Tensor) -> Any:
        return torch.gru(x, state, list(network.parameters()), True, 1, 0.0, True, False, False)

    compiled = dovetail.compile(program, backend="aten", dynamic=True)
    x, state = torch.randn(6, 3, 4), torch.randn(1, 3, 5)
    same(program(x, state), compiled(x, state))
    for function in (program, compiled):
        with pytest.raises(RuntimeError, match="must match"):
            function(torch.randn(6, 3, 4), torch.randn(1, 2, 5))


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (1, 1), (1,)])
@pytest.mark.parametrize("order", [1, 2])
def test_a_call_that_hands_an_expanded_gradient_through(shape: tuple[int, ...], order: int) -> None:
    """``cumprod`` over one number gives the gradient that it gets, of which all elements may lie in one place."""
    x = torch.randn(shape, requires_grad=True)
    compiled = dovetail.compile(lambda x: x.cumprod(0), backend="aten", fullgraph=True)
    found = []
    for function in (lambda x: x.cumprod(0), compiled, compiled):
        (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=order > 1)
        more = torch.autograd.grad(gradient.sum(), x) if gradient.requires_grad else ()
        found.append((gradient.detach(), *more))
    same(found[0], found[1])
    same(found[0], found[2])
