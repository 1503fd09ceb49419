"""A backend's callable that raises while it runs: the graph goes on operator by operator, and does so from then on.

Whether the error is the backend's or the program's (an index that is out of range) shows when ATen's operators run the same graph
on the same inputs: they raise eager's error, or the backend was wrong. The graph is functional: nothing was written by then.
Where that does not hold the error is raised: the backend may have written inputs itself, or a rank may wait for another one.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch

from dovetail.aot.backward_graphs import FlatCallable
from dovetail.aot.nodes import writes_in_place
from dovetail.aot.steps import BackendGraph, Lowering, Wrapper, before_backend
from dovetail.backends import ATEN, compile_with
from dovetail.errors import DovetailError, EagerFallbackWarning
from dovetail.face.warnings import warn_user
from dovetail.passes.recompute import exchanges_with_ranks
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace.repeats import draws_random_numbers

_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


@before_backend
def finish_by_operators(lowering: Lowering, unit: BackendGraph) -> BackendGraph:
    """Registered behind the other passes, so that their work after the graph is outside of the repeated run."""
    if not may_run_again(unit) or lowering.backend.name == ATEN.name:
        return unit
    # Backends may change the graph that they are given.
    graph = private_tracing.lazy_graph_module(unit.graph, copy.deepcopy(unit.graph.graph))
    return unit.wrapped(finishing(lowering, unit, lambda: graph, draws_numbers(graph)))


def may_run_again(unit: BackendGraph) -> bool:
    """Whether a run that has failed can be repeated: nothing was written, and no other process waits."""
    nodes = unit.graph.graph.nodes
    return not unit.write_backs and not any(writes_in_place(node) or exchanges_with_ranks(node) for node in nodes)


def draws_numbers(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph draws random numbers."""
    return any(map(has_random_result, graph.graph.nodes))


def has_random_result(node: torch.fx.Node) -> bool:
    """Whether the result of a node depends on a random generator: attention without dropout does not."""
    if not draws_random_numbers(node.target):
        return False
    target: Any = node.target
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else None
            probability = node.kwargs.get(argument.name, argument.default_value if given is None else given)
            return not (isinstance(probability, (int, float)) and probability == 0)
    return True


def finishing(
    lowering: Lowering, unit: BackendGraph, make_graph: Callable[[], torch.fx.GraphModule], draws: bool
) -> Wrapper:
    """The wrapper around the callable of a graph that may run again; ``make_graph()`` is called after a failure."""
    events, name = lowering.settings.events, lowering.backend.name

    def instead() -> FlatCallable:
        graph = make_graph()
        examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        return compile_with(ATEN, graph, examples, unit.kind, {"user_visible_outputs": list(unit.visible)})

    def give_up(error: Exception) -> None:
        reason = f"backend {name!r} raised {type(error).__name__} while it ran the {unit.kind} graph: {error}"
        events.note("backend given up", instead=ATEN.name, reason=reason)
        warn_user(
            f'a {unit.kind} graph goes on operator by operator (backend="aten"), because {reason}\n  what to do: report this to '
            "the backend, or use another one",
            EagerFallbackWarning,
        )

    return lambda run: _Finished(run, instead, give_up, draws, unit.kind == "backward")


@dataclasses.dataclass(eq=False)
class _Finished:
    """``run``, and in its place ``instead()`` from the run on that fails."""

    _run: FlatCallable
    _instead: Callable[[], FlatCallable]
    _give_up: Callable[[Exception], None]
    _draws: bool
    _frees_inputs: bool
    _has_run: bool = False
    _devices: list[int] | None = None
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        # A backward frees its saved values while it runs; its first run finds most faults.
        given = inputs if self._frees_inputs and self._has_run else list(inputs)
        count, states = len(given), None
        if self._draws:
            if self._devices is None:
                # The same at each run: guards hold the devices of inputs.
                tensors = (item for item in inputs if isinstance(item, torch.Tensor))
                self._devices = sorted({item.device.index for item in tensors if item.is_cuda})
            states = self._devices, private_state.random_states(self._devices)
        try:
            results = self._run(inputs)
        except DovetailError:
            raise
        except Exception as error:
            if isinstance(error, _OUT_OF_MEMORY) or len(given) < count:
                raise
            if states is not None:
                private_state.set_random_states(states[1], states[0])
            failure = error
        else:
            self._has_run = True
            return results
        # Not in the handler: an error of the program's has no context of ours.
        run = self._instead()
        results = run(given)
        with self._lock:
            if self._run is not run:
                self._give_up(failure)
            self._run = run
        return results
