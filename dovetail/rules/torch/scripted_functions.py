"""Functions and methods that ``torch.jit.script`` or ``torch.jit.trace`` has made: their operators are captured, and they are one
call of the program, which a derivative of the backward runs again.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, callable_rule, rule
from dovetail.guards import ComputedSource, Identity
from dovetail.rules.torch import script_graphs
from dovetail.torch_private import state as private_state
from dovetail.trace.trace import open_trace

_EFFECTS = ("prim::Print", "aten::warn", "prim::SetAttr")
#: Parts of the texts of errors that come from asking for the data of traced tensors; TorchScript hides their classes.
_OF_DATA = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "not allocated yet",
)


class _Traced:
    """A scripted function while it is traced: without torch's own formulas for its gradients, which have no second derivative."""

    __module__ = "torch.jit"

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = function.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trace = open_trace()
        with torch.jit.optimized_execution(False):
            if trace is None:
                return self.function(*args, **kwargs)
            with trace.recorder.paused():
                found = self._run(args, kwargs)
        trace.recorder.record(self, args, kwargs, found)
        return found

    def _run(self, args: Arguments, kwargs: Keywords) -> Any:
        return self.function(*args, **kwargs)


class _Read(_Traced):
    """A scripted function or method whose graph is read; the last arguments are the attributes that it reads of its module."""

    def __init__(self, function: Any, graph: Any, attributes: Sequence[script_graphs.Path]) -> None:
        super().__init__(function)
        self.graph, self.attributes = graph, tuple(attributes)
        self.is_method = type(function) is torch.ScriptMethod

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs) if open_trace() is None else super().__call__(*args, **kwargs)

    def _run(self, args: Arguments, kwargs: Keywords) -> Any:
        count = len(args) - len(self.attributes)
        inputs = script_graphs.bind(self.function.schema, args[:count], kwargs, skipped=int(self.is_method))
        attributes = dict(zip(self.attributes, args[count:], strict=True))
        (found,) = script_graphs.Reader(attributes).run(self.graph, [(), *inputs] if self.is_method else inputs)
        return found


def _attribute(method: Any, path: script_graphs.Path) -> Any:
    """An attribute of the module of a scripted method, read without Python code."""
    found = method.owner
    for name in path:
        found = found.getattr(name)
    return found


@rule(torch.jit.script)
def _script(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """A function that the compiled function has made itself has what it closes over in a form that TorchScript does not know."""
    made = args[0] if args else kwargs.get("obj")
    if isinstance(made, types.FunctionType) and made.__closure__ and interpreter.values.source_of(made) is None:
        raise Break(
            "torch.jit.script is given a function that was made here", "make it outside of the compiled function"
        )
    return interpreter.native(torch.jit.script, args, kwargs)


@callable_rule(torch.jit.ScriptFunction)
def _scripted(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    graph = _graph_of(interpreter, function)
    recorded = len(interpreter.trace.graph.nodes)
    if script_graphs.is_readable(graph) and _is_plain(function):
        try:
            return _native(interpreter, _Read(function, graph, ()), args, kwargs)
        except script_graphs.UnreadableError as error:
            added = list(interpreter.trace.graph.nodes)[recorded:]
            if any(isinstance(node.meta.get("val"), torch.Tensor) for node in added):
                raise _needs_torchscript(function) from error
    return _native(interpreter, _Traced(function), args, kwargs)


@callable_rule(torch.ScriptMethod)
def _method(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    graph = _graph_of(interpreter, function)
    source = interpreter.values.source_of(function)
    if source is None or not (script_graphs.is_readable(graph) and _is_plain(function)):
        raise _needs_torchscript(function)
    paths = script_graphs.attributes_of(graph)
    places = [ComputedSource(_attribute, (source, path), ".".join((source.name, "owner", *path))) for path in paths]
    found = zip(paths, places, strict=True)
    attributes = [interpreter.values.read(_attribute(function, path), place) for path, place in found]
    try:
        return _native(interpreter, _Read(function, graph, paths), (*args, *attributes), kwargs)
    except script_graphs.UnreadableError as error:
        raise _needs_torchscript(function) from error


def _graph_of(interpreter: TracingInterpreter, function: Any) -> Any:
    """The graph of a scripted function, which is guarded."""
    source = interpreter.values.source_of(function)
    if source is not None:
        interpreter.values.guard(source, Identity(function), f"{source.name} was called")
    graph = function.inlined_graph
    if any(graph.findAllNodes(kind) for kind in _EFFECTS):
        raise Break(
            f"the scripted function {function.name} prints, warns or sets an attribute",
            "call it outside of the compiled function",
        )
    return graph


def _is_plain(function: Any) -> bool:
    """Whether a call of a function means its operators and nothing else: TorchScript casts by itself under autocast."""
    return script_graphs.has_plain_results(function.schema) and not private_state.is_any_autocast_on()


def _needs_torchscript(function: Any) -> Break:
    return Break(f"the scripted function {function.name} needs TorchScript itself", "call it outside of the function")


def _native(interpreter: TracingInterpreter, traced: _Traced, args: Arguments, kwargs: Keywords) -> Any:
    try:
        return interpreter.native(traced, args, kwargs)
    except (RuntimeError, script_graphs.DataNeededError) as error:
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in _OF_DATA):
            raise
        reason = f"the scripted function {traced.function.name} needs the values of a tensor"
        raise Break(reason, "keep the values in tensors, or call it outside of the compiled function") from error
