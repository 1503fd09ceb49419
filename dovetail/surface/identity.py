"""A compiled module is its original to whoever keeps tables of modules: FSDP knows a module's state under either of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dovetail.face.module import CompiledModule


def _equals(compiled: CompiledModule, other: object) -> bool:
    return bool(compiled.original == (other.original if type(other) is CompiledModule else other))


def _hash(compiled: CompiledModule) -> int:
    return hash(compiled.original)


def _named_modules(compiled: CompiledModule, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules as the original names them, with the compiled module in the place of the original."""
    for name, module in compiled.original.named_modules(*args, **kwargs):
        yield name, compiled if module is compiled.original else module


for _name, _method in (("__eq__", _equals), ("__hash__", _hash), ("named_modules", _named_modules)):
    setattr(CompiledModule, _name, _method)
