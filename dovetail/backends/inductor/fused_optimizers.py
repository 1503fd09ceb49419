"""Decompositions of torch's fused optimizers, so that Inductor fuses the update with the backward and writes it in place.

Torch's kernels walk through the memory of parameter, gradient and state side by side, whatever their strides say. Inductor lays
out the gradient of a convolution as it likes, and the result of a fused kernel was silently wrong (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.trace.fused_updates import NAMES, takes_symbols

#: The update of one parameter: new values for the parameter, its gradient and its state, in the order of the arguments.
Update = Callable[..., Sequence[Tensor]]
Lists = tuple[list[Tensor], ...]


def _for_each(
    update: Update,
    lists: Sequence[list[Tensor]],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *more: list[Tensor],
) -> Lists:
    """Run the update of one parameter for each entry of the lists; ``more`` are lists that it only reads.

    A gradient is divided by ``grad_scale`` first. Where ``found_inf`` says that one is not finite, the kernels write nothing, so
    old values stay. Tensors without dimensions get one: a symbolic float combines only with tensors that have dimensions.
    """
    is_bad = None if found_inf is None else found_inf.reshape(()) == 1
    found: Lists = tuple([] for _ in lists)
    for place, old in enumerate(zip(*lists, strict=True)):
        parameter, gradient, *state = (value.reshape(1) if value.dim() == 0 else value for value in old)
        if grad_scale is not None:
            gradient = gradient / grad_scale
        updated = update(parameter, gradient, *state, *(values[place] for values in more))
        for values, new, kept in zip(found, updated, old, strict=True):
            shaped = new.reshape(kept.shape)
            values.append(shaped if is_bad is None else torch.where(is_bad, kept, shaped))
    return found


def _power(base: float, step: Tensor) -> Tensor:
    # A symbolic float may be multiplied by, and no tensor be filled with it.
    one = torch.ones((), dtype=torch.float64, device=step.device)
    return torch.pow(one * base, step.to(torch.float64))


def _adam(decoupled: bool) -> Callable[..., Lists]:
    """Return the decomposition of Adam, or with ``decoupled`` weight decay of AdamW."""

    def decomposition(
        self: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        *,
        lr: Any,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> Lists:
        def update(value: Tensor, gradient: Tensor, average: Tensor, square: Tensor, *rest: Tensor) -> list[Tensor]:
            *largest, step = rest
            ascent = -gradient if maximize else gradient
            start = value
            if weight_decay != 0 and decoupled:
                start = value - (value * lr) * weight_decay
            elif weight_decay != 0:
                ascent = ascent + value * weight_decay
            average = average + (1 - beta1) * (ascent - average)
            square = beta2 * square + (1 - beta2) * ascent * ascent
            first = (1 - _power(beta1, step)).to(value.dtype)
            second = (1 - _power(beta2, step)).sqrt().to(value.dtype)
            root = torch.maximum(largest[0], square) if largest else square
            new = start - ((average / first) / (root.sqrt() / second + eps)) * lr
            return [new, gradient, average, square, *([root] if largest else [])]

        lists = [self, grads, exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if amsgrad else [])]
        found = _for_each(update, lists, grad_scale, found_inf, state_steps)
        return found if amsgrad else (*found, list(max_exp_avg_sqs))

    return decomposition


def _sgd(
    self: list[Tensor],
    grads: list[Tensor],
    momentum_buffer_list: list[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Lists:
    def update(value: Tensor, gradient: Tensor, *buffers: Tensor) -> list[Tensor]:
        ascent = -gradient if maximize else gradient
        if weight_decay != 0:
            ascent = ascent + value * weight_decay
        if not buffers:
            return [value - ascent * lr, gradient]
        # The first buffer needs memory of its own: the gradient is an output as well.
        buffer = ascent.clone() if is_first_step else buffers[0] * momentum + ascent * (1 - dampening)
        return [value - (ascent + buffer * momentum if nesterov else buffer) * lr, gradient, buffer]

    lists = [self, grads, *([momentum_buffer_list] if momentum != 0 else [])]
    found = _for_each(update, lists, grad_scale, found_inf)
    return found if momentum != 0 else (*found, list(momentum_buffer_list))


def _adagrad(
    self: list[Tensor],
    grads: list[Tensor],
    state_sums: list[Tensor],
    state_steps: list[Tensor],
    *,
    lr: Any,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Lists:
    def update(value: Tensor, gradient: Tensor, total: Tensor, step: Tensor) -> list[Tensor]:
        ascent = -gradient if maximize else gradient
        if weight_decay != 0:
            ascent = ascent + value * weight_decay
        total = total + ascent * ascent
        slower = (1 + (step.to(torch.float64) - 1) * lr_decay).to(value.dtype)
        return [value - ((ascent / slower) / (total.sqrt() + eps)) * lr, gradient, total]

    found = _for_each(update, [self, grads, state_sums], grad_scale, found_inf, state_steps)
    return (*found, list(state_steps))


def fused_optimizers() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of the fused optimizers that this torch has.

    >>> torch.ops.aten._fused_sgd.default in fused_optimizers()
    True
    """
    rules: dict[str, Callable[..., Lists]] = {
        "_fused_adam": _adam(decoupled=False),
        "_fused_adamw": _adam(decoupled=True),
        "_fused_sgd": _sgd,
        "_fused_adagrad": _adagrad,
    }
    found: dict[Any, Callable[..., Any]] = {}
    for name, rule in rules.items():
        packet = getattr(torch.ops.aten, name, None)
        known = () if packet is None else packet.overloads()
        for overload in [item for item in ("default", "tensor_lr") if item in known]:
            decomposition = _cut(rule, len(getattr(packet, overload)._schema.returns))
            found[getattr(packet, overload)] = decomposition
            if name in NAMES:
                found[takes_symbols(name, overload)] = decomposition
    return found


def _cut(rule: Callable[..., Lists], count: int) -> Callable[..., Lists]:
    """Return the rule with as many results as the operator has."""

    def run(*args: Any, **kwargs: Any) -> Lists:
        return rule(*args, **kwargs)[:count]

    return run
