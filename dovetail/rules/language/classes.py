"""A ``class`` statement as Python's own ``__build_class__`` does it, with every piece of the user's code interpreted.

The class is made by the real metaclass. Hooks of Python code that ``type.__new__`` would run by itself (``__set_name__``,
``__init_subclass__``) are kept from it and called afterwards, in the same order.
"""

from __future__ import annotations

import abc
import builtins
import enum
import sys
import types
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule


def _class_attribute(kind: type, name: str) -> Any:
    for owner in kind.__mro__:
        if name in owner.__dict__:
            return owner.__dict__[name]
    return None


@rule(builtins.__build_class__)
def build_class(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """``builtins.__build_class__(body, name, *bases, metaclass=..., **kwargs)``."""
    body, name, *given = args
    keywords = dict(kwargs)
    bases = _resolve_bases(interpreter, given)
    metaclass = keywords.pop("metaclass", None)
    if metaclass is None:
        metaclass = type(bases[0]) if bases else type
    if isinstance(metaclass, type):
        metaclass = _most_derived(metaclass, bases)
    try:
        prepare = interpreter.load_attribute(metaclass, "__prepare__")
    except AttributeError:
        namespace: Any = {}
    else:
        namespace = interpreter.call(prepare, (name, bases), keywords)
    cell = interpreter.run_class_body(body, namespace)
    if bases != tuple(given):
        interpreter.store_item(namespace, "__orig_bases__", tuple(given))
    made = interpreter.call(metaclass, (name, bases, namespace), keywords)
    if isinstance(made, type) and isinstance(cell, types.CellType):
        try:
            content: Any = cell.cell_contents
        except ValueError:
            content = None
        if content is None:
            raise RuntimeError(
                f"__class__ not set defining {name!r} as {made!r}. Was __classcell__ propagated to type.__new__?"
            )
        if content is not made:
            raise TypeError(f"__class__ set to {content!r} defining {name!r} as {made!r}")
    return made


def _resolve_bases(interpreter: TracingInterpreter, given: list[Any]) -> tuple[Any, ...]:
    bases: list[Any] = []
    for base in given:
        if isinstance(base, type):
            bases.append(base)
            continue
        try:
            entries = interpreter.load_attribute(base, "__mro_entries__")
        except AttributeError:
            bases.append(base)
            continue
        found = interpreter.call(entries, (tuple(given),), {})
        if not isinstance(found, tuple):
            raise TypeError("__mro_entries__ must return a tuple")
        bases += found
    return tuple(bases)


def _most_derived(metaclass: type, bases: tuple[Any, ...]) -> type:
    for base in bases:
        if issubclass(metaclass, type(base)):
            continue
        if not issubclass(type(base), metaclass):
            raise TypeError(
                "metaclass conflict: the metaclass of a derived class must be a (non-strict) subclass of the metaclasses "
                "of all its bases"
            )
        metaclass = type(base)
    return metaclass


def _new_class(interpreter: TracingInterpreter, maker: Any, args: Arguments, kwargs: Keywords) -> Any:
    """``maker(metaclass, name, bases, namespace)`` for the ``__new__`` of ``type`` or of a metaclass of the standard library."""
    if len(args) != 4:
        return maker(*args, **kwargs)
    metaclass, name, bases, namespace = args
    hook = _own_hook(bases)
    if hook is not None:
        raise Break(
            f"the class {name} is defined, which {hook}.__init_subclass__ is told of",
            "define the class outside of the function",
        )
    named = {
        key: value for key, value in namespace.items() if _is_python(_class_attribute(type(value), "__set_name__"))
    }
    if isinstance(metaclass, type) and issubclass(metaclass, enum.EnumMeta):
        _check_enum(name, bases, namespace, named)
    elif named:
        namespace = {key: (None if key in named else value) for key, value in namespace.items()}
    made = maker(metaclass, name, bases, namespace, **kwargs)
    interpreter.created(made)
    for key, value in named.items():
        type.__setattr__(made, key, value)
    for key, value in named.items():
        _name(interpreter, made, key, value)
    return made


def _name(interpreter: TracingInterpreter, made: type, key: str, value: Any) -> None:
    try:
        interpreter.call(types.MethodType(_class_attribute(type(value), "__set_name__"), value), (made, key), {})
    except Exception as error:
        text = f"Error calling __set_name__ on {type(value).__name__!r} instance {key!r} in {made.__name__!r}"
        if sys.version_info >= (3, 12):
            error.add_note(text)
            raise
        raise RuntimeError(text) from error


def _own_hook(bases: Any) -> str | None:
    """The class among the bases' whose ``__init_subclass__`` is the user's: ``type.__new__`` would run it unwatched."""
    for base in bases:
        for owner in base.__mro__:
            hook = owner.__dict__.get("__init_subclass__")
            if _is_python(getattr(hook, "__func__", hook)) and owner.__module__ not in ("typing", "typing_extensions"):
                return str(owner.__qualname__)
    return None


def _is_python(function: Any) -> bool:
    return isinstance(function, types.FunctionType)


def _check_enum(name: str, bases: Any, namespace: Any, named: Any) -> None:
    """Members are made by the enum module's own code, which would run the user's without anybody watching."""
    places = [namespace, *(owner.__dict__ for base in bases for owner in base.__mro__ if owner.__module__ != "enum")]
    for place in places:
        for method in ("__new__", "__init__", "_generate_next_value_", "_missing_"):
            function = place.get(method)
            function = getattr(function, "__func__", function)
            if _is_python(function) and function.__module__ != "enum":
                raise _enum_break(name)
    if any(type(value).__module__ != "enum" for value in named.values()):
        raise _enum_break(name)


def _enum_break(name: str) -> Break:
    return Break(f"the enum {name}, whose members run code of its own, is defined", "define it outside of the function")


def _register(maker: Any) -> None:
    @rule(maker)
    def handler(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
        return _new_class(interpreter, maker, args, kwargs)


for _maker in (type.__new__, abc.ABCMeta.__new__, enum.EnumMeta.__new__):
    _register(_maker)
