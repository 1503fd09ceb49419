"""Functions of the module ``operator``: they mean what the operators mean."""

from __future__ import annotations

import operator
from typing import Any

from dovetail.frontend.instructions.operations import BINARY
from dovetail.frontend.interpreter.operators import IN_PLACE
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, CallRule, Keywords, rule


def _operator(function: Any) -> CallRule:
    return lambda interpreter, args, kwargs: interpreter.operate(function, *args)


rule.update({function: _operator(function) for function in BINARY})
_ITEMS: dict[Any, CallRule] = {
    operator.getitem: lambda interpreter, args, kwargs: interpreter.load_item(*args),
    operator.setitem: lambda interpreter, args, kwargs: interpreter.store_item(*args),
    operator.delitem: lambda interpreter, args, kwargs: interpreter.delete_item(*args),
}
rule.update(_ITEMS)
#: Functions that write to their first argument, also where native code calls them for items.
WRITING = frozenset({*IN_PLACE, operator.iconcat, operator.setitem, operator.delitem})


@rule(operator.iconcat)
def _iconcat(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    is_list = len(args) == 2 and not kwargs and isinstance(args[0], list)
    return interpreter.operate(operator.iadd, *args) if is_list else interpreter.native(operator.iconcat, args, kwargs)
