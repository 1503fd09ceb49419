"""PyTorch Lightning's ``self.log`` and ``self.log_dict``: numbers for the trainer, which reads them when the step has returned.

They are called after the graph, with the values that the tensors had where the program logs them. Anything else than a
tensor, a number, a flag or a name (a metric that counts, a function that reduces) breaks the graph.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.journal import Effect
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Instead, Keywords, rule, wrapper_rule
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.guards import CalleeSource
from dovetail.torch_private import sizes as private_sizes

_MODULES = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
_NAMES = ("log", "log_dict")


@wrapper_rule
def _found(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Instead | None:
    """Make the rules where the library is met first; it is not imported for them."""
    if not isinstance(function, types.FunctionType) or function.__name__ not in _NAMES:
        return None
    if function.__module__ not in _MODULES or function.__qualname__ != f"LightningModule.{function.__name__}":
        return None
    rule[function] = functools.partial(_log, function)
    return Instead(function, args, kwargs)


def _log(function: types.FunctionType, interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> None:
    """Have a call follow the graph, at every call of the program."""
    what, advice = f"self.{function.__name__} is called", "log numbers and tensors, in the forward"
    if interpreter.values.in_backward or not args or interpreter.values.source_of(args[0]) is None:
        raise Break(what, advice)
    if kwargs.get("enable_graph"):
        raise Break(f"{what} with enable_graph", advice)
    kept = [args[0], *(_at_this_time(interpreter, item, what) for item in args[1:])]
    named = {name: _at_this_time(interpreter, item, what) for name, item in kwargs.items()}
    effect = Effect(CalleeSource(), "call", [function, kept, named])
    interpreter.effects.defer(lambda: [effect])


def _at_this_time(interpreter: TracingInterpreter, value: Any, what: str) -> Any:
    """A value that later writes of the program do not change."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise Break(f"{what} with a tensor of {value.numel()} numbers", "log its mean")
        return interpreter.call(torch.clone, (interpreter.call(torch.Tensor.detach, (value,), {}),), {})
    if type(value) is dict:
        return {key: _at_this_time(interpreter, item, what) for key, item in value.items()}
    if is_leaf_value(value) or private_sizes.is_symbolic(value):
        return value
    raise Break(f"{what} with a {type(value).__name__}", "log numbers and tensors")
