"""Functions of torch whose C++ asks for plain sizes, as an operator that takes symbolic ones.

The function calls this operator in the end, so that its numbers are the same and a backend fuses it as ever. The rest of the
function, above all how the size of its result follows, is written here as in torch's C++. With plain sizes nothing changes, and for
arguments that are not known here torch's own function is called.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import method_rule
from dovetail.rules.sizes.number_tensors import with_owner
from dovetail.torch_private import sizes as private_sizes

_aten = torch.ops.aten
# By mode and number of dimensions of the image; those of the first table take no ``align_corners``.
_NEAREST = {
    **{("nearest", rank): f"upsample_nearest{rank}d" for rank in (1, 2, 3)},
    **{("nearest-exact", rank): f"_upsample_nearest_exact{rank}d" for rank in (1, 2, 3)},
}
_SMOOTH = {
    ("linear", 1): "upsample_linear1d",
    ("bilinear", 2): "upsample_bilinear2d",
    ("trilinear", 3): "upsample_trilinear3d",
    ("bicubic", 2): "upsample_bicubic2d",
}
_ANTIALIASED = {("bilinear", 2): "_upsample_bilinear2d_aa", ("bicubic", 2): "_upsample_bicubic2d_aa"}


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and private_sizes.has_symbols(value)


@method_rule("interpolate")
def _interpolate(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = _resized(interpreter, *args, **kwargs) if function is torch.nn.functional.interpolate else None
    return NotImplemented if call is None else interpreter.call_torch(call[0], call[1], {})


def _resized(
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
    if not isinstance(input, torch.Tensor) or (size is None) is (scale_factor is None):
        return None
    if recompute_scale_factor and size:
        return None
    rank = input.dim() - 2
    name = _ANTIALIASED.get((mode, rank)) if antialias else {**_NEAREST, **_SMOOTH}.get((mode, rank))
    is_nearest = (mode, rank) in _NEAREST
    if name is None or (align_corners is not None and is_nearest):
        return None
    given = scale_factor if size is None else size
    numbers = list(given) if isinstance(given, (list, tuple)) else [given] * rank
    if len(numbers) != rank or not all(type(item) in (int, float, torch.SymInt) for item in numbers):
        return None
    if not _is_symbolic(input) and not any(map(private_sizes.is_symbolic, numbers)):
        return None
    sizes, scales = numbers, [None] * rank
    if size is None:
        factors = [float(item) for item in numbers]
        sizes = [_scaled(interpreter, *pair) for pair in zip(input.shape[2:], factors, strict=True)]
        # Otherwise the factor follows from the sizes.
        scales = scales if recompute_scale_factor else factors  # type: ignore[assignment]
    corners = () if is_nearest else (bool(align_corners),)
    return getattr(_aten, name).default, (input, sizes, *corners, *scales)


def _scaled(interpreter: TracingInterpreter, size: Any, scale: float) -> Any:
    """``int(size * scale)``, computed in double precision and cut off."""
    if type(size) is int:
        return int(size * scale)
    return interpreter.call(int, (interpreter.operate(operator.mul, size, scale),), {})


@method_rule("rand", "randn", "randint")
def _random(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "generator" not in kwargs or kwargs["generator"] is not None:
        return NotImplemented
    # The same numbers; only the operator without the argument takes symbolic sizes.
    return interpreter.call_torch(function, args, {name: item for name, item in kwargs.items() if name != "generator"})


@method_rule("fill_diagonal_")
def _fill_diagonal(
    interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # Torch's function writes to the same view of a matrix, which it makes of plain sizes and strides.
    match with_owner(function, args):
        case (matrix, int() | float() as value) if not kwargs and _is_symbolic(matrix) and matrix.dim() == 2:
            diagonal = interpreter.call_torch(torch.Tensor.diagonal, (matrix,), {})
            interpreter.call_torch(torch.Tensor.fill_, (diagonal, value), {})
            return matrix
    return NotImplemented
