"""Stage 2, exporting: a joint graph as data on disk, and back into a graph that runs without the user's code."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dovetail import torch_private as private
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.state import AOTState
from dovetail.cache.artefact import read_artefact, write_artefact
from dovetail.errors import ArtefactError

NAMESPACES = ("aten", "prims")
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_FORMATS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.memory_format)}


def export_joint(state: AOTState | None, joint: JointGraph, path: str | os.PathLike[str]) -> Path:
    """Write a joint graph to the folder ``path``. Raises :class:`ArtefactError` for a graph that cannot be written as data."""
    joint.lint()
    if joint.spec.metadata_changes:
        raise ArtefactError("an input changes its size or strides in place", advice="make a new tensor instead")
    nodes = []
    tensors: dict[str, torch.Tensor] = {}
    for node in joint.graph_module.graph.nodes:
        entry: dict[str, Any] = {
            "name": node.name,
            "op": node.op,
            "args": _encode(node.args),
            "kwargs": _encode(node.kwargs),
        }
        if node.op == "call_function":
            entry["target"] = _operator_name(node.target)
        elif node.op == "get_attr":
            tensors[node.target] = getattr(joint.graph_module, node.target)
            entry["target"] = node.target
        elif node.op == "placeholder":
            value = node.meta["val"]
            if private.has_symbols(value):
                raise ArtefactError(
                    f"{node.name} has a symbolic size, and only static graphs can be exported",
                    advice="capture the graph with dovetail.capture, which is static",
                )
            entry["shape"] = [int(size) for size in value.shape]
            entry["dtype"] = str(value.dtype)
        nodes.append(entry)
    payload = {
        "nodes": nodes,
        "inputs": [str(descriptor) for descriptor in joint.input_descriptors],
        "outputs": [None if descriptor is None else str(descriptor) for descriptor in joint.output_descriptors],
        "num_primals": joint.num_primals,
        "num_forward_outputs": joint.num_forward_outputs,
        "derivative_order": 1,
        "torch": torch.__version__,
    }
    return write_artefact(path, payload, tensors)


@dataclass(frozen=True)
class LoadedGraph:
    """A joint graph read from disk: ``run(primals, tangents) -> (forward outputs, gradients)``."""

    graph_module: torch.fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    num_primals: int
    num_forward_outputs: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def run(
        self, primals: list[torch.Tensor], tangents: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Forward outputs and one gradient (or None) for each primal; raises :class:`ArtefactError` for other inputs."""
        values = [*primals, *tangents]
        if len(values) != len(self.shapes) or len(primals) != self.num_primals:
            raise ArtefactError(
                f"{self.num_primals} primals and {len(self.shapes) - self.num_primals} tangents are needed"
            )
        for value, shape, dtype, name in zip(values, self.shapes, self.dtypes, self.inputs, strict=True):
            if tuple(value.shape) != shape or value.dtype != dtype:
                raise ArtefactError(
                    f"{name} must be {dtype} of shape {shape}, not {value.dtype} of {tuple(value.shape)}"
                )
        with torch.no_grad():
            results = list(self.graph_module(*[value.detach() for value in values]))
        return results[: self.num_forward_outputs], results[self.num_forward_outputs :]


def load(path: str | os.PathLike[str]) -> LoadedGraph:
    """Read an artefact that :func:`export_joint` wrote. Raises :class:`ArtefactError`; nothing from the file is executed."""
    payload, tensors = read_artefact(path)
    try:
        return _build(payload, tensors)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        if isinstance(error, ArtefactError):
            raise
        raise ArtefactError(f"{path} does not hold a graph: {error}", advice="export it again") from error


def _build(payload: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> LoadedGraph:
    graph = torch.fx.Graph()
    root = torch.nn.Module()
    known: dict[str, torch.fx.Node] = {}
    shapes, dtypes = [], []
    for entry in payload["nodes"]:
        args, kwargs = _decode(entry["args"], known), _decode(entry["kwargs"], known)
        if entry["op"] == "placeholder":
            node = graph.placeholder(_identifier(entry["name"]))
            shapes.append(tuple(int(size) for size in entry["shape"]))
            dtypes.append(_DTYPES[entry["dtype"]])
        elif entry["op"] == "call_function":
            node = graph.call_function(_operator(entry["target"]), tuple(args), dict(kwargs))
        elif entry["op"] == "get_attr":
            name = _identifier(entry["target"])
            root.register_buffer(name, tensors[name])
            node = graph.get_attr(name)
        elif entry["op"] == "output":
            node = graph.output(args[0])
        else:
            raise ArtefactError(f"a node of kind {entry['op']!r} is not allowed in an artefact")
        known[entry["name"]] = node
    graph.lint()
    return LoadedGraph(
        torch.fx.GraphModule(root, graph),
        tuple(payload["inputs"]),
        tuple(payload["outputs"]),
        int(payload["num_primals"]),
        int(payload["num_forward_outputs"]),
        tuple(shapes),
        tuple(dtypes),
    )


def _identifier(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ArtefactError(f"{name!r} is not a name")
    return name


def _operator_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    name = str(getattr(target, "name", lambda: "")())
    namespace, _, rest = name.partition("::")
    if namespace not in NAMESPACES or not rest:
        raise ArtefactError(
            f"the operator {target} cannot be written to an artefact", advice="export a graph of ATen operators"
        )
    return f"{namespace}::{rest}" if "." in rest else f"{namespace}::{rest}.default"


def _operator(name: Any) -> Any:
    if name == "getitem":
        return operator.getitem
    namespace, _, rest = str(name).partition("::")
    base, _, overload = rest.partition(".")
    if namespace not in NAMESPACES or not base.isidentifier() or not overload.isidentifier():
        raise ArtefactError(f"the operator {name!r} is not allowed in an artefact")
    found = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    if found._schema.is_mutable:
        raise ArtefactError(f"the operator {name!r} writes to its inputs, which no exported graph does")
    return found


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, torch.layout):
        return {"layout": str(value)}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {"mapping": [[str(key), _encode(item)] for key, item in value.items()]}
    raise ArtefactError(f"a {type(value).__name__} in the graph cannot be written to an artefact")


def _decode(value: Any, known: Mapping[str, torch.fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(item, known) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return float.fromhex(content)
    if kind == "complex":
        return complex(float.fromhex(content[0]), float.fromhex(content[1]))
    if kind == "node":
        return known[content]
    if kind == "mapping":
        return {key: _decode(item, known) for key, item in content}
    table: dict[str, Any] = {"dtype": _DTYPES, "layout": _LAYOUTS, "memory_format": _FORMATS}
    if kind in table:
        return table[kind][content]
    if kind == "device":
        return torch.device(content)
    raise ArtefactError(f"a value of kind {kind!r} is not allowed in an artefact")
