"""Calls of torch that cannot be traced into operators, kept whole in the graph as one opaque operator."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, data_rule, rule
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing
from dovetail.torch_private.trees import TreeSpec, tree_flatten, tree_unflatten
from dovetail.trace import Trace
from dovetail.trace.opaque import example_of, opaque
from dovetail.trace.trace import open_trace


def _named(*names: str) -> frozenset[Any]:
    """Those functions of ``torch.nn.functional`` that this torch has."""
    return frozenset(function for name in names if (function := getattr(torch.nn.functional, name, None)) is not None)


# Asked for by name: nothing that torch says of these functions tells them from others.
_CROSS_ENTROPY = _named("cross_entropy", "linear_cross_entropy")
_MULTILABEL = _named("multilabel_margin_loss")


def _stays_whole(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_exact: bool) -> bool:
    """Whether a call traced into operators would not be eager's. Found by running torch's module database bitwise.

    Weighted cross entropy with label smoothing: the mean divides by a sum over the targets that count, which without a
    dispatch mode are selected and with one are masked, so that the last bit differs. Multi-label margin loss of one vector:
    its shape on fake tensors is not that of its result.
    """
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return False
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return False
    source, target, reduction = given["input"], given["target"], given.get("reduction", "mean")
    if not isinstance(source, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    if function in _MULTILABEL:
        return reduction == "none" and source.dim() < 2
    smooth = given.get("label_smoothing", 0.0) > 0 and given.get("weight") is not None
    return is_exact and reduction == "mean" and smooth and not target.is_floating_point()


def _register(function: Any) -> None:
    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        if _stays_whole(function, args, kwargs, interpreter.trace.settings.exact):
            return interpreter.values.wrap(call_whole(interpreter.trace, function, args, kwargs))
        return interpreter.call_torch(function, args, kwargs)


for _function in (*_CROSS_ENTROPY, *_MULTILABEL):
    _register(_function)


def _is_settings(value: Any) -> bool:
    """Whether a value is a dataclass of torch's that holds plain values only."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    kept = all(is_leaf_value(getattr(value, field.name)) for field in dataclasses.fields(value))
    return kept and type(value).__module__.split(".", 1)[0] == "torch"


def call_whole(trace: Trace, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` as one node; raises :class:`Break` for a function that cannot be one.

    Numbers that the function returns, and those it is given that depend on data, travel as tensors without dimensions. An
    argument that it writes to is written to by the graph.
    """
    name = getattr(function, "__name__", str(function))
    leaves, structure = tree_flatten((args, kwargs))
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Break(f"{name} cannot be kept whole under autocast")
    tensors: dict[int, torch.Tensor] = {}
    numbers: set[int] = set()
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensors[at] = leaf
        elif private_sizes.is_data_number(leaf):
            tensors[at] = number_as_tensor(leaf)
            numbers.add(at)
        elif not is_leaf_value(leaf) and not _is_settings(leaf):
            raise Break(f"{name} cannot be kept whole: an argument of it is an object")
    constants = [None if at in tensors else leaf for at, leaf in enumerate(leaves)]
    returned: list[TreeSpec] = []
    made_numbers: list[bool] = []

    def plain(given: Sequence[torch.Tensor]) -> list[Any]:
        values = list(constants)
        for at, tensor in zip(tensors, given, strict=True):
            values[at] = tensor.item() if at in numbers else tensor
        arguments, keywords = tree_unflatten(values, structure)
        results, spec = tree_flatten(function(*arguments, **keywords))
        if not returned:
            returned.append(spec)
            made_numbers.extend(type(item) in (bool, int, float) for item in results)
        return [_number_tensor(item) if type(item) in (bool, int, float) else item for item in results]

    written = _written(trace, plain, list(tensors.values()))
    if any(tensors[list(tensors)[at]].requires_grad for at in written):
        raise Break(f"{name} writes to a tensor that requires a gradient and cannot be kept whole")

    def call(*given: torch.Tensor) -> list[torch.Tensor]:
        own = [item.clone() if at in written else item for at, item in enumerate(given)]
        return [*plain(own), *[own[at] for at in written]]

    recorder = trace.recorder
    try:
        with recorder.paused():
            results = list(opaque(trace, name, call, list(tensors.values())))
            targets = list(tensors.values())
            for at, value in zip(written, results[len(results) - len(written) :], strict=True):
                targets[at].copy_(value)
            kept = results[: len(results) - len(written)]
            kept = [_number(trace, item) if flag else item for item, flag in zip(kept, made_numbers, strict=True)]
    except CaptureError as error:
        raise Break(error.what, error.advice) from error
    result = tree_unflatten(kept, returned[0])
    recorder.record(WholeCall(function), args, kwargs, result)
    return result


@data_rule
def _whole(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords, result: Any) -> Any:
    return call_whole(interpreter.trace, function, args, kwargs) if result is NotImplemented else NotImplemented


class WholeCall:
    """A function that stays whole wherever the program is traced again."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", "function")
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as one operator while tracing."""
        trace = open_trace()
        return self.function(*args, **kwargs) if trace is None else call_whole(trace, self.function, args, kwargs)


def number_as_tensor(value: Any) -> torch.Tensor:
    """A symbolic number as a traced tensor without dimensions."""
    kinds = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}
    with torch.no_grad():
        return torch.scalar_tensor(value, dtype=kinds[type(value)])


def _number(trace: Trace, value: torch.Tensor) -> Any:
    before = trace.data_symbols()
    number = value.item()
    if value.dtype == torch.bool:
        trace.truths |= trace.data_symbols() - before
    return number


def _number_tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64 if type(value) is float else None)


def _written(trace: Trace, function: Any, tensors: list[torch.Tensor]) -> list[int]:
    """Which arguments the function writes to, found out by an example call."""
    try:
        with (
            private_tracing.disable_current_modes(),
            private_calls.no_torch_function(),
            private_state.preserved_rng_state(),
        ):
            examples = [example_of(trace, tensor).requires_grad_(tensor.requires_grad) for tensor in tensors]
            before = [tensor._version for tensor in examples]
            with torch.no_grad():
                function(examples)
            return [at for at, tensor in enumerate(examples) if tensor._version != before[at]]
    except CaptureError as error:
        raise Break(error.what, error.advice) from error
