"""What became of captured backwards: which parts are compiled, which are not and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dovetail.backward_capture import operations
from dovetail.backward_capture.graph import CapturedBackward
from dovetail.backward_capture.parts import Part, PartsRunner


def explain_parts(number: int, captured: CapturedBackward, runners: Iterable[PartsRunner]) -> list[str]:
    """The lines about one captured backward."""
    names = captured.names
    lines = [f"captured backward {number}: {len(names)} nodes"]
    for runner in runners:
        for index, (part, function) in enumerate(zip(runner.parts.parts, runner.functions, strict=True)):
            lines.append(f"  part {index}: {_kind(part, function)}, {_steps(part, names)}")
            lines += [f"    {event}" for event in getattr(getattr(function, "events", None), "events", ())]
    return lines


def _kind(part: Part, function: Any) -> str:
    if part.reason:
        return f"in eager ({part.reason})"
    entries = getattr(function, "entries", None)
    if entries is None:
        return "operator by operator"
    eager = dict.fromkeys(entry.reason for entry in entries if entry.run is None)
    return f"in eager ({'; '.join(eager)})" if eager else f"compiled, {len(entries)} entries"


def _steps(part: Part, names: dict[int, str]) -> str:
    visits = dict.fromkeys(
        names[node.meta["call"]]
        for node in part.graph.graph.nodes
        if node.op == "call_function" and node.meta.get("call") and not isinstance(node.target, operations.OutputCheck)
    )
    leaves = sum(not write.tells_reducer for write in part.accumulate)
    return ", ".join([*visits, *([f"then {leaves} leaves' gradients"] if leaves else [])]) or "nothing to compute"
