"""Pieces of a graph, run by themselves: what the debugging backends are made of.

One run with ATen's own operators records every value. Any set of operators is then a graph of its own, whose inputs are
values that were recorded; a backend can be tried on it, and compared.

>>> import torch
>>> from dovetail.backends import ATEN
>>> class Twice(torch.nn.Module):
...     def forward(self, x):
...         return [torch.ops.aten.exp.default(torch.ops.aten.sin.default(x))]
>>> graph = torch.fx.symbolic_trace(Twice())
>>> recording = Recording.of(graph, [torch.zeros(2)])
>>> piece = recording.piece(recording.units[1:])
>>> [str(node.target) for node in piece.graph.graph.nodes if node.op == "call_function"]
['aten.exp.default']
>>> piece.try_backend(ATEN, {}) is None
True
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dovetail.backends.aten import compile_aten
from dovetail.backends.debug.conformance import values_agree
from dovetail.backends.protocol import Backend, CompiledCallable, Kind, compile_with
from dovetail.errors import BackendError, UserLocation
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private import state as private_state
from dovetail.torch_private import tracing as private_tracing

Unit = tuple[torch.fx.Node, ...]
_aten = torch.ops.aten
#: Operators whose result holds whatever was in memory.
UNINITIALISED = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.empty_permuted.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


@dataclass(frozen=True)
class Finding:
    """What is wrong: the result "differs", the backend "raised", it "crashed" the process or "timed out"; and in words."""

    category: str
    problem: str

    def __str__(self) -> str:
        return self.problem


@dataclass(frozen=True, eq=False)
class Piece:
    """A small graph with real inputs, cut out of a larger one. ``origin`` are the nodes that it computes."""

    graph: torch.fx.GraphModule
    inputs: list[torch.Tensor]
    origin: tuple[torch.fx.Node, ...]
    kind: Kind = "inference"

    @property
    def has_outputs(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self.graph.graph.output_node().args[0])

    def reference(self) -> list[Any]:
        """What ATen's own operators give."""
        torch.manual_seed(0)
        return compile_aten(self.graph, kind=self.kind)([copy_of(value) for value in self.inputs])

    def compile(self, backend: Backend, options: Mapping[str, Any]) -> CompiledCallable:
        """The backend's callable for this piece, decompositions applied."""
        fake_mode = private_tracing.FakeTensorMode()
        fakes = [fake_mode.from_tensor(value, static_shapes=True) for value in self.inputs]
        table = backend.decompositions()
        with fake_mode, torch.no_grad():
            written = make_fx(self.graph, decomposition_table=table or {})(*fakes)
        lines = [node.meta.get("user_line") for node in self.origin]
        for node in written.graph.nodes:
            node.meta.setdefault("user_line", next(iter(lines), None))
        return compile_with(backend, written, fakes, self.kind, options)

    def try_backend(self, backend: Backend, options: Mapping[str, Any]) -> Finding | None:
        """What is wrong with the backend on this piece, compared with ATen's operators; None if nothing is.

        What ATen's own operators cannot run says nothing about the backend.
        """
        with private_state.preserved_rng_state():
            try:
                wanted = self.reference()
            except Exception:  # noqa: BLE001  (an operator may raise anything)
                return None
            torch.manual_seed(0)
            try:
                found = self.compile(backend, options)([copy_of(value) for value in self.inputs])
            except Exception as error:  # noqa: BLE001  (a backend may raise anything)
                first = str(error).split("\n  what to do")[0]
                text = first if isinstance(error, BackendError) else f"raises {type(error).__name__}: {first}"
                return Finding("raised", text)
        problem = self.compare(found, wanted, backend)
        return Finding("differs", problem) if problem else None

    def compare(self, found: Sequence[Any], wanted: Sequence[Any], backend: Backend) -> str:
        """How two lists of outputs differ, in words."""
        entries = self.graph.graph.output_node().args[0]
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            entry = entries[index]  # type: ignore[index]
            if isinstance(entry, torch.fx.Node) and entry.target in UNINITIALISED:
                continue
            problem = value_problem(one, other, backend)
            if problem:
                return f"output {index} ({entry}) {problem}"
        return ""


class Recording:
    """Every value of one run of a graph. ``units`` are its operators in order, each with what picks from its results."""

    def __init__(self, graph: torch.fx.GraphModule, values: dict[torch.fx.Node, Any], kind: Kind) -> None:
        self.graph = graph
        self.values = values
        self.kind = kind
        self.units: list[Unit] = []
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                picks = [user for user in node.users if user.target is operator.getitem]
                self.units.append((node, *picks))

    @classmethod
    def of(cls, graph: torch.fx.GraphModule, inputs: Sequence[Any], kind: Kind = "inference") -> Recording:
        """Run ``graph`` on copies of ``inputs``; the random numbers drawn are given back."""
        values: dict[torch.fx.Node, Any] = {}

        class _Recorder(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                result = super().run_node(n)
                values[n] = _copies_of(result) if n.op != "output" else None
                return result

        with private_state.preserved_rng_state(), private_operators.BelowAutograd(), private_operators.NoAutocast():
            recorder = _Recorder(graph)
            recorder.extra_traceback = False
            recorder.run(*[copy_of(value) for value in inputs])
        return cls(graph, values, kind)

    def piece(self, units: Sequence[Unit]) -> Piece:
        """The graph of these units alone: what they read from elsewhere is an input, what is read elsewhere an output."""
        kept = {node: None for node in self.graph.graph.nodes if any(node in unit for unit in units)}
        graph = torch.fx.Graph()
        new: dict[torch.fx.Node, torch.fx.Node] = {}
        inputs: list[torch.Tensor] = []
        for node in kept:
            for argument in node.all_input_nodes:
                if argument in kept or argument in new:
                    continue
                value = self.values[argument]
                if not isinstance(value, torch.Tensor):
                    raise BackendError(
                        f"the graph's value {argument.name} is {type(value).__name__}, and a piece of a graph takes tensors",
                        advice="use dynamic=False for this function",
                    )
                new[argument] = graph.placeholder(f"in_{argument.name}")
                inputs.append(value)
        outputs = []
        for node in kept:
            new[node] = graph.node_copy(node, lambda old: new[old])
            read_elsewhere = any(user not in kept for user in node.users) or not node.users
            if read_elsewhere and isinstance(self.values[node], torch.Tensor):
                outputs.append(new[node])
        graph.output(outputs)
        return Piece(torch.fx.GraphModule({}, graph), inputs, tuple(kept), self.kind)


def copy_of(value: Any) -> Any:
    """A copy in memory of its own, laid out as the value is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided or not value.numel():
        return value.detach().clone()
    return memory_of(value).clone().as_strided(value.shape, value.stride())


def memory_of(value: torch.Tensor) -> torch.Tensor:
    """The memory from the tensor's first element to its last, as a flat tensor.

    >>> memory_of(torch.arange(6).reshape(2, 3).t()[1:]).tolist()
    [1, 2, 3, 4, 5]
    """
    length = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return value.detach().as_strided((length,), (1,), value.storage_offset())


def _copies_of(value: Any) -> Any:
    return type(value)(map(copy_of, value)) if type(value) in (tuple, list) else copy_of(value)


def value_problem(found: Any, wanted: Any, backend: Backend) -> str:
    """How one value differs, in words; empty if it does not."""
    if not isinstance(wanted, torch.Tensor):
        return "" if found == wanted or found != found else f"is {found!r} instead of {wanted!r}"
    if not isinstance(found, torch.Tensor):
        return f"is {type(found).__name__} instead of a tensor"
    for name in ("dtype", "shape", "device"):
        one, other = getattr(found, name), getattr(wanted, name)
        if one != other:
            return f"has {name} {one} instead of {other}"
    if values_agree(found, wanted, backend):
        return ""
    difference = (found.to(torch.float64) - wanted.to(torch.float64)).abs().nan_to_num(float("inf"))
    place = int(difference.flatten().argmax())
    one, other = found.flatten()[place].item(), wanted.flatten()[place].item()
    return f"differs by up to {difference.max().item():.3g}: {one!r} instead of {other!r}"


def line_of(node: torch.fx.Node) -> UserLocation | None:
    """The user's line that a node came from."""
    found = node.meta.get("user_line")
    return found if isinstance(found, UserLocation) else None


def split_options(options: Mapping[str, Any], own: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A debugging backend's own options, and the user's that go on to the backend it wraps.

    What the pipeline says about inputs and outputs of the whole graph holds for no piece of it, and is left out.
    """
    mine = {name: options[name] for name in own if name in options}
    pipeline = ("static_inputs", "user_visible_outputs")
    return mine, {name: value for name, value in options.items() if name not in own and name not in pipeline}
