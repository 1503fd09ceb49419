"""Objects as text: ``str``, ``repr``, ``format`` and string formatting, with the objects' own Python methods interpreted."""

from __future__ import annotations

import gc
import operator
import re
import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.lookup import class_attribute, python_method
from dovetail.frontend.interpreter.opaque import check_shown
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule, operator_rule, rule
from dovetail.frontend.values.leaves import is_leaf_value, plain_numbers
from dovetail.rules.python.conversions import as_answered
from dovetail.torch_private import sizes as private_sizes

BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}
MAXIMUM_NESTING = 50
#: A field of ``str.format`` with an attribute or an item in it.
_READING = re.compile(r"\{[^{}:!]*[.\[]")
# The texts of these show nothing of what they refer to.
_NOT_SHOWN = (type, types.ModuleType, types.FunctionType, types.CodeType, types.TracebackType, types.FrameType)


def _own_method(value: Any, name: str) -> types.FunctionType | None:
    method = python_method(value, name)
    if method is not None and method.__globals__.get("__name__") in ("dataclasses", "reprlib"):
        # A wrapper that looks out for objects that contain themselves, by identities and threads.
        return getattr(method, "__wrapped__", method)
    return method


def text_of(interpreter: TracingInterpreter, value: Any, name: str, nesting: int = 0) -> str:
    """``str(value)`` or ``repr(value)``; ``name`` is the special method."""
    value = plain_numbers(value)
    if type(value) is str and name == "__str__":
        return value
    if isinstance(value, torch.Tensor):
        raise Break("a tensor is turned into text", "print or format tensors outside of the function")
    if isinstance(value, torch.nn.Module):
        raise Break(f"{name.strip('_')}() reads a whole module", "do this outside of the function")
    method = _own_method(value, name)
    if method is not None:
        found = plain_numbers(interpreter.call(types.MethodType(method, value), (), {}))
        if not isinstance(found, str):
            raise TypeError(f"{name} returned non-string (type {type(found).__name__})")
        return found
    if name == "__str__" and class_attribute(type(value), "__str__")[1] is object:
        return text_of(interpreter, value, "__repr__", nesting)
    if type(value) in (*BRACKETS, dict) and not is_leaf_value(value):
        return _container(interpreter, value, nesting)
    _refuse_address(value, "__repr__")
    # The text of an exception is made of its arguments.
    if _holds_traced(value.args if isinstance(value, BaseException) else value):
        raise Break("an object with a tensor in it is turned into text", "print or format it outside of the function")
    return str(interpreter.call_native({"__str__": str, "__repr__": repr}[name], (value,), {}))


def _refuse_address(value: Any, *names: str) -> None:
    """Refuse a text that tells an object by its address, as that of a function, or of one with these methods from ``object``."""
    for item in value.args if isinstance(value, BaseException) else (value,):
        is_plain = all(class_attribute(type(item), name)[1] is object for name in names)
        if is_plain or isinstance(item, (types.FunctionType, types.MethodType)):
            raise Break(f"the text of a {type(item).__name__} has its address in it", "use a name instead")


def _holds_traced(value: Any) -> bool:
    """Whether the text of an object that native code writes could have a tensor in it, or a number that is a symbol here."""
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor) or private_sizes.is_symbolic(item):
            return True
        if id(item) not in seen and not isinstance(item, _NOT_SHOWN) and not is_leaf_value(item):
            seen.add(id(item))
            stack += gc.get_referents(item)
    return False


def _container(interpreter: TracingInterpreter, value: Any, nesting: int) -> str:
    if nesting > MAXIMUM_NESTING:
        raise Break("a deeply nested container is turned into text", "do this outside of the function")

    def inner(item: Any) -> str:
        return text_of(interpreter, item, "__repr__", nesting + 1)

    interpreter.values.whole(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{inner(key)}: {inner(item)}" for key, item in value.items()) + "}"
    if not value:
        return repr(value)
    start, end = BRACKETS[type(value)]
    comma = "," if type(value) is tuple and len(value) == 1 else ""
    return start + ", ".join(map(inner, value)) + comma + end


@operator_rule(operator.mod, operator.imod)
def _format_percent(interpreter: TracingInterpreter, function: Any, operands: Arguments) -> Any:
    template, values = operands
    if type(template) is not str or is_leaf_value(values):
        return NotImplemented
    return interpreter.native(function, (template, _plain(interpreter, values)), {})


@rule(str.format)
def _format_braces(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    is_read = isinstance(args[0], str) and _READING.search(args[0]) is not None
    if is_read and not all(map(_is_data, (*args, *kwargs.values()))):
        # Native code would read a symbol, and nobody would guard what it reads.
        raise Break("str.format reads attributes or items of an object", "hand over their values, or use an f-string")
    return interpreter.native(str.format, _plain(interpreter, args), _plain(interpreter, kwargs))


def _is_data(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a container of such."""
    if type(value) in (dict, list, tuple):
        return all(map(_is_data, value.values() if type(value) is dict else value))
    return is_leaf_value(value) or private_sizes.is_symbolic(value)


def _plain(interpreter: TracingInterpreter, value: Any) -> Any:
    """A value for native code to make a text of: without tensors, and with plain numbers in the place of symbolic ones."""
    check_shown(interpreter.values, value)
    _refuse_address(value, "__repr__", "__str__", "__format__")
    if type(value) in (dict, list, tuple):
        interpreter.values.whole(value)
    if type(value) is dict:
        return {key: _plain(interpreter, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(interpreter, item) for item in value)
    return plain_numbers(value)


@method_rule("__repr__", "__str__", "__format__")
def _text_of_tensor(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> str:
    raise Break("a tensor is turned into text", "print or format tensors outside of the function")


@rule(str)
def _str(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> str:
    if len(args) != 1 or kwargs:
        return str(interpreter.call_native(str, args, kwargs))
    return text_of(interpreter, args[0], "__str__")


@rule(repr)
def _repr(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> str:
    return text_of(interpreter, args[0], "__repr__")


@rule(ascii)
def _ascii(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> str:
    return text_of(interpreter, args[0], "__repr__").encode("ascii", "backslashreplace").decode("ascii")


@rule(format)
def _format(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> str:
    value, specification = plain_numbers(args[0]), (args[1] if len(args) > 1 else "")
    method = _own_method(value, "__format__")
    if method is not None:
        found = plain_numbers(interpreter.call(types.MethodType(method, value), (specification,), {}))
        return str(as_answered(format, "__format__", value, found))
    if isinstance(value, torch.Tensor) or class_attribute(type(value), "__format__")[1] is object:
        if specification and not isinstance(value, torch.Tensor):
            raise TypeError(f"unsupported format string passed to {type(value).__name__}.__format__")
        return text_of(interpreter, value, "__str__")
    return str(interpreter.call_native(format, (value, specification), {}))
