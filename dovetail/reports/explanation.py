"""The result of ``dovetail.explain``: a call's entries, graph breaks and events, as text and as a page of a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.errors import DovetailError, NotCallableError
from dovetail.events import EventLog
from dovetail.face.attempts import capturing
from dovetail.face.compile import capture
from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.module import CompiledModule
from dovetail.face.warnings import count
from dovetail.frontend.code.frame import Break
from dovetail.runtime.entry import Entry

#: Graph breaks and events that are printed; all of them are in the fields.
_MOST_SHOWN = 50


@dataclass(frozen=True, repr=False)
class Explanation:
    """The fate of a call, with reasons.

    ``entries`` says of each compiled entry whether its guards hold, ``breaks`` where a graph ends before the function does, with
    the number of entries that go on there, ``events`` what was decided so far, ``expected`` what a first call would find.

    >>> Explanation(("hit",), ("capture 3.1 ms",), ("f (going on at line 3): 2 entries after it",))
    1 compiled entry
      entry 0: hit
    1 graph break
      f (going on at line 3): 2 entries after it
    1 event
      capture 3.1 ms
    """

    entries: tuple[str, ...]
    events: tuple[str, ...]
    breaks: tuple[str, ...] = ()
    expected: str = ""

    def __str__(self) -> str:
        lines = [count(self.entries, "compiled entry")]
        if self.expected:
            lines.append(f"expected at the first call: {self.expected}")
        lines += [f"  entry {number}: {text}" for number, text in enumerate(self.entries)]
        for items, one in ((self.breaks, "graph break"), (self.events, "event")):
            if items:
                left_out = len(items) - _MOST_SHOWN
                lines.append(count(items, one) + (f", the last {_MOST_SHOWN} of them" if left_out > 0 else ""))
                lines += [f"  {item}" for item in items[-_MOST_SHOWN:]]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same for a notebook: entries and graph breaks as lists, events to be opened."""
        expected = f"<pre>expected at the first call: {html.escape(self.expected)}</pre>" if self.expected else ""
        parts = [expected, _list("compiled entry", self.entries), _list("graph break", self.breaks)]
        events = _list("event", self.events)
        return "".join(parts) + (f"<details><summary>events</summary>{events}</details>" if events else "")


def _list(one: str, items: Sequence[str]) -> str:
    rows = "".join(f"<li><pre>{html.escape(item)}</pre></li>" for item in items)
    return f"<p>{count(items, one)}</p><ol start='0'>{rows}</ol>" if items else ""


@dataclass(frozen=True, repr=False)
class Explainer:
    """The result of :func:`explain`: called with arguments, it explains that call; printed, it shows the entries so far."""

    function: CompiledFunction

    def __call__(self, *args: Any, **kwargs: Any) -> Explanation:
        """Explain the call with these arguments; it is not run."""
        function = self.function
        entries = tuple(_explain_entry(entry, function.original, args, kwargs) for entry in function.entries)
        expected = "" if entries else _expected(function, args, kwargs)
        return Explanation(entries, self._events(), self._breaks(), expected)

    def _breaks(self) -> tuple[str, ...]:
        return tuple(
            f"{item.original.__qualname__}: {count(item.entries, 'compiled entry')} after it"
            for item in self.function.continuations()
        )

    def _events(self) -> tuple[str, ...]:
        return tuple(map(str, self.function.events.events))

    def _so_far(self) -> Explanation:
        entries = tuple(map(_state, self.function.entries))
        return Explanation(entries, self._events(), self._breaks())

    def __str__(self) -> str:
        return f"{self._so_far()}\ncall this with arguments to see whether they would hit: dovetail.explain(compiled)(*args)"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._so_far()._repr_html_()


def explain(compiled: Any) -> Explainer:
    """``dovetail.explain(compiled)(*args)``: for each entry, whether its guards hold and if not, which failed and why.

    Before the first call it captures the call, and describes the graph, or the place where it would break. Nothing is run and
    nothing compiled, and the compiled function stays as it is. Printed without a call, it shows entries and events so far.
    """
    if capturing.active:
        raise Break("dovetail.explain is called inside of a compiled function", "call it outside")
    return Explainer(compiled_function(compiled))


def _expected(function: CompiledFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The outcome of a first call: one graph, its first graph break, or an error of the program's."""
    try:
        return f"one graph, {capture(function.original, args, kwargs)!r}"
    except DovetailError as error:
        return f"a graph break: {error}"
    except Exception as error:  # noqa: BLE001  (the program's own error)
        return f"the program raises {type(error).__name__}: {error}"


def _explain_entry(entry: Entry, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    failures = entry.checker.explain(callee, args, kwargs)
    if failures:
        return "miss: " + "; ".join(map(str, failures))
    return f"runs eagerly ({entry.reason})" if entry.run is None else f"hit{_tier(entry)}"


def _state(entry: Entry) -> str:
    return f"runs eagerly ({entry.reason})" if entry.run is None else f"compiled{_tier(entry)}"


def _tier(entry: Entry) -> str:
    tier = getattr(entry.run, "tier", None)
    return "" if tier is None else f", tier {tier}: {entry.run.state}"  # type: ignore[union-attr]


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
    raise NotCallableError(f"an object of type {type(compiled).__name__} was not made by dovetail.compile")


def events_of(compiled: Any) -> EventLog:
    """The events of a compiled function or module."""
    return compiled_function(compiled).events
