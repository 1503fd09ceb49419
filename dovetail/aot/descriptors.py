"""Descriptors say what each placeholder and each output of a captured graph stands for.

>>> str(Gradient(ParamInput("fc.weight")))
"gradient of parameter 'fc.weight'"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Descriptor:
    """Base of all descriptors; ``sentence`` is how one is written, with its fields in braces."""

    sentence: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.sentence.format(**vars(self))


@dataclass(frozen=True)
class ParamInput(Descriptor):
    """A parameter, by its fully qualified name in the compiled module (or the path it was read by)."""

    fqn: str
    sentence: ClassVar[str] = "parameter {fqn!r}"


@dataclass(frozen=True)
class BufferInput(Descriptor):
    """A buffer, by its fully qualified name in the compiled module (or the path it was read by)."""

    fqn: str
    sentence: ClassVar[str] = "buffer {fqn!r}"


@dataclass(frozen=True)
class UserInput(Descriptor):
    """A tensor reached from the arguments, closure or globals, by the path it was read by, such as ``L['x']``."""

    path: str
    sentence: ClassVar[str] = "input {path}"


@dataclass(frozen=True)
class UserOutput(Descriptor):
    """A tensor that the user's function returns, by its path in the result."""

    path: str
    sentence: ClassVar[str] = "output {path}"


@dataclass(frozen=True)
class AliasBase(Descriptor):
    """A tensor that is not returned itself, but of which several returned tensors are views."""

    index: int
    sentence: ClassVar[str] = "base {index} of returned views"


@dataclass(frozen=True)
class MutatedInput(Descriptor):
    """The new value of an input that the function wrote to."""

    of: Descriptor
    sentence: ClassVar[str] = "new value of {of}"


@dataclass(frozen=True)
class Tangent(Descriptor):
    """The incoming gradient of an output."""

    of: Descriptor
    sentence: ClassVar[str] = "tangent of {of}"


@dataclass(frozen=True)
class Gradient(Descriptor):
    """The outgoing gradient of an input."""

    of: Descriptor
    sentence: ClassVar[str] = "gradient of {of}"


@dataclass(frozen=True)
class SavedForBackward(Descriptor):
    """A value that the forward graph hands to the backward graph, by its node's name."""

    name: str
    sentence: ClassVar[str] = "saved {name}"
