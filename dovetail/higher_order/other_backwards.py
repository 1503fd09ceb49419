"""Backwards of eager that are other ones than the captured one: those in an autocast block, and those from some of the outputs.

Autocast belongs to the call of ``backward()``, not to the forward: eager's backward of a multiplication in single precision
multiplies in half precision inside of such a block. Graphs are captured for a backward outside of one, which is what torch
recommends, and for most of them it makes no difference: what autocast would cast is in its precision already.

A backward from some of the outputs may leave out a gradient that a custom backward was captured with: eager hands it zeros or None,
and the custom backward may do anything with that.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch

from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.nodes import BY_USER_BACKWARD, GIVEN_TO, TAKES_WHOLE_GRADIENT, needed_for
from dovetail.aot.steps import Lowering
from dovetail.guards.ambient import autocast_state, without_autocast
from dovetail.runtime.function import Backward
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing


class _Calls(private_tracing.TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # a kernel of autocast asks for the device
            self.found.append(func)
        return func(*args, **(kwargs or {}))


def runs_otherwise(node: torch.fx.Node) -> bool:
    """Whether the operator of a node casts, or is another program, in the autocast state that there is now."""
    target: Any = node.target
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
    with _Calls() as calls:
        target(*args, **kwargs)
    if calls.found == [target]:
        return False
    with without_autocast(), _Calls() as plain:
        target(*args, **kwargs)
    return calls.found != plain.found


def _gradients_of_user_backwards(joint: JointGraph) -> list[set[int]]:
    """For each custom backward whose gradients come from different tangents: which tangents each comes from, by bits."""
    reached = {node: 1 << place for place, node in enumerate(joint.tangents)}
    given: dict[Any, set[int]] = {}
    whole: dict[tuple[int, int], int] = {}
    for tangent in joint.tangents:
        for key in tangent.meta.get(GIVEN_TO, ()):
            whole[key] = whole.get(key, 0) | reached[tangent]
    for (number, _), bits in whole.items():
        given.setdefault((number,), set()).add(bits)
    for node in joint.graph.nodes:
        inputs = [item for item in node.all_input_nodes if item in reached]
        number = node.meta.get(BY_USER_BACKWARD)
        if number is not None:
            outside = [item for item in inputs if item.meta.get(BY_USER_BACKWARD) != number]
            given.setdefault(number, set()).update(reached[item] for item in outside)
        if inputs:
            reached[node] = functools.reduce(operator.or_, [reached[item] for item in inputs])
    return [item for item in given.values() if len(item) > 1]


class OtherBackwards:
    """Whether eager's backward is another one than that of an entry, for some tangents or in the autocast state of the moment."""

    def __init__(self, lowering: Lowering, backward: Backward) -> None:
        self._lowering = lowering
        self._backward = backward
        self._known: dict[Any, bool] = {}
        self._user_backwards: list[set[int]] | None = None
        self._whole: list[bool] | None = None

    def __call__(self, defined: tuple[bool, ...]) -> bool:
        """For a backward from these outputs."""
        return self._lacks_gradients(defined) or (private_state.is_any_autocast_on() and self._has_other_types(defined))

    def takes_whole_gradients(self, defined: Iterable[bool]) -> bool:
        """Whether code that is not linear in its gradient runs in a backward from these outputs."""
        if self._whole is None:
            joint = self._lowering.joint
            marked = needed_for(node for node in joint.graph.nodes if TAKES_WHOLE_GRADIENT in node.meta)
            self._whole = [tangent in marked for tangent in joint.tangents]
        return any(map(operator.and_, self._whole, defined))

    def _lacks_gradients(self, defined: tuple[bool, ...]) -> bool:
        if all(defined):
            return False
        if self._user_backwards is None:
            # The joint graph is there without the graphs of the backend, which a step from the cache has not made.
            self._user_backwards = _gradients_of_user_backwards(self._lowering.joint)
        there = sum(1 << place for place, flag in enumerate(defined) if flag)
        return any(len({bool(bits & there) for bits in item}) > 1 for item in self._user_backwards)

    def _has_other_types(self, defined: tuple[bool, ...]) -> bool:
        key = (defined, autocast_state())
        found = self._known.get(key)
        if found is None:
            graph = self._backward.graph_of(defined)
            found = self._known[key] = graph is not None and self._runs_otherwise(graph[0].graph.nodes)
        return found

    def _runs_otherwise(self, nodes: Iterable[torch.fx.Node]) -> bool:
        # A custom backward may compute from saved tensors alone, without a tangent: in the forward graph.
        joint = self._lowering.completed().joint
        early = [node for node in joint.graph.nodes if node.meta.get("phase") == "backward"]
        called = {node.name: node for node in (*nodes, *early) if node.op == "call_function"}
        try:
            with private_tracing.disable_current_modes(), torch.no_grad(), joint.fake_mode:
                return any(map(runs_otherwise, called.values()))
        except Exception:  # noqa: BLE001  (an operator that does not run with other types has them)
            return True
