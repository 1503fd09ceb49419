"""Run the frontend on one call: bytecode in; traced outputs, guards, effects and the recipe for the result out."""

from __future__ import annotations

import functools
import inspect
import linecache
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.aot.descriptors import BufferInput, Descriptor, ParamInput, UserInput
from dovetail.errors import CaptureError, UserLocation
from dovetail.frontend import native_errors
from dovetail.frontend.breaks.symbols import BreakSymbols, find_symbols
from dovetail.frontend.code.frame import Break, Null, Stop, Unread
from dovetail.frontend.code.points import FramePoint, ResumePoint, flatten
from dovetail.frontend.code.resumption import Resumption
from dovetail.frontend.effects.finalizers import check_let_go
from dovetail.frontend.interpreter.attributes import class_attribute
from dovetail.frontend.interpreter.interpreter import Interpreter
from dovetail.frontend.rules import KINDS, kind_of
from dovetail.frontend.values.aliases import guard_distinct
from dovetail.frontend.values.class_guards import guard_classes
from dovetail.frontend.values.leaves import IDENTITY_TYPES, is_bound_builtin, is_leaf_value
from dovetail.guards import (
    AmbientChange,
    AmbientState,
    ArgumentSource,
    AttributeSource,
    CalleeSource,
    GuardSet,
    Identity,
    InstanceDictSource,
    ItemSource,
    KeywordSource,
    Source,
    TypeIs,
    autocast_nesting,
)
from dovetail.runtime.effects import EffectRecipe
from dovetail.runtime.recipe import (
    ConstantItem,
    DataNumberItem,
    NumberItem,
    Recipe,
    RecipeBuilder,
    SourceItem,
    TensorItem,
    holds_interpreted,
)
from dovetail.torch_private import autograd as private_autograd
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import Bindings, Program, Trace
from dovetail.trace.python_numbers import number_as_tensor


@dataclass(frozen=True)
class Capture:
    """What the frontend hands on. ``outputs`` are the traced tensors that leave the function, ``recipe`` builds the result.

    At a graph break ``resume_point`` says where the function goes on, and ``recipe`` builds the live values there.
    ``numbers`` are the symbolic numbers in it, over the symbols of ``bindings``.
    ``ambient_change`` is what the program changes in torch's own state. ``dropped``: see
    :meth:`dovetail.frontend.effects.gradients.Gradients.dropped`. ``turned_on`` are inputs that require a gradient from here on.
    ``symbols`` says which of the live values at a break are symbolic.
    """

    function: Any
    outputs: tuple[torch.Tensor, ...]
    input_descriptors: tuple[Descriptor, ...]
    recipe: Recipe
    effects: tuple[EffectRecipe, ...]
    guards: GuardSet
    ambient: AmbientState
    program: Program
    ambient_change: AmbientChange | None = None
    resume_point: ResumePoint | None = None
    bindings: Bindings | None = None
    numbers: tuple[Any, ...] = ()
    dropped: tuple[tuple[int, int], ...] = ()
    turned_on: tuple[int, ...] = ()
    symbols: BreakSymbols | None = None


def _unchanged(live: Sequence[Any], values: Any) -> dict[int, str]:
    """The names of live values that the capture was given and only passes on, by position."""
    sources = {
        at: value.source if isinstance(value, Unread) else values.source_of(value) for at, value in enumerate(live)
    }
    return {at: source.name for at, source in sources.items() if source is not None}


def argument_names(function: Any, count: int) -> list[str]:
    """What the user calls the positional arguments of a function or module."""
    code = code_of(function)
    skip = 0 if type(function) is types.FunctionType else 1
    if isinstance(function, functools.partial):
        # What was bound before comes first; the names of the rest are not worth the search.
        return [f"args[{i}]" for i in range(count)]
    names = list(code.co_varnames[skip : code.co_argcount]) if code is not None else []
    return [f"L[{names[i]!r}]" if i < len(names) else f"args[{i}]" for i in range(count)]


def code_of(function: Any) -> types.CodeType | None:
    """The code that a call of ``function`` runs first, where that is Python."""
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if type(function) is not types.FunctionType:
        name = "forward" if isinstance(function, torch.nn.Module) else "__call__"
        function = class_attribute(type(function), name)[0]
    return function.__code__ if type(function) is types.FunctionType else None


def definition_of(function: Any) -> UserLocation | None:
    """Where a function, or a module's forward, is defined."""
    code = code_of(function)
    if code is None:
        return None
    line = code.co_firstlineno
    return UserLocation(code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line).strip())


def describe(source: Source, real: torch.Tensor) -> Descriptor:
    """The descriptor of an input, by where it was read."""
    path: list[str] = []
    step: Source | None = source
    kind = ""
    while isinstance(step, ItemSource) and getattr(step, "base", None) is not None:
        table = step.base
        if isinstance(table, ItemSource) and isinstance(table.base, InstanceDictSource) and isinstance(step.key, str):
            if table.key not in ("_parameters", "_buffers", "_modules"):
                break
            kind = kind or str(table.key)
            path.append(step.key)
            step = table.base.base
            continue
        break
    if isinstance(step, AttributeSource) and step.attribute == "__self__":
        step = step.base
    name = ".".join(reversed(path)) if path and isinstance(step, CalleeSource) else source.name
    if isinstance(real, torch.nn.Parameter):
        return ParamInput(name)
    if kind == "_buffers":
        return BufferInput(name)
    return UserInput(name)


class _Outputs:
    """Sorts the values that leave a capture: tensors of the graph, constants, objects that existed before, new objects."""

    def __init__(self, interpreter: Interpreter, goes_on: bool) -> None:
        self._interpreter = interpreter
        self._goes_on = goes_on
        self._positions: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[Any] = []
        self.builder = RecipeBuilder(self._classify)

    def _data_number(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Recipe:
        """A number that the graph computes leaves it as a tensor without dimensions."""
        if self._goes_on:
            raise CaptureError(
                "a number that the data decides is needed after a graph break", where=self._interpreter.locate()
            )
        self.tensors.append(number_as_tensor(value))
        return DataNumberItem(len(self.tensors) - 1)

    def _classify(self, value: Any) -> Recipe | None:
        values = self._interpreter.values
        if isinstance(value, torch.Tensor):
            value = values.wrap(value)
        kind = kind_of(value)
        if kind is not None:
            known = values.stood_for(value)
            if known is not None:
                return SourceItem(known.source.fetch)
            return kind.leave(self._interpreter, self.builder, value)
        if isinstance(value, torch.Tensor):
            if getattr(value, "_is_param", False) and self._interpreter.trace.input_of(value) is None:
                raise CaptureError(
                    "a parameter is made inside and leaves the function",
                    where=self._interpreter.locate(),
                    advice="make it outside of the function",
                )
            if value.is_leaf and value.grad is not None and self._interpreter.trace.input_of(value) is None:
                raise CaptureError(
                    "a tensor that is made inside and has a gradient leaves the function",
                    where=self._interpreter.locate(),
                    advice="return its gradient",
                )
            if value.grad_fn is not None and private_autograd.has_hooks(value):
                # In the graph they are in front of all that is seen of its gradient outside; in eager they are behind it.
                raise CaptureError(
                    "a tensor with a hook on its gradient leaves the function",
                    where=self._interpreter.locate(),
                    advice="register the hook outside, or return a view of the tensor: x.view_as(x)",
                )
            if id(value) not in self._positions:
                self._positions[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return TensorItem(self._positions[id(value)])
        if private_sizes.is_data_number(value):
            return self._data_number(value)
        if private_sizes.is_symbolic(value):
            self.numbers.append(value)
            return NumberItem(len(self.numbers) - 1)
        if isinstance(value, Unread):
            return SourceItem(value.source.fetch)
        if self._interpreter.is_created(type(value)):
            raise CaptureError(
                f"a {type(value).__qualname__}, whose class is defined inside the function, leaves it",
                where=self._interpreter.locate(),
                advice="define the class outside of the function",
            )
        if is_leaf_value(value) or isinstance(value, (Null, FramePoint)):
            return ConstantItem(value)
        source = values.source_of(value)
        if source is not None:
            return SourceItem(source.fetch)
        if is_bound_builtin(value):
            return None
        if type(value) is types.FunctionType and holds_interpreted(value):
            # What torch.func.vmap(f) returns, say: it is made again with the user's own function in it.
            return None
        if isinstance(value, IDENTITY_TYPES) and not self._interpreter.is_created(value):
            return ConstantItem(value)
        return None


def _refuse_traced_errors(stop: Stop) -> None:
    """Refuse a break while an error of a tensor operation is handled: the trace's own text of it is not the real one."""
    for frame in stop.frames:
        for value in (*frame.current_exceptions, *frame.stack):
            if isinstance(value, BaseException) and native_errors.is_marked_native(value):
                raise Break("the graph is broken while an error of a tensor operation is handled")


def capture(
    trace: Trace,
    guards: GuardSet,
    function: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Capture:
    """Interpret one call of ``function`` under an open trace; whatever happens, the user's objects are left as they were.

    With ``settings.stop_before`` the capture ends before the instruction of that number, and its result is the state of the frames.
    Raises :class:`Break` for what cannot be captured, and whatever the user's code raises.
    """
    outside = trace.ambient
    if outside.refuses_capture:
        raise Break(outside.refuses_capture, "call the function outside of that mode")
    inside, nesting = AmbientState.snapshot(), autocast_nesting()
    code = code_of(function)
    if code is not None and code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        raise Break(
            f"{code.co_qualname} is a generator function: its body runs later, a piece at each next()",
            "compile what it calls, or return a list",
        )
    interpreter = Interpreter(trace, guards)
    interpreter.entry_location = definition_of(function)
    values = interpreter.values
    root = CalleeSource()
    values.note(function, root)
    guards.add(
        root, Identity(function) if isinstance(function, IDENTITY_TYPES) else TypeIs(type(function)), None, "callee"
    )
    guards.set_call_shape(len(args), kwargs)
    change: AmbientChange | None = None
    resume_point: ResumePoint | None = None
    symbols: BreakSymbols | None = None
    outputs: _Outputs | None = None
    try:
        try:
            if isinstance(function, Resumption):
                result = interpreter.resume(function.traced_frames(interpreter, args))
            else:
                names = argument_names(function, len(args))
                arguments = tuple(values.read(item, ArgumentSource(i, names[i])) for i, item in enumerate(args))
                keywords = {key: values.read(item, KeywordSource(key, f"L[{key!r}]")) for key, item in kwargs.items()}
                callee = function
                if is_bound_builtin(function):
                    # What a method of a tensor or of a container belongs to is an input like any other.
                    owner = values.read(function.__self__, AttributeSource(root, "__self__"))
                    callee = getattr(owner, function.__name__)
                result = interpreter.call(callee, arguments, keywords, direct=True)
        except Stop as stop:
            _refuse_traced_errors(stop)
            if trace.replicas:
                raise CaptureError(
                    "the graph is broken between a call of DistributedDataParallel and what follows",
                    where=interpreter.locate(),
                    advice="keep what breaks it out of the step, or compile the model before it is wrapped",
                ) from stop
            resume_point, result, _ = flatten(stop.frames)
            symbols = find_symbols(result, _unchanged(result, values), trace.settings.shapes)
        if interpreter.break_in_del is not None:
            raise interpreter.break_in_del
        outputs = _Outputs(interpreter, resume_point is not None)
        guard_distinct(values, interpreter.effects)
        check_let_go(interpreter.effects.let_go())
        effects = []
        dropped = interpreter.gradients.dropped()
        for effect in (*interpreter.effects.collect(), *interpreter.gradients.effects(), *interpreter.effects.late()):
            recipe = outputs.builder.build(effect.values)
            effects.append(EffectRecipe(effect.source, effect.kind, recipe, effect.deleted))
        result_recipe = outputs.builder.build(result)
        if any(item.has_cleaning_up() and not outputs.builder.holds(item) for item in interpreter.generators):
            raise Break("a generator is left unfinished in a cycle of references", "call its close()")
        change = AmbientChange.between(inside, nesting)
        if change.unsettable:
            raise Break(
                f"the function changes the state of torch: {change.differences[0]}", "change it outside of the function"
            )
        for kind in KINDS:
            kind.finish(interpreter)
        for traced in trace.inputs:
            if traced.leaf.is_leaf and traced.leaf.grad is not None and not interpreter.gradients.is_known(traced):
                raise Break("native code calls .backward()", "return the loss and call .backward() outside")
            if private_autograd.has_hooks(traced.value):
                raise Break(
                    f"a hook is registered on {traced.name}, which existed before the call",
                    "register it outside of the function, or on a result computed from it",
                )
            if traced.changes_requires_grad():
                raise Break("requires_grad of an input is changed", "set it outside of the function")
    finally:
        interpreter.ended = True
        with private_tracing.disable_current_modes():
            interpreter.effects.undo()
            if outputs is not None:
                interpreter.effects.close(outputs.builder.holds)
                interpreter.begin_backward()
        if change is None:
            change = AmbientChange.between(inside, nesting)
        interpreter.left_open.end()
        change.take_back()
    guard_classes(values, guards)
    for item in trace.inputs:
        line = next((node.meta["user_line"] for node in item.node.users if "user_line" in node.meta), None)
        if line is not None:
            guards.note_use(item.index, line)
    program = trace.program(tuple(outputs.tensors))
    descriptors = tuple(describe(guards.tensor_source(item.index), item.real) for item in trace.inputs)
    with private_tracing.disable_current_modes():
        for give in interpreter.messages:
            give()
    return Capture(
        function,
        tuple(outputs.tensors),
        descriptors,
        result_recipe,
        tuple(effects),
        guards,
        outside,
        program,
        None if change.is_empty else change,
        resume_point,
        trace.bindings(),
        tuple(private_sizes.expression_of(number) for number in outputs.numbers),
        dropped,
        tuple(interpreter.gradients.flags.turned_on),
        symbols,
    )
