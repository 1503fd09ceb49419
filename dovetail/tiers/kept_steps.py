"""All steps behind a capture, kept in the cache on disk: a process that finds them makes no graph for the backend.

The key holds the joint graph with the marks on its nodes, and all that decides about a step (:func:`key_of_steps`). The entry says
under which keys the code of the forward and of the expected backward lies, and what was put around it. The graphs are made from the
joint graph when somebody asks for one (a report, the backward for other tangents, a derivative of the backward), and must then be
those that the code was made of. Where a step has done more than that (the graph writes to inputs, an optimizer runs behind it),
nothing is kept, and the steps take graphs and code from the cache one by one.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail import cache
from dovetail.aot import steps
from dovetail.aot.backward_graphs import BackwardGraphs, FlatCallable, Pattern, expected_pattern, taking
from dovetail.aot.compile_joint import bind, decompose, lower_backward, prepare, run_steps, split
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.descriptors import BufferInput, ParamInput
from dovetail.aot.nodes import BACKWARD_RUN
from dovetail.aot.steps import BackendGraph, Lowering
from dovetail.backends.common.outputs import guard_outputs, promised_strides
from dovetail.backends.common.sizes_elsewhere import sizes_of_mode
from dovetail.backends.inductor.generated import Generated, code_of, note
from dovetail.backends.inductor.job import resolving
from dovetail.backends.inductor.kept_code import state_of_torch, take_code
from dovetail.backends.protocol import Kind, output_arguments
from dovetail.cache.unportable import UnportableError
from dovetail.errors import BackendError
from dovetail.guards.ambient import without_autocast
from dovetail.passes.equal_calls import WITHOUT_EFFECT
from dovetail.passes.unfinished_runs import draws_numbers, finish_by_operators, finishing, may_run_again
from dovetail.tiers.flat_graph import is_plain
from dovetail.tiers.kept_graphs import encoded_graph, has_sizes, key_of_graph
from dovetail.torch_private import state as private_state

#: Hooks in front of the backend that need no graph.
_LABELS = "dovetail.switches.labels._label"


def key_of_steps(lowering: Lowering) -> str | None:
    """The key of a compilation; None where it is not kept."""
    settings, joint = lowering.settings, lowering.joint
    places: Iterable[steps.Place[Any]] = (
        steps.required_passes,
        steps.choose_saved,
        steps.after_partition,
        steps.before_backend,
    )
    hooks = [_name(hook) for place in places for hook in place]
    is_whole_step = not lowering.is_training and any(BACKWARD_RUN in node.meta for node in joint.graph.nodes)
    is_plain_call = settings.memory_budget is None and settings.find_reused is None and is_plain(settings.options)
    if (
        is_whole_step
        or has_sizes(joint)
        or not is_plain_call
        or not all(name.startswith("dovetail.") for name in hooks)
    ):
        return None
    given = (sorted(settings.options.items()), settings.numerics, settings.guarded_inputs, lowering.backend.numerics)
    about = (described(joint.spec), joint.num_forward_outputs, joint.is_exact, joint.inexact, hooks, state_of_torch())
    try:
        runs: dict[int, int] = {}
        marks = [_marks(node, runs) for node in joint.graph.nodes]
        return cache.key_of("steps", key_of_graph(lowering), marks, given, *about)
    except (UnportableError, TypeError):  # marks under names that have no order
        return None


def _name(hook: Any) -> str:
    return f"{hook.__module__}.{hook.__qualname__}"


def described(value: Any) -> Any:
    """The part of the runtime's description of a graph that a step may know: all but the functions that make views again."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, *(described(getattr(value, item.name)) for item in dataclasses.fields(value))]
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return value if value is None or type(value) in (bool, int, float, str) else type(value).__name__


def _marks(node: torch.fx.Node, runs: dict[int, int]) -> list[Any]:
    """The notes on a node, and whether an input is a parameter or a buffer. ``runs`` numbers the runs of autograd's engine,
    which another process counts from elsewhere.
    """
    descriptor = node.meta.get("desc")
    found: list[Any] = [type(descriptor).__name__] if isinstance(descriptor, (ParamInput, BufferInput)) else []
    for name, item in sorted(node.meta.items()):
        if name not in WITHOUT_EFFECT:
            if item is not None and type(item) not in (bool, int, str):
                raise UnportableError(f"{node.name} is marked by {name}")
            found.append((name, item if name != BACKWARD_RUN else runs.setdefault(item, len(runs))))
    return found


@dataclass(frozen=True)
class _Part:
    """The callable of one graph: the key of its code, the inputs that are resolved before, the strides of its results, and whether
    it draws random numbers.

    ``order`` are the places of the values that it takes, among those that a backward is given; None: all.
    """

    code: str
    resolved: list[int]
    strides: list[list[int] | None]
    draws: bool
    order: list[int] | None = None

    @staticmethod
    def checked(code: Any, resolved: Any, strides: Any, draws: Any, order: Any) -> _Part:
        """The same of data; raises ``TypeError`` for what means nothing."""
        lists = [resolved, *(item for item in (*strides, order) if item is not None)]
        are_numbers = all(type(item) is list and all(type(number) is int for number in item) for item in lists)
        if type(code) is not str or type(draws) is not bool or type(strides) is not list or not are_numbers:
            raise TypeError
        return _Part(code, resolved, strides, draws, order)


# --- taking -----------------------------------------------------------------------------------------------------------


def run_once(lowering: Lowering) -> CompiledGraph:
    """The steps' results for a captured graph, from the cache where an earlier process has kept it."""
    key = key_of_steps(lowering)
    found = None if key is None else take(key, lowering)
    if found is None:
        found = run_steps(lowering)
        keep(key, found.lowering)
    return found


@without_autocast()
def take(key: str, lowering: Lowering) -> CompiledGraph | None:
    """The compiled graph under a key; None where it is not there, or its code is not."""
    content = cache.read("steps", key)
    if content is None:
        return None
    prepared = prepare(lowering)
    if prepared.joint is not lowering.joint or prepared.write_backs:
        return None
    try:
        digest, gradients, pattern, *data = json.loads(content)
        parts = [_Part.checked(*item) for item in data]
        calls = [_called(part) for part in parts]
        is_whole = len(parts) == len(_kinds(prepared)) and gradients == _gradients(prepared)
        prepared = _with_expected(prepared, pattern)
    except Exception:  # noqa: BLE001  (whatever lies under the key: the steps are run, and the entry written anew)
        return None
    found = [call for call in calls if call is not None]
    if not is_whole or len(found) < len(parts):
        return None
    for kind, part in zip(_kinds(prepared), parts, strict=True):
        file = str(cache.directory() / "code" / part.code)
        note(prepared.joint.fake_mode, Generated(kind, file, True, (part.code, part.resolved)))
    return bind(_Kept(prepared, digest, parts, found).lowering())


def _called(part: _Part) -> FlatCallable | None:
    call = take_code(part.code)
    strides = [None if item is None else tuple(item) for item in part.strides]
    return None if call is None else guard_outputs(resolving(call, part.resolved), strides)


def _expected(lowering: Lowering) -> Pattern:
    """The tangents that the backward in an entry is for."""
    return lowering.settings.expected or expected_pattern(lowering.joint)


def _with_expected(prepared: Lowering, pattern: Any) -> Lowering:
    """The compilation for the tangents that an entry names; raises ``TypeError`` for what means nothing."""
    if len(pattern) != len(prepared.joint.tangents) or any(type(flag) is not bool for flag in pattern):
        raise TypeError
    return prepared.with_(settings=dataclasses.replace(prepared.settings, expected=tuple(pattern)))


def _gradients(lowering: Lowering) -> list[list[int] | None]:
    """The strides of the gradients, which a decomposition keeps but for those that only a view can have."""
    return [None if node is None else list(node.meta["val"].stride()) for node in lowering.joint.gradients]


class _Kept:
    """A compilation that came from the cache: what is run, and its graphs when somebody asks for them."""

    def __init__(self, prepared: Lowering, digest: str, parts: Sequence[_Part], calls: Sequence[FlatCallable]) -> None:
        self._prepared = prepared
        self._digest = digest
        self._parts = parts
        self._calls = calls
        self._inference = torch.is_inference_mode_enabled()
        self._completed: Lowering | None = None
        self._lock = threading.RLock()

    def lowering(self) -> Lowering:
        """The compilation with its callables."""
        is_training = self._prepared.is_training
        forward = self._wrapped(0, "forward" if is_training else "inference", self._forward_graph)
        backward = None
        if is_training:
            pattern = _expected(self._prepared)
            last = self._wrapped(1, "backward", lambda: self._backward_graph(pattern))
            order = self._parts[1].order
            backward = _KeptBackward(pattern, last if order is None else taking(last, order), self.complete)
        return self._prepared.with_(forward=forward, backward=backward, complete=self.complete)

    def _wrapped(self, place: int, kind: Kind, graph: Callable[[], torch.fx.GraphModule]) -> FlatCallable:
        """The callable with what the hooks in front of the backend put around it."""
        part, run = self._parts[place], self._calls[place]
        unit = BackendGraph(kind, None, None, _visible(self._prepared, kind))  # type: ignore[arg-type]
        for hook in steps.before_backend:
            if hook is finish_by_operators:
                unit = unit.wrapped(finishing(self._prepared, unit, graph, part.draws))
            elif _name(hook) == _LABELS:
                unit = hook(self._prepared, unit)
        for wrapper in reversed(unit.wrappers):
            run = wrapper(run)
        return run

    def _forward_graph(self) -> torch.fx.GraphModule:
        parts = self.complete().parts
        assert parts is not None
        return parts.forward

    def _backward_graph(self, pattern: Pattern) -> torch.fx.GraphModule:
        backward = self.complete().backward
        found = None if backward is None else backward.graph_of(pattern)
        assert found is not None
        return found[0]

    @without_autocast()
    def complete(self) -> Lowering:
        """The compilation with its graphs; raises :class:`BackendError` where these are not those of the code."""
        with self._lock, private_state.preserved_rng_state(), torch.inference_mode(self._inference):
            if self._completed is None:
                found = split(decompose(self._prepared))
                if _digest(found) != self._digest:
                    raise BackendError(
                        "the graphs that kernels in the cache were made of cannot be made again",
                        advice="delete them (dovetail cache clear), and report this as a bug",
                    )
                backend, known = found.backend, iter(self._calls[1:])

                def compile_others(*graph: Any, **how: Any) -> FlatCallable:
                    # First that for the expected tangents: its code may have gone from the cache since, and the compiler too.
                    return next(known, None) or backend.compile(*graph, **how)

                first = found.with_(backend=dataclasses.replace(backend, compile=compile_others))
                self._completed = lower_backward(first).with_(backend=backend)
            return self._completed


class _KeptBackward(BackwardGraphs):
    """The backward for the expected tangents; for others there are graphs to be made first."""

    def __init__(self, expected: Pattern, run: FlatCallable, complete: Callable[[], Lowering]) -> None:
        super().__init__(None, 0, lambda graph, is_sealed: run)
        self._compiled[expected] = run
        self._complete = complete

    def _compile(self, defined: Pattern) -> FlatCallable:
        return self._whole()(defined)

    def graph_of(self, defined: Pattern) -> tuple[torch.fx.GraphModule, Sequence[int]] | None:
        """See :meth:`dovetail.aot.backward_graphs.BackwardGraphs.graph_of`."""
        return self._whole().graph_of(defined)

    def _whole(self) -> BackwardGraphs:
        backward = self._complete().backward
        assert backward is not None
        return backward


# --- keeping ----------------------------------------------------------------------------------------------------------


def keep(key: str | None, lowering: Lowering) -> None:
    """Write down a compilation, where its callables are code in the cache and nothing else."""
    if key is None or lowering.gradients_dropped_first or lowering.write_backs:
        return
    kinds = _kinds(lowering)
    try:
        parts = [part for kind in kinds if (part := _kept(lowering, kind)) is not None]
        given = [_digest(lowering), _gradients(lowering), _expected(lowering)]
        data = [*given, *(list(vars(part).values()) for part in parts)]
    except Exception:  # noqa: BLE001  (what cannot be written down is not kept: the kernels are there)
        return
    if len(parts) == len(kinds):
        cache.write("steps", key, json.dumps(data).encode())


def _kept(lowering: Lowering, kind: Kind) -> _Part | None:
    made = [item.kept for item in code_of(lowering.joint.fake_mode) if item.kind == kind]
    code = made[0] if made and made.count(made[0]) == len(made) else None
    if code is None or cache.read("code", code[0]) is None or lowering.parts is None:
        return None
    graph, order = lowering.parts.forward, None
    if kind == "backward":
        found = None if lowering.backward is None else lowering.backward.graph_of(_expected(lowering))
        if found is None:
            return None
        graph, taken = found
        order = None if taken == list(range(len(taken))) else list(taken)
    unit = BackendGraph(kind, graph, graph, _visible(lowering, kind))
    others = [hook for hook in steps.before_backend if hook is not finish_by_operators and _name(hook) != _LABELS]
    if not may_run_again(unit) or any(hook(lowering, unit) is not unit for hook in others):
        return None
    outputs = output_arguments(graph)
    visible = range(len(outputs)) if kind == "forward" else unit.visible
    strides = [None if item is None else list(item) for item in promised_strides(outputs, visible)]
    return _Part(*code, strides, draws_numbers(graph), order)


def _kinds(lowering: Lowering) -> tuple[Kind, ...]:
    return ("forward", "backward") if lowering.is_training else ("inference",)


def _visible(lowering: Lowering, kind: Kind) -> tuple[int, ...]:
    joint = lowering.joint
    return tuple(range(joint.num_primals if kind == "backward" else joint.num_forward_outputs))


def _digest(lowering: Lowering) -> str:
    """A key of the graphs that a step has made, and of the values between them."""
    parts = lowering.parts
    assert parts is not None
    sizes = sizes_of_mode(lowering.joint.fake_mode)
    graphs = [encoded_graph(item.graph, sizes) for item in (parts.forward, parts.backward) if item is not None]
    return cache.key_of(json.dumps(graphs), parts.saved)
