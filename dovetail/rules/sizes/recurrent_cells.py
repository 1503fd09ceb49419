"""Single steps of recurrent networks at symbolic sizes.

The C++ writes to slices of what the linear maps give, in place. Where the graph is to be eager's to the last bit that part stays
one call (:mod:`dovetail.trace.sized`), whatever the sizes are: kernels round otherwise for slices than for whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.rules.sizes.plain_size_formulas import Call, formula
from dovetail.rules.sizes.recurrent_networks import SizedFunction
from dovetail.torch_private import state as private_state


def _linear(call: Call, input: Any, hx: Any, weights: Sequence[Any], biases: Sequence[Any], parts: int) -> Any:
    """Both linear maps of a step; None for what eager refuses, or computes in one kernel."""
    tensors = (input, hx, *weights)
    is_matrix = all(isinstance(item, torch.Tensor) and item.dim() == 2 for item in tensors)
    if not is_matrix or input.device.type != "cpu" or private_state.is_any_autocast_on():
        return None
    width = hx.shape[1]
    fits = input.shape[0] == hx.shape[0] and input.shape[1] == weights[0].shape[1] and width == weights[1].shape[1]
    if not fits or any(item.shape[0] != parts * width for item in weights):
        return None
    return [
        call(torch.nn.functional.linear, value, weight, bias)
        for value, weight, bias in zip((input, hx), weights, biases, strict=True)
    ]


def _run(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def _gru_gates(call: Callable[..., Any], given: Any, kept: Any, hx: Any) -> list[Any]:
    new_given, new_kept = (call(torch.unsafe_split, item, hx.shape[1], 1) for item in (given, kept))
    reset, update = (call(torch.Tensor.sigmoid_, call(torch.Tensor.add_, new_kept[at], new_given[at])) for at in (0, 1))
    new = call(torch.Tensor.tanh_, call(torch.add, new_given[2], call(torch.Tensor.mul_, new_kept[2], reset)))
    return [call(torch.Tensor.add_, call(torch.Tensor.mul_, call(torch.sub, hx, new), update), new)]


def _lstm_gates(call: Callable[..., Any], gates: Any, cell: Any) -> list[Any]:
    parts = call(torch.unsafe_split, gates, cell.shape[1], 1)
    activations = (torch.Tensor.sigmoid_, torch.Tensor.sigmoid_, torch.Tensor.tanh_, torch.Tensor.sigmoid_)
    enter, forget, new, leave = (call(act, gate) for act, gate in zip(activations, parts, strict=True))
    state = call(torch.Tensor.add_, call(torch.mul, forget, cell), call(torch.mul, enter, new))
    return [call(torch.mul, leave, call(torch.tanh, state)), state]


_WHOLE_GRU_GATES = SizedFunction(
    "gates of a gru_cell",
    # Whoever calls it keeps what it is given.
    lambda given, kept, hx: _gru_gates(_run, given, kept.clone(), hx),
    lambda given, kept, hx: [(hx.shape, hx.dtype)],
)
_WHOLE_LSTM_GATES = SizedFunction(
    "gates of an lstm_cell",
    lambda gates, cell: _lstm_gates(_run, gates.clone(), cell),
    lambda gates, cell: [(cell.shape, cell.dtype)] * 2,
)


@formula(torch.gru_cell, when_exact=True)
def _gru_cell(call: Call, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    linear = _linear(call, input, hx, (w_ih, w_hh), (b_ih, b_hh), 3)
    if linear is None:
        return None
    found = call.record(_WHOLE_GRU_GATES, *linear, hx) if call.is_exact else _gru_gates(call, linear[0], linear[1], hx)
    return found[0]


@formula(torch.lstm_cell, when_exact=True)
def _lstm_cell(call: Call, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    hidden, cell = hx
    if not isinstance(cell, torch.Tensor) or not isinstance(hidden, torch.Tensor) or cell.shape != hidden.shape:
        return None
    linear = _linear(call, input, hidden, (w_ih, w_hh), (b_ih, b_hh), 4)
    if linear is None or cell.dtype != linear[0].dtype:
        return None
    gates = call(torch.Tensor.add_, linear[1], linear[0])
    return tuple(call.record(_WHOLE_LSTM_GATES, gates, cell) if call.is_exact else _lstm_gates(call, gates, cell))


def _register_cell(function: Any, activation: Any) -> None:
    @formula(function)
    def _cell(call: Call, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        linear = _linear(call, input, hx, (w_ih, w_hh), (b_ih, b_hh), 1)
        return None if linear is None else call(activation, call(torch.Tensor.add_, linear[1], linear[0]))


_register_cell(torch.rnn_tanh_cell, torch.tanh)
_register_cell(torch.rnn_relu_cell, torch.relu)
