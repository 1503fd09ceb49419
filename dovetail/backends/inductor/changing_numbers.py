"""Decompositions of operators on lists of symbolic floats, or that branch on one, into plain arithmetic.

Inductor takes symbolic floats only as tensors in plain arithmetic (:mod:`.float_inputs`). Calls with constant numbers are left to
Inductor's own decompositions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., Any]
_aten = torch.ops.aten


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    # Torch's own decomposition takes one of two formulas, by the size of the weight.
    return start + (end - start) * weight


def _has_symbol(value: Any) -> bool:
    return any(map(_has_symbol, value)) if isinstance(value, (list, tuple)) else isinstance(value, torch.SymFloat)


def _item(value: Any, place: int) -> Any:
    return value[place] if isinstance(value, (list, tuple)) else value


def _each(function: Rule) -> Rule:
    """Return the operator on lists of an operator on their items."""

    def apply(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        if not _has_symbol((args, list(kwargs.values()))):
            return NotImplemented
        return [
            function(
                tensor,
                *[_item(value, place) for value in args],
                **{name: _item(value, place) for name, value in kwargs.items()},
            )
            for place, tensor in enumerate(tensors)
        ]

    return apply


#: Operators with a list of numbers, or one number for all.
_WITH_NUMBERS: dict[str, Rule] = {
    "_foreach_add": lambda tensor, number: tensor + number,
    "_foreach_sub": lambda tensor, number: tensor - number,
    "_foreach_mul": lambda tensor, number: tensor * number,
    "_foreach_div": lambda tensor, number: tensor / number,
    "_foreach_pow": lambda tensor, number: tensor**number,
    "_foreach_addcdiv": lambda tensor, one, two, scalars=1, value=1: tensor + (one / two) * _given(scalars, value),
    "_foreach_addcmul": lambda tensor, one, two, scalars=1, value=1: tensor + (one * two) * _given(scalars, value),
    "_foreach_lerp": _lerp,
}
#: Operators with two lists of tensors, the second one multiplied by a number.
_SCALED: dict[str, Rule] = {
    "_foreach_add": lambda tensor, other, alpha=1: tensor + other * alpha,
    "_foreach_sub": lambda tensor, other, alpha=1: tensor - other * alpha,
}


def _given(scalars: Any, value: Any) -> Any:
    """Return the number, which comes by position or by name."""
    return value if type(scalars) is int and scalars == 1 else scalars


def changing_numbers(table: dict[Any, Rule]) -> dict[Any, Rule]:
    """Return decompositions for symbolic numbers, by operator; for constant numbers they call those in ``table``.

    >>> weights = changing_numbers({})[torch.ops.aten._foreach_mul.ScalarList]([torch.ones(2)], [2.0])
    >>> weights is NotImplemented
    True
    """
    found: dict[Any, Rule] = {}
    for name, function in _WITH_NUMBERS.items():
        for overload in ("ScalarList", "Scalar"):
            if hasattr(getattr(_aten, name), overload):
                found[getattr(getattr(_aten, name), overload)] = _each(function)
    for name, function in _SCALED.items():
        found[getattr(_aten, name).List] = _each(function)
    found[_aten.lerp.Scalar] = lambda start, end, weight: (
        _lerp(start, end, weight) if _has_symbol(weight) else NotImplemented
    )
    return {operator: _or_else(rule, table.get(operator)) for operator, rule in found.items()}


def _or_else(rule: Rule, other: Rule | None) -> Rule:
    if other is None:
        return rule

    def apply(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        return other(*args, **kwargs) if result is NotImplemented else result

    return apply
