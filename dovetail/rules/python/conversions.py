"""``int(x)``, ``hash(x)``, ``round(x)`` and the like, with the objects' own methods interpreted."""

from __future__ import annotations

import operator
import os
import types
import warnings
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.builtin_rules import WrappingIterator
from dovetail.frontend.interpreter.lookup import MISSING, class_attribute, python_method
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import STAND_INS, Arguments, Keywords, rule
from dovetail.frontend.values.aliases import guard_key
from dovetail.frontend.values.leaves import plain_numbers
from dovetail.frontend.values.values import Values
from dovetail.rules.sizes.number_tensors import WHOLE_NUMBERS, number_of
from dovetail.rules.torch.branches_on_data import assert_in_graph, may_assert
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing

# The types with which these are answered. Python cuts the number of a hash down to a word.
_ANSWERS = {int: int, float: float, complex: complex, bytes: bytes, hash: None, format: str, os.fspath: str, iter: None}


def as_answered(function: Any, method_name: str, owner: Any, answer: Any) -> Any:
    """The result of a builtin function for the answer of an ``owner``'s own method: an answer of a wrong type is Python's error."""
    if function not in _ANSWERS or private_sizes.is_symbolic(answer) or type(answer) is _ANSWERS[function]:
        return answer
    kind = type(owner)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return function(type(kind.__name__, (), {**names, method_name: lambda *_: answer})())


def _number_of_tensor(interpreter: TracingInterpreter, function: Any, value: torch.Tensor) -> Any:
    """``int(tensor)`` or ``float(tensor)`` in the graph; None where Python asks torch for a plain number."""
    number = number_of(interpreter, value) if function is int else None
    if number is not None or any(type(size) is not int or size != 1 for size in value.shape):
        return number
    if function is int and value.dtype in WHOLE_NUMBERS:
        return interpreter.call(torch.Tensor.item, (value,), {})
    if function is int and not value.is_complex() and may_assert(interpreter):
        value = interpreter.call(torch.Tensor.detach, (value,), {})
        # What is no number, or too large for 64 bits, is an error or a longer number in Python.
        assert_in_graph(
            interpreter.call(torch.Tensor.abs, (value.double(),), {}) < 2.0**62, "a float becomes a whole number"
        )
        return interpreter.call(torch.Tensor.item, (interpreter.call(torch.Tensor.to, (value, torch.int64), {}),), {})
    if function is float and not value.is_complex():
        if value.requires_grad:
            _warn_of_a_gradient(interpreter)
            value = interpreter.call(torch.Tensor.detach, (value,), {})
        wide = interpreter.call(torch.Tensor.to, (value, torch.float64), {})
        return interpreter.call(torch.Tensor.item, (wide,), {})
    return None


def _warn_of_a_gradient(interpreter: TracingInterpreter) -> None:
    """Torch warns once in the life of a process where a tensor that requires a gradient becomes a float."""
    with private_tracing.disable_current_modes(), warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        float(torch.zeros((), requires_grad=True))
    where = interpreter.values.where()
    for item in given:
        if where is None:
            warnings.warn(item.message, stacklevel=2)
        else:
            warnings.warn_explicit(item.message, item.category, where.file, where.line)


def _conversion(function: Any, method_name: str) -> Any:
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        if function is pow and len(args) == 2 and not kwargs:
            return interpreter.operate(operator.pow, *args)
        if function is divmod and len(args) == 2 and not kwargs and any(map(private_sizes.is_symbolic, args)):
            # A symbolic size has no method of this name.
            return tuple(interpreter.operate(half, *args) for half in (operator.floordiv, operator.mod))
        if args:
            value = args[0]
            if type(value) in STAND_INS:
                return STAND_INS[type(value)].call(interpreter, function, args, kwargs)
            if private_sizes.is_symbolic(value):
                if (function is int and isinstance(value, torch.SymInt)) or (
                    function is float and isinstance(value, torch.SymFloat)
                ):
                    return value
                if function is float and len(args) == 1 and private_sizes.is_data_number(value):
                    return torch.sym_float(value)
                exact = NotImplemented if kwargs else interpreter.derive(function, args)
                if exact is not NotImplemented:
                    return exact
                if function not in (abs, divmod, pow):
                    args = tuple(plain_numbers(item) for item in args)
                    value = args[0]
            if isinstance(value, torch.Tensor):
                if function is hash:
                    raise Break("a tensor is hashed", "use an index instead")
                number = _number_of_tensor(interpreter, function, value) if len(args) == 1 else None
                if number is not None:
                    return number
            else:
                method = python_method(value, method_name)
                if method is not None:
                    answer = interpreter.call(types.MethodType(method, value), args[1:], kwargs)
                    return as_answered(function, method_name, value, answer)
                # Native code would go through a copy of a list of tensors, and miss what the program puts into it meanwhile.
                is_copied = type(value) is list and interpreter.native_argument(value) is not value
                if function is reversed and (is_copied or _is_sequence(value)):
                    return _Backwards(interpreter, value, interpreter.call(len, args, {}))
                if function is hash:
                    guard_key(interpreter.values, value, is_old=True)
                    _refuse_new(interpreter.values, value)
                    return hash(value)
                if isinstance(value, (list, tuple, dict, set)):
                    interpreter.values.whole_deep(value)
        if isinstance(function, type) or function in (abs, divmod, pow):
            return interpreter.native(function, args, kwargs)
        return interpreter.call_native(function, args, kwargs)

    return handler


def _is_sequence(value: Any) -> bool:
    """Whether it is gone through backwards by methods of its own that give its length and its items."""
    has_own = class_attribute(type(value), "__reversed__")[0] is not MISSING
    return not has_own and all(python_method(value, name) for name in ("__len__", "__getitem__"))


class _Backwards(WrappingIterator):
    """``reversed(sequence)``: its items are read when they are asked for, as in eager."""

    def __init__(self, interpreter: TracingInterpreter, sequence: Any, count: int) -> None:
        super().__init__(interpreter, sequence)
        self.place = count - 1

    def __recipe__(self) -> tuple[Any, ...]:
        """Outside of the capture it is Python's own, which goes on at the same item."""
        return reversed, (self.inner,), self.place

    def __next__(self) -> Any:
        try:
            if self.place >= 0:
                item = self.interpreter.load_item(self.inner, self.place)
                self.place -= 1
                return item
        except (IndexError, StopIteration):
            self.place = -1
        raise StopIteration


def _refuse_new(values: Values, value: Any) -> None:
    """The hash of a plain object is a number made of its address: refuse it for one that is another object at each call."""
    if isinstance(value, (tuple, frozenset)):
        for item in value:
            _refuse_new(values, item)
    elif class_attribute(type(value), "__hash__")[1] is object and values.source_of(value) is None:
        raise Break("the hash of an object made in the function is asked for", "use an index instead")


for _function in (int, float, complex, hash, bytes, abs, round, divmod, pow, reversed):
    rule(_function)(_conversion(_function, f"__{_function.__name__}__"))
