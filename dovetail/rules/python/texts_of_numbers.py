"""Texts of numbers that change from call to call, and texts that change themselves: ``f"epoch-{n}.pt"``, ``"%.3f" % loss.item()``.

The program sees a stand-in, which it may hand on, store, return, or make a longer text of; the text is written when it leaves the
graph. All else (a comparison, a method, a key, native code) is given the text of this call, to which the entry is then held.
"""

from __future__ import annotations

import operator
import re
import string
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dovetail.frontend.code.frame import Break, Frame
from dovetail.frontend.interpreter.call_tables import IMPURE_BUILTINS, stores_its_arguments
from dovetail.frontend.interpreter.lookup import class_attribute
from dovetail.frontend.interpreter.user_code import calls_user_code
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import (
    Arguments,
    Keywords,
    ValueKind,
    changing_rule,
    error_rule,
    first_rule,
    format_rule,
    number_rule,
    operator_rule,
    rule,
    value_kind,
)
from dovetail.frontend.values.leaves import PLAIN, plain_numbers
from dovetail.frontend.values.values import Values
from dovetail.guards import Distinct, Equals, SameObject, Source, TypeIs
from dovetail.rules.sizes.places import end_before_store
from dovetail.runtime.recipe import Recipe, SourceItem
from dovetail.runtime.recipe_builder import RecipeBuilder
from dovetail.torch_private import sizes as private_sizes

_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_KNOWN = (str, int, float, bool, *_SYMBOLIC)
#: A conversion of ``%``: a star takes a width from the values, and ``c`` takes few numbers.
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?[hlL]?(.)")
_WHOLE_CONVERSIONS = frozenset("diouxX")
_JOINING = {operator.add: operator.add, operator.iadd: operator.add}
_PERCENT = (operator.mod, operator.imod)
_CONTAINERS, _MOST_ITEMS = (list, tuple, dict), 64
_PLAIN_ITERABLES = (list, tuple, dict, set, frozenset, str)
_ASKING = (type, dict, list, tuple)
#: Functions that are given the stand-ins themselves.
TAKES_TEXTS: set[Any] = {setattr, isinstance}


class DeferredText:
    """A text that is written when it leaves the graph, by ``write(*parts)``."""

    def __init__(self, write: Callable[..., str], parts: Arguments) -> None:
        self.write, self.parts = write, parts

    def text(self) -> str:
        """The text of this call, to which the entry is then held."""
        return self.write(*plain_numbers(self.parts))

    def shown(self) -> str | None:
        """The text of this call, to which nothing is held; None where the data decides about it."""
        if any(map(private_sizes.is_data_number, self.parts)):
            return None
        hints = [
            item.node.hint if type(item) in _SYMBOLIC else item.shown() if is_text(item) else item
            for item in self.parts
        ]
        return None if any(item is None for item in hints) else self.write(*hints)

    def __bool__(self) -> bool:
        if self.write in (str, repr, format) and type(self.parts[0]) in _SYMBOLIC:
            return True  # The text of a number is never empty.
        if self.write in (operator.add, _join) and any(self.parts[self.write is _join :]):
            return True
        return bool(self.text())

    def __getattr__(self, name: str) -> Any:
        if not hasattr(str, name):
            raise AttributeError(f"'str' object has no attribute {name!r}", name=name)
        return getattr(self.text(), name)


class ChangingText(DeferredText):
    """A text that was read, and has changed since an earlier capture."""

    def __init__(self, values: Values, value: str, source: Source) -> None:
        super().__init__(self._hold, ())
        self._values, self._value, self.source = values, value, source

    def shown(self) -> str:
        """The text that was read."""
        return self._value

    def _hold(self) -> str:
        self._values.guard(self.source, Equals(self._value), f"{self.source.name} was read")
        return self._value


PLAIN.update(dict.fromkeys((DeferredText, ChangingText), DeferredText.text))


def _as_plain(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.text(), name)(*map(plain_numbers, args))


for _name in (
    *("len", "iter", "contains", "getitem", "hash", "repr", "str", "format", "add", "mul", "mod"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
):
    # For native code, which knows no stand-ins.
    setattr(DeferredText, f"__{_name}__", _as_plain(f"__{_name}__"))


_TEXTS = (DeferredText, ChangingText)


def is_text(value: Any) -> bool:
    """Whether a value stands for a text that changes."""
    return type(value) in _TEXTS


def _holds_text(values: Iterable[Any], depth: int = 2) -> bool:
    """Whether texts are among values, or in small containers among them: native code asks a stand-in for its text by itself."""
    for value in values:
        kind = type(value)
        if kind in _TEXTS:
            return True
        if kind in _CONTAINERS and depth and 0 < len(value) <= _MOST_ITEMS:
            items = value.values() if kind is dict else value
            if _holds_text(items, depth - 1):
                return True
    return False


def _taken(value: Any) -> Any:
    """A value with the texts of this call in it. Lists and dictionaries stay the same objects: others may hold or change them."""
    kind = type(value)
    if kind in _TEXTS:
        return value.text()
    if kind not in _CONTAINERS or not _holds_text((value,)):
        return value
    if kind is tuple:
        return tuple(map(_taken, value))
    for takes in (is_text, _holds_text_inside):
        # The texts first, so that containers that hold one another come to an end.
        for key, item in [*(value.items() if kind is dict else enumerate(value))]:
            if takes(item):
                value[key] = _taken(item)
    return value


def _holds_text_inside(value: Any) -> bool:
    return type(value) in _CONTAINERS and _holds_text((value,))


def _defer(write: Callable[..., str], *parts: Any) -> Any:
    """The text that ``write(*parts)`` is; NotImplemented where it is the same at every call, or no text."""
    if not all(is_text(item) or type(item) in _KNOWN for item in parts):
        return NotImplemented
    if all(type(item) not in _SYMBOLIC and not is_text(item) for item in parts):
        return NotImplemented
    examples = {torch.SymInt: 2, torch.SymFloat: 2.5, DeferredText: "text", ChangingText: "text"}
    try:
        write(*(examples.get(type(item), item) for item in parts))
    except Exception:  # noqa: BLE001  (the ordinary way raises it where the program does)
        return NotImplemented
    return DeferredText(write, parts)


# --- what makes texts --------------------------------------------------------------------------------------------------


def _percent(template: str, *values: Any) -> str:
    return template % values


def _join(separator: str, *items: Any) -> str:
    return separator.join(items)


def _braces(template: str, *values: Any) -> str:
    return template.format(*values)


def _defer_percent(template: Any, values: Any) -> Any:
    given = values if type(values) is tuple else (values,)
    if type(template) is not str or any(type(item) not in _KNOWN and not is_text(item) for item in given):
        return NotImplemented
    found = _CONVERSION.findall(template.replace("%%", ""))
    for (width, precision, conversion), item in zip(found, given, strict=False):
        is_whole = conversion in _WHOLE_CONVERSIONS and type(item) in (float, torch.SymFloat)
        if "*" in (width, precision) or conversion == "c" or is_whole:
            return NotImplemented
    return _defer(_percent, template, *given)


def _defer_braces(template: str, values: Arguments) -> Any:
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError:
        return NotImplemented
    for _, name, specification, _ in fields:
        if name and not name.isdecimal():
            return NotImplemented
        if specification and ("{" in specification or specification.endswith("c")):
            return NotImplemented
    return _defer(_braces, template, *values)


def _defer_format(value: Any, specification: Any = "") -> Any:
    if type(specification) is not str or specification.endswith("c"):
        return NotImplemented
    return _defer(format, value, specification)


@format_rule
def _formatted(interpreter: TracingInterpreter, frame: Frame, value: Any, specification: str) -> Any:
    return _defer_format(value, specification)


def _operate_percent(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    return _defer_percent(*operands)


for _function in _PERCENT:
    # Before the rule that has the numbers of this call written.
    operator_rule[_function] = [_operate_percent, *operator_rule.get(_function, ())]


def _is_the_same(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    """Whether two texts are one object."""
    if function is not operator.is_ or not any(map(is_text, operands)):
        return NotImplemented
    left, right = operands
    if not all(is_text(item) or type(item) is str for item in operands):
        return False
    if any(type(item) is DeferredText for item in operands):
        # One that is made now is another object, unless it is so short that Python has only one.
        return _taken(left) is _taken(right)
    values = interpreter.values
    one, other = (item.source if is_text(item) else values.pin(item, repr(item)) for item in operands)
    is_same = (left.shown() if is_text(left) else left) is (right.shown() if is_text(right) else right)
    predicate = SameObject((other,)) if is_same else Distinct((other,))
    values.guard(one, predicate, f"{one.name} is compared with {other.name}")
    return is_same


number_rule.insert(0, _is_the_same)


@operator_rule(operator.setitem)
def _store_item(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    """A text that changes as a key."""
    items, key, _ = operands
    if is_text(key):
        end_before_store(interpreter, items, key.shown())
    return NotImplemented


@first_rule
def _call(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A call that makes a text of numbers or texts, or one of native code that is given such texts."""
    if args and not kwargs and (found := _made_by_call(interpreter, function, args)) is not NotImplemented:
        return found
    if not (_holds_text(args) or _holds_text(kwargs.values())):
        return NotImplemented
    if function is setattr and len(args) == 3 and is_text(args[1]):
        return interpreter.call(setattr, (args[0], _taken(args[1]), args[2]), {})
    if _takes_texts(function):
        return NotImplemented
    return interpreter.call(function, tuple(map(_taken, args)), {key: _taken(item) for key, item in kwargs.items()})


def _made_by_call(interpreter: TracingInterpreter, function: Any, args: Arguments) -> Any:
    if (function is str or function is repr) and len(args) == 1 and type(args[0]) in (*_SYMBOLIC, *_TEXTS):
        return args[0] if function is str and is_text(args[0]) else _defer(function, args[0])
    if function is format:
        return _defer_format(*args[:2])
    if function is str.join and len(args) == 2 and type(args[0]) is str:
        function, args = args[0].join, args[1:]
    owner = function.__self__ if type(function) is types.BuiltinFunctionType else None
    if type(owner) is str and function.__name__ == "format":
        return _defer_braces(owner, args)
    if type(owner) is str and function.__name__ == "join" and len(args) == 1:
        return _joined(interpreter, owner, args[0])
    return NotImplemented


def _joined(interpreter: TracingInterpreter, separator: str, items: Any) -> Any:
    """``separator.join(items)``."""
    if type(items) not in _PLAIN_ITERABLES and hasattr(type(items), "__iter__"):
        # As join does itself, which wants texts.
        items = interpreter.drain(items)
        return interpreter.call(separator.join, (items,), {})
    if type(items) not in (list, tuple) or not _holds_text(items, 0):
        return NotImplemented
    # The items that it had before are constants.
    interpreter.values.whole(items)
    return _defer(_join, separator, *items)


def _takes_texts(function: Any) -> bool:
    """Whether a function is given the stand-ins themselves: what is interpreted, stores them, or ends the graph."""
    if isinstance(function, type):
        starters = (class_attribute(function, name)[0] for name in ("__init__", "__new__"))
        is_python = any(isinstance(item, (types.FunctionType, staticmethod)) for item in starters)
        return is_python or any(function is kind for kind in _ASKING)
    inner = function.__func__ if type(function) is types.MethodType else function
    if type(inner) in (types.FunctionType, types.BuiltinFunctionType) and inner in TAKES_TEXTS:
        return True
    if type(function) is types.BuiltinFunctionType:
        return function in IMPURE_BUILTINS or stores_its_arguments(function)
    if type(function) is types.FunctionType and function.__module__ == __name__:
        return True
    return not (type(function) is types.FunctionType and function in rule) and calls_user_code(function)


@error_rule
def _shown(interpreter: TracingInterpreter, error: BaseException, operands: Arguments) -> None:
    """Native code has found a stand-in where it wants a text."""
    if any(kind.__name__ in str(error) for kind in (DeferredText, ChangingText)):
        raise Break("native code is given a text of numbers that change", "make the text outside of the function")


@changing_rule
def _changing(values: Values, value: Any, source: Source) -> Any:
    """A text that was read and has changed since an earlier capture."""
    if type(value) is not str or values.in_backward or not values.trace.changes(("text", source.name), value):
        return NotImplemented
    values.guard(source, TypeIs(str), f"{source.name} was read")
    return ChangingText(values, value, source)


class _Kind(ValueKind):
    """Texts that change."""

    def claims(self, real: torch.Tensor) -> bool:
        """No tensor is one."""
        return False

    def holds(self, value: Any) -> bool:
        """Whether this is a stand-in."""
        return is_text(value)

    def example(self, values: Values, value: Any) -> Any:
        """A text."""
        return "text"

    def leave(self, interpreter: TracingInterpreter, builder: RecipeBuilder, value: Any) -> Recipe:
        """The text is written, or read again."""
        if type(value) is ChangingText:
            return SourceItem(value.source.fetch)
        return builder.made(value, value.write, value.parts)

    def attribute(self, interpreter: TracingInterpreter, value: Any, name: str) -> Any:
        """``value.name`` of the text of this call."""
        return str if name == "__class__" else interpreter.load_attribute(value.text(), name)

    def call(self, interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
        """An operator, or a function that was told apart before."""
        if function in _JOINING and all(is_text(item) or type(item) is str for item in args):
            return _defer(_JOINING[function], *args)
        found = _defer_percent(*args) if function in _PERCENT else NotImplemented
        if found is not NotImplemented:
            return found
        given = tuple(map(_taken, args))
        if getattr(function, "__module__", None) == "_operator":
            return interpreter.operate(function, *given)
        return interpreter.call(function, given, {key: _taken(item) for key, item in kwargs.items()})


value_kind(_Kind(), DeferredText, ChangingText)
