"""Functions that stay whole where a program is replayed to differentiate its gradient once more.

Torch cannot trace the gradient's gradient of these, or not as eager computes it. As one call such a function has eager's
derivatives of every order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from dovetail.quirks.registry import Example, quirk
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.trace import Program, Trace
from dovetail.trace.overrides import requested_gradients
from dovetail.trace.program import ProgramCall
from dovetail.whole_calls.whole import Whole

REPLAYS: dict[Any, Callable[[Trace, ProgramCall], Any]] = {}
"""By function of torch: the function that a replay of its call runs, or NotImplemented for the function itself."""


def replayed(trace: Trace, program: Program) -> Program:
    """The program as it is replayed under ``trace``, with the functions of ``REPLAYS``."""
    return dataclasses.replace(program, calls=tuple(_replaced(trace, call) for call in program.calls))


def _replaced(trace: Trace, call: ProgramCall) -> ProgramCall:
    if call.function is torch.autograd.grad:
        return dataclasses.replace(call, function=functools.partial(_grad, trace))
    if private_autograd_nodes.is_function_apply(call.function):
        return dataclasses.replace(call, function=functools.partial(_apply, trace, call.function))
    hook = REPLAYS.get(call.function) if callable(call.function) else None
    found = NotImplemented if hook is None else hook(trace, call)
    return call if found is NotImplemented else dataclasses.replace(call, function=found)


def _apply(trace: Trace, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A custom ``autograd.Function`` as one call of the program: what its forward computes has no history."""
    with trace.recorder.paused():
        result = apply(*args, **kwargs)
    trace.recorder.record(apply, args, kwargs, result)
    return result


def _grad(trace: Trace, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``torch.autograd.grad`` of the program itself, of which one more derivative is wanted now."""
    roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    # Its checks have been made when the program ran.
    with requested_gradients(trace, roots, twice=True, partial=True):
        return torch.autograd.grad(outputs, *args, **kwargs)


def _symmetric(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eigh(x + x.mT)
    return values, vectors.abs()


@quirk(
    REPLAYS,
    torch.linalg.eigh,
    example=lambda: Example(_symmetric, [(torch.arange(9.0).sin().reshape(3, 3),)], order=2, exact=False),
)
def whole_eigh(trace: Trace, call: ProgramCall) -> Any:
    """Keep ``eigh`` whole: its formula writes in place in eager and out of place while tracing.

    The gradient of the two differs by rounding and strides.
    """
    return Whole(call.function) if trace.settings.exact else NotImplemented


def _product(x: torch.Tensor) -> torch.Tensor:
    return torch.scatter_reduce(torch.zeros(3), 0, torch.tensor([0, 0, 1, 2]), x, "prod", include_self=False)


@quirk(
    REPLAYS,
    torch.scatter_reduce,
    torch.Tensor.scatter_reduce,
    torch.index_reduce,
    torch.Tensor.index_reduce,
    example=lambda: Example(_product, [(torch.tensor([0.3, 1.7, -2.1, 0.6]),)], order=2),
)
def whole_product(trace: Trace, call: ProgramCall) -> Any:
    """Keep a reduction to products whole: its second derivative asks whether there are zeros."""
    return Whole(call.function) if "prod" in (*call.args, *call.kwargs.values()) else NotImplemented
