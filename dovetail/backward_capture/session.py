"""The session of a block of compiled autograd: it keeps captured backwards, and runs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.backward_capture.builder import Collected
from dovetail.backward_capture.engine import call_in_backward
from dovetail.backward_capture.graph import CapturedBackward
from dovetail.backward_capture.hooks import is_traceable
from dovetail.backward_capture.printer import explain_segments, forward_lines
from dovetail.backward_capture.reducers import ReducerHook
from dovetail.backward_capture.segment_runner import SegmentRunner
from dovetail.backward_capture.segments import Segment, cut
from dovetail.errors import DovetailError, EagerFallbackWarning, GraphBreakError
from dovetail.events import EventLog
from dovetail.rules.gradients.engine_order import BackwardCall, hook_order

#: ``compile_graph(function) -> function``: what happens to each segment of a captured backward.
GraphCompiler = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class BackwardSession:
    """The captures of one ``compiled_autograd`` block, or of one compiled function.

    ``captures`` has the captured backwards in the order in which they were first needed; ``runs`` counts the runs of captured
    graphs, ``fallbacks`` has the reasons for backwards that eager has run. Sessions with the same options may share their compiled
    segments, ``compiled``. With ``forward_lines`` the nodes remember the lines that made them, at the price of a traceback for
    each operator of the forward; with ``fullgraph`` nothing is left to eager. The calling tree, from
    :class:`~dovetail.backward_capture.handover.Handover`::

        run
        +-- _runner                          at the first run in this order, with such hooks
        |   +-- CapturedBackward.graph_for   puts the steps into eager's order
        |   +-- cut                          makes segments of them
        |   +-- _compile_segment             calls compile_graph
        +-- call_in_backward                 where code of the user's runs
        |   +-- SegmentRunner.__call__       runs the segments, and writes .grad between them
        +-- SegmentRunner.__call__           where none does
    """

    compile_graph: GraphCompiler | None = None
    compiled: dict[tuple[Any, ...], SegmentRunner] = field(default_factory=dict, repr=False)
    events: EventLog = field(default_factory=EventLog)
    captures: list[CapturedBackward] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    runs: int = 0
    forward_lines: bool = False
    fullgraph: bool = False

    def __post_init__(self) -> None:
        self._warned = False
        self._lines: dict[CapturedBackward, dict[int, str]] = {}

    def __str__(self) -> str:
        return "\n".join([*self._summary(), *(capture.shown(self._lines[capture]) for capture in self.captures)])

    def _summary(self) -> list[str]:
        lines = [f"{len(self.captures)} captured backward(s), {self.runs} run(s)"]
        return lines + [f"left to eager: {reason}" for reason in dict.fromkeys(self.fallbacks)]

    def explain(self) -> str:
        """Say in which segments the captured backwards run, which of them are compiled, and why the others are not."""
        lines = self._summary()
        for number, capture in enumerate(self.captures):
            runners = [runner for key, runner in self.compiled.items() if key[0] is capture]
            lines += explain_segments(number, capture.names, runners)
        return "\n".join(lines)

    def run(
        self, call: BackwardCall, captured: CapturedBackward, collected: Collected, entered: Callable[[], None]
    ) -> list[Any]:
        """Run a captured backward on the values that the engine has collected; returns the gradients that were asked for.

        Code of the user's is called from within the engine; ``entered`` is called there first.
        """
        runner = self._prepared(captured, call, collected)
        self.runs += 1
        with torch.set_grad_enabled(call.create_graph):
            if not captured.runs_user_code:
                return list(runner(*collected))

            def run_in_backward() -> Any:
                entered()
                with torch.set_grad_enabled(call.create_graph):
                    return runner(*collected)

            return list(call_in_backward(call.keep_graph, run_in_backward))

    def _prepared(
        self, captured: CapturedBackward, call: BackwardCall, collected: Collected
    ) -> SegmentRunner | CapturedBackward:
        """The function that runs the backward: where its segments cannot be made, the captured graph, operator by operator."""
        try:
            runner = self._runner(captured, call, collected.hooks)
            if captured not in self.captures:
                self._lines[captured] = forward_lines(hook_order(call))
                self.captures.append(captured)
            return runner
        except DovetailError:
            raise
        except Exception as error:
            if self.fullgraph or call.create_graph or not captured.graphs:
                # Derivatives are computed by another form of the graph; without any form of it there is nothing to run.
                raise
            self.leave_to_eager(f"preparing it has failed with {type(error).__name__}: {error}")
            return captured

    def _runner(self, captured: CapturedBackward, call: BackwardCall, hooks: Sequence[Any]) -> SegmentRunner:
        """The callable that runs a captured backward in its present order; it is compiled at the first need."""
        order = captured.order(call)
        traceable = tuple(is_traceable(hook, call.create_graph) for hook in hooks) if captured.runs_user_code else ()
        reducers = frozenset(place for place, hook in enumerate(hooks) if isinstance(hook, ReducerHook))
        key = (captured, order, traceable, reducers, call.create_graph)
        found = self.compiled.get(key)
        if found is None:
            with self.events.span("prepare backward", nodes=len(captured.names)):
                graph = captured.graph_for(order, call.create_graph)
                found = self.compiled[key] = self._compile(graph, traceable, reducers)
        return found

    def _compile(
        self, graph: torch.fx.GraphModule, traceable: tuple[bool, ...], reducers: frozenset[int]
    ) -> SegmentRunner:
        segments, results = cut(graph, traceable, reducers)
        self.check_allowed(next((segment.reason for segment in segments if segment.reason), ""))
        return SegmentRunner(segments, results, list(map(self._compile_segment, segments)))

    def _compile_segment(self, segment: Segment) -> Callable[..., Any]:
        if segment.reason or self.compile_graph is None:
            return segment.graph.forward
        return self.compile_graph(segment.graph.forward)

    def check_allowed(self, reason: str) -> None:
        """Raise :class:`GraphBreakError` where nothing may be left to eager."""
        if self.fullgraph and reason:
            advice = "drop fullgraph=True to run it eagerly"
            raise GraphBreakError(f"a backward cannot be captured: {reason}", advice=advice)

    def leave_to_eager(self, reason: str, warn: bool = True) -> None:
        """Note why a backward is eager's, and warn the first time."""
        self.fallbacks.append(reason)
        self.events.note("left to eager", reason=reason)
        if warn and not self._warned:
            self._warned = True
            warnings.warn(
                f"dovetail leaves a backward to eager: {reason} (said once; see .fallbacks)",
                EagerFallbackWarning,
                stacklevel=4,
            )
