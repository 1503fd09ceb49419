"""Recurrent networks, all layers and steps as one call.

torch's C++ unrolls them: a graph would be held to one length. With plain sizes they stay whole where a graph is to be eager's to
the last bit, because the C++ writes to slices in place, and its kernels round otherwise for slices than for whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import pad_packed_sequence

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.rules.sizes.whole_operators import NoRuleError, Row, Sizes, keep_whole


def _is_packed(args: tuple[Any, ...]) -> bool:
    """Whether a recurrent network is given a packed sequence: data and batch sizes."""
    return len(args) > 3 and isinstance(args[1], torch.Tensor) and isinstance(args[3], (list, tuple))


def _sizes(*args: Any) -> Sizes:
    """The sizes of the results: those of the steps, then of the states."""
    source, *rest = args
    initial, weights, _, layers, _, _, bidirectional = rest[1:] if _is_packed(args) else rest[:-1]
    states = [initial] if isinstance(initial, torch.Tensor) else list(initial)
    directions = 2 if bidirectional else 1
    fits = source.dim() == (2 if _is_packed(args) else 3) and all(
        item.dtype == source.dtype for item in (*states, *weights)
    )
    fits = fits and all(item.dim() == 3 and item.shape[0] == layers * directions for item in states)
    fits = fits and source.shape[-1] == weights[0].shape[1] and states[0].shape[2] == weights[1].shape[1]
    if not fits or (not _is_packed(args) and any(item.shape[1] != source.shape[1] for item in states)):
        # Eager refuses it, in words of its own.
        raise NoRuleError
    steps = (*source.shape[:-1], states[0].shape[2] * directions)
    return [(steps, source.dtype), *((tuple(item.shape), item.dtype) for item in states)]


def _register(function: Callable[..., Any]) -> None:
    @rule(function)
    def recurrent(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_packed = _is_packed(args) or "batch_sizes" in kwargs
        result = _kept(interpreter, function, args) if len(args) == 9 and not kwargs else NotImplemented
        if result is NotImplemented and is_packed:
            # Its C++ reads the batch sizes from memory, which a traced tensor has none of: the process would die.
            raise Break(
                f"{function.__name__} is given a packed sequence in a way that cannot be traced",
                "call it outside of autocast, with states and weights of one dtype",
            )
        return interpreter.call_torch(function, args, kwargs) if result is NotImplemented else result


def _kept(interpreter: TracingInterpreter, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    is_packed = _is_packed(args)
    layers, dropout, training = args[5:8] if is_packed else args[4:7]
    batch_first = not is_packed and args[8]
    drops = bool(dropout and training and layers > 1)
    if drops and args[0].device.type != "cpu":
        return NotImplemented

    def transposed(value: torch.Tensor) -> Any:
        return interpreter.call_torch(torch.transpose, (value, 0, 1), {})

    given = (transposed(args[0]), *args[1:8], False) if batch_first else args
    row = Row(_sizes, always=is_packed, when_exact=True, draws=drops)
    found = keep_whole(interpreter, function, given, {}, row)
    return (transposed(found[0]), *found[1:]) if batch_first and found is not NotImplemented else found


@rule(pad_packed_sequence)
def _pad(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Its C++ reads the batch sizes. Where a size is symbolic it raises another error first, and plain sizes would be tried."""
    if not interpreter.trace.settings.one_graph:
        raise Break("pad_packed_sequence needs the values of a tensor", "do this outside", is_clean=True)
    return interpreter.call_torch(pad_packed_sequence, args, kwargs)


for _function in (torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh):
    _register(_function)
