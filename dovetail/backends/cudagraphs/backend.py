"""The ``cudagraphs`` backend: cut the graph, compile each part with a kernel backend, record what can be recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dovetail.backends.aten import ATEN
from dovetail.backends.common.outputs import own_copy, storage_address
from dovetail.backends.common.write_backs import write_back
from dovetail.backends.cudagraphs.cuda import CudaRecorder
from dovetail.backends.cudagraphs.numbers import can_read_from_memory, float_arguments, read_from_memory
from dovetail.backends.cudagraphs.obstacles import Obstacle, find_obstacle, is_float, is_number, node_tensors, on_host
from dovetail.backends.cudagraphs.parts import Part, cut, run_parts
from dovetail.backends.cudagraphs.recorder import Recorder
from dovetail.backends.cudagraphs.replay import Limits, PartSpec, RecordedPart
from dovetail.backends.cudagraphs.shared import Shared, shared_by, warn
from dovetail.backends.cudagraphs.simulated import simulated_recorder
from dovetail.backends.inductor.backend import INDUCTOR
from dovetail.backends.mutations import Memory, mutated_inputs, written_arguments
from dovetail.backends.protocol import Backend, CompiledCallable, Kind, output_arguments
from dovetail.errors import OptionError
from dovetail.torch_private import compilers as private_compilers
from dovetail.torch_private import sizes as private_sizes

_KERNELS = {"aten": ATEN, "inductor": INDUCTOR}
_PIPELINE_OPTIONS = ("static_inputs", "user_visible_outputs", "write_backs")
_LIMITS = {"warm_ups": "warm_ups", "max_shapes": "shapes", "max_in_flight": "in_flight", "max_moves": "moves"}
_CUDA = CudaRecorder()
#: How many places a warning names; the string of the compiled graph has them all.
_LISTED = 20
_NUMBER = "one of its arguments is a number that changes from call to call, and a recording would keep the first"


@dataclass(frozen=True)
class Settings:
    """The backend's options; ``rest`` belongs to the kernel backend.

    ``kernels``: the backend that makes the kernels, "aten" or "inductor" (where a compiler is found, unless given).
    ``recorder``: what records: "cuda" (unless given), "simulated" for the CPU, or a :class:`Recorder`.
    """

    kernels: Backend
    recorder: Recorder
    limits: Limits
    rest: Mapping[str, Any] = field(default_factory=dict)


def make_settings(options: Mapping[str, Any]) -> Settings:
    """Check the options; raises :class:`OptionError` for a value that an option cannot take.

    >>> make_settings({"kernels": "aten", "max_shapes": 2}).limits.shapes
    2
    """
    rest = {key: value for key, value in options.items() if key not in _PIPELINE_OPTIONS}
    default = "inductor" if private_compilers.has_triton() or private_compilers.cpp_compiler() is not None else "aten"
    name = rest.pop("kernels", default)
    if name not in _KERNELS:
        raise OptionError(
            f"kernels must be one of {', '.join(map(repr, _KERNELS))}, not {name!r}",
            advice='"aten" gives eager\'s numbers to the last bit, "inductor" compiles',
        )
    recorder = _find_recorder(rest.pop("recorder", "cuda"), name)
    limits = {}
    for option, attribute in _LIMITS.items():
        if option not in rest:
            continue
        value = rest.pop(option)
        least = 0 if option == "warm_ups" else 1
        if type(value) is not int or value < least:
            raise OptionError(f"{option} must be a whole number of at least {least}, not {value!r}")
        limits[attribute] = value
    if name == "aten" and rest:
        known = ["kernels", "recorder", *_LIMITS]
        raise OptionError(
            f"backend 'cudagraphs' with kernels=\"aten\" has no option {next(iter(rest))!r}",
            advice=f"its options are {', '.join(known)}",
        )
    return Settings(_KERNELS[name], recorder, Limits(**limits), rest)


def _find_recorder(given: Any, kernels: str) -> Recorder:
    if given == "cuda":
        return _CUDA
    if given == "simulated":
        return simulated_recorder(opaque=kernels == "inductor")
    if isinstance(given, str) or not callable(getattr(given, "record", None)):
        raise OptionError(
            f"recorder must be 'cuda', 'simulated' or a Recorder, not {given!r}",
            advice='"simulated" records on the CPU, and finds there what CUDA would get silently wrong',
        )
    return given  # type: ignore[no-any-return]


@dataclass
class RecordedGraph:
    """A compiled graph with what became of it: parts in order, and what could not be recorded."""

    run: Callable[[list[Any]], list[Any]]
    parts: tuple[Part, ...]
    recorded: tuple[RecordedPart, ...]
    obstacles: tuple[Obstacle, ...]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the graph; ``inputs`` may be emptied."""
        return self.run(inputs)

    def __str__(self) -> str:
        count = sum(part.recorded for part in self.parts)
        lines = [f"{len(self.parts)} parts, {count} of them recorded"]
        lines += [f"  not recorded: {obstacle}" for obstacle in self.obstacles]
        lines += [f"  given up: {part.given_up}" for part in self.recorded if part.given_up]
        return "\n".join(lines)


def compile_cudagraphs(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
) -> CompiledCallable:
    """Compile a graph so that its work for the device is recorded once and then replayed.

    Where nothing can be recorded the kernel backend runs the graph alone, with one warning that says why.
    """
    settings = make_settings(options)
    recorder = settings.recorder
    reason = recorder.unavailable()
    if reason:
        what, _, advice = reason.partition("; what to do: ")
        warn(f"CUDA graphs are not used: {what}", advice or 'use backend="inductor"', once=True)
        return _compile_alone(settings, graph, example_inputs, kind, options)
    own = own_copy(graph)
    _add_missing_values(own, example_inputs)
    write_back(own, options.get("write_backs", {}))
    device = _device_of(own, recorder)
    if device is None:
        warn(
            f"CUDA graphs are not used: the {kind} graph has no tensor on a device that records",
            'move the model and its inputs to the GPU with .to("cuda"), or use backend="inductor"',
            once=True,
        )
        return _compile_alone(settings, graph, example_inputs, kind, options)
    obstacles = _find_obstacles(own, recorder, device, exact=settings.kernels.numerics == "bitwise")
    parts = cut(own, lambda node: node not in obstacles)
    told = [obstacle for node, obstacle in obstacles.items() if obstacle is not None and not is_float(node)]
    if told:
        _tell(told, parts, kind)
    static = frozenset(options.get("static_inputs", ()))
    visible_outputs = options.get("user_visible_outputs")
    runs: list[CompiledCallable] = []
    recorded: list[RecordedPart] = []
    visible = _visible(own, visible_outputs)
    placeholders = {node: index for index, node in enumerate(own.graph.find_nodes(op="placeholder"))}
    for part in parts:
        numbers = read_from_memory(part.graph, device) if part.recorded else ()
        static_here = [index for index, node in enumerate(part.inputs) if placeholders.get(node) in static]
        kernels = _compile_part(settings, part, kind, static_here)
        if not part.recorded:
            runs.append(kernels)
            continue
        spec = PartSpec(
            kind,
            device,
            tuple(_name(node) for node in part.inputs),
            frozenset(static_here),
            frozenset(index for index in static_here if not private_sizes.has_symbols(part.inputs[index].meta["val"])),
            frozenset(numbers),
            mutated_inputs(part.graph),
            frozenset(index for index, node in enumerate(part.outputs) if visible(node)),
            keeps=not all(map(visible, part.outputs)),
        )
        made = RecordedPart(kernels, spec, recorder, settings.limits)
        recorded.append(made)
        runs.append(made)
    run = run_parts(own, parts, runs)
    if kind == "backward":
        run = _out_of_recordings(run, _may_be_inputs(own), shared_by(recorder))
    return RecordedGraph(run, tuple(parts), tuple(recorded), tuple(told))


def _compile_alone(
    settings: Settings,
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    kind: Kind,
    options: Mapping[str, Any],
) -> CompiledCallable:
    pipeline = {key: options[key] for key in _PIPELINE_OPTIONS[:2] if key in options}
    return settings.kernels.compile(graph, example_inputs, kind=kind, options={**settings.rest, **pipeline})


def _compile_part(settings: Settings, part: Part, kind: Kind, static: list[int]) -> CompiledCallable:
    nodes = part.graph.graph.nodes
    kernels, rest = settings.kernels, dict(settings.rest)
    if not part.recorded and (any(map(is_float, nodes)) or any(map(written_arguments, nodes))):
        # What a kernel compiler refuses runs as it is; it is not recorded anyway.
        kernels, rest = ATEN, {}
    examples = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    pipeline = {"static_inputs": static, "user_visible_outputs": list(range(len(part.outputs)))}
    return kernels.compile(part.graph, examples, kind=kind, options={**rest, **pipeline})


def _add_missing_values(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node, example in zip(placeholders, example_inputs):
        node.meta.setdefault("val", example)
    for node in graph.graph.find_nodes(op="get_attr"):
        value: Any = graph
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            node.meta.setdefault("val", value)


def _device_of(graph: torch.fx.GraphModule, recorder: Recorder) -> torch.device | None:
    """The device that most tensors of the graph lie on, among those that record."""
    counts: dict[torch.device, int] = {}
    for node in graph.graph.nodes:
        for value in node_tensors(node):
            if recorder.records(value) and private_sizes.carried_float(value) is None:
                counts[value.device] = counts.get(value.device, 0) + 1
    return max(counts, key=lambda device: counts[device]) if counts else None


def _find_obstacles(
    graph: torch.fx.GraphModule, recorder: Recorder, device: torch.device, *, exact: bool
) -> dict[torch.fx.Node, Obstacle | None]:
    """What cannot be recorded; None for what is no loss (a number that is computed on the host)."""
    found: dict[torch.fx.Node, Obstacle | None] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if is_float(node) or (is_number(node) and any(on_host(value, recorder) for value in node.all_input_nodes)):
            found[node] = None
        elif float_arguments(node) and not can_read_from_memory(node, exact=exact):
            found[node] = Obstacle(str(node.target), _NUMBER, node.meta.get("user_line"))
        else:
            obstacle = find_obstacle(node, recorder, device)
            if obstacle is not None:
                tensors = any(True for value in (node, *node.all_input_nodes) for _ in node_tensors(value))
                found[node] = obstacle if tensors else None
    return found


def _may_be_inputs(graph: torch.fx.GraphModule) -> list[int]:
    """Indices of the outputs that may share memory with an input."""
    memory = Memory(graph)
    groups = {memory.group(node) for node in graph.graph.find_nodes(op="placeholder")}
    results = enumerate(output_arguments(graph))
    return [index for index, node in results if isinstance(node, torch.fx.Node) and memory.group(node) in groups]


def _out_of_recordings(run: CompiledCallable, indices: Sequence[int], shared: Shared) -> CompiledCallable:
    """Copy gradients that are values which the forward has kept in a recording's memory: ``.grad`` outlives the step."""
    if not indices:
        return run

    def checked(inputs: list[Any]) -> list[Any]:
        outputs = run(inputs)
        for index in indices:
            value = outputs[index]
            if isinstance(value, torch.Tensor) and storage_address(value) in shared.kept:
                outputs[index] = value.clone()
        return outputs

    return checked


def _visible(graph: torch.fx.GraphModule, outputs: Sequence[int] | None) -> Callable[[torch.fx.Node], bool]:
    """Whether a node may share memory with an output that the user gets."""
    memory = Memory(graph)
    results = output_arguments(graph)
    chosen = range(len(results)) if outputs is None else outputs
    groups = {memory.group(results[index]) for index in chosen if isinstance(results[index], torch.fx.Node)}
    return lambda node: memory.group(node) in groups


def _name(node: torch.fx.Node) -> str:
    description = node.meta.get("desc")
    return str(description) if description is not None else node.name


def _tell(obstacles: Sequence[Obstacle], parts: Sequence[Part], kind: Kind) -> None:
    count = sum(part.recorded for part in parts)
    same = Counter(map(str, obstacles))
    lines = [f"\n  {text}{f' ({times} times)' if times > 1 else ''}" for text, times in same.items()]
    listed = "".join(lines[:_LISTED])
    more = f"\n  and at {len(lines) - _LISTED} other places" if len(lines) > _LISTED else ""
    advice = "keep tensors on the GPU and sizes fixed there, or leave it: everything else is still recorded"
    if any(obstacle.reason == _NUMBER for obstacle in obstacles):
        advice = f"pass such a number as a tensor on the GPU (torch's optimizers do with fused=True or capturable=True); {advice}"
    warn(
        f"{len(obstacles)} operators of the {kind} graph are left out of CUDA graphs, which cuts it into {len(parts)} parts "
        f"({count} recorded):{listed}{more}",
        advice,
        once=True,
    )


def _for_options(options: Mapping[str, Any]) -> Backend:
    kernels = make_settings(options).kernels
    return replace(
        CUDAGRAPHS,
        decompositions=kernels.decompositions,
        numerics=kernels.numerics,
        tolerances=kernels.tolerances,
        data_sizes=kernels.data_sizes,
    )


CUDAGRAPHS = Backend(
    "cudagraphs",
    compile_cudagraphs,
    numerics="tolerance",
    writes_back=True,
    description='recorded once, then replayed, over the kernels of kernels="aten" or "inductor"',
    for_options=_for_options,
)
