"""The next order: the backward of a joint graph, captured as a joint graph of its own.

The program tape is replayed on the forward's inputs under a new trace and autograd is asked for its gradients with
``create_graph=True``. That is a function of inputs and tangents, captured with its own backward like any other function; as it
has a program tape too, the order after it is made in the same way.

>>> # differentiable_backward(lowering)      the hook of aot/steps.py
>>> #     DifferentiableBackward.run         at a backward with gradients enabled
>>> #         _Capturing(request)            for a kind of backward that is new
>>> #             capture_backward           replays the program, asks for gradients, finish_joint
>>> #             compile_joint
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dovetail.aot.capture_joint import finish_joint, lacks_derivative
from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.compile_joint import compile_joint
from dovetail.aot.descriptors import Descriptor, UserInput
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import BY_USER_BACKWARD, GIVEN_TO, has_symbolic_sizes, needed_for
from dovetail.aot.steps import Lowering
from dovetail.aot.steps import differentiable_backward as provides_derivatives
from dovetail.backends.registry import lookup_backend
from dovetail.errors import BackendError, CaptureError, EagerFallbackWarning, UserLocation
from dovetail.face.warnings import warn_user
from dovetail.guards import GuardSet
from dovetail.higher_order.backward import (
    MOST_VERSIONS,
    BackwardFunction,
    CapturedBackward,
    DifferentiableBackward,
    Request,
    Sizes,
    sizes_and_strides,
)
from dovetail.higher_order.between_outputs import BetweenOutputs, has_custom_functions
from dovetail.higher_order.eager_replay import as_written, eager_backward, unread_input
from dovetail.higher_order.gradient_strides import Strides, gap_strides, keep_common
from dovetail.higher_order.graph_replay import gradients_by_operators, is_replayed_by_operators
from dovetail.higher_order.kept_inputs import NeededInputs
from dovetail.higher_order.other_backwards import OtherBackwards
from dovetail.higher_order.read_results import ReadResults
from dovetail.higher_order.reused_forward_values import EarlierOrder, find_reused
from dovetail.passes.equal_calls import IN_GRADIENTS
from dovetail.passes.unfinished_runs import has_random_result
from dovetail.quirks.replays import replayed
from dovetail.runtime.derivatives import refusal
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import state as private_state
from dovetail.trace import CaptureSettings, ShapePolicy, Trace, shape_guards
from dovetail.trace.overrides import requested_gradients
from dovetail.trace.shapes import NUMBER_SUFFIX

_UNREPLAYABLE = "the program cannot be replayed call by call: {}"


class _NoGuards(GuardSet):
    """The metadata of every input is part of the key under which a captured backward is kept: nothing else is to check."""

    def add_leafness(self, index: int, location: UserLocation | None = None) -> None:
        """Part of the key."""

    def add_separate_memory(self, index: int) -> None:
        """Inputs are written to in clones only."""


def needed_inputs(joint: JointGraph) -> NeededInputs:
    """The inputs that a derivative of the backward needs: those that any gradient is computed from.

    All of them where a custom backward may be given some gradients only: it may then read what it does not read otherwise. And
    a custom backward leads to inputs that nothing it reads is computed from.
    """
    primals = joint.primals
    reached = needed_for(joint.gradients)
    has_code = any(BY_USER_BACKWARD in node.meta for node in joint.graph.nodes)
    if any(GIVEN_TO in tangent.meta for tangent in joint.tangents):
        reached.update(primals)
    elif has_code:
        reached.update(node for node, flag in zip(primals, joint.spec.input_requires_grad, strict=True) if flag)
    # The program may compute with a number of which the graph reads only what is computed of it.
    numbers = [node for node in primals if private_sizes.carried_float(node.meta.get("val")) is not None]
    reached.update(numbers)
    symbolic = has_symbolic_sizes(primals)
    indices = tuple(
        index for index, node in enumerate(primals) if symbolic or node in reached or IN_GRADIENTS in node.meta
    )
    draws = [node for node in joint.graph.nodes if has_random_result(node)]
    devices = {node.meta["val"].device.index for node in draws if getattr(node.meta.get("val"), "is_cuda", False)}
    written = frozenset(mutation.input_index for mutation in joint.spec.mutations)
    varying = tuple(index for index in indices if has_symbolic_sizes([primals[index]]))
    # A hook may read what its tensor is not computed from.
    is_whole = symbolic or has_code or bool(numbers) or joint.spec.freed_by_backward is None
    of_outputs = () if is_whole else _inputs_of_outputs(joint)
    return NeededInputs(indices, written, bool(draws), tuple(sorted(devices)), varying, of_outputs)


def _inputs_of_outputs(joint: JointGraph) -> tuple[frozenset[int], ...]:
    """The inputs that each differentiable output is computed from."""
    number_of = {node: index for index, node in enumerate(joint.primals)}
    return tuple(
        frozenset(number_of[node] for node in needed_for([result]) if node in number_of)
        for result, flag in zip(joint.results, joint.spec.output_differentiable, strict=False)
        if flag
    )


@provides_derivatives
def differentiable_backward(lowering: Lowering) -> DifferentiableBackward:
    """The backward of a joint graph as something that can be differentiated; each order is captured when it is first needed."""
    gradients = [None if node is None else node.meta["val"] for node in lowering.joint.gradients]
    gaps = gap_strides(gradients)
    needed = needed_inputs(lowering.joint)
    assert lowering.backward is not None
    differs = OtherBackwards(lowering, lowering.backward)
    between = BetweenOutputs(lowering.joint, _obstacle_between(lowering.joint, needed, lowering.settings.options))
    capturing, read = _Capturing(lowering, needed, gaps), ReadResults.of(lowering.joint)
    return DifferentiableBackward(needed, capturing, gaps, differs, between, read)


class _Capturing:
    """Captures and compiles the next order of one joint graph."""

    def __init__(self, lowering: Lowering, needed: NeededInputs, gaps: Strides) -> None:
        self._lowering = lowering
        self._joint = lowering.joint
        self._backend = lowering.backend
        self._needed = needed
        self._gaps = gaps

    def __call__(self, request: Request, earlier: Sequence[Sizes]) -> CapturedBackward:
        self._lowering = self._lowering.completed()
        self._joint = self._lowering.joint
        settings = self._lowering.settings
        reason = _obstacle(self._joint, self._needed, settings.options)
        if reason:
            raise refusal(reason)
        in_eager = eager_backward(self._joint, request)
        if in_eager is not None and len(earlier) >= MOST_VERSIONS:
            settings.events.note(
                "the next order runs eagerly", reason=f"it was captured for {MOST_VERSIONS} kinds of tangents"
            )
            return CapturedBackward(in_eager, (), lambda flat: True)
        with private_state.preserved_rng_state(), settings.events.span("compile the next order"):
            policy = _policy(self._joint, request, earlier)
            if not policy.is_static:
                try:
                    return self._capture(request, policy)
                except Exception as error:  # noqa: BLE001  (whatever symbolic sizes lead to, plain ones may not)
                    settings.events.note("static shapes", reason=f"{type(error).__name__}: {error}")
            try:
                return self._capture_for_backend(request)
            except Exception as error:
                if in_eager is None or isinstance(error, CaptureError):
                    raise
                # Eager may succeed where torch's tracer or a backend fails.
                reason = f"{type(error).__name__}: {error}"
                settings.events.note("the next order runs eagerly", reason=reason)
                warn_user(
                    f"a derivative of a compiled function's backward runs eagerly: {reason}", EagerFallbackWarning
                )
                return CapturedBackward(in_eager, (), lambda flat: True)

    def in_eager(self, request: Request) -> BackwardFunction:
        """See the protocol."""
        self._lowering = self._lowering.completed()
        self._joint = self._lowering.joint
        reason = _obstacle(self._joint, self._needed, self._lowering.settings.options)
        found = None if reason else eager_backward(self._joint, request, any_order=True)
        if found is None:
            raise refusal(
                reason or "the gradients are batched (is_grads_batched=True), and the program cannot run again"
            )
        return found

    def _capture_for_backend(self, request: Request) -> CapturedBackward:
        try:
            return self._capture(request, ShapePolicy())
        except BackendError as error:
            if self._backend.name != "inductor":
                raise
            self._lowering.settings.events.note("backend given up", instead="aten", reason=error.what)
            self._backend = lookup_backend("aten")
            return self._capture(request, ShapePolicy())

    def _capture(self, request: Request, policy: ShapePolicy) -> CapturedBackward:
        try:
            captured, present = capture_backward(self._joint, request, policy)
        except (RuntimeError, NotImplementedError) as error:
            if not lacks_derivative(error):
                raise
            # Fused attention has no second derivative; the operators that it is made of have one.
            self._lowering.settings.events.note("attention by its parts", reason=str(error))
            captured, present = capture_backward(self._joint, request, policy, math_attention=True)
        run, reused = self._compile(captured, request)
        if self._gaps:
            nodes = captured.gradients[: len(request.primals)]
            values = [None if node is None else node.meta["val"] for node in nodes]
            keep_common(self._gaps, list(request.primals), values)
        varying = set(self._needed.varying)
        fixed = [index not in varying for index in request.primals]
        flat = [*request.primals.values(), *request.tangents]
        holds = None if policy.is_static else _size_check(captured, fixed)
        # A custom function may read other values by now, as the replay has: both would be wrong alike.
        in_eager = None if has_custom_functions(self._joint) else eager_backward(self._joint, request)
        return CapturedBackward(
            _with_gaps(run, present), sizes_and_strides(flat), holds, reused=reused, in_eager=in_eager
        )

    def _compile(self, captured: JointGraph, request: Request) -> tuple[BackwardFunction, tuple[int, ...]]:
        """The compiled graph, and the places of the values that the forward has saved and it takes."""
        lowering = self._lowering
        settings, parts, find = lowering.settings, lowering.parts, None
        taken = None if lowering.backward is None else lowering.backward.graph_of(request.defined)
        if parts is not None and taken is not None:
            # Values saved for other outputs may be freed by then; those that this backward reads have seen the program's writes.
            read = [item if place in taken[1] else None for place, item in enumerate(parts.saved)]
            before = EarlierOrder(self._joint, tuple(read), tuple(request.primals))

            def find(joint: JointGraph) -> Mapping[torch.fx.Node, int]:
                return find_reused(before, joint)

        compiled = compile_joint(
            None,
            captured,
            self._backend,
            options=settings.options,
            events=settings.events,
            numerics=settings.numerics,
            find_reused=find,
        )
        moved = _laid_out_otherwise(lowering)
        first = len(captured.primals)
        places = frozenset(first + index for index, place in enumerate(compiled.lowering.reused) if place in moved)
        return _with_contiguous(compiled.run, places), compiled.lowering.reused


def _laid_out_otherwise(lowering: Lowering) -> frozenset[int]:
    """The places of the saved values that a hook of the backend has given other strides than they were captured with."""
    parts, joint = lowering.parts, lowering.joint
    if parts is None:
        return frozenset()
    captured = {node.name: node.meta.get("val") for node in joint.graph.nodes}
    results: Any = parts.forward.graph.output_node().args[0]
    saved = enumerate(results[joint.num_forward_outputs :])
    return frozenset(place for place, node in saved if node.meta.get("val") is not captured.get(node.name))


def _with_contiguous(run: BackwardFunction, places: frozenset[int]) -> BackwardFunction:
    """``run``, whose inputs at these places were captured contiguous."""
    if not places:
        return run

    def contiguous(flat: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        return run([value.contiguous() if index in places else value for index, value in enumerate(flat)])

    return contiguous


def _with_gaps(run: BackwardFunction, present: tuple[bool, ...]) -> BackwardFunction:
    if all(present):
        return run

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
    """Sizes that are symbolic in the forward are symbolic in its backward, and so are those that changed since a capture."""
    primals = joint.primals
    tangents = [node for node, flag in zip(joint.tangents, request.defined, strict=True) if flag]
    before = [*(primals[index] for index in request.primals), *tangents]
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
    # Sizes and strides that are symbols are None: the guards check them.
    plain: list[Any] = [
        (position, dim, *(None if private_sizes.is_symbolic(item) else item for item in pair))
        for position, value in enumerate(node.meta["val"] for node in captured.primals)
        if position >= len(fixed) or not fixed[position]
        for dim, pair in enumerate(zip(value.shape, value.stride(), strict=True))
    ]
    assumed = shape_guards(captured.fake_mode.shape_env, captured.capture.bindings)

    def holds(flat: Sequence[torch.Tensor]) -> bool:
        for position, dim, size, step in plain:
            value = flat[position]
            if (size is not None and value.size(dim) != size) or (step is not None and value.stride(dim) != step):
                return False
        return assumed is None or assumed.holds(flat)

    return holds


def _obstacle(joint: JointGraph, needed: NeededInputs, options: Mapping[str, Any]) -> str:
    program = joint.program
    if program is None:
        return "the graph was not captured together with its program"
    if program.refusals and not is_replayed_by_operators(joint):
        return _UNREPLAYABLE.format(program.refusals[0])
    if joint.provenance:
        return "the joint graph was edited, and its derivatives come from the program as it was"
    if needed.draws and any(BY_USER_BACKWARD in node.meta and has_random_result(node) for node in joint.graph.nodes):
        # It draws on where the generator is at the backward, and a replay runs with the numbers of the forward.
        return "a hook or a custom backward in it draws random numbers"
    if needed.draws and options.get("fallback_random", True) is not True:
        return "its random numbers are not eager's (fallback_random=False) and cannot be drawn again"
    return ""


def _obstacle_between(joint: JointGraph, needed: NeededInputs, options: Mapping[str, Any]) -> str:
    """The obstacle (:func:`_obstacle`) to gradients between outputs, which need the program's calls with the forward's values."""
    refusals = () if joint.program is None else joint.program.refusals
    return _obstacle(joint, needed, options) or (_UNREPLAYABLE.format(refusals[0]) if refusals else "")


def capture_backward(
    joint: JointGraph, request: Request, policy: ShapePolicy, math_attention: bool = False
) -> tuple[JointGraph, tuple[bool, ...]]:
    """The backward of ``joint`` for one pattern of tangents, as a joint graph of the next order.

    It returns those of the wanted gradients that exist; the flags say which do.
    """
    assert joint.program is not None
    names = iter(_names(joint, request))
    with contextlib.ExitStack() as stack:
        trace = Trace(CaptureSettings(policy, exact=joint.is_exact, math_attention=math_attention)).open(stack)
        primals = {index: trace.input(real, next(names)).value for index, real in request.primals.items()}
        tangents = [trace.input(real, next(names)).value for real in request.tangents]
        descriptors: list[Descriptor] = [joint.input_descriptors[index] for index in primals]
        outputs = joint.input_descriptors[joint.num_primals :]
        # Inputs now: the tangents of this order are others.
        descriptors += [UserInput(str(item)) for item, flag in zip(outputs, request.defined, strict=True) if flag]
        gradients = _gradients(trace, joint, request, primals, tangents)
        present = tuple(gradient for gradient in gradients if gradient is not None)
        calls, bindings = trace.program(present), trace.bindings()
        capture = CaptureResult(None, present, tuple(descriptors), _NoGuards(), calls, bindings, joint.order + 1)
        return finish_joint(trace, capture), tuple(gradient is not None for gradient in gradients)


class _Number:
    """In place of an input that carries a number: ``item()`` gives the symbolic one."""

    def __init__(self, carrier: torch.Tensor) -> None:
        with private_calls.no_torch_function():
            number = torch.ops.aten._local_scalar_dense.default(carrier)
        self.item = lambda: number


def _gradients(
    trace: Trace, joint: JointGraph, request: Request, primals: Mapping[int, torch.Tensor], tangents: list[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """The wanted gradients of a replay of the program."""
    with torch.enable_grad():
        sources = _sources(joint, primals)
        if joint.program is not None and joint.program.refusals:
            return gradients_by_operators(joint, request, sources, tangents)
        outputs = _replay(trace, joint, sources)
        differentiable = [value for value, flag in zip(outputs, joint.spec.output_differentiable, strict=True) if flag]
        roots = [value for value, flag in zip(differentiable, request.defined, strict=True) if flag]
        wanted = [sources[index] for index in request.wanted]
        if not roots or not wanted:
            return [None] * len(wanted)
        with requested_gradients(trace, roots, twice=request.twice, partial=joint.order > 1):
            gradients = torch.autograd.grad(roots, wanted, tangents, create_graph=request.twice, allow_unused=True)
        if not trace.settings.exact:
            return gradients
        # A tangent that is handed through would get a part of its gradient outside of the graph: a sum in another order than
        # eager's, which differs by rounding.
        handed_in = {trace.node_of(tangent) for tangent in tangents}
        return [
            gradient.clone() if gradient is not None and trace.node_of(gradient) in handed_in else gradient
            for gradient in gradients
        ]


def _sources(joint: JointGraph, primals: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """All inputs of the program, where ``primals`` has some of them."""
    sources: list[torch.Tensor] = []
    for index, requires_grad in enumerate(joint.spec.input_requires_grad):
        value = primals[index] if index in primals else unread_input(joint, index)
        # A result may depend on it in steps only; but the program may take a derivative with respect to it.
        sources.append(value.detach().requires_grad_() if requires_grad and not value.requires_grad else value)
    return sources


def _replay(trace: Trace, joint: JointGraph, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of the program."""
    assert joint.program is not None
    inputs = as_written(joint, sources)
    carriers = {
        id(item.value) for item in trace.inputs if private_sizes.carried_float(item.node.meta["val"]) is not None
    }
    numbers = [_Number(item) if id(item) in carriers else item for item in inputs]
    return replayed(trace, joint.program).run(inputs, numbers)
