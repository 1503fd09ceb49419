"""TorchScript's graphs, read node by node: the operators of a scripted function under the trace, with sizes that stay symbolic.

TorchScript's executor asks a tensor for plain sizes, which holds a graph to those of one call, and it reads the parameters of a
scripted module by itself, where no trace sees them. Here each operator is called as the program's own, and attributes are
arguments. A graph with a node that is not known here is not read.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Path = tuple[str, ...]


class UnreadableError(Exception):
    """The graph, or an argument, is for TorchScript itself."""


class DataNeededError(Exception):
    """A branch depends on the data of a tensor."""


def _truth(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        raise DataNeededError
    return bool(value)


def _slice(values: Sequence[Any], start: Any, end: Any, step: Any) -> list[Any]:
    return list(values[start:end:step])


def _set_item(values: list[Any], index: int, item: Any) -> list[Any]:
    values[index] = item
    return values


def _append(values: list[Any], item: Any) -> list[Any]:
    values.append(item)
    return values


def _whole_number(value: torch.Tensor) -> Any:
    if value.dtype.is_floating_point or value.dtype is torch.bool:
        raise UnreadableError
    return value.item()


_DTYPES = (
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "",
    "complex64",
    "complex128",
    "bool",
)
#: TorchScript's numbers for types, layouts and memory formats, by the name of the type in a schema.
_NUMBERED: dict[str, dict[int, Any]] = {
    "ScalarType": {number: getattr(torch, name) for number, name in enumerate(_DTYPES) if name} | {15: torch.bfloat16},
    "Layout": {0: torch.strided},
    "MemoryFormat": {0: torch.contiguous_format, 1: torch.preserve_format, 2: torch.channels_last},
}
_DTYPE_NUMBERS = {kind: number for number, kind in _NUMBERED["ScalarType"].items()}


def _number_of_dtype(value: torch.Tensor) -> int:
    if value.dtype not in _DTYPE_NUMBERS:
        raise UnreadableError
    return _DTYPE_NUMBERS[value.dtype]


_OPERATORS = (
    "add",
    "sub",
    "mul",
    "floordiv",
    "neg",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "__and__",
    "__or__",
    "__getitem__",
)
#: Operators on numbers and lists, by TorchScript's names.
_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    **{f"aten::{name}": getattr(operator, name) for name in _OPERATORS},
    "aten::div": operator.truediv,
    "aten::remainder": operator.mod,
    "aten::__not__": operator.not_,
    "aten::len": len,
    "aten::list": list,
    "aten::append": _append,
    "aten::slice": _slice,
    "aten::_set_item": _set_item,
}
#: Questions to tensors, and to anything.
_QUESTIONS: dict[str, Callable[..., Any]] = {
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::size": lambda value, *dim: value.shape[dim[0]] if dim else list(value.shape),
    "aten::dim": lambda value: value.dim(),
    "aten::numel": lambda value: value.numel(),
    "aten::len": len,
    "aten::Bool": _truth,
    "aten::Int": _whole_number,
    "aten::IntImplicit": _whole_number,
    "prim::device": lambda value: value.device,
    "prim::dtype": _number_of_dtype,
    "prim::unchecked_cast": lambda value: value,
}
_BUILDING = frozenset(
    {"prim::ListConstruct", "prim::TupleConstruct", "prim::ListUnpack", "prim::TupleUnpack", "prim::TupleIndex"}
)
_CONSTANTS = (bool, int, float, str, type(None), torch.device)


def _is_of_numbers(schema: str) -> bool:
    """Whether an operator takes and gives numbers or lists, and no tensor by itself."""
    return "Tensor" not in schema


@dataclass(frozen=True)
class _Operator:
    """An operator of torch's: its arguments' names and types, and how many are positional."""

    function: Any
    names: tuple[str, ...]
    types: tuple[str, ...]
    positional: int

    def __call__(self, inputs: Sequence[Any]) -> Any:
        given = [_decoded(kind, item) for kind, item in zip(self.types, inputs, strict=True)]
        keywords = zip(self.names[self.positional :], given[self.positional :], strict=True)
        return self.function(*given[: self.positional], **{name: item for name, item in keywords if item is not None})


def _decoded(kind: str, value: Any) -> Any:
    """An argument in Python's form, where TorchScript has a number for it."""
    table = _NUMBERED.get(kind.removesuffix("?"))
    if table is None or type(value) is not int:
        return value
    if value not in table:
        raise UnreadableError
    return table[value]


@functools.lru_cache(maxsize=1024)
def _of_tensors(schema: str) -> _Operator | None:
    """An operator of torch's, by its schema."""
    if not schema.startswith("aten::"):
        return None
    name, _, overload = schema[: schema.index("(")].removeprefix("aten::").partition(".")
    found = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    if found is None:
        return None
    # Commas in a default value, and in what an argument shares its memory with, do not separate arguments.
    listed = re.sub(r"\[[^\]]*,[^\]]*\]", "[]", schema[schema.index("(") + 1 : schema.rindex(") ->")])
    parts = [part.partition("=")[0].split() for part in listed.split(", ") if part]
    positional = next((at for at, part in enumerate(parts) if part == ["*"]), len(parts))
    named = [part for part in parts if part != ["*"]]
    return _Operator(found, tuple(part[-1] for part in named), tuple(part[0] for part in named), positional)


def _raises(block: Any) -> bool:
    return any(node.kind() == "prim::RaiseException" for node in block.nodes())


def is_readable(block: Any) -> bool:
    """Whether every node of a graph or a block is known here. One that only raises is left to TorchScript."""
    return _raises(block) or all(_is_known(node) for node in block.nodes())


def _is_known(node: Any) -> bool:
    kind = node.kind()
    if kind == "prim::Constant":
        return isinstance(node.output().toIValue(), _CONSTANTS)
    if kind in ("prim::If", "prim::Loop"):
        return all(map(is_readable, node.blocks()))
    if kind in _BUILDING or kind == "prim::GetAttr":
        return True
    schema = node.schema()
    if schema.startswith("("):
        return False
    if _is_of_numbers(schema):
        return kind in _ON_NUMBERS or kind in _QUESTIONS
    return kind in _QUESTIONS or _of_tensors(schema) is not None


def attributes_of(graph: Any) -> list[Path]:
    """The attributes of the scripted module that a graph reads, by their paths, submodules left out."""
    paths: dict[str, Path] = {}
    own = next(iter(graph.inputs()), None)
    if own is not None:
        paths[own.debugName()] = ()
    found: dict[Path, None] = {}
    for node in graph.findAllNodes(kind="prim::GetAttr"):
        path = (*paths[node.input().debugName()], node.s("name"))
        paths[node.output().debugName()] = path
        if node.output().type().kind() != "ClassType":
            found[path] = None
    return list(found)


class Reader:
    """One reading of a graph."""

    def __init__(self, attributes: Mapping[Path, Any]) -> None:
        self.attributes = attributes
        self.values: dict[str, Any] = {}

    def run(self, block: Any, inputs: Sequence[Any]) -> list[Any]:
        """The results of a graph or a block."""
        if _raises(block):
            raise UnreadableError
        names = [item.debugName() for item in block.inputs()]
        self.values.update(zip(names, inputs, strict=True))
        for node in block.nodes():
            outputs = list(node.outputs())
            found = self._found(node, [self.values[item.debugName()] for item in node.inputs()])
            results = found if len(outputs) != 1 or node.kind() in ("prim::If", "prim::Loop") else [found]
            for output, result in zip(outputs, results or (), strict=False):
                self.values[output.debugName()] = result
        return [self.values[item.debugName()] for item in block.outputs()]

    def _found(self, node: Any, inputs: list[Any]) -> Any:
        kind = node.kind()
        if kind == "prim::Constant":
            return node.output().toIValue()
        if kind == "prim::If":
            yes, no = node.blocks()
            return self.run(yes if inputs[0] else no, ())
        if kind == "prim::Loop":
            return self._loop(next(iter(node.blocks())), *inputs)
        if kind == "prim::GetAttr":
            path = (*inputs[0], node.s("name"))
            return path if node.output().type().kind() == "ClassType" else self.attributes[path]
        if kind in _BUILDING:
            return _built(kind, inputs)
        schema = node.schema()
        if kind in _QUESTIONS and not (kind in _ON_NUMBERS and _is_of_numbers(schema)):
            return _QUESTIONS[kind](*inputs)
        if _is_of_numbers(schema):
            return _ON_NUMBERS[kind](*inputs)
        known = _of_tensors(schema)
        if known is None:
            raise UnreadableError
        return known(inputs)

    def _loop(self, body: Any, most: Any, condition: Any, *carried: Any) -> list[Any]:
        count, found = 0, list(carried)
        while condition and count < most:
            condition, *found = self.run(body, (count, *found))
            count += 1
        return found


def _built(kind: str, inputs: list[Any]) -> Any:
    if kind == "prim::ListConstruct":
        return inputs
    if kind == "prim::TupleConstruct":
        return tuple(inputs)
    return inputs[0][inputs[1]] if kind == "prim::TupleIndex" else inputs[0]


# --- arguments --------------------------------------------------------------------------------------------------------


def bind(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any], skipped: int) -> list[Any]:
    """The inputs of a graph for a call, with defaults, each of the type that TorchScript gives it."""
    given = dict(kwargs)
    found, positional = [], list(args)
    for argument in schema.arguments[skipped:]:
        if positional and not argument.kwarg_only:
            value = positional.pop(0)
        elif argument.name in given:
            value = given.pop(argument.name)
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise UnreadableError
        found.append(_converted(argument.type, value))
    if positional or given:
        raise UnreadableError
    return found


def _converted(annotation: Any, value: Any) -> Any:
    kind = annotation.kind()
    if kind == "OptionalType":
        return None if value is None else _converted(annotation.getElementType(), value)
    if kind == "TensorType" and isinstance(value, torch.Tensor):
        return value
    if kind == "IntType" and isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value
    if kind == "FloatType" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind in ("BoolType", "StringType") and isinstance(value, bool if kind == "BoolType" else str):
        return value
    if kind == "ListType" and isinstance(value, (list, tuple)):
        return [_converted(annotation.getElementType(), item) for item in value]
    if kind == "TupleType" and type(value) is tuple and len(value) == len(annotation.elements()):
        return tuple(map(_converted, annotation.elements(), value))
    if kind == "DeviceObjType" and isinstance(value, torch.device):
        return value
    raise UnreadableError


def has_plain_results(schema: Any) -> bool:
    """Whether the results are tensors, numbers, lists and plain tuples."""
    return not any("torch__" in str(item.type) or "NamedTuple" in str(item.type) for item in schema.returns)
