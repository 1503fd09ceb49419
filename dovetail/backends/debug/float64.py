"""The ``float64`` backend: runs every graph a second time in float64 and reports the rounding errors of the results.

``backend_options``: ``inner`` is the backend whose results are returned and compared ("aten" unless given), ``report`` is
called with a :class:`PrecisionReport` for each graph and call (it is printed to standard error unless given), ``calls`` how many
calls of each graph are run twice (1 unless given).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_arg

from dovetail.backends.common.memory import copy_of
from dovetail.backends.debug.subgraphs import UNINITIALISED, line_of, split_options
from dovetail.backends.debug.values import used_gpus
from dovetail.backends.protocol import Backend, CompiledCallable, Kind, compile_with, output_arguments
from dovetail.backends.registry import lookup_backend
from dovetail.errors import OptionError, UserLocation
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import state as private_state
from dovetail.torch_private import trees as private_trees

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
#: An operator is named when its error is this many times the rounding of its dtype.
_NOTABLE = 1e4


@dataclass(frozen=True)
class OperatorError:
    """The distance of one operator's result from the one in float64, relative to the largest value in it."""

    operator: str
    name: str
    error: float
    where: UserLocation | None

    def __str__(self) -> str:
        return f"{self.operator} ({self.name}): {self.error:.2g}" + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True)
class PrecisionReport:
    """The relative errors of one run's outputs and operators, measured by a second run in float64.

    ``first`` is the first operator whose error is far above the rounding of its dtype, None if there is none.
    """

    kind: Kind
    outputs: tuple[float, ...]
    operators: tuple[OperatorError, ...]
    first: OperatorError | None
    not_widened: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """The largest relative error of an output."""
        return max(self.outputs, default=0.0)

    def __str__(self) -> str:
        lines = [f"float64: the {self.kind} graph's outputs are off by up to {self.largest:.2g} (relative)"]
        if self.first is not None:
            lines.append(f"  first large error: {self.first}")
        worst = sorted(self.operators, key=lambda item: -item.error)[:3]
        lines += [f"  among the largest: {item}" for item in worst if item is not self.first and item.error > 0]
        if self.not_widened:
            lines.append(f"  not run in float64: {', '.join(self.not_widened)}")
        return "\n".join(lines)


class _Widened(torch.fx.Interpreter):
    """Runs a graph with every floating-point value in float64, beside a run with the values as they are.

    Integers, booleans and random numbers come from the run as it is, so that both runs take the same way.
    """

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.plain: dict[torch.fx.Node, Any] = {}
        self.errors: list[OperatorError] = []
        self.not_widened: dict[str, None] = {}
        self.first: OperatorError | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node twice and compare."""
        if n.op == "output":
            return super().run_node(n)
        if n.op in ("placeholder", "get_attr"):
            plain = self.plain[n] = super().run_node(n)
            return _widen(plain)
        args, kwargs = map_arg((n.args, n.kwargs), self.plain.__getitem__)
        plain = self.plain[n] = getattr(self, n.op)(n.target, args, kwargs)
        if n.target in UNINITIALISED or torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()):
            return _widen(plain)
        try:
            wide_args, wide_kwargs = self.fetch_args_kwargs_from_env(n)
            wide = getattr(self, n.op)(n.target, *_widen((wide_args, wide_kwargs)))
        except (RuntimeError, NotImplementedError, TypeError):
            self.not_widened[str(n.target)] = None
            return _widen(plain)
        result = _wide_where_floating(wide, plain)
        error = _relative_error(plain, result)
        if error is not None:
            found = OperatorError(str(n.target), n.name, error, line_of(n))
            self.errors.append(found)
            if self.first is None and error > _NOTABLE * _rounding(plain):
                self.first = found
        return result


def _widen(values: Any) -> Any:
    """Return the values with wider tensors, and wider dtypes in the place of dtypes."""

    def wider(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(_WIDER.get(value.dtype, value.dtype))
        return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value

    return private_trees.tree_map(wider, values)


def _wide_where_floating(wide: Any, plain: Any) -> Any:
    """Return the wide result where it is a floating-point tensor of the same shape, else the plain one."""
    if type(plain) in (tuple, list):
        return type(plain)(map(_wide_where_floating, wide, plain))
    fits = isinstance(wide, torch.Tensor) and _is_floating(plain) and wide.shape == plain.shape
    return wide if fits else _widen(plain)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _relative_error(plain: Any, wide: Any) -> float | None:
    if isinstance(plain, (tuple, list)):
        return max(filter(None, map(_relative_error, plain, wide)), default=None)
    if not _is_floating(plain) or not plain.numel():
        return None
    finite = wide.isfinite() & plain.isfinite()
    if not bool((wide.isfinite() == plain.isfinite()).all()):
        return float("inf")
    difference = torch.where(finite, (plain.to(wide.dtype) - wide).abs(), 0.0).max().item()
    size = torch.where(finite, wide.abs(), 0.0).max().item()
    return 0.0 if difference == 0 else difference / size if size else float("inf")


def _rounding(plain: Any) -> float:
    tensors = plain if isinstance(plain, (tuple, list)) else (plain,)
    dtypes = [value.dtype for value in tensors if isinstance(value, torch.Tensor) and value.dtype in _WIDER]
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=1.0)


def measure(graph: torch.fx.GraphModule, inputs: Sequence[Any], outputs: Sequence[Any], kind: Kind) -> PrecisionReport:
    """Run ``graph`` in float64 on ``inputs`` and compare the result with ``outputs``."""
    with private_operators.BelowAutograd(), private_operators.NoAutocast():
        interpreter = _Widened(graph)
        wide = interpreter.run(*inputs)
    errors = [_relative_error(one, other) for one, other in zip(outputs, wide, strict=True)]
    return PrecisionReport(
        kind,
        tuple(error or 0.0 for error in errors),
        tuple(interpreter.errors),
        interpreter.first,
        tuple(interpreter.not_widened),
    )


def _compile_twice(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
) -> CompiledCallable:
    mine, theirs = split_options(options, ("inner", "report", "calls"))
    report = mine.get("report", lambda found: print(found, file=sys.stderr))
    if not callable(report):
        raise OptionError(f"report must be callable, not {type(report).__name__}")
    inner = lookup_backend(mine.get("inner", "aten")).with_options(theirs)
    if inner.decompositions():
        raise OptionError(
            f"the float64 backend needs the graph as it was captured, and {inner.name!r} wants it decomposed",
            advice='leave inner out, and use backend="check_operators" to find out where another backend differs',
        )
    run_inner = compile_with(inner, graph, example_inputs, kind, theirs)
    left = int(mine.get("calls", 1))
    count = len(output_arguments(graph))

    def run(inputs: list[Any]) -> list[Any]:
        nonlocal left
        if left <= 0:
            return run_inner(inputs)
        left -= 1
        kept = [copy_of(value) for value in inputs]
        gpus = used_gpus()
        before = private_state.random_states(gpus)
        outputs = run_inner(inputs)
        with torch.random.fork_rng(devices=list(gpus)):
            private_state.set_random_states(before, gpus)
            report(measure(graph, kept, outputs[:count], kind))
        return outputs

    return run


FLOAT64 = Backend(
    "float64",
    _compile_twice,
    numerics="bitwise",
    takes_symbolic_shapes=False,
    description="runs every graph again in float64 and reports how far its results lie from those",
)
