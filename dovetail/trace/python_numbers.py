"""Functions of Python numbers that a graph calls, and numbers as tensors."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.errors import OutgrownError


def real_power(base: float, exponent: float) -> float:
    """``base ** exponent`` as Python computes it. Raises :class:`OutgrownError` for a complex result.

    >>> real_power(4.0, 0.5)
    2.0
    """
    result = base**exponent
    if isinstance(result, complex):
        raise OutgrownError(
            f"{base!r} ** {exponent!r} is a complex number; the graph was compiled for real ones",
            advice="keep this number out of the compiled function",
        )
    return result  # type: ignore[no-any-return]


def number_as_tensor(value: Any) -> torch.Tensor:
    """A symbolic number as a traced tensor without dimensions."""
    kinds = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}
    with torch.no_grad():
        return torch.scalar_tensor(value, dtype=kinds[type(value)])
