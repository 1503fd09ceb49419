"""Guards on functions of torch that run as they are: the functions that they call by name, and what they answer."""

from __future__ import annotations

import math
import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, called_rule
from dovetail.frontend.values.leaves import is_leaf_value, is_patched_like_the_users, is_trusted
from dovetail.guards import Answers, Identity, ItemSource, Length
from dovetail.torch_private import autograd_nodes as private_autograd_nodes

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
#: Their answers are part of the state that every check asks for, and may be others inside of the program's own blocks.
_AMBIENT = frozenset(
    {
        *("is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "get_default_device"),
        *("is_anomaly_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_cache_enabled"),
        *("get_autocast_cpu_dtype", "get_autocast_gpu_dtype", "are_deterministic_algorithms_enabled"),
        *(
            "is_anomaly_check_nan_enabled",
            "is_deterministic_algorithms_warn_only_enabled",
            "get_deterministic_debug_mode",
        ),
        *("is_compiling", "get_float32_matmul_precision", "is_scripting"),
    }
)
# Questions about the machine, or about the state of kernels.
_FIXED = ("torch.cuda", "torch.xpu", "torch.mps", "torch.mtia", "torch.accelerator", "torch.backends")


class _Seen(set[int]):
    """The functions whose names are guarded in this capture."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        super().__init__()


@called_rule
def _guard_patched(
    interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords, result: Any
) -> None:
    """Somebody may put another function in the place of one that it calls."""
    seen = interpreter.state(_Seen)
    if type(function) is types.FunctionType and id(function) not in seen:
        _guard_names(interpreter, function, seen)


def _guard_names(interpreter: TracingInterpreter, function: types.FunctionType, seen: set[int]) -> None:
    table, values = function.__globals__, interpreter.values
    seen.add(id(function))
    if not is_patched_like_the_users(table.get("__name__")):
        return
    for name in function.__code__.co_names:
        for place in (table, torch.__dict__, math.__dict__):
            found = place.get(name)
            if isinstance(found, _FUNCTIONS):
                source = ItemSource(values.pin(place, str(place["__name__"])), name)
                values.guard(source, Identity(found), f"{function.__qualname__} was called")
                if isinstance(found, types.FunctionType) and place is table and id(found) not in seen:
                    _guard_names(interpreter, found, seen)
        if name.isupper() and type(table.get(name)) is dict:
            # A table of registered functions.
            source = ItemSource(values.pin(table, str(table["__name__"])), name)
            values.guard(source, Length(len(table[name])), f"{function.__qualname__} was called")


def _ask(function: Any) -> Any:
    return function()


@called_rule
def _guard_answer(
    interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords, result: Any
) -> None:
    """Guard the answer of a function of torch without arguments: it is state that only the function itself can read."""
    if args or kwargs or not is_leaf_value(result) or is_trusted(interpreter.frames[-1].globals.get("__name__")):
        return
    name = f"{function.__module__}.{function.__name__}"
    if function in private_autograd_nodes.PASSING_ANSWERS:
        raise Break(f"{name}() asks for what changes while the function runs", "ask outside of the compiled function")
    if function.__name__ not in _AMBIENT and not name.startswith(_FIXED):
        values = interpreter.values
        values.guard(values.pin(function, name), Answers(_ask, (), result), f"{name}() was asked")
