"""The next order: the backward of a joint graph, captured as a joint graph of its own.

The program tape is replayed on the forward's inputs under a new trace and autograd is asked for its gradients with
``create_graph=True``. That is a function of inputs and tangents, captured with its own backward like any other function; as it
has a program tape too, the order after it is made in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.aot.capture_joint import finish_joint
from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.descriptors import Descriptor, UserInput
from dovetail.aot.joint_graph import JointGraph
from dovetail.errors import DovetailError, UserLocation
from dovetail.events import EventLog
from dovetail.guards import GuardSet
from dovetail.higher_order.runtime import (
    BackwardFunction,
    CapturedBackward,
    DifferentiableBackward,
    NeededInputs,
    Request,
    Sizes,
    refusal,
    sizes_and_strides,
)
from dovetail.quirks.replays import replayed
from dovetail.runtime.spread import keep_common
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.trace import CaptureSettings, Program, ShapePolicy, Trace, shape_guards
from dovetail.trace.overrides import requested_gradients
from dovetail.trace.repeats import has_random_result
from dovetail.trace.shapes import NUMBER_SUFFIX

#: Takes the next order and which inputs of this one its first inputs are; says which saved values it takes besides.
CompileJoint = Callable[
    [JointGraph, Sequence[int]], tuple[Callable[[list[torch.Tensor]], list[torch.Tensor]], tuple[int, ...]]
]


class _NoGuards(GuardSet):
    """The metadata of every input is part of the key under which a captured backward is kept: nothing else is to check."""

    def add_leafness(self, index: int, location: UserLocation | None = None) -> None:
        """Part of the key."""

    def add_separate_memory(self, index: int) -> None:
        """Inputs are written to in clones only."""


def lacks_derivative(error: BaseException) -> bool:
    """Whether an error says that an operator cannot be differentiated (again)."""
    if isinstance(error, DovetailError) or not isinstance(error, (RuntimeError, NotImplementedError)):
        return False
    # "derivative for aten::... is not implemented" (checked on 2.13).
    return "derivative for" in str(error) and "is not implemented" in str(error)


def needed_inputs(joint: JointGraph) -> NeededInputs:
    """What a derivative of the backward needs of the forward's inputs: those that any gradient is computed from."""
    graph = joint.graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")[: joint.num_primals]
    reached: set[torch.fx.Node] = set()
    stack = [node for node in joint.results[joint.num_forward_outputs :] if node is not None]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack += node.all_input_nodes
    symbolic = any(private_sizes.has_symbols(node.meta["val"]) for node in placeholders)
    indices = tuple(index for index, node in enumerate(placeholders) if symbolic or node in reached)
    draws = [node for node in graph.nodes if has_random_result(node)]
    devices = {node.meta["val"].device.index for node in draws if getattr(node.meta.get("val"), "is_cuda", False)}
    written = frozenset(mutation.input_index for mutation in joint.spec.mutations)
    varying = tuple(index for index in indices if private_sizes.has_symbols(placeholders[index].meta["val"]))
    of_outputs = () if symbolic or joint.spec.freed_together is None else _inputs_of_outputs(joint, placeholders)
    return NeededInputs(indices, written, bool(draws), tuple(sorted(devices)), varying, of_outputs)


def _inputs_of_outputs(joint: JointGraph, placeholders: Sequence[torch.fx.Node]) -> tuple[frozenset[int], ...]:
    """The inputs that each differentiable output is computed from."""
    number_of = {node: index for index, node in enumerate(placeholders)}
    found = []
    for result, flag in zip(joint.results, joint.spec.output_differentiable, strict=False):
        if flag:
            reached: set[torch.fx.Node] = set()
            stack = [] if result is None else [result]
            while stack:
                node = stack.pop()
                if node not in reached:
                    reached.add(node)
                    stack += node.all_input_nodes
            found.append(frozenset(number_of[node] for node in reached if node in number_of))
    return tuple(found)


def differentiable_backward(
    joint: JointGraph,
    compile_next: CompileJoint,
    events: EventLog,
    options: Mapping[str, Any],
    spread: dict[int, tuple[int, ...]],
) -> DifferentiableBackward:
    """The backward of ``joint`` as something that can be differentiated; each order is captured when it is first needed.

    ``spread`` are the strides of gradients that do not fill their memory; those that a second derivative has not are taken out.
    """
    needed = needed_inputs(joint)

    def once(request: Request, policy: ShapePolicy) -> CapturedBackward:
        try:
            captured, present = capture_backward(joint, request, policy)
        except (RuntimeError, NotImplementedError) as error:
            if not lacks_derivative(error):
                raise
            # Fused attention has no second derivative; the operators that it is made of have one.
            events.note("attention by its parts", reason=str(error))
            captured, present = capture_backward(joint, request, policy, math_attention=True)
        compiled, given = compile_next(captured, tuple(request.primals))
        run = _with_gaps(compiled, present)
        if spread:
            nodes = captured.results[captured.num_forward_outputs :][: len(request.primals)]
            keep_common(spread, list(request.primals), [None if node is None else node.meta["val"] for node in nodes])
        varying = set(needed.varying)
        fixed = [index not in varying for index in request.primals]
        flat = [*request.primals.values(), *request.tangents]
        return CapturedBackward(
            run, sizes_and_strides(flat), None if policy.is_static else _size_check(captured, fixed), given=given
        )

    def capture(request: Request, earlier: Sequence[Sizes]) -> CapturedBackward:
        reason = _obstacle(joint, needed, options)
        if reason:
            raise refusal(reason)
        with private_state.preserved_rng_state(), events.span("compile the next order"):
            policy = _policy(joint, request, earlier)
            if not policy.is_static:
                try:
                    return once(request, policy)
                except Exception as error:  # noqa: BLE001  (whatever symbolic sizes lead to, plain ones may not)
                    events.note("static shapes", reason=f"{type(error).__name__}: {error}")
            return once(request, ShapePolicy())

    return DifferentiableBackward(needed, capture)


def _with_gaps(run: Callable[[list[torch.Tensor]], list[torch.Tensor]], present: tuple[bool, ...]) -> BackwardFunction:
    if all(present):
        return run  # type: ignore[return-value]

    def with_gaps(flat: list[torch.Tensor]) -> list[torch.Tensor | None]:
        gradients = iter(run(flat))
        return [next(gradients) if flag else None for flag in present]

    return with_gaps


def _names(joint: JointGraph, request: Request) -> list[str]:
    """The names of a replay's inputs. Those of the forward stay: a name says that the input carries a number."""
    names = joint.capture.bindings.names
    tangents = [f"tangent {number} of order {joint.order + 1}" for number in range(len(request.tangents))]
    return [names[index] for index in request.primals] + tangents


def _policy(joint: JointGraph, request: Request, earlier: Sequence[Sizes]) -> ShapePolicy:
    """What is symbolic in the forward is symbolic in its backward, and what has changed since the last capture."""
    placeholders = joint.graph_module.graph.find_nodes(op="placeholder")
    tangents = [node for node, flag in zip(placeholders[joint.num_primals :], request.defined, strict=True) if flag]
    before = [*(placeholders[index] for index in request.primals), *tangents]
    names = _names(joint, request)
    carries = any(name.endswith(NUMBER_SUFFIX) for name in names)
    changing: dict[str, frozenset[int]] = {}
    flat = [*request.primals.values(), *request.tangents]
    for position, (name, node, value) in enumerate(zip(names, before, flat, strict=True)):
        known = node.meta["val"]
        others = [sizes[position][0] for sizes in earlier]
        dims = {dim for other in others for dim in range(value.dim()) if other[dim] != value.shape[dim]}
        dims |= {dim for dim, size in enumerate(known.shape) if private_sizes.is_symbolic(size)}
        if dims:
            changing[name] = frozenset(dims)
    # Marks on tensors are those of the forward's inputs; the flag only says that something is symbolic.
    return ShapePolicy(sizes=changing, marked=carries)


def _size_check(captured: JointGraph, fixed: Sequence[bool]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """Whether tensors have the sizes and strides that a capture with symbolic sizes is for. Those of the first ones that are
    ``fixed`` the guards of the entry have looked at.
    """
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")[: captured.num_primals]
    plain = [
        (
            position,
            [
                (
                    dim,
                    None if private_sizes.is_symbolic(size) else size,
                    None if private_sizes.is_symbolic(step) else step,
                )
                for dim, (size, step) in enumerate(zip(value.shape, value.stride(), strict=True))
            ],
        )
        for position, value in enumerate(node.meta["val"] for node in placeholders)
        if position >= len(fixed) or not fixed[position]
    ]
    assumed = shape_guards(captured.fake_mode.shape_env, captured.capture.bindings)

    def holds(flat: Sequence[torch.Tensor]) -> bool:
        for position, parts in plain:
            value = flat[position]
            for dim, size, step in parts:
                if (size is not None and value.size(dim) != size) or (step is not None and value.stride(dim) != step):
                    return False
        return assumed is None or assumed.holds(flat)

    return holds


def _obstacle(joint: JointGraph, needed: NeededInputs, options: Mapping[str, Any]) -> str:
    program = joint.program
    if program is None:
        return "the graph was not captured together with its program"
    if program.unreplayable:
        return f"the program cannot be replayed call by call: {program.unreplayable}"
    if joint.provenance:
        return "the joint graph was edited, and its derivatives come from the program as it was"
    if needed.draws and options.get("fallback_random", True) is not True:
        return "its random numbers are not eager's (fallback_random=False) and cannot be drawn again"
    return ""


def capture_backward(
    joint: JointGraph, request: Request, policy: ShapePolicy, math_attention: bool = False
) -> tuple[JointGraph, tuple[bool, ...]]:
    """The backward of ``joint`` for one pattern of tangents, as a joint graph of the next order.

    It returns those gradients that are any; the flags say which of the wanted ones that are.
    """
    program = joint.program
    assert program is not None
    names = iter(_names(joint, request))
    with contextlib.ExitStack() as stack:
        settings = CaptureSettings(policy, exact=joint.is_exact, math_attention=math_attention)
        trace = Trace(settings).open(stack)
        primals = {index: trace.input(real, next(names)).value for index, real in request.primals.items()}
        tangents = [trace.input(real, next(names)).value for real in request.tangents]
        descriptors: list[Descriptor] = [joint.input_descriptors[index] for index in primals]
        outputs = joint.input_descriptors[joint.num_primals :]
        # Inputs now: the tangents of this order are others.
        descriptors += [UserInput(str(item)) for item, flag in zip(outputs, request.defined, strict=True) if flag]
        gradients = _backward(trace, joint, program, request, primals, tangents)
        present = tuple(gradient for gradient in gradients if gradient is not None)
        program_of_gradients = trace.program(present)
        capture = CaptureResult(
            None, present, tuple(descriptors), _NoGuards(), program_of_gradients, trace.bindings(), joint.order + 1
        )
        return finish_joint(trace, capture), tuple(gradient is not None for gradient in gradients)


class _Number:
    """In place of an input that carries a number: what is read off it is the symbolic one."""

    def __init__(self, carrier: torch.Tensor) -> None:
        with private_calls.no_torch_function():
            number = torch.ops.aten._local_scalar_dense.default(carrier)
        self.item = lambda: number


def _backward(
    trace: Trace,
    joint: JointGraph,
    program: Program,
    request: Request,
    primals: Mapping[int, torch.Tensor],
    tangents: list[torch.Tensor],
) -> Sequence[torch.Tensor | None]:
    """The wanted gradients of a replay of the program."""
    placeholders = joint.graph_module.graph.find_nodes(op="placeholder")
    written = {mutation.input_index for mutation in joint.spec.mutations}
    written |= {change.input_index for change in joint.spec.metadata_changes}
    sources: list[torch.Tensor] = []
    for index, requires_grad in enumerate(joint.spec.input_requires_grad):
        value = primals.get(index)
        if value is None:
            # No gradient depends on its value, so that nothing of it stays in the graph.
            fake = placeholders[index].meta["val"]
            value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
            value.requires_grad_(requires_grad)
        sources.append(value)
    with torch.enable_grad():
        # A leaf could not be written to, and the gradient is that of the value before.
        inputs = [value.clone() if index in written else value for index, value in enumerate(sources)]
        carriers = {
            id(item.value) for item in trace.inputs if private_sizes.carried_float(item.node.meta["val"]) is not None
        }
        numbers = [_Number(item) if id(item) in carriers else item for item in inputs]
        outputs = replayed(trace, program).run(inputs, numbers)
        differentiable = [value for value, flag in zip(outputs, joint.spec.output_differentiable, strict=True) if flag]
        roots = [value for value, flag in zip(differentiable, request.defined, strict=True) if flag]
        wanted = [sources[index] for index in request.wanted]
        if not roots or not wanted:
            return [None] * len(wanted)
        with requested_gradients(trace, roots, twice=True, partial=joint.order > 1):
            gradients = torch.autograd.grad(roots, wanted, tangents, create_graph=True, allow_unused=True)
        # A tangent that is handed through would get a part of its gradient outside of the graph: a sum in another order than
        # eager's, which differs by rounding.
        given = {trace.node_of(tangent) for tangent in tangents}
        return [
            gradient.clone()
            if trace.settings.exact and gradient is not None and trace.node_of(gradient) in given
            else gradient
            for gradient in gradients
        ]
