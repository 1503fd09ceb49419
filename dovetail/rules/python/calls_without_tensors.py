"""Calls into code that knows no tensors run for real as a whole where they break the graph: progress bars, writers of tables.

The parts of such a call between two graph breaks would be captured one by one, guarded by each count and time that the library
keeps: 24 steps that set a text beside a progress bar took 339 captures.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch

from dovetail.frontend.code.frame import Frame, Unread
from dovetail.frontend.code.points import is_bound
from dovetail.frontend.rules import without_tensors_rule
from dovetail.frontend.values.leaves import PLAIN
from dovetail.guards.reading import instance_dict

_LIBRARIES = sys.stdlib_module_names | {"matplotlib", "numpy", "pandas", "scipy"}
_WORKERS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
#: How many items of a container, and how many containers or objects inside each other, are looked at.
_MOST_ITEMS, _DEPTH = 64, 3


@without_tensors_rule
def _knows_no_tensors(frame: Frame) -> bool:
    if (frame.globals.get("__name__") or "").split(".", 1)[0] in _LIBRARIES:
        return True
    cells = (cell.cell_contents for cell in frame.cells.values() if is_bound(cell))
    held = (*frame.locals.values(), *frame.stack, *cells)
    return not _of_torch(frame.globals) and not _work_with_tensors(held, _DEPTH)


def _of_torch(module: Mapping[str, Any]) -> bool:
    """Whether the names of a module lead to torch: a module of it, one of its classes or functions, or a class made of these."""
    return any(map(_is_of_torch, module.values()))


def _is_of_torch(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.split(".", 1)[0] == "torch"
    if isinstance(value, type) and issubclass(value, _WORKERS):
        return True
    return isinstance(value, (type, types.FunctionType)) and str(value.__module__).split(".", 1)[0] == "torch"


def _work_with_tensors(values: Iterable[Any], depth: int) -> bool:
    """Whether there are tensors, modules, optimizers, or functions that may use these, among values and what they hold."""
    return any(_works_with_tensors(value, depth) for value in islice(values, _MOST_ITEMS))


def _works_with_tensors(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind is Unread:
        return _works_with_tensors(value.value, depth)
    if issubclass(kind, _WORKERS):
        return True
    if kind is types.MethodType:
        return _works_with_tensors(value.__self__, depth) or _of_torch(value.__func__.__globals__)
    if kind is types.FunctionType:
        return _of_torch(value.__globals__)
    if not depth or kind in PLAIN:
        return False
    if kind in (list, tuple, set, frozenset):
        return _work_with_tensors(value, depth - 1)
    if issubclass(kind, dict):
        return _work_with_tensors(dict.values(value), depth - 1)
    try:
        own = instance_dict(value)
    except AttributeError:
        return False
    return isinstance(own, dict) and _work_with_tensors(own.values(), depth - 1)
