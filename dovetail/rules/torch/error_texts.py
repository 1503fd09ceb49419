"""Names of types in the errors that Python itself raises: a traced tensor has a type of its own, eager's error names eager's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, error_rule
from dovetail.torch_private import tensors as private_tensors

_TRACED = private_tensors.FunctionalTensor.__name__


@error_rule
def _tell(interpreter: TracingInterpreter, error: BaseException, operands: Arguments) -> None:
    tell_shown_names(error, operands)


def tell_shown_names(error: BaseException, operands: Sequence[Any] = ()) -> None:
    """Put the names of the types that the program sees into an error's text, in the order of the operands.

    >>> error = TypeError("unsupported operand type(s) for +: 'FunctionalTensor' and 'module'")
    >>> tell_shown_names(error)
    >>> str(error)
    "unsupported operand type(s) for +: 'Tensor' and 'module'"
    """
    if not any(type(item) is str and _TRACED in item for item in error.args):
        return
    names = [name for item in operands for name in _names(item)] or [torch.Tensor.__name__]
    error.args = tuple(_told(item, names) if type(item) is str else item for item in error.args)


def shown_name(value: Any) -> str:
    """The name of the type that the program sees.

    >>> shown_name(torch.ones(1)), shown_name(3)
    ('Tensor', 'int')
    """
    if type(value).__name__ != _TRACED:
        return type(value).__name__
    return torch.nn.Parameter.__name__ if getattr(value, "_is_param", False) else torch.Tensor.__name__


def _names(value: Any) -> list[str]:
    if isinstance(value, torch.Tensor):
        return [shown_name(value)]
    if type(value) in (list, tuple):
        return [name for item in value for name in _names(item)]
    return []


def _told(text: str, names: Sequence[str]) -> str:
    parts = text.split(_TRACED)
    told = [names[min(number, len(names) - 1)] for number in range(len(parts) - 1)]
    return parts[0] + "".join(name + part for name, part in zip(told, parts[1:], strict=True))
