"""Writing and deleting attributes as Python does it; writes to objects that existed before are journalled."""

from __future__ import annotations

import threading
import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.lookup import LookupGuards, class_attribute, instance_dict, python_descriptor
from dovetail.frontend.rules import STAND_INS, setter_rule
from dovetail.guards import AttributeSource, DictKeys, InstanceDictSource

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN_DATA = (int, float, str, bool, type(None), list, dict, set, tuple)


class Stores(LookupGuards):
    """The part of the interpreter that writes attributes."""

    def store_attribute(self, target: Any, name: str, value: Any) -> None:
        if isinstance(target, torch.Tensor):
            self._store_tensor_attribute(target, name, value)
        elif type(target) in STAND_INS:
            setattr(target, name, value)
        elif isinstance(target, type):
            self._store_class_attribute(target, name, value)
        elif isinstance(target, types.FunctionType) and not name.startswith("__"):
            self.values.note(target, self.values.pin(target, target.__qualname__))
            self._store_instance(target, name, value)
        elif isinstance(target, types.ModuleType) or (
            isinstance(target, types.FunctionType) and not self.is_created(target)
        ):
            raise _too_global(target, name)
        else:
            setter, _ = class_attribute(type(target), "__setattr__")
            if not isinstance(setter, types.FunctionType):
                self.store_default_attribute(target, name, value)
            elif setter is torch.nn.Module.__setattr__ and _is_plain_module_store(target, name, value):
                self._store_instance(target, name, value)
            else:
                self.call(setter, (target, name, value), {})

    def _store_tensor_attribute(self, target: torch.Tensor, name: str, value: Any) -> None:
        if name == "data" and value is target:
            # Module.to does so where nothing is to be moved.
            return
        handler = setter_rule.get(name)
        if handler is not None and handler(self, target, value) is not NotImplemented:
            return
        if name == "requires_grad" and self.trace.input_of(target) is None:
            target.requires_grad = value
        else:
            raise Break(f".{name} of a tensor is set", "set it outside of the compiled function")

    # --- classes ------------------------------------------------------------------------------------------------------

    def _store_class_attribute(self, target: type, name: str, value: Any) -> None:
        setter, _ = class_attribute(type(target), "__setattr__")
        if self.is_created(target) and isinstance(setter, types.FunctionType):
            self.call(setter, (target, name, value), {})
        elif self.is_created(target) or setter is type.__setattr__:
            if not self._set_by_metaclass(target, name, value):
                self._store_class_data(target, name, value)
        else:
            raise _too_global(target, name)

    def _set_by_metaclass(self, target: type, name: str, value: Any) -> bool:
        """Write an attribute of a class by a property or descriptor of its metaclass; False where there is none."""
        found, owner = class_attribute(type(target), name)
        if owner is None or not hasattr(type(found), "__set__"):
            return False
        if isinstance(found, property) and found.fset is not None:
            self.guard_class_item(owner, name, found)
            self.call(found.fset, (target, value), {})
            return True
        if python_descriptor(found, "__set__") is not None:
            self.call_descriptor("__set__", owner, name, found, target, value)
            return True
        return False

    def _store_class_data(self, target: type, name: str, value: Any) -> None:
        if self.is_created(target):
            type.__setattr__(target, name, value)
            return
        before, owner = class_attribute(target, name)
        is_plain = isinstance(value, _PLAIN_DATA) and (owner is None or isinstance(before, _PLAIN_DATA))
        if name.startswith("__") or not is_plain:
            raise _too_global(target, name)
        source = self.values.pin(target, target.__qualname__)
        if owner is not target:
            self.guard_not_shadowed(target, owner, name)
        elif not self.effects.attribute_written(target, name):
            self.values.read(before, AttributeSource(source, name), plain=True)
        self.effects.set_attribute(target, name, value, source)

    # --- objects ------------------------------------------------------------------------------------------------------

    def store_default_attribute(self, target: Any, name: str, value: Any) -> None:
        found, owner = class_attribute(type(target), name)
        if isinstance(found, property):
            if found.fset is None:
                # Raises, in words that depend on how the property was made.
                found.__set__(target, None)
            self.call(found.fset, (target, value), {})
        elif owner is not None and hasattr(type(found), "__set__"):
            source = self.values.source_of(target)
            if isinstance(found, types.MemberDescriptorType) and source is not None:
                self.effects.set_attribute(target, name, value, source)
            elif python_descriptor(found, "__set__") is not None:
                self.call_descriptor("__set__", owner, name, found, target, value)
            elif source is not None:
                raise Break(f"{name} of an object that existed before the call is written to")
            else:
                object.__setattr__(target, name, value)
        else:
            self._store_instance(target, name, value)

    def _store_instance(self, target: Any, name: str, value: Any) -> None:
        attributes = instance_dict(target)
        source = self.source_of_owner(target, name)
        if isinstance(target, threading.local):
            raise Break("an attribute of a thread-local object is set", "keep it in an object that is no thread's own")
        if attributes is None or source is None:
            object.__setattr__(target, name, value)
            return
        self.values.note(attributes, InstanceDictSource(source))
        self.effects.set_item(attributes, name, value)

    def delete_attribute(self, target: Any, name: str) -> None:
        if type(target) in STAND_INS:
            delattr(target, name)
        found, owner = class_attribute(type(target), name)
        if isinstance(found, property) and isinstance(found.fdel, types.FunctionType):
            self.call(found.fdel, (target,), {})
            return
        if owner is not None and python_descriptor(found, "__delete__") is not None:
            self.call_descriptor("__delete__", owner, name, found, target)
            return
        attributes = instance_dict(target)
        if isinstance(target, (torch.Tensor, type, types.ModuleType)) or attributes is None or name not in attributes:
            raise Break(f"the attribute {name} of a {type(target).__name__} is deleted")
        deleter, _ = class_attribute(type(target), "__delattr__")
        if isinstance(deleter, types.FunctionType) and deleter is not torch.nn.Module.__delattr__:
            self.call(deleter, (target, name), {})
            return
        source = self.values.source_of(target)
        if source is not None:
            own, before = InstanceDictSource(source), self.effects.before(attributes)
            self.values.note(attributes, own)
            if name in before:
                self.values.guard(own, DictKeys(tuple(before)), f"{name} is deleted")
        self.effects.delete_item(attributes, name)


def _too_global(target: Any, name: str) -> Break:
    return Break(f"{name} of {getattr(target, '__name__', target)} is set", "do this outside of the function")


def _is_plain_module_store(target: Any, name: str, value: Any) -> bool:
    """Whether ``torch.nn.Module.__setattr__`` does nothing but write to the module's dictionary."""
    if isinstance(value, (torch.nn.Module, torch.nn.Parameter, torch.nn.Buffer)):
        return False
    attributes = instance_dict(target) or {}
    is_part = any(name in (attributes.get(table) or ()) for table in MODULE_TABLES)
    return not is_part and not hasattr(type(class_attribute(type(target), name)[0]), "__set__")
