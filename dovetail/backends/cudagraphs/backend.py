"""The ``cudagraphs`` backend: cuts the graph, compiles each piece with a kernel backend, records what can be recorded."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from dovetail.backends.aten import ATEN
from dovetail.backends.common.memory import storage_address
from dovetail.backends.common.outputs import own_copy
from dovetail.backends.cudagraphs.cuda import CudaRecorder
from dovetail.backends.cudagraphs.obstacles import (
    Obstacle,
    can_read_from_memory,
    find_obstacle,
    float_arguments,
    is_float,
    is_number,
    node_tensors,
    on_host,
    read_from_memory,
)
from dovetail.backends.cudagraphs.pieces import Piece, cut, run_pieces
from dovetail.backends.cudagraphs.recorder import Recorder
from dovetail.backends.cudagraphs.replay import Limits, RecordedPiece
from dovetail.backends.cudagraphs.shared import shared_by, warn
from dovetail.backends.cudagraphs.simulated import simulated_recorder
from dovetail.backends.cudagraphs.slots import PieceSpec
from dovetail.backends.inductor.backend import INDUCTOR
from dovetail.backends.protocol import PIPELINE_OPTIONS, Backend, CompiledCallable, Kind, output_arguments
from dovetail.errors import OptionError
from dovetail.passes.mutations import Memory, mutated_inputs, written_arguments
from dovetail.passes.write_backs import write_back
from dovetail.torch_private import compilers as private_compilers
from dovetail.torch_private import sizes as private_sizes

_KERNELS = {"aten": ATEN, "inductor": INDUCTOR}
_CUDA = CudaRecorder()
#: The number of places that a warning names; the string of the compiled graph has them all.
_LISTED = 20
_NUMBER = "one of its arguments is a number that changes from call to call, and a recording would keep the first"


@dataclass(frozen=True)
class Settings:
    """The backend's options; ``rest`` belongs to the kernel backend.

    ``kernels``: the backend that makes the kernels, "aten" or "inductor" (where a compiler is found, unless given).
    ``recorder``: "cuda" (unless given), "simulated" for the CPU, or a :class:`Recorder`.
    """

    kernels: Backend
    recorder: Recorder
    limits: Limits
    rest: Mapping[str, Any] = field(default_factory=dict)


def make_settings(options: Mapping[str, Any]) -> Settings:
    """Check the options; raises :class:`OptionError` for a value that an option cannot take.

    >>> make_settings({"kernels": "aten", "max_shapes": 2}).limits.max_shapes
    2
    """
    rest = {key: value for key, value in options.items() if key not in PIPELINE_OPTIONS}
    default = "inductor" if private_compilers.has_triton() or private_compilers.cpp_compiler() is not None else "aten"
    name = rest.pop("kernels", default)
    if name not in _KERNELS:
        raise OptionError(
            f"kernels must be one of {', '.join(map(repr, _KERNELS))}, not {name!r}",
            advice='"aten" gives eager\'s numbers to the last bit, "inductor" compiles',
        )
    recorder = _find_recorder(rest.pop("recorder", "cuda"), name)
    names = [limit.name for limit in fields(Limits)]
    limits = {option: rest.pop(option) for option in names if option in rest}
    for option, value in limits.items():
        least = 0 if option == "warm_ups" else 1
        if type(value) is not int or value < least:
            raise OptionError(f"{option} must be a whole number of at least {least}, not {value!r}")
    if name == "aten" and rest:
        raise OptionError(
            f"backend 'cudagraphs' with kernels=\"aten\" has no option {next(iter(rest))!r}",
            advice=f"its options are {', '.join(['kernels', 'recorder', *names])}",
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
    """A compiled graph: its pieces in order, and the obstacles to recording all of it."""

    run: CompiledCallable
    pieces: tuple[Piece, ...]
    recorded: tuple[RecordedPiece, ...]
    obstacles: tuple[Obstacle, ...]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the graph; ``inputs`` may be emptied."""
        return self.run(inputs)

    def __str__(self) -> str:
        lines = [f"{len(self.pieces)} pieces, {len(self.recorded)} of them recorded"]
        lines += [f"  not recorded: {obstacle}" for obstacle in self.obstacles]
        lines += [f"  given up: {piece.given_up}" for piece in self.recorded if piece.given_up]
        return "\n".join(lines)


def compile_cudagraphs(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
) -> CompiledCallable:
    """Compile a graph so that its work for the device is recorded once and then replayed.

    Where nothing can be recorded, the kernel backend runs the graph alone, with one warning that says why.
    """
    settings = make_settings(options)
    recorder = settings.recorder

    def compile_alone(reason: str, advice: str) -> CompiledCallable:
        warn(f"CUDA graphs are not used: {reason}", advice, once=True)
        pipeline = {key: value for key, value in options.items() if key in ("static_inputs", "user_visible_outputs")}
        return settings.kernels.compile(graph, example_inputs, kind=kind, options={**settings.rest, **pipeline})

    reason, _, advice = recorder.unavailable().partition("; what to do: ")
    if reason:
        return compile_alone(reason, advice or 'use backend="inductor"')
    own = own_copy(graph)
    _add_missing_values(own, example_inputs)
    device = _device_of(own, recorder)
    if device is None:
        return compile_alone(
            f"the {kind} graph has no tensor on a device that records",
            'move the model and its inputs to the GPU with .to("cuda"), or use backend="inductor"',
        )
    write_back(own, options.get("write_backs", {}))
    obstacles = _find_obstacles(own, recorder, device, exact=settings.kernels.numerics == "bitwise")
    pieces = cut(own, lambda node: node not in obstacles)
    # A number computed on the host is no loss.
    lost = [obstacle for node, obstacle in obstacles.items() if obstacle is not None and not is_float(node)]
    if lost:
        _warn_of(lost, pieces, kind)
    memory, results = Memory(own), output_arguments(own)
    placeholders = {node: index for index, node in enumerate(own.graph.find_nodes(op="placeholder"))}
    chosen = options.get("user_visible_outputs", range(len(results)))
    visible = memory.groups(results[index] for index in chosen)
    runs: list[CompiledCallable] = []
    for piece in pieces:
        places = enumerate(map(placeholders.get, piece.inputs))
        static = [index for index, place in places if place in options.get("static_inputs", ())]
        numbers = read_from_memory(piece.graph, device) if piece.is_recordable else ()
        kernels = _compile_piece(settings, piece, kind, static)
        if piece.is_recordable:
            shown = frozenset(index for index, node in enumerate(piece.outputs) if memory.group(node) in visible)
            spec = PieceSpec(
                kind,
                device,
                names=tuple(str(node.meta.get("desc") or node.name) for node in piece.inputs),
                static=frozenset(static),
                pinned=frozenset(i for i in static if not private_sizes.has_symbols(piece.inputs[i].meta["val"])),
                numbers=frozenset(numbers),
                mutated=mutated_inputs(piece.graph),
                visible=shown,
                keeps=len(shown) < len(piece.outputs),
            )
            kernels = RecordedPiece(kernels, spec, recorder, settings.limits)
        runs.append(kernels)
    run = run_pieces(own, pieces, runs)
    if kind == "backward":
        given = memory.groups(placeholders)
        run = _copied_out(run, [i for i, node in enumerate(results) if memory.groups([node]) & given], recorder)
    recorded = tuple(item for item in runs if isinstance(item, RecordedPiece))
    return RecordedGraph(run, tuple(pieces), recorded, tuple(lost))


def _compile_piece(settings: Settings, piece: Piece, kind: Kind, static: list[int]) -> CompiledCallable:
    nodes = piece.graph.graph.nodes
    kernels, rest = settings.kernels, dict(settings.rest)
    if not piece.is_recordable and (any(map(is_float, nodes)) or any(map(written_arguments, nodes))):
        # A kernel compiler refuses these, and nothing of this piece is recorded anyway.
        kernels, rest = ATEN, {}
    examples = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    pipeline = {"static_inputs": static, "user_visible_outputs": list(range(len(piece.outputs)))}
    return kernels.compile(piece.graph, examples, kind=kind, options={**rest, **pipeline})


def _add_missing_values(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    for node, example in zip(graph.graph.find_nodes(op="placeholder"), example_inputs):
        node.meta.setdefault("val", example)
    for node in graph.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(graph)
        if isinstance(value, torch.Tensor):
            node.meta.setdefault("val", value)


def _device_of(graph: torch.fx.GraphModule, recorder: Recorder) -> torch.device | None:
    """Return the device of most tensors of the graph, among devices that record."""
    counts = Counter(
        value.device
        for node in graph.graph.nodes
        for value in node_tensors(node)
        if recorder.records(value) and private_sizes.carried_float(value) is None
    )
    return counts.most_common(1)[0][0] if counts else None


def _find_obstacles(
    graph: torch.fx.GraphModule, recorder: Recorder, device: torch.device, *, exact: bool
) -> dict[torch.fx.Node, Obstacle | None]:
    """Return the nodes that cannot be recorded; None for a number that is computed on the host, which is no loss."""
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
                has_tensors = any(True for value in (node, *node.all_input_nodes) for _ in node_tensors(value))
                found[node] = obstacle if has_tensors else None
    return found


def _copied_out(run: CompiledCallable, indices: Sequence[int], recorder: Recorder) -> CompiledCallable:
    """Copy gradients that are values which the forward has kept in a recording's memory: ``.grad`` outlives the step."""
    if not indices:
        return run
    shared = shared_by(recorder)

    def checked(inputs: list[Any]) -> list[Any]:
        outputs = run(inputs)
        for index in indices:
            value = outputs[index]
            if isinstance(value, torch.Tensor) and storage_address(value) in shared.kept:
                outputs[index] = value.clone()
        return outputs

    return checked


def _warn_of(obstacles: Sequence[Obstacle], pieces: Sequence[Piece], kind: Kind) -> None:
    count = sum(piece.is_recordable for piece in pieces)
    lines = [
        f"\n  {text}{f' ({times} times)' if times > 1 else ''}" for text, times in Counter(map(str, obstacles)).items()
    ]
    listed = "".join(lines[:_LISTED])
    more = f"\n  and at {len(lines) - _LISTED} other places" if len(lines) > _LISTED else ""
    advice = "keep tensors on the GPU and sizes fixed there, or leave it: everything else is still recorded"
    if any(obstacle.reason == _NUMBER for obstacle in obstacles):
        advice = f"pass such a number as a tensor on the GPU (torch's optimizers do with fused=True or capturable=True); {advice}"
    warn(
        f"{len(obstacles)} operators of the {kind} graph are left out of CUDA graphs, which cuts it into {len(pieces)} pieces "
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
