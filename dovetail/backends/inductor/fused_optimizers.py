"""Decompositions of torch's fused optimizers, so that Inductor fuses the update with the backward and writes it in place.

Torch's kernels walk through the memory of parameter, gradient and state side by side, whatever their strides say. Inductor lays
out the gradient of a convolution as it likes, and the result of a fused kernel was silently wrong (torch 2.13).

An update takes the settings of the operator and the tensors of one parameter, in the order of the operator's lists (None for an
empty list), and returns their new values in the same order (None for one that stays).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dovetail.rules.optim.fused_updates import NAMES, takes_symbols

Update = Callable[..., Sequence[Tensor | None]]


def _power(base: float, step: Tensor) -> Tensor:
    # A symbolic float may be multiplied by, and no tensor be filled with it.
    one = torch.ones((), dtype=torch.float64, device=step.device)
    return torch.pow(one * base, step.to(torch.float64))


def _ascent(o: SimpleNamespace, value: Tensor, gradient: Tensor, decay: bool = True) -> Tensor:
    """Return the gradient with its sign for ``maximize`` and, with ``decay``, the weight decay in it."""
    ascent = -gradient if o.maximize else gradient
    return ascent + value * o.weight_decay if decay and o.weight_decay != 0 else ascent


def _adam(
    o: SimpleNamespace,
    value: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    largest: Tensor,
    step: Tensor,
    decoupled: bool = False,
) -> Sequence[Tensor | None]:
    ascent = _ascent(o, value, gradient, decay=not decoupled)
    start = value - (value * o.lr) * o.weight_decay if decoupled and o.weight_decay != 0 else value
    average = average + (1 - o.beta1) * (ascent - average)
    square = o.beta2 * square + (1 - o.beta2) * ascent * ascent
    first = (1 - _power(o.beta1, step)).to(value.dtype)
    second = (1 - _power(o.beta2, step)).sqrt().to(value.dtype)
    root = torch.maximum(largest, square) if o.amsgrad else square
    new = start - ((average / first) / (root.sqrt() / second + o.eps)) * o.lr
    return [new, gradient, average, square, root if o.amsgrad else None, None]


def _sgd(o: SimpleNamespace, value: Tensor, gradient: Tensor, buffer: Tensor) -> Sequence[Tensor | None]:
    ascent = _ascent(o, value, gradient)
    if o.momentum == 0:
        return [value - ascent * o.lr, gradient, None]
    # The first buffer needs memory of its own: the gradient is an output as well.
    buffer = ascent.clone() if o.is_first_step else buffer * o.momentum + ascent * (1 - o.dampening)
    return [value - (ascent + buffer * o.momentum if o.nesterov else buffer) * o.lr, gradient, buffer]


def _adagrad(
    o: SimpleNamespace, value: Tensor, gradient: Tensor, total: Tensor, step: Tensor
) -> Sequence[Tensor | None]:
    ascent = _ascent(o, value, gradient)
    total = total + ascent * ascent
    slower = (1 + (step.to(torch.float64) - 1) * o.lr_decay).to(value.dtype)
    return [value - ((ascent / slower) / (total.sqrt() + o.eps)) * o.lr, gradient, total, None]


def _decomposed(operator: Any, update: Update) -> Callable[..., tuple[list[Tensor], ...]]:
    """Return the decomposition of a fused operator into the updates of single parameters.

    A gradient is divided by ``grad_scale`` first. Where ``found_inf`` says that one is not finite, the kernels write nothing, so
    old values stay. Tensors without dimensions get one: a symbolic float combines only with tensors that have dimensions.
    """
    arguments = operator._schema.arguments
    names = [item.name for item in arguments]
    list_names = [item.name for item in arguments if str(item.type) == "List[Tensor]"]
    count = len(operator._schema.returns)

    def run(*args: Any, **kwargs: Any) -> tuple[list[Tensor], ...]:
        defaults = {item.name: item.default_value for item in arguments}
        o = SimpleNamespace(**{**defaults, **dict(zip(names, args)), **kwargs})
        lists: list[list[Tensor]] = [getattr(o, name) for name in list_names]
        is_bad = None if o.found_inf is None else o.found_inf.reshape(()) == 1
        found: tuple[list[Tensor], ...] = tuple([] for _ in range(count))
        for place in range(len(lists[0])):
            old = [values[place] if values else None for values in lists]
            shaped = [value.reshape(1) if value is not None and value.dim() == 0 else value for value in old]
            if o.grad_scale is not None:
                shaped[1] = shaped[1] / o.grad_scale
            for values, kept, new in zip(found, old, update(o, *shaped)):
                if kept is not None and new is not None:
                    new = new.reshape(kept.shape)
                    values.append(new if is_bad is None else torch.where(is_bad, kept, new))
                elif kept is not None:
                    values.append(kept)
        return found

    return run


def fused_optimizers() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of the fused optimizers that this torch has.

    >>> torch.ops.aten._fused_sgd.default in fused_optimizers()
    True
    """
    updates: dict[str, Update] = {
        "_fused_adam": _adam,
        "_fused_adamw": functools.partial(_adam, decoupled=True),
        "_fused_sgd": _sgd,
        "_fused_adagrad": _adagrad,
    }
    found: dict[Any, Callable[..., Any]] = {}
    for name, update in updates.items():
        packet = getattr(torch.ops.aten, name, None)
        known = () if packet is None else packet.overloads()
        for overload in [item for item in ("default", "tensor_lr") if item in known]:
            operator = getattr(packet, overload)
            found[operator] = _decomposed(operator, update)
            if name in NAMES:
                found[takes_symbols(name, overload)] = found[operator]
    return found
