"""What each placeholder and each output of a captured graph stands for.

>>> str(Gradient(ParamInput("fc.weight")))
"gradient of parameter 'fc.weight'"
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Descriptor:
    """Base of all descriptors."""


@dataclass(frozen=True)
class ParamInput(Descriptor):
    """A parameter, by its fully qualified name in the compiled module (or the path it was read by)."""

    fqn: str

    def __str__(self) -> str:
        return f"parameter {self.fqn!r}"


@dataclass(frozen=True)
class BufferInput(Descriptor):
    """A buffer, by its fully qualified name in the compiled module (or the path it was read by)."""

    fqn: str

    def __str__(self) -> str:
        return f"buffer {self.fqn!r}"


@dataclass(frozen=True)
class UserInput(Descriptor):
    """A tensor reached from the arguments, closure or globals, by the path it was read by, such as ``L['x']``."""

    path: str

    def __str__(self) -> str:
        return f"input {self.path}"


@dataclass(frozen=True)
class SymIntInput(Descriptor):
    """A symbolic size handed in as an integer."""

    expression: str

    def __str__(self) -> str:
        return f"size {self.expression}"


@dataclass(frozen=True)
class RngInput(Descriptor):
    """The state of a random generator."""

    device: str

    def __str__(self) -> str:
        return f"random state of {self.device}"


@dataclass(frozen=True)
class UserOutput(Descriptor):
    """A tensor that the user's function returns, by its path in the result."""

    path: str

    def __str__(self) -> str:
        return f"output {self.path}"


@dataclass(frozen=True)
class AliasBase(Descriptor):
    """A tensor that is not returned itself, but of which several returned tensors are views."""

    index: int

    def __str__(self) -> str:
        return f"base {self.index} of returned views"


@dataclass(frozen=True)
class MutatedInput(Descriptor):
    """The new value of an input that the function wrote to."""

    of: Descriptor

    def __str__(self) -> str:
        return f"new value of {self.of}"


@dataclass(frozen=True)
class Tangent(Descriptor):
    """The incoming gradient of an output."""

    of: Descriptor

    def __str__(self) -> str:
        return f"tangent of {self.of}"


@dataclass(frozen=True)
class Gradient(Descriptor):
    """The outgoing gradient of an input."""

    of: Descriptor

    def __str__(self) -> str:
        return f"gradient of {self.of}"


@dataclass(frozen=True)
class SavedForBackward(Descriptor):
    """A value that the forward graph hands to the backward graph, by its node's name."""

    name: str

    def __str__(self) -> str:
        return f"saved {self.name}"
