"""Run the frontend on one call: bytecode in; traced outputs, guards, effects and the recipe for the result out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.aot.capture_result import CaptureResult
from dovetail.aot.descriptors import BufferInput, Descriptor, ParamInput, UserInput
from dovetail.frontend.callee import argument_names, definition_of, read_when_used
from dovetail.frontend.code.frame import Break, Stop, Unread, is_marked_native
from dovetail.frontend.code.points import ResumePoint, flatten
from dovetail.frontend.code.resumption import Resumption
from dovetail.frontend.interpreter.interpreter import Interpreter
from dovetail.frontend.outputs import Outputs
from dovetail.frontend.rules import end_rule
from dovetail.frontend.values.aliases import guard_distinct
from dovetail.frontend.values.class_guards import guard_classes
from dovetail.frontend.values.leaves import IDENTITY_TYPES, is_bound_builtin, is_leaf_value
from dovetail.frontend.values.module_paths import walk_tables
from dovetail.guards import (
    AmbientChange,
    AmbientState,
    ArgumentSource,
    AttributeSource,
    CalleeSource,
    GuardSet,
    Identity,
    KeywordSource,
    Source,
    TypeIs,
    autocast_nesting,
)
from dovetail.runtime.effects import EffectRecipe
from dovetail.runtime.recipe import Recipe
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import calls as private_calls
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Trace


def capture(
    trace: Trace, guards: GuardSet, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> CaptureResult:
    """Interpret one call of ``function`` under an open trace; whatever happens, the user's objects are left as they were.

    With ``settings.stop_before`` the capture ends before the instruction of that number, and its result is the state of the frames.
    Raises :class:`Break` for what cannot be captured, and whatever the user's code raises.
    """
    if trace.ambient.refuses_capture:
        raise Break(trace.ambient.refuses_capture, "call the function outside of that mode")
    return _Capture(trace, guards, function).run(args, kwargs)


class _Capture:
    """One call that is interpreted. What it does to the user's objects and to torch's state is taken back at its end.

    ::

        run
          _guard_callee
          _interpret            the result of the call, or the live values at a graph break
          _collect              recipes of what leaves: effects and result; what the graph must return for them
          _check_state          changes of torch's state that no entry could make again
          _check_inputs         changes of inputs that no entry could make again
          _undo                 always, also where one of these raises
          _result
    """

    def __init__(self, trace: Trace, guards: GuardSet, function: Any) -> None:
        self._trace = trace
        self._guards = guards
        self._function = function
        self._before, self._nesting = AmbientState.snapshot(), autocast_nesting()
        self._interpreter = Interpreter(trace, guards, definition_of(function))
        self._outputs: Outputs | None = None
        self._change: AmbientChange | None = None
        self._effects: tuple[EffectRecipe, ...] = ()
        self._resume_point: ResumePoint | None = None

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CaptureResult:
        """Interpret the call and undo it."""
        callee = self._guard_callee(len(args), kwargs)
        try:
            leaving = self._interpret(callee, args, kwargs)
            outputs = self._outputs = Outputs(self._interpreter)
            self._trace.at_close.append(lambda: vars(outputs).clear())  # A circle; kept until empty (Python 3.13.0).
            recipe = self._collect(outputs, leaving)
            change = self._change = self._check_state()
            self._check_inputs()
        finally:
            self._undo()
        return self._result(outputs, recipe, change)

    # --- the call -----------------------------------------------------------------------------------------------------

    def _guard_callee(self, count: int, kwargs: Mapping[str, Any]) -> Source:
        callee, function = CalleeSource(), self._function
        self._interpreter.values.note(function, callee)
        predicate = Identity(function) if isinstance(function, IDENTITY_TYPES) else TypeIs(type(function))
        self._guards.add(callee, predicate, None, "callee")
        self._guards.set_call_shape(count, kwargs)
        return callee

    def _interpret(self, callee: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result, or the live values at the instruction before which the graph ends."""
        try:
            result = self._call(callee, args, kwargs)
        except Stop as stop:
            self._check_break(stop)
            self._resume_point, result = flatten(stop.frames)
        if self._interpreter.break_in_del is not None:
            raise self._interpreter.break_in_del
        return result

    def _call(self, callee: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        interpreter, values, function = self._interpreter, self._interpreter.values, self._function
        if isinstance(function, Resumption):
            return interpreter.resume(function.traced_frames(interpreter, args))
        names, later = argument_names(function, len(args)), read_when_used(function)

        def read(value: Any, source: Source) -> Any:
            put_off = source.name in later and is_leaf_value(value)
            return Unread(value, source) if put_off else values.read(value, source)

        arguments = tuple(read(item, ArgumentSource(i, names[i])) for i, item in enumerate(args))
        keywords = {key: read(item, KeywordSource(key, f"L[{key!r}]")) for key, item in kwargs.items()}
        if is_bound_builtin(function):
            # The owner of a method of a tensor or of a container is an input like any other.
            owner = values.read(function.__self__, AttributeSource(callee, "__self__"))
            function = getattr(owner, function.__name__)
        return interpreter.call(function, arguments, keywords, direct=True)

    def _check_break(self, stop: Stop) -> None:
        """Refuse a graph break in a state that cannot be built again outside of the graph."""
        for frame in stop.frames:
            for value in (*frame.current_exceptions, *frame.stack):
                if isinstance(value, BaseException) and is_marked_native(value):
                    # The trace's own text of the error is not the real one.
                    raise Break("a graph break while an error of a tensor operation is handled")

    # --- what leaves --------------------------------------------------------------------------------------------------

    def _collect(self, outputs: Outputs, leaving: Any) -> Recipe:
        """The recipe of what leaves; ``outputs`` and the effects are filled."""
        interpreter = self._interpreter
        guard_distinct(interpreter.values, interpreter.effects)
        for finish in end_rule:
            finish(interpreter)
        self._effects = tuple(
            EffectRecipe(effect.source, effect.kind, outputs.build(effect.values), effect.deleted)
            for effect in (*interpreter.effects.collect(), *interpreter.effects.late())
        )
        recipe = outputs.build(leaving)
        if any(item.has_cleaning_up() and not outputs.holds(item) for item in interpreter.generators):
            raise Break("a generator is left unfinished in a cycle of references", "call its close()")
        return recipe

    def _check_state(self) -> AmbientChange:
        change = AmbientChange.between(self._before, self._nesting)
        if change.unsettable:
            raise Break(
                f"the function changes the state of torch: {change.differences[0]}", "change it outside of the function"
            )
        return change

    def _check_inputs(self) -> None:
        with private_calls.no_torch_function():
            hooked = [item.name for item in self._trace.inputs if private_autograd.has_hooks(item.value)]
            if any(item.changes_requires_grad() for item in self._trace.inputs):
                raise Break("requires_grad of an input is changed", "set it outside of the function")
        if hooked:
            raise Break(
                f"a hook is registered on {hooked[0]}, which existed before the call",
                "register it outside of the function, or on a result computed from it",
            )

    # --- the end ------------------------------------------------------------------------------------------------------

    def _undo(self) -> None:
        """Bring the user's objects and torch's state back to where they were when the call began."""
        interpreter = self._interpreter
        interpreter.end()
        with private_tracing.disable_current_modes():
            interpreter.effects.undo()
            if self._outputs is not None:
                interpreter.effects.close(self._outputs.holds)
                interpreter.begin_backward()
        change = self._change or AmbientChange.between(self._before, self._nesting)
        interpreter.left_open.end()
        change.take_back()

    def _result(self, outputs: Outputs, recipe: Recipe, change: AmbientChange) -> CaptureResult:
        trace, guards, interpreter = self._trace, self._guards, self._interpreter
        guard_classes(interpreter.values, guards)
        for item in trace.inputs:
            line = next((node.meta["user_line"] for node in item.node.users if "user_line" in node.meta), None)
            if line is not None:
                guards.note_use(item.index, line)
        program = trace.program(tuple(outputs.tensors))
        return CaptureResult(
            self._function,
            tuple(outputs.tensors),
            tuple(describe(guards.tensor_source(item.index), item.real) for item in trace.inputs),
            guards,
            program,
            trace.bindings(),
            recipe=recipe,
            numbers=tuple(private_sizes.expression_of(number) for number in outputs.numbers),
            effects=self._effects,
            ambient=trace.ambient,
            ambient_change=None if change.is_empty else change,
            gradients_dropped_first=tuple(interpreter.effects.gradients_dropped_first),
            inputs_made_differentiable=tuple(interpreter.effects.inputs_made_differentiable),
            resume_point=self._resume_point,
        )


def describe(source: Source, real: torch.Tensor) -> Descriptor:
    """The descriptor of an input, by where it was read: a parameter or buffer by its path from the module that is called."""
    start, names, kind = walk_tables(source)
    name = ".".join(names) if names and isinstance(start, CalleeSource) else source.name
    if isinstance(real, torch.nn.Parameter):
        return ParamInput(name)
    return BufferInput(name) if kind == "_buffers" else UserInput(name)
