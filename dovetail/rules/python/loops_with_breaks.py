"""Functions whose loops break the graph over and over: they run as they are, and the graph breaks where they are called.

An optimizer that asks for a number of every parameter is one. Each part between two breaks costs its guards and a call, more than
its few operators take eagerly.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from dovetail.face.continuation import LONG_CALLS, Continuations
from dovetail.face.dispatcher import compile_lock
from dovetail.frontend.code.frame import Break, decode
from dovetail.frontend.code.points import ResumePoint
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Instead, Keywords, wrapper_rule
from dovetail.runtime.entry import Entry

#: Parts with fewer operators, those of their backward included, take less time eagerly than their guards and calls do.
_FEWEST_OPERATORS = 64
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_in_loop(code: types.CodeType, position: int) -> bool:
    """Whether an instruction may run again in the same frame."""
    decoded = decode(code)
    jumps = (item for item in decoded.instructions[position:] if item.opname.startswith("JUMP_BACKWARD"))
    return any(decoded.index_of[item.argval] <= position for item in jumps)


def _strategy(code: types.CodeType) -> str:
    return f"graphs in {code.co_qualname}, {code.co_filename}:{code.co_firstlineno}"


@LONG_CALLS.append
def _leave_loop(continuations: Continuations, point: ResumePoint) -> bool:
    """Give up the function with the innermost loop around a break; the compiled function itself is never given up."""
    loops = (
        at
        for at, frame in reversed(list(enumerate(point)))
        if at and not frame.code.co_flags & _SUSPENDS and is_in_loop(frame.code, frame.position)
    )
    if (at := next(loops, None)) is None:
        return False
    code = point[at].code
    parts = [part for part in continuations if any(frame.code is code for frame in part.original.point[1:])]
    sizes = [_operators(entry) for part in parts for entry in part.entries]
    if max(sizes, default=0) >= _FEWEST_OPERATORS:
        return False
    shared = continuations.shared
    shared.events.note("loop left to eager", function=code.co_qualname, parts=len(parts), operators=sum(sizes))
    with compile_lock:
        shared.learn(without=shared.learned.without | {_strategy(code)})
    return True


def _operators(entry: Entry) -> int:
    if entry.compiled is None:
        return 0
    nodes = entry.compiled.lowering.joint.graph_module.graph.nodes
    return sum(node.op == "call_function" for node in nodes)


@wrapper_rule
def _runs_as_it_is(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Instead | None:
    given_up = interpreter.trace.settings.without
    if given_up and type(function) is types.FunctionType and _strategy(function.__code__) in given_up:
        raise Break(
            f"{function.__qualname__} breaks the graph again and again in a loop, and runs eagerly",
            "keep the values that it asks for in tensors, or compile what it calls",
        )
    return None
