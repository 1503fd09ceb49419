"""Functions that stay whole where their gradient is differentiated again: torch cannot trace that, or not as eager does it.

The C++ formula of some gradients writes in place in eager and out of place while a dispatch mode is on; the gradient of the
two differs by rounding and strides. Others branch on data. Called as one opaque operator, such a function has eager's
derivatives of every order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.quirks.eigenvectors import phases_checked
from dovetail.quirks.exact import use_exact_formulas
from dovetail.torch_private import trees as private_trees
from dovetail.trace import Program, Trace
from dovetail.trace.opaque import opaque
from dovetail.trace.program import ProgramCall

# Found by running torch's operator database bitwise, in direction "double".
WHOLE: frozenset[Any] = frozenset({torch.linalg.eigh})


# With reduce="prod" their second derivative asks whether there are zeros.
_REDUCTIONS: frozenset[Any] = frozenset(
    {torch.scatter_reduce, torch.Tensor.scatter_reduce, torch.index_reduce, torch.Tensor.index_reduce}
)


def with_whole_calls(trace: Trace, program: Program) -> Program:
    """The program, to be replayed under ``trace``, with such functions as opaque calls.

    The tape that the replay leaves has the functions themselves.
    """
    return dataclasses.replace(program, calls=tuple(_replaced(trace, call) for call in program.calls))


def _replaced(trace: Trace, call: ProgramCall) -> ProgramCall:
    if call.function is torch.autograd.grad and trace.settings.exact:
        return dataclasses.replace(call, function=functools.partial(_exact_grad, trace))
    return dataclasses.replace(call, function=_Whole(trace, call.function)) if _is_whole(trace, call) else call


def _exact_grad(trace: Trace, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``torch.autograd.grad`` of the program itself, of which one more derivative is wanted now."""
    roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    use_exact_formulas(trace, roots, twice=True)
    # What it checks, it has checked when the program ran.
    with phases_checked(trace, roots, twice=True, in_parts=True):
        return torch.autograd.grad(outputs, *args, **kwargs)


def _is_whole(trace: Trace, call: ProgramCall) -> bool:
    if call.function in _REDUCTIONS:
        return "prod" in (*call.args, *call.kwargs.values())
    return trace.settings.exact and call.function in WHOLE


class _Whole:
    """One function, called as one operator."""

    def __init__(self, trace: Trace, function: Callable[..., Any]) -> None:
        self._trace = trace
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = private_trees.tree_flatten((args, kwargs))
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        single: list[bool] = []

        def call(*given: torch.Tensor) -> Sequence[torch.Tensor]:
            values = [None if at in places else leaf for at, leaf in enumerate(leaves)]
            for at, tensor in zip(places, given, strict=True):
                values[at] = tensor
            arguments, keywords = private_trees.tree_unflatten(values, structure)
            found = self._function(*arguments, **keywords)
            single.append(isinstance(found, torch.Tensor))
            return [found] if single[-1] else list(found)

        recorder = self._trace.recorder
        with recorder.paused():
            found = opaque(self._trace, self._function.__name__, call, [leaves[at] for at in places])
        result: Any = found[0] if single[0] else found
        recorder.record(self._function, args, kwargs, result)
        return result
