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

_NAMED: dict[str, type[Any]] = {
    "parameter": ParamInput,
    "buffer": BufferInput,
    "input": UserInput,
    "output": UserOutput,
}
_WRAPPING: dict[str, type[Any]] = {"mutated": MutatedInput, "tangent": Tangent, "gradient": Gradient}


def encode_descriptor(descriptor: Descriptor) -> dict[str, Any]:
    """A descriptor as data; raises :class:`ArtefactError` for a kind that no artefact has."""
    for kind, cls in _NAMED.items():
        if type(descriptor) is cls:
            return {"kind": kind, "name": getattr(descriptor, "fqn", None) or getattr(descriptor, "path", "")}
    for kind, cls in _WRAPPING.items():
        if type(descriptor) is cls:
            return {"kind": kind, "of": encode_descriptor(descriptor.of)}  # type: ignore[attr-defined]
    if isinstance(descriptor, AliasBase):
        return {"kind": "base", "index": descriptor.index}
    raise ArtefactError(f"{descriptor} cannot be written to an artefact", advice="export a graph of plain tensors")


def decode_descriptor(data: Mapping[str, Any]) -> Descriptor:
    """The descriptor in data that has the form of the schema."""
    kind = data["kind"]
    if kind in _NAMED:
        return _NAMED[kind](data["name"])  # type: ignore[no-any-return]
    if kind in _WRAPPING:
        return _WRAPPING[kind](decode_descriptor(data["of"]))  # type: ignore[no-any-return]
    return AliasBase(data["index"])


def name_of_input(descriptor: Descriptor) -> str:
    """The name under which an artefact keeps the value of an input."""
    if isinstance(descriptor, (ParamInput, BufferInput)):
        return descriptor.fqn
    return descriptor.path if isinstance(descriptor, UserInput) else str(descriptor)
