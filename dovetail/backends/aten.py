"""The reference backend: the captured ATen operators as they are, in order, bitwise equal to eager.

The graph becomes one straight-line Python function that calls the operators' C++ entries and drops every value after
its last use. It runs below autograd and autocast (the graph already holds what those add), but above the layer that
makes views share version counters, so that an in-place write to a saved tensor is noticed as in eager.
"""

from __future__ import annotations

import itertools
import linecache
import math
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.backends.outputs import fresh
from dovetail.backends.protocol import Backend, CompiledCallable, Kind
from dovetail.errors import BackendError
from dovetail.torch_private import tensors as private

_counter = itertools.count()


class _Writer:
    """Writes the function's source and collects the objects that it names."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        self.graph_module = graph
        self.names: dict[str, Any] = {}
        self.lines: list[str] = []
        self._bound: dict[int, str] = {}
        self._variables: dict[torch.fx.Node, str] = {}

    def bind(self, value: Any, prefix: str) -> str:
        """A global name for an object; the same object gets the same name."""
        name = self._bound.get(id(value))
        if name is None:
            name = f"{prefix}_{len(self.names)}"
            self._bound[id(value)] = name
            self.names[name] = value
        return name

    def variable(self, node: torch.fx.Node) -> str:
        """The local (or, for a constant, global) name that holds a node's value."""
        name = self._variables.get(node)
        if name is None:
            name = self._variables[node] = f"v{len(self._variables)}"
        return name

    def expression(self, value: Any) -> str:
        """Python source for an argument."""
        if isinstance(value, torch.fx.Node):
            return self.variable(value)
        if value is None or value is Ellipsis or type(value) in (bool, int, str, bytes):
            return repr(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else self.bind(value, "number")
        if isinstance(value, list):
            return "[" + ", ".join(map(self.expression, value)) + "]"
        if isinstance(value, tuple):
            if type(value) not in (tuple, torch.Size) and hasattr(value, "_fields"):
                return f"{self.bind(type(value), 'type')}({', '.join(map(self.expression, value))})"
            return "(" + "".join(f"{self.expression(item)}, " for item in value) + ")"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.expression(k)}: {self.expression(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.expression, (value.start, value.stop, value.step)))})"
        return self.bind(value, "constant")

    def call(self, node: torch.fx.Node) -> str:
        """Python source for what a node computes."""
        arguments = [self.expression(argument) for argument in node.args]
        arguments += [f"{key}={self.expression(value)}" for key, value in node.kwargs.items()]
        target = node.target
        if node.op == "call_method":
            return f"{arguments[0]}.{target}({', '.join(arguments[1:])})"
        if node.op == "call_module":
            return f"{self.bind(self.graph_module.get_submodule(str(target)), 'module')}({', '.join(arguments)})"
        if target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        if isinstance(target, private.OpOverload):
            function = private.operator_entry(target)
            name = self._bound.get(id(target)) or f"{target._schema.name.split('::')[-1]}_{len(self.names)}"
            self._bound[id(target)] = name
            self.names[name] = function
            return f"{name}({', '.join(arguments)})"
        return f"{self.bind(target, 'function')}({', '.join(arguments)})"

    def constant(self, node: torch.fx.Node) -> None:
        """Bind the attribute that a ``get_attr`` node reads."""
        value: Any = self.graph_module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        self._variables[node] = self.bind(value, "attribute")


def _may_be_view(node: torch.fx.Node) -> bool:
    while node.op == "call_function" and node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    if node.op == "placeholder":
        return False
    if node.op != "call_function" or not isinstance(node.target, private.OpOverload):
        return True
    schema = node.target._schema
    # The schema of an embedding says that its result is new, but its kernel ends with a view of another operator's result.
    return any(item.alias_info is not None for item in schema.returns) or private.is_composite(node.target)


def generate_source(graph: torch.fx.GraphModule, kind: Kind = "inference") -> tuple[str, dict[str, Any]]:
    """The source of the straight-line function for ``graph``, and the objects that it names."""
    writer = _Writer(graph)
    nodes = list(graph.graph.nodes)
    last_use: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in nodes:
        for argument in node.all_input_nodes:
            last_use[argument] = node
    body: list[str] = []
    placeholders: list[str] = []
    result = "[]"
    for node in nodes:
        if node.op == "placeholder":
            placeholders.append(writer.variable(node))
            continue
        if node.op == "get_attr":
            writer.constant(node)
            continue
        if node.op == "output":
            entries = node.args[0]
            if not isinstance(entries, (list, tuple)):
                raise BackendError("the graph does not return one flat list", advice="end it with graph.output([...])")
            result = _output_list(writer, entries)
            continue
        comment = f"  # {node.name}"
        if node.meta.get("user_line") is not None:
            comment += f" at {node.meta['user_line']}".replace("\n", " ")
        text = writer.call(node)
        used = [
            writer.variable(item) for item in node.all_input_nodes if last_use[item] is node and item.op != "get_attr"
        ]
        body.append((f"{writer.variable(node)} = {text}" if node.users else text) + comment)
        if used:
            body.append(f"del {', '.join(used)}")
    unused = [writer.variable(node) for node in nodes if node.op == "placeholder" and not node.users]
    lines = ["def run(inputs):"]
    if placeholders:
        lines.append(f"    [{', '.join(placeholders)}] = inputs")
    lines.append("    inputs.clear()")
    if unused:
        lines.append(f"    del {', '.join(unused)}")
    guards = ["BelowAutograd()", "NoAutocast()"]
    if kind == "forward":
        # Eager's forward of a training step has gradients enabled, and a few operators look at that to choose a kernel.
        guards.append("EnableGrad(True)")
        writer.names["EnableGrad"] = torch.set_grad_enabled
    lines.append(f"    with {', '.join(guards)}:")
    lines.extend(f"        {line}" for line in body)
    lines.append(f"        return {result}")
    writer.names |= {"BelowAutograd": private.BelowAutograd, "NoAutocast": private.NoAutocast, "fresh": fresh}
    return "\n".join(lines) + "\n", writer.names


def _output_list(writer: _Writer, entries: Sequence[Any]) -> str:
    texts = []
    for entry in entries:
        text = writer.expression(entry)
        texts.append(f"fresh({text})" if isinstance(entry, torch.fx.Node) and _may_be_view(entry) else text)
    return "[" + ", ".join(texts) + "]"


def compile_aten(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any] = (),
    *,
    kind: Kind = "inference",
    options: Mapping[str, Any] | None = None,
) -> CompiledCallable:
    """Compile ``graph`` to a function that runs its operators as they are, and that empties its list of inputs.

    An output that is a placeholder is the very input object; every other output is no view and requires no gradient.

    >>> class Double(torch.nn.Module):
    ...     def forward(self, x):
    ...         return [torch.ops.aten.mul.Tensor(x, 2), None]
    >>> compile_aten(torch.fx.symbolic_trace(Double()))([torch.ones(2)])
    [tensor([2., 2.]), None]
    """
    source, names = generate_source(graph, kind)
    filename = f"<dovetail aten {kind} {next(_counter)}>"
    exec(compile(source, filename, "exec"), names)
    run: CompiledCallable = names["run"]
    # Tracebacks then show the operator and the user's line.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(run, linecache.cache.pop, filename, None)
    return run


ATEN = Backend(
    "aten",
    compile_aten,
    numerics="bitwise",
    data_sizes=True,
    description="the captured ATen operators as they are; the reference for every other backend",
)
