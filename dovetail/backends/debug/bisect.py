"""The ``bisect`` backend: runs every graph with another backend, and cuts a wrong or crashing one down to a small script.

``backend_options``: ``inner`` is the backend to try (the default backend unless given), ``path`` the script to write
("dovetail-bisect.py" in the current directory unless given), ``seconds`` how long one trial may take before it counts as
hanging (60), ``trials`` how many smaller graphs are tried (300). The rest goes to the inner backend. A graph that is right
runs with ATen's operators.

>>> import torch, dovetail
>>> tried = dovetail.compile(torch.sin, backend="bisect", backend_options={"inner": "aten"})
>>> tried(torch.zeros(2))
tensor([0., 0.])
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dovetail.backends.aten import compile_aten
from dovetail.backends.debug import children
from dovetail.backends.debug.pieces import Finding, Piece, Recording, Unit, line_of, split_options
from dovetail.backends.debug.script import write_script
from dovetail.backends.protocol import Backend, CompiledCallable, Kind
from dovetail.backends.registry import lookup_backend
from dovetail.errors import BackendError

Trial = Callable[[Piece], Finding | None]
DEFAULT_PATH = "dovetail-bisect.py"


class Trials:
    """Tries pieces with a backend; in a forked process where the whole graph crashed or hung, since pieces will too."""

    def __init__(self, backend: Backend, options: Mapping[str, Any], seconds: float) -> None:
        self.backend = backend
        self.options = options
        self.seconds = seconds
        self.isolated = children.can_fork()

    def first(self, piece: Piece) -> Finding | None:
        """Try the whole graph, apart from this process if it can be forked; and later ones here if that went well."""
        finding = self(piece)
        self.isolated = self.isolated and finding is not None and finding.category in ("crashed", "timed out")
        return finding

    def __call__(self, piece: Piece) -> Finding | None:
        """What is wrong with the backend on this piece."""
        if not self.isolated:
            return piece.try_backend(self.backend, self.options)

        def work(write: children.Write) -> None:
            finding = piece.try_backend(self.backend, self.options)
            write({} if finding is None else vars(finding))

        for row in children.rows_of_fork(work, self.seconds):
            if isinstance(row, children.Lost):
                return Finding(row.status, row.problem)
            return Finding(**row) if row else None
        return Finding("crashed", "the process ended without a word")


def minimise(recording: Recording, trial: Trial, finding: Finding, limit: int = 300) -> tuple[Piece, Finding]:
    """The smallest set of operators found that is wrong in the same way; no single operator can be left out of it.

    Sets are halved, then thinned out (Zeller's ddmin). Every value that a set needs from outside is known from the
    recording, so any set is a graph.
    """
    units: list[Unit] = list(recording.units)
    best = recording.piece(units), finding
    parts = 2
    tried = 0
    while len(units) > 1 and tried < limit:
        size = -(-len(units) // parts)
        chunks = [units[start : start + size] for start in range(0, len(units), size)]
        candidates = chunks if parts == 2 else [*chunks, *([u for u in units if u not in chunk] for chunk in chunks)]
        for candidate in candidates:
            tried += 1
            piece = recording.piece(candidate)
            found = trial(piece) if piece.has_outputs else None
            if found is not None and found.category == finding.category:
                parts = 2 if len(candidate) <= size else max(parts - 1, 2)
                units, best = list(candidate), (piece, found)
                break
            if tried >= limit:
                break
        else:
            if parts >= len(units):
                break
            parts = min(len(units), parts * 2)
    return _with_simple_inputs(_with_one_output(best, trial), trial)


def _with_one_output(best: tuple[Piece, Finding], trial: Trial) -> tuple[Piece, Finding]:
    piece, finding = best
    outputs = list(piece.graph.graph.output_node().args[0])  # type: ignore[arg-type]
    for kept in outputs if len(outputs) > 1 else ():
        copied = torch.fx.Graph()
        new: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in piece.graph.graph.nodes:
            if node.op != "output":
                new[node] = copied.node_copy(node, new.__getitem__)
        copied.output([new[kept]])
        smaller = replace(piece, graph=torch.fx.GraphModule({}, copied))
        found = trial(smaller)
        if found is not None and found.category == finding.category:
            return smaller, found
    return best


def _with_simple_inputs(best: tuple[Piece, Finding], trial: Trial) -> tuple[Piece, Finding]:
    """Values that a script can make by itself, where the finding stays with them."""
    piece, finding = best
    for index, value in enumerate(piece.inputs):
        if not value.is_floating_point() or not value.numel():
            continue
        for simple in (torch.ones_like(value), _normal_like(value)):
            inputs = [*piece.inputs[:index], simple, *piece.inputs[index + 1 :]]
            candidate = replace(piece, inputs=inputs)
            found = trial(candidate)
            if found is not None and found.category == finding.category:
                piece, finding = candidate, found
                break
    return piece, finding


def _normal_like(value: torch.Tensor) -> torch.Tensor:
    # The script says the same words.
    numbers = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.dtype)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(numbers)


def _compile_tried(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
) -> CompiledCallable:
    mine, theirs = split_options(options, ("inner", "path", "seconds", "trials"))
    inner = lookup_backend(mine.get("inner")).with_options(theirs)
    plain = compile_aten(graph, example_inputs, kind=kind)
    path = Path(mine.get("path", DEFAULT_PATH))

    def run(inputs: list[Any]) -> list[Any]:
        recording = Recording.of(graph, list(inputs), kind)
        trials = Trials(inner, theirs, float(mine.get("seconds", 60)))
        whole = recording.piece(recording.units)
        finding = trials.first(whole) if whole.has_outputs else None
        if finding is None:
            return plain(inputs)
        piece, smaller = minimise(recording, trials, finding, int(mine.get("trials", 300)))
        written = write_script(path, piece, smaller, inner, theirs)
        calls = [node for node in piece.graph.graph.nodes if node.op == "call_function"]
        count = sum(node.target is not operator.getitem for node in calls)
        raise BackendError(
            f"backend {inner.name!r} {smaller.category} on the {kind} graph of {len(recording.units)} operators; "
            f"a script with {count} of them that shows it is in {written}: {smaller}",
            where=next((line for node in piece.origin if (line := line_of(node))), None),
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
