"""Functions of torch whose C++ asks for plain sizes, as an operator that takes symbolic ones.

The operator is the one that the function calls in the end, so that its numbers are the same and a backend fuses it as ever. What
else the function does, how the size of its result follows above all, is said here as torch's C++ says it. With plain sizes nothing
changes, and for arguments that are not known here torch's own function is called.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import method_rule
from dovetail.rules.sizes.number_tensors import with_owner
from dovetail.torch_private import sizes as private_sizes


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and private_sizes.has_symbols(value)


@method_rule("rand", "randn", "randint")
def _random(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "generator" not in kwargs or kwargs["generator"] is not None:
        return NotImplemented
    # The same numbers; only the operator without the argument takes symbolic sizes.
    return interpreter.call_torch(function, args, {name: item for name, item in kwargs.items() if name != "generator"})


@method_rule("sgn")
def _sign(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same numbers; the gradient of ``sgn`` are zeros without memory, which have a plain size."""
    given = with_owner(function, args)
    if len(given) != 1 or kwargs or not _is_symbolic(given[0]) or given[0].is_complex():
        return NotImplemented
    return interpreter.call_torch(torch.sign, given, {})


@method_rule("masked_select")
def _selected(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By an index: the gradient of ``masked_select`` itself works out the size of both arguments together as plain numbers."""
    given = with_owner(function, args)
    is_known = len(given) == 2 and not kwargs and any(map(_is_symbolic, given)) and given[1].dtype is torch.bool
    if not is_known or not (given[0].requires_grad and torch.is_grad_enabled()):
        return NotImplemented
    return interpreter.call_torch(
        torch.Tensor.__getitem__, interpreter.call_torch(torch.broadcast_tensors, given, {}), {}
    )
