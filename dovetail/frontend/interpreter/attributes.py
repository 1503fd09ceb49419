"""Attribute access as Python does it, on real objects, with guards on what was read."""

from __future__ import annotations

import abc
import collections
import enum
import sys
import threading
import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.effects.gradients import HOOK_TABLES
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import STAND_INS
from dovetail.frontend.values.leaves import IDENTITY_TYPES, is_leaf_value, is_trusted, plain_numbers
from dovetail.guards import (
    Answers,
    AttributeSource,
    DictKeys,
    Equals,
    HasNoKey,
    HasNoSlot,
    Identity,
    InstanceDictSource,
    ItemSource,
    Source,
)
from dovetail.guards.reading import class_order, is_heap_type
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes

MISSING = object()
TUPLE_FIELD = type(collections.namedtuple("_One", "a").a)  # type: ignore[attr-defined]
NATIVE_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
FUNCTION_STATE = frozenset(
    {
        "__annotations__",
        "__closure__",
        "__code__",
        "__defaults__",
        "__dict__",
        "__doc__",
        "__globals__",
        "__kwdefaults__",
        "__module__",
        "__name__",
        "__qualname__",
    }
)
MODULE_TABLES = ("_parameters", "_buffers", "_modules")


def class_attribute(kind: type, name: str) -> tuple[Any, type | None]:
    """The attribute as it stands in the class dictionaries, and the class that has it."""
    for owner in kind.__mro__:
        if name in owner.__dict__:
            return owner.__dict__[name], owner
    return MISSING, None


def python_descriptor(found: Any, method: str) -> types.FunctionType | None:
    """``__get__``, ``__set__`` or ``__delete__`` of a descriptor, if it is written in Python."""
    function, _ = class_attribute(type(found), method)
    return function if isinstance(function, types.FunctionType) else None


def instance_dict(target: Any) -> dict[str, Any] | None:
    """An object's own dictionary, read without running its class's code."""
    try:
        found = object.__getattribute__(target, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


class Attributes(TracingInterpreter):
    """The part of the interpreter that reads and writes attributes."""

    def load_attribute(self, target: Any, name: str) -> Any:
        """``target.name``; raises AttributeError as Python does."""
        if isinstance(target, torch.Tensor):
            return self._load_tensor_attribute(target, name)
        if type(target) in STAND_INS:
            return STAND_INS[type(target)].attribute(target, name)
        if private_sizes.is_symbolic(target):
            # A program sees a plain number: its class, and its methods.
            return self.call(type, (target,), {}) if name == "__class__" else getattr(plain_numbers(target), name)
        if isinstance(target, types.ModuleType):
            return self._load_module_attribute(target, name)
        if isinstance(target, type):
            return self._load_class_attribute(target, name)
        if type(target) is super:
            return self._load_super_attribute(target, name)
        if isinstance(target, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
            return self._load_function_attribute(target, name)
        return self._load_instance_attribute(target, name)

    def _load_tensor_attribute(self, target: torch.Tensor, name: str) -> Any:
        traced = self.values.trace.input_of(target)
        if traced is not None:
            if name == "grad":
                return self.gradients.read(traced)
            if name == "is_leaf":
                self.values.guards.add_leafness(traced.index, self.values.where())
                return traced.real.is_leaf
            if name == "grad_fn" and traced.real.is_leaf and target.grad_fn is None:
                self.values.guards.add_leafness(traced.index, self.values.where())
                return None
            if name in ("grad_fn", "_version"):
                raise Break(f".{name} of an input is read", "read it outside of the compiled function")
            attributes = instance_dict(traced.real)
            if attributes and name in attributes:
                source = self.values.guards.tensor_source(traced.index)
                return self.values.read(attributes[name], ItemSource(InstanceDictSource(source), name))
            if class_attribute(type(traced.real), name)[0] is MISSING and isinstance(attributes, dict):
                source = InstanceDictSource(self.values.guards.tensor_source(traced.index))
                self.values.guard(source, HasNoKey(name), f"{source.base.name} has no attribute {name}")
            if name in HOOK_TABLES and getattr(traced.real, name) is None:
                source = self.values.guards.tensor_source(traced.index)
                self.values.guard(AttributeSource(source, name), Equals(None), f"{source.name} has no gradient hooks")
            elif name in HOOK_TABLES or (name == "retains_grad" and not traced.real.is_leaf):
                raise Break(f".{name} of an input is read", "read it outside of the compiled function")
        if name == "_base":
            raise Break("._base of a tensor is read", "read it outside of the compiled function")
        return self._native_attribute(target, name)

    def _native_attribute(self, target: Any, name: str) -> Any:
        target = self.values.wrap(target)
        try:
            return self.values.wrap(getattr(target, name))
        except AttributeError as error:
            found = error
        if str(found) == f"{type(target).__name__!r} object has no attribute {name!r}":
            traced = self.values.trace.input_of(target)
            shown = "Tensor" if traced is None else type(traced.real).__name__
            found = AttributeError(f"{shown!r} object has no attribute {name!r}", name=name)
        try:
            raise found
        finally:
            # The traceback leads to this call.
            del found

    def _load_module_attribute(self, target: types.ModuleType, name: str) -> Any:
        try:
            value = getattr(target, name)
        except AttributeError:
            if not is_trusted(target.__name__):
                source = InstanceDictSource(self.values.pin(target, target.__name__))
                self.values.guard(source, HasNoKey(name), f"{target.__name__} has no {name}")
            raise
        if is_trusted(target.__name__) and not isinstance(value, torch.Tensor):
            # Of torch's own functions, those that the user's code names: somebody may put another one in their place.
            is_users = self._asked_by_user()
            if is_users and isinstance(value, IDENTITY_TYPES) and target.__dict__.get(name) is value:
                place = AttributeSource(self.values.pin(target, target.__name__), name)
                self.values.guard(place, Identity(value), f"{target.__name__}.{name} was read")
            elif is_users and is_leaf_value(value) and name in target.__dict__ and name[:2] != "__":
                place = AttributeSource(self.values.pin(target, target.__name__), name)
                self.values.guard(place, Equals(value), f"{target.__name__}.{name} was read")
            return value
        return self.values.read(value, AttributeSource(self.values.pin(target, target.__name__), name))

    def _load_class_attribute(self, target: type, name: str) -> Any:
        meta_value, meta_owner = class_attribute(type(target), name)
        is_ours = isinstance(meta_value, property) or python_descriptor(meta_value, "__get__") is not None
        if is_ours and meta_owner is not None and hasattr(type(meta_value), "__set__"):
            return self._bind_descriptor(meta_value, meta_owner, target, name)
        found, owner = class_attribute(target, name)
        if found is MISSING:
            getter, _ = class_attribute(type(target), "__getattr__")
            if meta_value is MISSING and isinstance(getter, types.FunctionType):
                return self.call(getter, (target, name), {})
            if meta_owner is not None and python_descriptor(meta_value, "__get__") is not None:
                return self._bind_descriptor(meta_value, meta_owner, target, name)
            if (
                meta_owner is not None
                and not hasattr(type(meta_value), "__get__")
                and not self._needs_no_guard(meta_owner)
            ) and not self.effects.attribute_written(meta_owner, name):
                source = AttributeSource(self.values.pin(meta_owner, meta_owner.__qualname__), name)
                return self.values.read(meta_value, source)
            return getattr(target, name)
        assert owner is not None
        if name == "__dict__" and not self._needs_no_guard(target):
            raise Break(f"the dictionary of the class {target.__name__} is read", "read the attributes that you need")
        self._guard_not_shadowed(target, owner, name)
        self._guard_class_item(owner, name, found)
        if isinstance(found, staticmethod):
            return self._wrapped_function(owner, name, found)
        if isinstance(found, classmethod):
            return self._bind(self._wrapped_function(owner, name, found), target)
        if python_descriptor(found, "__get__") is not None:
            return self._call_descriptor("__get__", owner, name, found, None, target)
        if isinstance(found, (types.FunctionType, property)) or hasattr(type(found), "__get__"):
            return getattr(target, name)
        is_fixed = is_trusted(target.__module__) or self._needs_no_guard(owner)
        if (is_fixed and not self._is_setting(owner, found)) or self.effects.attribute_written(owner, name):
            return self.values.wrap(found)
        return self.values.read(found, AttributeSource(self.values.pin(owner, owner.__qualname__), name))

    def _load_super_attribute(self, target: Any, name: str) -> Any:
        instance, start, kind = target.__self__, target.__thisclass__, target.__self_class__
        if instance is None:
            return getattr(target, name)
        order = kind.__mro__
        following = order[order.index(start) + 1 :]
        for owner in following:
            if name in owner.__dict__:
                found = owner.__dict__[name]
                self._guard_not_shadowed(kind, owner, name, after=start)
                self._guard_class_item(owner, name, found)
                if instance is kind:
                    if isinstance(found, classmethod):
                        return self._bind(self._wrapped_function(owner, name, found), kind)
                    if isinstance(found, staticmethod):
                        return self._wrapped_function(owner, name, found)
                    if python_descriptor(found, "__get__") is not None:
                        return self._call_descriptor("__get__", owner, name, found, None, kind)
                    return self._found_on_class(owner, name, found)
                return self._bind_descriptor(found, owner, instance, name)
        return getattr(target, name)

    def _load_function_attribute(self, target: Any, name: str) -> Any:
        if isinstance(target, types.BuiltinFunctionType):
            return getattr(target, name)
        if name in ("__self__", "__func__"):
            source = self.values.source_of(target)
            return self.values.read(getattr(target, name), None if source is None else AttributeSource(source, name))
        function = target.__func__ if isinstance(target, types.MethodType) else target
        if name in function.__dict__ if hasattr(function, "__dict__") else False:
            source = self.values.source_of(function)
            item = self.instance_item_source(function, function.__dict__, source, name)
            if item is None:
                return self.values.wrap(function.__dict__[name])
            return self.values.read(function.__dict__[name], item)
        if not hasattr(target, name) and not self.values.is_created(function):
            source = InstanceDictSource(self.values.pin(function, function.__qualname__))
            if not self._written(function.__dict__, name):
                self.values.guard(source, HasNoKey(name), f"{function.__qualname__} has no attribute {name}")
        if name in FUNCTION_STATE and not self.values.is_created(function):
            if name == "__closure__" and function.__closure__:
                raise Break("the closure of a function is read", "return the variables from the function instead")
            if not is_trusted(function.__globals__.get("__name__")):
                source = self.values.pin(function, function.__qualname__)
                return self.values.read(getattr(function, name), AttributeSource(source, name))
        return getattr(target, name)

    def _load_instance_attribute(self, target: Any, name: str) -> Any:
        kind = type(target)
        getter, _ = class_attribute(kind, "__getattribute__")
        if isinstance(getter, types.FunctionType):
            return self.call(getter, (target, name), {})
        return self.load_default_attribute(target, name)

    def load_default_attribute(self, target: Any, name: str) -> Any:
        """What ``object.__getattribute__`` and then ``__getattr__`` do."""
        if issubclass(type(target), threading.local):
            raise Break("an attribute of a thread-local object is read", "read it outside, and hand its value on")
        kind = type(target)
        values = self.values
        found, owner = class_attribute(kind, name)
        if name == "__class__" and (owner is object or found is MISSING):
            return kind
        source = self._source_of_owner(target, name)
        attributes = instance_dict(target)
        if name == "__dict__" and attributes is not None:
            if source is not None:
                values.note(attributes, InstanceDictSource(source))
            return attributes
        if found is not MISSING:
            self._guard_not_shadowed(kind, owner, name)
        if found is not MISSING and hasattr(type(found), "__set__"):
            return self._bind_descriptor(found, owner, target, name)
        if attributes is not None and name in attributes:
            return values.read(attributes[name], self.instance_item_source(target, attributes, source, name))
        if found is not MISSING:
            if attributes is not None and source is not None and not self._written(attributes, name):
                values.guard(InstanceDictSource(source), HasNoKey(name), f"{source.name}.{name} was found on the class")
            return self._bind_descriptor(found, owner, target, name)
        if attributes is not None and isinstance(target, torch.nn.Module):
            for table_name in MODULE_TABLES:
                table = attributes.get(table_name)
                if table is not None and name in table:
                    if source is None:
                        return (
                            values.wrap(table[name]) if not values.source_of(table) else values.read(table[name], None)
                        )
                    own = InstanceDictSource(source)
                    if not self._written(attributes, name):
                        values.guard(own, HasNoKey(name), f"{source.name}.{name} was found in {table_name}")
                    table_source = ItemSource(own, table_name)
                    values.note(table, table_source)
                    if self.effects.written(table, name):
                        return values.wrap(table[name])
                    return values.read(table[name], ItemSource(table_source, name))
        if attributes is not None and source is not None and not self._written(attributes, name):
            values.guard(InstanceDictSource(source), HasNoKey(name), f"{source.name} has no attribute {name}")
            if isinstance(target, torch.nn.Module):
                for table_name in MODULE_TABLES:
                    if attributes.get(table_name) is not None:
                        table_source = ItemSource(InstanceDictSource(source), table_name)
                        values.guard(table_source, HasNoKey(name), f"{source.name} has no {name}")
        self._guard_not_shadowed(kind, None, name)
        if isinstance(target, torch.nn.Module) and private_calls.without_torch_compile(target) is not target:
            return self.load_attribute(self.load_attribute(target, "_orig_mod"), name)
        fallback, _ = class_attribute(kind, "__getattr__")
        if isinstance(fallback, types.FunctionType) and fallback is not torch.nn.Module.__getattr__:
            return self.call(fallback, (target, name), {})
        if fallback is not MISSING and not isinstance(fallback, types.FunctionType):
            return values.wrap(getattr(target, name))
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name, obj=target)

    def _source_of_owner(self, target: Any, name: str) -> Source | None:
        """Where an object of which an attribute is asked for, or written to, can be found again."""
        source: Source | None = self.values.source_of(target)
        if source is None and isinstance(type(target), enum.EnumMeta) and not self.values.is_created(type(target)):
            # A constant, but what the user keeps on it (not its value and name, nor what its class has) may change.
            is_own = not name.startswith("_") and class_attribute(type(target), name)[0] is MISSING
            return self.values.pin(target, str(target)) if is_own else None
        return source

    def instance_item_source(
        self, target: Any, attributes: dict[str, Any], source: Source | None, name: str
    ) -> Source | None:
        """The source of an instance attribute, or None where the trace wrote it itself."""
        if source is None or self._written(attributes, name):
            return None
        return ItemSource(InstanceDictSource(source), name)

    def _written(self, attributes: dict[str, Any], name: str) -> bool:
        return bool(self.effects.written(attributes, name))

    def _needs_no_guard(self, owner: type) -> bool:
        """Whether a class cannot change between calls: torch's own, or one that the trace itself made."""
        return is_trusted(owner.__module__) or bool(self.values.is_created(owner))

    def _is_setting(self, owner: type, found: Any) -> bool:
        """Whether data in a class of torch's is a switch, or something that the user's own code asks for."""
        if owner.__module__.split(".", 1)[0] != "torch" or not is_leaf_value(found) or issubclass(owner, enum.Enum):
            return False
        if not is_heap_type(owner) or self.values.is_created(owner):
            return False
        return type(found) is bool or self._asked_by_user()

    def _asked_by_user(self) -> bool:
        return bool(self.frames) and not is_trusted(self.frames[-1].globals.get("__name__"))

    def guard_order(self, kind: type) -> None:
        """Guard which classes a class inherits from."""
        if not self._needs_no_guard(kind):
            source = AttributeSource(self.values.pin(kind, kind.__qualname__), "__mro__")
            self.values.guard(source, Identity(class_order(kind)), f"what {kind.__qualname__} inherits was asked")

    def guard_registration(self, kind: type, among: Any) -> None:
        """Guard whether a class counts as a subclass of an abstract one that it does not inherit from."""
        if not isinstance(among, abc.ABCMeta) or among in class_order(kind) or self.values.is_created(kind):
            return
        if not self._needs_no_guard(among) or (is_heap_type(kind) and not self._needs_no_guard(kind)):
            reason = f"whether {kind.__qualname__} is a subclass of {among.__qualname__} was asked"
            asked = Answers(issubclass, (among,), issubclass(kind, among))
            self.values.guard(self.values.pin(kind, kind.__qualname__), asked, reason)

    def _guard_not_shadowed(self, kind: type, owner: type | None, name: str, after: type | None = None) -> None:
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
            if not self._needs_no_guard(earlier) and not self.effects.attribute_written(earlier, name):
                source = AttributeSource(self.values.pin(earlier, earlier.__qualname__), "__dict__")
                self.values.guard(source, HasNoKey(name), f"{earlier.__qualname__} has no {name} of its own")

    def _guard_class_item(self, owner: type, name: str, found: Any) -> None:
        """Guard that a class still has the same function, property, static or class method under a name."""
        if self._needs_no_guard(owner):
            return
        source: Source = AttributeSource(self.values.pin(owner, owner.__qualname__), name)
        if isinstance(found, classmethod):
            source, found = AttributeSource(source, "__func__"), found.__func__
        elif isinstance(found, staticmethod):
            found = found.__func__
        if isinstance(found, (types.FunctionType, property)):
            self.values.guard(source, Identity(found), f"{owner.__qualname__}.{name} was found on the class")

    def _bind(self, function: Any, target: Any) -> Any:
        return types.MethodType(function, target)

    def _bind_descriptor(self, found: Any, owner: type | None, target: Any, name: str) -> Any:
        assert owner is not None
        values = self.values
        self._guard_class_item(owner, name, found)
        if isinstance(found, types.FunctionType):
            return types.MethodType(found, target)
        if isinstance(found, property):
            if found.fget is not None:
                return self.call(self._part_on_class(owner, name, found, "fget"), (target,), {})
            return values.wrap(found.__get__(target, type(target)))
        if isinstance(found, staticmethod):
            return self._wrapped_function(owner, name, found)
        if isinstance(found, classmethod):
            return types.MethodType(self._wrapped_function(owner, name, found), type(target))
        if isinstance(found, NATIVE_DESCRIPTORS):
            source = values.source_of(target)
            try:
                value = found.__get__(target, type(target))
            except AttributeError:
                if source is not None and not self.effects.attribute_written(target, name):
                    values.guard(source, HasNoSlot(found), f"{source.name} has no {name}")
                raise
            is_state = isinstance(found, types.MemberDescriptorType) or (
                is_leaf_value(value) and name[:2] != "__" and not isinstance(target, types.CodeType)
            )
            if is_state and source is not None:
                if self.effects.attribute_written(target, name):
                    return values.wrap(value)
                return values.read(value, AttributeSource(source, name))
            return values.wrap(value)
        if type(found) is TUPLE_FIELD:
            # A field of a named tuple: the item has a source of its own.
            position = found.__reduce__()[1][0]
            return values.read(tuple.__getitem__(target, position), values.item_source(target, position))
        if python_descriptor(found, "__get__") is not None:
            return self._call_descriptor("__get__", owner, name, found, target, type(target))
        if hasattr(type(found), "__get__"):
            return values.wrap(found.__get__(target, type(target)))
        is_fixed = self._needs_no_guard(owner) and not self._is_setting(owner, found)
        if is_fixed or self.effects.attribute_written(owner, name):
            return values.wrap(found)
        return values.read(found, AttributeSource(values.pin(owner, owner.__qualname__), name))

    def _found_on_class(self, owner: type, name: str, found: Any) -> Any:
        """A descriptor, or what it wraps, as it stands in a class: with where it can be found again."""
        if self._needs_no_guard(owner) or self.effects.attribute_written(owner, name) or is_leaf_value(found):
            return self.values.wrap(found)
        source = self._class_item_source(owner, name)
        if type(found).__module__.split(".", 1)[0] in sys.stdlib_module_names:
            # What these hold is never changed, and may be a lock.
            self.values.guard(source, Identity(found), f"{owner.__qualname__}.{name} was found on the class")
            return self.values.wrap(found)
        return self.values.read(found, source)

    def _class_item_source(self, owner: type, name: str) -> Source:
        return ItemSource(AttributeSource(self.values.pin(owner, owner.__qualname__), "__dict__"), name)

    def _wrapped_function(self, owner: type, name: str, found: Any) -> Any:
        """What a static or class method wraps; mostly a function, which has been guarded."""
        return self._part_on_class(owner, name, found, "__func__")

    def _part_on_class(self, owner: type, name: str, found: Any, part: str) -> Any:
        inside = getattr(found, part)
        if isinstance(inside, types.FunctionType) or self._needs_no_guard(owner):
            return inside
        if self.effects.attribute_written(owner, name):
            return self.values.wrap(inside)
        return self.values.read(inside, AttributeSource(self._class_item_source(owner, name), part))

    def _call_descriptor(self, method: str, owner: type, name: str, found: Any, *args: Any) -> Any:
        """Call a method, written in Python, of a descriptor that stands in a class."""
        return self.call(python_descriptor(found, method), (self._found_on_class(owner, name, found), *args), {})

    # --- stores -------------------------------------------------------------------------------------------------------

    def store_attribute(self, target: Any, name: str, value: Any) -> None:
        """``target.name = value``."""
        if type(target) in STAND_INS:
            setattr(target, name, value)
            return
        if isinstance(target, torch.Tensor):
            if name == "data" and value is target:
                # What Module.to does where nothing is to be moved.
                return
            if name == "requires_grad" and self.values.trace.input_of(target) is None:
                target.requires_grad = value
                return
            traced = self.values.trace.input_of(target)
            if name == "grad" and traced is not None:
                self.gradients.write(traced, value)
                return
            if name == "requires_grad" and traced is not None and type(value) is bool:
                self.gradients.flags.set(traced, value)
                return
            raise Break(f".{name} of a tensor is set", "set it outside of the compiled function")
        if isinstance(target, type) and self.values.is_created(target):
            meta_setter, _ = class_attribute(type(target), "__setattr__")
            if isinstance(meta_setter, types.FunctionType):
                self.call(meta_setter, (target, name, value), {})
            elif not self._set_by_metaclass(target, name, value):
                type.__setattr__(target, name, value)
            return
        if isinstance(target, type) and self._store_class_attribute(target, name, value):
            return
        if isinstance(target, types.FunctionType) and not name.startswith("__"):
            self.values.note(target, self.values.pin(target, target.__qualname__))
            self._store_instance(target, name, value)
            return
        if isinstance(target, (type, types.ModuleType)) or (
            isinstance(target, types.FunctionType) and not self.values.is_created(target)
        ):
            raise Break(f"{name} of {getattr(target, '__name__', target)} is set", "do this outside of the function")
        setter, _ = class_attribute(type(target), "__setattr__")
        if isinstance(setter, types.FunctionType):
            if setter is torch.nn.Module.__setattr__ and self._is_plain_module_store(target, name, value):
                self._store_instance(target, name, value)
                return
            self.call(setter, (target, name, value), {})
            return
        self.store_default_attribute(target, name, value)

    def _set_by_metaclass(self, target: type, name: str, value: Any) -> bool:
        """Write an attribute of a class by a property or descriptor of its metaclass; False where there is none."""
        found, owner = class_attribute(type(target), name)
        if owner is None or not hasattr(type(found), "__set__"):
            return False
        if isinstance(found, property) and found.fset is not None:
            self._guard_class_item(owner, name, found)
            self.call(found.fset, (target, value), {})
            return True
        if python_descriptor(found, "__set__") is not None:
            self._call_descriptor("__set__", owner, name, found, target, value)
            return True
        return False

    def _store_class_attribute(self, target: type, name: str, value: Any) -> bool:
        """Write an attribute of a class; False where that does more than to put a value there."""
        setter, _ = class_attribute(type(target), "__setattr__")
        if setter is type.__setattr__ and self._set_by_metaclass(target, name, value):
            return True
        before, owner = class_attribute(target, name)
        plain = (int, float, str, bool, type(None), list, dict, set, tuple)
        if setter is not type.__setattr__ or name.startswith("__") or not isinstance(value, plain):
            return False
        if before is not MISSING and not isinstance(before, plain):
            return False
        if owner is not target:
            self._guard_not_shadowed(target, owner, name)
        elif not self.effects.attribute_written(target, name):
            self.values.read(before, AttributeSource(self.values.pin(target, target.__qualname__), name), plain=True)
        self.effects.set_attribute(target, name, value, self.values.pin(target, target.__qualname__))
        return True

    def _is_plain_module_store(self, target: Any, name: str, value: Any) -> bool:
        attributes = instance_dict(target) or {}
        if isinstance(value, (torch.nn.Module, torch.nn.Parameter, torch.nn.Buffer)):
            return False
        return not any(name in (attributes.get(table) or ()) for table in MODULE_TABLES) and not hasattr(
            class_attribute(type(target), name)[0].__class__, "__set__"
        )

    def store_default_attribute(self, target: Any, name: str, value: Any) -> None:
        """What ``object.__setattr__`` does."""
        found, owner = class_attribute(type(target), name)
        if isinstance(found, property):
            if found.fset is None:
                # Raises, in words that depend on how the property was made.
                found.__set__(target, None)
            self.call(found.fset, (target, value), {})
            return
        if found is not MISSING and hasattr(type(found), "__set__"):
            source = self.values.source_of(target)
            if isinstance(found, types.MemberDescriptorType) and source is not None:
                self.effects.set_attribute(target, name, value, source)
                return
            if owner is not None and python_descriptor(found, "__set__") is not None:
                self._call_descriptor("__set__", owner, name, found, target, value)
                return
            if source is not None:
                raise Break(f"{name} of an object that existed before the call is written to")
            object.__setattr__(target, name, value)
            return
        self._store_instance(target, name, value)

    def _store_instance(self, target: Any, name: str, value: Any) -> None:
        attributes = instance_dict(target)
        source = self._source_of_owner(target, name)
        if isinstance(target, threading.local):
            raise Break("an attribute of a thread-local object is set", "keep it in an object that is no thread's own")
        if attributes is None or source is None:
            object.__setattr__(target, name, value)
            return
        self.values.note(attributes, InstanceDictSource(source))
        self.effects.set_item(attributes, name, value)

    def delete_attribute(self, target: Any, name: str) -> None:
        """``del target.name``."""
        if type(target) in STAND_INS:
            delattr(target, name)
            return
        deleter, _ = class_attribute(type(target), "__delattr__")
        attributes = instance_dict(target)
        found, owner = class_attribute(type(target), name)
        if isinstance(found, property) and isinstance(found.fdel, types.FunctionType):
            self.call(found.fdel, (target,), {})
            return
        if owner is not None and python_descriptor(found, "__delete__") is not None:
            self._call_descriptor("__delete__", owner, name, found, target)
            return
        if isinstance(target, (torch.Tensor, type, types.ModuleType)) or attributes is None or name not in attributes:
            raise Break(f"the attribute {name} of a {type(target).__name__} is deleted")
        if isinstance(deleter, types.FunctionType) and deleter is not torch.nn.Module.__delattr__:
            self.call(deleter, (target, name), {})
            return
        source = self.values.source_of(target)
        if source is not None:
            own = InstanceDictSource(source)
            self.values.note(attributes, own)
            if name in self.effects.before(attributes):
                self.values.guard(own, DictKeys(tuple(self.effects.before(attributes))), f"{name} is deleted")
        self.effects.delete_item(attributes, name)
