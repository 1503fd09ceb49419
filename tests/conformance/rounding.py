"""Whether a float32 result that is not eager's to the last bit differs by rounding only, decided in float64.

The derivative of a compiled function's backward goes to the function's inputs; eager's may pass through the function's
outputs, where it is added to what else arrives there. Mathematically that is one sum, in another order. It is told from a
wrong formula by this rule; all of it must hold:

1. Every difference is one of values, within ``torch.testing``'s tolerances for float32.
2. Eager in float64 gives what eager in float32 gives, within the same tolerances (a function that draws random numbers, or
   branches on data, may not).
3. In float64 the compiled function differs from eager, in each tensor, by at most :data:`UNITS` units in the last place of its
   largest element, or by eager's own float32 error times the ratio of the two precisions (2**-29), whichever is larger (the
   second counts where the problem is ill-conditioned). A difference of formulas would not shrink with the precision.
4. The largest relative error of the compiled float32 tensors against eager's float64 is no larger than that of eager's own
   float32 tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.differential import Difference, clone_inputs, close, max_abs_diff, tensors_in

UNITS = 64
#: How much larger than eager's own error that of generated kernels may be.
FACTOR = 8


def in_double(values: Any) -> Any:
    """A copy with float64 where there was float32, types given as arguments included."""

    def one(leaf: Any) -> Any:
        if leaf is torch.float32:
            return torch.float64
        if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32:
            return leaf.detach().double().requires_grad_(leaf.requires_grad)
        return leaf

    return tree_map(one, clone_inputs(values))


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _worst(tensors: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The largest error relative to the largest element of its tensor."""
    sizes = [_size(tensor) for tensor in exact]
    errors = [max_abs_diff(one, other) for one, other in zip(tensors, exact, strict=True)]
    return max((error / size for error, size in zip(errors, sizes, strict=True) if size), default=0.0)


def is_rounding(
    found: Sequence[Difference],
    eager: Any,
    compiled: Any,
    run_eager: Callable[[], Any],
    run_compiled: Callable[[], Any],
) -> bool:
    """The rule above. ``eager`` and ``compiled`` are all that was seen in float32; the two functions run it again in float64."""
    if any(difference.kind != "values, by rounding" for difference in found):
        return False
    try:
        exact, again = run_eager(), run_compiled()
    except Exception:
        return False
    ours, theirs, right, made = (
        [tensor for tensor in tensors_in(part) if tensor.is_floating_point()]
        for part in (compiled, eager, exact, again)
    )
    if not len(ours) == len(theirs) == len(right) == len(made):
        return False
    if any(one.shape != other.shape for one, other in zip(theirs, right, strict=True)):
        return False
    if not all(close(one, other.to(one.dtype)) for one, other in zip(theirs, right, strict=True)):
        return False
    unit = torch.finfo(torch.float64).eps
    ratio = unit / torch.finfo(torch.float32).eps
    for given, one, other in zip(theirs, right, made, strict=True):
        if max_abs_diff(one, other) > max(UNITS * unit * _size(one), ratio * max_abs_diff(given, one)):
            return False
    return _worst(ours, right) <= _worst(theirs, right)


def is_tolerable(
    found: Sequence[Difference],
    eager: Any,
    compiled: Any,
    run_eager: Callable[[], Any],
    run_compiled: Callable[[], Any],
) -> bool:
    """Whether generated kernels, which compute in another order, differ from eager by rounding only.

    Either every difference is within ``torch.testing``'s tolerances for its dtype, or a float64 run justifies it: in float64 both
    agree within the tolerances for float64, and the error of each compiled float32 tensor is at most :data:`FACTOR` times that of
    eager's, or some units of the largest element.
    """
    if any(not difference.kind.startswith("values") for difference in found):
        return False
    if all(difference.kind == "values, by rounding" for difference in found):
        return True
    try:
        exact, again = run_eager(), run_compiled()
    except Exception:
        return False
    ours, theirs, right, made = (tensors_in(part) for part in (compiled, eager, exact, again))
    if not len(ours) == len(theirs) == len(right) == len(made):
        return False
    unit = torch.finfo(torch.float32).eps
    for one, other, exactly, wide in zip(ours, theirs, right, made, strict=True):
        if not close(exactly, wide):
            return False
        allowed = max(FACTOR * max_abs_diff(other, exactly), UNITS * unit * _size(exactly))
        if not close(exactly.to(one.dtype), one) and not max_abs_diff(one, exactly) <= allowed:
            return False
    return True
