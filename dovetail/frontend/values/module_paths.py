"""Paths of modules and their tensors in the program, such as ``blocks.3.attn``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.frontend.code.frame import Frame
from dovetail.guards import AttributeSource, CalleeSource, InstanceDictSource, ItemSource, Source

_TABLES = ("_parameters", "_buffers", "_modules")


def walk_tables(source: Source) -> tuple[Source | None, list[str], str]:
    """Where a path through tables of modules starts (None: it has no root), the names along it, and the last table's name."""
    names: list[str] = []
    step: Source | None = source
    kind = ""
    while isinstance(step, ItemSource):
        table: Any = step.base
        of_module = isinstance(table, ItemSource) and isinstance(table.base, InstanceDictSource)  # type: ignore[attr-defined]
        if not of_module or not isinstance(step.key, str) or table.key not in _TABLES:
            break
        kind = kind or str(table.key)
        names.append(step.key)
        step = table.base.base
    if isinstance(step, AttributeSource) and step.attribute == "__self__":
        step = step.base
    return step, names[::-1], kind


def path_of_module(source: Source, module: torch.nn.Module) -> str:
    """The path of a module from the compiled one, whose own path is its class's name; or from where else it was read."""
    start, names, _ = walk_tables(source)
    if isinstance(start, CalleeSource):
        return ".".join(names) or type(module).__name__
    return ".".join([source.name if start is None else start.name, *names])


class ModulePaths:
    """Which module's code runs. ``source_of`` tells where an object was read."""

    def __init__(self, source_of: Callable[[Any], Source | None]) -> None:
        self._source_of = source_of
        self._paths: dict[int, str] = {}

    def running(self, frames: Sequence[Frame]) -> str:
        """The path of the innermost module that one of these frames is a method of; empty outside of modules."""
        for frame in reversed(frames):
            owner: Any = frame.locals.get("self")
            if issubclass(type(owner), torch.nn.Module):
                path = self._paths.get(id(owner))
                if path is None:
                    source = self._source_of(owner)
                    # The capture keeps an object with a source alive, so that its id stays its own.
                    path = "" if source is None else self._paths.setdefault(id(owner), path_of_module(source, owner))
                return path
        return ""
