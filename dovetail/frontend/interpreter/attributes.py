"""Reading attributes as Python does it, on real objects, with guards on what was read."""

from __future__ import annotations

import collections
import sys
import threading
import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.lookup import (
    MISSING,
    MODULE_TABLES,
    LookupGuards,
    class_attribute,
    comes_before_the_object,
    instance_dict,
    python_descriptor,
)
from dovetail.frontend.interpreter.opaque import hides_state
from dovetail.frontend.rules import STAND_INS, attribute_rule
from dovetail.frontend.values.leaves import IDENTITY_TYPES, is_leaf_value, is_trusted, may_be_switched, plain_numbers
from dovetail.frontend.values.values import Values
from dovetail.guards import (
    AttributeSource,
    Equals,
    HasNoKey,
    HasNoSlot,
    Identity,
    InstanceDictSource,
    ItemSource,
    SameObject,
    Source,
    TypeIs,
)
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.trace.trace import TracedInput

_TUPLE_FIELD = type(collections.namedtuple("_One", "a").a)  # type: ignore[attr-defined]
_NATIVE_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_FUNCTION_STATE = frozenset(
    {
        *("__annotations__", "__closure__", "__code__", "__defaults__", "__dict__", "__doc__", "__globals__"),
        *("__kwdefaults__", "__module__", "__name__", "__qualname__"),
    }
)


def own_table(values: Values, attributes: dict[str, Any], source: Source) -> Source:
    """Where the dictionary of an object is read; a dictionary that keeps its attributes in itself is its own."""
    own = InstanceDictSource(source)
    if (kind := type(attributes)) is not dict:
        if any(class_attribute(kind, name)[0] is not getattr(dict, name) for name in ("__getitem__", "__setitem__")):
            raise Break(f"an object keeps its attributes in a {kind.__name__}", "keep them in a plain dictionary")
        values.guard(own, TypeIs(kind), f"{source.name} keeps its attributes in it")
        if values.source_of(attributes) == source:
            values.guard(own, SameObject((source,)), f"{source.name} keeps its attributes in itself")
            return source
    return own


class Attributes(LookupGuards):
    """The part of the interpreter that reads attributes.

    ::

        load_attribute
            _load_tensor_attribute                  .grad, hooks, or the traced tensor's own
            _load_module_attribute                  of a module (``math.pi``)
            _load_class_attribute                   found in the class dictionaries
            _load_super_attribute
            _load_function_attribute
            load_default_attribute                  of any other object, as object.__getattribute__ does it
                _bind_descriptor                    found on the class: a method, a property, a slot
                values.read                         found in the object's dictionary
                _load_module_part                   a parameter, buffer or submodule
                _load_missing                       __getattr__, or AttributeError
    """

    def load_attribute(self, target: Any, name: str) -> Any:
        """``target.name``; raises AttributeError as Python does."""
        if isinstance(target, torch.Tensor):
            return self._load_tensor_attribute(target, name)
        kind = type(target)
        if kind in STAND_INS:
            return STAND_INS[kind].attribute(self, target, name)
        if private_sizes.is_symbolic(target):
            # A program sees a plain number: its class, and its methods.
            return self.call(type, (target,), {}) if name == "__class__" else getattr(plain_numbers(target), name)
        if isinstance(target, types.ModuleType):
            return self._load_module_attribute(target, name)
        if isinstance(target, type):
            return self._load_class_attribute(target, name)
        if kind is super:
            return self._load_super_attribute(target, name)
        if isinstance(target, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
            return self._load_function_attribute(target, name)
        getter, _ = class_attribute(kind, "__getattribute__")
        try:
            if isinstance(getter, types.FunctionType):
                return self.call(getter, (target, name), {})
            return self.load_default_attribute(target, name)
        except AttributeError:
            if class_attribute(kind, "__getattr__")[0] is MISSING:
                raise
        return self._load_missing(target, name)

    # --- tensors, modules, functions ----------------------------------------------------------------------------------

    def _load_tensor_attribute(self, target: torch.Tensor, name: str) -> Any:
        traced = self.trace.input_of(target)
        handler = attribute_rule.get(name)
        if handler is not None and (found := handler(self, target, name)) is not NotImplemented:
            return found
        if traced is not None and (found := self._load_input_attribute(traced, target, name)) is not MISSING:
            return found
        if name == "_base":
            raise Break("._base of a tensor is read", "read it outside of the compiled function")
        target = self.values.wrap(target)
        if id(target) in self.values.tensor_attributes and name in self.values.tensor_attributes[id(target)][1]:
            return self.values.tensor_attributes[id(target)][1][name]
        try:
            return self.values.wrap(getattr(target, name))
        except AttributeError as error:
            if str(error) != f"{type(target).__name__!r} object has no attribute {name!r}":
                raise
        shown = "Tensor" if traced is None else type(traced.real).__name__
        raise AttributeError(f"{shown!r} object has no attribute {name!r}", name=name)

    def _load_input_attribute(self, traced: TracedInput, target: torch.Tensor, name: str) -> Any:
        """An attribute that an input has beside its traced tensor; :data:`MISSING` where that knows it."""
        guards, real = self.values.guards, traced.real
        if name == "is_leaf" or (name == "grad_fn" and real.is_leaf and target.grad_fn is None):
            guards.add_leafness(traced.index, self.values.where())
            return real.is_leaf and target.grad_fn is None if name == "is_leaf" else None
        attributes = instance_dict(real)
        source = guards.tensor_source(traced.index)
        if attributes and name in attributes:
            return self.values.read(attributes[name], self._own_item_source(attributes, source, name))
        is_missing = attributes is not None and class_attribute(type(real), name)[0] is MISSING
        if is_missing and not self.effects.written(attributes, name):
            self.values.guard(InstanceDictSource(source), HasNoKey(name), f"{source.name} has no attribute {name}")
        if name in ("grad", "grad_fn", "_version") or (name == "retains_grad" and not real.is_leaf):
            raise Break(f".{name} of an input is read", "read it outside of the compiled function")
        return MISSING

    def _load_module_attribute(self, target: types.ModuleType, name: str) -> Any:
        values, is_fixed = self.values, is_trusted(target.__name__)
        at = values.pin(target, target.__name__)
        found = getattr(target, name, MISSING)  # some are filled when they are asked
        # A function of this module may have written its own global variable.
        is_written = self.effects.written(target.__dict__, name)
        if is_written and name in target.__dict__:
            return values.wrap(found)
        if not is_fixed and name not in target.__dict__ and class_attribute(type(target), name)[0] is MISSING:
            if not is_written:
                values.guard(InstanceDictSource(at), HasNoKey(name), f"{target.__name__} has no {name}")
            # A function of its class, as transformers has it, or of its own, that is asked at every reading.
            if (getter := class_attribute(type(target), "__getattr__")[0]) is not MISSING:
                return self.call(getter, (target, name), {})
            if "__getattr__" in target.__dict__:
                return self.call(self.load_attribute(target, "__getattr__"), (name,), {})
        value, place = getattr(target, name) if found is MISSING else found, AttributeSource(at, name)
        if not is_fixed or isinstance(value, torch.Tensor):
            return values.read(value, place)
        # Somebody may put another function in the place of one of torch's.
        if name in target.__dict__ and (self.asked_by_user() or may_be_switched(target.__name__, name, value)):
            if isinstance(value, IDENTITY_TYPES) and target.__dict__[name] is value:
                values.guard(place, Identity(value), f"{target.__name__}.{name} was read")
            elif is_leaf_value(value) and name[:2] != "__":
                values.guard(place, Equals(value), f"{target.__name__}.{name} was read")
        return value

    def _load_function_attribute(self, target: Any, name: str) -> Any:
        values = self.values
        if isinstance(target, types.BuiltinFunctionType):
            return getattr(target, name)
        if name in ("__self__", "__func__"):
            source = values.source_of(target)
            return values.read(getattr(target, name), None if source is None else AttributeSource(source, name))
        function = target.__func__ if isinstance(target, types.MethodType) else target
        if name in getattr(function, "__dict__", ()):
            item = self._own_item_source(function.__dict__, values.source_of(function), name)
            return values.read(function.__dict__[name], item)
        if not self.is_created(function):
            if not hasattr(target, name) and not self.effects.written(function.__dict__, name):
                source = InstanceDictSource(values.pin(function, function.__qualname__))
                values.guard(source, HasNoKey(name), f"{function.__qualname__} has no attribute {name}")
            if name == "__closure__" and function.__closure__:
                raise Break("the closure of a function is read", "return the variables from the function instead")
            if name in _FUNCTION_STATE and not is_trusted(function.__globals__.get("__name__")):
                source = values.pin(function, function.__qualname__)
                return values.read(getattr(function, name), AttributeSource(source, name))
        return getattr(target, name)

    # --- classes ------------------------------------------------------------------------------------------------------

    def _load_class_attribute(self, target: type, name: str) -> Any:
        meta_value, meta_owner = class_attribute(type(target), name)
        is_python = python_descriptor(meta_value, "__get__") is not None
        is_ours = isinstance(meta_value, property) or is_python
        if meta_owner is not None and is_ours and comes_before_the_object(meta_value):
            return self._bind_descriptor(meta_value, meta_owner, target, name)
        found, owner = class_attribute(target, name)
        if owner is None:
            return self._load_of_metaclass(target, name, meta_value, meta_owner)
        if name == "__dict__" and not self.needs_no_guard(target):
            raise Break(f"the dictionary of the class {target.__name__} is read", "read the attributes that you need")
        self.guard_not_shadowed(target, owner, name)
        self.guard_class_item(owner, name, found)
        bound = self._bind_to_class(found, owner, target, name)
        if bound is not MISSING:
            return bound
        if hasattr(type(found), "__get__"):
            return getattr(target, name)
        return self._load_class_data(owner, name, found, is_trusted(target.__module__))

    def _load_of_metaclass(self, target: type, name: str, found: Any, owner: type | None) -> Any:
        """An attribute of a class that stands in no class dictionary but in those of its metaclass, or nowhere."""
        if owner is None:
            getter, _ = class_attribute(type(target), "__getattr__")
            is_python = isinstance(getter, types.FunctionType)
            return self.call(getter, (target, name), {}) if is_python else getattr(target, name)
        if python_descriptor(found, "__get__") is not None:
            return self._bind_descriptor(found, owner, target, name)
        return getattr(target, name) if hasattr(type(found), "__get__") else self._load_class_data(owner, name, found)

    def _load_class_data(self, owner: type, name: str, found: Any, is_fixed: bool = False) -> Any:
        """Plain data in a class dictionary."""
        is_fixed = (is_fixed or self.needs_no_guard(owner)) and not self.is_setting(owner, found)
        if is_fixed or self.effects.attribute_written(owner, name):
            return self.values.wrap(found)
        return self.values.read(found, AttributeSource(self.values.pin(owner, owner.__qualname__), name))

    def _load_super_attribute(self, target: Any, name: str) -> Any:
        instance, start, kind = target.__self__, target.__thisclass__, target.__self_class__
        if instance is None:
            return getattr(target, name)
        order = kind.__mro__
        owner = next((item for item in order[order.index(start) + 1 :] if name in item.__dict__), None)
        if owner is None:
            return getattr(target, name)
        found = owner.__dict__[name]
        self.guard_not_shadowed(kind, owner, name, after=start)
        self.guard_class_item(owner, name, found)
        if instance is not kind:
            return self._bind_descriptor(found, owner, instance, name)
        bound = self._bind_to_class(found, owner, kind, name)
        return self.found_on_class(owner, name, found) if bound is MISSING else bound

    # --- objects ------------------------------------------------------------------------------------------------------

    def load_default_attribute(self, target: Any, name: str) -> Any:
        """Do the work of ``object.__getattribute__``."""
        kind, values = type(target), self.values
        if (own := attribute_rule.get(threading.local if issubclass(kind, threading.local) else kind)) is not None:
            return own(self, target, name)
        found, owner = class_attribute(kind, name)
        if name == "__class__" and (owner is object or owner is None):
            return kind
        source = self.source_of_owner(target, name)
        attributes = instance_dict(target)
        if name == "__dict__" and attributes is not None:
            if source is not None:
                values.note(attributes, own_table(self.values, attributes, source))
            return attributes
        if owner is not None:
            self.guard_not_shadowed(kind, owner, name)
            if comes_before_the_object(found):
                return self._bind_descriptor(found, owner, target, name)
        if attributes is not None:
            if name in attributes:
                self.guard_stays_hidden(kind, name)
                return values.read(attributes[name], self._own_item_source(attributes, source, name))
            if source is not None and not self.effects.written(attributes, name):
                what = f" has no attribute {name}" if owner is None else f".{name} was found on the class"
                values.guard(own_table(self.values, attributes, source), HasNoKey(name), f"{source.name}{what}")
        if owner is not None:
            return self._bind_descriptor(found, owner, target, name)
        raise self._no_attribute(target, name)

    def _load_module_part(self, attributes: dict[str, Any], source: Source | None, name: str) -> Any:
        """A parameter, buffer or submodule; :data:`MISSING` where a module has none of that name."""
        values = self.values
        tables = [(name, attributes[name]) for name in MODULE_TABLES if attributes.get(name) is not None]
        own = None if source is None else InstanceDictSource(source)
        for table_name, table in tables:
            if name in table:
                if own is None:
                    return values.read(table[name], None) if values.source_of(table) else values.wrap(table[name])
                at = ItemSource(own, table_name)
                values.note(table, at)
                is_own = self.effects.written(table, name)
                return values.wrap(table[name]) if is_own else values.read(table[name], ItemSource(at, name))
        if own is not None:
            for table_name, _ in tables:
                values.guard(ItemSource(own, table_name), HasNoKey(name), f"{own.base.name} has no {name}")
        return MISSING

    def _load_missing(self, target: Any, name: str) -> Any:
        """Do the work of ``__getattr__``."""
        fallback, _ = class_attribute(type(target), "__getattr__")
        is_wrapper = private_calls.is_wrapped_module(target)
        attributes = instance_dict(target)
        if (is_wrapper or fallback is torch.nn.Module.__getattr__) and attributes is not None:
            part = self._load_module_part(attributes, self.source_of_owner(target, name), name)
            if part is not MISSING:
                return part
        if is_wrapper:
            return self.load_attribute(self.load_attribute(target, "_orig_mod"), name)
        if fallback is torch.nn.Module.__getattr__:
            raise self._no_attribute(target, name)
        if isinstance(fallback, (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
            return self.call(fallback, (target, name), {})
        return self.values.wrap(getattr(target, name))

    def _no_attribute(self, target: Any, name: str) -> AttributeError:
        self.guard_not_shadowed(type(target), None, name)
        return AttributeError(f"{type(target).__name__!r} object has no attribute {name!r}", name=name, obj=target)

    def _own_item_source(self, attributes: dict[str, Any], source: Source | None, name: str) -> Source | None:
        """The source of an instance attribute, or None where the program wrote it itself."""
        if source is None or self.effects.written(attributes, name):
            return None
        return ItemSource(own_table(self.values, attributes, source), name)

    # --- descriptors --------------------------------------------------------------------------------------------------

    def _bind_descriptor(self, found: Any, owner: type, target: Any, name: str) -> Any:
        values = self.values
        self.guard_class_item(owner, name, found)
        if isinstance(found, types.FunctionType):
            return types.MethodType(found, target)
        if python_descriptor(found, "__get__") is not None:
            return self.call_descriptor("__get__", owner, name, found, target, type(target))
        if isinstance(found, property):
            if found.fget is None:
                return values.wrap(found.__get__(target, type(target)))
            return self.call(self.part_on_class(owner, name, found, "fget"), (target,), {})
        if isinstance(found, (staticmethod, classmethod)):
            return self._bind_to_class(found, owner, type(target), name)
        if isinstance(found, _NATIVE_DESCRIPTORS):
            return self._load_slot(found, target, name)
        if type(found) is _TUPLE_FIELD:
            # A field of a named tuple: the item has a source of its own.
            position = found.__reduce__()[1][0]
            return values.read(tuple.__getitem__(target, position), values.item_source(target, position))
        if hasattr(type(found), "__get__"):
            return values.wrap(found.__get__(target, type(target)))
        return self._load_class_data(owner, name, found)

    def _bind_to_class(self, found: Any, owner: type, kind: type, name: str) -> Any:
        """A static or class method, or a descriptor written in Python, that is read on a class; :data:`MISSING` for all else."""
        if python_descriptor(found, "__get__") is not None:
            return self.call_descriptor("__get__", owner, name, found, None, kind)
        if isinstance(found, staticmethod):
            return self.part_on_class(owner, name, found, "__func__")
        if isinstance(found, classmethod):
            inside = self.part_on_class(owner, name, found, "__func__")
            if isinstance(inside, property) and sys.version_info < (3, 13):
                return self.call(inside.fget, (kind,), {})
            return types.MethodType(inside, kind) if callable(inside) else found.__get__(None, kind)  # 3.13: any object
        return found.__get__(None, kind) if isinstance(found, types.ClassMethodDescriptorType) else MISSING

    def _load_slot(self, found: Any, target: Any, name: str) -> Any:
        """A slot, or an attribute that native code computes."""
        values, source = self.values, self.values.source_of(target)
        is_written = source is None or self.effects.attribute_written(target, name)
        try:
            value = found.__get__(target, type(target))
        except AttributeError:
            if source is not None and not is_written:
                values.guard(source, HasNoSlot(found), f"{source.name} has no {name}")
            raise
        is_state = isinstance(found, types.MemberDescriptorType) or (
            (is_leaf_value(value) or hides_state(target)) and name[:2] != "__" and type(target) is not types.CodeType
        )
        if source is None or is_written or not is_state:
            return values.wrap(value)
        return values.read(value, AttributeSource(source, name))
