"""Print a joint graph as something a person can read: who made it, then one line a node under its module and source line."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private.operators import OpOverload

if TYPE_CHECKING:
    from dovetail.aot.joint_graph import JointGraph

_SHORT = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
          torch.int32: "i32", torch.bool: "bool", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16",
          torch.complex64: "c64", torch.complex128: "c128"}  # fmt: skip


def describe_value(value: Any) -> str:
    """Dtype and shape of a value, and its strides if it is not contiguous.

    >>> describe_value(torch.zeros(2, 3)), describe_value((torch.zeros(2, 3).t(), 4))
    ('f32[2, 3]', '(f32[3, 2] strides [1, 3], int)')
    """
    if isinstance(value, torch.Tensor):
        text = f"{_SHORT.get(value.dtype, str(value.dtype))}{list(value.shape)}"
        # Not asked of the value: torch would guard on a symbolic size, and refuses one that the data decides.
        layout = [[private_sizes.hint(item) for item in part] for part in (value.shape, value.stride())]
        if not torch.empty_strided(*layout, device="meta").is_contiguous():
            text += f" strides {list(value.stride())}"
        return text
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(describe_value(item) for item in value) + ")"
    return type(value).__name__


def name_of_function(function: Any) -> str:
    """How to call the captured function in a sentence.

    >>> name_of_function(torch.nn.Linear(2, 1)), name_of_function(len), name_of_function(None)
    ('Linear', 'len', 'a function')
    """
    if function is None:
        return "a function"
    return str(
        getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__name__
    )


def summarise(joint: JointGraph) -> str:
    """One line: the captured function, the size of its graph, and the stage that made it."""
    name = name_of_function(getattr(joint.capture, "function", None))
    order = "" if joint.order == 1 else f", derivative {joint.order}"
    sizes = f"{len(joint.nodes_of('forward'))} forward and {len(joint.nodes_of('backward'))} backward operators"
    made = "" if joint.made_by is None else f", {joint.made_by.name} in {joint.made_by.seconds * 1e3:.1f} ms"
    count = len(joint.provenance)
    passes = "" if not count else f", {count} pass{'es' if count > 1 else ''}"
    return f"joint graph of {name}{order}: {joint.num_primals} inputs, {sizes}{made}{passes}"


def operation_text(node: torch.fx.Node) -> str:
    """The operator with its arguments."""
    name = getattr(node.target, "__name__", str(node.target))
    operator = str(node.target).replace("aten.", "") if isinstance(node.target, OpOverload) else name
    shown = [str(argument) for argument in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
    return f"{operator}({', '.join(shown)})"


def _grouped(nodes: Sequence[torch.fx.Node]) -> Iterator[str]:
    """One line a node. A module's path and a source line stand above the first of the nodes that they are the same for."""
    module, line = "", ""
    for node in nodes:
        location = node.meta.get("user_line")
        own_module, own_line = "", ""
        if location is not None:
            file = os.path.basename(location.names[-1](location.file))
            own_module, own_line = location.module, f"{file}:{location.line} {location.text}"
        if own_module != module:
            module, line = own_module, ""
            yield f"  {module or 'outside of modules'}:"
        if own_line != line:
            line = own_line
            if line:
                yield f"    # {line}"
        yield f"    {node.name}: {describe_value(node.meta.get('val'))} = {operation_text(node)}"


def print_joint(joint: JointGraph) -> str:
    """The whole graph as text."""
    lines = [summarise(joint)]
    lines += [f"  pass {record}" for record in joint.provenance]
    lines.append("inputs:")
    for node, descriptor in zip(joint.graph.find_nodes(op="placeholder"), joint.input_descriptors, strict=True):
        lines.append(f"  {node.name}: {describe_value(node.meta['val'])}  # {descriptor}")
    for phase in ("forward", "backward"):
        lines.append(f"{phase}:")
        lines += _grouped(joint.nodes_of(phase))
    lines.append("outputs:")
    for result, described in zip(joint.results, joint.output_descriptors, strict=True):
        if result is not None:
            lines.append(f"  {result.name}  # {described}")
    return "\n".join(lines)


def show_in_notebook(joint: JointGraph) -> str:
    """Markdown: the summary, and the whole graph to be unfolded."""
    shown = html.escape(print_joint(joint), quote=False)
    return f"**{summarise(joint)}**\n\n<details><summary>graph</summary>\n\n<pre>{shown}</pre>\n\n</details>"
