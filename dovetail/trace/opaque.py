"""Torch functions that a graph calls as one operator, because what they are made of cannot be recorded bit for bit.

``dovetail::opaque`` runs the function itself, on real tensors, above autograd: its numbers are eager's. Its derivative is
another opaque function (run it again, ask autograd), which has a derivative in the same way, and so on to any order.

What a call returns is found out by calling it once on example tensors. A result with other sizes, strides or dtype at a
later call raises :class:`OutgrownError`: nothing after it in the graph would be right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail import torch_private as private
from dovetail.errors import CaptureError, OutgrownError
from dovetail.trace.trace import Trace

FlatFunction = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class TensorFacts:
    """What the graph relies on of one result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorFacts:
        """The facts of a tensor."""
        return TensorFacts(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a result is as the graph takes it to be."""
        return (
            tuple(tensor.shape) == self.shape
            and (tensor.stride() == self.stride or tensor.numel() < 2)
            and tensor.dtype == self.dtype
        )

    def empty(self) -> torch.Tensor:
        """A tensor like it, without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, eq=False)
class OpaqueCall:
    """A pure function of tensors. ``needs_gradient`` says which arguments require a gradient when it runs."""

    name: str
    function: FlatFunction
    needs_gradient: tuple[bool, ...]
    results: tuple[TensorFacts, ...]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it for real; the results are no part of any autograd graph."""
        found = _run(self.function, tensors, self.needs_gradient)
        for result, facts in zip(found, self.results, strict=True):
            if not facts.holds(result):
                raise OutgrownError(
                    f"{self.name} has returned a tensor of size {tuple(result.shape)}, strides {result.stride()} and type "
                    f"{result.dtype}; the graph was compiled for {facts.shape}, {facts.stride}, {facts.dtype}",
                    advice="keep this operator out of the compiled function: its result's size depends on the data",
                )
        return [
            result.detach() if result.stride() == facts.stride else facts.empty().copy_(result.detach())
            for result, facts in zip(found, self.results, strict=True)
        ]


def _run(function: FlatFunction, tensors: Sequence[torch.Tensor], needs_gradient: Sequence[bool]) -> list[torch.Tensor]:
    with private.above_autograd(), torch.enable_grad():
        leaves = [tensor.detach().requires_grad_(flag) for tensor, flag in zip(tensors, needs_gradient, strict=True)]
        return list(function(*leaves))


_CALLS: dict[int, OpaqueCall] = {}
_numbers = itertools.count()
_library = torch.library.Library("dovetail", "DEF")
_library.define("opaque(int call, Tensor[] tensors) -> Tensor[]")


def _kernel(call: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _CALLS[call](tensors)


_library.impl("opaque", _kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("dovetail::opaque", lib=_library)
def _fake(call: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [facts.empty() for facts in _CALLS[call].results]


OPAQUE = torch.ops.dovetail.opaque.default
"""The operator; its first argument says which function it calls."""


def call_of(number: int) -> OpaqueCall:
    """The function behind the first argument of a ``dovetail::opaque`` node."""
    return _CALLS[number]


# On a node: the example tensor for its value is made of zeros.
_ZERO_EXAMPLE = "dovetail zero example"


def example_of(trace: Trace, value: torch.Tensor) -> torch.Tensor:
    """A real tensor like a traced one: the input itself where it is one, else made-up values."""
    node = trace.node_of(value)
    for item in trace.inputs:
        if item.node is node or item.original_node is node:
            # With its strides, and in memory of its own.
            copied: torch.Tensor = item.real.detach().__deepcopy__({})  # type: ignore[no-untyped-call]
            return copied
    if private.has_symbols(value):
        raise CaptureError("an operator that only runs on real tensors is given a symbolic size", where=trace.locate())
    result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if node.meta.get(_ZERO_EXAMPLE):
        return result.zero_()
    if value.is_floating_point() or value.is_complex():
        generator = torch.Generator(value.device).manual_seed(len(trace.graph.nodes))
        return result.copy_(torch.rand(value.shape, generator=generator, dtype=value.dtype, device=value.device))
    return result.fill_(value.dtype == torch.bool)


def opaque(
    trace: Trace, name: str, function: FlatFunction, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Record ``function(*tensors)`` as one node, differentiable as in eager. The function must be pure, and every result a
    new tensor; raises :class:`CaptureError` where an example call shows that it is not.
    """
    needs_gradient = tuple(tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors)
    with private.disable_current_modes(), private.no_torch_function():
        examples = [example_of(trace, tensor) for tensor in tensors]
        results = _checked_example(trace, name, function, examples, needs_gradient)
    if any(item.requires_grad for item in results):
        found = _Opaque.apply(trace, name, function, results, needs_gradient, *tensors)  # type: ignore[no-untyped-call]
        return tuple(found)
    return _record(name, function, results, needs_gradient, tensors)


def _record(
    name: str,
    function: FlatFunction,
    results: tuple[TensorFacts, ...],
    needs_gradient: tuple[bool, ...],
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    number = next(_numbers)
    _CALLS[number] = OpaqueCall(name, function, needs_gradient, results)
    return tuple(OPAQUE(number, list(tensors)))


def _checked_example(
    trace: Trace,
    name: str,
    function: FlatFunction,
    examples: Sequence[torch.Tensor],
    needs_gradient: Sequence[bool],
) -> tuple[TensorFacts, ...]:
    random_state = torch.get_rng_state()
    versions = [tensor._version for tensor in examples]
    results = _run(function, examples, needs_gradient)
    where = trace.locate()
    if not torch.equal(random_state, torch.get_rng_state()):
        torch.set_rng_state(random_state)
        raise CaptureError(f"{name} draws random numbers and cannot be called as one operator", where=where)
    if versions != [tensor._version for tensor in examples]:
        raise CaptureError(f"{name} writes to its arguments and cannot be called as one operator", where=where)
    if any(not isinstance(item, torch.Tensor) or item.layout is not torch.strided for item in results):
        raise CaptureError(f"{name} does not return dense tensors", where=where)
    storages = [tensor.untyped_storage()._cdata for tensor in (*examples, *results)]
    if len(set(storages[len(examples) :])) < len(results) or set(storages[: len(examples)]) & set(
        storages[len(examples) :]
    ):
        raise CaptureError(f"{name} returns a view and cannot be called as one operator", where=where)
    return tuple(map(TensorFacts.of, results))


class _Opaque(torch.autograd.Function):
    """One opaque call in the autograd graph of a trace."""

    @staticmethod
    def forward(
        ctx: Any,
        trace: Trace,
        name: str,
        function: FlatFunction,
        results: tuple[TensorFacts, ...],
        needs_gradient: tuple[bool, ...],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """See :class:`torch.autograd.Function`."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.rest = trace, name, function, needs_gradient
        found = _record(name, function, results, needs_gradient, tensors)
        ctx.mark_non_differentiable(
            *[item for item, facts in zip(found, results, strict=True) if not facts.requires_grad]
        )
        return found

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        """See :class:`torch.autograd.Function`."""
        trace, name, function, needs_gradient = ctx.rest
        wanted = tuple(flag and ctx.needs_input_grad[5 + at] for at, flag in enumerate(needs_gradient))
        return (None,) * 5 + gradients(trace, name, function, ctx.saved_tensors, tangents, wanted)


def _example_gradients(
    trace: Trace, function: Any, given: Sequence[torch.Tensor | None], count: int
) -> Sequence[torch.Tensor | None]:
    """What a function of tensors and, after the first ``count``, tangents returns for example tensors."""

    def run() -> Sequence[torch.Tensor | None]:
        examples = [example_of(trace, tensor) for tensor in given]  # type: ignore[arg-type]
        return _run(function, examples, [False] * len(given))

    with private.disable_current_modes(), private.no_torch_function():
        try:
            return run()
        except RuntimeError:
            # Not all tangents are allowed: those of complex eigenvectors must not depend on their phase. Zeros never do, and
            # whether those at run time do, the function looks itself.
            for tensor in given[count:]:
                assert tensor is not None
                trace.node_of(tensor).meta[_ZERO_EXAMPLE] = True
            return run()


def gradients(
    trace: Trace,
    name: str,
    function: FlatFunction,
    tensors: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Record the derivative of an opaque function as one opaque call; None for what is not wanted or does not depend."""
    defined = [at for at, tangent in enumerate(tangents) if tangent is not None]
    asked = [at for at, flag in enumerate(wanted) if flag]
    count = len(tensors)
    none: tuple[torch.Tensor | None, ...] = (None,) * count
    if not defined or not asked:
        return none

    def all_gradients(*values: torch.Tensor) -> list[torch.Tensor | None]:
        # A gradient of the gradient may be asked for, then the arguments are leaves of the graph around this.
        with torch.enable_grad():
            arguments = [
                value if value.requires_grad or at not in asked else value.detach().requires_grad_()
                for at, value in enumerate(values[:count])
            ]
            again = function(*arguments)
            roots = [again[at] for at in defined]
            pairs = [(root, value) for root, value in zip(roots, values[count:], strict=True) if root.requires_grad]
            deeper = any(value.requires_grad for value in values)
            return list(
                torch.autograd.grad(
                    [root for root, _ in pairs],
                    [arguments[at] for at in asked],
                    [value for _, value in pairs],
                    allow_unused=True,
                    create_graph=deeper,
                )
            )

    given = [*tensors, *[tangents[at] for at in defined]]
    example = _example_gradients(trace, all_gradients, given, count)
    present = [at for at, item in enumerate(example) if item is not None]
    if not present:
        return none

    def present_gradients(*values: torch.Tensor) -> list[torch.Tensor]:
        found = all_gradients(*values)
        # What autograd returns may be one of the arguments itself, or one tensor twice.
        taken = {value.untyped_storage()._cdata for value in values}
        separate: list[torch.Tensor] = []
        for at in present:
            gradient: Any = found[at]
            separate.append(gradient.clone() if gradient.untyped_storage()._cdata in taken else gradient)
            taken.add(gradient.untyped_storage()._cdata)
        return separate

    flowing = opaque(trace, f"the gradient of {name}", present_gradients, given)  # type: ignore[arg-type]
    result = list(none)
    for at, gradient in zip(present, flowing, strict=True):
        result[asked[at]] = gradient
    return tuple(result)
