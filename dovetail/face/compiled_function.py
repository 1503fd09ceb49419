"""A compiled function as the user holds it: called, copied, pickled and looked at like the original."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from dovetail.aot.compile_joint import choose_backend
from dovetail.backends import Backend
from dovetail.face.continuation import Continuation, Continuations
from dovetail.face.dispatcher import Dispatcher
from dovetail.face.learned import Learned, Part, SharedState
from dovetail.face.loading import in_tiers
from dovetail.face.warnings import name_of
from dovetail.frontend.code.points import ResumePoint
from dovetail.options import Options


class CompiledFunction(Dispatcher):
    """A function with its compiled entries; made by :func:`dovetail.compile`."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        backend = choose_backend(options.backend, options.numerics).with_options(options.backend_options)
        shared = SharedState(in_tiers(backend, options), name_of(function))
        super().__init__(Part(function, options, shared))
        self._continuations = Continuations(options, shared)
        if not isinstance(function, torch.nn.Module):
            _look_like(self, function)

    @property
    def backend(self) -> Backend:
        """The backend in use: another than the default one where that does not work here."""
        return self._part.shared.backend

    def cost(self, measure: bool = False) -> Any:
        """FLOPs, bytes, peak of memory and measured time of a call, by module (:mod:`dovetail.reports.cost`)."""
        return importlib.import_module("dovetail.reports.cost").cost(self, measure)

    def continuations(self) -> list[Continuation]:
        """The code after each graph break, with entries of its own."""
        return list(self._continuations)

    def forget_entries(self) -> None:
        """Drop all entries, and what was learned."""
        self.entries, self._part.shared.learned, self._limit_warned = [], Learned(), False
        self._continuations = Continuations(self.options, self._part.shared)

    def _go_on(self, point: ResumePoint, results: list[Any]) -> Any:
        result = self._continuations.run(point, results)
        if self._continuations.are_outdated:
            self.entries, self._continuations = [], Continuations(self.options, self._part.shared)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the original function: ``__defaults__``, ``__code__``, and attributes that were set on it."""
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)

    def __repr__(self) -> str:
        return f"<compiled {name_of(self.original)}>"

    def __copy__(self) -> CompiledFunction:
        """Return the function itself, as copying a plain function does."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        """Itself for a plain function, which is its own copy too; else the copy compiled anew, with no entries yet."""
        original = copy.deepcopy(self.original, memo)
        return self if original is self.original else type(self)(original, self.options)

    def __reduce__(self) -> Any:
        """Pickled by name where the name leads here, as after ``@dovetail.compile``; else as the original and the options."""
        name = getattr(self.original, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self.original, "__module__", None) or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (type(self), (self.original, self.options))


def _look_like(compiled: CompiledFunction, function: Any) -> None:
    """Do the work of ``functools.update_wrapper``, also for objects whose attributes raise."""
    for name in functools.WRAPPER_ASSIGNMENTS:
        try:
            value = getattr(function, name)
        except Exception:  # noqa: BLE001  (an attribute of the user's own object)
            continue
        setattr(compiled, name, value)
    compiled.__wrapped__ = function  # type: ignore[attr-defined]
