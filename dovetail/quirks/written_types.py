"""A tensor whose type cannot hold the result is written in place: eager raises, functionalisation converts the result.

``integers.mul_(0.5)`` is an error in eager, see ``torch.can_cast``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.quirks.registry import Example, quirk
from dovetail.trace.overrides import WRITE_CHECKS, RefusedOperatorError

_TYPES_OF_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float32, complex: torch.complex64}


def _halved(integers: torch.Tensor) -> torch.Tensor:
    return integers.clone().mul_(0.5)


def _type_of(operand: torch.Tensor | complex) -> torch.dtype:
    return operand.dtype if isinstance(operand, torch.Tensor) else _TYPES_OF_NUMBERS[type(operand)]


@quirk(WRITE_CHECKS, example=lambda: Example(_halved, [(torch.tensor([1, 2]),)], order=0))
def written_type(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Leave to eager an elementwise operator that writes to a tensor which cannot hold numbers of the type of an operand."""
    first = operator._schema.arguments[0]
    if torch.Tag.pointwise not in operator.tags or first.alias_info is None or not first.alias_info.is_write:
        return
    written = args[0] if args else kwargs[first.name]
    given = (*args, *kwargs.values())
    operands = [item for item in given if isinstance(item, torch.Tensor) or type(item) in _TYPES_OF_NUMBERS]
    if isinstance(written, torch.Tensor) and not all(
        torch.can_cast(_type_of(item), written.dtype) for item in operands
    ):
        raise RefusedOperatorError(
            f"{operator} writes to a tensor of {written.dtype}, which may not hold its result",
            advice="write to a tensor of the result's type",
        )
