"""Recurrent networks whose batch and sequence have symbolic sizes, as one call.

torch's C++ unrolls them: a graph would be held to one length. Called whole (:mod:`dovetail.trace.sized`), one graph does for
all of them, and the numbers are those of torch's own kernels. With plain sizes they stay whole where a graph is to be eager's to
the last bit: the C++ writes to slices in place, and its kernels round otherwise for slices than for whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.trace.trace import open_trace
from dovetail.whole_calls.call import whole_call
from dovetail.whole_calls.facts import SizesRule
from dovetail.whole_calls.operator import FlatFunction


class SizedFunction:
    """A function that is called whole, with a rule for the sizes of its results; so also where the program is traced again.

    ``draws`` says that it draws random numbers.
    """

    def __init__(self, name: str, function: FlatFunction, sizes: SizesRule, draws: bool = False) -> None:
        self.__name__ = self.__qualname__ = name
        self.function = function
        self.sizes = sizes
        self.draws = draws

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call it, as one operator while tracing."""
        trace = open_trace()
        if trace is None:
            return tuple(self.function(*tensors))
        return whole_call(trace, self.__name__, self.function, tensors, self.sizes, draws=self.draws)


def record_call(interpreter: TracingInterpreter, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Call a function that is no torch function but is to be one call of the program of an interpreter."""
    recorder = interpreter.trace.recorder
    with recorder.paused():
        found = function(*tensors)
    recorder.record(function, tuple(tensors), {}, found)
    return interpreter.values.wrap(found)


def call_sized(
    interpreter: TracingInterpreter, function: SizedFunction, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Call it in the program of an interpreter."""
    found: tuple[torch.Tensor, ...] = record_call(interpreter, function, tensors)
    return found


def _layers(
    function: Callable[..., Any], states: int, has_biases: bool, layers: int, training: bool, bidirectional: bool
) -> SizedFunction:
    """Layers of a recurrent network, in all its directions, as a function of (*source, *states, *weights). The source is a
    tensor, or data and batch sizes of a packed sequence.
    """

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        width = 1 if tensors[0].dim() == 3 else 2
        source, given, weights = tensors[:width], list(tensors[width : width + states]), list(tensors[width + states :])
        initial = given if states > 1 else given[0]
        settings = (has_biases, layers, 0.0, training, bidirectional, *([False] if width == 1 else []))
        found: Sequence[torch.Tensor] = function(*source, initial, weights, *settings)
        return found

    def sizes(*tensors: torch.Tensor) -> list[tuple[Sequence[Any], torch.dtype]]:
        source, first = tensors[0], 1 if tensors[0].dim() == 3 else 2
        given = tensors[first : first + states]
        whole = ((*source.shape[:-1], given[0].shape[2] * (2 if bidirectional else 1)), source.dtype)
        return [whole, *[(item.shape, item.dtype) for item in given]]

    return SizedFunction(function.__name__, run, sizes)


def _fits(source: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], rows: int) -> bool:
    """Whether eager takes these; what it does not take it refuses in words of its own."""
    if any(item.dtype != source.dtype or item.device != source.device for item in (*states, *weights)):
        return False
    if source.dim() not in (2, 3) or any(item.dim() != 3 for item in states):
        return False
    if any(item.shape[0] != rows or (source.dim() == 3 and item.shape[1] != source.shape[1]) for item in states):
        return False
    return bool(source.shape[-1] == weights[0].shape[1] and states[0].shape[2] == weights[1].shape[1])


def _recurrent(interpreter: TracingInterpreter, function: Callable[..., Any], states: int, *args: Any) -> Any:
    """The whole call, layer by layer where there is dropout in between; None where torch's own function does it, or refuses it."""
    if len(args) != 9 or private_state.is_any_autocast_on():
        return None
    packing = [args[1]] if _is_packed(args) else []
    if packing:
        source, _, initial, weights, has_biases, layers, dropout, training, bidirectional = args
        batch_first = False
    else:
        source, initial, weights, has_biases, layers, dropout, training, bidirectional, batch_first = args
    initial, weights = (interpreter.values.for_native(item) for item in (initial, weights))
    given = list(initial) if states > 1 else [initial]
    tensors = [source, *given, *weights]
    if not all(isinstance(item, torch.Tensor) for item in tensors) or len(given) != states:
        return None
    drops = bool(dropout and training and layers > 1)
    stays_whole = packing or interpreter.trace.settings.exact or any(map(private_sizes.has_symbols, tensors))
    if not stays_whole or (drops and source.device.type != "cpu"):
        return None

    def call(function: Any, *arguments: Any) -> Any:
        return interpreter.call_torch(function, arguments, {})

    directions = 2 if bidirectional else 1
    rows = layers * directions
    value = call(torch.transpose, source, 0, 1) if batch_first else source
    if not weights or len(weights) % rows or source.dim() != 3 - len(packing) or not _fits(value, given, weights, rows):
        return None
    if drops:
        each = len(weights) // layers
        kept = _layers(function, states, has_biases, 1, training, bidirectional)
        splits = [call(torch.split, item, directions) for item in given]
        reached: list[list[torch.Tensor]] = [[] for _ in given]
        for at in range(layers):
            own = [*[split[at] for split in splits], *weights[at * each : (at + 1) * each]]
            value, *states_reached = call_sized(interpreter, kept, [value, *packing, *own])
            for layer, item in zip(reached, states_reached, strict=True):
                layer.append(item)
            if at < layers - 1:
                value = call(torch.dropout, value, dropout, True)
        finals = [call(torch.cat, layer) for layer in reached]
    else:
        kept = _layers(function, states, has_biases, layers, training, bidirectional)
        value, *finals = call_sized(interpreter, kept, [value, *packing, *given, *weights])
    return (call(torch.transpose, value, 0, 1) if batch_first else value, *finals)


def _is_packed(args: tuple[Any, ...]) -> bool:
    """Whether a recurrent network is given a packed sequence: data and batch sizes."""
    return len(args) > 3 and isinstance(args[1], torch.Tensor) and isinstance(args[3], (list, tuple))


def _register(function: Callable[..., Any], states: int) -> None:
    def handler(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = None if kwargs else _recurrent(interpreter, function, states, *args)
        if result is None and (_is_packed(args) or "batch_sizes" in kwargs):
            # Its C++ reads the batch sizes from memory, which a traced tensor has none of: the process would die.
            raise Break(
                f"{function.__name__} is given a packed sequence in a way that cannot be traced",
                "call it outside of autocast, with states and weights of one dtype",
            )
        return interpreter.call_torch(function, args, kwargs) if result is None else result

    rule(function)(handler)


for _function in (torch.gru, torch.rnn_tanh, torch.rnn_relu):
    _register(_function, 1)
_register(torch.lstm, 2)


def _line(function: Callable[..., Any], start: Any, end: Any, settings: dict[str, Any]) -> SizedFunction:
    def run(carrier: torch.Tensor) -> list[torch.Tensor]:
        return [function(start, end, carrier.shape[0], **settings)]

    def sizes(carrier: torch.Tensor) -> list[tuple[Sequence[Any], torch.dtype]]:
        return [(carrier.shape, carrier.dtype)]

    return SizedFunction(function.__name__, run, sizes)


def _register_line(function: Callable[..., Any], names: tuple[str, ...]) -> None:
    def handler(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(("start", "end", "steps"), args, strict=False)), **kwargs}
        steps, ends = given.get("steps"), (given.get("start"), given.get("end"))
        is_plain = all(type(item) in (int, float) for item in ends) and len(args) <= 3
        known = {"start", "end", "steps", "dtype", "device", "requires_grad", *names}
        if (
            type(steps) is not torch.SymInt
            or private_sizes.is_data_number(steps)
            or not is_plain
            or not known.issuperset(given)
            or given.get("requires_grad")
        ):
            return interpreter.call_torch(function, args, kwargs)
        settings = {"dtype": given.get("dtype") or torch.get_default_dtype()}
        settings["device"] = given.get("device") or torch.get_default_device()
        # Its size is all that is read of it.
        carrier = interpreter.call_torch(torch.empty, ([steps],), settings)
        settings |= {name: given[name] for name in names if name in given}
        return call_sized(interpreter, _line(function, *ends, settings), [carrier])[0]

    rule(function)(handler)


_register_line(torch.linspace, ())
_register_line(torch.logspace, ("base",))
