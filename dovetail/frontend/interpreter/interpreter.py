"""The bytecode interpreter: plain Python objects on the stack, only tensors are traced."""

from __future__ import annotations

import inspect
import operator
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from dovetail.errors import CaptureError, DovetailError, Interruption, UserLocation
from dovetail.frontend.code.bind import bind
from dovetail.frontend.code.frame import Break, Frame, Return, Stop, Yield, is_marked_native
from dovetail.frontend.code.points import FramePoint
from dovetail.frontend.effects.left_open import LeftOpen
from dovetail.frontend.instructions import handlers_of
from dovetail.frontend.interpreter import builtin_rules  # noqa: F401  (its rules)
from dovetail.frontend.interpreter.attributes import Attributes
from dovetail.frontend.interpreter.calls import Calls
from dovetail.frontend.interpreter.generator import InterpretedGenerator
from dovetail.frontend.interpreter.machine import RestoreGenerator
from dovetail.frontend.interpreter.names import Names
from dovetail.frontend.interpreter.native import NativeCalls
from dovetail.frontend.interpreter.operators import Operators
from dovetail.frontend.interpreter.shown_frames import passing_traceback
from dovetail.frontend.interpreter.stores import Stores
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import error_rule, without_tensors_rule
from dovetail.frontend.values.aliases import guard_comparison
from dovetail.frontend.values.leaves import is_trusted
from dovetail.frontend.values.module_paths import ModulePaths
from dovetail.frontend.values.values import Values
from dovetail.guards import GuardSet
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import CaptureSettings, Retry, Trace

MAXIMUM_DEPTH = 400
State = TypeVar("State")
# A program raises them on purpose or looks for them; a symbol does not cause them.
_ORDINARY_ERRORS = (LookupError, AttributeError, NameError, StopIteration, GeneratorExit, ZeroDivisionError)


def _is_library(name: str | None) -> bool:
    """Whether a module is one of torch's or of the standard library, whose lines no user knows."""
    return is_trusted(name) or (name is not None and name.split(".", 1)[0] in sys.stdlib_module_names)


class Interpreter(Names, Attributes, Stores, Operators, Calls, NativeCalls):
    """Runs bytecode under an open trace. It is put together of one part for each thing that bytecode does:

    ::

        call(function, args, kwargs)                           calls.py: which kind of call is it?
            a rule for this function                           builtin_rules.py, dovetail.rules
            run_function                                       a Python function
                bind                                           arguments to local variables
                run_frame
                    handler(interpreter, frame, instruction)   instructions/
                        load_global, load_cell, …              names.py
                        load_attribute, store_attribute, …     attributes.py, stores.py
                        load_item, iterate, advance, …         containers.py
                        operate, truth                         operators.py
                        call
                    _unwind                                    an exception: to its handler, or out of the frame
            call_module, call_class                            calls.py
            call_torch                                         native.py
                native                                         run it under the trace's modes
            call_native                                        a builtin
                call_container_method                          containers.py: journalled, guarded
                native
            Break                                              everything else

        values.read, values.guard                              where a value came from, and its guards
        effects.set_item, …                                    the journal of writes
    """

    def __init__(self, trace: Trace, guards: GuardSet, entry_location: UserLocation | None = None) -> None:
        super().__init__()
        self.trace = trace
        self.frames: list[Frame] = []
        self.values = Values(trace, guards)
        self.effects = self.values.journal
        self.left_open = LeftOpen()
        self.loops: Counter[tuple[types.CodeType, int]] = Counter()
        self.generators: weakref.WeakSet[InterpretedGenerator] = weakref.WeakSet()
        #: The reason why a generator could not be closed when nothing referred to it any more.
        self.break_in_del: Break | None = None
        self._has_ended = False
        self._entry_location = entry_location
        self._step = 0
        self._located: tuple[Any, UserLocation | None] = None, None
        self._stop_before = trace.settings.stop_before
        self._code_handlers: dict[types.CodeType, tuple[Any, ...]] = {}
        self._states: dict[Any, Any] = {}
        self._module_paths = ModulePaths(self.values.source_of)
        trace.locate = self.locate
        trace.at_close.append(self._forget)

    def _forget(self) -> None:
        """The trace is closed: let go of the user's objects."""
        self.values.forget()
        self.effects.__dict__.clear()
        self.__dict__.clear()
        self._has_ended = True

    def locate(self, stack: bool = False) -> UserLocation | None:
        if not self.frames:
            return self._entry_location
        at = self._step, id(self.frames[-1]), self.frames[-1].position
        if self._located[0] != at:
            outside = (frame for frame in reversed(self.frames) if not _is_library(frame.globals.get("__name__")))
            self._located = at, next(outside, self.frames[-1]).location(self._module_paths.running(self.frames))
        found = self._located[1]
        return replace(found, stack=tuple(frame.location() for frame in self.frames)) if stack and found else found

    def state(self, kind: Callable[[TracingInterpreter], State]) -> State:
        if kind not in self._states:
            self._states[kind] = kind(self)
        return self._states[kind]  # type: ignore[no-any-return]

    def created(self, value: Any) -> None:
        self.values.note_created(value)

    def is_created(self, value: Any) -> bool:
        return self.values.is_created(value)

    def compared(self, left: Any, right: Any) -> bool:
        guard_comparison(self.values, left, right)
        return self.derive(operator.is_, (left, right)) is True

    def begin_backward(self) -> None:
        """The forward has ended and is undone: reads of hooks and custom backwards are noted anew."""
        self.values.begin_backward()
        self.forget_reads()

    def end(self) -> None:
        """The program has ended."""
        self._has_ended = True

    # --- frames -------------------------------------------------------------------------------------------------------

    def run_function(
        self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False
    ) -> Any:
        code = function.__code__
        if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            raise Break(f"{function.__qualname__} is async", "keep async code outside of the function")
        if len(self.frames) >= MAXIMUM_DEPTH:
            raise Break("the calls are nested too deeply", "use a loop instead of the recursion")
        self.guard_closure(function)
        frame = Frame(function, bind(function, args, kwargs, self.load_default))
        frame.direct = direct
        return self._returned(frame, None)

    def _returned(self, frame: Frame, error: BaseException | None) -> Any:
        result = self.run_frame(frame, error)
        assert isinstance(result, Return)
        return result.value

    def run_frame(self, frame: Frame, error: BaseException | None) -> Return | Yield:
        handlers = self._code_handlers.get(frame.code)
        if handlers is None:
            handlers = self._code_handlers[frame.code] = handlers_of(frame.code, frame.decoded)
        instructions = frame.decoded.instructions
        before: Any = None
        self.frames.append(frame)
        try:
            if error is not None:
                frame.position -= 1
                self._unwind(frame, error)
            while True:
                instruction = instructions[frame.position]
                handler = handlers[frame.position]
                frame.step = self._step = self._step + 1
                if frame.step == self._stop_before:
                    raise Stop(tuple(self.frames))
                before = frame.stack.copy(), frame.keyword_names, self.effects.moves
                try:
                    result = handler(self, frame, instruction)
                except (Interruption, DovetailError):
                    raise
                except BaseException as raised:  # noqa: BLE001  (every exception may have a handler in the user's code)
                    self._unwind(frame, raised)
                    continue
                if result is None:
                    frame.position += 1
                elif isinstance(result, int):
                    frame.position = result
                else:
                    frame.position += 1
                    return result
        except Break as stop:
            if stop.where is None:
                stop.where = self.locate(stack=True)
            if stop.steps is None:
                stop.steps = self._steps_of_chain()
                # What the instruction has taken from an iterator by now, or run of the program, it would take and run again.
                is_clean = stop.is_clean and frame.step == self._step and self.effects.moves == before[2]
                if is_clean and len(stop.steps) == len(self.frames) and self.trace.settings.ends_at_breaks:
                    frame.stack[:], frame.keyword_names, _ = before
                    self.trace.findings.ended = stop
                    raise Stop(tuple(self.frames)) from None
            raise
        finally:
            error = before = None
            self.frames.pop()

    def _steps_of_chain(self) -> tuple[int, ...]:
        """The current steps of the frames that could go on after a graph break: those called by a call instruction alone."""
        count = next((at for at, frame in enumerate(self.frames) if not frame.direct), None)
        if count is None:
            # A call into a library that knows no tensors runs for real as a whole: random.sample goes on in a loop.
            meet = [not any(rule(frame) for rule in without_tensors_rule) for frame in self.frames]
            count = max((at for at, meets in enumerate(meet, 1) if meets), default=1)
        return tuple(frame.step for frame in self.frames[:count])

    def resume(self, frames: tuple[Frame, ...]) -> Any:
        """Go on where earlier calls stopped; all but the innermost frame wait for the result of a call."""
        frame, inner = frames[0], frames[1:]
        if not inner:
            return self._returned(frame, None)
        error: BaseException | None = None
        self.frames.append(frame)
        try:
            frame.stack.append(self.resume(inner))
        except (Interruption, DovetailError):
            raise
        except BaseException as raised:  # noqa: BLE001  (the calling frame may have a handler for it)
            error = raised
        finally:
            self.frames.pop()
        frame.position += 1
        return self._returned(frame, error)

    # --- exceptions ---------------------------------------------------------------------------------------------------

    def _unwind(self, frame: Frame, error: BaseException) -> None:
        """Go to the handler of an exception, or raise it out of the frame."""
        if frame.decoded.instructions[frame.position].opname in ("RAISE_VARARGS", "RERAISE"):
            self.trace.findings.raised = error
        if private_sizes.is_unhashable_number(error):
            raise CaptureError("a number that changes from call to call is hashed", where=self.locate()) from error
        if isinstance(error, private_tracing.DATA_DEPENDENT_ERRORS):
            # No exception of the program: its handlers must not see it.
            raise Break("the values of a tensor are needed", "keep the value in a tensor") from error
        if self.values.source_of(error) is None:
            for handler in error_rule:
                handler(self, error, ())
        traceback, context = passing_traceback(frame, error), error.__context__
        handled = self.handled_exception()
        if context is None and handled is not None and not _leads_to(handled, error):
            context = handled
        self._mark_exception(error, traceback, context)
        found = frame.handler_of(frame.position)
        if found is None:
            try:
                raise error
            finally:
                # The traceback leads to this call and to the frame; in a cycle, what they hold would outlive the function.
                frame.stack.clear()
                del error
        if frame.catches(found):
            self._check_caught(error)
            self.trace.findings.raised = None
        frame.enter_handler(found, error)

    def _check_caught(self, error: BaseException) -> None:
        """Refuse to let the program handle an error that it would not have in eager, or not with this text."""
        is_ordinary = isinstance(error, _ORDINARY_ERRORS) and not private_sizes.is_symbolic(getattr(error, "obj", None))
        text = str(error) if type(error) is TypeError else ""
        is_ordinary |= text.endswith((" is not iterable", " is not subscriptable")) and "'Sym" not in text
        if (
            (not self.trace.settings.shapes.is_static or self.trace.data_symbols())
            and error is not self.trace.findings.raised
            and not is_ordinary
            and type(error).__module__.startswith(("builtins", "torch", "sympy"))
        ):
            reason = f"a {type(error).__name__} is handled while sizes are symbolic"
            raise Retry(reason, change=CaptureSettings.with_fewer_symbols) from error
        if is_marked_native(error):
            raise Break(
                "an error raised by a tensor operation is caught", "check before the operation instead"
            ) from error

    def _mark_exception(self, error: BaseException, traceback: Any, context: BaseException | None) -> None:
        """Raising an exception writes to it, and it may have existed before."""
        if (source := self.values.source_of(error)) is None:
            error.__traceback__, error.__context__ = traceback, context
            return
        self.effects.set_attribute(error, "__traceback__", traceback, source)
        if context is not error.__context__:
            self.effects.set_attribute(error, "__context__", context, source)

    # --- generators ---------------------------------------------------------------------------------------------------

    def make_generator(self, frame: Frame) -> InterpretedGenerator:
        generator = InterpretedGenerator(self, frame.suspended_copy())
        self.generators.add(generator)
        return generator

    def close_generator(self, generator: InterpretedGenerator) -> None:
        """Close a generator that nothing refers to any more, as Python does at once; not once the program has ended."""
        try:
            if not self._has_ended:
                generator.close()
        except Interruption:
            # This is called from ``__del__``, out of which nothing can be raised.
            self.break_in_del = Break("the cleaning up of a dropped generator cannot be captured", "call its close()")

    def restorer(self, started: bool, point: FramePoint | None) -> RestoreGenerator:
        return RestoreGenerator(started, point)


def _leads_to(start: BaseException | None, end: BaseException) -> bool:
    """Whether an exception is another one or has it among its contexts."""
    while start is not None and start is not end:
        start = start.__context__
    return start is end
