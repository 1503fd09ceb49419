"""The ``bisect`` backend: cuts a graph that another backend gets wrong, or crashes on, down to a small script.

``backend_options``: ``inner`` is the backend to try (the default backend unless given), ``path`` the script to write
("dovetail-bisect.py" in the current directory unless given), ``seconds`` how long one trial may take before it counts as
hanging (60), ``trials`` how many smaller graphs are tried (300). The rest goes to the inner backend. A graph without a fault
runs with ATen's operators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dovetail.backends.aten import compile_aten
from dovetail.backends.debug import processes
from dovetail.backends.debug.script import write_script
from dovetail.backends.debug.subgraphs import Fault, GraphRun, Subgraph, line_of, split_options
from dovetail.backends.protocol import Backend, CompiledCallable, Kind, output_arguments
from dovetail.backends.registry import lookup_backend
from dovetail.errors import BackendError

Trial = Callable[[Subgraph], Fault | None]
Found = tuple[Subgraph, Fault]
DEFAULT_PATH = "dovetail-bisect.py"


class Trials:
    """Tries subgraphs with a backend; each in a forked process if the whole graph crashed or hung."""

    def __init__(self, backend: Backend, options: Mapping[str, Any], seconds: float) -> None:
        self.backend = backend
        self.options = options
        self.seconds = seconds
        self.isolated = processes.can_fork()

    def first(self, whole: Subgraph) -> Fault | None:
        """Try the whole graph in a fork; only a crash or a hang keeps later trials in forks."""
        fault = self(whole)
        self.isolated = self.isolated and fault is not None and fault.category in ("crashed", "timed out")
        return fault

    def __call__(self, subgraph: Subgraph) -> Fault | None:
        """Return the backend's fault on this subgraph."""
        if not self.isolated:
            return subgraph.try_backend(self.backend, self.options)

        def work(write: processes.Write) -> None:
            fault = subgraph.try_backend(self.backend, self.options)
            write({} if fault is None else vars(fault))

        for row in processes.rows_of_fork(work, self.seconds):
            if isinstance(row, processes.Lost):
                return Fault(row.status, row.problem)
            return Fault(**row) if row else None
        return Fault("crashed", "the process ended without a word")


def minimise(run: GraphRun, trial: Trial, fault: Fault, limit: int = 300) -> Found:
    """Return a smallest set of operations with the same category of fault: none of them can be left out.

    The set is halved, then thinned out (Zeller's ddmin). ``run`` knows every value that a set reads from outside, so any set
    is a graph.
    """
    operations = list(run.operations)
    best = run.subgraph(operations), fault
    count, tried = 2, 0
    while len(operations) > 1 and tried < limit:
        size = -(-len(operations) // count)
        chunks = [operations[start : start + size] for start in range(0, len(operations), size)]
        rests = [[item for item in operations if item not in chunk] for chunk in chunks] if count > 2 else []
        for candidate in [*chunks, *rests][: limit - tried]:
            tried += 1
            found = _same_fault(run.subgraph(candidate), trial, fault)
            if found is not None:
                count = 2 if len(candidate) <= size else max(count - 1, 2)
                operations, best = candidate, found
                break
        else:
            if count >= len(operations):
                break
            count = min(len(operations), count * 2)
    return _with_simple_inputs(_with_one_output(best, trial), trial)


def _same_fault(subgraph: Subgraph, trial: Trial, fault: Fault) -> Found | None:
    """Return the subgraph with its fault if that has the same category."""
    found = trial(subgraph) if subgraph.has_outputs else None
    return (subgraph, found) if found is not None and found.category == fault.category else None


def _with_one_output(best: Found, trial: Trial) -> Found:
    subgraph, fault = best
    count = len(output_arguments(subgraph.graph))
    for kept in range(count) if count > 1 else ():
        copied = torch.fx.Graph()
        outputs: Any = copied.graph_copy(subgraph.graph.graph, {})
        copied.output([outputs[kept]])
        found = _same_fault(replace(subgraph, graph=torch.fx.GraphModule({}, copied)), trial, fault)
        if found is not None:
            return found
    return best


def _with_simple_inputs(best: Found, trial: Trial) -> Found:
    """Replace inputs by ones, which a script can make by itself, where the fault stays with them."""
    for index, value in enumerate(best[0].inputs):
        if value.is_floating_point() and value.numel():
            inputs = list(best[0].inputs)
            inputs[index] = torch.ones_like(value)
            best = _same_fault(replace(best[0], inputs=inputs), trial, best[1]) or best
    return best


def _compile_tried(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
) -> CompiledCallable:
    mine, theirs = split_options(options, ("inner", "path", "seconds", "trials"))
    inner = lookup_backend(mine.get("inner")).with_options(theirs)
    plain = compile_aten(graph, example_inputs, kind=kind)
    path = Path(mine.get("path", DEFAULT_PATH))

    def run(inputs: list[Any]) -> list[Any]:
        whole = GraphRun.of(graph, list(inputs), kind)
        trials = Trials(inner, theirs, float(mine.get("seconds", 60)))
        everything = whole.subgraph(whole.operations)
        fault = trials.first(everything) if everything.has_outputs else None
        if fault is None:
            return plain(inputs)
        small, smaller = minimise(whole, trials, fault, int(mine.get("trials", 300)))
        written = write_script(path, small, smaller, inner, theirs)
        calls = [node for node in small.graph.graph.nodes if node.op == "call_function"]
        count = sum(node.target is not operator.getitem for node in calls)
        raise BackendError(
            f"backend {inner.name!r} {smaller.category} on the {kind} graph of {len(whole.operations)} operators; "
            f"a script with {count} of them that shows it is in {written}: {smaller}",
            where=next((line for node in small.origin if (line := line_of(node))), None),
            advice='send that script to the makers of the backend, and use backend="aten" meanwhile',
        )

    return run


BISECT = Backend(
    "bisect",
    _compile_tried,
    numerics="bitwise",
    takes_symbolic_shapes=False,
    description="cuts a graph that another backend gets wrong, or crashes on, down to a small script",
)
