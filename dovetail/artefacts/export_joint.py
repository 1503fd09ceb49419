"""Stage 2, exporting: a joint graph as data on disk. :mod:`dovetail.artefacts.load_joint` reads it back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.state import AOTState
from dovetail.aot.views import AutogradView, StridedView
from dovetail.artefacts.allow_list import check_arguments, name_of_operator
from dovetail.artefacts.artefact import write_artefact
from dovetail.artefacts.loaded_parts import LoadedView
from dovetail.artefacts.schema import make_schema, validate
from dovetail.artefacts.size_expressions import encode_expression, encode_size
from dovetail.errors import ArtefactError
from dovetail.runtime.recipe import ConstantItem, ObjectItem, Recipe, TensorItem, TupleItem
from dovetail.runtime.spec import FreshOutput, InputOutput, OutputTensor, RuntimeSpec, ViewOutput
from dovetail.torch_private import sizes as private_sizes

NAMED: dict[str, type[Any]] = {"parameter": ParamInput, "buffer": BufferInput, "input": UserInput, "output": UserOutput}
WRAPPING: dict[str, type[Any]] = {"mutated": MutatedInput, "tangent": Tangent, "gradient": Gradient}


def export_joint(
    state: AOTState | None,
    joint: JointGraph,
    path: str | os.PathLike[str],
    *,
    values: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a joint graph to the folder ``path``; ``dovetail.load(path)`` runs it without the user's code.

    ``values`` are tensors to put into the artefact, by the name of a parameter or buffer or by the path of another input (such
    as ``model.state_dict()``); names that are no input of the graph are left out. ``state`` may be None or closed. Raises
    :class:`ArtefactError` for a graph that cannot be written as data: nothing is written then.
    """
    joint.lint()
    if joint.spec.metadata_changes:
        raise ArtefactError("an input changes its size or strides in place", advice="make a new tensor instead")
    _check_effects(joint)
    numbers, symbols = _symbols(joint)
    tensors: dict[str, torch.Tensor] = {}
    nodes = [_node(node, joint, numbers, tensors) for node in joint.graph.nodes if node.op != "output"]
    payload = {
        "nodes": nodes,
        "results": [None if node is None else node.name for node in joint.results],
        "inputs": [encode_descriptor(item) for item in joint.input_descriptors],
        "outputs": [None if item is None else encode_descriptor(item) for item in joint.output_descriptors],
        "num_primals": joint.num_primals,
        "num_forward_outputs": joint.num_forward_outputs,
        "derivative_order": derivative_order(joint),
        "symbols": symbols,
        "guards": _guards(joint, numbers),
        "spec": _spec(joint),
        "result": _result(joint),
        "state": _state(joint, values or {}, tensors),
        "provenance": [str(record) for record in joint.provenance],
        "inexact": list(joint.inexact),
        "torch": torch.__version__,
    }
    validate(payload, make_schema())
    return write_artefact(path, payload, tensors)


def derivative_order(joint: JointGraph) -> int:
    """How often a joint graph can be differentiated from outside: 0 where it has no gradients."""
    return (
        1 if any(descriptor is not None for descriptor in joint.output_descriptors[joint.num_forward_outputs :]) else 0
    )


def name_of_input(descriptor: Descriptor) -> str:
    """The name under which an artefact keeps the value of an input."""
    if isinstance(descriptor, (ParamInput, BufferInput)):
        return descriptor.fqn
    return descriptor.path if isinstance(descriptor, UserInput) else str(descriptor)


def encode_descriptor(descriptor: Descriptor) -> dict[str, Any]:
    """A descriptor as data."""
    for kind, cls in NAMED.items():
        if type(descriptor) is cls:
            return {"kind": kind, "name": getattr(descriptor, "fqn", None) or getattr(descriptor, "path", "")}
    for kind, cls in WRAPPING.items():
        if type(descriptor) is cls:
            return {"kind": kind, "of": encode_descriptor(descriptor.of)}  # type: ignore[attr-defined]
    if isinstance(descriptor, AliasBase):
        return {"kind": "base", "index": descriptor.index}
    raise ArtefactError(f"{descriptor} cannot be written to an artefact", advice="export a graph of plain tensors")


def _check_effects(joint: JointGraph) -> None:
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if any(map(private_sizes.is_data_number, value.shape if isinstance(value, torch.Tensor) else (value,))):
            raise ArtefactError(
                f"the size of {node.name} depends on data, and no artefact has such sizes",
                where=node.meta.get("user_line"),
                advice="use masks in place of selections",
            )
    capture = joint.capture
    for name, text in (
        ("effects", "it writes to Python objects (attributes, lists, .grad), which are not there in another process"),
        ("ambient_change", "it changes torch's own state (such as the grad mode)"),
        ("resume_point", "it is only the part of the program before a graph break"),
        ("inputs_made_differentiable", "it sets requires_grad of a tensor that it is given"),
        ("numbers", "it returns numbers that depend on sizes"),
    ):
        if getattr(capture, name):
            raise ArtefactError(
                f"the captured function cannot be exported: {text}",
                advice="export a function that only takes and returns tensors and writes to tensors in place",
            )


def _symbols(joint: JointGraph) -> tuple[dict[Any, int], list[dict[str, Any]]]:
    bindings = joint.capture.bindings
    numbers: dict[Any, int] = {}
    described: list[dict[str, Any]] = []
    for symbol, (index, kind, dim) in bindings.symbols.items() if bindings is not None else ():
        value = joint.graph.find_nodes(op="placeholder")[index].meta["val"]
        if kind not in ("size", "stride"):
            raise ArtefactError(
                f"a symbolic {kind} of {joint.input_descriptors[index]} cannot be written to an artefact",
                advice="mark sizes as dynamic, and pass numbers as constants",
            )
        hint = private_sizes.hint(value.shape[dim] if kind == "size" else value.stride(dim))
        low, high = private_sizes.range_of(joint.fake_mode.shape_env, symbol)
        numbers[symbol] = len(described)
        place = {"input": index, "kind": kind, "dim": dim}
        described.append({"place": place, "hint": hint, "low": max(low or 0, 0), "high": high})
    return numbers, described


def _guards(joint: JointGraph, numbers: Mapping[Any, int]) -> list[Any]:
    environment = joint.fake_mode.shape_env
    recorded = environment.recorded() if hasattr(environment, "recorded") else []
    return [encode_expression(item.expression, numbers) for item in recorded]


def _node(
    node: torch.fx.Node, joint: JointGraph, numbers: Mapping[Any, int], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    entry: dict[str, Any] = {"op": node.op, "name": node.name}
    if node.op == "placeholder":
        value = node.meta["val"]
        if value.storage_offset() != 0 and any("as_strided" in str(item.target) for item in joint.graph.nodes):
            raise ArtefactError(
                f"{node.name} is part of a larger tensor", advice="capture the graph with a clone of it"
            )
        return entry | {
            "shape": [encode_size(size, numbers) for size in value.shape],
            "stride": [encode_size(step, numbers) for step in value.stride()],
            "dtype": str(value.dtype),
            "device": str(value.device),
        }
    if node.op == "get_attr":
        found = getattr(joint.graph_module, str(node.target), None)
        if not isinstance(found, torch.Tensor):
            raise ArtefactError(
                f"{node.name} is a {type(found).__name__}, and only tensors can be written to an artefact"
            )
        tensors[f"constant.{node.target}"] = found
        return entry | {"target": node.target}
    if node.op != "call_function":
        raise ArtefactError(f"{node.name} is a node of kind {node.op}, which no artefact holds")
    check_arguments(node.target, len(node.args), list(node.kwargs))
    return entry | {
        "target": name_of_operator(node.target),
        "args": [encode_argument(item) for item in node.args],
        "kwargs": [[key, encode_argument(item)] for key, item in node.kwargs.items()],
        "phase": "backward" if node.meta.get("phase") == "backward" else "forward",
    }


def encode_argument(value: Any) -> Any:
    """An argument of an operator as data; raises :class:`ArtefactError`."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    for kind, cls in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format)):
        if isinstance(value, cls):
            return {kind: str(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (list, tuple)):
        return [encode_argument(item) for item in value]
    raise ArtefactError(f"a {type(value).__name__} in the graph cannot be written to an artefact")


def _spec(joint: JointGraph) -> dict[str, Any]:
    spec: RuntimeSpec = joint.spec
    return {
        "input_requires_grad": list(spec.input_requires_grad),
        "output_differentiable": list(spec.output_differentiable),
        "outputs": [_output(item) for item in spec.outputs],
        "mutations": [
            {
                "input_index": item.input_index,
                "output_index": item.output_index,
                "differentiable": item.differentiable,
                "counted": item.counted,
            }
            for item in spec.mutations
        ],
        "feeding": list(spec.outputs_behind_outputs),
        "ties": [
            {"output": item.output, "results": list(item.results), "inputs": list(item.inputs)}
            for item in spec.dependencies
        ],
        "freed_together": None if spec.freed_by_backward is None else [sorted(item) for item in spec.freed_by_backward],
        "arrangement": list(spec.leaf_order),
    }


def _output(output: OutputTensor) -> dict[str, Any]:
    if type(output) is FreshOutput:
        return {"kind": "fresh", "index": output.index, "is_leaf": output.is_leaf, "is_freed": output.is_freed}
    if type(output) is InputOutput:
        return {"kind": "input", "index": output.index}
    if type(output) is not ViewOutput or not isinstance(output.replay, (StridedView, AutogradView, LoadedView)):
        raise ArtefactError("a returned view cannot be written to an artefact", advice="return a clone of it")
    if output.replay.plain is None:
        raise ArtefactError("a returned view cannot be written to an artefact", advice="return a clone of it")
    size, stride, offset = output.replay.plain
    return {
        "kind": "view",
        "of": "fresh" if isinstance(output.base, FreshOutput) else "input",
        "index": output.base.index,
        "is_leaf": isinstance(output.base, FreshOutput) and output.base.is_leaf,
        "is_freed": isinstance(output.base, FreshOutput) and output.base.is_freed,
        "size": list(size),
        "stride": list(stride),
        "offset": offset,
        "differentiable": output.differentiable,
        "requires_grad": output.requires_grad,
    }


def _result(joint: JointGraph) -> Any:
    """How the result is built; a result of a class that no file can name comes as one flat tuple of its tensors."""
    found = _encode_result(joint.capture.recipe)
    if found is not _UNKNOWN:
        return found
    return {"tuple": [{"tensor": index} for index in range(len(joint.spec.outputs))]}


_UNKNOWN = object()


@dataclass(frozen=True)
class StoredResult(Recipe):
    """The result of a loaded graph, as it is written in the file."""

    payload: Any


def _encode_result(recipe: Recipe | None) -> Any:
    if isinstance(recipe, StoredResult):
        return recipe.payload
    if isinstance(recipe, TensorItem):
        return {"tensor": recipe.index}
    if isinstance(recipe, ConstantItem) and type(recipe.value) in (type(None), bool, int, str):
        return recipe.value
    if isinstance(recipe, ConstantItem) and type(recipe.value) is float:
        return {"float": recipe.value.hex()}
    parts: list[Any] = []
    if isinstance(recipe, TupleItem) and recipe.cls is tuple:
        kind, parts = "tuple", [_encode_result(item) for item in recipe.items]
    elif isinstance(recipe, ObjectItem) and recipe.cls is list and not recipe.attributes:
        kind, parts = "list", [_encode_result(item) for item in recipe.items]
    elif isinstance(recipe, ObjectItem) and recipe.cls is dict and not recipe.attributes and not recipe.items:
        pairs = [(_encode_result(key), _encode_result(item)) for key, item in recipe.pairs]
        known = all(type(key) in (str, int, bool) and item is not _UNKNOWN for key, item in pairs)
        return {"dict": [list(pair) for pair in pairs]} if known else _UNKNOWN
    else:
        return _UNKNOWN
    return _UNKNOWN if any(part is _UNKNOWN for part in parts) else {kind: parts}


def _state(joint: JointGraph, values: Mapping[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    named: list[list[str]] = []
    placeholders = joint.graph.find_nodes(op="placeholder")[: joint.num_primals]
    for position, (descriptor, node) in enumerate(zip(joint.input_descriptors, placeholders)):
        name = name_of_input(descriptor)
        if name not in values:
            continue
        value, promised = values[name], node.meta["val"]
        if tuple(value.shape) != tuple(promised.shape) or value.dtype != promised.dtype:
            raise ArtefactError(
                f"the value of {descriptor} is {value.dtype} of shape {tuple(value.shape)}, and the graph was captured for "
                f"{promised.dtype} of shape {tuple(promised.shape)}",
                advice="hand over the state of the module that was captured",
            )
        tensors[f"state.{position}"] = value
        named.append([name, f"state.{position}"])
    return named
