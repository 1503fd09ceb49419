"""Look at a compiled function: its entries, its graph breaks, its events."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from dovetail.errors import NotCallableError
from dovetail.events import EventLog
from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.module import CompiledModule
from dovetail.face.warnings import count
from dovetail.runtime.entry import Entry


def explain(compiled: Any) -> Callable[..., Any]:
    """``dovetail.explain(compiled)(*args)``: for each entry, whether its guards hold and if not, which failed and why.

    It returns a :class:`dovetail.report.explanation.Explanation`. Nothing is run and nothing compiled.
    """
    function = compiled_function(compiled)
    # A page for a reader: the core computes what is in it.
    page = importlib.import_module("dovetail.report.explanation").Explanation

    def report(*args: Any, **kwargs: Any) -> Any:
        entries = tuple(_explain_entry(entry, function.original, args, kwargs) for entry in function.entries)
        breaks = tuple(
            f"{item.original.__qualname__}: {count(item.entries, 'compiled entry')} after it"
            for item in function.continuations()
        )
        return page(entries, tuple(map(str, function.events.events)), breaks)

    return report


def _explain_entry(entry: Entry, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    failures = entry.checker.explain(callee, args, kwargs)
    if failures:
        return "miss: " + "; ".join(map(str, failures))
    return f"runs eagerly ({entry.reason})" if entry.run is None else "hit"


def compiled_function(compiled: Any) -> CompiledFunction:
    """The :class:`CompiledFunction` behind what :func:`dovetail.compile` returned."""
    if isinstance(compiled, CompiledModule):
        compiled = compiled.compiled_call
    if isinstance(compiled, CompiledFunction):
        return compiled
    # A callable that compiles anew for each process group keeps the present function under ``compiled``.
    inner = getattr(compiled, "compiled", None)
    if isinstance(inner, (CompiledModule, CompiledFunction)):
        return compiled_function(inner)
    raise NotCallableError(f"a {type(compiled).__name__} was not made by dovetail.compile")


def events_of(compiled: Any) -> EventLog:
    """The events of a compiled function or module."""
    return compiled_function(compiled).events
