"""Functions that ``torch.optim`` calls while an optimizer is captured; it is interpreted like the user's own code."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.rules.optim.fused_updates import NAMES, takes_symbols
from dovetail.rules.refusals import refuse


@rule(torch.autograd.profiler.record_function)
def _record_function(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A name for a profiler, which sees the graph's operators instead."""
    return contextlib.nullcontext()


def _fused(name: str) -> None:
    """Functionalisation does not take an empty list among those that are written to, so the pure form of it is recorded."""
    written: Any = getattr(torch, name)
    pure: Any = getattr(torch.ops.aten, name.rstrip("_"))
    schema = getattr(torch.ops.aten, name).default._schema
    has_overload = "tensor_lr" in pure.overloads()

    @rule(written)
    def call(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = {argument.name: item for argument, item in zip(schema.arguments, args, strict=False)} | kwargs
        targets = [bound[argument.name] for argument in schema.arguments if argument.is_write]
        has_symbols = any(type(item) is torch.SymFloat for item in bound.values())
        operator = takes_symbols(name.rstrip("_")) if has_symbols else pure
        if isinstance(bound["lr"], torch.Tensor):
            operator = takes_symbols(name.rstrip("_"), "tensor_lr") if has_overload else pure
        results = interpreter.call_torch(operator, args, kwargs)
        for target, result in zip(targets, results, strict=False):
            as_they_were = target is bound["grads"] and bound.get("grad_scale") is None
            if as_they_were or target is bound.get("state_steps"):
                # Inductor would take a copy and a copy of it for one tensor.
                continue
            for tensor, value in zip(target, result, strict=True):
                interpreter.call_torch(torch.Tensor.copy_, (tensor, value), {})


for _name in NAMES:
    if hasattr(torch, f"{_name}_"):
        _fused(f"{_name}_")


def _layers(function: Any) -> list[Any]:
    """A function and those that it wraps: making the first optimizer of a class wraps the class's ``step``."""
    found = [function]
    while hasattr(found[-1], "__wrapped__"):
        found.append(found[-1].__wrapped__)
    return found


refuse(
    _layers(torch.optim.LBFGS.step),
    "the values of losses decide how often LBFGS calls the closure",
    "compile the closure and call step() outside",
)
