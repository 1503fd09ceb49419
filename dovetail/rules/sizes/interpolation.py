"""``torch.nn.functional.interpolate`` of a tensor with symbolic sizes.

What it calls asks for plain sizes, of the batch too, and so would hold the graph to today's. The operator underneath takes
symbolic ones; how the size of its result follows from scale factors is said here in Python, as torch's C++ says it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import rule
from dovetail.torch_private import sizes as private_sizes

# By mode and number of dimensions of the image; those of the first line take no ``align_corners``.
_NEAREST = {
    ("nearest", 1): "upsample_nearest1d",
    ("nearest", 2): "upsample_nearest2d",
    ("nearest", 3): "upsample_nearest3d",
    ("nearest-exact", 1): "_upsample_nearest_exact1d",
    ("nearest-exact", 2): "_upsample_nearest_exact2d",
    ("nearest-exact", 3): "_upsample_nearest_exact3d",
}
_SMOOTH = {
    ("linear", 1): "upsample_linear1d",
    ("bilinear", 2): "upsample_bilinear2d",
    ("trilinear", 3): "upsample_trilinear3d",
    ("bicubic", 2): "upsample_bicubic2d",
}
_ANTIALIASED = {"bilinear": "_upsample_bilinear2d_aa", "bicubic": "_upsample_bicubic2d_aa"}


@rule(torch.nn.functional.interpolate)
def _interpolate(interpreter: TracingInterpreter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = _operator_call(interpreter, *args, **kwargs)
    if call is None:
        return interpreter.call_torch(torch.nn.functional.interpolate, args, kwargs)
    return interpreter.call_torch(call[0], call[1], {})


def _operator_call(
    interpreter: TracingInterpreter,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> tuple[Any, tuple[Any, ...]] | None:
    """The operator and its arguments; None where ``interpolate`` itself does it, or refuses it."""
    if not isinstance(input, torch.Tensor) or (recompute_scale_factor and size is not None):
        return None
    if (size is None) is (scale_factor is None) or not private_sizes.has_symbols(input):
        return None
    dimensions = input.dim() - 2
    name = _NEAREST.get((mode, dimensions)) or _SMOOTH.get((mode, dimensions))
    if antialias:
        name = _ANTIALIASED.get(mode) if dimensions == 2 else None
    if name is None or (align_corners is not None and (mode, dimensions) in _NEAREST):
        return None
    if size is not None:
        sizes = list(size) if isinstance(size, (list, tuple)) else [size] * dimensions
        scales: list[float | None] = [None] * dimensions
        known = all(type(item) in (int, torch.SymInt) for item in sizes)
    else:
        scales = list(scale_factor) if isinstance(scale_factor, (list, tuple)) else [scale_factor] * dimensions
        known = all(type(item) in (int, float) for item in scales)
        factors = [float(item) for item in scales] if known else []  # type: ignore[arg-type]
        scales = [*factors]
        sizes = [_scaled(interpreter, *pair) for pair in zip(input.shape[2:], factors, strict=False)]
    if not known or len(sizes) != dimensions or len(scales) != dimensions:
        return None
    if recompute_scale_factor:
        # The factor that is used follows from the sizes then, not the one that was given.
        scales = [None] * dimensions
    corners = () if (mode, dimensions) in _NEAREST else (bool(align_corners),)
    return getattr(torch.ops.aten, name).default, (input, sizes, *corners, *scales)


def _scaled(interpreter: TracingInterpreter, size: Any, scale: float) -> Any:
    """``int(size * scale)``, computed in double precision and cut off."""
    if type(size) is int:
        return int(size * scale)
    product = interpreter.operate(operator.mul, size, scale)
    return interpreter.call(int, (product,), {})
