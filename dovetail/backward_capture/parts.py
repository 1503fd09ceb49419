"""A captured backward cut into parts that are compiled, with the accumulation into ``.grad`` between them.

Writing ``.grad`` is nothing that a graph can hold, and it can wait: until the next hook or function of the user's runs, which
could look. So a backward without such code is one part, and what it leaves to do is adding up the leaves' gradients.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from dovetail.backward_capture import operations
from dovetail.backward_capture.recorder import ARGUMENTS
from dovetail.quirks.exact import OTHER_FORMULA

CARRIED = "carried"


class Write(NamedTuple):
    """What happens to a leaf: the gradient with this number is added to the tensor at ``place``, or the hook at ``place`` tells
    a reducer that the leaf has its gradient.
    """

    place: int
    gradient: int | None
    tells_reducer: bool = False


@dataclass(frozen=True)
class Part:
    """One part: ``graph(tensors, sizes, scalars, hooks, packed, carried) -> values`` and what happens after it.

    ``reason`` is set for steps that nothing may trace, hooks of native code and of torch itself, which look at the engine.
    ``keeps`` says which of the values later parts read, under which number; ``accumulate`` has what happens to the leaves.
    """

    graph: fx.GraphModule
    reason: str
    takes: tuple[int, ...]
    keeps: tuple[int, ...]
    accumulate: tuple[Write, ...]


@dataclass(frozen=True)
class Parts:
    """All parts of a backward in order; ``results`` are the numbers of the gradients that were asked for."""

    parts: tuple[Part, ...]
    results: tuple[int | None, ...]


def hook_index(node: fx.Node) -> int | None:
    """Which of the captured backward's hooks and contexts a step calls."""
    if node.target not in operations.USER_CODE or node.target is operations.call_native_tensor_hooks:
        return None
    return node.args[0].args[1]  # type: ignore[union-attr,return-value]


def why_eager(node: fx.Node, traceable: Sequence[bool]) -> str:
    """Why a step cannot be traced (empty: it can); ``traceable`` says it of each hook and context."""
    if isinstance(node.target, operations.NodeFunction):
        if node.target.is_custom:
            return "an operator of a C++ extension"
        return "torch computes it in another way while it is traced" if node.target.name in OTHER_FORMULA else ""
    if node.target is operations.call_native_tensor_hooks:
        return "hooks of native code"
    index = hook_index(node)
    return (
        ""
        if index is None or traceable[index]
        else "code that is not the program's, which may ask the engine where it is"
    )


def cut(
    graph_module: fx.GraphModule,
    traceable: Sequence[bool],
    reducers: frozenset[int] = frozenset(),
    bucket_ends: frozenset[int] = frozenset(),
) -> Parts:
    """Cut a captured backward around the steps that must be eager, and in front of each that could see a ``.grad`` that is
    still to be written. The hooks at ``reducers`` wait for their part as such writes do. Behind those at ``bucket_ends`` a
    part ends: the exchange that they begin goes on beside the next one.
    """
    steps: list[list[fx.Node]] = [[]]
    writes: list[list[fx.Node]] = [[]]
    reasons = [""]
    arguments: dict[fx.Node, fx.Node] = {}
    eager_values: dict[fx.Node, str] = {}
    exchange_begins = False
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.args and isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder":
            arguments[node] = node.args[0]
        elif node.target is operations.accumulate_grad or (
            node.target is operations.call_node_post_hook and hook_index(node) in reducers
        ):
            writes[-1].append(node)
            exchange_begins = exchange_begins or hook_index(node) in bucket_ends
        else:
            # What is picked out of a result stays with it.
            eager = why_eager(node, traceable)
            if node.target is operator.getitem:
                eager = eager_values.get(node.args[0], "")
            if eager:
                eager_values[node] = eager
            looks = writes[-1] and node.target in operations.USER_CODE
            ends = exchange_begins and node.target is not operator.getitem
            if looks or ends or (bool(eager) != bool(reasons[-1]) and steps[-1]):
                steps.append([])
                writes.append([])
                reasons.append(eager)
                exchange_begins = False
            elif not steps[-1]:
                reasons[-1] = eager
            steps[-1].append(node)
    asked = graph_module.graph.output_node().args[0]
    return _build(steps, writes, reasons, arguments, asked)  # type: ignore[arg-type]


def _gradient(write: fx.Node) -> fx.Node | None:
    """The gradient that a step adds to a leaf."""
    return write.args[1] if write.target is operations.accumulate_grad else None  # type: ignore[return-value]


def _build(
    steps: Sequence[Sequence[fx.Node]],
    writes: Sequence[Sequence[fx.Node]],
    reasons: Sequence[str],
    arguments: dict[fx.Node, fx.Node],
    asked: Sequence[fx.Node | None],
) -> Parts:
    made_in = {node: index for index, nodes in enumerate(steps) for node in nodes}
    number = {node: place for place, node in enumerate(node for nodes in steps for node in nodes)}
    needed_later: list[dict[fx.Node, None]] = [{} for _ in steps]
    for index, nodes in enumerate(steps):
        for node in nodes:
            for item in node.all_input_nodes:
                if item in made_in and made_in[item] != index:
                    needed_later[made_in[item]][item] = None
    written: list[dict[fx.Node, None]] = [{} for _ in steps]
    for written_nodes in writes:
        for node in written_nodes:
            gradient = _gradient(node)
            if gradient is not None and gradient in made_in:
                written[made_in[gradient]][gradient] = None
    for wanted in asked:
        if wanted is not None and wanted in made_in:
            written[made_in[wanted]][wanted] = None
    extra: list[Any] = [
        item for item in (*asked, *(_gradient(n) for nodes in writes for n in nodes)) if item in arguments
    ]
    parts = []
    for index, nodes in enumerate(steps):
        takes: dict[fx.Node, None] = {}
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        lists = {name: graph.placeholder(name) for name in (*ARGUMENTS, CARRIED)}

        def find(
            item: fx.Node, graph: fx.Graph = graph, new: Any = new, lists: Any = lists, takes: Any = takes
        ) -> fx.Node:
            if item not in new:
                if item in arguments:
                    new[item] = graph.node_copy(item, lambda argument: lists[argument.name])
                else:
                    new[item] = graph.call_function(operator.getitem, (lists[CARRIED], len(takes)))
                    takes[item] = None
            return new[item]

        for node in nodes:
            new[node] = graph.node_copy(node, find)
        kept: list[Any] = [*{**needed_later[index], **written[index]}, *(extra if index == 0 else ())]
        for item in kept:
            find(item)
        graph.output([new[item] for item in kept])
        graph.lint()
        for item in extra if index == 0 else ():
            number.setdefault(item, len(number))
        parts.append(
            Part(
                named_module(graph),
                reasons[index],
                tuple(number[item] for item in takes),
                tuple(number[item] for item in kept),
                tuple(
                    Write(
                        node.args[0].args[1],  # type: ignore[union-attr, arg-type]
                        None if (gradient := _gradient(node)) is None else number[gradient],
                        node.target is operations.call_node_post_hook,
                    )
                    for node in writes[index]
                ),
            )
        )
    return Parts(tuple(parts), tuple(None if item is None else number[item] for item in asked))


def named_module(graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph, whose function has a name that says what it is in warnings and reports."""
    module = fx.GraphModule({}, graph, "CapturedBackward")
    function = type(module).forward
    function.__name__ = function.__qualname__ = "captured_backward"
    return module


class PartsRunner:
    """Runs the parts one after the other; a value is let go of after its last use."""

    def __init__(self, parts: Parts, functions: Sequence[Callable[..., Any]]) -> None:
        self.parts = parts
        #: What runs each part.
        self.functions = tuple(functions)
        last_use: dict[int, int] = {}
        for index, part in enumerate(parts.parts):
            last_use.update(dict.fromkeys(part.takes, index))
            last_use.update({write.gradient: index for write in part.accumulate if write.gradient is not None})
        last_use.update({number: len(parts.parts) for number in parts.results if number is not None})
        self._steps = []
        for index, (part, function) in enumerate(zip(parts.parts, functions, strict=True)):
            accumulated = [write.gradient for write in part.accumulate if write.gradient is not None]
            dropped = [n for n in dict.fromkeys(part.takes) if last_use[n] == index and n not in set(accumulated)]
            once = {number for number, times in Counter(accumulated).items() if times == 1}
            writes = [
                (write, write.gradient in once and last_use[write.gradient] == index)
                for write in part.accumulate
                if write.gradient is not None or write.tells_reducer
            ]
            self._steps.append((part, function, dropped, writes, *_saved_in(part.graph)))
        # Only code of the user's could write to what is saved.
        self._checks = any(
            node.target in operations.USER_CODE for part in parts.parts for node in part.graph.graph.nodes
        )

    def __call__(self, *arguments: Any) -> list[Any]:
        """The gradients that were asked for; the others are in ``.grad`` afterwards."""
        tensors = arguments[0]
        values: dict[int, Any] = {}
        versions = [tensor._version for tensor in tensors] if self._checks else None
        for part, function, dropped, writes, used, used_after_user_code in self._steps:
            if versions is not None:
                check_unwritten(tensors, versions, used)
            carried = [values[number] for number in part.takes]
            for number in dropped:
                del values[number]
            values.update(zip(part.keeps, function(*arguments, carried), strict=True))
            del carried
            if versions is not None:
                check_unwritten(tensors, versions, used_after_user_code)
            for (place, gradient, _), is_last in writes:
                if gradient is None:
                    arguments[3][place]()
                elif is_last and values[gradient] is not None:
                    operations.accumulate_owned(tensors[place], [values.pop(gradient)])
                else:
                    operations.accumulate_grad(tensors[place], values[gradient])
        return [None if number is None else values[number] for number in self.parts.results]


def _saved_in(graph_module: fx.GraphModule) -> tuple[list[int], list[int]]:
    """The saved tensors that a part computes with, and those that it uses after code of the user's has run."""
    used: dict[int, None] = {}
    afterwards: dict[int, None] = {}
    user_code = False
    for node in graph_module.graph.nodes:
        if node.target is operations.call_post_accumulate_hook:
            user_code = True
            continue  # its leaf is no saved value
        for item in node.all_input_nodes:
            if item.target is operator.getitem and item.args[0].name == "tensors":  # type: ignore[union-attr]
                (afterwards if user_code else used)[item.args[1]] = None  # type: ignore[index]
        user_code = user_code or node.target in operations.USER_CODE
    return [*{**used, **afterwards}], list(afterwards)


def uses_of_saved(graph: fx.Graph) -> dict[fx.Node, list[int]]:
    """For each step of a captured backward which of the saved tensors it computes with."""
    uses: dict[fx.Node, list[int]] = {}
    for item in graph.nodes:
        if item.target is operator.getitem and item.args[0].op == "placeholder" and item.args[0].name == "tensors":
            for user in item.users:
                if user.target not in (operations.accumulate_grad, operations.call_post_accumulate_hook):
                    uses.setdefault(user, []).append(item.args[1])
    return uses


def check_unwritten(tensors: Sequence[Any], versions: Sequence[int], places: Sequence[int]) -> None:
    """Raise eager's error if a saved tensor was written to since the backward began."""
    for place in places:
        if tensors[place]._version != versions[place]:
            tensor = tensors[place]
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
                f"{versions[place]} instead. A hook or function that runs in this backward wrote to it."
            )
