"""State of the running thread: attributes of ``threading.local`` objects, its number. Read again at each call."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.lookup import class_attribute, comes_before_the_object
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, attribute_rule, rule
from dovetail.guards import ComputedSource, Equals

_load = threading.local.__getattribute__


def _of_this_thread(value: Any, attribute: str) -> Any:
    """An attribute that the running thread has given a thread-local object; raises KeyError where it has none."""
    if not isinstance(value, threading.local):
        raise TypeError("no thread-local object")
    return _load(value, "__dict__")[attribute]


def _table_of_this_thread(value: Any) -> Any:
    """The dictionary in which the running thread keeps what it has set."""
    if not isinstance(value, threading.local):
        raise TypeError("no thread-local object")
    return _load(value, "__dict__")


def _is_set_in_this_thread(value: Any, attribute: str) -> bool:
    return attribute in _table_of_this_thread(value)


def _asked(function: Callable[[], int]) -> int:
    return function()


@attribute_rule(threading.local)
def _attribute(interpreter: TracingInterpreter, target: Any, name: Any) -> Any:
    """Guard what this thread has set, and that no class has a descriptor before it; what is found elsewhere breaks the graph."""
    source = interpreter.values.source_of(target)
    own, kind = _load(target, "__dict__"), type(target)
    by_class, owner = class_attribute(kind, name)
    its_own_look_up = class_attribute(kind, "__getattribute__")[0] is not _load
    is_table = name == "__dict__" and (owner is None or isinstance(by_class, types.GetSetDescriptorType))
    if source is not None and is_table and not its_own_look_up:
        interpreter.values.note(own, ComputedSource(_table_of_this_thread, (source,), f"{source.name}.__dict__"))
        return own
    is_hidden = its_own_look_up or comes_before_the_object(by_class)
    if not is_hidden and interpreter.effects.written(own, name):
        is_hidden = name not in own
        if not is_hidden:
            return interpreter.load_item(own, name)
    if source is not None and name not in own and owner is None and not is_hidden:
        interpreter.guard_not_shadowed(kind, owner, name)
        is_set = ComputedSource(_is_set_in_this_thread, (source, name), f"{source.name} has {name}")
        interpreter.values.guard(is_set, Equals(False), "this thread has not set it")
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name, obj=target)
    if source is None or name not in own or is_hidden:
        raise Break("an attribute of a thread-local object is read", "read it outside, and hand its value on")
    interpreter.guard_not_shadowed(kind, owner, name)
    if owner is not None:
        interpreter.guard_class_item(owner, name, by_class)
    return interpreter.values.read(own[name], ComputedSource(_of_this_thread, (source, name), f"{source.name}.{name}"))


@rule(threading.get_ident)
def _number(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> int:
    """Guard the number of the thread, for tables with a row for each; a function that several threads call is not bound to one."""
    number, values = threading.get_ident(*args, **kwargs), interpreter.values
    if interpreter.trace.changes("threading.get_ident()", number):
        raise Break("several threads ask for their number", "ask outside of the compiled function")
    function = values.pin(threading.get_ident, "threading.get_ident")
    values.guard(
        ComputedSource(_asked, (function,), "threading.get_ident()"), Equals(number), "the thread was asked for"
    )
    return number
