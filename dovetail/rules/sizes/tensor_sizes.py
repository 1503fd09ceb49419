"""Tensors in the place of sizes: ``x.view(torch.div(x.shape[0], 2, rounding_mode="floor"), -1)``.

Torch divides two numbers into a tensor, and takes a tensor of one whole number where it takes a size. Eager reads the number
out of the tensor; in a graph it depends on data. Where it was computed of sizes alone it is known, and takes the tensor's place;
otherwise the number that the graph computes does.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import method_rule, rule
from dovetail.rules.sizes.number_tensors import make_tensor, whole_number
from dovetail.rules.torch import storage_offsets  # noqa: F401  (its rule for as_strided is asked first)
from dovetail.torch_private import numbers as private_numbers

_WHOLE = (int, torch.SymInt)


def _register_division(function: Any, always: str | None) -> None:
    def divided(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = always or kwargs.get("rounding_mode")
        if len(args) != 2 or not all(type(item) in _WHOLE for item in args):
            return interpreter.call_torch(function, args, kwargs)
        quotient = _quotient(*args, mode) if mode is not None and not kwargs.keys() - {"rounding_mode"} else None
        if quotient is not None:
            return interpreter.call_torch(torch.scalar_tensor, (quotient,), {"dtype": torch.int64})
        first = make_tensor(interpreter, torch.tensor, (args[0],), {})
        return interpreter.call_torch(function, (first, args[1]), kwargs)

    rule(function)(divided)


def _quotient(left: Any, right: Any, mode: str) -> Any:
    """Whole numbers divided without a guard on either; None where their signs are not known, or there is no result."""
    if not private_numbers.is_known(right > 0) or (mode != "floor" and not private_numbers.is_known(left >= 0)):
        return None
    return left // right if mode in ("floor", "trunc") else None


@rule(torch.Size.numel)
def _numel(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The product of the sizes; torch's own is a plain number."""
    return interpreter.native(torch.Size.numel, args, kwargs) if len(args) != 1 or kwargs else math.prod(args[0])


_register_division(torch.div, None)
_register_division(torch.divide, None)
_register_division(torch.floor_divide, "floor")


def with_known_sizes(
    interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The call with the number in the place of each tensor among its sizes."""
    found = False

    def plain(item: Any) -> Any:
        nonlocal found
        if type(item) in (list, tuple, torch.Size):
            items = [plain(inner) for inner in item]
            return items if type(item) is list else tuple(items)
        number = whole_number(interpreter, item)
        found = found or number is not item
        return number

    # The tensor itself is no size; a function that makes one has none.
    owners = 1 if args and isinstance(args[0], torch.Tensor) and not hasattr(function, "__self__") else 0
    given = (*args[:owners], *map(plain, args[owners:]))
    keywords = {name: plain(item) for name, item in kwargs.items()}
    return interpreter.call_torch(function, given, keywords) if found else NotImplemented


_TAKE_SIZES = (
    *("view", "reshape", "expand", "repeat", "tile", "unflatten", "as_strided", "broadcast_to", "narrow", "unfold"),
    *("new_zeros", "new_ones", "new_empty", "zeros", "ones", "empty", "rand", "randn"),
)
method_rule(*_TAKE_SIZES)(with_known_sizes)
