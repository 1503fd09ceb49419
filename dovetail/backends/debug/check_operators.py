"""The ``check_operators`` backend: compares every operator, compiled by another backend, with eager; names the first that differs.

``backend_options``: ``inner`` is the backend to check (the default backend unless given), ``calls`` how many calls of each
graph are checked (all, unless given); the rest goes to the inner backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.backends.aten import compile_aten
from dovetail.backends.common.memory import copy_of
from dovetail.backends.debug.subgraphs import (
    UNINITIALISED,
    GraphRun,
    Operation,
    line_of,
    outputs_difference,
    split_options,
)
from dovetail.backends.protocol import Backend, CompiledCallable, Kind, output_arguments
from dovetail.backends.registry import lookup_backend
from dovetail.errors import BackendError
from dovetail.torch_private import state as private_state

Key = tuple[Any, ...]


class _Checker:
    """Compiles operators one by one, each kind of call once, and compares."""

    def __init__(self, inner: Backend, options: Mapping[str, Any]) -> None:
        self.inner = inner
        self.options = options
        self._compiled: dict[Key, CompiledCallable] = {}

    def check(self, graph: torch.fx.GraphModule, inputs: list[Any], kind: Kind) -> None:
        """Raise :class:`BackendError` for the first operator that differs, or for all of them together."""
        run = GraphRun.of(graph, inputs, kind)
        for operation in run.operations:
            problem = _assumption_problem(run, operation) or self._operator_problem(run, operation)
            if problem:
                node = operation[0]
                raise BackendError(
                    f"operator {node.target} ({node.name} in the {kind} graph) through backend {self.inner.name!r}: {problem}",
                    where=line_of(node),
                    advice='write this operator in another way, or use backend="aten"; '
                    'backend="bisect" writes a script that shows it',
                )
        if run.operations and all(isinstance(value, torch.Tensor) for value in inputs):
            self._check_whole(run)

    def _operator_problem(self, run: GraphRun, operation: Operation) -> str:
        """Say how one operator differs on the values of the run; empty if it does not."""
        subgraph = run.subgraph([operation])
        if operation[0].target in UNINITIALISED or not subgraph.has_outputs:
            return ""
        layouts = [(value.dtype, tuple(value.shape), value.stride(), value.device) for value in subgraph.inputs]
        key = (str(subgraph.graph.graph), *layouts)
        with private_state.preserved_rng_state():
            wanted = subgraph.reference()
            torch.manual_seed(0)
            try:
                if key not in self._compiled:
                    self._compiled[key] = subgraph.compile(self.inner, self.options)
                found = self._compiled[key]([copy_of(value) for value in subgraph.inputs])
            except Exception as error:  # noqa: BLE001  (a backend may raise anything)
                return f"raises {type(error).__name__}: {str(error).splitlines()[0]}"
        return outputs_difference(subgraph.graph, found, wanted, self.inner)[0]

    def _check_whole(self, run: GraphRun) -> None:
        """Raise if the whole graph differs: a backend may fuse operators wrongly that are right one by one."""
        fault = run.subgraph(run.operations).try_backend(self.inner, self.options)
        if fault:
            entries = [item for item in output_arguments(run.graph) if isinstance(item, torch.fx.Node)]
            raise BackendError(
                f"every operator of the {run.kind} graph is right by itself, but not all of them together, through backend "
                f"{self.inner.name!r}: {fault}",
                where=line_of(entries[0]) if entries else None,
                advice='use backend="bisect", which finds the operators that must be together',
            )


def _assumption_problem(run: GraphRun, operation: Operation) -> str:
    """Say how an operator's real result differs from its fake one while tracing; empty if it does not."""
    for node in operation:
        assumed, real = node.meta.get("val"), run.values[node]
        if not isinstance(assumed, torch.Tensor) or not isinstance(real, torch.Tensor):
            continue
        for name in ("dtype", "shape"):
            if getattr(assumed, name) != getattr(real, name):
                return f"gives {name} {getattr(real, name)}, and {getattr(assumed, name)} was assumed while tracing"
    return ""


def _compile_checked(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
) -> CompiledCallable:
    mine, theirs = split_options(options, ("inner", "calls"))
    checker = _Checker(lookup_backend(mine.get("inner")).with_options(theirs), theirs)
    left = mine.get("calls")
    plain = compile_aten(graph, example_inputs, kind=kind)

    def run(inputs: list[Any]) -> list[Any]:
        nonlocal left
        if left is None or left > 0:
            left = None if left is None else left - 1
            checker.check(graph, list(inputs), kind)
        return plain(inputs)

    return run


CHECK_OPERATORS = Backend(
    "check_operators",
    _compile_checked,
    numerics="bitwise",
    takes_symbolic_shapes=False,
    description="runs every operator by itself through another backend and names the first that differs from eager",
)
