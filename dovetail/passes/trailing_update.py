"""A fused optimizer at the end of a whole step, left to torch's own kernel.

``AdamW(fused=True)`` asks for one kernel that goes over all parameters in place. A captured step holds it as a functional
operator whose results are written back. A compiler of kernels would have to take it to pieces, some thirty operators for each
parameter, which is most of what it then has to compile. Where nothing but the write-backs reads the results, the kernel can run
behind the graph instead, in place, as in eager.

The gradients are then outputs of the graph, and have the strides that they have in eager: torch's kernels go through the memory
of parameter, gradient and state side by side, whatever their strides say.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.backward_graphs import FlatCallable
from dovetail.aot.steps import BackendGraph, Lowering, Table, before_backend, decomposes
from dovetail.backends.protocol import output_arguments
from dovetail.passes.decompose import decompose_graph
from dovetail.passes.editing import copy_graph
from dovetail.passes.mutations import Memory, is_pure_function
from dovetail.rules.optim.fused_updates import NAMES, takes_symbols
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes

_aten = torch.ops.aten
# Schemas say that they are written to; no kernel does, unless it unscales the gradients.
_ONLY_READ = frozenset({"grads", "state_steps"})
# Their result is their first argument in all that a kernel sees.
_SAME_TENSOR = frozenset({_aten.alias.default, _aten.detach.default})


@decomposes
def keep_fused_updates(lowering: Lowering, table: Table) -> torch.fx.GraphModule | None:
    """Leave fused optimizers whole where all of them can be taken off the end of the decomposed graph too."""
    joint, write_backs = lowering.joint, lowering.write_backs
    if not lowering.backend.leaves_fused_updates or not write_backs:
        return None
    whole = {node.target for node in fused_updates(joint.graph_module)} & table.keys()
    if not whole or take_off(joint.graph_module, write_backs) is None:
        return None
    rest = {target: rule for target, rule in table.items() if target not in whole}
    module = decompose_graph(joint.graph_module, rest, joint.fake_mode)
    return module if take_off(module, write_backs) is not None else None


@before_backend
def run_updates_behind(lowering: Lowering, unit: BackendGraph) -> BackendGraph:
    """Compile the graph without its fused optimizers, which run behind it."""
    if not lowering.backend.leaves_fused_updates or unit.kind == "backward":
        return unit
    trailing = take_off(unit.graph, unit.write_backs)
    if trailing is None:
        return unit
    return unit.wrapped(
        trailing.behind,
        graph=trailing.graph,
        visible=(*unit.visible, *trailing.visible),
        write_backs={output: index for output, index in unit.write_backs.items() if output not in trailing.written},
        details={
            **unit.details,
            "updates": sum(node.target in _in_place().values() for node in trailing.updates.graph.nodes),
        },
    )


@functools.cache
def _in_place() -> dict[Any, Any]:
    """The functional fused optimizers, and the operator that does the same in place."""
    table = {}
    for name in NAMES:
        for overload in {"default", "tensor_lr"}.intersection(getattr(_aten, name).overloads()):
            kernel = getattr(getattr(_aten, f"{name}_"), overload)
            table[getattr(getattr(_aten, name), overload)] = table[takes_symbols(name, overload)] = kernel
    return table


def fused_updates(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The nodes of a graph that are torch's fused optimizers."""
    return [node for node in graph.graph.nodes if node.op == "call_function" and node.target in _in_place()]


@dataclass(frozen=True)
class Trailing:
    """The result of :func:`take_off`: the graph without the updates, and the updates as a graph behind it.

    ``reads`` names what ``updates`` takes, by the place among the first graph's inputs (``"input"``) or outputs. ``written`` are
    outputs, and the inputs that take their places; ``extra`` counts the outputs that were added at the end.
    """

    graph: torch.fx.GraphModule
    updates: torch.fx.GraphModule
    reads: tuple[tuple[str, int], ...]
    written: Mapping[int, int]
    extra: int

    @property
    def visible(self) -> list[int]:
        """The outputs that were added: the updates read them, so that their strides must be the promised ones."""
        count = len(output_arguments(self.graph))
        return list(range(count - self.extra, count))

    def behind(self, run: FlatCallable) -> FlatCallable:
        """``run``, the compiled graph, with the updates behind it; inputs and outputs are those of the graph as it was."""
        needed = {*(index for kind, index in self.reads if kind == "input"), *self.written.values()}

        def run_all(values: list[Any]) -> list[Any]:
            # The graph may empty the list of its inputs.
            inputs = {index: values[index] for index in needed}
            outputs = run(values)
            with private_operators.BelowAutograd(), private_operators.NoAutocast():
                self.updates(*[(inputs if kind == "input" else outputs)[index] for kind, index in self.reads])
            for output, index in self.written.items():
                outputs[output] = inputs[index]
            return outputs[: len(outputs) - self.extra]

        return run_all


def _source(item: Any) -> Any:
    """The node that the tensor was computed by, or its input."""
    while isinstance(item, torch.fx.Node) and item.target in _SAME_TENSOR:
        item = item.args[0]
    return item


def take_off(graph: torch.fx.GraphModule, write_backs: Mapping[int, int]) -> Trailing | None:
    """Take the fused optimizers off the end of a functional graph; None where there are none, or one cannot be taken off.

    ``write_backs`` has the outputs that are nothing but an input's new value, and that input. The graph itself is not changed.
    """
    if not fused_updates(graph):
        return None
    try:
        return _TakingOff(copy_graph(graph), write_backs).run()
    except _StaysError:
        return None


def _are_side_by_side(node: Any) -> bool:
    """Whether the kernel may go through the memory of each parameter, gradient and state in step, on the CPU.

    On a GPU a compiler makes one kernel of all updates, and they belong into its recorded graphs.
    """
    parameters, *others = [
        [each.meta["val"] for each in item] for item in node.args if isinstance(item, (list, tuple)) and item
    ]
    if any(value.device.type != "cpu" or private_sizes.has_symbols(value) for value in parameters):
        return False
    return all(
        private_sizes.has_symbols(value) is False and value.stride() == parameter.stride()
        for values in others
        for parameter, value in zip(parameters, values, strict=True)
        if value.dim() or not parameter.dim()
    )


class _StaysError(Exception):
    """An update cannot be taken off."""


class _TakingOff:
    """The graph while its updates are taken off, and the graph of the updates."""

    def __init__(self, graph: torch.fx.GraphModule, write_backs: Mapping[int, int]) -> None:
        self.graph = graph
        self.write_backs = write_backs
        self.results = output_arguments(graph)
        self.inputs = {node: index for index, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
        self.written: dict[int, int] = {}
        self.updates = torch.fx.Graph()
        self.reads: dict[tuple[str, int], torch.fx.Node] = {}

    def run(self) -> Trailing:
        count = len(self.results)
        for node in fused_updates(self.graph):
            self._take(node)
        self._check_unseen()
        for index in self.written:
            self.results[index] = None
        self.graph.graph.output_node().args = (self.results,)
        self.graph.graph.eliminate_dead_code()
        if fused_updates(self.graph):
            raise _StaysError
        self.graph.recompile()
        self.updates.output(None)
        updates = torch.fx.GraphModule(torch.nn.Module(), self.updates)
        return Trailing(self.graph, updates, tuple(self.reads), self.written, len(self.results) - count)

    def _take(self, node: Any) -> None:
        """Add the in-place call for a node; its results may have no other readers, and its operands must have a place."""
        if node.kwargs.get("grad_scale") is not None or len(node.args) > len(node.target._schema.arguments):
            # The kernel then divides the gradients in place too.
            raise _StaysError
        written_lists = self._results_of(node)
        if not _are_side_by_side(node):
            raise _StaysError
        for place, results in written_lists.items():
            operands = node.args[place]
            for position, outputs in results.items():
                index = self.inputs.get(_source(operands[position]))
                if index is None or any(self.write_backs.get(output) != index for output in outputs):
                    raise _StaysError
                self.written.update(dict.fromkeys(outputs, index))
        kernel = _in_place()[node.target]
        for place, argument in enumerate(kernel._schema.arguments):
            if argument.name in _ONLY_READ or argument.alias_info is None or not argument.alias_info.is_write:
                continue
            # The kernel may write only inputs whose new value is an output: anything else could be read by somebody.
            operands = node.args[place] if place < len(node.args) else ()
            if len(operands) != len(written_lists.get(place, {})):
                raise _StaysError
        keywords = {key: self._place(item) for key, item in node.kwargs.items()}
        self.updates.call_function(kernel, tuple(map(self._place, node.args)), keywords)

    def _results_of(self, node: Any) -> dict[int, dict[int, list[int]]]:
        """By argument and position in it, the outputs that are the new value.

        The results of these operators are the new values of their first arguments, in their order.
        """
        found: dict[int, dict[int, list[int]]] = {}
        for pick in node.users:
            for item in pick.users if pick.target is operator.getitem else (None,):
                if item is None or item.target is not operator.getitem or item.args[0] is not pick:
                    raise _StaysError
                outputs = self._outputs_of(item)
                if outputs:
                    found.setdefault(pick.args[1], {})[item.args[1]] = outputs
        return found

    def _outputs_of(self, value: Any) -> list[int]:
        """The outputs that a value is written back by; nothing else may read it."""
        outputs = [index for index, result in enumerate(self.results) if result is value]
        for user in value.users:
            if user.op == "output":
                continue
            is_copy = user.target is _aten.copy.default and user.args[1] is value and user.args[0] in self.inputs
            if not (is_copy or user.target in _SAME_TENSOR):
                raise _StaysError
            outputs += self._outputs_of(user)
        if any(index not in self.write_backs for index in outputs):
            raise _StaysError
        return outputs

    def _place(self, item: Any) -> Any:
        """A value in the graph of the updates."""
        if isinstance(item, (list, tuple)):
            return [self._place(each) for each in item]
        if not isinstance(item, torch.fx.Node):
            return item
        item = _source(item)
        if item in self.inputs:
            return self._read("input", self.inputs[item])
        if not isinstance(item.meta.get("val"), torch.Tensor):
            is_known = item.target is _aten._local_scalar_dense.default or is_pure_function(item.target)
            if item.op != "call_function" or item.kwargs or not is_known:
                raise _StaysError
            return self.updates.call_function(item.target, tuple(map(self._place, item.args)))
        for index, result in enumerate(self.results):
            if _source(result) is item:
                return self._read("output", index)
        self.results.append(item)
        return self._read("output", len(self.results) - 1)

    def _read(self, kind: str, index: int) -> torch.fx.Node:
        if (kind, index) not in self.reads:
            with self.updates.inserting_after(next(reversed(self.reads.values()), None)):
                self.reads[kind, index] = self.updates.placeholder(f"{kind}_{index}")
        return self.reads[kind, index]

    def _check_unseen(self) -> None:
        """No output may lie in memory that the updates write to, and the graph may not write to inputs that they read."""
        memory = Memory(self.graph)
        nodes = list(self.inputs)
        written = {memory.group(nodes[index]) for index in self.written.values()}
        in_graph = {memory.group(nodes[at]) for out, at in self.write_backs.items() if out not in self.written}
        read = {memory.group(nodes[index]) for kind, index in self.reads if kind == "input"}
        seen = {
            memory.group(result)
            for index, result in enumerate(self.results)
            if isinstance(result, torch.fx.Node) and index not in self.written
        }
        if read & in_graph or seen & written:
            raise _StaysError
