"""Functions that stay whole where their gradient is differentiated again: torch cannot trace that, or not as eager does it.

The C++ formula of some gradients writes in place in eager and out of place while a dispatch mode is on; the gradient of the
two differs by rounding and strides. Others branch on data. Called as one opaque operator, such a function has eager's
derivatives of every order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail import torch_private as private
from dovetail.errors import CaptureError
from dovetail.trace import Program, Trace
from dovetail.trace.opaque import opaque
from dovetail.trace.program import ProgramCall

# Found by running torch's operator database bitwise, in direction "double".
WHOLE: frozenset[Any] = frozenset({torch.linalg.eigh})
# Their gradient looks at the data, so that it cannot be tried out on example tensors.
REFUSED: frozenset[Any] = frozenset({torch.linalg.eig})


# With reduce="prod" their second derivative asks whether there are zeros.
_REDUCTIONS: frozenset[Any] = frozenset(
    {torch.scatter_reduce, torch.Tensor.scatter_reduce, torch.index_reduce, torch.Tensor.index_reduce}
)


def with_whole_calls(trace: Trace, program: Program) -> Program:
    """The program, to be replayed under ``trace``, with such functions as opaque calls.

    The tape that the replay leaves has the functions themselves. Raises :class:`CaptureError` for a function that has another
    second derivative when traced and cannot be kept whole.
    """
    calls = tuple(
        dataclasses.replace(call, function=_Whole(trace, call.function)) if _is_whole(trace, call) else call
        for call in program.calls
    )
    return dataclasses.replace(program, calls=calls)


def _is_whole(trace: Trace, call: ProgramCall) -> bool:
    if call.function in _REDUCTIONS:
        return "prod" in (*call.args, *call.kwargs.values())
    if trace.is_exact and call.function in REFUSED:
        raise CaptureError(
            f"torch traces the second derivative of {call.function.__name__} by another formula than eager's, and the last "
            "bits differ",
            advice='use backend="inductor" and numerics="fast", whose numbers agree up to rounding',
        )
    return trace.is_exact and call.function in WHOLE


class _Whole:
    """One function, called as one operator."""

    def __init__(self, trace: Trace, function: Callable[..., Any]) -> None:
        self._trace = trace
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = private.tree_flatten((args, kwargs))
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        single: list[bool] = []

        def call(*given: torch.Tensor) -> Sequence[torch.Tensor]:
            values = [None if at in places else leaf for at, leaf in enumerate(leaves)]
            for at, tensor in zip(places, given, strict=True):
                values[at] = tensor
            arguments, keywords = private.tree_unflatten(values, structure)
            found = self._function(*arguments, **keywords)
            single.append(isinstance(found, torch.Tensor))
            return [found] if single[-1] else list(found)

        recorder = self._trace.recorder
        with recorder.paused():
            found = opaque(self._trace, self._function.__name__, call, [leaves[at] for at in places])
        result: Any = found[0] if single[0] else found
        recorder.record(self._function, args, kwargs, result)
        return result
