"""The joint graph of stage 1: forward and backward in one ``torch.fx`` graph, described input by input, output by output."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.check import check_joint
from dovetail.aot.descriptors import Descriptor
from dovetail.runtime.spec import RuntimeSpec
from dovetail.trace import Program

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.aot.compiled_graph import CompiledGraph

Pass = Callable[["JointGraph"], "JointGraph | torch.fx.GraphModule | None"]
Values = Mapping[str, torch.Tensor] | Literal["current"]

_VERBS = {
    "apply": "dovetail.passes.editing:apply_pass",
    "call": "dovetail.passes.editing:insert_call",
    "placeholder": "dovetail.passes.editing:find_placeholder",
    "gradient_of": "dovetail.passes.editing:find_gradient",
    "replace_output": "dovetail.passes.editing:replace_output",
    "compile": "dovetail.face.loading:compile_joint",
    "export": "dovetail.artefacts.export:export_joint",
    "print": "dovetail.reports.joint_graphs:print_joint",
    "summarise": "dovetail.reports.joint_graphs:summarise",
    "show": "dovetail.reports.joint_graphs:show_in_notebook",
}
"""The functions behind the methods of a joint graph, by name: as data, it imports none of its readers."""


def _verb(name: str) -> Callable[..., Any]:
    module, _, function = _VERBS[name].partition(":")
    return getattr(importlib.import_module(module), function)


@dataclass(frozen=True)
class PassRecord:
    """Who made a version of a graph: name, seconds it took, nodes before and after."""

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
    ``num_forward_outputs`` forward outputs, then one gradient per primal, None where there is none. Each node's ``meta`` is
    described in :mod:`dovetail.aot.nodes`, the rules that a graph keeps at :class:`dovetail.aot.check.JointGraphError`.

    ``capture`` is the frontend's result, with guards, effects and the recipe of the call's result. ``program`` computes the
    forward outputs by the torch calls of the user's function. ``inexact`` names the autograd nodes whose traced formula differs
    from eager's in the last bit. ``made_by`` says how long the capture took, ``provenance`` which passes have edited the graph.
    """

    graph_module: torch.fx.GraphModule
    input_descriptors: tuple[Descriptor, ...]
    output_descriptors: tuple[Descriptor | None, ...]
    num_primals: int
    num_forward_outputs: int
    spec: RuntimeSpec
    fake_mode: Any
    capture: CaptureResult
    provenance: tuple[PassRecord, ...] = ()
    inexact: tuple[str, ...] = ()
    is_exact: bool = False
    program: Program | None = None
    made_by: PassRecord | None = None

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

    @property
    def primals(self) -> list[torch.fx.Node]:
        """The placeholders of the forward's inputs."""
        return self.graph.find_nodes(op="placeholder")[: self.num_primals]

    @property
    def tangents(self) -> list[torch.fx.Node]:
        """The placeholders of the incoming gradients."""
        return self.graph.find_nodes(op="placeholder")[self.num_primals :]

    @property
    def gradients(self) -> list[torch.fx.Node | None]:
        """The gradient of each primal."""
        return self.results[self.num_forward_outputs :]

    def placeholder(self, descriptor: Descriptor) -> torch.fx.Node:
        """The input node with this descriptor; raises KeyError."""
        return _verb("placeholder")(self, descriptor)

    def gradient_of(self, parameter: str | Descriptor) -> torch.fx.Node:
        """The node of a gradient, by the parameter's name or the input's descriptor; raises KeyError if there is none."""
        return _verb("gradient_of")(self, parameter)

    def replace_output(self, descriptor: Descriptor, node: torch.fx.Node) -> None:
        """Return ``node`` where the output with this descriptor was returned; raises KeyError."""
        _verb("replace_output")(self, descriptor, node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A new node behind the last of those that it reads, in their phase; a tensor that it is given becomes a constant.

        Its shape is computed when the pass is over (see :meth:`apply`).
        """
        return _verb("call")(self, target, args, kwargs)

    def nodes_of(self, phase: str) -> list[torch.fx.Node]:
        """The operators of one phase, ``"forward"`` or ``"backward"``."""
        return [node for node in self.graph.nodes if node.op == "call_function" and node.meta.get("phase") == phase]

    def with_graph(self, graph_module: torch.fx.GraphModule, record: PassRecord | None = None) -> JointGraph:
        """A joint graph with these descriptors over another graph."""
        provenance = self.provenance if record is None else (*self.provenance, record)
        return dataclasses.replace(self, graph_module=graph_module, provenance=provenance)

    def apply(self, graph_pass: Pass, name: str | None = None) -> JointGraph:
        """Run a pass on a copy of the graph, fill in the shapes of new nodes, check, and note it in ``provenance``.

        A pass may return a joint graph or a graph module, or edit the copy in place and return None. This graph stays as it
        is, also if the pass fails. Raises :class:`GraphInvalidError` if the result breaks a rule.
        """
        return _verb("apply")(self, graph_pass, name)

    def lint(self) -> None:
        """Raise :class:`dovetail.aot.check.JointGraphError` for the first rule that the graph breaks."""
        check_joint(self)

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        *,
        memory_budget: float | int | None = None,
        numerics: str = "fast",
        **options: Any,
    ) -> CompiledGraph:
        """Stage 2: compile, and get something that is called like the captured function. See ``aot.compile_joint``."""
        settings = {"options": options, "memory_budget": memory_budget, "numerics": numerics}
        return _verb("compile")(None, self, backend, **settings)

    def export(self, path: str | os.PathLike[str], values: Values | None = None, *, kernels: bool = False) -> Path:
        """The other stage 2: write the graph, with values such as ``model.state_dict()``, to a folder. See ``aot.export_joint``."""
        return _verb("export")(None, self, path, values=values, kernels=kernels)

    def __str__(self) -> str:
        return str(_verb("print")(self))

    def __repr__(self) -> str:
        return f"<{_verb('summarise')(self)}>"

    def _repr_markdown_(self) -> str:
        return str(_verb("show")(self))
