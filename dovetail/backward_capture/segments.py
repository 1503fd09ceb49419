"""A captured backward cut into segments that are compiled, with the accumulation into ``.grad`` between them.

A graph cannot write ``.grad``. The write can wait until the next hook or function of the user's runs, which could look at it; so
a backward without such code is one segment, followed by the accumulation of all leaves' gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from dovetail.backward_capture import accumulation, functions, hooks
from dovetail.backward_capture.builder import ARGUMENTS
from dovetail.backward_capture.node_functions import NodeFunction
from dovetail.quirks.gradient_formulas import FIRST_ORDER

CARRIED = "carried"
#: Steps that call the user's own code.
USER_CODE = frozenset(
    {
        functions.call_backward,
        functions.compiled_prologue,
        hooks.call_tensor_hook,
        hooks.call_node_pre_hook,
        hooks.call_node_post_hook,
        hooks.call_post_accumulate_hook,
        hooks.unpack_saved,
    }
)
#: These and the steps that write to something that the user can see; they keep their order.
EFFECTS = USER_CODE | {accumulation.accumulate_grad}


class Write(NamedTuple):
    """A write behind a segment: the value with number ``gradient`` is accumulated into the leaf at ``place``.

    Without a gradient, the hook at ``place`` tells a reducer that a leaf has its gradient.
    """

    place: int
    gradient: int | None


@dataclass(frozen=True)
class Segment:
    """One segment: ``graph(tensors, sizes, scalars, hooks, packed, carried) -> values``, and the writes after it.

    ``carried`` are values of earlier segments with the numbers ``takes``; ``keeps`` has the numbers of this segment's own values.
    ``reason`` is set for steps that cannot be traced: code of torch itself, which looks at the engine, and of C++ extensions.
    """

    graph: fx.GraphModule
    reason: str
    takes: tuple[int, ...]
    keeps: tuple[int, ...]
    writes: tuple[Write, ...]


@dataclass(eq=False)
class _Draft:
    """A segment whose nodes are still those of the captured backward."""

    reason: str = ""
    steps: list[fx.Node] = field(default_factory=list)
    writes: list[fx.Node] = field(default_factory=list)
    #: The values that a later segment, a write or the caller reads.
    kept: dict[fx.Node, None] = field(default_factory=dict)


def hook_index(node: fx.Node) -> int | None:
    """The number of the hook or context that a step calls; None for other steps."""
    if node.target not in USER_CODE:
        return None
    return node.args[0].args[1]  # type: ignore[union-attr,return-value]


def why_eager(node: fx.Node, traceable: Sequence[bool]) -> str:
    """Why a step cannot be traced; empty if it can. ``traceable`` has a flag for each hook and context."""
    if isinstance(node.target, NodeFunction):
        if node.target.is_custom:
            return "an operator of a C++ extension"
        return "torch computes it in another way while it is traced" if node.target.name in FIRST_ORDER else ""
    if node.meta.get("as_it_is"):
        return "a compiled function whose backward was captured for other gradients, or without autocast"
    index = hook_index(node)
    if index is None or traceable[index]:
        return ""
    return "code that is not the program's, which may ask the engine where it is"


def cut(
    graph_module: fx.GraphModule, traceable: Sequence[bool], reducers: frozenset[int] = frozenset()
) -> tuple[tuple[Segment, ...], tuple[int | None, ...]]:
    """Cut a captured backward around the steps that must be eager, and before each that could see a ``.grad`` not yet written.

    Returns the segments in order, and the numbers of the gradients that were asked for. The hooks at ``reducers`` run behind their
    segment, as writes do.
    """
    drafts = [_Draft()]
    arguments: dict[fx.Node, fx.Node] = {}
    eager_values: dict[fx.Node, str] = {}
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        draft = drafts[-1]
        is_item = node.target is operator.getitem
        if is_item and node.args[0].op == "placeholder":
            arguments[node] = node.args[0]
        elif node.target is accumulation.accumulate_grad:
            if node.args[1] is not None:
                draft.writes.append(node)
        elif node.target is hooks.call_node_post_hook and hook_index(node) in reducers:
            draft.writes.append(node)
        else:
            # An item stays in the segment of the result that it is taken from.
            reason = eager_values.get(node.args[0], "") if is_item else why_eager(node, traceable)
            if reason:
                eager_values[node] = reason
            could_look = draft.writes and node.target in USER_CODE
            changes = bool(reason) != bool(draft.reason) and draft.steps
            if could_look or changes:
                draft = _Draft(reason)
                drafts.append(draft)
            elif not draft.steps:
                draft.reason = reason
            draft.steps.append(node)
    asked: Any = graph_module.graph.output_node().args[0]
    return _Assembly(drafts, arguments).segments(asked)


def _gradient(write: fx.Node) -> Any:
    """The gradient that a write adds to a leaf; None where it tells a reducer."""
    return write.args[1] if write.target is accumulation.accumulate_grad else None


class _Assembly:
    """Makes graphs of drafts, and numbers the values that pass between them."""

    def __init__(self, drafts: Sequence[_Draft], arguments: dict[fx.Node, fx.Node]) -> None:
        self._drafts = drafts
        self._arguments = arguments
        self._made_in = {node: draft for draft in drafts for node in draft.steps}
        self._number = {node: place for place, node in enumerate(self._made_in)}

    def segments(self, asked: Sequence[fx.Node | None]) -> tuple[tuple[Segment, ...], tuple[int | None, ...]]:
        """The segments, and the numbers of the values ``asked``, which the caller reads."""
        for draft in self._drafts:
            for node in draft.steps:
                for item in node.all_input_nodes:
                    maker = self._made_in.get(item, draft)
                    if maker is not draft:
                        maker.kept[item] = None
        gradients = [_gradient(node) for draft in self._drafts for node in draft.writes]
        for value in filter(None, (*gradients, *asked)):
            # The first segment hands on an argument of the whole backward that leaves it as it is.
            self._number.setdefault(value, len(self._number))
            self._made_in.get(value, self._drafts[0]).kept[value] = None
        return tuple(map(self._segment, self._drafts)), tuple(map(self._number.get, asked))  # type: ignore[arg-type]

    def _segment(self, draft: _Draft) -> Segment:
        graph = fx.Graph()
        lists = {name: graph.placeholder(name) for name in (*ARGUMENTS, CARRIED)}
        takes: dict[fx.Node, None] = {}
        new: dict[fx.Node, fx.Node] = {}

        def find(item: fx.Node) -> fx.Node:
            if item not in new:
                if item in self._arguments:
                    new[item] = graph.node_copy(item, lambda argument: lists[argument.name])
                else:
                    new[item] = graph.call_function(operator.getitem, (lists[CARRIED], len(takes)))
                    takes[item] = None
            return new[item]

        for node in draft.steps:
            new[node] = graph.node_copy(node, find)
        graph.output([find(item) for item in draft.kept])
        graph.lint()
        return Segment(
            _named_module(graph),
            draft.reason,
            tuple(self._number[item] for item in takes),
            tuple(self._number[item] for item in draft.kept),
            tuple(map(self._write, draft.writes)),
        )

    def _write(self, node: fx.Node) -> Write:
        place: Any = node.args[0].args[1]  # type: ignore[union-attr]
        return Write(place, self._number.get(_gradient(node)))


def _named_module(graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph, whose function has a name that warnings and reports can show."""
    module = fx.GraphModule({}, graph, "CapturedBackward")
    function = type(module).forward
    function.__name__ = function.__qualname__ = "captured_backward"
    return module
