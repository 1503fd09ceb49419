"""The reference backend: runs the captured ATen operators as they are, in order, bitwise equal to eager.

The graph becomes one straight-line Python function that calls the operators' C++ entries and drops every value after its
last use. It runs below autograd and autocast (the graph already holds what those add), but above the dispatch layer that
makes views share version counters, so that autograd notices an in-place write to a saved tensor, as in eager.
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

from dovetail.backends.protocol import Backend, CompiledCallable, Kind, output_arguments
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import tensors as private_tensors

_counter = itertools.count()


class SourceWriter:
    """Writes Python source of a graph and collects the objects that it names."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        self.graph_module = graph
        self.names: dict[str, Any] = {
            "BelowAutograd": private_operators.BelowAutograd,
            "NoAutocast": private_operators.NoAutocast,
        }
        self._bound: dict[int, str] = {}
        self._variables: dict[torch.fx.Node, str] = {}

    def bind(self, value: Any, prefix: str) -> str:
        """Return a global name for an object; the same object gets the same name."""
        name = self._bound.get(id(value))
        if name is None:
            name = self._bound[id(value)] = f"{prefix}_{len(self.names)}"
            self.names[name] = value
        return name

    def variable(self, node: torch.fx.Node) -> str:
        """Return the local (or, for a constant, global) name that holds a node's value."""
        name = self._variables.get(node)
        if name is None:
            name = self._variables[node] = f"v{len(self._variables)}"
        return name

    def bind_attribute(self, node: torch.fx.Node) -> None:
        """Bind the constant that a ``get_attr`` node reads."""
        self._variables[node] = self.bind(operator.attrgetter(str(node.target))(self.graph_module), "attribute")

    def expression(self, value: Any) -> str:
        """Return Python source for an argument."""
        if isinstance(value, torch.fx.Node):
            return self.variable(value)
        if value is None or value is Ellipsis or type(value) in (bool, int, str, bytes):
            return repr(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else self.bind(value, "number")
        if isinstance(value, list):
            return f"[{self._list(value)}]"
        if isinstance(value, tuple):
            if type(value) not in (tuple, torch.Size) and hasattr(value, "_fields"):
                return f"{self.bind(type(value), 'type')}({self._list(value)})"
            return "(" + "".join(f"{self.expression(item)}, " for item in value) + ")"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.expression(k)}: {self.expression(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self._list((value.start, value.stop, value.step))})"
        return self.bind(value, "constant")

    def _list(self, values: Sequence[Any]) -> str:
        return ", ".join(map(self.expression, values))

    def call(self, node: torch.fx.Node) -> str:
        """Return Python source for a node's computation."""
        arguments = [self.expression(argument) for argument in node.args]
        arguments += [f"{key}={self.expression(value)}" for key, value in node.kwargs.items()]
        target = node.target
        if node.op == "call_method":
            return f"{arguments[0]}.{target}({', '.join(arguments[1:])})"
        if target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        if node.op == "call_module":
            name = self.bind(self.graph_module.get_submodule(str(target)), "module")
        elif isinstance(target, private_operators.OpOverload):
            name = self.operator(target)
        else:
            name = self.bind(target, "function")
        return f"{name}({', '.join(arguments)})"

    def operator(self, target: Any) -> str:
        """Return a global name for an operator; it is kept by overload, as each look-up of a C++ entry makes a new object."""
        name = self._bound.get(id(target))
        if name is None:
            name = self._bound[id(target)] = f"{target._schema.name.split('::')[-1]}_{len(self.names)}"
            self.names[name] = private_operators.operator_entry(target)
        return name

    def output(self, entry: Any) -> str:
        """Return Python source for an entry of the output list, which is no view of an intermediate value."""
        text = self.expression(entry)
        if isinstance(entry, torch.fx.Node) and _may_be_view(entry):
            return f"{self.bind(fresh, 'fresh')}({text})"
        return text


def fresh(value: Any) -> Any:
    """Return the tensor itself, or a detached alias (same version counter) if it is a view or requires a gradient.

    >>> x = torch.ones(2, requires_grad=True)
    >>> fresh(x * 2).requires_grad, private_tensors.is_tensor_view(fresh(x.detach()[:1]))
    (False, False)
    """
    if isinstance(value, torch.Tensor) and (value.requires_grad or private_tensors.is_tensor_view(value)):
        return value.detach()
    return value


def _may_be_view(node: torch.fx.Node) -> bool:
    while node.op == "call_function" and node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    if node.op == "placeholder":
        return False
    if node.op != "call_function" or not isinstance(node.target, private_operators.OpOverload):
        return True
    returns = node.target._schema.returns
    # An embedding's schema says that its result is new memory, but its kernel returns a view of another operator's result.
    return any(item.alias_info is not None for item in returns) or private_operators.is_composite(node.target)


def generate_source(graph: torch.fx.GraphModule, kind: Kind = "inference") -> tuple[str, dict[str, Any]]:
    """Return the source of the straight-line function for ``graph``, and the objects that it names."""
    writer = SourceWriter(graph)
    nodes = list(graph.graph.nodes)
    last_use = {argument: node for node in nodes for argument in node.all_input_nodes}
    placeholders = [writer.variable(node) for node in nodes if node.op == "placeholder"]
    unused = [writer.variable(node) for node in nodes if node.op == "placeholder" and not node.users]
    body: list[str] = []
    for node in nodes:
        if node.op == "get_attr":
            writer.bind_attribute(node)
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        line = f"at {node.meta['user_line']}" if node.meta.get("user_line") is not None else ""
        comment = f"  # {node.name} {line}".replace("\n", " ").rstrip()
        text = writer.call(node)
        body.append((f"{writer.variable(node)} = {text}" if node.users else text) + comment)
        done = [value for value in node.all_input_nodes if last_use[value] is node and value.op != "get_attr"]
        if done:
            body.append(f"del {', '.join(map(writer.variable, done))}")
    body.append(f"return [{', '.join(map(writer.output, output_arguments(graph)))}]")
    lines = ["def run(inputs):"]
    if placeholders:
        lines.append(f"    [{', '.join(placeholders)}] = inputs")
    lines.append("    inputs.clear()")
    if unused:
        lines.append(f"    del {', '.join(unused)}")
    guards = "BelowAutograd(), NoAutocast()"
    if kind == "forward":
        # Eager's forward of a training step has gradients enabled, and a few operators look at that to choose a kernel.
        guards += f", {writer.bind(torch.set_grad_enabled, 'grad_mode')}(True)"
    lines.append(f"    with {guards}:")
    lines += [f"        {line}" for line in body]
    return "\n".join(lines) + "\n", writer.names


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
    writes_back=True,
    has_options=False,
    description="the captured ATen operators as they are; the reference for every other backend",
)
