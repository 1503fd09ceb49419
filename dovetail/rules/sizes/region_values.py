"""Values as functions of tensors: what code that runs as one call is given.

A size is given as the size of a tensor. A container is made anew at each run, so that code may change it. An object is given as one
that has nothing but the attributes which the code reads.
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
    """Code cannot run as one call."""


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


@dataclass(eq=False)
class ObjectValue(Value):
    """An object of which only attributes are read; one that is a module may be called as well, with the given tensors in it.

    ``value`` is the object while its attributes are looked up; a graph is not to keep it alive.
    """

    value: Any
    attributes: dict[str, Value] = field(default_factory=dict)
    module: Skeleton | None = None

    def made(self, given: Sequence[torch.Tensor]) -> Any:
        """See :class:`Value`."""
        found = _Object() if self.module is None else _CalledModule(self.module, given)
        for name, item in self.attributes.items():
            setattr(found, name, item.made(given))
        return found


class Skeleton:
    """A module without its parameters and buffers, and where these are among the given tensors."""

    def __init__(self, module: torch.nn.Module, tensors: Mapping[str, Value]) -> None:
        self.module = _without_tensors(module)
        self.tensors = tensors


def _without_tensors(module: torch.nn.Module) -> torch.nn.Module:
    kind = type(module)
    bare = kind.__new__(kind)
    own: dict[str, Any] = dict(vars(module))
    for table in ("_parameters", "_buffers"):
        own[table] = dict.fromkeys(own[table])
    own["_modules"] = {name: None if part is None else _without_tensors(part) for name, part in own["_modules"].items()}
    vars(bare).update(own)
    return bare


class _Object:
    """Stands for an object in code that runs as one call."""


class _CalledModule(_Object):
    """Stands for a module in code that runs as one call."""

    def __init__(self, skeleton: Skeleton, given: Sequence[torch.Tensor]) -> None:
        # A name of the program's own would hide it.
        self.__called = skeleton, given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        skeleton, given = self.__called
        tensors = {name: item.made(given) for name, item in skeleton.tensors.items()}
        return torch.func.functional_call(skeleton.module, tensors, args, kwargs)


@dataclass(frozen=True)
class FunctionValue(Value):
    """The function of a comprehension, with what its closure holds."""

    code: types.CodeType
    space: dict[str, Any]
    closure: tuple[Value, ...]

    def made(self, given: Sequence[torch.Tensor]) -> Any:
        """See :class:`Value`."""
        cells = tuple(types.CellType(item.made(given)) for item in self.closure)
        return types.FunctionType(self.code, self.space, self.code.co_name, None, cells)


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
            return Constant(value)
        if type(value) in (tuple, torch.Size) or (type(value) is list and changes):
            return Items(list if type(value) is list else tuple, tuple(self.value(item, changes) for item in value))
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
        device = self.tensors[0].device if self.tensors else self._device
        if device is None:
            raise RefusedError
        # Its size is all that is read of it.
        self.tensors.append(self._interpreter.call_torch(torch.empty, ([size],), {"device": device}))
        return GivenSize(len(self.tensors) - 1, 0)
