"""Names for torch's tools: labels in its profiler, and what ``TORCH_TRACE=folder`` writes for tlparse.

The profiler shows "step [0] forward" around each compiled graph. In tlparse each function is a frame, from number 10,000 on, and
each compilation of it has its graphs and what Inductor writes. Compilations count as in the function's event log.
"""

from __future__ import annotations

import functools
import itertools
import os
import traceback
import weakref
from pathlib import Path

from dovetail.aot.compile_joint import run_steps
from dovetail.aot.compiled_graph import CompiledGraph
from dovetail.aot.steps import BackendGraph, Lowering, before_backend, instead_of_steps
from dovetail.events import Event, EventLog
from dovetail.torch_private import dynamo as private_dynamo

_numbers = itertools.count(10_000)
_frames: weakref.WeakKeyDictionary[EventLog, int] = weakref.WeakKeyDictionary()
_HERE = str(Path(__file__).parent.parent) + os.sep


@before_backend
def _label(lowering: Lowering, unit: BackendGraph) -> BackendGraph:
    log = lowering.settings.events
    label = f"{log.owner or 'a graph'} [{log.count('compile')}] {unit.kind}"
    return unit.wrapped(functools.partial(private_dynamo.labelled, label))


def _number(log: EventLog) -> tuple[int, int]:
    if log not in _frames:
        _frames[log] = next(_numbers)
    return _frames[log], log.count("compile")


def _traced(lowering: Lowering) -> CompiledGraph | None:
    if private_dynamo.is_compilation():
        return None
    function = lowering.joint.capture.function
    code = getattr(getattr(function, "forward", function), "__code__", None)
    stack = list(itertools.takewhile(lambda frame: not frame.filename.startswith(_HERE), traceback.extract_stack()))
    if code is not None:
        stack.append(traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_qualname))
    with private_dynamo.as_compilation(*_number(lowering.settings.events)) as write:
        write("dynamo_start", stack)
        compiled = run_steps(lowering)
        write("aot_joint_graph", str(compiled.joint))
        if compiled.partitioned is not None:
            for name in ("forward", "backward"):
                graph = getattr(compiled.partitioned, name)
                if graph is not None:
                    write(f"aot_{name}_graph", graph.print_readable(print_output=False))
    return compiled


def _on_event(log: EventLog, event: Event) -> None:
    if event.name in ("graph break", "recompile"):
        with private_dynamo.as_compilation(*_number(log)) as write:
            write("artifact", str(event), name=event.name.replace(" ", "_"), encoding="string")


if os.environ.get("TORCH_TRACE"):
    instead_of_steps(_traced)
    EventLog.listeners.append(_on_event)
