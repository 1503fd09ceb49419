"""A backend that takes graphs and compiles them later: the callable of each is filled in when its kernels are there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.aot.nodes import has_symbolic_sizes
from dovetail.backends import Backend
from dovetail.backends.common.outputs import own_copy
from dovetail.backends.inductor.float_inputs import floats_as_tensors
from dovetail.backends.protocol import CompiledCallable, Kind
from dovetail.tiers.kept_graphs import is_unread
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing


@dataclasses.dataclass(eq=False)
class LaterGraph:
    """One flat graph with what the backend is called with; ``run`` is there once it was compiled."""

    graph: torch.fx.GraphModule
    examples: Sequence[Any]
    kind: Kind
    options: Mapping[str, Any]
    #: The value given in the place of inputs that nothing reads.
    blanks: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    run: CompiledCallable | None = None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run it; the graph must have been compiled by now."""
        assert self.run is not None
        for place, blank in self.blanks.items():
            inputs[place] = blank
        return self.run(inputs)

    def compile(self, backend: Backend) -> None:
        """Compile it now."""
        self.run = backend.compile(self.graph, list(self.examples), kind=self.kind, options=dict(self.options))


class Collector:
    """Stands for a backend while graphs are made for it: :attr:`backend` has the same facts, and puts off compiling.

    What it is given after :meth:`compile_all` is compiled at once: backwards for other patterns of tangents. ``asked`` is what the
    graphs of the next order are compiled by from then on.
    """

    def __init__(self, backend: Backend, asked: Any = None) -> None:
        self._real = backend
        self.asked = asked
        self.is_done = False
        self.graphs: list[LaterGraph] = []
        self.backend = dataclasses.replace(backend, compile=self)

    def __call__(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, kind: Kind, options: Mapping[str, Any]
    ) -> CompiledCallable:
        """See :class:`dovetail.backends.protocol.CompileFunction`."""
        if self.is_done:
            return self._real.compile(graph, example_inputs, kind=kind, options=options)
        self.graphs.append(_without_symbols(LaterGraph(graph, example_inputs, kind, options)))
        return self.graphs[-1]

    def compile_all(self) -> None:
        """Compile all graphs so far; raises what the backend raises."""
        for item in self.graphs:
            item.compile(self._real)
        self.is_done = True
        self.graphs = []


def compile_now(
    backend: Backend, graph: torch.fx.GraphModule, examples: Sequence[Any], kind: Kind, options: Mapping[str, Any]
) -> CompiledCallable:
    """Compile a graph as the background does: so its kernels lie under the same key."""
    later = _without_symbols(LaterGraph(graph, examples, kind, options))
    later.compile(backend)
    assert later.run is not None
    return later if later.blanks else later.run


def _without_symbols(later: LaterGraph) -> LaterGraph:
    """The graph with changing floats as tensors, and with inputs of no size where nothing reads one whose size changes."""
    if not has_symbolic_sizes(later.graph.graph.nodes):
        return later
    graph = own_copy(later.graph, private_tracing.lazy_graph_module)
    floats_as_tensors(graph)
    placeholders = graph.graph.find_nodes(op="placeholder")
    examples = list(later.examples) or [node.meta["val"] for node in placeholders]
    blanks: dict[int, torch.Tensor] = {}
    for place, node in enumerate(placeholders):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        if is_unread(node):
            with private_tracing.disable_current_modes(), torch.no_grad():
                node.meta["val"] = examples[place] = value.new_empty(0)
                blanks[place] = torch.empty(0, dtype=value.dtype, device=value.device)
        elif any(private_sizes.is_symbolic(number) and _number(number) is not number for number in _numbers_of(value)):
            node.meta["val"] = examples[place] = _settled(value)
    return dataclasses.replace(later, graph=graph, examples=examples, blanks=blanks)


def _settled(value: torch.Tensor) -> torch.Tensor:
    """The same fake tensor with plain numbers for those that are known by now: a compiler tells both apart."""
    modes = (private_tracing.disable_current_modes(), value.fake_mode, torch.inference_mode(value.is_inference()))  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        for mode in (*modes, torch.no_grad()):
            stack.enter_context(mode)
        memory = torch.empty(_number(value.untyped_storage().nbytes()) // value.dtype.itemsize, dtype=value.dtype)
        shape, stride = tuple(map(_number, value.shape)), tuple(map(_number, value.stride()))
        found = memory.as_strided(shape, stride, _number(value.storage_offset()))
    return found.requires_grad_(value.requires_grad)


def _numbers_of(value: torch.Tensor) -> tuple[Any, ...]:
    return (*value.shape, *value.stride(), value.storage_offset())


def _number(value: Any) -> Any:
    known = private_sizes.expression_of(value) if private_sizes.is_symbolic(value) else None
    return value if known is None or not known.is_number else int(known)
