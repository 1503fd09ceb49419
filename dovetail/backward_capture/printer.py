"""Captured backwards as text: the graph with the forward's lines that its nodes come from, and the segments in which it runs."""

from __future__ import annotations

import contextlib
import operator
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from dovetail.backward_capture import accumulation, hooks
from dovetail.backward_capture.node_functions import OutputCheck
from dovetail.backward_capture.segment_runner import SegmentRunner
from dovetail.backward_capture.segments import Segment
from dovetail.torch_private import operators as private_operators
from dovetail.torch_private.autograd_nodes import is_leaf_node

#: The folders of torch and Dovetail, whose lines are not the program's.
_LIBRARIES = (str(pathlib.Path(torch.__file__).parent), str(pathlib.Path(__file__).parents[1]))


def lines_are_noted() -> bool:
    """Whether torch notes the forward's lines in the nodes without checking the backward."""
    return torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()


def noting_lines(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """A block in which torch notes in each autograd node where it was made, as its anomaly mode does in a forward."""
    if not wanted or torch.is_anomaly_enabled():
        return contextlib.nullcontext()
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


def forward_lines(nodes: Sequence[Any]) -> dict[int, str]:
    """The program's lines that made the nodes of a backward, by visit, where they are known.

    Leaves are left out: a leaf's node is made wherever the leaf was first used.
    """
    own = {index: node for index, node in enumerate(nodes) if node is not None and not is_leaf_node(node)}
    return {index: line for index, node in own.items() if (line := _line(node))}


def _line(node: Any) -> str:
    frames = [frame.strip() for frame in node.metadata.get("traceback_") or () if frame.strip()]
    own = [frame for frame in frames if not any(f'"{library}' in frame for library in _LIBRARIES)]
    if not frames:
        return ""
    where, *code = (own or frames)[-1].splitlines()
    place, _, line = where.removeprefix("File ").partition(", line ")
    number = line.split(",")[0]
    text = ":".join([place.strip().strip('"'), number]) if number.isdigit() else where
    return f"{text} `{code[0].strip()}`" if code else text


_WITHOUT_RESULT = frozenset({accumulation.accumulate_grad, hooks.call_post_accumulate_hook})


def render(graph_module: fx.GraphModule, names: dict[int, str], lines: dict[int, str]) -> str:
    """The graph as Python, each step under the forward node whose backward it belongs to.

    The engine's checks of shapes and types after each node are left out.
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
            is_checked = isinstance(of.target, OutputCheck)
            spelled[node] = _spell(of.args[0][index], spelled) if is_checked else f"{_spell(of, spelled)}[{index!r}]"
        elif not isinstance(node.target, OutputCheck):
            call = node.meta.get("call")
            if call is not None and call != last:
                place = f", {lines[call]}" if call in lines else ""
                name = names.get(call, "a gradient that was asked for").removeprefix("torch::autograd::")
                text.append(f"    # {call}: {name}{place}")
                last = call
            spelled[node] = node.name
            text.append(f"    {_spell_step(node, spelled)}")
    return "\n".join(text)


def _spell_step(node: fx.Node, spelled: dict[fx.Node, str]) -> str:
    arguments = [_spell(item, spelled) for item in node.args]
    arguments += [f"{key}={_spell(item, spelled)}" for key, item in node.kwargs.items()]
    where = f"  # {node.meta['user_line']}" if "user_line" in node.meta else ""
    is_operator = isinstance(node.target, private_operators.OpOverload)
    target = str(node.target) if is_operator else getattr(node.target, "__name__", str(node.target))
    result = "" if node.target in _WITHOUT_RESULT else f"{node.name} = "
    return f"{result}{target}({', '.join(arguments)}){where}"


def _spell(value: Any, spelled: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return spelled.get(value, value.name)
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_spell(item, spelled) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    return repr(value)


def explain_segments(number: int, names: dict[int, str], runners: Iterable[SegmentRunner]) -> list[str]:
    """The lines about one captured backward: its segments, which of them are compiled, and why the others are not."""
    lines = [f"captured backward {number}: {len(names)} nodes"]
    for runner in runners:
        for index, (segment, function) in enumerate(zip(runner.segments, runner.functions, strict=True)):
            lines.append(f"  segment {index}: {_kind(segment, function)}, {_contents(segment, names)}")
            lines += [f"    {event}" for event in getattr(getattr(function, "events", None), "events", ())]
    return lines


def _kind(segment: Segment, function: Any) -> str:
    if segment.reason:
        return f"in eager ({segment.reason})"
    entries = getattr(function, "entries", None)
    if entries is None:
        return "operator by operator"
    eager = dict.fromkeys(entry.reason for entry in entries if entry.run is None)
    return f"in eager ({'; '.join(eager)})" if eager else f"compiled, {len(entries)} entries"


def _contents(segment: Segment, names: dict[int, str]) -> str:
    visits = dict.fromkeys(
        names[node.meta["call"]]
        for node in segment.graph.graph.nodes
        if node.op == "call_function" and node.meta.get("call") and not isinstance(node.target, OutputCheck)
    )
    leaves = sum(write.gradient is not None for write in segment.writes)
    return ", ".join([*visits, *([f"then {leaves} leaves' gradients"] if leaves else [])]) or "nothing to compute"
