"""Scales of ``interpolate`` that eager's kernels on a CPU do not read, and that Inductor's formulas would.

``interpolate(x, scale_factor=1.7)`` hands the scale to the kernel, beside the sizes that follow from it. The kernels ignore it in a
dimension whose size stays, and that of the nearest neighbour in two dimensions also where the size doubles. In one and in three
dimensions that one reads it always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.quirks.registry import Example, quirk
from dovetail.trace.overrides import FUNCTIONAL, Run

_aten = torch.ops.aten
_LINEAR = (_aten.upsample_linear1d.default, _aten.upsample_bilinear2d.default, _aten.upsample_trilinear3d.default)


def _resized(mode: str, dims: int, scale: float) -> Callable[[], Example]:
    return lambda: Example(
        lambda x: torch.nn.functional.interpolate(x, scale_factor=scale, mode=mode),
        [(torch.arange(3.0**dims).sin().reshape(1, 1, *[3] * dims),)],
        exact=False,
        options={"backend": "inductor"},
    )


@quirk(
    FUNCTIONAL,
    *_LINEAR,
    _aten.upsample_nearest2d.default,
    _aten.upsample_nearest2d_backward.default,
    example={
        "linear": _resized("linear", 1, 1.1),
        "bilinear": _resized("bilinear", 2, 1.1),
        "nearest": _resized("nearest", 2, 1.1),
        "doubled": _resized("nearest", 2, 2.3),
    },
)
def scale_that_is_not_read(run: Run, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Leave out the scales of dimensions in which the sizes alone decide."""
    after, is_backward = args[1], operator is _aten.upsample_nearest2d_backward.default
    before = args[2][2:] if is_backward else args[0].shape[2:]
    first = 3 if is_backward or operator in _LINEAR else 2
    if kwargs or args[0].device.type != "cpu" or len(args) != first + len(after):
        return run(operator, args, kwargs)
    factors = (1,) if operator in _LINEAR else (1, 2)
    scales = [
        None if any(new == factor * old for factor in factors) else scale
        for scale, old, new in zip(args[first:], before, after, strict=True)
    ]
    return run(operator, (*args[:first], *scales), kwargs)
