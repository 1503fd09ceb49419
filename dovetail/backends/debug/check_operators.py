"""The ``check_operators`` backend: every operator, compiled by another backend, against eager; the first that differs is named.

``backend_options``: ``inner`` is the backend to check (the default backend unless given), ``calls`` how many calls of each
graph are checked (all, unless given); the rest goes to the inner backend.

>>> import torch, dovetail
>>> checked = dovetail.compile(torch.sin, backend="check_operators", backend_options={"inner": "aten"})
>>> checked(torch.zeros(2))
tensor([0., 0.])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.backends.aten import compile_aten
from dovetail.backends.debug.pieces import UNINITIALISED, Piece, Recording, Unit, copy_of, line_of, split_options
from dovetail.backends.protocol import Backend, CompiledCallable, Kind, output_arguments
from dovetail.backends.registry import lookup_backend
from dovetail.errors import BackendError
from dovetail.torch_private import state as private_state

Key = tuple[Any, ...]


class _OperatorCheck:
    """Compiles operators one by one, each kind of call once, and compares."""

    def __init__(self, inner: Backend, options: Mapping[str, Any]) -> None:
        self.inner = inner
        self.options = options
        self._compiled: dict[Key, CompiledCallable] = {}

    def check(self, recording: Recording, unit: Unit) -> str:
        """What is wrong with one operator on the recorded values; empty if nothing is."""
        node = unit[0]
        problem = _promise_problem(unit, recording)
        if problem or node.target in UNINITIALISED:
            return problem
        piece = recording.piece([unit])
        if not piece.has_outputs:
            return ""
        key = (str(piece.graph.graph), *(_layout(value) for value in piece.inputs))
        with private_state.preserved_rng_state():
            wanted = piece.reference()
            torch.manual_seed(0)
            try:
                run = self._compiled.get(key) or self._compiled.setdefault(key, piece.compile(self.inner, self.options))
                found = run([copy_of(value) for value in piece.inputs])
            except Exception as error:  # noqa: BLE001  (a backend may raise anything)
                return f"raises {type(error).__name__}: {str(error).splitlines()[0]}"
        return piece.compare(found, wanted, self.inner)


def _layout(value: torch.Tensor) -> Key:
    return value.dtype, tuple(value.shape), value.stride(), value.device


def _promise_problem(unit: Unit, recording: Recording) -> str:
    """Whether the operator's real result is what its fake one was while tracing."""
    for node in unit:
        promised, real = node.meta.get("val"), recording.values[node]
        if not isinstance(promised, torch.Tensor) or not isinstance(real, torch.Tensor):
            continue
        for name in ("dtype", "shape"):
            if getattr(promised, name) != getattr(real, name):
                return f"gives {name} {getattr(real, name)}, and {getattr(promised, name)} was assumed while tracing"
    return ""


def _compile_checked(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
) -> CompiledCallable:
    mine, theirs = split_options(options, ("inner", "calls"))
    check = _OperatorCheck(lookup_backend(mine.get("inner")).with_options(theirs), theirs)
    left = mine.get("calls")
    plain = compile_aten(graph, example_inputs, kind=kind)

    def run(inputs: list[Any]) -> list[Any]:
        nonlocal left
        if left is None or left > 0:
            left = None if left is None else left - 1
            _check_all(graph, list(inputs), kind, check)
        return plain(inputs)

    return run


CHECK_OPERATORS = Backend(
    "check_operators",
    _compile_checked,
    numerics="bitwise",
    takes_symbolic_shapes=False,
    description="runs every operator by itself through another backend and names the first that differs from eager",
)


def _check_all(graph: torch.fx.GraphModule, inputs: list[Any], kind: Kind, check: _OperatorCheck) -> None:
    recording = Recording.of(graph, inputs, kind)
    for unit in recording.units:
        problem = check.check(recording, unit)
        if problem:
            node = unit[0]
            raise BackendError(
                f"operator {node.target} ({node.name} in the {kind} graph) through backend {check.inner.name!r}: {problem}",
                where=line_of(node),
                advice='write this operator in another way, or use backend="aten"; backend="bisect" writes a script that shows it',
            )
    _check_whole(recording, inputs, check)


def _check_whole(recording: Recording, inputs: list[Any], check: _OperatorCheck) -> None:
    """Operators that are right one by one may be joined wrongly."""
    graph = recording.graph
    if not recording.units or not all(isinstance(value, torch.Tensor) for value in inputs):
        return
    whole: Piece = recording.piece(recording.units)
    finding = whole.try_backend(check.inner, check.options)
    if finding:
        entry = next((item for item in output_arguments(graph) if isinstance(item, torch.fx.Node)), None)
        raise BackendError(
            f"every operator of the {recording.kind} graph is right by itself, but not all of them together, through backend "
            f"{check.inner.name!r}: {finding}",
            where=None if entry is None else line_of(entry),
            advice='use backend="bisect", which finds the operators that must be together',
        )
