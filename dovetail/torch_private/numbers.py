"""Symbolic numbers after they are made: bounds, the nodes that they are recorded as."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_proxy_slot
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint, statically_known_true
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils._thunk import Thunk

from dovetail.torch_private.sizes import is_made_of_data, is_symbolic

_RELATIONS = {getattr(sympy, name): getattr(operator, name.lower()) for name in ("Eq", "Ge", "Le", "Gt", "Lt")}


def new_size(environment: ShapeEnv, hint: int, name: str, low: int, high: int | None) -> Any:
    """A symbolic size of its own, which was ``hint`` and lies from ``low`` to ``high`` (checked on torch 2.11 and 2.13)."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(name)
    span = ValueRanges(low, int_oo if high is None else high)
    constraint = StrictMinMaxConstraint(vr=span, warn_only=False)
    symbol = environment.create_symbol(
        hint,
        source=source,
        dynamic_dim=DimDynamic.DYNAMIC,
        constraint_dim=constraint,
        positive=True if low > 0 else None,
        do_not_specialize_zero_one=True,
    )
    return environment.create_symintnode(symbol, hint=hint, source=source)


def is_known(condition: Any) -> bool:
    """Whether a condition on sizes holds whatever they are; nothing is guarded."""
    return bool(statically_known_true(condition))


def node_of_number(value: Any, tracer: Any) -> torch.fx.Node | None:
    """The node that computes a symbolic number or truth value; None where the tracer did not see it made."""
    slot = get_proxy_slot(value, tracer, None)
    return None if slot is None else slot.force().node


def recorded_number(function: Callable[..., Any], arguments: tuple[Any, ...], tracer: Any) -> torch.SymFloat:
    """Record a Python function of numbers that gives a float, as one node whose result is a new symbol.

    With a symbol of its own, later computations are recorded step by step and never simplified together with this one.
    """
    symbolic = [item for item in arguments if is_symbolic(item)]
    proxies = tuple(get_proxy_slot(item, tracer).force() if is_symbolic(item) else item for item in arguments)
    proxy = tracer.create_proxy("call_function", function, proxies, {})
    environment = symbolic[0].node.shape_env
    with environment.ignore_fresh_unbacked_symbols():
        fresh = environment.create_unbacked_symfloat()
    proxy.node.meta["val"] = fresh
    set_proxy_slot(fresh, tracer, Thunk(lambda: proxy))
    return fresh


def is_surely_positive(number: Any) -> bool:
    """Whether a number, symbolic or not, is positive whatever its symbols stand for."""
    return bool(number.node.expr.is_positive) if is_symbolic(number) else number > 0


def parts_of_relation(expression: Any) -> tuple[Any, ...]:
    """The operator and both sides of a relation between symbols and whole numbers; the operator is None for anything else."""
    sides = (int(side) if isinstance(side, sympy.Integer) else side for side in expression.args)
    return (_RELATIONS.get(type(expression)), *sides)


def is_expressible(expression: Any) -> bool:
    """Whether a condition can be recorded: "and" and "or" of more than two parts cannot."""
    return not any(len(part.args) > 2 for part in expression.atoms(sympy.And, sympy.Or))


def symbolic_truth(environment: ShapeEnv, expression: Any) -> torch.SymBool:
    """A condition as a symbolic truth value; nothing is decided by making it."""
    return environment.create_symboolnode(expression)


def truth_for_some(value: torch.SymInt | torch.SymBool) -> bool | None:
    """The truth of a condition on a size made of data wherever it is 1 or more, and not for 0; None for other conditions."""
    truth: Any = value if isinstance(value, torch.SymBool) else value != 0
    if not is_symbolic(truth):
        return None
    expression, size_like = truth.node.expr, truth.node.shape_env.size_like
    known = {symbol: sympy.Integer(3) for symbol in expression.free_symbols if not is_made_of_data(symbol)}
    made = expression.free_symbols - known.keys()
    if len(made) != 1 or not made <= size_like:
        return None
    empty, one, *more = (
        expression.xreplace({**known, **dict.fromkeys(made, sympy.Integer(n))}) for n in (0, 1, 2, 7, 99)
    )
    is_sure = {empty, one} == {sympy.true, sympy.false} and all(answer == one for answer in more)
    return bool(one) if is_sure else None
