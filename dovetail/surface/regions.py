"""``compile(model, regional=True)``: the repeated blocks of a model are compiled, each for itself, and share graphs and kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from dovetail.errors import OptionError
from dovetail.face import compile as face
from dovetail.face.compiled_function import CompiledFunction
from dovetail.face.module import CompiledModule

_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)


def compile_regions(model: Any, options: Mapping[str, Any]) -> Any:
    """Compile the ``forward`` of each repeated block in place; returns the model, whose other parts stay eager.

    A model without repeated blocks is compiled as a whole. Raises :class:`OptionError` for anything but a module.
    """
    model = model.original if isinstance(model, CompiledModule) else model
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"regional=True looks for the blocks of a module, and a {type(model).__name__} was handed over",
            advice="compile the model with regional=True, and the function without it",
        )
    blocks = repeated_blocks(model)
    if not blocks:
        return face.compile(model, **options)
    for block in blocks:
        forward: Any = block.forward
        original = forward.original if isinstance(forward, CompiledFunction) else forward
        block.forward = face.compile(original, **options)
    return model


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost modules with parts of their own that stand beside another one of their class in a list, each once."""
    found: dict[torch.nn.Module, None] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop(0)
        children = list(module.children())
        count = Counter(map(type, children)) if isinstance(module, _CONTAINERS) else Counter()
        for child in children:
            has_parts = next(child.children(), None) is not None
            if count[type(child)] > 1 and has_parts and not isinstance(child, _CONTAINERS):
                found[child] = None
            else:
                waiting.append(child)
    return list(found)
