"""Custom ``autograd.Function``: its forward and backward are interpreted, and the call is one call of the program.

A backward may write to a tensor that the forward has computed, and the next backward of the same call (``retain_graph=True``)
reads that. A graph starts anew each time, so eager runs such functions.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.aot.steps import Lowering, instead_of_steps
from dovetail.errors import CaptureError
from dovetail.frontend.interpreter.lookup import class_attribute
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.guards import AttributeSource, Identity
from dovetail.rules.gradients.flags import guard_no_view
from dovetail.rules.gradients.kept_state import keeping_nothing
from dovetail.rules.gradients.nonlinear_backwards import refusing_summands
from dovetail.rules.torch.patched_tensors import note_for_backward
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.torch_private import operators as private_operators
from dovetail.trace.overrides import WRITE_CHECKS, RefusedOperatorError
from dovetail.trace.repeats import draws_random_numbers
from dovetail.trace.trace import open_trace

_METHODS = ("forward", "backward", "setup_context", "vjp", "jvp", "vmap")


class Interpreted:
    """The classes with interpreted methods that stand for the user's in one capture."""

    def __init__(self, interpreter: TracingInterpreter) -> None:
        self._interpreter = interpreter
        self._classes: dict[type, type] = {}

    def of(self, owner: type) -> Any:
        """The class that stands for one of the user's; its methods are guarded."""
        found = self._classes.get(owner)
        if found is None:
            body = {name: method for name in _METHODS if (method := self._method(owner, name)) is not None}
            found = self._classes[owner] = types.new_class(
                owner.__name__, (owner,), {}, lambda names: names.update(body)
            )
        return found

    def _method(self, owner: type, name: str) -> Any:
        method, holder = class_attribute(owner, name)
        inner = method.__func__ if isinstance(method, staticmethod) else method
        is_torchs = holder is None or (holder.__module__ or "").startswith("torch.autograd")
        if holder is None or is_torchs or not isinstance(inner, types.FunctionType):
            return None
        values = self._interpreter.values
        source = AttributeSource(values.pin(holder, holder.__qualname__), name)
        values.read(inner, source)
        called = self._interpreter.trampoline(inner)
        if name in ("backward", "vjp"):
            values.note_backward_read(source, Identity(inner), f"{name} was called", always=True)
            note_for_backward(values)
            called = keeping_nothing(self._interpreter, refusing_summands(self._interpreter, called), inner)
        elif name in ("forward", "setup_context"):
            called = functools.partial(self._checked, called, name == "setup_context")
        return staticmethod(called)

    def _checked(self, called: Any, sets_up: bool, *args: Any) -> Any:
        """Call ``forward`` or ``setup_context``. Eager refuses a write to a view where there are several results."""
        result = called(*args)
        results = args[2] if sets_up else result
        if isinstance(results, tuple) and len(results) > 1:
            for value in getattr(args[0], "dirty_tensors", None) or ():
                traced = self._interpreter.trace.input_of(value)
                if traced is not None:
                    guard_no_view(self._interpreter, traced, "is written to by a custom function with several results")
        return result


@rule(private_autograd_nodes.FUNCTION_APPLY)
def _apply(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    owner, *given = args
    recorder = interpreter.trace.recorder
    writes = interpreter.effects.writes
    with recorder.paused():
        # Only its own methods see functions among the arguments. A class may have an ``apply`` of its own, which called this one.
        apply = types.MethodType(private_autograd_nodes.FUNCTION_APPLY, interpreter.state(Interpreted).of(owner))
        result = interpreter.native(apply, tuple(given), kwargs, hands_on=True)
    if not interpreter.values.in_backward:
        # Calls of a backward are no part of the forward's tape: a replay makes them anew.
        recorder.record(types.MethodType(private_autograd_nodes.FUNCTION_APPLY, owner), tuple(given), kwargs, result)
    if interpreter.effects.writes != writes:
        recorder.refuse_replay("a custom autograd.Function in it writes to Python objects")
    return result


@instead_of_steps
def _refuse_copies_in_a_program(lowering: Lowering) -> None:
    """Refuse to run the program itself where a custom function is handed a list or dictionary: its backward reads what they hold
    by then, and the program has them as they were at the capture.
    """
    if not lowering.backend.takes_program or not lowering.is_training:
        return
    for call in lowering.joint.capture.program.calls:
        owner: Any = getattr(call.function, "__self__", None)
        is_custom = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
        if is_custom and any(isinstance(item, (list, dict)) for item in (*call.args, *call.kwargs.values())):
            raise CaptureError(
                f"{owner.__qualname__}.apply is handed a list or dictionary, which may change before its backward",
                advice='use backend="aten" instead',
            )


def refuse_writes_to_the_forward(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a write of a hook or a custom backward to what the forward has computed. Inputs and results are told by name when
    the backward has been captured.
    """
    trace = open_trace()
    if trace is None or trace.phase != "backward" or not trace.user_backward:
        return
    for position, argument in enumerate(operator._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(value, torch.Tensor):
            continue
        node = trace.node_of(value)
        while private_operators.is_view(node.target):
            node = node.all_input_nodes[0]
        # A checkpointed region, called again with recording on, is given the forward's own random numbers as a tensor of its own.
        drawn_again = torch.is_grad_enabled() and draws_random_numbers(node.target)
        if node.op != "placeholder" and node.meta.get("phase") == "forward" and not drawn_again:
            raise RefusedOperatorError(
                "a hook or a custom backward writes to a tensor that the forward has computed",
                advice="write to a clone of it",
            )


WRITE_CHECKS.append(refuse_writes_to_the_forward)
