"""The JSON schema of an artefact's graph, and a check of a document against it.

The schema is written in the vocabulary of JSON Schema, so that other programs can use it as it is (``make_schema()`` gives the
whole of it); :func:`validate` knows the words that it uses, and refuses everything that it does not describe: an unknown field is
an error, not something to skip.

>>> validate({"a": 1}, {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}})
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail.errors import ArtefactError

_NAME = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,255}$"}
_TEXT = {"type": "string", "maxLength": 4096}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 1 << 40}
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


def make_schema() -> dict[str, Any]:
    """The schema of ``graph`` in ``graph.json``, format version 4."""
    size = {"$ref": "size"}
    descriptor = {"$ref": "descriptor"}
    optional_descriptor = {"anyOf": [{"type": "null"}, descriptor]}
    optional_integer = {"anyOf": [{"type": "null"}, _COUNT]}
    place = _record(input=_COUNT, kind={"enum": ["size", "stride", "offset"]}, dim=_COUNT)
    node = {
        "anyOf": [
            _record(
                op={"enum": ["placeholder"]},
                name=_NAME,
                shape={"type": "array", "items": size},
                stride={"type": "array", "items": size},
                dtype=_TEXT,
                device=_TEXT,
            ),
            _record(
                op={"enum": ["call_function"]},
                name=_NAME,
                target=_TEXT,
                args={"type": "array", "items": {"$ref": "argument"}},
                kwargs={"type": "array", "items": {"type": "array", "items": {"$ref": "argument"}, "length": 2}},
                phase={"enum": ["forward", "backward"]},
            ),
            _record(op={"enum": ["get_attr"]}, name=_NAME, target=_NAME),
        ]
    }
    output = {
        "anyOf": [
            _record(kind={"enum": ["fresh"]}, index=_COUNT, is_leaf={"type": "boolean"}, is_freed={"type": "boolean"}),
            _record(kind={"enum": ["input"]}, index=_COUNT),
            _record(
                kind={"enum": ["view"]},
                of={"enum": ["fresh", "input"]},
                index=_COUNT,
                is_leaf={"type": "boolean"},
                is_freed={"type": "boolean"},
                size={"type": "array", "items": _COUNT},
                stride={"type": "array", "items": _COUNT},
                offset={"type": "integer", "minimum": -(1 << 40), "maximum": 1 << 40},
                differentiable={"type": "boolean"},
                requires_grad={"type": "boolean"},
            ),
        ]
    }
    flags = {"type": "array", "items": {"type": "boolean"}}
    counts = {"type": "array", "items": _COUNT}
    whole: dict[str, Any] = _record(
        nodes={"type": "array", "items": node},
        results={"type": "array", "items": {"anyOf": [{"type": "null"}, _NAME]}},
        inputs={"type": "array", "items": descriptor},
        outputs={"type": "array", "items": optional_descriptor},
        num_primals=_COUNT,
        num_forward_outputs=_COUNT,
        derivative_order={"type": "integer", "minimum": 0, "maximum": 16},
        symbols={
            "type": "array",
            "items": _record(
                place=place,
                hint={"type": "integer", "minimum": 2, "maximum": 1 << 40},
                low=_COUNT,
                high=optional_integer,
            ),
        },
        guards={"type": "array", "items": size},
        spec=_record(
            input_requires_grad=flags,
            output_differentiable=flags,
            outputs={"type": "array", "items": output},
            mutations={
                "type": "array",
                "items": _record(
                    input_index=_COUNT,
                    output_index=_COUNT,
                    differentiable={"type": "boolean"},
                    counted={"type": "boolean"},
                ),
            },
            feeding=counts,
            ties={"type": "array", "items": _record(output=_COUNT, results=counts, inputs=counts)},
            freed_together={"anyOf": [{"type": "null"}, {"type": "array", "items": counts}]},
            arrangement=counts,
        ),
        result={"$ref": "result"},
        state={"type": "array", "items": {"type": "array", "items": _TEXT, "length": 2}},
        provenance={"type": "array", "items": _TEXT},
        inexact={"type": "array", "items": _TEXT},
        torch=_TEXT,
    )
    kinds = ["parameter", "buffer", "input", "output"]
    wrapping = ["mutated", "tangent", "gradient"]
    whole["$defs"] = {
        "size": {
            "anyOf": [
                {"type": "integer", "minimum": -(1 << 40), "maximum": 1 << 40},
                _record(symbol=_COUNT),
                _record(call=_NAME, args={"type": "array", "items": size}),
            ]
        },
        "descriptor": {
            "anyOf": [
                _record(kind={"enum": kinds}, name=_TEXT),
                _record(kind={"enum": ["base"]}, index=_COUNT),
                _record(kind={"enum": wrapping}, of=descriptor),
            ]
        },
        "argument": {
            "anyOf": [
                {"type": "null"},
                {"type": "boolean"},
                {"type": "integer"},
                {"type": "string", "maxLength": 4096},
                {"type": "array", "items": {"$ref": "argument"}},
                _record(node=_NAME),
                _record(float=_TEXT),
                _record(complex={"type": "array", "items": _TEXT, "length": 2}),
                _record(dtype=_TEXT),
                _record(layout=_TEXT),
                _record(memory_format=_TEXT),
                _record(device=_TEXT),
            ]
        },
        "result": {
            "anyOf": [
                {"type": "null"},
                {"type": "boolean"},
                {"type": "integer"},
                {"type": "string", "maxLength": 4096},
                _record(float=_TEXT),
                _record(tensor=_COUNT),
                _record(tuple={"type": "array", "items": {"$ref": "result"}}),
                _record(list={"type": "array", "items": {"$ref": "result"}}),
                _record(dict={"type": "array", "items": {"type": "array", "items": {"$ref": "result"}, "length": 2}}),
            ]
        },
    }
    return whole


def validate(value: Any, schema: Mapping[str, Any]) -> None:
    """Raise :class:`ArtefactError` unless ``value`` is as the schema says, with nothing beside it."""
    problem = _problem(value, schema, schema.get("$defs", {}), "graph")
    if problem:
        raise ArtefactError(f"the artefact does not have the format that it should have: {problem}")


def _problem(value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], where: str) -> str:
    """What is wrong, or nothing."""
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
        if len(value) > schema.get("maxLength", len(value)) or not re.search(schema.get("pattern", ""), value):
            return f"{where} is not a text of the right form"
        if "pattern" in schema and value.endswith("\n"):
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
