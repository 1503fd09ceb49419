"""Torch functions that a graph calls as one operator, because what they are made of cannot be recorded bit for bit.

``dovetail::opaque`` runs the function itself, on real tensors, above autograd: its numbers are eager's. Its derivative is
another opaque function (run it again, ask autograd), which has a derivative in the same way, and so on to any order.

What a call returns is found out by calling it once on example tensors. A result with other sizes, strides or dtype at a
later call raises :class:`OutgrownError`: nothing after it in the graph would be right.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import CaptureError, OutgrownError
from dovetail.rules.sparse.handles import SPARSE_LAYOUTS, carried_by, components_of, is_ticket, make_ticket
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace.trace import Trace

_GRADIENT = "the gradient of "
FlatFunction = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class TensorFacts:
    """What the graph relies on of one result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_ticket: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorFacts:
        """The facts of a tensor."""
        if is_ticket(tensor):
            return TensorFacts((), (), tensor.dtype, tensor.device, carried_by(tensor).requires_grad, True)
        return TensorFacts(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a result is as the graph takes it to be."""
        if self.is_ticket or is_ticket(tensor):
            return self.is_ticket and is_ticket(tensor)
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
    """A pure function of tensors. ``needs_gradient`` says which arguments require a gradient when it runs, ``tickets`` which of
    them are tickets: a backend may put something else into the memory of a ticket that is used up.
    """

    name: str
    function: FlatFunction
    needs_gradient: tuple[bool, ...]
    results: tuple[TensorFacts, ...]
    tickets: tuple[bool, ...]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it for real; the results are no part of any autograd graph."""
        given = [carried_by(tensor) if flag else tensor for tensor, flag in zip(tensors, self.tickets, strict=True)]
        found = _run(self.function, given, self.needs_gradient)
        if any(self.tickets) and not self.name.startswith(_GRADIENT) and _shares_values(given, found):
            raise OutgrownError(
                f"{self.name} has returned a view of a sparse argument, and has not when it was captured",
                advice="keep this call out of the compiled function",
            )
        for result, facts in zip(found, self.results, strict=True):
            if not facts.holds(result):
                raise OutgrownError(
                    f"{self.name} has returned a tensor of size {tuple(result.shape)}, strides {result.stride()} and type "
                    f"{result.dtype}; the graph was compiled for {facts.shape}, {facts.stride}, {facts.dtype}",
                    advice="keep this operator out of the compiled function: its result's size depends on the data",
                )
        return [
            make_ticket(carried_by(result).detach())
            if facts.is_ticket
            else result.detach()
            if result.stride() == facts.stride
            else facts.empty().copy_(result.detach())
            for result, facts in zip(found, self.results, strict=True)
        ]


def _run(function: FlatFunction, tensors: Sequence[torch.Tensor], needs_gradient: Sequence[bool]) -> list[torch.Tensor]:
    with private_operators.above_autograd(), torch.enable_grad():
        leaves = [_leaf(tensor, flag) for tensor, flag in zip(tensors, needs_gradient, strict=True)]
        return [_with_ticket(result) for result in function(*leaves)]


def _leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_(requires_grad)


def _with_ticket(result: Any) -> Any:
    if not isinstance(result, torch.Tensor) or result.layout not in SPARSE_LAYOUTS:
        return result
    with torch.no_grad():
        return make_ticket(result)


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


# On a node: the example tensor for its value is made of zeros; what its value, a ticket, carries in the example.
_ZERO_EXAMPLE = "dovetail zero example"
_CARRIED_EXAMPLE = "dovetail carried example"


def is_traced_ticket(trace: Trace, value: torch.Tensor) -> bool:
    """Whether a traced tensor stands for the ticket of a sparse one."""
    node = trace.node_of(value)
    return _CARRIED_EXAMPLE in node.meta or any(is_ticket(item.real) for item in trace.inputs if item.node is node)


def forget_examples(graph: torch.fx.Graph) -> None:
    """Let go of the example tensors: the graph of an entry lives long."""
    for node in graph.nodes:
        node.meta.pop(_CARRIED_EXAMPLE, None)


def carried_example(trace: Trace, value: torch.Tensor) -> torch.Tensor:
    """What the ticket that a traced tensor stands for carries in an example."""
    with private_tracing.disable_current_modes(), private_calls.no_torch_function():
        return carried_by(example_of(trace, value))


def check_gradient_ticket(trace: Trace, gradient: torch.Tensor) -> None:
    """Raises :class:`CaptureError` for a gradient of a sparse tensor that is no ticket as it was made."""
    node = trace.node_of(gradient)
    made = node.op == "placeholder" or (node.target is operator.getitem and node.args[0].target is OPAQUE)  # type: ignore[union-attr]
    if not made:
        raise CaptureError(
            "a sparse tensor that requires a gradient is used more than once, and its gradients would have to be added up",
            advice="use it once, or keep it out of the compiled function",
        )


def example_of(trace: Trace, value: torch.Tensor) -> torch.Tensor:
    """A real tensor like a traced one: the input itself where it is one, else made-up values."""
    node = trace.node_of(value)
    for item in trace.inputs:
        if item.node is node or item.original_node is node:
            if is_ticket(item.real):
                return make_ticket(carried_by(item.real).detach().clone())
            # With its strides, and in memory of its own.
            copied: torch.Tensor = item.real.detach().__deepcopy__({})  # type: ignore[no-untyped-call]
            return copied
    if private_sizes.has_symbols(value):
        raise CaptureError("an operator that only runs on real tensors is given a symbolic size", where=trace.locate())
    result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if _CARRIED_EXAMPLE in node.meta:
        return make_ticket(node.meta[_CARRIED_EXAMPLE])
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
    with private_tracing.disable_current_modes(), private_calls.no_torch_function():
        examples = [example_of(trace, tensor) for tensor in tensors]
        tickets = tuple(map(is_ticket, examples))
        example_results = _checked_example(trace, name, function, examples, needs_gradient)
        results = tuple(map(TensorFacts.of, example_results))
        carried = [carried_by(item).detach() if is_ticket(item) else None for item in example_results]
    if any(item.requires_grad for item in results):
        rest = (results, needs_gradient, tickets, carried)
        found = _Opaque.apply(trace, name, function, rest, *tensors)  # type: ignore[no-untyped-call]
    else:
        found = _record(name, function, results, needs_gradient, tickets, tensors)
    for value, example in zip(found, carried, strict=True):
        if example is not None:
            trace.node_of(value).meta[_CARRIED_EXAMPLE] = example
    return tuple(found)


def _record(
    name: str,
    function: FlatFunction,
    results: tuple[TensorFacts, ...],
    needs_gradient: tuple[bool, ...],
    tickets: tuple[bool, ...],
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    number = next(_numbers)
    _CALLS[number] = OpaqueCall(name, function, needs_gradient, results, tickets)
    return tuple(OPAQUE(number, list(tensors)))


def _version(tensor: torch.Tensor) -> int:
    return carried_by(tensor)._version if is_ticket(tensor) else tensor._version


def _values_of(value: torch.Tensor) -> torch.Tensor:
    if value.layout is torch.jagged:
        return value._values  # type: ignore[no-any-return,return-value]
    return value._values() if value.layout is torch.sparse_coo else value.detach().values()


def _shares_values(given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    """Whether a sparse result is a sparse argument, or a view of one."""
    carried = [carried_by(result) for result in results if is_ticket(result)]
    sparse = [value for value in (*given, *carried) if value.layout in SPARSE_LAYOUTS]
    storages = [_values_of(value).untyped_storage()._cdata for value in sparse]
    return len(set(storages)) < len(storages)


def _checked_example(
    trace: Trace,
    name: str,
    function: FlatFunction,
    examples: Sequence[torch.Tensor],
    needs_gradient: Sequence[bool],
) -> list[torch.Tensor]:
    random_state = torch.get_rng_state()
    versions = [_version(tensor) for tensor in examples]
    given_examples = [carried_by(tensor) if is_ticket(tensor) else tensor for tensor in examples]
    results = _run(function, given_examples, needs_gradient)
    where = trace.locate()
    carried = [carried_by(tensor) for tensor in examples if is_ticket(tensor)]
    inner = [part for value in carried for part in components_of(value)]
    if not torch.equal(random_state, torch.get_rng_state()):
        torch.set_rng_state(random_state)
        raise CaptureError(f"{name} draws random numbers and cannot be called as one operator", where=where)
    if versions != [_version(tensor) for tensor in examples]:
        raise CaptureError(f"{name} writes to its arguments and cannot be called as one operator", where=where)
    if any(not isinstance(item, torch.Tensor) or item.layout is not torch.strided for item in results):
        raise CaptureError(f"{name} does not return dense tensors", where=where)
    if _shares_values(given_examples, results) and not name.startswith(_GRADIENT):
        raise CaptureError(f"{name} returns a sparse argument, or a view of one", where=where)
    given = {tensor.untyped_storage()._cdata for tensor in (*examples, *inner)}
    made = [tensor.untyped_storage()._cdata for tensor in results]
    if len(set(made)) < len(made) or given & set(made):
        raise CaptureError(f"{name} returns a view and cannot be called as one operator", where=where)
    return results


class _Opaque(torch.autograd.Function):
    """One opaque call in the autograd graph of a trace."""

    @staticmethod
    def forward(
        ctx: Any,
        trace: Trace,
        name: str,
        function: FlatFunction,
        rest: tuple[tuple[TensorFacts, ...], tuple[bool, ...], tuple[bool, ...], list[torch.Tensor | None]],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """See :class:`torch.autograd.Function`."""
        results, needs_gradient, tickets, carried = rest
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.rest = trace, name, function, needs_gradient, carried
        found = _record(name, function, results, needs_gradient, tickets, tensors)
        ctx.mark_non_differentiable(
            *[item for item, facts in zip(found, results, strict=True) if not facts.requires_grad]
        )
        return found

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        """See :class:`torch.autograd.Function`."""
        trace, name, function, needs_gradient, carried = ctx.rest
        for tangent, example in zip(tangents, carried, strict=True):
            if tangent is not None and example is not None:
                check_gradient_ticket(trace, tangent)
                trace.node_of(tangent).meta.setdefault(_CARRIED_EXAMPLE, example)
        wanted = tuple(flag and ctx.needs_input_grad[4 + at] for at, flag in enumerate(needs_gradient))
        return (None,) * 4 + gradients(trace, name, function, ctx.saved_tensors, tangents, wanted)


def _example_gradients(
    trace: Trace, function: Any, given: Sequence[torch.Tensor | None], count: int
) -> Sequence[torch.Tensor | None]:
    """What a function of tensors and, after the first ``count``, tangents returns for example tensors."""

    def run() -> Sequence[torch.Tensor | None]:
        examples = [example_of(trace, tensor) for tensor in given]  # type: ignore[arg-type]
        values = [carried_by(item) if is_ticket(item) else item for item in examples]
        return _run(function, values, [False] * len(given))

    with private_tracing.disable_current_modes(), private_calls.no_torch_function():
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
    if torch.is_grad_enabled() and any(is_traced_ticket(trace, item) for item in tensors):
        raise CaptureError(
            "a second derivative is taken through a call that is given a sparse tensor", where=trace.locate()
        )

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
        taken = {value.untyped_storage()._cdata for value in values if value.layout is torch.strided}
        separate: list[torch.Tensor] = []
        for at in present:
            gradient: Any = found[at]
            if values[asked[at]].layout in SPARSE_LAYOUTS:
                # Dense where a dense tangent came for a sparse result, whatever it was in the example.
                with torch.no_grad():
                    separate.append(make_ticket(gradient))
                continue
            separate.append(gradient.clone() if gradient.untyped_storage()._cdata in taken else gradient)
            taken.add(gradient.untyped_storage()._cdata)
        return separate

    flowing = opaque(trace, _GRADIENT + name, present_gradients, given)  # type: ignore[arg-type]
    result = list(none)
    for at, gradient in zip(present, flowing, strict=True):
        result[asked[at]] = gradient
    return tuple(result)
