"""The bytecode interpreter: plain Python objects on the stack, only tensors are traced.

>>> # Interpreter(trace, guards).call(function, args, kwargs) runs a function's bytecode under an open trace.
"""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from dovetail.errors import CaptureError, DovetailError, Interruption, UserLocation
from dovetail.frontend import native_errors
from dovetail.frontend.code.bind import bind
from dovetail.frontend.code.frame import Break, Frame, Return, Stop, Unread, Yield, unknown_instruction
from dovetail.frontend.code.points import is_bound
from dovetail.frontend.effects.gradients import Gradients
from dovetail.frontend.effects.left_open import LeftOpen
from dovetail.frontend.instructions import instruction_set
from dovetail.frontend.instructions.shared import unbound_variable
from dovetail.frontend.interpreter.attributes import MISSING, Attributes, class_attribute
from dovetail.frontend.interpreter.builtin_rules import WrappingIterator
from dovetail.frontend.interpreter.call_tables import check_loading, is_library_module, runs_natively
from dovetail.frontend.interpreter.calls import Calls
from dovetail.frontend.interpreter.generator import InterpretedGenerator
from dovetail.frontend.interpreter.operators import OLD_CONTAINERS, Operators, python_method
from dovetail.frontend.interpreter.shown_frames import passing_traceback
from dovetail.frontend.interpreter.shown_names import tell_shown_names
from dovetail.frontend.protocol import TracingInterpreter
from dovetail.frontend.rules import CODES
from dovetail.frontend.sizes.number_tensors import select_symbolic, with_numbers_in_slices
from dovetail.frontend.values.aliases import guard_comparison, guard_key
from dovetail.frontend.values.leaves import is_leaf_value, is_trusted, may_be_switched, plain_numbers
from dovetail.frontend.values.module_paths import ModulePaths
from dovetail.frontend.values.values import Values
from dovetail.guards import (
    AttributeSource,
    CellSource,
    GuardSet,
    HasNoKey,
    Identity,
    ItemSource,
    SameObject,
    Source,
    Unbound,
)
from dovetail.guards.reading import plain_keys, plain_length, read_item
from dovetail.torch_private import sizes as private_sizes
from dovetail.torch_private import tracing as private_tracing
from dovetail.trace import CaptureSettings, Retry, Trace

MAXIMUM_DEPTH = 400
State = TypeVar("State")


# What a program raises on purpose or looks for, and a symbol does not cause.
ORDINARY_ERRORS = (LookupError, StopIteration, GeneratorExit, ZeroDivisionError)


def _may_come_of_a_symbol(error: BaseException) -> bool:
    """Whether Python or torch may have raised this only because a number is a symbol: in a range that it cannot have, say."""
    if isinstance(error, ORDINARY_ERRORS) or native_errors.is_marked_independent(error):
        return False
    return type(error).__module__ == "builtins" or type(error).__module__.startswith(("torch", "sympy"))


def _leads_to(start: BaseException | None, end: BaseException) -> bool:
    """Whether an exception is another one or has it among its contexts."""
    while start is not None and start is not end:
        start = start.__context__
    return start is end


def _asks_for_keys(mapping: dict[Any, Any]) -> bool:
    """Whether Python copies a dictionary by its ``keys()`` and ``[]``; one that is gone through as any other it takes whole."""
    if python_method(mapping, "__iter__") is not None:
        return True
    methods = (python_method(mapping, "keys"), python_method(mapping, "__getitem__"))
    return isinstance(mapping, collections.OrderedDict) and any(method is not None for method in methods)


class Interpreter(Attributes, Calls, Operators):
    """Runs bytecode under an open trace."""

    def __init__(self, trace: Trace, guards: GuardSet) -> None:
        self.trace = trace
        self.step = 0
        #: How many times each loop over a range has begun, by code and position.
        self.loops: collections.Counter[tuple[types.CodeType, int]] = collections.Counter()
        self.stop_before = trace.settings.stop_before
        self.values = Values(trace, guards)
        self.effects = self.values.journal
        self.gradients = Gradients(self.values, self.native)
        self.left_open = LeftOpen()
        self.frames: list[Frame] = []
        self.generators: weakref.WeakSet[InterpretedGenerator] = weakref.WeakSet()
        self.break_in_del: Break | None = None
        #: Calls that give messages, to be made when the capture has succeeded.
        self.messages: list[Callable[[], Any]] = []
        self.ended = False
        self.entry_location: UserLocation | None = None
        self._function_classes: dict[type, type] = {}
        self._handlers = instruction_set()
        self._code_handlers: dict[types.CodeType, tuple[Any, ...]] = {}
        self._states: dict[Any, Any] = {}
        self._cells: dict[int, Source] = {}
        self._seen_globals: dict[tuple[int, str], Any] = {}
        self._seen_functions: dict[int, types.FunctionType] = {}
        self._module_paths = ModulePaths(self.values.source_of)
        trace.locate = self.locate
        trace.on_close(self._release)

    def _release(self) -> None:
        """The trace is closed: let go of the user's objects."""
        self.__dict__.clear()
        self.ended = True

    # --- where --------------------------------------------------------------------------------------------------------

    def locate(self) -> UserLocation | None:
        """The innermost line outside of torch."""
        if not self.frames:
            return self.entry_location
        outside = (frame for frame in reversed(self.frames) if not is_trusted(frame.globals.get("__name__")))
        return next(outside, self.frames[-1]).location(self._module_paths.running(self.frames))

    def begin_backward(self) -> None:
        """The forward has ended and is undone: what hooks and custom backwards read is noted anew."""
        self.values.begin_backward()
        self._seen_globals.clear()
        self._seen_functions.clear()

    def created(self, value: Any) -> None:
        """Remember that an object was made by the trace."""
        self.values.note_created(value)

    def is_created(self, value: Any) -> bool:
        """Whether an object was made by the trace."""
        return self.values.is_created(value)

    def state(self, kind: Callable[[TracingInterpreter], State]) -> State:
        """The object of a class that a rule keeps for the length of this capture; made when it is first asked for."""
        if kind not in self._states:
            self._states[kind] = kind(self)
        return self._states[kind]  # type: ignore[no-any-return]

    # --- frames -------------------------------------------------------------------------------------------------------

    def run_function(
        self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False
    ) -> Any:
        """Interpret a Python function; ``direct`` as in :class:`Frame`."""
        code = function.__code__
        if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            raise Break(f"{function.__qualname__} is async", "keep async code outside of the function")
        if len(self.frames) >= MAXIMUM_DEPTH:
            raise Break("the calls are nested too deeply", "use a loop instead of the recursion")
        if id(code) in CODES:
            return CODES[id(code)](self, function, args, kwargs)
        if id(function) not in self._seen_functions:
            self._guard_function(function)
        frame = Frame(function, bind(function, args, kwargs, self._default))
        frame.direct = direct
        result = self.run_frame(frame, None)
        assert isinstance(result, Return)
        return result.value

    def run_class_body(self, body: types.FunctionType, namespace: Any) -> Any:
        """Interpret the body of a class; its names go into ``namespace``."""
        self._guard_function(body)
        frame = Frame(body, {})
        frame.namespace = namespace
        result = self.run_frame(frame, None)
        assert isinstance(result, Return)
        return result.value

    def guard_closure(self, function: types.FunctionType) -> None:
        """Guard a function's code, and remember where its cells can be found again."""
        if id(function) not in self._seen_functions:
            self._guard_function(function)

    def _guard_function(self, function: types.FunctionType) -> None:
        self._seen_functions[id(function)] = function
        if self.is_created(function):
            return
        if not is_trusted(function.__globals__.get("__name__")):
            source = self.values.pin(function, function.__qualname__)
            self.values.guard(AttributeSource(source, "__code__"), Identity(function.__code__), "the function's code")
            self.note_closure(function, source)
        elif function.__closure__:
            # The code of a library may be taken as fixed; what it closes over is the user's (a callback, a decorated function).
            self.note_closure(function, self.values.pin(function, function.__qualname__))

    def note_closure(self, function: types.FunctionType, source: Source) -> None:
        """Remember where a function's closure cells, and what they hold, can be found again."""
        for position, cell in enumerate(function.__closure__ or ()):
            if self.is_created(cell):
                continue
            own = ItemSource(AttributeSource(source, "__closure__"), position)
            known = self.values.source_of(cell)
            if known is None:
                self.values.note(cell, own)
                self._cells[id(cell)] = CellSource(source, position)
            elif known != own:
                self.values.guard(own, SameObject(known), f"{own.name} and {known.name} are one cell")

    def note_cell(self, cell: types.CellType, source: Source) -> None:
        """Remember where a cell that a resumed frame owns can be found again."""
        self.values.read(cell, source)
        self._cells.setdefault(id(cell), AttributeSource(source, "cell_contents"))

    def _default(self, function: types.FunctionType, name: str, position: int | None) -> Any:
        table: Any = function.__kwdefaults__ if position is None else function.__defaults__
        key: Any = name if position is None else position
        value = table[key]
        if self.is_created(function) or is_trusted(function.__globals__.get("__name__")):
            return self.values.wrap(value)
        source = self.values.pin(function, function.__qualname__)
        attribute = "__kwdefaults__" if position is None else "__defaults__"
        return self.values.read(value, ItemSource(AttributeSource(source, attribute), key))

    def run_frame(self, frame: Frame, error: BaseException | None) -> Return | Yield:
        """Run a frame until it returns or yields; ``error`` is raised at the current instruction first."""
        handlers = self._code_handlers.get(frame.code)
        if handlers is None:
            table = self._handlers
            handlers = tuple(table.get(item.opname) for item in frame.decoded.instructions)
            self._code_handlers[frame.code] = handlers
        instructions = frame.decoded.instructions
        self.frames.append(frame)
        try:
            if error is not None:
                frame.position -= 1
                self._unwind(frame, error)
            while True:
                instruction = instructions[frame.position]
                handler = handlers[frame.position]
                frame.step = self.step = self.step + 1
                if frame.step == self.stop_before:
                    raise Stop(tuple(self.frames))
                if handler is None:
                    raise unknown_instruction(frame.code, instruction)
                try:
                    result = handler(self, frame, instruction)
                except (Interruption, DovetailError):
                    raise
                except BaseException as raised:  # noqa: BLE001  (every exception may have a handler in the user's code)
                    self._unwind(frame, raised)
                    continue
                if result is None:
                    frame.position += 1
                elif type(result) is int:
                    frame.position = result
                else:
                    frame.position += 1
                    return result  # type: ignore[no-any-return]
        except Break as stop:
            if stop.where is None:
                stop.where = self.locate()
            if stop.steps is None:
                stop.steps = self._steps_of_chain()
            raise
        finally:
            error = None
            self.frames.pop()

    def _steps_of_chain(self) -> tuple[int, ...]:
        """The current steps of the frames that could go on after a break: those called by nothing but a call instruction."""
        steps: list[int] = []
        for frame in self.frames:
            if not frame.direct:
                break
            steps.append(frame.step)
        return tuple(steps)

    def resume(self, frames: tuple[Frame, ...]) -> Any:
        """Go on where earlier calls stopped; all but the innermost frame wait for the result of a call."""
        frame, inner = frames[0], frames[1:]
        if not inner:
            result = self.run_frame(frame, None)
            assert isinstance(result, Return)
            return result.value
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
        result = self.run_frame(frame, error)
        assert isinstance(result, Return)
        return result.value

    def _unwind(self, frame: Frame, error: BaseException) -> None:
        """Go to the handler of an exception, or raise it out of the frame."""
        if private_sizes.is_unhashable_number(error):
            raise CaptureError("a number that changes from call to call is hashed", where=self.locate()) from error
        if isinstance(error, private_tracing.DATA_DEPENDENT_ERRORS):
            # No exception of the program: its handlers must not see it.
            raise Break("the values of a tensor are needed", "keep the value in a tensor") from error
        if self.values.source_of(error) is None:
            tell_shown_names(error)
        traceback, context = passing_traceback(frame, error), error.__context__
        handled = self.handled_exception(frame)
        if context is None and handled is not None and not _leads_to(handled, error):
            context = handled
        self._mark_exception(error, traceback, context)
        found = frame.handler_of(frame.position)
        if found is None:
            try:
                raise error
            finally:
                # The traceback leads to this call; in a cycle, what the frames hold would outlive the function.
                del error
        if (
            _may_come_of_a_symbol(error)
            and self.trace.settings.shapes.has_symbols
            and frame.decoded.instructions[frame.position].opname not in ("RAISE_VARARGS", "RERAISE")
            and self._catches(frame, found.target, error)
        ):
            reason = f"a {type(error).__name__} is handled while sizes are symbolic"
            raise Retry(reason, change=CaptureSettings.with_fewer_symbols) from error
        if native_errors.is_marked_native(error):
            is_cleanup = frame.decoded.instructions[found.target].opname == "PUSH_EXC_INFO"
            if is_cleanup and self._catches(frame, found.target, error):
                raise Break(
                    "an error raised by a tensor operation is caught", "check before the operation instead"
                ) from error
        frame.enter_handler(found, error)

    def _mark_exception(self, error: BaseException, traceback: Any, context: BaseException | None) -> None:
        """Raising an exception writes to it, and it may have existed before."""
        source = self.values.source_of(error)
        if source is None:
            error.__traceback__, error.__context__ = traceback, context
            return
        self.effects.set_attribute(error, "__traceback__", traceback, source)
        if context is not error.__context__:
            self.effects.set_attribute(error, "__context__", context, source)

    def _catches(self, frame: Frame, target: int, error: BaseException) -> bool:
        """Whether the handler at ``target`` is an ``except`` clause (a ``with`` or ``finally`` re-raises)."""
        for item in frame.decoded.instructions[target + 1 :]:
            if item.opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_TOP"):
                return True
            if not item.opname.startswith(("LOAD_", "BUILD_", "COPY", "SWAP", "PUSH_NULL", "NOP")):
                return False
        return False

    def make_generator(self, frame: Frame) -> InterpretedGenerator:
        """The generator object for a frame that starts with RETURN_GENERATOR."""
        generator = InterpretedGenerator(self, frame.suspended_copy())
        self.generators.add(generator)
        return generator

    def close_generator(self, generator: InterpretedGenerator) -> None:
        """Close a generator that nothing refers to any more, as Python does at once; not once the trace has ended."""
        if self.ended:
            return
        try:
            generator.close()
        except Interruption:
            # This is called from ``__del__``, out of which nothing can be raised.
            self.break_in_del = Break("the cleaning up of a dropped generator cannot be captured", "call its close()")

    def handled_exception(self, frame: Frame) -> BaseException | None:
        """The exception that a bare ``raise`` raises again."""
        for candidate in reversed(self.frames):
            if candidate.current_exceptions:
                return candidate.current_exceptions[-1]
        return None

    # --- names --------------------------------------------------------------------------------------------------------

    def first_read(self, value: Unread) -> Any:
        """A local variable of a resumed function that is read for the first time."""
        return self.values.read(value.value, value.source)

    def compared(self, left: Any, right: Any) -> None:
        """Two objects were compared by identity, and are not the same."""
        guard_comparison(self.values, left, right)

    def load_global(self, frame: Frame, name: str) -> Any:
        """A global or builtin name."""
        table = frame.globals
        module = table.get("__name__")
        if name in table:
            value = table[name]
            is_fixed = (
                is_trusted(module) and not isinstance(value, torch.Tensor) and not may_be_switched(module, name, value)
            )
            if is_fixed or self.effects.written(table, name):
                return self.values.wrap(value)
            key = (id(table), name)
            seen = self._seen_globals.get(key, MISSING)
            if seen is not MISSING and not isinstance(value, torch.Tensor):
                return seen
            source = self.values.pin(table, "G")
            # A number may be read as a symbol, the second time as well as the first.
            read = self._seen_globals[key] = self.values.read(value, ItemSource(source, name))
            return read
        builtin_table = table.get("__builtins__", {})
        builtins_dict = builtin_table.__dict__ if isinstance(builtin_table, types.ModuleType) else builtin_table
        is_open = not is_trusted(module) and not self.effects.written(table, name)
        key = (id(table), name)
        if is_open and key not in self._seen_globals:
            what = f"{name} is {'the builtin' if name in builtins_dict else 'not defined'}"
            for place, display in ((table, "G"), (builtins_dict, "builtins"))[: 1 + (name not in builtins_dict)]:
                self.values.guard(self.values.pin(place, display), HasNoKey(name), what)
        if name not in builtins_dict:
            raise NameError(f"name {name!r} is not defined", name=name)
        value = builtins_dict[name]
        if is_open and key not in self._seen_globals:
            self._seen_globals[key] = self.values.read(
                value, ItemSource(self.values.pin(builtins_dict, "builtins"), name)
            )
        return value

    def store_global(self, frame: Frame, name: str, value: Any) -> None:
        """Write a global name."""
        self.values.note(frame.globals, self.values.pin(frame.globals, "G"))
        self.effects.set_item(frame.globals, name, value)

    def delete_global(self, frame: Frame, name: str) -> None:
        """Delete a global name."""
        if name not in frame.globals:
            raise NameError(f"name {name!r} is not defined")
        self.load_global(frame, name)
        self.values.note(frame.globals, self.values.pin(frame.globals, "G"))
        self.effects.delete_item(frame.globals, name)

    def load_cell(self, frame: Frame, name: str) -> Any:
        """The content of a closure cell."""
        cell = frame.cells[name]
        if not is_bound(cell):
            source = self._cells.get(id(cell))
            if isinstance(source, CellSource):
                self.values.guard(source.cell, Unbound(), f"{name} is unbound")
            raise unbound_variable(frame.code, name)
        return self.read_cell(cell)

    def read_cell(self, cell: types.CellType) -> Any:
        """The content of a cell that has one."""
        value = cell.cell_contents
        source = self._cells.get(id(cell))
        return value if source is None or self.effects.written(cell) else self.values.read(value, source)

    def store_cell(self, frame: Frame, name: str, value: Any) -> None:
        """Write a closure cell."""
        cell = frame.cells[name]
        self.effects.set_cell(cell, value)

    def delete_cell(self, frame: Frame, name: str) -> None:
        """Empty a closure cell."""
        cell = frame.cells[name]
        if self._cells.get(id(cell)) is not None:
            raise Break(f"the variable {name} of an enclosing function is deleted")
        self.load_cell(frame, name)
        del cell.cell_contents

    def import_module(self, frame: Frame, name: str, names: Any, level: int) -> Any:
        """``import`` inside a function: the module must be loaded already or load without touching tensors."""
        with private_tracing.disable_current_modes():
            found = __import__(name, frame.globals, None, names, level)
        if level == 0:
            module = sys.modules.get(name)
            if module is not None and not is_trusted(name) and not is_library_module(module):
                source = ItemSource(self.values.pin(sys.modules, "sys.modules"), name)
                self.values.guard(source, Identity(module), f"{name} was imported")
        return found

    # --- items and operators ------------------------------------------------------------------------------------------

    def load_item(self, target: Any, key: Any) -> Any:
        """``target[key]``."""
        if isinstance(target, torch.Tensor):
            selected, key = select_symbolic(self, target, with_numbers_in_slices(self, key))
            return (
                selected if key == () and selected is not target else self.native(operator.getitem, (selected, key), {})
            )
        kind = type(target)
        method, _ = class_attribute(kind, "__getitem__")
        if isinstance(method, types.FunctionType):
            return self.call(types.MethodType(method, target), (key,), {})
        if isinstance(target, dict):
            key = self.as_key(key, target)
            if dict.__contains__(target, key):
                return self.values.read(dict.__getitem__(target, key), self.values.item_source(target, key))
            missing, _ = class_attribute(kind, "__missing__")
            self.guard_missing_key(target, key)
            if isinstance(missing, types.FunctionType):
                return self.call(types.MethodType(missing, target), (key,), {})
            factory = target.default_factory if isinstance(target, collections.defaultdict) else None
            if kind is collections.defaultdict and factory is not None:
                source = self.values.source_of(target)
                if source is not None:
                    factory = self.values.read(factory, AttributeSource(source, "default_factory"))
                value = self.call(factory, (), {})
                self.effects.set_item(target, key, value)
                return value
            if missing is not None and kind is not dict and hasattr(kind, "__missing__"):
                raise Break(f"a missing key of a {kind.__name__} is looked up")
            raise KeyError(key)
        if isinstance(target, (list, tuple)):
            key = self.as_index(plain_numbers(key))
            if isinstance(key, slice):
                self.values.whole(target)
                return self.values.wrap(operator.getitem(target, key))
            if isinstance(key, torch.Tensor):
                raise Break("a tensor is used as an index into a Python list", "use a Python number")
            position = operator.index(key)
            if position < 0:
                self.guard_length(target)
                position += plain_length(target)
            elif position >= plain_length(target):
                # That there is no such item is an assumption too: a loop over the items of a list ends so.
                self.guard_length(target)
            value = read_item(target, key)
            return self.values.read(value, self.values.item_source(target, position))
        if isinstance(target, type):
            return target[key]  # type: ignore[index]
        return self.native(operator.getitem, (target, key), {})

    def store_item(self, target: Any, key: Any, value: Any) -> None:
        """``target[key] = value``."""
        if isinstance(target, torch.Tensor):
            selected, key = select_symbolic(self, target, with_numbers_in_slices(self, key))
            self.native(operator.setitem, (selected, key, value), {})
            return
        method, _ = class_attribute(type(target), "__setitem__")
        if isinstance(method, types.FunctionType):
            self.call(types.MethodType(method, target), (key, value), {})
        elif isinstance(target, (list, dict)):
            key = self.as_key(key, target)
            if isinstance(target, list):
                # What stood at this place does not matter: a counter in a list may be another number at each call.
                self.values.whole(target, but=key if type(key) is int and -len(target) <= key < len(target) else None)
                if isinstance(key, slice):
                    value = self.drain(value)
            self.effects.set_item(target, key, value)
        else:
            raise Break(f"an item of a {type(target).__name__} is set")

    def delete_item(self, target: Any, key: Any) -> None:
        """``del target[key]``."""
        method, _ = class_attribute(type(target), "__delitem__")
        if isinstance(method, types.FunctionType):
            self.call(types.MethodType(method, target), (key,), {})
        elif isinstance(target, (list, dict)):
            self.values.whole(target)
            self.effects.delete_item(target, self.as_key(key, target))
        else:
            raise Break(f"an item of a {type(target).__name__} is deleted")

    # --- iteration ----------------------------------------------------------------------------------------------------

    def iterate(self, value: Any) -> Any:
        """``iter(value)``."""
        if isinstance(value, (InterpretedGenerator, range, str)):
            return iter(value)
        if isinstance(value, torch.Tensor):
            return iter(value.unbind(0)) if value.dim() else iter(value)
        method, _ = class_attribute(type(value), "__iter__")
        if isinstance(method, types.FunctionType) and not runs_natively(method.__globals__.get("__name__") or ""):
            return self.call(types.MethodType(method, value), (), {})
        check_loading(type(value).__module__)
        if isinstance(value, (*OLD_CONTAINERS, collections.deque)):
            self.values.whole(value)
        elif isinstance(value, Iterator) and self.values.source_of(value) is not None:
            raise Break("an iterator that existed before the call is advanced", "hand over a list instead")
        elif method is None or not hasattr(type(value), "__iter__"):
            getter, _ = class_attribute(type(value), "__getitem__")
            if isinstance(getter, types.FunctionType):
                return self._iterate_by_item(value)
        elif (
            not isinstance(method, types.FunctionType)
            and not isinstance(value, type)
            and not is_leaf_value(value)
            and self.values.source_of(value) is not None
        ):
            raise Break(
                f"a {type(value).__name__} that existed before the call is gone through, and nobody guards what is in it",
                "hand over a list of its items",
            )
        return iter(value)

    def _iterate_by_item(self, value: Any) -> Iterator[Any]:
        position = 0
        while True:
            try:
                item = self.load_item(value, position)
            except IndexError:
                return
            yield item
            position += 1

    def advance(self, iterator: Any) -> tuple[bool, Any]:
        """One step of an iterator: (True, return value) at its end, else (False, item)."""
        method, _ = class_attribute(type(iterator), "__next__")
        check_loading(type(iterator).__module__)
        try:
            if (
                isinstance(method, types.FunctionType)
                and not isinstance(iterator, (collections.abc.Generator, WrappingIterator))
                and not runs_natively(method.__globals__.get("__name__") or "")
            ):
                return False, self.call(types.MethodType(method, iterator), (), {})
            if self.values.source_of(iterator) is not None:
                raise Break("an iterator that existed before is advanced", "hand over a list instead")
            return False, self.values.wrap(next(iterator))
        except StopIteration as stop:
            return True, stop.value

    def as_key(self, value: Any, table: Any = None) -> Any:
        """A value that is to be hashed, as a ``table`` has it: symbolic numbers are plain ones there."""
        guard_key(self.values, value, table)
        return plain_numbers(value) if table is None else self.values.key_in(table, value)

    def change(self, container: Any, method: str, *args: Any) -> None:
        """A method of a list, dictionary or set that an instruction builds; after a graph break it existed before."""
        function = getattr(container, method)
        if self.values.source_of(container) is None:
            function(*args)
        else:
            self.call_container_method(container, function, args, {})

    def drain(self, value: Any, is_hinted: bool = False) -> list[Any]:
        """All items of an iterable; a list or tuple that is made of them ``is_hinted``: it asks for their number first."""
        iterator = self.iterate(value)
        method = python_method(value, "__len__") if is_hinted else None
        if method is not None:
            with contextlib.suppress(TypeError):
                self.called_length(method, value)
        items: list[Any] = []
        while True:
            done, item = self.advance(iterator)
            if done:
                return items
            items.append(item)

    def send(self, iterator: Any, value: Any) -> tuple[bool, Any]:
        """One step of ``yield from``."""
        try:
            if value is None:
                return self.advance(iterator)
            return False, self.call(self.load_attribute(iterator, "send"), (value,), {})
        except StopIteration as stop:
            return True, stop.value

    def items_of(self, mapping: Any) -> dict[Any, Any]:
        """A mapping as a plain dictionary of traced values."""
        if isinstance(mapping, dict) and not _asks_for_keys(mapping):
            self.values.whole(mapping)
            return {key: self.values.wrap(dict.__getitem__(mapping, key)) for key in plain_keys(mapping)}
        keys = self.drain(self.call(self.load_attribute(mapping, "keys"), (), {}))
        return {key: self.load_item(mapping, key) for key in keys}

    def load_special(self, target: Any, name: str) -> Any:
        """A special method, looked up on the class."""
        found, owner = class_attribute(type(target), name)
        if owner is None:
            raise TypeError(f"{type(target).__name__!r} object does not support the context manager protocol")
        if isinstance(found, types.FunctionType):
            return types.MethodType(found, target)
        return getattr(target, name)
