"""Functions of torch whose C++ asks for plain sizes, as an operator that takes symbolic ones.

The operator is the one that the function calls in the end, so that its numbers are the same and a backend fuses it as ever. What
else the function does, how the size of its result follows above all, is said here as torch's C++ says it. With plain sizes nothing
changes, and for arguments that are not known here torch's own function is called.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import method_rule
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


def _with_owner(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    owner = getattr(function, "__self__", None)
    return (owner, *args) if isinstance(owner, torch.Tensor) else args


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
    if not _is_symbolic(input) or (size is None) is (scale_factor is None) or (recompute_scale_factor and size):
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


@method_rule("max_pool1d", "max_pool1d_with_indices")
def _max_pool(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _pooled(interpreter, *args, **kwargs)
    if found is None:
        return NotImplemented
    always_indices = function.__name__ == "max_pool1d_with_indices"
    with_indices = always_indices or kwargs.get("return_indices", args[6] if len(args) > 6 else False)
    return found if with_indices else found[0]


def _pooled(
    interpreter: TracingInterpreter,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Any, ...] | None:
    """Maxima and indices, by the operator for images of one row."""
    if not _is_symbolic(input) or input.dim() not in (2, 3):
        return None
    stride = kernel_size if stride is None or stride in ((), []) else stride
    given = [
        list(item) if isinstance(item, (list, tuple)) else [item] for item in (kernel_size, stride, padding, dilation)
    ]
    if not all(len(item) == 1 and type(item[0]) is int for item in given) or given[1][0] <= 0:
        return None
    kernel, step, border, spread = ([one, item[0]] for one, item in zip((1, 1, 0, 1), given, strict=True))
    image = interpreter.call_torch(torch.Tensor.unsqueeze, (input, -2), {})
    operator_of_images = _aten.max_pool2d_with_indices.default
    results = interpreter.call_torch(operator_of_images, (image, kernel, step, border, spread, ceil_mode), {})
    return tuple(interpreter.call_torch(torch.Tensor.squeeze, (item, -2), {}) for item in results)


@method_rule("rand", "randn", "randint")
def _random(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "generator" not in kwargs or kwargs["generator"] is not None:
        return NotImplemented
    # The same numbers; only the operator without the argument takes symbolic sizes.
    return interpreter.call_torch(function, args, {name: item for name, item in kwargs.items() if name != "generator"})


@method_rule("sgn")
def _sign(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same numbers; the gradient of ``sgn`` are zeros without memory, which have a plain size."""
    given = _with_owner(function, args)
    if len(given) != 1 or kwargs or not _is_symbolic(given[0]) or given[0].is_complex():
        return NotImplemented
    return interpreter.call_torch(torch.sign, given, {})


@method_rule("masked_select")
def _selected(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By an index: the gradient of ``masked_select`` itself works out the size of both arguments together as plain numbers."""
    given = _with_owner(function, args)
    is_known = len(given) == 2 and not kwargs and any(map(_is_symbolic, given)) and given[1].dtype is torch.bool
    if not is_known or not (given[0].requires_grad and torch.is_grad_enabled()):
        return NotImplemented
    return interpreter.call_torch(
        torch.Tensor.__getitem__, interpreter.call_torch(torch.broadcast_tensors, given, {}), {}
    )


def _covariance(interpreter: TracingInterpreter, input: Any, correction: Any = 1) -> Any:
    is_known = isinstance(input, torch.Tensor) and 0 < input.dim() < 3 and type(correction) is int
    if not is_known or not (input.is_floating_point() or input.is_complex()):
        return None

    def call(function: Any, *arguments: Any, **keywords: Any) -> Any:
        return interpreter.call_torch(function, arguments, keywords)

    rows = input if input.dim() == 2 else call(torch.unsqueeze, input, 0)
    if not rows.shape[1] > max(correction, 0):
        return None
    count = call(torch.scalar_tensor, rows.shape[1], dtype=torch.int64, device=input.device)
    mean = call(torch.div, call(torch.sum, rows, [1]), count)
    centred = call(torch.sub, rows, call(torch.unsqueeze, mean, 1))
    products = call(torch.mm, centred, call(torch.conj, call(torch.t, centred)))
    return call(torch.squeeze, call(torch.true_divide, products, call(torch.sub, count, correction)))


@method_rule("cov")
def _cov(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With plain sizes too: the C++ compares numbers in tensors, which a trace does not always know."""
    given = _with_owner(function, args)
    is_plain = len(given) == 1 and not kwargs.keys() - {"correction"}
    found = _covariance(interpreter, *given, **kwargs) if is_plain else None
    return NotImplemented if found is None else found


@method_rule("corrcoef")
def _corrcoef(interpreter: TracingInterpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """See the covariance."""
    given = _with_owner(function, args)
    is_real = len(given) == 1 and not kwargs and isinstance(given[0], torch.Tensor) and not given[0].is_complex()
    found = _covariance(interpreter, *given) if is_real else None
    if found is None or found.dim() != 2:
        return NotImplemented
    deviation = interpreter.call_torch(torch.sqrt, (interpreter.call_torch(torch.diag, (found,), {}),), {})
    for shape in ([-1, 1], [1, -1]):
        by = interpreter.call_torch(torch.Tensor.view, (deviation, shape), {})
        found = interpreter.call_torch(torch.div, (found, by), {})
    return interpreter.call_torch(torch.clip, (found, -1, 1), {})
