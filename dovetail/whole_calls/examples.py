"""Real tensors like traced ones, and an example call of a function with them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from dovetail.errors import CaptureError
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Trace, TracedInput
from dovetail.trace.overrides import GRAPHS, INPUT_GRADIENTS
from dovetail.whole_calls.handles import carried_by, components_of, is_handle, make_handle
from dovetail.whole_calls.operator import WHOLE_CALL, WholeFunction, shares_values

#: In a node's ``meta``: the example for its value is made of zeros.
ZERO_EXAMPLE = "dovetail zero example"
#: In a node's ``meta``: the tensor that its value, a sparse handle, carries in the example.
CARRIED_EXAMPLE = "dovetail carried example"


def example_of(trace: Trace, value: torch.Tensor) -> torch.Tensor:
    """A real tensor like a traced one: a copy of the input where it is one, else made-up values.

    Raises :class:`CaptureError` for a tensor of a symbolic size.
    """
    node = trace.node_of(value)
    for item in trace.inputs:
        if item.node is node:
            if is_handle(item.real):
                return make_handle(carried_by(item.real).detach().clone())
            # With its strides, and in memory of its own.
            copied: torch.Tensor = item.real.detach().__deepcopy__({})  # type: ignore[no-untyped-call]
            return copied
    if private_sizes.has_symbols(value):
        raise CaptureError("an operator that only runs on real tensors is given a symbolic size", where=trace.locate())
    if CARRIED_EXAMPLE in node.meta:
        return make_handle(node.meta[CARRIED_EXAMPLE])
    result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if node.meta.get(ZERO_EXAMPLE):
        return result.zero_()
    if value.is_floating_point() or value.is_complex():
        generator = torch.Generator(value.device).manual_seed(len(trace.graph.nodes))
        return result.copy_(torch.rand(value.shape, generator=generator, dtype=value.dtype, device=value.device))
    return result.fill_(value.dtype == torch.bool)


def run_example(trace: Trace, function: WholeFunction, examples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results for example tensors. Raises :class:`CaptureError` for a function that is not pure, or returns a view."""
    name, where = function.name, trace.locate()
    random_state = torch.default_generator.get_state()
    versions = list(map(_version, examples))
    values = [carried_by(tensor) if is_handle(tensor) else tensor for tensor in examples]
    results = function.run(values)
    if not torch.equal(random_state, torch.default_generator.get_state()):
        torch.default_generator.set_state(random_state)
        raise CaptureError(f"{name} draws random numbers and cannot be called as one operator", where=where)
    if versions != list(map(_version, examples)):
        raise CaptureError(f"{name} writes to its arguments and cannot be called as one operator", where=where)
    if any(not isinstance(item, torch.Tensor) or item.layout is not torch.strided for item in results):
        raise CaptureError(f"{name} does not return dense tensors", where=where)
    if function.is_gradient:
        return results
    if shares_values(values, results):
        raise CaptureError(f"{name} returns its argument, or a view of it", where=where)
    inner = [part for tensor in examples if is_handle(tensor) for part in components_of(carried_by(tensor))]
    taken = {tensor.untyped_storage()._cdata for tensor in (*examples, *inner)}
    made = [tensor.untyped_storage()._cdata for tensor in results]
    if len(set(made)) < len(made) or taken & set(made):
        raise CaptureError(f"{name} returns a view and cannot be called as one operator", where=where)
    return results


def _version(tensor: torch.Tensor) -> int:
    return carried_by(tensor)._version if is_handle(tensor) else tensor._version


def is_traced_handle(trace: Trace, value: torch.Tensor) -> bool:
    """Whether a traced tensor stands for the handle of a sparse one."""
    node = trace.node_of(value)
    return CARRIED_EXAMPLE in node.meta or any(is_handle(item.real) for item in trace.inputs if item.node is node)


def carried_example(trace: Trace, value: torch.Tensor) -> torch.Tensor:
    """The sparse tensor that a traced handle carries in an example."""
    with private_tracing.disable_current_modes(), private_calls.no_torch_function():
        return carried_by(example_of(trace, value))


def check_gradient_handle(trace: Trace, gradient: torch.Tensor) -> None:
    """Raise :class:`CaptureError` for the gradient of a sparse tensor that is no handle as a whole call has made it."""
    node = trace.node_of(gradient)
    if node.op != "placeholder" and not (node.target is operator.getitem and node.args[0].target is WHOLE_CALL):  # type: ignore[union-attr]
        raise CaptureError(
            "a sparse tensor that requires a gradient is used more than once, and its gradients would have to be added up",
            advice="use it once, or keep it out of the compiled function",
        )


def _check_input(trace: Trace, item: TracedInput, gradient: torch.Tensor) -> None:
    if is_handle(item.real):
        check_gradient_handle(trace, gradient)


def _forget_examples(graph: torch.fx.Graph) -> None:
    """Let go of the example tensors: the graph of an entry lives long."""
    for node in graph.nodes:
        node.meta.pop(CARRIED_EXAMPLE, None)


INPUT_GRADIENTS.append(_check_input)
GRAPHS.append(_forget_examples)
