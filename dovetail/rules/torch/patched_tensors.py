"""Patches of a program in the classes of tensors: methods of its own, and functions in the place of torch's methods.

A method that the program calls by its name is interpreted. A special method is called by native code, for an operator or a
builtin, where nobody sees what it does: while one is replaced, nothing is captured. A hook or a custom backward finds what is there
when the backward runs, so that it is asked again then.
"""

from __future__ import annotations

import gc
import types
from typing import Any

import torch

from dovetail.frontend.values.values import Values
from dovetail.guards import Answers
from dovetail.guards.ambient import WATCHED, Watched
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private.guard_managers import flat_versions
from dovetail.trace.program import RESOLVE

_TABLES: list[dict[str, Any]] = [
    gc.get_referents(kind.__dict__)[0] for kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
]
# The program may have put functions there before this module was imported.
_TORCHS_OWN = [
    {
        name: value
        for name, value in table.items()
        if type(value) is not types.FunctionType or value.__globals__["__name__"].startswith("torch.")
    }
    for table in _TABLES
]
_INHERITED = private_tensors.TensorBase.__dict__
#: Special methods that no operator calls.
_SHOWING = frozenset(
    {"__repr__", "__str__", "__format__", "__dir__", "__deepcopy__", "__reduce_ex__", "__annotations__"}
)


class Patch:
    """A patch of a class under a name; equal to another one by identity."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Patch) and self.name == other.name and self.value is other.value

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


def patches() -> tuple[Patch, ...]:
    """The patches in the classes of tensors; an attribute of torch's that is gone has the value None.

    >>> torch.Tensor.twice = lambda self: self * 2
    >>> [*map(str, patches())]
    ['twice']
    >>> del torch.Tensor.twice
    >>> patches()
    ()
    """
    versions = flat_versions(_TABLES)
    if versions != _last[0]:
        _last[:] = versions, _read()
    return _last[1]  # type: ignore[no-any-return]


#: The versions of the tables, and what they said then.
_last: list[Any] = [None, ()]


def _read() -> tuple[Patch, ...]:
    return tuple(
        Patch(name, table.get(name))
        for table, own in zip(_TABLES, _TORCHS_OWN, strict=True)
        for name in (*table, *(own.keys() - table.keys()))
        # ``copyreg`` notes the slots of a class in the class.
        if name != "__slotnames__" and table.get(name) is not own.get(name, _INHERITED.get(name, own))
    )


def _refusal() -> str | None:
    names = [one.name for one in patches() if one.name[:2] == "__" and one.name not in _SHOWING]
    return f"the program has replaced {', '.join(names)} of torch.Tensor" if names else None


def _unpatched(function: Any) -> Any:
    """Torch finds a method that it calls by its name in the class: its own, where the program has put another one there."""
    for one in patches():
        if one.value is function is not None:
            return _TORCHS_OWN[0].get(one.name) or _INHERITED.get(one.name, function)
    return function


def replaced_methods(kind: type) -> tuple[tuple[str, int], ...]:
    """The names under which the classes of tensors have something else than torch's own, each with what is there."""
    return tuple([(one.name, id(one.value)) for one in patches()])


def note_for_backward(values: Values) -> None:
    """Have the classes of tensors looked at again when a hook or a custom backward of the program runs."""
    source = values.pin(torch.Tensor, "torch.Tensor")
    predicate = Answers(replaced_methods, (), replaced_methods(torch.Tensor))
    values.note_backward_read(source, predicate, "a method of tensors may be called", always=True)


WATCHED.append(Watched(patches, _refusal, _TABLES))
RESOLVE.append(_unpatched)
