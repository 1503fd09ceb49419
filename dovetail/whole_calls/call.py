"""A call of a function as one node of a graph, and its derivatives of every order.

The derivative of a whole call is another one: it runs the function again and asks autograd for the gradients. It has a
derivative in the same way, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dovetail.errors import CaptureError
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import libraries as private_libraries
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Trace
from dovetail.whole_calls import examples, tapes
from dovetail.whole_calls.facts import Facts, SizesRule
from dovetail.whole_calls.handles import SPARSE_LAYOUTS, carried_by, is_handle, make_handle
from dovetail.whole_calls.operator import FlatFunction, WholeFunction, record

Gradients = tuple[torch.Tensor | None, ...]


def whole_call(
    trace: Trace,
    name: str,
    function: FlatFunction,
    tensors: Sequence[torch.Tensor],
    sizes: SizesRule | None = None,
    *,
    draws: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Record ``function(*tensors)`` as one node, differentiable as in eager.

    The function must be pure, and every result a new tensor. The sizes of the results follow from ``sizes``, or are those of an
    example call; a later call with others raises :class:`OutgrownError`. With ``draws`` and ``sizes`` it may draw random numbers
    of the CPU, and its derivative draws the same. With ``sizes``, on the CPU, the derivative goes through the autograd graph of the
    call, and does not run the function again. Raises :class:`CaptureError` where an example call shows that it is not pure.
    """
    flags = tuple(tensor.requires_grad for tensor in tensors)
    is_differentiable = torch.is_grad_enabled() and any(flags)
    keeps = sizes is not None and is_differentiable and all(tensor.device.type == "cpu" for tensor in tensors)
    if keeps and sizes is not None:
        function, sizes = _with_token(function), tapes.with_token(sizes)
    if draws and sizes is not None:
        function, sizes = _with_state(function, sizes)
    called = WholeFunction(name, function, Facts(), flags, torch.is_grad_enabled(), draws=draws, keeps_graph=keeps)
    found = _call(trace, called, tensors, sizes)
    return found[: len(found) - draws - keeps]


def _call(
    trace: Trace, function: WholeFunction, tensors: Sequence[torch.Tensor], sizes: SizesRule | None
) -> tuple[torch.Tensor, ...]:
    carried: list[torch.Tensor | None] = []
    is_differentiable = function.grad_enabled and any(function.needs_gradient)
    if sizes is not None:
        function = replace(function, facts=Facts.by_sizes(sizes))
    else:
        modes = private_tracing.disable_current_modes(), private_libraries.outside_inference_mode()
        with modes[0], modes[1], private_calls.no_torch_function():
            given = [examples.example_of(trace, tensor) for tensor in tensors]
            results = examples.run_example(trace, function, given)
            carried = [carried_by(item).detach() if is_handle(item) else None for item in results]
        function = replace(function, facts=Facts.by_example(results), handles=tuple(map(is_handle, given)))
        is_differentiable = any(function.facts.flags or ())
    if is_differentiable:
        found = _WholeCall.apply(trace, function, carried, *tensors)  # type: ignore[no-untyped-call]
    else:
        # The operator has no derivative of its own.
        with torch.no_grad():
            found = record(trace, function, tensors)
    for value, example in zip(found, carried, strict=False):
        if example is not None:
            trace.node_of(value).meta[examples.CARRIED_EXAMPLE] = example
    return tuple(found)


def _with_token(function: FlatFunction) -> FlatFunction:
    """A function with the owner of its autograd graph as one more result."""

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        results = function(*tensors)
        return [*results, tapes.token(tensors, results)]

    return run


_STATE = torch.get_rng_state()


def _with_state(function: FlatFunction, sizes: SizesRule) -> tuple[FlatFunction, SizesRule]:
    """A function that draws, and its rule, with the state of the generator before it as one more result."""

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        state = torch.default_generator.get_state()
        return [*function(*tensors), state]

    return run, lambda *tensors: [*sizes(*tensors), (_STATE.shape, _STATE.dtype)]


def _drawing_again(function: FlatFunction) -> FlatFunction:
    """A function that draws, with the state of the generator as one more argument; it leaves the generator alone."""

    def run(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        *tensors, state = given
        with private_state.preserved_rng_state():
            torch.default_generator.set_state(state)
            return function(*tensors)

    return run


class _WholeCall(torch.autograd.Function):
    """One whole call in the autograd graph of a trace."""

    @staticmethod
    def forward(
        ctx: Any, trace: Trace, function: WholeFunction, carried: Sequence[torch.Tensor | None], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        found = record(trace, function, tensors)
        count = len(found) - function.draws
        # In a graph that a backend has compiled, only the memory of what the backward is given is left alone.
        ctx.save_for_backward(*tensors, *found[count:], *(found[:count] if function.keeps_graph else ()))
        ctx.rest = trace, function, carried
        depends = function.facts.depends(found)
        ctx.mark_non_differentiable(*[item for item, flag in zip(found, depends, strict=True) if not flag])
        return found

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        trace, function, carried = ctx.rest
        for tangent, example in zip(tangents, carried, strict=False):
            if tangent is not None and example is not None:
                examples.check_gradient_handle(trace, tangent)
                trace.node_of(tangent).meta.setdefault(examples.CARRIED_EXAMPLE, example)
        wanted = [flag and ctx.needs_input_grad[3 + at] for at, flag in enumerate(function.needs_gradient)]
        run = _drawing_again(function.function) if function.draws else function.function
        by_rule = None if function.facts.flags is not None else False
        count = len(function.needs_gradient) + function.draws
        saved, kept = ctx.saved_tensors[:count], [item.detach() for item in ctx.saved_tensors[count:]]
        found = whole_gradients(trace, function.name, run, saved, tangents, wanted, keeps_strides=by_rule, kept=kept)
        return (None, None, None, *found[: len(wanted)])


@dataclass(frozen=True)
class _GradientFunction:
    """The gradients of a function for the ``wanted`` ones of its ``count`` arguments, as a function of its arguments, of the
    tangents of its ``defined`` results and, where its graph was kept (:mod:`dovetail.whole_calls.tapes`), of all its results.
    """

    function: FlatFunction
    count: int
    defined: tuple[int, ...]
    wanted: tuple[int, ...]

    def found(self, *values: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients; None where no result depends on the argument."""
        # The arguments are leaves of the graph around this, if a gradient of the gradient is asked for.
        deeper = any(value.requires_grad for value in values)
        tangents = values[self.count : self.count + len(self.defined)]
        kept = values[self.count + len(self.defined) :]
        if kept and not deeper:
            found = tapes.gradients(values[: self.count], self.defined, tangents, self.wanted, kept)
            if found is not None:
                return found
        with torch.enable_grad():
            arguments = [
                value if value.requires_grad or at not in self.wanted else value.detach().requires_grad_()
                for at, value in enumerate(values[: self.count])
            ]
            results = self.function(*arguments)
            roots = [results[at] for at in self.defined]
            pairs = [pair for pair in zip(roots, tangents, strict=True) if pair[0].requires_grad]
            if not pairs:
                return [None] * len(self.wanted)
            return list(
                torch.autograd.grad(
                    [root for root, _ in pairs],
                    [arguments[at] for at in self.wanted],
                    [tangent for _, tangent in pairs],
                    allow_unused=True,
                    create_graph=deeper,
                )
            )

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for at, gradient in zip(self.wanted, self.found(*values), strict=True):
            made = torch.zeros_like(values[at]) if gradient is None else gradient
            if values[at].layout in SPARSE_LAYOUTS:
                # Dense where a dense tangent came for a sparse result, whatever it was in the example.
                with torch.no_grad():
                    made = make_handle(made)
            found.append(made)
        return found


def whole_gradients(
    trace: Trace,
    name: str,
    function: FlatFunction,
    tensors: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
    *,
    keeps_strides: bool | None = None,
    kept: Sequence[torch.Tensor] = (),
) -> Gradients:
    """Record the gradients of a function of ``tensors`` as one whole call; None for those that are not wanted.

    ``keeps_strides`` says that each has the strides of its argument (True) or is contiguous (False). Without it an example call
    shows that, and which gradients are None because nothing depends on the argument. ``kept`` are the results with their token,
    where the function returns one.
    """
    defined = tuple(at for at, tangent in enumerate(tangents) if tangent is not None)
    asked = tuple(at for at, flag in enumerate(wanted) if flag)
    none: Gradients = (None,) * len(tensors)
    if not defined or not asked:
        return none
    gradients = _GradientFunction(function, len(tensors), defined, asked)
    given = [*tensors, *[tangent for tangent in tangents if tangent is not None], *kept]
    if keeps_strides is None:
        gradients = _present_gradients(trace, gradients, given)
        if not gradients.wanted:
            return none

    def sizes(*values: torch.Tensor) -> list[Any]:
        return [values[at] if keeps_strides else (values[at].shape, values[at].dtype) for at in asked]

    grad_enabled = torch.is_grad_enabled()
    flags = tuple(tensor.requires_grad and grad_enabled for tensor in given)
    called = WholeFunction(f"the gradient of {name}", gradients, Facts(), flags, grad_enabled, is_gradient=True)
    found = dict(
        zip(gradients.wanted, _call(trace, called, given, None if keeps_strides is None else sizes), strict=True)
    )
    return tuple(found.get(at) for at in range(len(tensors)))


def _present_gradients(trace: Trace, gradients: _GradientFunction, given: Sequence[torch.Tensor]) -> _GradientFunction:
    """The same gradients without those that are None in an example."""
    if torch.is_grad_enabled() and any(examples.is_traced_handle(trace, item) for item in given[: gradients.count]):
        raise CaptureError(
            "a second derivative is taken through a call that is given a sparse tensor", where=trace.locate()
        )
    function = WholeFunction("", gradients.found, Facts(), (False,) * len(given), True)  # type: ignore[arg-type]

    def run() -> list[torch.Tensor]:
        values = [examples.example_of(trace, tensor) for tensor in given]
        return function.run([carried_by(item) if is_handle(item) else item for item in values])

    with private_tracing.disable_current_modes(), private_calls.no_torch_function():
        try:
            found = run()
        except RuntimeError:
            # Not all tangents are allowed: those of complex eigenvectors must not depend on their phase. Zeros never do; the
            # function itself checks the tangents at run time.
            for tensor in given[gradients.count :]:
                trace.node_of(tensor).meta[examples.ZERO_EXAMPLE] = True
            found = run()
    present = [at for at, item in zip(gradients.wanted, found, strict=True) if item is not None]
    return replace(gradients, wanted=tuple(present))
