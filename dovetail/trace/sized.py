"""Calls of torch that take real sizes, kept whole in a graph whose sizes are symbols.

The C++ of some functions loops over a size, or asks it for its parity: traced, each size is a graph of its own.
``dovetail::sized`` runs such a function itself when the graph runs, on real tensors and above autograd, so that its numbers are
eager's. A rule says which sizes the results have, given those of the arguments. The derivative is another such call (run it
again, ask autograd), which has a derivative in the same way, and so on to any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import OutgrownError
from dovetail.torch_private import operators as private_operators

FlatFunction = Callable[..., Sequence[torch.Tensor]]
Sizes = Sequence[Any]
SizesRule = Callable[..., Sequence[tuple[Sizes, torch.dtype] | torch.Tensor]]
"""From the arguments, of which it may read nothing but sizes and types, to the sizes and the type of each result; or to a
tensor that a result has the strides of as well.
"""


@dataclass(frozen=True, eq=False)
class SizedCall:
    """A pure function of tensors. Its results are new, and contiguous or like a tensor of the rule.

    ``needs_gradient`` says which arguments require a gradient, ``grad_enabled`` whether autograd was on: torch has kernels of its
    own for inference.
    """

    name: str
    function: FlatFunction
    rule: SizesRule
    needs_gradient: tuple[bool, ...]
    grad_enabled: bool

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it for real; the results are no part of any autograd graph."""
        with private_operators.above_autograd(), torch.set_grad_enabled(self.grad_enabled):
            leaves = [
                value.detach().requires_grad_(flag) for value, flag in zip(tensors, self.needs_gradient, strict=True)
            ]
            found = self.function(*leaves)
        taken = {value.untyped_storage()._cdata for value in tensors}
        results: list[torch.Tensor] = []
        for result, like in zip(found, self.shaped(tensors, "meta"), strict=True):
            if result.shape != like.shape or result.dtype != like.dtype:
                raise OutgrownError(
                    f"{self.name} has returned a tensor of size {tuple(result.shape)} and type {result.dtype}; the graph was "
                    f"compiled for {tuple(like.shape)}, {like.dtype}",
                    advice="keep this call out of the compiled function",
                )
            own = result.detach().resolve_conj().resolve_neg()
            if own.stride() != like.stride() or own.untyped_storage()._cdata in taken:
                own = torch.empty_strided(like.shape, like.stride(), dtype=own.dtype, device=own.device).copy_(own)
            taken.add(own.untyped_storage()._cdata)
            results.append(own)
        return results

    def shaped(self, tensors: Sequence[torch.Tensor], device: Any = None) -> list[torch.Tensor]:
        """Tensors like its results, without values."""
        device = device or tensors[0].device
        return [
            torch.empty_like(item, device=device)
            if isinstance(item, torch.Tensor)
            else torch.empty(tuple(item[0]), dtype=item[1], device=device)
            for item in self.rule(*tensors)
        ]


_CALLS: dict[int, SizedCall] = {}
_numbers = itertools.count()
_library = torch.library.Library("dovetail", "FRAGMENT")
_library.define("sized(int call, Tensor[] tensors) -> Tensor[]")
# Its last result is the state of the random generator before it has drawn.
_library.define("sized_random(int call, Tensor[] tensors) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))


def _kernel(call: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _CALLS[call](tensors)


_library.impl("sized", _kernel, "CompositeExplicitAutograd")
_library.impl("sized_random", _kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("dovetail::sized_random", lib=_library)
@torch.library.register_fake("dovetail::sized", lib=_library)
def _fake(call: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _CALLS[call].shaped(tensors)


SIZED = torch.ops.dovetail.sized.default
"""The operator; its first argument says which function it calls."""


def sized_call_of(number: int) -> SizedCall:
    """The function behind the first argument of a ``dovetail::sized`` node."""
    return _CALLS[number]


def sized(
    name: str,
    function: FlatFunction,
    rule: SizesRule,
    tensors: Sequence[torch.Tensor],
    draws: bool = False,
    is_gradient: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Record ``function(*tensors)`` as one node, differentiable as in eager.

    The function must be pure, but that it ``draws`` random numbers of the CPU if that is said; its derivative draws the same.
    Each of its results of floating point depends on the arguments that require a gradient. All tensors are on one device.
    """
    needs_gradient = tuple(tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors)
    if any(needs_gradient):
        found = _Sized.apply(name, function, rule, needs_gradient, draws, *tensors)  # type: ignore[no-untyped-call]
    else:
        # Some kernels ask whether an argument requires a gradient, also where none is computed.
        flags = needs_gradient if is_gradient else tuple(tensor.requires_grad for tensor in tensors)
        found = _record(name, function, rule, flags, torch.is_grad_enabled(), tensors, draws)
    return tuple(found[:-1] if draws else found)


def _drawing(function: FlatFunction, rule: SizesRule) -> tuple[FlatFunction, SizesRule]:
    """A function that draws, and its rule, with the state of the generator before it as one more result."""

    def with_state(*tensors: torch.Tensor) -> list[torch.Tensor]:
        state = torch.get_rng_state()
        return [*function(*tensors), state]

    def with_size(*tensors: torch.Tensor) -> list[tuple[Sizes, torch.dtype] | torch.Tensor]:
        return [*rule(*tensors), (_STATE_SIZE, torch.uint8)]

    return with_state, with_size


_STATE_SIZE = tuple(torch.get_rng_state().shape)


def _again(function: FlatFunction) -> FlatFunction:
    """A function that draws, with the state of the generator as one more argument; it leaves the generator alone."""

    def run(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        *tensors, state = given
        present = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            return function(*tensors)
        finally:
            torch.set_rng_state(present)

    return run


def _record(
    name: str,
    function: FlatFunction,
    rule: SizesRule,
    needs_gradient: tuple[bool, ...],
    grad_enabled: bool,
    tensors: Sequence[torch.Tensor],
    draws: bool,
) -> tuple[torch.Tensor, ...]:
    number = next(_numbers)
    if draws:
        function, rule = _drawing(function, rule)
    _CALLS[number] = SizedCall(name, function, rule, needs_gradient, grad_enabled)
    operator = torch.ops.dovetail.sized_random.default if draws else SIZED
    return tuple(operator(number, list(tensors)))


class _Sized(torch.autograd.Function):
    """One call in the autograd graph of a trace."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        function: FlatFunction,
        rule: SizesRule,
        needs_gradient: tuple[bool, ...],
        draws: bool,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """See :class:`torch.autograd.Function`."""
        ctx.set_materialize_grads(False)
        found = _record(name, function, rule, needs_gradient, True, tensors, draws)
        ctx.save_for_backward(*tensors, *found[-1:] if draws else ())
        ctx.rest = name, _again(function) if draws else function, needs_gradient
        ctx.mark_non_differentiable(*[item for item in found if not (item.is_floating_point() or item.is_complex())])
        return found

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        """See :class:`torch.autograd.Function`."""
        name, function, needs_gradient = ctx.rest
        wanted = [at for at, flag in enumerate(needs_gradient) if flag and ctx.needs_input_grad[5 + at]]
        gradients: list[torch.Tensor | None] = [None] * len(needs_gradient)
        if wanted and any(tangent is not None for tangent in tangents):
            found = sized_gradients(name, function, ctx.saved_tensors, tangents, wanted)
            for at, gradient in zip(wanted, found, strict=True):
                gradients[at] = gradient
        return (None, None, None, None, None, *gradients)


def sized_gradients(
    name: str,
    function: FlatFunction,
    tensors: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
    wanted: Sequence[int],
    keeps_strides: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Record the derivative of such a function as one such call: a gradient for each of the ``wanted`` arguments, contiguous or
    with the strides of the argument.
    """
    defined = [at for at, tangent in enumerate(tangents) if tangent is not None]
    count = len(tensors)

    def gradients(*values: torch.Tensor) -> list[torch.Tensor]:
        # A gradient of the gradient may be asked for, then the arguments are leaves of the graph around this.
        deeper = any(value.requires_grad for value in values)
        with torch.enable_grad():
            arguments = [
                value if value.requires_grad or at not in wanted else value.detach().requires_grad_()
                for at, value in enumerate(values[:count])
            ]
            results = function(*arguments)
            found = torch.autograd.grad(
                [results[at] for at in defined],
                [arguments[at] for at in wanted],
                list(values[count:]),
                allow_unused=True,
                materialize_grads=True,
                create_graph=deeper,
            )
        return list(found)

    def rule(*values: torch.Tensor) -> list[tuple[Sizes, torch.dtype] | torch.Tensor]:
        return [values[at] if keeps_strides else (values[at].shape, values[at].dtype) for at in wanted]

    given = [*tensors, *[tangent for tangent in tangents if tangent is not None]]
    return sized("the gradient of " + name, gradients, rule, given, is_gradient=True)
