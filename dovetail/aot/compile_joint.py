"""Stage 2, compiling: both graphs are made of the joint graph, handed to the backend, and bound into one runtime function.

>>> # compile_joint(state, joint, backend)
>>> #     prepare            required passes, the rules of a joint graph, what the backend promises
>>> #     decompose          the operators that the backend wants
>>> #     split              forward and backward graph, and what is saved between them
>>> #     lower_forward      the backend compiles the forward
>>> #     lower_backward     the backend compiles the backward that is expected; others when they are needed
>>> #     bind               the runtime function around both

The steps are functions over :class:`dovetail.aot.steps.Lowering`; passes hook in between them (:mod:`dovetail.aot.steps`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dovetail.aot import steps
from dovetail.aot.backward_graphs import BackwardGraphs, FlatCallable, expected_pattern, tangent_strides
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.descriptors import BufferInput, ParamInput, Tangent, UserInput
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import BY_USER_BACKWARD, checks_assumption, has_symbolic_sizes, needed_for
from dovetail.aot.partition import partition, save_everything
from dovetail.aot.state import AOTState
from dovetail.aot.steps import BackendGraph, CompileSettings, FindReused, Lowering
from dovetail.backends import Backend, compile_with, lookup_backend
from dovetail.backends.protocol import Kind
from dovetail.errors import BackendError, CaptureError, EagerFallbackWarning, OptionError
from dovetail.events import EventLog
from dovetail.guards.ambient import without_autocast
from dovetail.options import check_budget, check_choice
from dovetail.runtime.function import RuntimeFunction, make_runtime_function
from dovetail.runtime.spec import FreshOutput, RuntimeSpec, ViewOutput


def choose_backend(backend: str | Callable[..., Any] | None, numerics: str) -> Backend:
    """The backend of this name; where none is named, the backend that keeps what ``numerics`` asks for."""
    return lookup_backend("aten" if backend is None and numerics == "exact" else backend)


def compile_joint(
    state: AOTState | None,
    joint: JointGraph,
    backend: str | Callable[..., Any] | Backend | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    events: EventLog | None = None,
    memory_budget: float | int | None = None,
    numerics: str = "fast",
    for_entry: bool = False,
    find_reused: FindReused | None = None,
) -> CompiledGraph:
    """Compile a joint graph with a backend, by name or as a callable.

    ``state`` may be None or closed: a joint graph stands on its own. ``memory_budget`` and ``numerics`` are those of
    :class:`dovetail.options.Options`, ``find_reused`` is that of :class:`dovetail.aot.steps.CompileSettings`, and ``for_entry``
    sets the others of these. Raises :class:`BackendError` if the backend fails, :class:`GraphInvalidError` if the graph breaks a
    rule, and :class:`OptionError` for a budget that cannot be kept.
    """
    check_budget(memory_budget)
    check_choice("numerics", numerics)
    chosen = backend if isinstance(backend, Backend) else choose_backend(backend, numerics)
    log = events if events is not None else EventLog()
    settings = CompileSettings(dict(options or {}), log, memory_budget, numerics, for_entry, find_reused, for_entry)
    return run_steps(Lowering(joint, chosen.with_options(settings.options), settings))


@without_autocast()
def run_steps(lowering: Lowering) -> CompiledGraph:
    """Everything that ``compile_joint`` does, from its arguments as data; the graph has its casts already."""
    for instead in steps.instead_of_steps:
        compiled = instead(lowering)
        if compiled is not None:
            return compiled
    lowering = prepare(lowering)
    if lowering.backend.takes_program:
        return CompiledGraph(lowering, lowering.backend, _program_runner(lowering))
    for step in (decompose, split, lower_forward, lower_backward):
        lowering = step(lowering)
    return bind(lowering)


# --- prepare ----------------------------------------------------------------------------------------------------------


def prepare(lowering: Lowering) -> Lowering:
    """Run the passes that the graph needs, check it, and refuse what the backend cannot keep."""
    joint, backend = lowering.joint, lowering.backend
    for required in steps.required_passes:
        graph_pass = required(joint)
        if graph_pass is not None:
            joint = joint.apply(graph_pass)
    joint.lint()
    if not any(node.op == "call_function" for node in joint.graph.nodes):
        # Nothing to compile: before a graph break at the very start, say.
        backend = lookup_backend("aten")
    lowering = lowering.with_(joint=joint, backend=backend)
    _check_promises(lowering)
    # Assumptions about the data must hold before anything is written.
    assumes = any(map(checks_assumption, joint.graph.nodes))
    writes_back = backend.writes_back and not lowering.is_training and not assumes
    # Before decompositions, which may leave out the copies by which the program keeps values apart.
    read_later = tuple(item for hook in steps.reads_later for item in hook(joint)) if lowering.is_training else ()
    return lowering.with_(write_backs=_write_backs(joint.spec) if writes_back else {}, read_later=read_later)


def _check_promises(lowering: Lowering) -> None:
    """Raise where the backend cannot keep what it or the caller promises."""
    joint, backend, settings = lowering.joint, lowering.backend, lowering.settings
    if backend.takes_program:
        if settings.memory_budget is not None:
            raise OptionError(
                f"the backend {backend.name} runs under torch's own autograd, which saves what it saves",
                advice='use memory_budget with backend="aten" or "inductor"',
            )
        return
    is_bitwise = backend.numerics == "bitwise"
    if (is_bitwise or settings.numerics == "exact") and joint.inexact and joint.order == 1:
        promise = f"the backend {backend.name}" if is_bitwise else 'numerics="exact"'
        raise CaptureError(
            f"while tracing, torch computes the gradient of {', '.join(joint.inexact)} by another formula than in eager, "
            f"and {promise} promises eager's numbers to the last bit",
            advice='use backend="inductor" and numerics="fast", whose numbers agree up to rounding',
        )
    if settings.numerics == "exact" and backend.decompositions():
        raise OptionError(
            f"the backend {backend.name} runs decompositions of the captured operators, whose numbers are not eager's",
            advice='use backend="aten" with numerics="exact", or numerics="fast"',
        )


def _write_backs(spec: RuntimeSpec) -> dict[int, int]:
    """Outputs that are nothing but an input's new value, in the shape and strides that it has had, and that input."""
    changed = {change.input_index for change in spec.metadata_changes}
    otherwise = {dependency.output for dependency in spec.dependencies}
    otherwise |= {item.output_index for item in spec.mutations if item.input_index in changed}
    for output in spec.outputs:
        base = output.base if isinstance(output, ViewOutput) else output
        if isinstance(base, FreshOutput):
            otherwise.add(base.index)
    return {
        item.output_index: item.input_index
        for item in spec.mutations
        if item.counted and not item.differentiable and item.output_index not in otherwise
    }


# --- decompose and split ----------------------------------------------------------------------------------------------


def decompose(lowering: Lowering) -> Lowering:
    """Write the graph in terms of the operators that the backend wants."""
    joint, table = lowering.joint, lowering.backend.decompositions()
    if not table:
        return lowering
    with lowering.settings.events.span("decompose"):
        for hook in reversed(list(steps.decomposes)):
            module = hook(lowering, table)
            if module is not None:
                return lowering.with_(joint=joint.with_graph(module))
    raise OptionError(
        f"the backend {lowering.backend.name} wants other operators, and no pass that decomposes is loaded",
        advice="import dovetail.passes",
    )


def split(lowering: Lowering) -> Lowering:
    """Split the graph into forward and backward."""
    settings, joint = lowering.settings, lowering.joint
    choosers = [hook(lowering) for hook in steps.choose_saved]
    if settings.memory_budget is not None and not choosers:
        raise OptionError(
            "a memory_budget is given, and no pass that plans memory is loaded", advice="import dovetail.passes"
        )
    with settings.events.span("partition") as details:
        numbers = {} if settings.find_reused is None else settings.find_reused(joint)
        parts = partition(joint, choosers[-1] if choosers else save_everything, list(numbers))
        number_of = {node.name: number for node, number in numbers.items()}
        details["saved_bytes"] = parts.saved_bytes
        if parts.memory is not None:
            details["memory"] = str(parts.memory)
    lowering = lowering.with_(parts=parts, reused=tuple(number_of[name] for name in parts.reused))
    for hook in steps.after_partition:
        lowering = hook(lowering)
    return lowering


# --- lower ------------------------------------------------------------------------------------------------------------


def lower_forward(lowering: Lowering) -> Lowering:
    """Have the backend compile the forward."""
    assert lowering.parts is not None
    graph, visible = lowering.parts.forward, tuple(range(lowering.joint.num_forward_outputs))
    kind: Kind = "forward" if lowering.is_training else "inference"
    with lowering.settings.events.span("compile forward", backend=lowering.backend.name) as details:
        forward = _lowered(lowering, BackendGraph(kind, graph, graph, visible, lowering.write_backs), details)
    return lowering.with_(forward=forward)


def lower_backward(lowering: Lowering) -> Lowering:
    """Have the backend compile the backward for the tangents that are expected; those for others follow when they are needed."""
    if not lowering.is_training:
        return lowering
    parts, joint = lowering.parts, lowering.joint
    assert parts is not None

    def lower(graph: torch.fx.GraphModule, is_sealed: bool) -> FlatCallable:
        placeholders = graph.graph.find_nodes(op="placeholder")
        # Once the guards are installed, only a backend that assumes nothing about sizes can still be asked.
        backend = lookup_backend("aten") if is_sealed and has_symbolic_sizes(placeholders) else lowering.backend
        count = sum(isinstance(node.meta.get("desc"), Tangent) for node in placeholders)
        with lowering.settings.events.span("compile backward", backend=backend.name, tangents=count) as details:
            unit = BackendGraph("backward", graph, graph, tuple(range(joint.num_primals)))
            try:
                return _lowered(lowering.with_(backend=backend), unit, details)
            except BackendError as error:
                # The forward has run by now where the pattern of tangents is another one than was expected.
                if not is_sealed or backend.name == "aten":
                    raise
                warnings.warn(
                    f'a backward runs operator by operator (backend="aten"): {error}', EagerFallbackWarning, 2
                )
                return _lowered(lowering.with_(backend=lookup_backend("aten")), unit, details)

    backward = BackwardGraphs(parts.backward, joint.num_primals + len(lowering.reused), lower)
    backward.seal(lowering.settings.expected or expected_pattern(joint))
    return lowering.with_(backward=backward)


@without_autocast()
def _lowered(lowering: Lowering, unit: BackendGraph, details: dict[str, Any]) -> FlatCallable:
    """The callable of one graph."""
    for hook in steps.before_backend:
        unit = hook(lowering, unit)
    details.update(unit.details)
    options = {
        **lowering.settings.options,
        "user_visible_outputs": list(unit.visible),
        "static_inputs": _static_inputs(unit.graph),
        "guarded_inputs": lowering.settings.guarded_inputs and unit.kind != "backward",
    }
    if lowering.backend.writes_back and unit.kind == "inference":
        options["write_backs"] = dict(unit.write_backs)
    examples = [node.meta["val"] for node in unit.graph.graph.find_nodes(op="placeholder")]
    run = compile_with(lowering.backend, unit.graph, examples, unit.kind, options)
    for wrapper in reversed(unit.wrappers):
        run = wrapper(run)
    return run


def _static_inputs(graph: torch.fx.GraphModule) -> list[int]:
    """Inputs that are likely to stay at one address: parameters, buffers, and tensors that are not reached from an argument."""

    def stays(descriptor: Any) -> bool:
        if isinstance(descriptor, UserInput):
            return not descriptor.path.startswith(("L[", "args[", "kwargs["))
        return isinstance(descriptor, (ParamInput, BufferInput))

    placeholders = graph.graph.find_nodes(op="placeholder")
    return [index for index, node in enumerate(placeholders) if stays(node.meta.get("desc"))]


# --- bind -------------------------------------------------------------------------------------------------------------


def bind(lowering: Lowering) -> CompiledGraph:
    """The function that runs both graphs as one node of autograd, with what eager does around them."""
    joint = lowering.joint
    assert lowering.forward is not None
    derivatives = keep_apart = None
    if lowering.is_training:
        for provide in steps.differentiable_backward:
            derivatives = provide(lowering)
        for keep in steps.saved_apart:
            keep_apart = keep(lowering)
    run = make_runtime_function(
        joint.spec.with_further_inputs(len(lowering.reused)),
        lowering.forward,
        lowering.backward,
        tangent_strides=tangent_strides(joint),
        derivatives=derivatives,
        keep_apart=keep_apart,
        unreached=_unreached(joint),
        read_later=lowering.read_later,
    )
    return CompiledGraph(lowering, lowering.backend, run)


def _unreached(joint: JointGraph) -> list[int]:
    """The inputs that get no gradient whatever is asked for.

    Not those from which a hook or a custom backward computes gradients: these have a derivative with respect to them.
    """
    by_code = [node for node in joint.graph.nodes if BY_USER_BACKWARD in node.meta]
    kept = needed_for(by_code)
    pairs = enumerate(zip(joint.primals, joint.gradients, strict=True))
    return [index for index, (node, gradient) in pairs if gradient is None and node not in kept]


def _program_runner(lowering: Lowering) -> RuntimeFunction:
    """Run the torch-level program tape: eager's own operators under eager's own autograd."""
    program = lowering.joint.capture.program
    if program.refusals:
        raise CaptureError(
            f"the program cannot be replayed call by call: {program.refusals[0]}", advice='use backend="aten" instead'
        )
    if lowering.joint.provenance:
        raise CaptureError(
            "the joint graph was edited, and the eager backend runs the program as it was", advice='use backend="aten"'
        )
    return program.run  # type: ignore[no-any-return]
