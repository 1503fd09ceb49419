"""The stand-in for a tensor of a class that overrides torch's functions, or adds attributes, and is a plain tensor otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from dovetail.frontend.code.frame import Break
from dovetail.guards import Step
from dovetail.torch_private import calls as private_calls


class OverridingValue:
    """A tensor of the user's class ``kind``: the plain traced tensor, and the attributes that the program has set.

    It is no tensor itself. What reaches it past the interpreter breaks the graph.
    """

    __slots__ = ("attributes", "kind", "tensor")

    def __init__(self, kind: type, tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
        self.kind, self.tensor, self.attributes = kind, tensor, attributes

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        raise Break(f"{name} is given a tensor subclass inside of a function of torch", "hand over plain tensors")


class OverridingSuper:
    """``super(start, value)``."""

    def __init__(self, start: type, value: OverridingValue) -> None:
        self.start, self.value = start, value


def _special(name: str) -> Callable[..., Any]:
    def method(value: OverridingValue, *args: Any) -> Any:
        what = value.kind.__name__ if isinstance(value, OverridingValue) else "tensor subclass"
        raise Break(f"native code asks a {what} for {name}", "call it with plain tensors, or outside of the function")

    method.__name__ = name
    return method


#: The code of all special methods of stand-ins: the interpreter asks the user's class in their place.
SPECIAL_CODE = _special("").__code__  # type: ignore[attr-defined]

for _name in (
    *("getitem", "setitem", "delitem", "len", "iter", "bool", "contains", "index", "int", "float", "complex", "repr"),
    *("str", "format", "hash", "eq", "ne", "lt", "le", "gt", "ge", "copy", "deepcopy", "reduce_ex", "array"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "rpow", "neg"),
    *("enter", "exit", "call"),
):
    setattr(OverridingValue, f"__{_name}__", _special(f"__{_name}__"))


@dataclass(frozen=True)
class PlainSource(Step):
    """A tensor of a subclass as a plain one, in the same memory and with the same gradient."""

    makes_new: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The tensor, as a user writes it."""
        return self.base.name

    def read(self, value: Any) -> Any:
        """The plain tensor."""
        with private_calls.no_torch_function():
            return _as_class(value, torch.Tensor)


def _as_class(tensor: torch.Tensor, kind: Any) -> Any:
    with torch.set_grad_enabled(tensor.requires_grad):
        return tensor.as_subclass(kind)


def remake(kind: type, tensor: torch.Tensor, attributes: dict[str, Any]) -> Any:
    """A tensor of a subclass, in the memory of a plain one."""
    with private_calls.no_torch_function():
        made = _as_class(tensor, kind)
    made.__dict__.update(attributes)
    return made


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with ``change`` made to the items of its lists, tuples and dictionaries; the same object where nothing changes."""
    kind = type(value)
    if isinstance(value, tuple) or kind is list:
        items = [mapped(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if kind is dict:
        pairs = {key: mapped(item, change) for key, item in value.items()}
        return value if all(pairs[key] is item for key, item in value.items()) else pairs
    return change(value)
