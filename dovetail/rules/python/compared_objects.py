"""Objects that their own ``__eq__`` or ``__hash__`` compares, where it reads more than the objects.

Native code asks these methods (a key, a set, a search), so that nobody sees what they read. The attributes of the objects are
guarded; a global variable, a variable of a closure or an attribute of the class that decides too is not, and the graph breaks.
"""

from __future__ import annotations

import dis
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

from dovetail.frontend.code.frame import Break
from dovetail.frontend.code.points import is_bound
from dovetail.frontend.interpreter.callbacks import PARTS, callback_codes
from dovetail.frontend.interpreter.containers import HASHING
from dovetail.frontend.interpreter.lookup import instance_dict
from dovetail.frontend.interpreter.user_code import is_user_function
from dovetail.frontend.rules import comparison_rule
from dovetail.frontend.values.leaves import is_trusted

_WRITING: Final = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR"})
_TABLES: Final[tuple[dict[Any, Any], ...]] = ({}, OrderedDict())
#: Kinds of object that keep their meaning for a comparison as long as they have their name.
_FIXED: Final = (type, types.ModuleType, types.BuiltinFunctionType)


_VIEWS: Final = tuple({type(view) for one in _TABLES for view in (one.keys(), one.values(), one.items())})
PARTS += [
    (_VIEWS, tuple),
    (types.SimpleNamespace, lambda value: vars(value).values()),
    (BaseException, lambda value: value.args),
]


@comparison_rule
def _refuse_what_leads_to_objects(value: Any) -> None:
    inside = (value(),) if isinstance(value, weakref.ref) else (value,) if isinstance(value, _VIEWS) else ()
    if callback_codes(inside):
        raise Break("a view or a weak reference is compared, which asks the objects themselves", "compare the objects")


@comparison_rule
def _refuse_reads(value: Any) -> None:
    kind = type(value)
    held = instance_dict(value) or {}
    waiting = [method for name in HASHING for method in _in_classes(kind, name)]
    seen: set[Any] = set()
    while waiting:
        method = waiting.pop()
        if not isinstance(method, types.FunctionType) or not is_user_function(method) or method in seen:
            continue
        seen.add(method)
        if any(item.opname in _WRITING for code in codes_of(method.__code__) for item in dis.get_instructions(code)):
            raise Break(f"{kind.__qualname__} writes when its objects are compared", "compare them outside")
        for found in (*_variables(kind, method), *_class_data(kind, method.__code__, held)):
            inside = _function_of(found)
            if isinstance(inside, types.FunctionType):
                waiting.append(inside)
            elif not isinstance(inside, _FIXED) and not hasattr(type(inside), "__get__"):
                raise Break(
                    f"{kind.__qualname__} compares its objects by more than they hold",
                    "keep what they are compared by in the objects",
                )


def _function_of(value: Any) -> Any:
    """The Python function of a property or of a static or class method; else the value."""
    return getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of the functions, comprehensions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def _variables(kind: type, function: types.FunctionType) -> Iterator[Any]:
    """The values of the global variables and of those of closures that a function reads, and what it reads of classes."""
    found = [cell.cell_contents for cell in function.__closure__ or () if is_bound(cell)]
    for code in codes_of(function.__code__):
        names = {item.argval for item in dis.get_instructions(code) if item.opname == "LOAD_GLOBAL"}
        found += (function.__globals__[name] for name in names if name in function.__globals__)
    yield from found
    for other in found:
        if isinstance(other, (type, types.ModuleType)) and other not in kind.__mro__:
            owners = other.__mro__ if isinstance(other, type) else (other,)
            if is_trusted(other.__module__ if isinstance(other, type) else other.__name__):
                continue
            yield from (
                vars(owner)[name] for owner in owners for name in _names(function.__code__) if name in vars(owner)
            )


def _names(code: types.CodeType) -> set[str]:
    return {name for inside in codes_of(code) for name in inside.co_names}


def _class_data(kind: type, code: types.CodeType, held: dict[str, Any]) -> Iterator[Any]:
    """The attributes of the class by the names that code uses, where the object has none of its own."""
    for name in _names(code):
        if name not in held:
            yield from _in_classes(kind, name)


def _in_classes(kind: type, name: str) -> Iterator[Any]:
    """The attributes of a class and its bases by one name: a method may call the next one."""
    return (vars(owner)[name] for owner in kind.__mro__ if owner is not object and name in vars(owner))
