"""Writing and deleting attributes as Python does it; writes to objects that existed before are journalled."""

from __future__ import annotations

import threading
import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.attributes import own_table
from dovetail.frontend.interpreter.lookup import (
    MISSING,
    MODULE_TABLES,
    LookupGuards,
    class_attribute,
    instance_dict,
    python_descriptor,
)
from dovetail.frontend.rules import STAND_INS, setter_rule
from dovetail.guards import DictKeys, InstanceDictSource


class Stores(LookupGuards):
    """The part of the interpreter that writes attributes."""

    def store_attribute(self, target: Any, name: str, value: Any) -> None:
        if isinstance(target, torch.Tensor):
            self._store_tensor_attribute(target, name, value)
        elif type(target) in STAND_INS:
            STAND_INS[type(target)].store(self, target, name, value)
        elif isinstance(target, types.FunctionType) and not name.startswith("__") and not self.is_created(target):
            self.values.note(target, self.values.pin(target, target.__qualname__))
            self._store_instance(target, name, value)
        elif isinstance(target, type) and self._is_class_data(target, name, value):
            self.effects.set_attribute(target, name, value, self.values.pin(target, target.__qualname__))
        elif isinstance(target, (type, types.ModuleType)) or (
            isinstance(target, types.FunctionType) and not self.is_created(target)
        ):
            raise Break(f"{name} of {getattr(target, '__name__', target)} is set", "do this outside of the function")
        else:
            setter, _ = class_attribute(type(target), "__setattr__")
            if not isinstance(setter, types.FunctionType) and getattr(setter, "__name__", "") == "__setattr__":
                self.store_default_attribute(target, name, value)
            elif setter is torch.nn.Module.__setattr__ and _is_plain_module_store(target, name, value):
                self._store_instance(target, name, value)
            else:
                self.call(setter, (target, name, value), {})

    def _is_class_data(self, target: type, name: str, value: Any) -> bool:
        """Whether this is plain data that stands in a class of the user's, as a counter does, and stays plain data."""
        found = target.__dict__.get(name, MISSING)
        is_plain = found is not MISSING and not any(hasattr(type(item), "__get__") for item in (found, value))
        is_own = is_plain and name[:2] != "__" and class_attribute(type(target), name)[0] is MISSING
        return is_own and not self.needs_no_guard(target) and type(target).__setattr__ is type.__setattr__

    def _store_tensor_attribute(self, target: torch.Tensor, name: str, value: Any) -> None:
        handler = setter_rule.get(name)
        if handler is not None and handler(self, target, value) is not NotImplemented:
            return
        traced = self.trace.input_of(target)
        kind = type(target if traced is None else traced.real)
        if name == "requires_grad" and traced is None:
            target.requires_grad = value
        elif class_attribute(kind, name)[0] is not MISSING or class_attribute(kind, "__setattr__")[1] is not object:
            raise Break(f".{name} of a tensor is set", "set it outside of the compiled function")
        elif traced is None:
            self.values.tensor_attributes.setdefault(id(target), (target, {}))[1][name] = value
        else:
            attributes = traced.real.__dict__
            self.values.note(attributes, InstanceDictSource(self.values.guards.tensor_source(traced.index)))
            self.effects.set_item(attributes, name, value)

    # --- objects ------------------------------------------------------------------------------------------------------

    def store_default_attribute(self, target: Any, name: str, value: Any) -> None:
        found, owner = class_attribute(type(target), name)
        if isinstance(found, property) and python_descriptor(found, "__set__") is None:
            if found.fset is None:
                # Raises, in words that depend on how the property was made.
                found.__set__(target, None)
            self.call(found.fset, (target, value), {})
        elif owner is not None and (hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")):
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
        if isinstance(target, threading.local):
            self.guard_stays_hidden(type(target), name)
            return self.effects.set_item(self.load_attribute(target, "__dict__"), name, value)
        attributes = instance_dict(target)
        source = self.source_of_owner(target, name)
        if attributes is None or source is None:
            try:
                object.__setattr__(target, name, value)
            except TypeError as error:
                raise Break(f"{name} of a {type(target).__name__} is set, in a way of its class") from error
            return
        self.guard_stays_hidden(type(target), name)
        self.values.note(attributes, own_table(self.values, attributes, source))
        self.effects.set_item(attributes, name, value)

    def delete_attribute(self, target: Any, name: str) -> None:
        if type(target) in STAND_INS:
            delattr(target, name)
        attributes, (found, _) = instance_dict(target), class_attribute(type(target), name)
        deleter, _ = class_attribute(type(target), "__delattr__")
        is_plain = deleter is object.__delattr__ or deleter is torch.nn.Module.__delattr__
        is_plain = is_plain and not isinstance(target, (torch.Tensor, types.ModuleType, types.FunctionType))
        if attributes is None or name not in attributes or hasattr(type(found), "__delete__") or not is_plain:
            raise Break(f"the attribute {name} of a {type(target).__name__} is deleted")
        if (source := self.values.source_of(target)) is not None:
            own, before = own_table(self.values, attributes, source), self.effects.before(attributes)
            self.values.note(attributes, own)
            if name in before:
                self.values.guard(own, DictKeys(tuple(before)), f"{name} is deleted")
        self.effects.delete_item(attributes, name)


def _is_plain_module_store(target: Any, name: str, value: Any) -> bool:
    """Whether ``torch.nn.Module.__setattr__`` does nothing but write to the module's dictionary."""
    if isinstance(value, (torch.nn.Module, torch.Tensor)):
        return False
    attributes = instance_dict(target) or {}
    is_part = any(name in (attributes.get(table) or ()) for table in MODULE_TABLES)
    return not is_part and not hasattr(type(class_attribute(type(target), name)[0]), "__set__")
