"""``x.unfold(dimension, size, step)`` whose windows leave elements out: a write through it must leave these as they are.

Functionalisation writes back by torch's ``unfold_backward``, which sets every element that is in no window to zero (torch 2.13).
Here the windows are taken of the part that they cover, and windows with gaps between them are a view of rows, so that the rest is
put back by the views in front.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule
from dovetail.torch_private import sizes as private_sizes

_NAMES = ("dimension", "size", "step")


@method_rule("unfold")
def _unfold(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    owner = getattr(function, "__self__", None)
    given = (owner, *args) if isinstance(owner, torch.Tensor) else args
    is_method = isinstance(function, (types.BuiltinMethodType, types.MethodDescriptorType))
    if not is_method or not given or not isinstance(given[0], torch.Tensor):
        return NotImplemented
    value, numbers = given[0], {**dict(zip(_NAMES, given[1:], strict=False)), **kwargs}
    if len(given) > 4 or set(numbers) != set(_NAMES) or not all(type(item) is int for item in numbers.values()):
        return NotImplemented
    dimension, size, step = (numbers[name] for name in _NAMES)
    if value.dim() == 0 or not -value.dim() <= dimension < value.dim() or size < 0 or step <= 0:
        return NotImplemented
    dimension %= value.dim()
    length = value.shape[dimension]
    if private_sizes.is_symbolic(length) or length < size:
        return NotImplemented
    count = (length - size) // step + 1
    covered = (count - 1) * step + size
    if covered == length and (step <= size or count == 1):
        return NotImplemented

    def call(method: Any, *arguments: Any) -> Any:
        return interpreter.call_torch(method, arguments, {})

    if step <= size or count == 1:
        part = call(torch.Tensor.narrow, value, dimension, 0, covered)
        return interpreter.native(torch.Tensor.unfold, (part, dimension, size, step), {})
    if count * step > length:
        raise Break("unfold with gaps between windows, the last of which is shorter", "pad the tensor to whole steps")
    part = call(torch.Tensor.narrow, value, dimension, 0, count * step)
    rows = call(torch.Tensor.unflatten, part, dimension, (count, step))
    return call(torch.Tensor.movedim, call(torch.Tensor.narrow, rows, dimension + 1, 0, size), dimension + 1, -1)
