"""The JSON schema of an artefact's graph, and a check of a document against it.

The schema is written in the vocabulary of JSON Schema, so that other programs can use it as it is: ``make_schema()`` returns all of
it. :func:`validate` knows the words that it uses. An unknown field is an error.

>>> validate({"a": 1}, {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}})
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail.errors import ArtefactError

_NAME = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,255}$"}
_TEXT = {"type": "string", "maxLength": 4096}
_LARGEST = 1 << 40
_COUNT = {"type": "integer", "minimum": 0, "maximum": _LARGEST}
_NUMBER = {"type": "integer", "minimum": -_LARGEST, "maximum": _LARGEST}
_FLAG = {"type": "boolean"}
_NULL = {"type": "null"}
_SIZE = {"$ref": "size"}
_DESCRIPTOR = {"$ref": "descriptor"}
_ARGUMENT = {"$ref": "argument"}
_RESULT = {"$ref": "result"}
_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def _record(**fields: Any) -> dict[str, Any]:
    """An object with exactly these fields."""
    return {"type": "object", "required": list(fields), "properties": fields}


def _list(items: Any, length: int | None = None) -> dict[str, Any]:
    return {"type": "array", "items": items} if length is None else {"type": "array", "items": items, "length": length}


def _any(*choices: Any) -> dict[str, Any]:
    return {"anyOf": list(choices)}


def _word(*words: str) -> dict[str, Any]:
    return {"enum": list(words)}


def make_schema() -> dict[str, Any]:
    """The schema of ``graph`` in ``graph.json``, format version 4."""
    whole = _record(
        nodes=_list(_node()),
        results=_list(_any(_NULL, _NAME)),
        inputs=_list(_DESCRIPTOR),
        outputs=_list(_any(_NULL, _DESCRIPTOR)),
        num_primals=_COUNT,
        num_forward_outputs=_COUNT,
        derivative_order={"type": "integer", "minimum": 0, "maximum": 16},
        symbols=_list(_symbol()),
        guards=_list(_SIZE),
        spec=_spec(),
        result=_RESULT,
        state=_list(_list(_TEXT, 2)),
        provenance=_list(_TEXT),
        inexact=_list(_TEXT),
        torch=_TEXT,
    )
    return {
        **whole,
        "$defs": {"size": _size(), "descriptor": _descriptor(), "argument": _argument(), "result": _result()},
    }


def _node() -> dict[str, Any]:
    sizes = _list(_SIZE)
    return _any(
        _record(op=_word("placeholder"), name=_NAME, shape=sizes, stride=sizes, dtype=_TEXT, device=_TEXT),
        _record(
            op=_word("call_function"),
            name=_NAME,
            target=_TEXT,
            args=_list(_ARGUMENT),
            kwargs=_list(_list(_ARGUMENT, 2)),
            phase=_word("forward", "backward"),
        ),
        _record(op=_word("get_attr"), name=_NAME, target=_NAME),
    )


def _symbol() -> dict[str, Any]:
    place = _record(input=_COUNT, kind=_word("size", "stride", "offset"), dim=_COUNT)
    hint = {"type": "integer", "minimum": 2, "maximum": _LARGEST}
    return _record(place=place, hint=hint, low=_COUNT, high=_any(_NULL, _COUNT))


def _spec() -> dict[str, Any]:
    """How the graph's inputs and outputs become those of a call, see :class:`dovetail.runtime.spec.RuntimeSpec`."""
    fresh = _record(kind=_word("fresh"), index=_COUNT, is_leaf=_FLAG, is_freed=_FLAG)
    view = _record(
        kind=_word("view"),
        of=_word("fresh", "input"),
        index=_COUNT,
        is_leaf=_FLAG,
        is_freed=_FLAG,
        size=_list(_COUNT),
        stride=_list(_COUNT),
        offset=_NUMBER,
        differentiable=_FLAG,
        requires_grad=_FLAG,
    )
    counts = _list(_COUNT)
    return _record(
        input_requires_grad=_list(_FLAG),
        output_differentiable=_list(_FLAG),
        outputs=_list(_any(fresh, _record(kind=_word("input"), index=_COUNT), view)),
        mutations=_list(_record(input_index=_COUNT, output_index=_COUNT, differentiable=_FLAG, counted=_FLAG)),
        feeding=counts,
        ties=_list(_record(output=_COUNT, results=counts, inputs=counts)),
        freed_together=_any(_NULL, _list(counts)),
        arrangement=counts,
    )


def _size() -> dict[str, Any]:
    return _any(_NUMBER, _record(symbol=_COUNT), _record(call=_NAME, args=_list(_SIZE)))


def _descriptor() -> dict[str, Any]:
    return _any(
        _record(kind=_word("parameter", "buffer", "input", "output"), name=_TEXT),
        _record(kind=_word("base"), index=_COUNT),
        _record(kind=_word("mutated", "tangent", "gradient"), of=_DESCRIPTOR),
    )


def _argument() -> dict[str, Any]:
    named = [_record(**{kind: _TEXT}) for kind in ("dtype", "layout", "memory_format", "device")]
    numbers = [_record(float=_TEXT), _record(complex=_list(_TEXT, 2))]
    return _any(_NULL, _FLAG, {"type": "integer"}, _TEXT, _list(_ARGUMENT), _record(node=_NAME), *numbers, *named)


def _result() -> dict[str, Any]:
    items = [_record(tuple=_list(_RESULT)), _record(list=_list(_RESULT)), _record(dict=_list(_list(_RESULT, 2)))]
    return _any(_NULL, _FLAG, {"type": "integer"}, _TEXT, _record(float=_TEXT), _record(tensor=_COUNT), *items)


def validate(value: Any, schema: Mapping[str, Any]) -> None:
    """Raise :class:`ArtefactError` unless ``value`` is as the schema says, with no further fields."""
    problem = _problem(value, schema, schema.get("$defs", {}), "graph")
    if problem:
        raise ArtefactError(f"the artefact does not have the format that it should have: {problem}")


def _problem(value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], where: str) -> str:
    """The first thing that is wrong, in words; empty if nothing is."""
    if "$ref" in schema:
        return _problem(value, definitions[schema["$ref"]], definitions, where)
    if "anyOf" in schema:
        return _problem_of_any(value, schema["anyOf"], definitions, where)
    if "enum" in schema:
        return "" if isinstance(value, str) and value in schema["enum"] else f"{where} is none of {schema['enum']}"
    kind = schema["type"]
    # True is an integer to Python, and not to JSON.
    if not isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, bool)):
        return f"{where} must be of type {kind}"
    if kind == "integer" and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return f"{where} is out of range"
    if kind == "string":
        pattern = schema.get("pattern")
        # The end of a pattern is also in front of a last line break.
        fits = pattern is None or (re.search(pattern, value) and not value.endswith("\n"))
        if not fits or len(value) > schema.get("maxLength", len(value)):
            return f"{where} is not a text of the right form"
    if kind == "array":
        if len(value) != schema.get("length", len(value)):
            return f"{where} has {len(value)} items"
        for position, item in enumerate(value):
            problem = _problem(item, schema["items"], definitions, f"{where}[{position}]")
            if problem:
                return problem
    if kind == "object":
        if set(value) != set(schema["required"]):
            return f"{where} must have the fields {', '.join(schema['required'])}"
        for name, inner in schema["properties"].items():
            problem = _problem(value[name], inner, definitions, f"{where}.{name}")
            if problem:
                return problem
    return ""


def _problem_of_any(value: Any, choices: Any, definitions: Mapping[str, Any], where: str) -> str:
    found = ""
    for choice in choices:
        problem = _problem(value, choice, definitions, where)
        if not problem:
            return ""
        # The choice with the right fields has the most to say.
        if "must have the fields" not in problem and "must be of type" not in problem:
            found = problem
    return found or f"{where} is none of the forms that are allowed"
