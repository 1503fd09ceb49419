"""Descriptors of inputs and outputs as data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.aot.descriptors import (
    AliasBase,
    BufferInput,
    Descriptor,
    Gradient,
    MutatedInput,
    ParamInput,
    Tangent,
    UserInput,
    UserOutput,
)
from dovetail.errors import ArtefactError

#: For each kind: the class, its field, and the name of the field in a file.
_KINDS: dict[str, tuple[type[Any], str, str]] = {
    "parameter": (ParamInput, "fqn", "name"),
    "buffer": (BufferInput, "fqn", "name"),
    "input": (UserInput, "path", "name"),
    "output": (UserOutput, "path", "name"),
    "base": (AliasBase, "index", "index"),
    "mutated": (MutatedInput, "of", "of"),
    "tangent": (Tangent, "of", "of"),
    "gradient": (Gradient, "of", "of"),
}


def encode_descriptor(descriptor: Descriptor) -> dict[str, Any]:
    """A descriptor as data; raises :class:`ArtefactError` for a kind that no artefact has."""
    for kind, (cls, attribute, field) in _KINDS.items():
        if type(descriptor) is cls:
            value = getattr(descriptor, attribute)
            return {"kind": kind, field: encode_descriptor(value) if field == "of" else value}
    raise ArtefactError(f"{descriptor} cannot be written to an artefact", advice="export a graph of plain tensors")


def decode_descriptor(data: Mapping[str, Any]) -> Descriptor:
    """The descriptor in data that has the form of the schema."""
    cls, _, field = _KINDS[data["kind"]]
    return cls(decode_descriptor(data["of"]) if field == "of" else data[field])  # type: ignore[no-any-return]


def name_of_input(descriptor: Descriptor) -> str:
    """The name under which an artefact keeps the value of an input."""
    if isinstance(descriptor, (ParamInput, BufferInput)):
        return descriptor.fqn
    return descriptor.path if isinstance(descriptor, UserInput) else str(descriptor)
