"""Values as functions of tensors: what code that runs as one call is given.

A size is given as the size of a tensor. A container is made anew at each run, so that code may change it. An object is given as one
that has nothing but the attributes which the code reads.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.frontend.code.frame import NULL
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.torch_private import sizes as private_sizes

Tensors = Sequence[torch.Tensor]
Value = Callable[[Tensors], Any]
"""A value as a function of the tensors that are given."""


class RefusedError(Exception):
    """Code cannot run as one call."""


def constant(value: Any) -> Value:
    """A value that no size decides, and that cannot be changed.

    >>> constant(3)([])
    3
    """
    return lambda given: value


class ObjectValue:
    """An object of which only attributes are read; where it is a module, it may be called as well.

    ``value`` is the object while its attributes are looked up; a graph is not to keep it alive. ``call`` makes the function that is
    called in the place of a module.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.attributes: dict[str, Value] = {}
        self.call: Value | None = None

    def __call__(self, given: Tensors) -> Any:
        """The object that stands for it."""
        found = _StandIn(None if self.call is None else self.call(given))
        for name, item in self.attributes.items():
            setattr(found, name, item(given))
        return found


class _StandIn:
    def __init__(self, call: Callable[..., Any] | None) -> None:
        # A name of the program's own would hide it.
        self.__call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.__call is None:
            raise RefusedError
        return self.__call(*args, **kwargs)


def functional_module(module: torch.nn.Module, tensors: Mapping[str, Value]) -> Value:
    """A module as a function, with given tensors in the place of its parameters and buffers."""
    bare = _without_tensors(module)

    def function(given: Tensors) -> Callable[..., Any]:
        own = {name: item(given) for name, item in tensors.items()}
        return lambda *args, **kwargs: torch.func.functional_call(bare, own, args, kwargs)

    return function


def _without_tensors(module: torch.nn.Module) -> torch.nn.Module:
    kind = type(module)
    bare = kind.__new__(kind)
    own: dict[str, Any] = dict(vars(module))
    for table in ("_parameters", "_buffers"):
        own[table] = dict.fromkeys(own[table])
    own["_modules"] = {name: None if part is None else _without_tensors(part) for name, part in own["_modules"].items()}
    vars(bare).update(own)
    return bare


class GivenTensors:
    """The tensors that a call is given, in the order in which they were asked for. ``device`` is where a size is given that is no
    size of any of them.
    """

    def __init__(self, interpreter: TracingInterpreter, device: Any = None) -> None:
        self._interpreter = interpreter
        self._device = device
        self.tensors: list[torch.Tensor] = []
        self._objects: dict[int, ObjectValue] = {}

    def value(self, value: Any, changes: bool = False) -> Value:
        """How a value is made again; ``changes``: it is the code's own to change. Raises :class:`RefusedError`."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) is torch.SymInt:
            return self.size(value)
        if value is NULL or value is None or is_leaf_value(value) or isinstance(value, types.ModuleType):
            return constant(value)
        if type(value) in (tuple, torch.Size) or (type(value) is list and changes):
            kind = list if type(value) is list else tuple
            # A list within a list may be known by another name.
            items = [self.value(item, changes and kind is tuple) for item in value]
            return lambda given: kind(item(given) for item in items)
        is_code = isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType))
        if is_code or type(value) in (list, dict, set) or private_sizes.is_symbolic(value):
            raise RefusedError
        return self._objects.setdefault(id(value), ObjectValue(value))

    def plain(self, value: Any) -> Value:
        """The same for a value that is, or holds, tensors, sizes and constants only."""
        found = self.value(value, changes=True)
        if self._objects:
            raise RefusedError
        return found

    def let_go(self) -> None:
        """Forget the objects: all that is read of them is known."""
        for item in self._objects.values():
            item.value = None

    def _tensor(self, value: torch.Tensor) -> Value:
        index = next((at for at, item in enumerate(self.tensors) if item is value), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(value)
        return lambda given: given[index]

    def size(self, size: Any) -> Value:
        """A size, as that of a tensor which is given anyway, or else of an empty one."""
        if type(size) is int:
            return constant(size)
        if private_sizes.is_data_number(size) or private_sizes.hint(size) < 0:
            raise RefusedError
        wanted = private_sizes.expression_of(size)
        for index, tensor in enumerate(self.tensors):
            for dim, item in enumerate(tensor.shape):
                if private_sizes.is_symbolic(item) and private_sizes.expression_of(item) == wanted:
                    return lambda given: given[index].shape[dim]
        device = self.tensors[0].device if self.tensors else self._device
        if device is None:
            raise RefusedError
        # Its size is all that is read of it.
        of_size = self._tensor(self._interpreter.call_torch(torch.empty, ([size],), {"device": device}))
        return lambda given: of_size(given).shape[0]
