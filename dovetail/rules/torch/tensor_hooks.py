"""Hooks on the gradients of tensors: what one computes is recorded when it first runs, so that a replay of the program has it.

A replay registers a hook that runs these calls again, on the gradient and on the values that the replay has computed. The mode
in which a backward runs, with gradients or without, belongs to the backward and not to the hook, unless the hook switches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dovetail.frontend.code.frame import Break
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, method_rule
from dovetail.rules.gradients.kept_state import keeping_nothing
from dovetail.rules.gradients.nonlinear_backwards import refusing_summands
from dovetail.rules.torch.control_flow import slots_of
from dovetail.rules.torch.hooks_outside import HooksOutside
from dovetail.rules.torch.patched_tensors import note_for_backward
from dovetail.torch_private import autograd_nodes as private_autograd_nodes
from dovetail.trace.program import NumberSlot, Program, ProgramCall, RecordingMode
from dovetail.trace.repeats import draws_random_numbers
from dovetail.trace.trace import Trace, open_trace


class Tape:
    """The computation of a hook on its gradient: a program each for a backward with gradients and without; none before it has run.

    The first input of the programs is the gradient. ``read`` are the numbers of the other ones in the program around.
    """

    def __init__(self) -> None:
        self.programs: dict[bool, Program] = {}
        self.read: tuple[int, ...] = ()

    def record(self, trace: Trace, hook: Callable[..., Any], gradient: torch.Tensor) -> Any:
        """Run the hook, and keep what torch calls it has made."""
        if self.programs:
            return hook(gradient)
        if trace.phase != "backward":
            trace.recorder.refuse_replay("a hook in it runs in a gradient that is taken inside")
        recorder, graph, inputs = trace.recorder, trace.graph, [item.value for item in trace.inputs]
        own, nodes, mode = replace(recorder, calls=[], _paused=0), len(graph.nodes), torch.is_grad_enabled()
        number = recorder.number(gradient)
        with private_autograd_nodes.torch_functions_enabled(), RecordingMode(own):
            result = hook(gradient)
        made = {number for call in own.calls for number in call.results}
        read = {getattr(slot, "number", number) for slot in slots_of([(call.args, call.kwargs) for call in own.calls])}
        self.read = (*map(recorder.number, inputs), *sorted(read - made - {number, *map(recorder.number, inputs)}))
        switches = [at for at, call in enumerate(own.calls) if call.function is private_autograd_nodes.SET_GRAD_ENABLED]
        if len(switches) > 2:
            recorder.refuse_replay("a hook in it switches gradients off or on several times")
        if any(draws_random_numbers(node.target) for node in list(graph.nodes)[nodes:]):
            recorder.refuse_replay("a hook in it draws random numbers")
        results = (result,) if isinstance(result, torch.Tensor) else ()
        program = own.finish(inputs, results, lambda items: trace.bindings().function(items))
        for own_mode in (False, True):
            calls = _in_mode(own.calls, {mode: own_mode}, switches)
            self.programs[own_mode] = replace(program, inputs=(number, *self.read), calls=calls)
        return result

    def register(self, names: Mapping[int, int], tensor: torch.Tensor, values: Mapping[Any, Any]) -> None:
        """Register the hook of a replay, which has ``values``, where the numbers of some have other ``names``. Under a trace the
        replay is a program in turn, with numbers of its own.
        """

        def run(gradient: torch.Tensor) -> torch.Tensor | None:
            if not self.programs:
                # It was removed before a gradient came.
                return None
            given = read()
            found = self.programs[torch.is_grad_enabled()].run([gradient, *given], given)
            return found[0] if found else None

        def read() -> list[torch.Tensor]:
            return [values[names.get(number, number)] for number in self.read]

        trace = open_trace()
        if trace is None:
            tensor.register_hook(run)
            return
        numbers: dict[int, int] = {}
        trace.at_close.append(lambda: numbers.update(zip(self.read, map(trace.recorder.number, read()), strict=True)))
        self.note(trace, tensor, run, numbers)

    def note(self, trace: Trace, tensor: torch.Tensor, hook: Callable[..., Any], names: Mapping[int, int]) -> Any:
        """Register a hook on a traced tensor; a replay of the trace's program registers one of its own."""
        with trace.recorder.paused():
            handle = tensor.register_hook(hook)
            private_autograd_nodes.note_hook(tensor)
        trace.recorder.record(partial(self.register, names), (tensor, _VALUES), {}, None)
        return handle


#: An argument in whose place a replay hands over all values that it has.
_VALUES = NumberSlot(-1, lambda values: values)


def _in_mode(calls: list[ProgramCall], modes: dict[bool, bool], switches: list[int]) -> tuple[ProgramCall, ...]:
    """The calls as they run in a backward of another mode; between two switches the mode is the hook's own."""
    start, end = (*switches, len(calls), len(calls))[:2]
    return tuple(
        call if start < at < end else replace(call, grad_enabled=modes.get(call.grad_enabled, call.grad_enabled))
        for at, call in enumerate(calls)
        if at not in switches
    )


@method_rule("register_hook", "register_post_accumulate_grad_hook")
def _register_hook(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    note_for_backward(interpreter.values)
    given = _given(function, args, kwargs)
    if len(given) != 2 or not callable(given[1]) or not isinstance(given[0], torch.Tensor):
        return NotImplemented
    trace, tape, (tensor, called) = interpreter.trace, Tape(), given
    if not interpreter.load_attribute(tensor, "requires_grad"):
        # Eager's error, where the program calls it: an effect would raise it behind the call.
        return interpreter.native(function, args, kwargs)
    outside = interpreter.state(HooksOutside)
    if not interpreter.values.in_backward:
        key = outside.place()
        if outside.is_outside(key):
            return outside.wait(function.__name__, tensor, called)
        outside.note(key, tensor)
    if function.__name__ != "register_hook":
        return NotImplemented
    entered = keeping_nothing(interpreter, interpreter.trampoline(called), called)

    def hook(gradient: torch.Tensor) -> Any:
        try:
            return tape.record(trace, entered, gradient)
        except Break as stop:
            if trace.phase == "backward" and not is_inner:
                outside.keep_outside(key, stop.reason)
            raise

    is_inner = interpreter.values.in_backward
    whole = refusing_summands(interpreter, hook)
    return interpreter.native(partial(tape.note, trace), (tensor, whole, {}), {}, hands_on=True)


@method_rule("retain_grad")
def _retain_grad(interpreter: TracingInterpreter, function: Any, args: Arguments, kwargs: Keywords) -> Any:
    given = _given(function, args, kwargs)
    if interpreter.values.in_backward or len(given) != 1 or not isinstance(given[0], torch.Tensor):
        return NotImplemented
    tensor, outside = given[0], interpreter.state(HooksOutside)
    if not tensor.requires_grad or interpreter.load_attribute(tensor, "is_leaf"):
        return interpreter.native(function, args, kwargs)
    if interpreter.trace.input_of(tensor) is None and not interpreter.trace.settings.one_graph:
        return NotImplemented
    key = outside.place()
    if interpreter.trace.input_of(tensor) is not None or outside.is_outside(key):
        outside.wait("retain_grad", tensor)
    else:
        outside.note_retained(key, tensor)
    return None


def _given(function: Any, args: Arguments, kwargs: Keywords) -> list[Any]:
    bound = getattr(function, "__self__", None)
    return [*([] if bound is None else [bound]), *args, *kwargs.values()]
