"""Functions of the module ``operator``: they mean what the operators mean."""

from __future__ import annotations

import operator
from typing import Any

from dovetail.frontend.instructions.operations import BINARY
from dovetail.frontend.rules import CallRule, rule


def _operator(function: Any) -> CallRule:
    return lambda interpreter, args, kwargs: interpreter.operate(function, *args)


rule.update({function: _operator(function) for function in BINARY})
_ITEMS: dict[Any, CallRule] = {
    operator.getitem: lambda interpreter, args, kwargs: interpreter.load_item(*args),
    operator.setitem: lambda interpreter, args, kwargs: interpreter.store_item(*args),
    operator.delitem: lambda interpreter, args, kwargs: interpreter.delete_item(*args),
}
rule.update(_ITEMS)
