"""Modules that make their parameters from what their first call is given: that call runs eagerly."""

from __future__ import annotations

import types
from typing import Any

import torch

from dovetail.errors import UninitialisedError
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Instead, Keywords, wrapper_rule
from dovetail.rules.refusals import refuse

refuse((torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer), "a tensor without a shape is made ({name})")


@wrapper_rule
def _first_call(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Instead | None:
    is_hook = type(function) is types.FunctionType and function.__qualname__ == "LazyModuleMixin._infer_parameters"
    # A module that the program makes itself has a first call at every call.
    if is_hook and interpreter.values.source_of(args[0]) is not None:
        raise UninitialisedError(
            f"{type(args[0]).__qualname__} makes its parameters in its first call",
            where=interpreter.locate(),
            advice="call the module eagerly first",
        )
    return None
