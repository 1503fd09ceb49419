"""The form of an artefact's graph, and a check of a document against it.

A form is data: a type (exactly this one), None, a range of whole numbers, a set of words, a pattern of a whole text, ``[item]`` for
a list of any length, ``[first, second]`` for a list of these, a dictionary for an object with exactly these fields, a tuple of
forms that are all allowed, or the name of one of :data:`FORMS`.

>>> validate({"a": 1}, {"a": range(3)})
>>> validate({"a": 5}, {"a": range(3)})
Traceback (most recent call last):
dovetail.errors.ArtefactError: the artefact does not have the format that it should have: graph.a is out of range
"""

from __future__ import annotations

import re
from typing import Any

from dovetail.errors import ArtefactError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_TEXT = re.compile(r"(?s:.{0,4096})")
_LARGEST = 1 << 40
_COUNT = range(_LARGEST + 1)
_NUMBER = range(-_LARGEST, _LARGEST + 1)
_PLAIN = (None, bool, int, _TEXT, {"float": _TEXT})

_PLACEHOLDER = {"shape": ["size"], "stride": ["size"], "dtype": _TEXT, "device": _TEXT}
_CALL = {"target": _TEXT, "args": ["argument"], "kwargs": [["argument", "argument"]]}
_FRESH = {"index": _COUNT, "is_leaf": bool, "is_freed": bool}
_STRIDED = {"size": [_COUNT], "stride": [_COUNT], "offset": _NUMBER}
#: How the graph's inputs and outputs become those of a call, see :class:`dovetail.runtime.spec.RuntimeSpec`.
_SPEC = {
    "input_requires_grad": [bool],
    "output_differentiable": [bool],
    "outputs": [
        (
            {"kind": {"fresh"}, **_FRESH},
            {"kind": {"input"}, "index": _COUNT},
            {
                "kind": {"view"},
                "of": {"fresh", "input"},
                **_FRESH,
                **_STRIDED,
                "differentiable": bool,
                "requires_grad": (None, bool),
            },
        )
    ],
    "mutations": [{"input_index": _COUNT, "output_index": _COUNT, "differentiable": bool, "counted": (bool, _COUNT)}],
    "feeding": [_COUNT],
    "ties": [{"output": _COUNT, "results": [_COUNT], "inputs": [_COUNT]}],
    "freed_together": (None, [[_COUNT]]),
    "arrangement": [_COUNT],
}
_PLACE = {"input": _COUNT, "kind": {"size", "stride", "offset"}, "dim": _COUNT}
FORMS: dict[str, Any] = {
    "size": (_NUMBER, {"symbol": _COUNT}, {"call": _NAME, "args": ["size"]}),
    "descriptor": (
        {"kind": {"parameter", "buffer", "input", "output"}, "name": _TEXT},
        {"kind": {"base"}, "index": _COUNT},
        {"kind": {"mutated", "tangent", "gradient"}, "of": "descriptor"},
    ),
    "argument": (
        *_PLAIN,
        ["argument"],
        {"node": _NAME},
        {"complex": [_TEXT, _TEXT]},
        *({kind: _TEXT} for kind in ("dtype", "layout", "memory_format", "device")),
    ),
    "result": (
        *_PLAIN,
        {"tensor": _COUNT},
        {"tuple": ["result"]},
        {"list": ["result"]},
        {"dict": [["result", "result"]]},
    ),
    "node": (
        {"op": {"placeholder"}, "name": _NAME, **_PLACEHOLDER},
        {"op": {"call_function"}, "name": _NAME, **_CALL, "phase": {"forward", "backward"}},
        {"op": {"get_attr"}, "name": _NAME, "target": _NAME},
    ),
    #: ``graph`` in ``graph.json``, format version 4.
    "graph": {
        "nodes": ["node"],
        "results": [(None, _NAME)],
        "inputs": ["descriptor"],
        "outputs": [(None, "descriptor")],
        "num_primals": _COUNT,
        "num_forward_outputs": _COUNT,
        "derivative_order": range(17),
        "symbols": [{"place": _PLACE, "hint": range(2, _LARGEST + 1), "low": _COUNT, "high": (None, _COUNT)}],
        "guards": ["size"],
        "spec": _SPEC,
        "result": "result",
        "state": [[_TEXT, _TEXT]],
        "provenance": [_TEXT],
        "inexact": [_TEXT],
        "torch": _TEXT,
    },
}


def validate(value: Any, form: Any = "graph") -> None:
    """Raise :class:`ArtefactError` unless ``value`` has this form, with no further fields."""
    problem = _problem(value, form, "graph")
    if problem:
        raise ArtefactError(f"the artefact does not have the format that it should have: {problem}")


def _problem(value: Any, form: Any, where: str) -> str:
    """The first thing that is wrong, in words; empty if nothing is."""
    match form:
        case str():
            return _problem(value, FORMS[form], where)
        case tuple():
            return _problem_of_any(value, form, where)
        case None | type():
            wanted = type(None) if form is None else form
            return "" if type(value) is wanted else f"{where} must be of type {wanted.__name__}"
        case range():
            # True is a whole number to Python, and not to JSON.
            if type(value) is not int:
                return f"{where} must be of type int"
            return "" if value in form else f"{where} is out of range"
        case set():
            return "" if isinstance(value, str) and value in form else f"{where} is none of {sorted(form)}"
        case re.Pattern():
            fits = isinstance(value, str) and form.fullmatch(value)
            return "" if fits else f"{where} is not a text of the right form"
    kind = type(form)
    if type(value) is not kind:
        return f"{where} must be of type {kind.__name__}"
    if kind is list:
        if len(form) > 1 and len(value) != len(form):
            return f"{where} has {len(value)} items"
        pairs = zip(range(len(value)), value, form * len(value) if len(form) == 1 else form, strict=True)
        found = (_problem(item, inner, f"{where}[{position}]") for position, item, inner in pairs)
    else:
        if value.keys() != form.keys():
            return f"{where} must have the fields {', '.join(form)}"
        found = (_problem(value[name], inner, f"{where}.{name}") for name, inner in form.items())
    return next(filter(None, found), "")


def _problem_of_any(value: Any, choices: tuple[Any, ...], where: str) -> str:
    found = ""
    for choice in choices:
        problem = _problem(value, choice, where)
        if not problem:
            return ""
        # The choice with the right fields has the most to say.
        if (
            isinstance(value, (dict, list))
            and "must have the fields" not in problem
            and "must be of type" not in problem
        ):
            found = problem
    return found or f"{where} is none of the forms that are allowed"
