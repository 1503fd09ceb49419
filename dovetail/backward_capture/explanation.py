"""Says of captured backwards which segments are compiled, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dovetail.backward_capture.graph import CapturedBackward
from dovetail.backward_capture.node_functions import OutputCheck
from dovetail.backward_capture.segment_runner import SegmentRunner
from dovetail.backward_capture.segments import Segment


def explain_segments(number: int, captured: CapturedBackward, runners: Iterable[SegmentRunner]) -> list[str]:
    """The lines about one captured backward."""
    names = captured.names
    lines = [f"captured backward {number}: {len(names)} nodes"]
    for runner in runners:
        for index, (segment, function) in enumerate(zip(runner.segments.segments, runner.functions, strict=True)):
            lines.append(f"  segment {index}: {_kind(segment, function)}, {_steps(segment, names)}")
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


def _steps(segment: Segment, names: dict[int, str]) -> str:
    visits = dict.fromkeys(
        names[node.meta["call"]]
        for node in segment.graph.graph.nodes
        if node.op == "call_function" and node.meta.get("call") and not isinstance(node.target, OutputCheck)
    )
    leaves = sum(not write.tells_reducer for write in segment.writes)
    return ", ".join([*visits, *([f"then {leaves} leaves' gradients"] if leaves else [])]) or "nothing to compute"
