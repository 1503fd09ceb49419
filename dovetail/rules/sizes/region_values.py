"""What a part of a function that runs whole is given: tensors, and how the variables of the function are made of them again.

A size is given as the size of a tensor. A container is made anew at each run, so that what the region does to it is its own
affair. An object is given as one that has nothing but the attributes which the region reads.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.frontend.code.frame import NULL
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.values.leaves import is_leaf_value
from dovetail.torch_private import sizes as private_sizes


class RefusedError(Exception):
    """A part of a function is not one that runs whole."""


class Value:
    """A value as a function of the tensors that are given."""

    def made(self, given: Sequence[torch.Tensor]) -> Any:
        """The value."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Value):
    """A value that no size decides, and that cannot be changed."""

    value: Any

    def made(self, given: Sequence[torch.Tensor]) -> Any:
        """See :class:`Value`."""
        return self.value


@dataclass(frozen=True)
class GivenTensor(Value):
    """One of the tensors."""

    index: int

    def made(self, given: Sequence[torch.Tensor]) -> Any:
        """See :class:`Value`."""
        return given[self.index]


@dataclass(frozen=True)
class GivenSize(Value):
    """A size of one of the tensors."""

    index: int
    dim: int

    def made(self, given: Sequence[torch.Tensor]) -> Any:
        """See :class:`Value`."""
        return given[self.index].shape[self.dim]


@dataclass(frozen=True)
class Items(Value):
    """A list or a tuple."""

    kind: type
    items: tuple[Value, ...]

    def made(self, given: Sequence[torch.Tensor]) -> Any:
        """See :class:`Value`."""
        return self.kind(item.made(given) for item in self.items)


@dataclass(frozen=True)
class ObjectValue(Value):
    """An object of which only attributes are read; one of ``calls``, if any, is a module that may be called as well, with the
    given tensors in it.
    """

    value: Any
    attributes: dict[str, Value] = field(default_factory=dict)
    module: dict[str, Value] = field(default_factory=dict)
    calls: list[torch.nn.Module] = field(default_factory=list)

    def made(self, given: Sequence[torch.Tensor]) -> Any:
        """See :class:`Value`."""
        found = _CalledModule(self.calls[0], self._tensors(given)) if self.calls else _Object()
        for name, item in self.attributes.items():
            setattr(found, name, item.made(given))
        return found

    def _tensors(self, given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: item.made(given) for name, item in self.module.items()}


class _Object:
    """Stands for an object in a region."""


class _CalledModule(_Object):
    """Stands for a module in a region."""

    def __init__(self, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        # A name of the program's own would hide it.
        self.__called = module, tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, tensors = self.__called
        return torch.func.functional_call(module, dict(tensors), args, kwargs)


@dataclass(frozen=True)
class FunctionValue(Value):
    """The function of a comprehension, with what its closure holds."""

    function: types.FunctionType
    closure: tuple[Value, ...]

    def made(self, given: Sequence[torch.Tensor]) -> Any:
        """See :class:`Value`."""
        cells = tuple(types.CellType(item.made(given)) for item in self.closure)
        function = self.function
        return types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)


class GivenTensors:
    """The tensors that a region is given, in the order in which they were asked for."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._interpreter = interpreter
        self.tensors: list[torch.Tensor] = []
        #: Those of which only a size is read.
        self.carriers: set[int] = set()
        self._values: dict[int, Value] = {}

    def value(self, value: Any, changes: bool = False) -> Value:
        """How a value is made again; ``changes`` says that it is the region's own to change. Raises :class:`RefusedError`."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) is torch.SymInt:
            return self.size(value)
        if value is NULL or value is None or is_leaf_value(value) or isinstance(value, types.ModuleType):
            return Constant(value)
        if type(value) is tuple or (type(value) is list and changes):
            return Items(type(value), tuple(self.value(item) for item in value))
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) or type(value) in (list, dict, set):
            raise RefusedError
        known = self._values.get(id(value))
        if known is None:
            known = self._values[id(value)] = ObjectValue(value)
        return known

    def constant(self, value: Any) -> Value:
        """A value that is what it is, whatever the sizes."""
        return Constant(value)

    def _tensor(self, value: torch.Tensor) -> GivenTensor:
        for index, item in enumerate(self.tensors):
            if item is value:
                return GivenTensor(index)
        self.tensors.append(value)
        return GivenTensor(len(self.tensors) - 1)

    def size(self, size: Any) -> Value:
        """A size, as that of a tensor which is given anyway, or else of an empty one."""
        if type(size) is int:
            return Constant(size)
        if private_sizes.is_data_number(size) or private_sizes.hint(size) < 0:
            raise RefusedError
        wanted = private_sizes.expression_of(size)
        for index, tensor in enumerate(self.tensors):
            for dim, item in enumerate(tensor.shape):
                if private_sizes.is_symbolic(item) and private_sizes.expression_of(item) == wanted:
                    return GivenSize(index, dim)
        device = next((item.device for item in self.tensors), None)
        if device is None:
            raise RefusedError
        # Its size is all that is read of it.
        carrier = self._interpreter.call_torch(torch.empty, ([size],), {"device": device})
        self.carriers.add(len(self.tensors))
        self.tensors.append(carrier)
        return GivenSize(len(self.tensors) - 1, 0)
