"""The sentences of warnings and errors."""

from __future__ import annotations

from dovetail.frontend.code.frame import Break


def explain_break(head: str, stop: Break) -> str:
    """A graph break as a sentence with its place and what to do about it.

    >>> print(explain_break("graph break", Break("print writes to the terminal", "use logging")))
    graph break: print writes to the terminal
      what to do: use logging
    """
    text = f"{head}: {stop.reason}"
    if stop.where is not None:
        text += f"\n  at {stop.where}"
    if stop.advice:
        text += f"\n  what to do: {stop.advice}"
    return text
