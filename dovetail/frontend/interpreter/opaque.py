"""Objects that native code could look into: all that it could read is guarded, or the call is refused."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.interpreter.call_tables import NATIVE_CALLABLES
from dovetail.frontend.interpreter.lookup import instance_dict
from dovetail.frontend.rules import content_of
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.frontend.values.values import Values
from dovetail.guards import Identity, InstanceDictSource, ItemSource

# An object of these is known by its class and its arguments, for ever, or is guarded as a tensor or a module.
_FUNCTIONS = (types.FunctionType, types.MethodType)
_FIXED = (type, *_FUNCTIONS, types.ModuleType, torch.Tensor, torch.nn.Module, *NATIVE_CALLABLES)
# Containers that are gone through when they are handed over, and what is known by its name.
_GUARDED = (list, tuple, dict, set, frozenset, types.ModuleType, logging.Logger)
# All that is in these are attributes and items, which are guarded one by one.
_OPEN = (object, list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict)


def hides_state(value: Any) -> bool:
    """Whether an object of a native class, or of a subclass of one, has a state that is no attribute and no item."""
    kind = type(value)
    if kind is object or is_leaf_value(value) or isinstance(value, _FIXED) or kind.__module__.startswith("torch"):
        return False
    makers = (owner.__dict__.get("__new__") for owner in kind.__mro__)
    maker = next((item for item in makers if isinstance(item, types.BuiltinFunctionType)), None)
    return getattr(maker, "__self__", object) not in _OPEN


def check_shown(values: Values, value: Any, depth: int = 3) -> None:
    """Refuse to make a text of a traced tensor, or of a container with native objects, which nobody guards, in it."""
    if isinstance(value, torch.Tensor):
        raise Break("a tensor is turned into text", "print or format tensors outside of the function")
    values.hold(value)
    if isinstance(value, dict):
        value = (*dict.keys(value), *dict.values(value))
    if isinstance(value, (list, tuple, set, frozenset, deque)) and depth:
        for item in value:
            check_shown(values, item, depth - 1)
    elif type(value) is functools.partial or (hides_state(value) and values.source_of(value) is not None):
        raise Break(f"a text is made of a {type(value).__qualname__} object", "make the text outside of the function")


def check_opaque(values: Values, function: Any, value: Any, looks_inside: bool = False) -> None:
    """Guard all that native code could read of an object that existed before, or refuse to hand it over."""
    kind = type(value)
    if looks_inside and kind in (tuple, list):
        for item in value:
            if type(item) in (tuple, list) or hides_state(item):
                check_opaque(values, function, item, True)
    is_module = isinstance(value, torch.nn.Module)
    source = values.source_of(value)
    is_plain = not isinstance(value, (torch.Tensor, torch.nn.Module, type, enum.Enum))
    if is_plain and kind.__module__.startswith("torch."):
        _guard_settings(values, value)
        if dataclasses.is_dataclass(value):
            # Options of a function of torch's.
            guard_deep(values, value, {})
            return
    is_known = source is None or callable(value) or isinstance(value, _GUARDED) or is_leaf_value(value)
    if is_module or not (is_known or content_of(value) is not None):
        name = getattr(function, "__name__", str(function))
        raise Break(
            f"a {kind.__qualname__} object is handed to {name}, which could read state that nobody guards",
            "hand over the values it needs instead",
        )
    if source is not None and callable(value) and not isinstance(value, (type, *_FUNCTIONS)):
        if instance_dict(value) is not None:
            guard_deep(values, value, {})
        else:
            values.guard(source, Identity(value), f"{source.name} was handed to native code")


def _guard_settings(values: Values, value: Any) -> None:
    """An object of torch's own, such as ``torch.autocast(...)``, made before the call: its settings are guarded."""
    source, attributes = values.source_of(value), instance_dict(value)
    if source is None or attributes is None:
        return
    for name, item in attributes.items():
        # State between enter and exit is no setting.
        if not name.startswith("prev"):
            values.read(item, ItemSource(InstanceDictSource(source), name))


def guard_deep(values: Values, value: Any, seen: dict[int, Any]) -> None:
    """Guard all that a copy of ``value`` would read; a tensor or module inside cannot be copied in a capture."""
    if id(value) in seen or is_leaf_value(value) or isinstance(value, (type, types.FunctionType, types.ModuleType)):
        return
    seen[id(value)] = value
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        kind = "tensor" if isinstance(value, torch.Tensor) else type(value).__name__
        raise Break(f"a {kind} is copied by copy.deepcopy", "use .clone(), or copy outside of the function")
    children: list[Any] = []
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
        values.whole(value)
        children += dict.values(value) if isinstance(value, dict) else value
    attributes, source = instance_dict(value), values.source_of(value)
    if not children and hides_state(value) and source is not None:
        raise Break(
            f"a {type(value).__qualname__} object is copied, and nobody guards what is in it",
            "copy it outside of the function",
        )
    if attributes is not None:
        if source is not None:
            values.note(attributes, InstanceDictSource(source))
        values.whole(attributes)
        children += attributes.values()
    for child in children:
        guard_deep(values, child, seen)
