"""Stage 1: run the frontend under the open trace, ask autograd for the gradients, and describe every input and output.

>>> # capture_joint(state)
>>> #     state.frontend(...)         the forward: the user's function on traced tensors
>>> #     finish_joint(trace, result)
>>> #         _describe_forward       results, views, writes; which outputs have a gradient
>>> #         _add_tangents           one more input for each of these
>>> #         _ask_for_gradients      the backward: autograd runs on the same trace
>>> #         _close_graph            outputs, dead code, descriptors
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.descriptors import Descriptor, Gradient, Tangent
from dovetail.aot.joint_graph import JointGraph, PassRecord
from dovetail.aot.nodes import checks_assumption, must_stay
from dovetail.aot.output_dependencies import find_dependencies
from dovetail.aot.outputs import DescribedOutputs, describe_outputs
from dovetail.aot.state import AOTState
from dovetail.aot.steps import checks_outputs, finds_freed
from dovetail.aot.tangents import overlaps_itself
from dovetail.errors import CaptureError, DovetailError, StageError
from dovetail.guards.ambient import without_autocast
from dovetail.runtime.spec import OutputDependency, RuntimeSpec
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tensors as private_tensors
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Trace, overrides
from dovetail.trace.overrides import INPUT_GRADIENTS, LEAF_ORDERS, inexact_gradients, requested_gradients


def capture_joint(state: AOTState) -> JointGraph:
    """Capture forward and backward of ``state.function`` as one graph, in one pass.

    Raises :class:`CaptureError` for an aliasing that cannot be kept, and whatever the frontend raises.
    """
    if not state.is_open:
        raise StageError(
            "the capture's contexts are closed", advice="call the stage inside the `with ExitStack()` block"
        )
    start = time.perf_counter()
    joint = finish_joint(state.trace, state.frontend(state.trace, state.function, state.args, state.kwargs))
    count = len(joint.graph.nodes)
    return dataclasses.replace(joint, made_by=PassRecord("captured", time.perf_counter() - start, 0, count))


def lacks_derivative(error: BaseException) -> bool:
    """Whether an error says that an operator cannot be differentiated (again): fused attention cannot, its parts can."""
    if isinstance(error, DovetailError) or not isinstance(error, (RuntimeError, NotImplementedError)):
        return False
    # "derivative for aten::... is not implemented" (checked on 2.13).
    return "derivative for" in str(error) and "is not implemented" in str(error)


def finish_joint(trace: Trace, result: CaptureResult) -> JointGraph:
    """Append the backward to a trace that holds a captured forward, and close the graph."""
    # The program tape ends here; its mode would be asked about every attribute that fake tensors read of each other, 9,000
    # times in the backward of a 6-layer GPT.
    with private_calls.no_torch_function():
        forward = _describe_forward(trace, result)
        trace.begin_backward()
        tangents = _add_tangents(trace, forward)
        with _refused_writes(trace, forward, tangents):
            backward = _ask_for_gradients(trace, forward, tangents, result.order)
        trace.random.finish()
        gradients = [None if gradient is None else trace.node_of(gradient) for gradient in backward.gradients]
        outputs = [trace.node_of(value) for value in forward.described.values]
        inputs = (*result.input_descriptors, *(Tangent(forward.descriptors[index]) for index in forward.root_positions))
        _close_graph(trace, [*outputs, *gradients], inputs)
        # Without the traced tensors, which would keep the autograd graph of the capture.
        capture = dataclasses.replace(result, outputs=())
        return JointGraph(
            graph_module=private_tracing.lazy_graph_module(trace.tracer.root, trace.graph),
            input_descriptors=inputs,
            output_descriptors=(
                *forward.descriptors,
                *(None if node is None else Gradient(of) for node, of in zip(gradients, inputs, strict=False)),
            ),
            num_primals=len(trace.inputs),
            num_forward_outputs=len(outputs),
            spec=_runtime_spec(trace, forward, backward),
            fake_mode=trace.fake_mode,
            capture=capture,
            inexact=backward.inexact,
            is_exact=trace.settings.exact,
            program=forward.program,
        )


@dataclass(frozen=True)
class _Forward:
    """The traced forward: what it returns and writes to, and which of its outputs have a gradient."""

    described: DescribedOutputs
    differentiable: tuple[bool, ...]
    program: Any
    dependencies: tuple[OutputDependency, ...]
    leaves: tuple[torch.Tensor | None, ...]

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """The descriptors of the graph's forward outputs."""
        return self.described.descriptors

    @property
    def root_positions(self) -> tuple[int, ...]:
        """The forward outputs that have a gradient."""
        return tuple(position for position, flag in enumerate(self.differentiable) if flag)

    @property
    def roots(self) -> list[torch.Tensor]:
        """Their traced tensors."""
        return [self.described.values[position] for position in self.root_positions]


def _describe_forward(trace: Trace, result: CaptureResult) -> _Forward:
    """Describe what the forward returns and writes to; guard what the description relies on."""
    described = describe_outputs(trace, result)
    for mutation in described.mutations:
        result.guards.add_leafness(mutation.input_index)
        result.guards.add_separate_memory(mutation.input_index)
    for change in trace.metadata_changes:
        result.guards.add_leafness(change.input_index)
    freed = _freed_outputs(trace, described)
    not_recorded = {item.output_index for item in described.mutations if not item.differentiable}
    differentiable = tuple(
        value.grad_fn is not None and position not in not_recorded and position not in freed
        for position, value in enumerate(described.values)
    )
    if torch.is_inference_mode_enabled() and any(differentiable):
        raise CaptureError("gradients are recorded in inference_mode(False)", advice="call it outside of that mode")
    if trace.replicas and any(differentiable):
        raise CaptureError(
            "DistributedDataParallel is called, and a result of it leaves the graph before backward() is",
            advice="compile the whole step, or the model before it is wrapped: DistributedDataParallel(dovetail.compile(model))",
        )
    program = trace.program(described.values)
    roots = [value for value, is_root in zip(described.values, differentiable, strict=True) if is_root]
    returned = [value for position, value in enumerate(described.values) if position not in not_recorded]
    returned += [value for value in result.outputs if trace.input_of(value) is None]
    for check in checks_outputs:
        check(trace, returned, roots, result.order)
    return _Forward(
        described,
        differentiable,
        program,
        find_dependencies(described, differentiable, result.outputs, trace.inputs),
        # A write may have made an input differentiable that was not.
        tuple(item.leaf if item.requires_grad else None for item in trace.inputs),
    )


def _freed_outputs(trace: Trace, described: DescribedOutputs) -> set[int]:
    """The outputs whose autograd graph a ``backward()`` inside has freed; raises :class:`CaptureError` for partly freed ones."""
    freed = {position for position, value in enumerate(described.values) if trace.is_freed(value)}
    if not all(_leads_to_freed_only(described.values[position].grad_fn, trace.freed) for position in freed):
        what = "a result was computed from what a backward() inside has freed, and from something else"
        raise CaptureError(what, advice="pass retain_graph=True to that backward")
    return freed


def _leads_to_freed_only(root: Any, freed: set[Any]) -> bool:
    """Whether each way from a node to a leaf passes a freed node: eager's backward raises whatever gradient it is asked for."""
    waiting, seen = [root], {None, *freed}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if not node.next_functions:
                return False
            waiting += [after for after, _ in node.next_functions]
    return True


def _add_tangents(trace: Trace, forward: _Forward) -> list[torch.Tensor]:
    """One placeholder for the incoming gradient of each output that has one, as traced tensors."""
    return [_tangent(trace, root, number) for number, root in enumerate(forward.roots, start=1)]


def _tangent(trace: Trace, of: torch.Tensor, number: int) -> torch.Tensor:
    overlaps = overlaps_itself(of)
    if overlaps and any(map(private_sizes.is_data_number, of.shape)):
        raise CaptureError(
            "a result whose places share memory has a size that the data decides", advice="return a clone of it"
        )
    with private_tracing.disable_current_modes(), trace.fake_mode:
        strides = torch.empty(of.shape, device="meta").stride() if overlaps else of.stride()
        fake = torch.empty_strided(of.shape, strides, dtype=of.dtype, device=of.device)
    with private_tracing.disable_current_modes():
        trace.placeholder(fake, f"tangents_{number}")
    return private_tracing.to_fun(fake)


@dataclass(frozen=True)
class _Backward:
    """The traced backward: a gradient for each primal, and facts about the autograd graph that it ran through."""

    gradients: tuple[torch.Tensor | None, ...]
    leaf_order: tuple[int, ...] = ()
    inexact: tuple[str, ...] = ()
    freed_by_backward: tuple[frozenset[int], ...] | None = None


def _ask_for_gradients(trace: Trace, forward: _Forward, tangents: Sequence[torch.Tensor], order: int) -> _Backward:
    """Run autograd on the trace, which records the backward."""
    roots, leaves = forward.roots, forward.leaves
    freed = next((find(roots) for find in finds_freed), None)
    inexact = () if trace.settings.exact else inexact_gradients(roots)
    wanted = [leaf for leaf in leaves if leaf is not None]
    if not roots or not wanted:
        return _Backward((None,) * len(leaves), (), inexact, freed)
    own_leaves = [leaf if item.real.is_leaf else None for leaf, item in zip(leaves, trace.inputs, strict=True)]
    others = len({item.real.grad_fn for item in trace.inputs if not item.real.is_leaf})
    starts = [root.grad_fn for root in roots]
    leaf_order = next((hook(starts, own_leaves, len(leaves), others) for hook in LEAF_ORDERS), ())
    # Autocast belongs to the call of backward(), which is outside of it unless somebody says otherwise (runtime/function.py).
    with torch.enable_grad(), without_autocast(), requested_gradients(trace, roots, partial=order > 1):
        flowing = iter(torch.autograd.grad(roots, wanted, tangents, allow_unused=True))
    gradients = tuple(next(flowing) if leaf is not None else None for leaf in leaves)
    for gradient, item in zip(gradients, trace.inputs, strict=True):
        if gradient is not None:
            for check in INPUT_GRADIENTS:
                check(trace, item, gradient)
            _refuse_gradient(gradient, item.name)
    return _Backward(gradients, leaf_order, inexact, freed)


@contextlib.contextmanager
def _refused_writes(trace: Trace, forward: _Forward, tangents: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block in which hooks and custom backwards may write to nothing that the call was given or returns.

    Graphs of the backward have no place for such a write, which eager shows to the program and to the next forward.
    """
    known = [
        *((item.name, tensor) for item in trace.inputs for tensor in (item.value, item.leaf)),
        *(("a result of the function", value) for value in forward.described.values),
        *(("an incoming gradient", tangent) for tangent in tangents),
    ]
    versions = [private_tensors.version_of(tensor) for _, tensor in known]
    yield
    for (name, tensor), version in zip(known, versions, strict=True):
        if private_tensors.version_of(tensor) != version:
            raise CaptureError(
                f"a hook or a custom backward writes to {name}",
                advice="write to it outside of the compiled function, or compile the whole step with its backward",
            )


def _refuse_gradient(gradient: torch.Tensor, name: str) -> None:
    """Raise :class:`CaptureError` for a gradient that no graph can return."""
    if private_tensors.is_wrapper(gradient):
        kind = type(gradient).__name__
        raise CaptureError(
            f"the gradient of {name}, which is a plain tensor, is a {kind}", advice=f"make {name} a {kind} too"
        )
    if gradient.layout is not torch.strided:
        raise CaptureError(
            f"the gradient of {name} has the layout {gradient.layout}", advice="use dense gradients (sparse=False)"
        )


def _close_graph(trace: Trace, results: list[torch.fx.Node | None], inputs: Sequence[Descriptor]) -> None:
    """Put what was assumed about data into the graph, end it with its results, and drop what nobody reads."""
    for check in overrides.DATA_SIZES:
        check(trace)
    trace.shape_env.may_assume = False
    graph = trace.graph
    graph.output(results)
    _placeholders_first(graph)
    for look in overrides.UNREAD:
        look(graph)
    graph.eliminate_dead_code(is_impure_node=must_stay)
    if trace.metadata_changes and any(map(checks_assumption, graph.nodes)):
        raise CaptureError(
            "an input changes its size or strides in place, beside sizes that depend on data",
            advice="make a new tensor instead",
        )
    for edit in overrides.GRAPHS:
        edit(graph)
    for node, descriptor in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["desc"] = descriptor


def _placeholders_first(graph: torch.fx.Graph) -> None:
    placeholders = graph.find_nodes(op="placeholder")
    first = next(iter(graph.nodes))
    for node in reversed(placeholders):
        if node is not first:
            first.prepend(node)
            first = node


def _runtime_spec(trace: Trace, forward: _Forward, backward: _Backward) -> RuntimeSpec:
    """The description of the runtime's work around the graph."""
    return RuntimeSpec(
        input_requires_grad=tuple(leaf is not None for leaf in forward.leaves),
        output_differentiable=forward.differentiable,
        outputs=forward.described.outputs,
        mutations=forward.described.mutations,
        dependencies=forward.dependencies,
        metadata_changes=tuple(trace.metadata_changes),
        freed_by_backward=backward.freed_by_backward,
        leaf_order=backward.leaf_order,
        kept_alive=tuple(trace.kept_alive),
    )
