"""Operators made of others, in ``torch.inference_mode``: there they come to the tracer whole, and autograd takes none apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.quirks.registry import Example, quirk
from dovetail.torch_private import kernels as private_kernels
from dovetail.trace.overrides import EVERY, FUNCTIONAL, Run
from dovetail.trace.trace import open_trace

_aten = torch.ops.aten
#: Kernels round in another way on other CPUs: each of these shows the fault on some.
_WEIGHTS = [
    torch.nn.Parameter(torch.linspace(-1, 1, rows * columns).sin().reshape(rows, columns))
    for rows, columns in ((120, 40), (5, 300))
]


def _linear_in_inference_mode(*inputs: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        pairs = zip(inputs, _WEIGHTS, strict=True)
        return [torch.nn.functional.linear(x.cos().transpose(0, 1), weight) for x, weight in pairs]


@quirk(
    FUNCTIONAL,
    _aten.linear.default,
    example=lambda: Example(
        _linear_in_inference_mode,
        [tuple(torch.arange(float(math.prod(shape))).reshape(shape) for shape in ((2, 30, 40), (3, 7, 300)))],
        order=0,
    ),
)
def linear_by_its_parts(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let ``linear`` find in inference mode, too, that its weight requires a gradient, by which it chooses its kernel.

    The transposed weight says so where a view knows what it is a view of. Outside of inference mode, autograd takes it apart.
    """
    if not torch.is_inference_mode_enabled():
        return NotImplemented
    with private_kernels.noting_views():
        return run(operator, args, kwargs)


def _enlarged(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear")


def _not_dropped(x: torch.Tensor) -> bool:
    with torch.inference_mode():
        return torch.nn.functional.dropout(x, training=False) is x


@quirk(
    EVERY,
    example={
        "rounding": lambda: Example(_enlarged, [(torch.arange(9.0).sin().reshape(1, 1, 3, 3),)], order=0),
        "aliasing": lambda: Example(_not_dropped, [(torch.ones(2),)], order=0),
    },
)
def parts_of_eager(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Take an operator apart by eager's kernel; torch prefers formulas in Python, which round in another way, or copy."""
    trace = open_trace()
    if trace is None or trace.settings.shapes.has_symbols or not torch.is_inference_mode_enabled():
        return NotImplemented
    kernel = private_kernels.kernel_of_parts(operator) if private_kernels.has_formula(operator) else None
    if kernel is None:
        return NotImplemented
    with trace.functional_mode:
        return kernel(*args, **kwargs)
