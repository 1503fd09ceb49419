"""Sparse results: no graph has them as outputs, so the call that makes one runs after the graph, on a dense result of it.

Autograd records that call like any other, so that its derivatives of every order are eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.outputs import LATE_OUTPUTS, MadeLate
from dovetail.errors import CaptureError
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.trace import Trace
from dovetail.trace.program import ProgramCall, Slot


@dataclass(frozen=True, eq=False)
class DeferredCall:
    """One torch call with one tensor among its arguments, which it is given when it runs."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, base: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run it on ``base``."""
        args = tuple(base if isinstance(item, Slot) else item for item in self.args)
        kwargs = {key: base if isinstance(item, Slot) else item for key, item in self.kwargs.items()}
        result: torch.Tensor = self.function(*args, **kwargs)
        return result


def call_that_made(trace: Trace, value: torch.Tensor) -> ProgramCall | None:
    """The recorded call whose one result is this tensor."""
    made = (call for call in reversed(trace.recorder.calls) if len(call.results) == 1)
    return next((call for call in made if trace.recorder.tensors[call.results[0]] is value), None)


def deferred_call(trace: Trace, value: torch.Tensor) -> MadeLate:
    """The dense tensor that a sparse result was made from, the call that made it, and whether gradients were recorded.

    Raises :class:`CaptureError` where it was not made by one call from one dense tensor that is still what it was.
    """
    call = call_that_made(trace, value)
    given = [] if call is None else [*call.args, *call.kwargs.values()]
    slots = [item for item in given if isinstance(item, Slot)]
    if call is None or len(slots) != 1 or not all(isinstance(item, Slot) or _is_constant(item) for item in given):
        raise _refusal(value)
    base = trace.recorder.tensors[slots[0].number]
    is_made_inside = base.requires_grad and base.grad_fn is None and trace.input_of(base) is None
    if (
        base.layout is not torch.strided
        or private_tensors.is_wrapper(base)
        or private_sizes.has_symbols(base)
        or is_made_inside
    ):
        raise _refusal(value)
    # After a write the call would see another value.
    if trace.node_of(base) not in trace.node_of(value).all_input_nodes or _draws(trace, value):
        raise _refusal(value)
    return base, DeferredCall(call.function, call.args, call.kwargs), call.grad_enabled


LATE_OUTPUTS.append(deferred_call)


def _draws(trace: Trace, value: torch.Tensor) -> bool:
    target = trace.node_of(value).target
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _is_constant(value: Any) -> bool:
    plain = (type(None), bool, int, float, str, torch.dtype, torch.layout)
    return isinstance(value, plain) or (isinstance(value, (tuple, list)) and all(map(_is_constant, value)))


def _refusal(value: torch.Tensor) -> CaptureError:
    return CaptureError(
        f"a tensor with the layout {value.layout} is returned, and it was not made from a dense one by a single call",
        advice="return a dense tensor",
    )
