"""Parts of a graph, run by themselves: the tool of the debugging backends.

One run with ATen's own operators keeps every value. Any set of operators is then a graph of its own whose inputs are known
values, so that a backend can be tried on it and compared with ATen.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dovetail.backends.aten import compile_aten
from dovetail.backends.common.memory import copy_of
from dovetail.backends.debug.values import difference
from dovetail.backends.protocol import PIPELINE_OPTIONS, Backend, CompiledCallable, Kind, compile_with, output_arguments
from dovetail.errors import BackendError, UserLocation
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing

#: An operator's node with the nodes that pick from its results.
Operation = tuple[torch.fx.Node, ...]
#: Operators whose result holds whatever was in memory.
UNINITIALISED = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
) | {torch.ops.aten.empty.memory_format}


@dataclass(frozen=True)
class Fault:
    """A fault of a backend: its result "differs", it "raised", it "crashed" the process or "timed out"."""

    category: str
    problem: str

    def __str__(self) -> str:
        return self.problem


@dataclass(frozen=True, eq=False)
class Subgraph:
    """A small graph with real inputs. ``origin`` are the nodes of the larger graph that it computes."""

    graph: torch.fx.GraphModule
    inputs: list[torch.Tensor]
    origin: tuple[torch.fx.Node, ...] = ()
    kind: Kind = "inference"

    @property
    def has_outputs(self) -> bool:
        """Whether there is anything to compare."""
        return bool(output_arguments(self.graph))

    def reference(self) -> list[Any]:
        """Run ATen's own operators."""
        torch.manual_seed(0)
        return compile_aten(self.graph, kind=self.kind)([copy_of(value) for value in self.inputs])

    def compile(self, backend: Backend, options: Mapping[str, Any]) -> CompiledCallable:
        """Apply the backend's decompositions and compile."""
        fake_mode = private_tracing.FakeTensorMode()
        fakes = [fake_mode.from_tensor(value, static_shapes=True) for value in self.inputs]
        with fake_mode, torch.no_grad():
            written = make_fx(self.graph, decomposition_table=backend.decompositions() or {})(*fakes)
        line = self.origin[0].meta.get("user_line") if self.origin else None
        for node in written.graph.nodes:
            node.meta.setdefault("user_line", line)
        return compile_with(backend, written, fakes, self.kind, options)

    def try_backend(self, backend: Backend, options: Mapping[str, Any]) -> Fault | None:
        """Compare the backend with ATen's operators; None if they agree.

        A graph that ATen's own operators cannot run says nothing about the backend.
        """
        with private_state.preserved_rng_state():
            try:
                wanted = self.reference()
            except Exception:  # noqa: BLE001  (an operator may raise anything)
                return None
            torch.manual_seed(0)
            try:
                found = self.compile(backend, options)([copy_of(value) for value in self.inputs])
            except Exception as error:  # noqa: BLE001  (a backend may raise anything)
                first = str(error).split("\n  what to do")[0]
                text = first if isinstance(error, BackendError) else f"raises {type(error).__name__}: {first}"
                return Fault("raised", text)
        problem, _ = outputs_difference(self.graph, found, wanted, backend)
        return Fault("differs", problem) if problem else None


def outputs_difference(
    graph: torch.fx.GraphModule, found: Sequence[Any], wanted: Sequence[Any], backend: Backend
) -> tuple[str, UserLocation | None]:
    """Say in words how two lists of outputs of a graph differ, and at which line; uninitialised outputs are not compared."""
    for index, (entry, one, other) in enumerate(zip(output_arguments(graph), found, wanted, strict=True)):
        if isinstance(entry, torch.fx.Node) and entry.target in UNINITIALISED:
            continue
        problem = difference(one, other, backend)
        if problem:
            where = line_of(entry) if isinstance(entry, torch.fx.Node) else None
            return f"output {index} ({entry}) {problem}", where
    return "", None


class _Keeper(torch.fx.Interpreter):
    """Runs a graph and keeps a copy of every value."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.values: dict[torch.fx.Node, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n] = copy_of(result) if n.op != "output" else None
        return result


@dataclass(frozen=True, eq=False)
class GraphRun:
    """One run of a graph with every value in it."""

    graph: torch.fx.GraphModule
    values: Mapping[torch.fx.Node, Any]
    kind: Kind

    @classmethod
    def of(cls, graph: torch.fx.GraphModule, inputs: Sequence[Any], kind: Kind = "inference") -> GraphRun:
        """Run ``graph`` on copies of ``inputs``; the random generators keep their state."""
        keeper = _Keeper(graph)
        with private_state.preserved_rng_state(), private_operators.BelowAutograd(), private_operators.NoAutocast():
            keeper.run(*map(copy_of, inputs))
        return cls(graph, keeper.values, kind)

    @property
    def operations(self) -> list[Operation]:
        """The graph's operations in order."""
        return [
            (node, *(user for user in node.users if user.target is operator.getitem))
            for node in self.graph.graph.nodes
            if node.op == "call_function" and node.target is not operator.getitem
        ]

    def subgraph(self, operations: Sequence[Operation]) -> Subgraph:
        """Return the graph of these operations alone: values read from elsewhere are inputs, values read elsewhere outputs."""
        chosen = {node for operation in operations for node in operation}
        kept = {node: None for node in self.graph.graph.nodes if node in chosen}
        graph = torch.fx.Graph()
        new: dict[torch.fx.Node, torch.fx.Node] = {}
        inputs: list[torch.Tensor] = []
        for argument in (value for node in kept for value in node.all_input_nodes):
            if argument in kept or argument in new:
                continue
            value = self.values[argument]
            if not isinstance(value, torch.Tensor):
                raise BackendError(
                    f"the graph's value {argument.name} is {type(value).__name__}, and a part of a graph takes tensors",
                    advice="use dynamic=False for this function",
                )
            new[argument] = graph.placeholder(f"in_{argument.name}")
            inputs.append(value)
        outputs = []
        for node in kept:
            new[node] = graph.node_copy(node, new.__getitem__)
            read_elsewhere = any(user not in kept for user in node.users) or not node.users
            if read_elsewhere and isinstance(self.values[node], torch.Tensor):
                outputs.append(new[node])
        graph.output(outputs)
        return Subgraph(torch.fx.GraphModule({}, graph), inputs, tuple(kept), self.kind)


def line_of(node: torch.fx.Node) -> UserLocation | None:
    """Return the user's line that a node came from."""
    found = node.meta.get("user_line")
    return found if isinstance(found, UserLocation) else None


def split_options(options: Mapping[str, Any], own: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into a debugging backend's own and those for the backend that it wraps.

    The pipeline's options describe the whole graph and hold for no part of it, so they are left out.
    """
    mine = {name: options[name] for name in own if name in options}
    return mine, {name: options[name] for name in options.keys() - PIPELINE_OPTIONS - set(own)}
