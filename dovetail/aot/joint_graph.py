"""The joint graph of stage 1: forward and backward in one ``torch.fx`` graph, described input by input, output by output."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.descriptors import Descriptor, Gradient, ParamInput
from dovetail.errors import GraphInvalidError
from dovetail.runtime.spec import RuntimeSpec
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Program
from dovetail.trace.overrides import ASSUMES

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.aot.compile_joint import CompiledGraph

# Marks in a node's ``meta``. The first: it is computed in the backward, though no tangent is needed for it. The second: it is
# computed in the forward and saved, not computed again. The third: it is computed by a hook or a custom backward.
IN_BACKWARD = "checkpointed"
SAVE = "save"
BY_USER_BACKWARD = "user_backward"

_ASSERTIONS = (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg)

Pass = Callable[["JointGraph"], "JointGraph | torch.fx.GraphModule | None"]


def must_stay(node: torch.fx.Node) -> bool:
    """Whether a node stays even if unused: it draws random numbers (the generator moves as in eager) or raises errors."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if node.target is torch.ops.aten._linalg_check_errors.default or node.target in _ASSERTIONS:
        return True
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def assumes(node: torch.fx.Node) -> bool:
    """Whether a node may find that the data of a call is not such as the graph was captured for."""
    may_refuse = ASSUMES.get(node.target)
    return node.target in _ASSERTIONS or (may_refuse is not None and may_refuse(node))


@dataclass(frozen=True)
class PassRecord:
    """Who made this version of the graph: name, seconds it took, nodes before and after."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int

    def __str__(self) -> str:
        return f"{self.name}: {self.nodes_before} -> {self.nodes_after} nodes in {self.seconds * 1e3:.1f} ms"


@dataclass(frozen=True, eq=False)
class JointGraph:
    """Forward and backward of a captured function.

    Placeholders come in the order of ``input_descriptors``: first the primals, then the tangents (one for each forward output
    with a gradient). The output node returns one flat list in the order of ``output_descriptors``: first
    ``num_forward_outputs`` forward outputs, then one gradient per primal, None where there is none.
    Each node's ``meta`` holds ``val`` (fake value), ``phase`` ("forward" or "backward") and, where known, ``user_line``
    (a :class:`dovetail.errors.UserLocation`). ``inexact`` names the autograd nodes whose traced formula is not eager's to the
    last bit. ``program`` computes the forward outputs by the torch calls of the user's function.
    """

    graph_module: torch.fx.GraphModule
    input_descriptors: tuple[Descriptor, ...]
    output_descriptors: tuple[Descriptor | None, ...]
    num_primals: int
    num_forward_outputs: int
    spec: RuntimeSpec
    fake_mode: Any
    capture: CaptureResult
    provenance: tuple[PassRecord, ...] = field(default_factory=tuple)
    inexact: tuple[str, ...] = ()
    is_exact: bool = False
    program: Program | None = None

    @property
    def graph(self) -> torch.fx.Graph:
        """The graph itself."""
        return self.graph_module.graph

    @property
    def order(self) -> int:
        """The order of the derivative that the backward computes."""
        return self.capture.order

    @property
    def results(self) -> list[torch.fx.Node | None]:
        """The nodes that are returned, in the order of ``output_descriptors``."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def placeholder(self, descriptor: Descriptor) -> torch.fx.Node:
        """The input node with this descriptor; raises KeyError."""
        for node, found in zip(self.graph.find_nodes(op="placeholder"), self.input_descriptors, strict=True):
            if found == descriptor:
                return node
        raise KeyError(str(descriptor))

    def gradient_of(self, parameter: str | Descriptor) -> torch.fx.Node:
        """The node of a gradient, by the parameter's name or the input's descriptor; raises KeyError if there is none."""
        wanted = Gradient(ParamInput(parameter) if isinstance(parameter, str) else parameter)
        for node, found in zip(self.results, self.output_descriptors, strict=True):
            if found == wanted and node is not None:
                return node
        raise KeyError(str(wanted))

    def replace_output(self, descriptor: Descriptor, node: torch.fx.Node) -> None:
        """Return ``node`` where the output with this descriptor was returned; raises KeyError."""
        if descriptor not in self.output_descriptors:
            raise KeyError(str(descriptor))
        position = self.output_descriptors.index(descriptor)
        results = self.results
        results[position] = node
        self.graph.output_node().args = (results,)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A new node, put right after the last of the nodes that it reads; it belongs to the phase of that node.

        Its shape is computed when the pass is over (see :meth:`apply`).
        """
        nodes: list[torch.fx.Node] = []
        torch.fx.node.map_arg((args, kwargs), nodes.append)
        last = max(nodes, key=lambda node: node._sort_key) if nodes else None
        inputs = self.graph.find_nodes(op="placeholder")
        if last is None or last.op == "placeholder":
            phase = "backward" if any(node in inputs[self.num_primals :] for node in nodes) else "forward"
            last = inputs[-1] if inputs else None
        else:
            phase = last.meta.get("phase", "backward")
        with self.graph.inserting_after(last):
            made = self.graph.call_function(target, args, kwargs)
        made.meta["phase"] = phase
        if last is not None and "user_line" in last.meta:
            made.meta["user_line"] = last.meta["user_line"]
        return made

    def nodes_of(self, phase: str) -> list[torch.fx.Node]:
        """The operators of one phase, ``"forward"`` or ``"backward"``."""
        return [node for node in self.graph.nodes if node.op == "call_function" and node.meta.get("phase") == phase]

    def with_graph(self, graph_module: torch.fx.GraphModule, record: PassRecord | None = None) -> JointGraph:
        """The same descriptors over another graph."""
        provenance = self.provenance if record is None else (*self.provenance, record)
        return dataclasses.replace(self, graph_module=graph_module, provenance=provenance)

    def apply(self, graph_pass: Pass, name: str | None = None) -> JointGraph:
        """Run a pass on a copy of the graph, fill in the shapes of new nodes, lint, and note it in ``provenance``.

        A pass may return a joint graph or a graph module, or edit the copy in place and return None. This graph stays as it
        is, also if the pass fails. Raises :class:`GraphInvalidError` if the result does not lint.
        """
        start = time.perf_counter()
        copy = self.with_graph(copy_graph(self.graph_module))
        returned = graph_pass(copy)
        if returned is None:
            returned = copy
        if isinstance(returned, torch.fx.GraphModule):
            returned = copy.with_graph(returned)
        if not isinstance(returned, JointGraph):
            raise GraphInvalidError(
                f"the pass {name or graph_pass} returned a {type(returned).__name__}", advice="return the joint graph"
            )
        returned._check_structure()
        returned.graph.eliminate_dead_code(is_impure_node=must_stay)
        returned._fill_values()
        returned.graph_module.recompile()
        returned.lint(self)
        seconds = time.perf_counter() - start
        label = name if name is not None else str(getattr(graph_pass, "__name__", type(graph_pass).__name__))
        record = PassRecord(label, seconds, len(self.graph.nodes), len(returned.graph.nodes))
        return returned.with_graph(returned.graph_module, record)

    def lint(self, before: JointGraph | None = None) -> None:
        """Raise :class:`GraphInvalidError` for a graph that is none: see the messages for what is checked."""
        self._check_structure()
        results = self.results
        for position, (node, descriptor) in enumerate(zip(results, self.output_descriptors, strict=True)):
            if node is None:
                if descriptor is not None:
                    raise GraphInvalidError(f"{descriptor} is no longer returned")
                continue
            if not isinstance(node, torch.fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
                raise GraphInvalidError(f"output {position} ({descriptor}) is not a tensor")
            self._check_promise(position, node, before)
        dependent = set(self.graph.find_nodes(op="placeholder")[self.num_primals :])
        for node in self.graph.nodes:
            if node.op == "call_function":
                schema = getattr(node.target, "_schema", None)
                if schema is not None and schema.is_mutable:
                    raise GraphInvalidError(
                        f"{node.name} = {node.target} writes to its arguments",
                        advice="use the operator that returns a new tensor",
                    )
            if any(argument in dependent for argument in node.all_input_nodes):
                dependent.add(node)
        for node in results[: self.num_forward_outputs]:
            if node in dependent:
                raise GraphInvalidError(f"the forward output {node} depends on a tangent")

    def _check_promise(self, position: int, node: torch.fx.Node, before: JointGraph | None) -> None:
        value = node.meta["val"]
        promised: Any = None
        if position >= self.num_forward_outputs:
            primal = self.graph.find_nodes(op="placeholder")[position - self.num_forward_outputs]
            promised = primal.meta["val"]
        elif before is not None:
            old = before.results[position]
            promised = None if old is None else old.meta["val"]
        if promised is not None and (value.shape != promised.shape or value.dtype != promised.dtype):
            raise GraphInvalidError(
                f"{self.output_descriptors[position]} must be {promised.dtype}{list(promised.shape)}, "
                f"but {node.name} is {value.dtype}{list(value.shape)}"
            )

    def _check_structure(self) -> None:
        try:
            self.graph.lint()
        except (RuntimeError, AssertionError, KeyError, AttributeError, TypeError) as error:
            raise GraphInvalidError(
                f"the graph does not lint: {error}", advice="insert nodes after what they read"
            ) from error
        placeholders = self.graph.find_nodes(op="placeholder")
        if len(placeholders) != len(self.input_descriptors):
            raise GraphInvalidError(
                f"the graph has {len(placeholders)} inputs and {len(self.input_descriptors)} descriptors"
            )
        for node, descriptor in zip(placeholders, self.input_descriptors, strict=True):
            if node.meta.get("desc", descriptor) != descriptor:
                raise GraphInvalidError(
                    f"the input {node.name} has changed its place: {node.meta['desc']}, not {descriptor}"
                )
        results = self.graph.output_node().args
        if len(results) != 1 or not isinstance(results[0], (list, tuple)):
            raise GraphInvalidError("the graph must return one flat list")
        if len(results[0]) != len(self.output_descriptors):
            raise GraphInvalidError(
                f"the graph returns {len(results[0])} values for {len(self.output_descriptors)} descriptors"
            )

    def _fill_values(self) -> None:
        """Compute the fake value of nodes that have none, or that a pass has changed."""
        stale: set[torch.fx.Node] = set()
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            changed = "val" not in node.meta or any(argument in stale for argument in node.all_input_nodes)
            if not changed and _signature(node) == node.meta.get("signature", _signature(node)):
                continue
            args = torch.fx.node.map_arg(node.args, lambda item: item.meta["val"])
            kwargs = torch.fx.node.map_arg(node.kwargs, lambda item: item.meta["val"])
            try:
                with private_tracing.disable_current_modes(), self.fake_mode, torch.no_grad():
                    value = node.target(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
                raise GraphInvalidError(
                    f"{node.name} = {node.target} does not accept its arguments: {error}"
                ) from error
            node.meta["val"] = value
            node.meta.setdefault("phase", "backward")
            stale.add(node)

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        *,
        memory_budget: float | int | None = None,
        numerics: str = "fast",
        **options: Any,
    ) -> CompiledGraph:
        """Stage 2: compile, and get something that is called like the captured function. See ``aot.compile_joint``."""
        from dovetail.aot.compile_joint import compile_joint

        return compile_joint(None, self, backend, options=options, memory_budget=memory_budget, numerics=numerics)

    def export(self, path: str | os.PathLike[str], values: Mapping[str, torch.Tensor] | None = None) -> Path:
        """The other stage 2: write the graph to a folder as data, with the values of inputs such as ``model.state_dict()``.
        See ``aot.export_joint``; ``dovetail.load`` reads it.
        """
        from dovetail.artefacts.export import export_joint

        return export_joint(None, self, path, values=values)

    def __str__(self) -> str:
        from dovetail.aot.graph_printer import print_joint

        return print_joint(self)


def _signature(node: torch.fx.Node) -> tuple[Any, ...]:
    return (node.target, repr(node.args), repr(node.kwargs))


def copy_graph(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph with nodes of its own; fake values are shared. Each operator remembers its arguments, to see later edits."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    output: Any = graph.graph_copy(module.graph, copies)
    graph.output(output)
    for old, new in copies.items():
        new.meta = dict(old.meta)
        if new.op == "call_function":
            new.meta["signature"] = _signature(new)
    return torch.fx.GraphModule(module, graph)
