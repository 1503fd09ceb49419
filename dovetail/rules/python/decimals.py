"""Decimal numbers are computed natively, by the thread's context: its precision, rounding and traps are guarded."""

from __future__ import annotations

import decimal
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.call_tables import IMPURE_BUILTINS
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, attribute_rule, rule
from dovetail.guards import ComputedSource, Equals

for _function in (decimal.getcontext, decimal.localcontext):
    IMPURE_BUILTINS[_function] = f"decimal.{_function.__name__}() hands out state that nobody guards"


def _context(module: Any) -> tuple[Any, ...]:
    """All of the thread's context but its flags."""
    context = module.getcontext()
    traps = tuple([kind.__name__ for kind, is_on in context.traps.items() if is_on])
    return context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp, traps


@rule(decimal.Decimal, decimal.Decimal.from_float)
def _number(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """Whatever is computed with it depends on the context; decimal numbers from outside break the graph."""
    values = interpreter.values
    source = ComputedSource(_context, (values.pin(decimal, "decimal"),), "decimal.getcontext()")
    values.guard(source, Equals(_context(decimal)), "a decimal number is made")
    return interpreter.native(decimal.Decimal, args, kwargs)


@attribute_rule(decimal.Context)
def _attribute(interpreter: TracingInterpreter, context: Any, name: Any) -> Any:
    """Flags and traps are found by native code, not on the class, and whatever is computed changes the flags."""
    raise Break(f"the {name} of a decimal context is read", "read it outside of the compiled function")
