"""A captured backward: the recorded steps of the nodes, put into eager's order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import fx

from dovetail.backward_capture import accumulation, functions
from dovetail.backward_capture.builder import ARGUMENTS, GraphBuilder
from dovetail.backward_capture.printer import render
from dovetail.backward_capture.segments import EFFECTS, USER_CODE
from dovetail.errors import CaptureError
from dovetail.rules.gradients.engine_order import BackwardCall, eager_order, hook_order
from dovetail.torch_private.autograd_nodes import node_name


class CapturedBackward:
    """One form of autograd graph, as the engine handed it over: formulas, the user's hooks and functions, and values.

    It holds no size and no scalar: another batch size is the same captured backward. ``graphs`` has one graph for each order in
    which eager would have run the nodes (nearly always one), with and without ``create_graph``. A step's ``meta`` has the number of
    the engine's visit ("call"), and the visit and the output along which a gradient leaves ("arrival").
    """

    def __init__(self, builder: GraphBuilder, call: BackwardCall) -> None:
        # Not the builder, which refers to nodes of the first of its backwards.
        self._steps = builder.graph
        self.names = dict(builder.call_names)
        self.graphs: dict[tuple[tuple[int, ...], bool], fx.GraphModule] = {}
        nodes = hook_order(call)
        self._assign(nodes, builder.roots)
        #: For each place where gradients meet, the gradients.
        self._sums = {node: node.args for node in self._steps.nodes if node.target is accumulation.add_gradients}
        #: Whether hooks or functions of the user run in it.
        self.runs_user_code = any(node.target in USER_CODE for node in self._steps.nodes)
        self.results = tuple(builder.outputs)
        #: Whether a run can tell in which order the nodes run.
        self.order_matters = self.runs_user_code or any(len(terms) > 2 for terms in self._sums.values())

    def _assign(self, nodes: Sequence[Any], roots: Sequence[Any]) -> None:
        """Note at each step the visit that it belongs to; hooks and sums are recorded before their node is named."""
        index_of = {node: index for index, node in enumerate(nodes)}
        for index, name in self.names.items():
            if index >= len(nodes) or (index and node_name(nodes[index]) != name):
                raise CaptureError(f"the engine visits {name} as number {index}, which is not where it was expected")

        def target_of(arrival: tuple[int, int]) -> int | None:
            producer, output = arrival
            target = roots[output] if producer == 0 else nodes[producer].next_functions[output][0]
            # Sums are recorded also for nodes that this backward does not come to, with inputs= for example.
            return index_of.get(target)

        for node in self._steps.nodes:
            arrival = node.meta.get("arrival_of_input")
            if arrival is not None:
                node.meta["call"] = target_of(arrival)

    def order(self, call: BackwardCall) -> tuple[int, ...]:
        """The numbers of the visits, in the order in which eager would run them now."""
        if self.graphs and not self.order_matters:
            return next(iter(self.graphs))[0]
        position = {node: index for index, node in enumerate(hook_order(call))}
        return tuple(position[node] for node in eager_order(call))

    def graph_for(self, order: tuple[int, ...], create_graph: bool = False) -> fx.GraphModule:
        """The graph that runs the visits in this order; ``create_graph`` if it is to be differentiated."""
        key = (order, create_graph)
        found = self.graphs.get(key)
        if found is None:
            found = self.graphs[key] = self._build(*key)
        return found

    def _build(self, order: tuple[int, ...], create_graph: bool) -> fx.GraphModule:
        steps: dict[int, list[fx.Node]] = defaultdict(list)
        before_all: list[fx.Node] = []
        for node in self._steps.nodes:
            if node.op != "placeholder":
                (steps[node.meta["call"]] if "call" in node.meta else before_all).append(node)
        rank = {index: place for place, index in enumerate(order)}
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for name, node in zip(ARGUMENTS, self._steps.find_nodes(op="placeholder"), strict=True):
            new[node] = graph.placeholder(name)
        sums = _Sums(self._sums, rank, graph, new)
        last_steps = {steps[index][-1] for index in order if steps[index]}
        for node in (*before_all, *(step for index in order for step in steps[index])):
            if node.target is functions.of_either_order:
                new[node] = new[node.args[create_graph]]  # type: ignore[index]
            elif node in self._sums:
                new[node] = sums.total(node)
            else:
                new[node] = graph.node_copy(node, lambda argument: new[argument])
            if create_graph and node in last_steps:
                # As in eager: the order in which sums are recorded decides the order of their derivatives.
                sums.add_results_of(node.meta["call"])
        graph.output([None if node is None else new[node] for node in self.results])
        # A compiled function is recorded in two ways; one of them is dead code now.
        graph.eliminate_dead_code(
            lambda node: (
                node.op in ("placeholder", "output")
                or (node.target in EFFECTS and node.meta.get("create_graph", create_graph) == create_graph)
            )
        )
        graph.lint()
        return fx.GraphModule({}, graph, "CapturedBackward")

    def __call__(self, *arguments: Any) -> Any:
        """Run it operator by operator on collected values, in the order of its first run."""
        return next(iter(self.graphs.values()))(*arguments)

    def __str__(self) -> str:
        return self.shown({})

    def shown(self, lines: dict[int, str]) -> str:
        """The graph as text; ``lines`` are the forward's lines by visit, of one of its backwards."""
        graph = next(iter(self.graphs.values()), None)
        return render(graph, self.names, lines) if graph is not None else f"captured backward of {self.names}"


class _Sums:
    """Sums of gradients that meet, in the order in which eager adds them up."""

    def __init__(
        self, terms: dict[fx.Node, Any], rank: dict[int, int], graph: fx.Graph, new: dict[fx.Node, fx.Node]
    ) -> None:
        self._graph = graph
        self._new = new

        def arrival(term: fx.Node) -> tuple[int, int]:
            visit, output = term.meta["arrival"]
            return rank[visit], output

        self._waiting = {place: sorted(items, key=arrival) for place, items in terms.items()}
        self._totals: dict[fx.Node, fx.Node] = {}

    def _add(self, place: fx.Node) -> None:
        term = self._new[self._waiting[place].pop(0)]
        if place in self._totals:
            term = self._graph.call_function(accumulation.add_gradients, (self._totals[place], term))
            term.meta.update(place.meta)
        self._totals[place] = term

    def add_results_of(self, visit: int) -> None:
        """Add the gradients that a node has just computed to the sums that wait for them."""
        ready = [(items[0].meta["arrival"], place) for place, items in self._waiting.items() if items]
        for (producer, _), place in sorted(ready, key=lambda item: item[0]):
            while producer == visit and self._waiting[place] and self._waiting[place][0].meta["arrival"][0] == visit:
                self._add(place)

    def total(self, place: fx.Node) -> fx.Node:
        """The whole sum, with the terms that are still waiting."""
        while self._waiting[place]:
            self._add(place)
        return self._totals[place]
