"""Look-ups in classes without running code of the program's, and the guards that they need."""

from __future__ import annotations

import abc
import enum
import sys
import types
from typing import Any

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.call_tables import runs_natively
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_leaf_value, is_patched_like_the_users, is_trusted
from dovetail.guards import Answers, AttributeSource, HasNoKey, Identity, ItemSource, Source, TypeIs
from dovetail.guards.reading import class_order, is_heap_type

MISSING = object()
MODULE_TABLES = ("_parameters", "_buffers", "_modules")


def class_attribute(kind: type, name: str) -> tuple[Any, type | None]:
    """The attribute as it stands in the class dictionaries, and the class that has it."""
    for owner in kind.__mro__:
        if name in owner.__dict__:
            return owner.__dict__[name], owner
    return MISSING, None


def instance_dict(target: Any) -> dict[str, Any] | None:
    """An object's own dictionary."""
    try:
        found = object.__getattribute__(target, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def python_descriptor(found: Any, method: str) -> types.FunctionType | None:
    """``__get__``, ``__set__`` or ``__delete__`` of a descriptor, if it is written in Python."""
    function, _ = class_attribute(type(found), method)
    return function if isinstance(function, types.FunctionType) else None


def comes_before_the_object(found: Any) -> bool:
    """Whether an attribute of the class is read before the object's dictionary: a data descriptor with ``__get__``."""
    kind = type(found)
    return hasattr(kind, "__get__") and (hasattr(kind, "__set__") or hasattr(kind, "__delete__"))


def python_method(value: Any, name: str) -> types.FunctionType | None:
    """A special method that is Python code to interpret, or None."""
    method, _ = class_attribute(type(value), name)
    if isinstance(method, types.FunctionType) and not runs_natively(method.__globals__.get("__name__") or ""):
        return method
    return None


def has_native_method(value: Any, name: str) -> bool:
    """Whether a special method is native code that does more than ``object`` does."""
    method, owner = class_attribute(type(value), name)
    return method is not MISSING and owner is not object and python_method(value, name) is None


class LookupGuards(TracingInterpreter):
    """The part of the interpreter that guards look-ups in classes."""

    def needs_no_guard(self, owner: type) -> bool:
        """Whether a class cannot change between calls."""
        return is_trusted(owner.__module__)

    def is_setting(self, owner: type, found: Any) -> bool:
        """Whether data in a class of torch's is a switch, or something that the user's own code asks for."""
        if owner.__module__.split(".", 1)[0] != "torch" or not is_leaf_value(found) or issubclass(owner, enum.Enum):
            return False
        return is_heap_type(owner) and (type(found) is bool or self.asked_by_user())

    def asked_by_user(self) -> bool:
        """Whether the code that runs is not torch's own."""
        return bool(self.frames) and not is_trusted(self.frames[-1].globals.get("__name__"))

    def guard_order(self, kind: type) -> None:
        if not self.needs_no_guard(kind):
            source = AttributeSource(self.values.pin(kind, kind.__qualname__), "__mro__")
            self.values.guard(source, Identity(class_order(kind)), f"what {kind.__qualname__} inherits was asked")

    def guard_registration(self, kind: type, among: Any) -> None:
        if not isinstance(among, abc.ABCMeta) or among in class_order(kind):
            return
        if among.__dict__.get("_is_protocol"):
            raise Break(
                f"isinstance looks for the members of {among.__qualname__}", "ask for the attributes that you need"
            )
        if not self.needs_no_guard(among) or (is_heap_type(kind) and not self.needs_no_guard(kind)):
            reason = f"whether {kind.__qualname__} is a subclass of {among.__qualname__} was asked"
            asked = Answers(issubclass, (among,), issubclass(kind, among))
            self.values.guard(self.values.pin(kind, kind.__qualname__), asked, reason)

    def guard_not_shadowed(self, kind: type, owner: type | None, name: str, after: type | None = None) -> None:
        """Guard that a class inherits from the same ones, and that none of them before ``owner`` in the order of look-up
        (None: no class at all) gets such an attribute; the look-up begins behind ``after``.
        """
        if kind is owner:
            return
        self.guard_order(kind)
        order = class_order(kind)
        for earlier in order if after is None else order[order.index(after) + 1 :]:
            if earlier is owner:
                return
            if not self.needs_no_guard(earlier):
                source = AttributeSource(self.values.pin(earlier, earlier.__qualname__), "__dict__")
                self.values.guard(source, HasNoKey(name), f"{earlier.__qualname__} has no {name} of its own")

    def guard_class_item(self, owner: type, name: str, found: Any) -> None:
        """Guard that a class still has the same function, property, static or class method under a name."""
        if self.needs_no_guard(owner) and not (is_heap_type(owner) and is_patched_like_the_users(owner.__module__)):
            return
        source: Source = AttributeSource(self.values.pin(owner, owner.__qualname__), name)
        inside = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
        if isinstance(inside, property) and type(found) not in (property, staticmethod):
            source = self.class_item_source(owner, name)
        if isinstance(found, classmethod):
            source = AttributeSource(source, "__func__")
        if isinstance(inside, (types.FunctionType, property)):
            self.values.guard(source, Identity(inside), f"{owner.__qualname__}.{name} was found on the class")

    def guard_stays_hidden(self, kind: type, name: str) -> None:
        """Guard that data in a class, which an attribute of the object hides, becomes no descriptor, which would come first."""
        found, owner = class_attribute(kind, name)
        is_open = owner is not None and not hasattr(type(found), "__set__") and not self.needs_no_guard(owner)
        if owner is not None and is_open and not self.effects.attribute_written(owner, name):
            source = self.class_item_source(owner, name)
            self.values.guard(
                source, TypeIs(type(found)), f"{owner.__qualname__}.{name} is hidden by that of the object"
            )

    def found_on_class(self, owner: type, name: str, found: Any) -> Any:
        """A descriptor as it stands in a class: with where it can be found again."""
        if self.needs_no_guard(owner) or is_leaf_value(found):
            return self.values.wrap(found)
        source = self.class_item_source(owner, name)
        if type(found).__module__.split(".", 1)[0] in sys.stdlib_module_names:
            # Their content never changes, and may be a lock.
            self.values.guard(source, Identity(found), f"{owner.__qualname__}.{name} was found on the class")
            return self.values.wrap(found)
        return self.values.read(found, source)

    def part_on_class(self, owner: type, name: str, found: Any, part: str) -> Any:
        """The function in a static method, class method or property that stands in a class."""
        inside = getattr(found, part)
        if isinstance(inside, types.FunctionType) or self.needs_no_guard(owner):
            return inside
        return self.values.read(inside, AttributeSource(self.class_item_source(owner, name), part))

    def class_item_source(self, owner: type, name: str) -> Source:
        """The source of an item of a class dictionary."""
        return ItemSource(AttributeSource(self.values.pin(owner, owner.__qualname__), "__dict__"), name)

    def call_descriptor(self, method: str, owner: type, name: str, found: Any, *args: Any) -> Any:
        """Call a method, written in Python, of a descriptor that stands in a class."""
        return self.call(python_descriptor(found, method), (self.found_on_class(owner, name, found), *args), {})

    def source_of_owner(self, target: Any, name: str) -> Source | None:
        """The source of an object of which an attribute is read or written; None where it has none."""
        source = self.values.source_of(target)
        if source is None and isinstance(type(target), enum.EnumMeta):
            # A constant, but what the user keeps on it (not its value and name, nor what its class has) may change.
            is_own = not name.startswith("_") and class_attribute(type(target), name)[0] is MISSING
            return self.values.pin(target, str(target)) if is_own else None
        return source
