"""What a program does to the size, strides or offset of an input in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MetadataChange:
    """Input ``input_index`` was given another size, strides or offset in place, by ``operator(input, *arguments)``."""

    input_index: int
    operator: Any
    arguments: tuple[Any, ...]
    grad_enabled: bool
