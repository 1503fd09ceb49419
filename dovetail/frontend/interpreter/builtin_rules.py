"""Builtin functions about objects, whose native meaning is not enough: each has a rule that guards what it reads."""

from __future__ import annotations

import collections.abc
import sys
import types
from typing import Any

import torch

from dovetail.frontend.instructions.shared import super_arguments
from dovetail.frontend.interpreter.generator import InterpretedGenerator
from dovetail.frontend.interpreter.lookup import class_attribute, python_method
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, CallRule, Keywords, kind_of, rule
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes


@rule(getattr)
def _getattr(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if len(args) == 2:
        return interpreter.load_attribute(*args)
    try:
        return interpreter.load_attribute(args[0], args[1])
    except AttributeError:
        return args[2]


@rule(hasattr)
def _hasattr(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> bool:
    try:
        interpreter.load_attribute(*args)
    except AttributeError:
        return False
    return True


@rule(isinstance)
def _isinstance(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> bool:
    value, kinds = args
    if isinstance(kinds, tuple):
        interpreter.values.whole_deep(kinds)
        return any(_isinstance(interpreter, (value, kind), {}) for kind in kinds)
    if private_sizes.is_symbolic(value):
        return isinstance(_plain_example(value), kinds)
    stands_for = kind_of(value)
    if stands_for is not None:
        return isinstance(stands_for.example(interpreter.values, value), kinds)
    if isinstance(value, torch.Tensor) and isinstance(kinds, type) and issubclass(kinds, torch.Tensor):
        if kinds is torch.nn.Buffer:
            # A plain tensor with a mark.
            return bool(interpreter.call(getattr, (value, "_is_buffer", False), {}))
        if (traced := interpreter.values.trace.input_of(value)) is not None:
            return isinstance(traced.real, kinds)
        return getattr(value, "_is_param", False) if kinds is torch.nn.Parameter else isinstance(torch.empty(0), kinds)
    check = own_check(kinds, "__instancecheck__")
    if check is not None and type(value) is not kinds:
        return bool(interpreter.truth(interpreter.call(check, (kinds, value), {})))
    if isinstance(kinds, type) and kinds is not type(value):
        interpreter.guard_order(type(value))
        interpreter.guard_registration(type(value), kinds)
    if isinstance(value, torch.nn.Module) and isinstance(kinds, type) and not issubclass(type(value), kinds):
        # A wrapper may say by ``__class__`` that it is something else.
        said = interpreter.load_attribute(value, "__class__")
        return said is not type(value) and bool(interpreter.call(issubclass, (said, kinds), {}))
    return isinstance(value, kinds)


def own_check(kinds: Any, name: str) -> types.FunctionType | None:
    """The user's own idea of what is an instance or a subclass, if a metaclass has one."""
    method = python_method(kinds, name)
    module = "" if method is None else method.__globals__.get("__name__") or ""
    return None if module.split(".", 1)[0] in sys.stdlib_module_names else method


def _plain_example(value: Any) -> Any:
    """A plain number of the type that a symbolic one stands for."""
    return {torch.SymInt: 2, torch.SymFloat: 2.0, torch.SymBool: True}[type(value)]


@rule(type)
def _type(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    if len(args) != 1:
        return interpreter.make_instance(type, args, kwargs)
    if private_sizes.is_symbolic(args[0]):
        return type(_plain_example(args[0]))
    stands_for = kind_of(args[0])
    if stands_for is not None:
        return type(stands_for.example(interpreter.values, args[0]))
    if isinstance(args[0], torch.Tensor):
        if (traced := interpreter.values.trace.input_of(args[0])) is not None:
            return type(traced.real)
        return torch.nn.Parameter if getattr(args[0], "_is_param", False) else torch.Tensor
    return types.GeneratorType if type(args[0]) is InterpretedGenerator else type(args[0])


@rule(len)
def length(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> int:
    """``len(value)``."""
    if len(args) != 1 or kwargs:
        return len(*args, **kwargs)
    value = args[0]
    if isinstance(value, torch.Tensor) and value.dim():
        return value.shape[0]
    method, _ = class_attribute(type(value), "__len__")
    if isinstance(method, types.FunctionType) and not isinstance(value, torch.Tensor):
        return interpreter.called_length(method, value)  # type: ignore[no-any-return]
    interpreter.guard_length(value)
    return len(value)


class WrappingIterator(collections.abc.Iterator[Any]):
    """An iterator whose items went through the interpreter."""

    def __init__(self, interpreter: TracingInterpreter, inner: Any) -> None:
        self.interpreter = interpreter
        self.inner = inner

    def __recipe__(self) -> tuple[Any, tuple[Any, ...]]:
        """Outside of the capture it is the iterator itself; see :mod:`dovetail.runtime.recipe`."""
        return iter, (self.inner,)

    def __next__(self) -> Any:
        done, value = self.interpreter.advance(self.inner)
        if done:
            raise StopIteration
        return value


def _pairing(function: Any, most: int | None) -> None:
    """An iterator that goes through its arguments, at ``most`` as many."""

    @rule(function)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        given = [WrappingIterator(interpreter, interpreter.iterate(item)) for item in args[:most]]
        return interpreter.values.wrap(function(*given, *args[len(given) :], **kwargs))


_pairing(zip, None)
_pairing(enumerate, 1)
_METHODS: dict[Any, CallRule] = {
    super: lambda interpreter, args, kwargs: super(*(args or super_arguments(interpreter, interpreter.frames[-1]))),
    setattr: lambda interpreter, args, kwargs: interpreter.store_attribute(*args),
    bool: lambda interpreter, args, kwargs: bool(args) and interpreter.truth(args[0]),
    torch.is_grad_enabled: lambda interpreter, args, kwargs: torch.is_grad_enabled(),
    torch.nn.Module.__call__: lambda interpreter, args, kwargs: interpreter.call_plain_module(
        args[0], args[1:], kwargs
    ),
    private_calls.MODULE_CALL_IMPL: lambda interpreter, args, kwargs: interpreter.call_module_impl(
        args[0], args[1:], kwargs
    ),
    type.__call__: lambda interpreter, args, kwargs: interpreter.make_instance(args[0], args[1:], kwargs),
    # Binding reads nothing of the object.
    types.MethodType: lambda interpreter, args, kwargs: types.MethodType(*args, **kwargs),
}
rule.update(_METHODS)
