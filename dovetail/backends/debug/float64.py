"""The ``float64`` backend: runs every graph a second time in float64 and reports how far the results lie apart.

``backend_options``: ``inner`` is the backend whose results are returned and compared ("aten" unless given), ``report`` is
called with a :class:`PrecisionReport` for each graph and call (it is printed to standard error unless given), ``calls`` how many
calls of each graph are run twice (1 unless given).

>>> import torch, dovetail
>>> reports = []
>>> options = {"report": reports.append}
>>> f = dovetail.compile(lambda x: (x + 1e8) - 1e8, backend="float64", backend_options=options)
>>> f(torch.tensor([1.0]))
tensor([0.])
>>> reports[0].first.operator, f"{reports[0].largest:.1f}"
('aten.sub.Tensor', '1.0')
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_arg

from dovetail.backends.debug.pieces import UNINITIALISED, line_of, split_options
from dovetail.backends.protocol import Backend, CompiledCallable, Kind, compile_with, output_arguments
from dovetail.backends.random_state import put_random_state, take_random_state
from dovetail.backends.registry import lookup_backend
from dovetail.errors import OptionError, UserLocation
from dovetail.torch_private import operators as private_operators

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
    """How far one operator's result is from the one in float64, relative to the largest value in it."""

    operator: str
    name: str
    error: float
    where: UserLocation | None

    def __str__(self) -> str:
        return f"{self.operator} ({self.name}): {self.error:.2g}" + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True)
class PrecisionReport:
    """One run of one graph in float64: relative errors of its outputs, and where they come from.

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
    """Runs a graph with every floating value in float64, beside the values of the run as it is.

    What is whole numbers or yes and no is taken from the run as it is, so that both go the same way; so are random numbers.
    """

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.as_it_is: dict[torch.fx.Node, Any] = {}
        self.errors: list[OperatorError] = []
        self.not_widened: list[str] = []
        self.first: OperatorError | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node twice and compare."""
        if n.op in ("placeholder", "get_attr"):
            value = super().run_node(n)
            self.as_it_is[n] = value
            return _widen(value)
        args, kwargs = map_arg((n.args, n.kwargs), self.as_it_is.__getitem__)
        if n.op == "output":
            return super().run_node(n)
        plain = getattr(self, n.op)(n.target, args, kwargs)
        self.as_it_is[n] = plain
        if n.target in UNINITIALISED or _is_random(n):
            return _widen_all(plain)
        try:
            wide_args, wide_kwargs = self.fetch_args_kwargs_from_env(n)
            wide = getattr(self, n.op)(n.target, _widen_dtypes(wide_args), _widen_dtypes(wide_kwargs))
        except (RuntimeError, NotImplementedError, TypeError):
            self.not_widened.append(f"{n.target}")
            return _widen_all(plain)
        result = _same_way(wide, plain)
        error = _relative_error(plain, result)
        if error is not None:
            found = OperatorError(str(n.target), n.name, error, line_of(n))
            self.errors.append(found)
            if self.first is None and error > _NOTABLE * _rounding(plain):
                self.first = found
        return result


def _is_random(node: torch.fx.Node) -> bool:
    return (
        isinstance(node.target, private_operators.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    )


def _widen(value: Any) -> Any:
    return value.to(_WIDER.get(value.dtype, value.dtype)) if isinstance(value, torch.Tensor) else value


def _widen_all(value: Any) -> Any:
    return type(value)(map(_widen, value)) if type(value) in (tuple, list) else _widen(value)


def _widen_dtypes(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, (tuple, list)):
        return type(value)(map(_widen_dtypes, value)) if type(value) in (tuple, list) else value
    if isinstance(value, dict):
        return {key: _widen_dtypes(item) for key, item in value.items()}
    return value


def _same_way(wide: Any, plain: Any) -> Any:
    """The wide result where it is a floating number of the same shape, else the plain one."""
    if isinstance(plain, (tuple, list)):
        return type(plain)(map(_same_way, wide, plain)) if type(plain) in (tuple, list) else plain
    if not isinstance(plain, torch.Tensor) or not (plain.is_floating_point() or plain.is_complex()):
        return plain
    return wide if isinstance(wide, torch.Tensor) and wide.shape == plain.shape else _widen(plain)


def _relative_error(plain: Any, wide: Any) -> float | None:
    if isinstance(plain, (tuple, list)):
        return max(filter(None, map(_relative_error, plain, wide)), default=None)
    if (
        not isinstance(plain, torch.Tensor)
        or not (plain.is_floating_point() or plain.is_complex())
        or not plain.numel()
    ):
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
    """Run ``graph`` in float64 and compare ``outputs``, which were computed from ``inputs``, with what comes out."""
    with private_operators.BelowAutograd(), private_operators.NoAutocast():
        interpreter = _Widened(graph)
        wide = interpreter.run(*inputs)
    errors = [_relative_error(one, other) for one, other in zip(outputs, wide, strict=True)]
    return PrecisionReport(
        kind,
        tuple(error or 0.0 for error in errors),
        tuple(interpreter.errors),
        interpreter.first,
        tuple(dict.fromkeys(interpreter.not_widened)),
    )


def _print(report: PrecisionReport) -> None:
    print(report, file=sys.stderr)


def _compile_twice(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
) -> CompiledCallable:
    mine, theirs = split_options(options, ("inner", "report", "calls"))
    report = mine.get("report", _print)
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
        kept = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        state = take_random_state()
        outputs = run_inner(inputs)
        after = take_random_state()
        put_random_state(state)
        try:
            report(measure(graph, kept, outputs[:count], kind))
        finally:
            put_random_state(after)
        return outputs

    return run


FLOAT64 = Backend(
    "float64",
    _compile_twice,
    numerics="bitwise",
    takes_symbolic_shapes=False,
    description="runs every graph again in float64 and reports how far its results lie from those",
)
