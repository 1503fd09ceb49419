"""The result of stage 2: something to call like the captured function, still carrying the graphs that it came from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.entries import make_entry
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.partition import PartitionedGraph
from dovetail.aot.steps import Lowering
from dovetail.backends import Backend
from dovetail.errors import InputError
from dovetail.events import EventLog
from dovetail.runtime.entry import Entry, page


@dataclass(frozen=True, eq=False)
class CompiledGraph:
    """``run(inputs) -> outputs`` on flat tensors, and all that was made on the way there."""

    lowering: Lowering
    backend: Backend
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]]

    @property
    def joint(self) -> JointGraph:
        """The joint graph in the operators of the backend."""
        return self.lowering.completed().joint

    @property
    def partitioned(self) -> PartitionedGraph | None:
        """Forward and backward graph; None where the backend runs the program."""
        return self.lowering.completed().parts

    @property
    def events(self) -> EventLog:
        """The log of decisions."""
        return self.lowering.settings.events

    @property
    def memory(self) -> Any:
        """The report on the memory budget (:class:`dovetail.passes.memory_budget.MemoryReport`); None without one.

        After a run it has the bytes that the last one has kept.
        """
        report: Any = getattr(self.lowering.parts, "memory", None)
        return dataclasses.replace(report, measured=self.lowering.measured[0]) if self.lowering.measured else report

    @functools.cached_property
    def _entry(self) -> Entry:
        # Without a way back to this graph, which would make a cycle that only the garbage collector ends.
        return dataclasses.replace(make_entry(self), compiled=None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it like the original function; raises :class:`InputError` for inputs that the graph was not captured for."""
        entry = self._entry
        function = self.lowering.joint.capture.function
        tensors = entry.checker.check(function, args, kwargs)
        if tensors is None:
            failures = entry.checker.explain(function, args, kwargs)
            raise InputError(
                "the graph was captured for other inputs: " + "; ".join(str(item) for item in failures[:3]),
                advice="capture it again, or use dovetail.compile, which does so by itself",
            )
        return entry.call(function, args, kwargs, tensors)

    def __str__(self) -> str:
        return str(page("compiled_by")(self))

    def __repr__(self) -> str:
        return f"<{repr(self.joint).strip('<>')}, compiled by {self.backend.name}>"

    def _repr_html_(self) -> str:
        return str(page("graph_as_page")(self))
