"""``out=`` of a type that cannot hold the result: eager raises, functionalisation converts the result.

``torch.add(x, y, out=integers)`` of floats is an error in eager, see ``torch.can_cast``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.quirks.registry import Example, quirk
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace.overrides import WRITE_CHECKS, RefusedOperatorError


def _into_integers(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.add(x, x, out=out)


def _runs_on_meta(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether eager's check of types lets an operator pass; no where nobody can tell."""

    def as_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return type(value)(map(as_meta, value)) if isinstance(value, (list, tuple)) else value

    with private_tracing.disable_current_modes():
        try:
            operator(*map(as_meta, args), **{name: as_meta(value) for name, value in kwargs.items()})
        except (RuntimeError, TypeError):
            return False
    return True


@quirk(
    WRITE_CHECKS,
    example=lambda: Example(_into_integers, [(torch.tensor([1.5, 2.5]), torch.empty(2, dtype=torch.int64))], order=0),
)
def out_of_another_type(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Leave to eager an operator whose ``out`` cannot hold numbers of the type of an operand."""
    outs = [kwargs.get(item.name) for item in operator._schema.arguments if item.is_out]
    operands = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
    for out in outs:
        if not isinstance(out, torch.Tensor) or all(torch.can_cast(item.dtype, out.dtype) for item in operands):
            continue
        if not _runs_on_meta(operator, args, kwargs):
            raise RefusedOperatorError(
                f"{operator} is given an out= of {out.dtype}, which may not hold its result",
                advice="use an out= of the result's type, or none",
            )
