"""Print a joint graph as something a person can read: one line a node, with dtype, shape, strides and the user's line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from dovetail.torch_private import operators as private_operators

if TYPE_CHECKING:
    from dovetail.aot.joint_graph import JointGraph

_SHORT = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
          torch.int32: "i32", torch.bool: "bool", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16",
          torch.complex64: "c64", torch.complex128: "c128"}  # fmt: skip


def describe_value(value: Any) -> str:
    """Dtype and shape of a value, and its strides if it is not contiguous.

    >>> describe_value(torch.zeros(2, 3))
    'f32[2, 3]'
    """
    if isinstance(value, torch.Tensor):
        text = f"{_SHORT.get(value.dtype, str(value.dtype))}{list(value.shape)}"
        return text if value.is_contiguous() else f"{text} strides {list(value.stride())}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(describe_value(item) for item in value) + ")"
    return type(value).__name__


def _line(node: torch.fx.Node) -> str:
    location = node.meta.get("user_line")
    return f"  # {os.path.basename(location.file)}:{location.line} {location.text}" if location is not None else ""


def _arguments(node: torch.fx.Node) -> str:
    shown = [str(argument) for argument in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
    return ", ".join(shown)


def print_joint(joint: JointGraph) -> str:
    """The whole graph as text."""
    lines = [f"joint graph: {len(joint.graph.nodes)} nodes", "inputs:"]
    for node, descriptor in zip(joint.graph.find_nodes(op="placeholder"), joint.input_descriptors, strict=True):
        lines.append(f"  {node.name}: {describe_value(node.meta['val'])}  # {descriptor}")
    for phase in ("forward", "backward"):
        lines.append(f"{phase}:")
        for node in joint.nodes_of(phase):
            name = getattr(node.target, "__name__", str(node.target))
            operator = (
                str(node.target).replace("aten.", "") if isinstance(node.target, private_operators.OpOverload) else name
            )
            lines.append(
                f"  {node.name}: {describe_value(node.meta.get('val'))} = {operator}({_arguments(node)}){_line(node)}"
            )
    lines.append("outputs:")
    for node, described in zip(joint.results, joint.output_descriptors, strict=True):
        if node is not None:
            lines.append(f"  {node.name}  # {described}")
    for record in joint.provenance:
        lines.append(f"pass {record}")
    return "\n".join(lines)
