"""A captured backward: the recorded node calls, put into eager's order."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import fx

from dovetail.backward_capture import operations
from dovetail.backward_capture.forward_lines import forward_lines
from dovetail.backward_capture.recorder import ARGUMENTS, Recorder
from dovetail.errors import CaptureError
from dovetail.torch_private import operators as private_operators
from dovetail.trace.backward_order import BackwardCall, eager_order, hook_order


class CapturedBackward:
    """One shape of autograd graph, as the engine handed it over: which formulas, hooks and user functions run on what.

    It holds no size and no scalar: another batch size is the same captured backward. ``graphs`` has one graph for each order
    in which eager would have run the nodes; nearly always there is one.
    """

    def __init__(self, recorder: Recorder, call: BackwardCall) -> None:
        # Not the recorder, which holds on to nodes of the first of its backwards.
        self._steps = recorder.graph
        self.names = dict(recorder.call_names)
        self.graphs: dict[tuple[tuple[int, ...], bool, bool], fx.GraphModule] = {}
        nodes = hook_order(call)
        self.lines = forward_lines(nodes)
        self._assign(nodes, recorder.roots)
        self._chains = self._find_chains()
        #: Whether hooks or functions of the user run in it.
        self.runs_user_code = any(node.target in operations.USER_CODE for node in self._steps.nodes)
        #: Whether it has to run while the engine holds the call: hooks of native code are of no use afterwards.
        self.needs_the_engine = any(node.target is operations.call_native_tensor_hooks for node in self._steps.nodes)
        #: For each value that went through saved-tensor hooks the visit that unpacks it, its hook and what the hook gets.
        self.unpacked: tuple[tuple[int, int, int], ...] = tuple(
            (node.meta["call"], *(item.args[1] for item in node.args[:2]))  # type: ignore[union-attr, misc]
            for node in self._steps.nodes
            if node.target is operations.unpack_saved
        )
        self.results = tuple(recorder.outputs)
        #: Whether a run can tell in which order the nodes run.
        self.order_matters = any(
            node.op == "call_function" and node.target in operations.USER_CODE for node in self._steps.nodes
        ) or any(len(leaves) > 2 for leaves in self._chains.values())

    def _assign(self, nodes: Sequence[Any], roots: Sequence[Any]) -> None:
        """Say of each step which node's visit it belongs to; hooks and sums are recorded before their node is named."""
        index_of = {node: index for index, node in enumerate(nodes)}
        for index, name in self.names.items():
            if index >= len(nodes) or (index and nodes[index].name() != name):
                raise CaptureError(f"the engine visits {name} as number {index}, which is not where it was expected")

        def target_of(arrival: tuple[int, int]) -> int | None:
            producer, output = arrival
            target = roots[output] if producer == 0 else nodes[producer].next_functions[output][0]
            # Sums are recorded for nodes too that this backward does not come to: with inputs=, for example.
            return index_of.get(target)

        for node in self._steps.nodes:
            arrival = node.meta.get("arrival_of_input")
            if arrival is not None:
                node.meta["call"] = target_of(arrival)

    def _find_chains(self) -> dict[fx.Node, list[fx.Node]]:
        """The last sum of each place where gradients meet, and the gradients that meet there."""
        sums = [node for node in self._steps.nodes if node.target is operations.add_gradients]
        inner = {node.args[0] for node in sums if node.args[0].target is operations.add_gradients}
        chains = {}
        for node in sums:
            if node in inner:
                continue
            leaves = []
            at = node
            while at.target is operations.add_gradients:
                leaves.append(at.args[1])
                at = at.args[0]
            leaves.append(at)
            chains[node] = leaves[::-1]
        return chains

    def order(self, call: BackwardCall) -> tuple[int, ...]:
        """The visits' numbers in the order in which eager would run them now."""
        if self.graphs and not self.order_matters:
            return next(iter(self.graphs))[0]
        position = {node: index for index, node in enumerate(hook_order(call))}
        return tuple(position[node] for node in eager_order(call))

    def graph_for(self, order: tuple[int, ...], create_graph: bool = False, check_nan: bool = False) -> fx.GraphModule:
        """The graph that runs the visits in this order; ``create_graph`` if it is to be differentiated, ``check_nan`` if it
        looks at what each node gives.
        """
        key = (order, create_graph, check_nan)
        found = self.graphs.get(key)
        if found is None:
            found = self.graphs[key] = self._build(*key)
        return found

    def _build(self, order: tuple[int, ...], create_graph: bool, check_nan: bool) -> fx.GraphModule:
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
        sums = _Sums(self._chains, rank, graph, new)
        last_steps = {steps[index][-1]: _given(index, steps[index]) for index in order if steps[index]}
        for node in (*before_all, *(step for index in order for step in steps[index])):
            if node.target is operations.of_either_order:
                new[node] = new[node.args[create_graph]]  # type: ignore[index]
            elif node.target is not operations.add_gradients:
                new[node] = graph.node_copy(node, lambda argument: new[argument])
            elif node in self._chains:
                new[node] = sums.total(node)
            if create_graph and node in last_steps:
                # As eager does: the order of what is recorded decides in which order it is differentiated.
                sums.add_what_comes_from(node.meta["call"])
            if check_nan and node in last_steps:
                given = last_steps[node]
                checked = graph.call_function(
                    operations.check_for_nan,
                    (self.names[node.meta["call"]], list(given), [new[item] for item in given.values()]),
                )
                checked.meta["call"] = node.meta["call"]
        graph.output([None if node is None else new[node] for node in self.results])
        # A compiled function is there in two ways, and the other one is of no use.
        graph.eliminate_dead_code(
            lambda node: (
                node.op in ("placeholder", "output")
                or (node.target in operations.EFFECTS and node.meta.get("create_graph", create_graph) == create_graph)
            )
        )
        graph.lint()
        return fx.GraphModule({}, graph, "CapturedBackward")

    def __call__(self, *arguments: Any) -> Any:
        """Run it operator by operator on what the engine has collected, in the order of its first run."""
        return next(iter(self.graphs.values()))(*arguments)

    def __str__(self) -> str:
        return self.shown(self.lines)

    def shown(self, lines: dict[int, str]) -> str:
        """The graph as text, with the forward's lines of one of the backwards that it runs for."""
        graph = next(iter(self.graphs.values()), None)
        if graph is None:
            return "captured backward of " + " -> ".join(self.names.values())
        return render(graph, self.names, lines)


class _Sums:
    """The sums of gradients that meet, in the order in which eager adds them up."""

    def __init__(
        self,
        chains: dict[fx.Node, list[fx.Node]],
        rank: dict[int, int],
        graph: fx.Graph,
        new: dict[fx.Node, fx.Node],
    ) -> None:
        self._graph = graph
        self._new = new
        self._waiting = {
            chain: sorted(leaves, key=lambda leaf: _arrival_rank(leaf, rank)) for chain, leaves in chains.items()
        }
        self._totals: dict[fx.Node, fx.Node] = {}

    def _add(self, chain: fx.Node) -> None:
        leaf = self._new[self._waiting[chain].pop(0)]
        if chain in self._totals:
            leaf = self._graph.call_function(operations.add_gradients, (self._totals[chain], leaf))
            leaf.meta.update(chain.meta)
        self._totals[chain] = leaf

    def add_what_comes_from(self, visit: int) -> None:
        """Add the gradients that a node has just given."""
        ready = [(leaves[0].meta["arrival"], chain) for chain, leaves in self._waiting.items() if leaves]
        for (producer, _), chain in sorted(ready, key=lambda item: item[0]):
            while producer == visit and self._waiting[chain] and self._waiting[chain][0].meta["arrival"][0] == visit:
                self._add(chain)

    def total(self, chain: fx.Node) -> fx.Node:
        """The whole sum."""
        while self._waiting[chain]:
            self._add(chain)
        return self._totals[chain]


def _given(visit: int, steps: Sequence[fx.Node]) -> dict[int, fx.Node]:
    """What a node gives along each of its edges, after its hooks."""
    return {
        node.meta["arrival"][1]: node
        for node in steps
        if node.target is operator.getitem and node.meta.get("arrival", (None,))[0] == visit
    }


def _arrival_rank(leaf: fx.Node, rank: dict[int, int]) -> tuple[int, int]:
    producer, output = leaf.meta["arrival"]
    return rank[producer], output


def render(graph_module: fx.GraphModule, names: dict[int, str], lines: dict[int, str]) -> str:
    """The graph as Python, each part under the forward node that it is the backward of.

    What the engine does after every node, comparing shapes and types, is left out.
    """
    text = ["def backward(tensors, sizes, scalars, hooks, packed):"]
    spelled: dict[fx.Node, str] = {}
    last: int | None = None
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            spelled[node] = node.name
        elif node.op == "output":
            text.append(f"    return {_spell(node.args[0], spelled)}")
        elif node.target is operator.getitem:
            of, index = node.args
            if isinstance(of.target, operations.OutputCheck):
                spelled[node] = _spell(of.args[0][index], spelled)
            else:
                spelled[node] = f"{_spell(of, spelled)}[{index!r}]"
        elif isinstance(node.target, operations.OutputCheck):
            continue
        else:
            call = node.meta.get("call")
            if call is not None and call != last:
                place = f", {lines[call]}" if call in lines else ""
                name = names.get(call, "a gradient that was asked for").removeprefix("torch::autograd::")
                text.append(f"    # {call}: {name}{place}")
                last = call
            arguments = [_spell(item, spelled) for item in node.args]
            arguments += [f"{key}={_spell(item, spelled)}" for key, item in node.kwargs.items()]
            where = f"  # {node.meta['user_line']}" if "user_line" in node.meta else ""
            operator_name = isinstance(node.target, private_operators.OpOverload)
            target = str(node.target) if operator_name else getattr(node.target, "__name__", str(node.target))
            spelled[node] = node.name
            result = "" if node.target in _NO_RESULT else f"{node.name} = "
            text.append(f"    {result}{target}({', '.join(arguments)}){where}")
    return "\n".join(text)


_NO_RESULT = frozenset({operations.accumulate_grad, operations.call_post_accumulate_hook})


def _spell(value: Any, spelled: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return spelled.get(value, value.name)
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_spell(item, spelled) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    return repr(value)
