"""``operator.attrgetter``, ``itemgetter`` and ``methodcaller``: what they read of an object is read by the interpreter."""

from __future__ import annotations

import operator
from typing import Any

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.values import is_leaf_value

GETTERS: tuple[type, ...] = (operator.attrgetter, operator.itemgetter, operator.methodcaller)


def get(interpreter: TracingInterpreter, getter: Any, target: Any) -> Any:
    """``getter(target)``."""
    maker, items = getter.__reduce__()
    # A method called with keywords: they are in a partial function.
    name, keywords = (maker.args[0], maker.keywords) if maker not in GETTERS else (items[0], {})
    if not all(map(is_leaf_value, (*items, *keywords.values()))):
        return interpreter.call_native(getter, (target,), {})
    if type(getter) is operator.methodcaller:
        given = items if keywords else items[1:]
        return interpreter.call(interpreter.load_attribute(target, name), given, dict(keywords))
    found = tuple(_get_one(interpreter, type(getter), target, item) for item in items)
    return found if len(found) > 1 else found[0]


def _get_one(interpreter: TracingInterpreter, kind: type, target: Any, item: Any) -> Any:
    if kind is operator.itemgetter:
        return interpreter.load_item(target, item)
    for name in item.split("."):
        target = interpreter.load_attribute(target, name)
    return target
