"""Single steps of recurrent networks at symbolic sizes.

The C++ writes to slices of what two linear maps give, in place. Where the graph is to be eager's to the last bit that part stays
one call, whatever the sizes are: kernels round otherwise for slices than for whole tensors. The linear maps are operators of the
graph: kept whole with the rest, the gradients of a state would be added up in another order than eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.whole_calls.whole import Whole

Call = Callable[..., Any]


def _run(function: Call, *arguments: Any) -> Any:
    return function(*arguments)


def _gru_gates(call: Call, given: Any, kept: Any, hx: Any) -> list[Any]:
    new_given, new_kept = (call(torch.unsafe_split, item, hx.shape[1], 1) for item in (given, kept))
    reset, update = (call(torch.Tensor.sigmoid_, call(torch.Tensor.add_, new_kept[at], new_given[at])) for at in (0, 1))
    new = call(torch.Tensor.tanh_, call(torch.add, new_given[2], call(torch.Tensor.mul_, new_kept[2], reset)))
    return [call(torch.Tensor.add_, call(torch.Tensor.mul_, call(torch.sub, hx, new), update), new)]


def _lstm_gates(call: Call, gates: Any, cell: Any) -> list[Any]:
    parts = call(torch.unsafe_split, gates, cell.shape[1], 1)
    activations = (torch.Tensor.sigmoid_, torch.Tensor.sigmoid_, torch.Tensor.tanh_, torch.Tensor.sigmoid_)
    enter, forget, new, leave = (call(act, gate) for act, gate in zip(activations, parts, strict=True))
    state = call(torch.Tensor.add_, call(torch.mul, forget, cell), call(torch.mul, enter, new))
    return [call(torch.mul, leave, call(torch.tanh, state)), state]


# A whole call keeps its arguments for its derivative.
_WHOLE_GRU_GATES = Whole(
    lambda given, kept, hx: _gru_gates(_run, given, kept.clone(), hx),
    lambda given, kept, hx: [(hx.shape, hx.dtype)],
    name="gates of a gru_cell",
)
_WHOLE_LSTM_GATES = Whole(
    lambda gates, cell: _lstm_gates(_run, gates.clone(), cell),
    lambda gates, cell: [(cell.shape, cell.dtype)] * 2,
    name="gates of an lstm_cell",
)


def _gru_cell(call: Call, exact: bool, given: Any, kept: Any, hx: Any) -> Any:
    return (_WHOLE_GRU_GATES(given, kept, hx) if exact else _gru_gates(call, given, kept, hx))[0]


def _lstm_cell(call: Call, exact: bool, given: Any, kept: Any, cell: Any) -> Any:
    gates = call(torch.Tensor.add_, kept, given)
    return tuple(_WHOLE_LSTM_GATES(gates, cell) if exact else _lstm_gates(call, gates, cell))


def _linear(call: Call, tensors: Sequence[Any], biases: Sequence[Any], parts: int) -> list[Any] | None:
    """Both linear maps of a step; None for arguments that eager refuses, or computes in one kernel."""
    input, hx, *weights = tensors
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


def _register(function: Any, parts: int, compute: Callable[..., Any]) -> None:
    @rule(function)
    def cell(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call(function: Any, *arguments: Any) -> Any:
            return interpreter.call_torch(function, arguments, {})

        exact = interpreter.trace.settings.exact
        found = None
        if len(args) == 6 and not kwargs:
            input, states, *weights = map(interpreter.values.for_native, args)
            hx, last = (states, states) if isinstance(states, torch.Tensor) else states
            tensors = [input, hx, *weights[:2]]
            is_symbolic = any(private_sizes.has_symbols(item) for item in tensors if isinstance(item, torch.Tensor))
            alike = isinstance(last, torch.Tensor) and (last.shape, last.dtype) == (hx.shape, hx.dtype)
            if alike and (is_symbolic or exact):
                linear = _linear(call, tensors, weights[2:], parts)
                found = None if linear is None else interpreter.values.wrap(compute(call, exact, *linear, last))
        return interpreter.call_torch(function, args, kwargs) if found is None else found


_register(torch.gru_cell, 3, _gru_cell)
_register(torch.lstm_cell, 4, _lstm_cell)
