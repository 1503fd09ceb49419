"""The call that torch would hand to ``__torch_function__``, asked of torch with empty tensors of classes without code."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.rules import Arguments, Keywords
from dovetail.rules.subclasses.overriding_values import OverridingValue, mapped
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import tracing as private_tracing


class _AskedError(Exception):
    """The arguments that ``__torch_function__`` would be given."""


class _Asking(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, *told: Any) -> NoReturn:  # type: ignore[override]
        raise _AskedError(told)


_PROBES: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _refuse(*told: Any) -> Any:
    return NotImplemented


def _probe_class(kind: type) -> type:
    """A class of tensors that torch treats as the user's, without the user's code."""
    if kind not in _PROBES:
        bases = [_probe_class(base) for base in kind.__bases__ if private_libraries.is_plain_inside(base)]
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        is_asked = private_libraries.overrides_functions(kind)
        found = classmethod(_refuse) if is_asked else private_libraries.disabled_torch_function
        _PROBES[kind] = type(kind.__name__, tuple(bases) or (torch.Tensor,), {**names, "__torch_function__": found})
    return _PROBES[kind]


class Probes:
    """Empty tensors in the place of the stand-ins of one call."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[torch.Tensor, OverridingValue]] = {}
        self._probes: dict[int, torch.Tensor] = {}

    def probe(self, value: Any) -> Any:
        """The empty tensor for a stand-in; any other value itself."""
        if type(value) is not OverridingValue:
            return value
        if id(value) not in self._probes:
            with private_calls.no_torch_function():
                made: torch.Tensor = torch.empty(0).as_subclass(_probe_class(value.kind))
            self._probes[id(value)] = made
            self._values[id(made)] = made, value
        return self._probes[id(value)]

    def value(self, probe: Any) -> Any:
        """The stand-in for an empty tensor."""
        found = self._values.get(id(probe))
        return probe if found is None else found[1]

    def kind(self, kind: type) -> type:
        """The user's class for that of an empty tensor."""
        return next((value.kind for made, value in self._values.values() if type(made) is kind), kind)

    def ask(self, function: Any, args: Arguments, kwargs: Keywords) -> Arguments | None:
        """Function, types, arguments and keywords as the classes are told of a call. None: torch asks nobody."""
        with private_tracing.disable_current_modes(), _Asking():
            try:
                function(*mapped(args, self.probe), **mapped(kwargs, self.probe))
            except _AskedError as asked:
                named, kinds, *given = asked.args[0]
                return named, tuple(map(self.kind, kinds)), *mapped(tuple(given), self.value)
            except Exception:  # noqa: BLE001  (torch says the same of the call itself)
                return None
        return None

    def refuse(self, function: Any, args: Arguments, kwargs: Keywords) -> NoReturn:
        """Raise torch's error for a call that no class takes; Python asks the other operand of an operator first."""
        if getattr(function, "__module__", None) == "_operator":
            raise Break("no __torch_function__ takes an operator", "compute it outside of the function")
        with private_tracing.disable_current_modes():
            function(*mapped(args, self.probe), **mapped(kwargs, self.probe))
        raise Break("no __torch_function__ takes a call", "call it outside of the function")
