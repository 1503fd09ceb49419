"""A recipe as a generated function: building the result of a call step by step took 3 us of the 110 us of a call of BERT."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.runtime.recipe import (
    ConstantItem,
    DataNumberItem,
    NumberItem,
    ObjectItem,
    Recipe,
    SourceItem,
    TensorItem,
    TupleItem,
    native_new,
)

Build = Callable[[Sequence[torch.Tensor], Any, tuple[Any, ...], Mapping[str, Any]], Any]


class _Unwritten(Exception):
    """A part of the recipe that is rare, or shared, and is built step by step."""


def generate(recipe: Recipe) -> Build | None:
    """``build(results, callee, args, kwargs)`` does what :func:`rebuild` does; None for a recipe with rare or shared parts.

    >>> build = generate(TupleItem(tuple, (TensorItem(0), ConstantItem(3))))
    >>> build([torch.ones(1)], None, (), {})
    (tensor([1.]), 3)
    """
    writer = _Writer()
    try:
        result = writer.expression(recipe)
    except _Unwritten:
        return None
    body = "\n".join(f"    {line}" for line in [*writer.lines, f"return {result}"])
    exec(compile(f"def build(tensors, callee, args, kwargs):\n{body}\n", "<dovetail result>", "exec"), writer.names)
    build: Build = writer.names.pop("build")
    return build


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "ordered_item": collections.OrderedDict.__setitem__,
            "set_item": dict.__setitem__,
            "set_attribute": object.__setattr__,
            "new_tuple": tuple.__new__,
        }

    def name(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def expression(self, item: Recipe) -> str:
        """What gives the value, after the lines written so far."""
        if isinstance(item, TensorItem):
            return f"tensors[{item.index}]"
        if isinstance(item, NumberItem):
            return f"tensors[{-1 - item.index}]"
        if isinstance(item, ConstantItem):
            return repr(item.value) if item.value is None or type(item.value) is bool else self.name(item.value)
        if isinstance(item, SourceItem):
            return f"{self.name(item.fetch)}(callee, args, kwargs)"
        if isinstance(item, DataNumberItem):
            return f"tensors[{item.index}].item()"
        if isinstance(item, TupleItem) and not hasattr(item.cls, "n_sequence_fields"):
            items = f"({''.join(f'{self.expression(part)}, ' for part in item.items)})"
            return items if item.cls is tuple else f"new_tuple({self.name(item.cls)}, {items})"
        if type(item) is ObjectItem:
            return self._object(item)
        raise _Unwritten

    def _object(self, item: ObjectItem) -> str:
        cls = item.cls
        if cls is dict and not item.attributes:
            return f"{{{', '.join(f'{self.expression(key)}: {self.expression(value)}' for key, value in item.pairs)}}}"
        if cls is list:
            return f"[{', '.join(map(self.expression, item.items))}]"
        if item.items:
            raise _Unwritten
        made = f"o{len(self.lines)}"
        self.lines.append(f"{made} = {self.name(native_new(cls))}({self.name(cls)})")
        store = "ordered_item" if issubclass(cls, collections.OrderedDict) else "set_item"
        for key, value in item.pairs:
            self.lines.append(f"{store}({made}, {self.expression(key)}, {self.expression(value)})")
        for name, value in item.attributes:
            self.lines.append(f"set_attribute({made}, {name!r}, {self.expression(value)})")
        return made
