"""The optimizers of torch that are one kernel each, as plain arithmetic for a compiler that fuses by itself.

Torch's kernels go through the memory of parameter, gradient and state side by side, whatever their strides say. Inductor lays
out the gradient of a convolution as it likes, and the result was silently wrong (torch 2.13). As arithmetic the update is fused
with the backward, and written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.trace.fused_updates import NAMES, takes_symbols

Rate = Any
"""A float, a symbolic float or a tensor of one element."""


def _gradient(gradient: Tensor, scale: Tensor | None) -> Tensor:
    return gradient if scale is None else gradient / scale


def _kept(new: Sequence[Tensor], old: Sequence[Tensor], found_inf: Tensor | None) -> list[Tensor]:
    """The old values where a gradient is not finite: the kernels then write nothing."""
    if found_inf is None:
        return list(new)
    is_bad = found_inf.reshape(()) == 1
    return [torch.where(is_bad, one, other) for one, other in zip(old, new, strict=True)]


def _flat(values: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with at least one dimension: a float that changes from call to call meets no other ones."""
    return [value.reshape(1) if value.dim() == 0 else value for value in values]


def _like(values: Sequence[Tensor], shapes: Sequence[Tensor]) -> list[Tensor]:
    return [value.reshape(shape.shape) for value, shape in zip(values, shapes, strict=True)]


def _power(base: float, step: Tensor) -> Tensor:
    # A number that changes from call to call may be multiplied by, and no tensor be filled with it.
    one = torch.ones((), dtype=torch.float64, device=step.device)
    return torch.pow(one * base, step.to(torch.float64))


def _adam(
    decoupled: bool,
) -> Callable[..., tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]]:
    def update(
        self: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        *,
        lr: Rate,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        parameters, averages, squares, largest = [], [], [], []
        scaled = [_gradient(item, grad_scale) for item in grads]
        lists = zip(_flat(self), _flat(scaled), _flat(exp_avgs), _flat(exp_avg_sqs), state_steps, strict=True)
        for place, (parameter, gradient, average, square, step) in enumerate(lists):
            ascent = -gradient if maximize else gradient
            value = parameter
            if weight_decay != 0:
                if decoupled:
                    value = parameter - (parameter * lr) * weight_decay
                else:
                    ascent = ascent + parameter * weight_decay
            average = average + (1 - beta1) * (ascent - average)
            square = beta2 * square + (1 - beta2) * ascent * ascent
            first = (1 - _power(beta1, step)).to(parameter.dtype)
            second = (1 - _power(beta2, step)).sqrt().to(parameter.dtype)
            root = square
            if amsgrad:
                root = torch.maximum(_flat(max_exp_avg_sqs)[place], square)
                largest.append(root)
            parameters.append(value - ((average / first) / (root.sqrt() / second + eps)) * lr)
            averages.append(average)
            squares.append(square)
        return (
            _kept(_like(parameters, self), self, found_inf),
            _kept(scaled, grads, found_inf),
            _kept(_like(averages, exp_avgs), exp_avgs, found_inf),
            _kept(_like(squares, exp_avg_sqs), exp_avg_sqs, found_inf),
            _kept(_like(largest, max_exp_avg_sqs), max_exp_avg_sqs, found_inf) if amsgrad else list(max_exp_avg_sqs),
        )

    return update


def _sgd(
    self: list[Tensor],
    grads: list[Tensor],
    momentum_buffer_list: list[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: Rate,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    parameters, buffers = [], []
    scaled = [_gradient(item, grad_scale) for item in grads]
    for place, (parameter, gradient) in enumerate(zip(_flat(self), _flat(scaled), strict=True)):
        ascent = -gradient if maximize else gradient
        if weight_decay != 0:
            ascent = ascent + parameter * weight_decay
        if momentum != 0:
            # Memory of its own: the gradient is handed out as well.
            buffer = ascent.clone()
            if not is_first_step:
                buffer = _flat(momentum_buffer_list)[place] * momentum + ascent * (1 - dampening)
            buffers.append(buffer)
            ascent = ascent + buffer * momentum if nesterov else buffer
        parameters.append(parameter - ascent * lr)
    return (
        _kept(_like(parameters, self), self, found_inf),
        _kept(scaled, grads, found_inf),
        _kept(_like(buffers, momentum_buffer_list), momentum_buffer_list, found_inf)
        if momentum != 0
        else list(momentum_buffer_list),
    )


def _adagrad(
    self: list[Tensor],
    grads: list[Tensor],
    state_sums: list[Tensor],
    state_steps: list[Tensor],
    *,
    lr: Rate,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    parameters, sums = [], []
    scaled = [_gradient(item, grad_scale) for item in grads]
    lists = zip(_flat(self), _flat(scaled), _flat(state_sums), state_steps, strict=True)
    for parameter, gradient, total, step in lists:
        ascent = -gradient if maximize else gradient
        if weight_decay != 0:
            ascent = ascent + parameter * weight_decay
        total = total + ascent * ascent
        slower = (1 + (step.to(torch.float64) - 1) * lr_decay).to(parameter.dtype)
        parameters.append(parameter - ((ascent / slower) / (total.sqrt() + eps)) * lr)
        sums.append(total)
    return (
        _kept(_like(parameters, self), self, found_inf),
        _kept(scaled, grads, found_inf),
        _kept(_like(sums, state_sums), state_sums, found_inf),
        list(state_steps),
    )


def fused_optimizers() -> dict[Any, Callable[..., Any]]:
    """Decompositions of the fused optimizers that this torch has.

    >>> torch.ops.aten._fused_sgd.default in fused_optimizers()
    True
    """
    rules: dict[str, Callable[..., Any]] = {
        "_fused_adam": _adam(decoupled=False),
        "_fused_adamw": _adam(decoupled=True),
        "_fused_sgd": _sgd,
        "_fused_adagrad": _adagrad,
    }
    found: dict[Any, Callable[..., Any]] = {}
    for name, rule in rules.items():
        packet = getattr(torch.ops.aten, name, None)
        for overload in () if packet is None else packet.overloads():
            if overload in ("default", "tensor_lr"):
                cut = _cut(rule, len(getattr(packet, overload)._schema.returns))
                found[getattr(packet, overload)] = cut
                if name in NAMES:
                    found[takes_symbols(name, overload)] = cut
    return found


def _cut(rule: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The rule with as many results as the operator has."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return rule(*args, **kwargs)[:count]

    return run
