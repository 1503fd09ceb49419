"""A frame that runs for real: the same instruction handlers on real values, with Python's own meaning.

After a graph break the instruction that could not be captured runs here, and so does the rest of a function that cannot be
captured any further. Functions that it calls run at Python's own speed.
"""

from __future__ import annotations

import builtins
import functools
import operator
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dovetail.frontend.code.frame import Frame, Return, Unread, Yield
from dovetail.frontend.code.points import FramePoint, is_bound, unflatten
from dovetail.frontend.instructions import instruction_set
from dovetail.frontend.instructions.shared import super_arguments, unbound_variable
from dovetail.frontend.interpreter.generator import InterpretedGenerator
from dovetail.frontend.interpreter.shown_frames import call_within, passing_traceback, while_handling
from dovetail.frontend.protocol import FrameRunner
from dovetail.frontend.rules import real_rule


@dataclass(frozen=True)
class RestoreGenerator:
    """Makes a generator that goes on for real from the live values of its frame."""

    started: bool
    point: FramePoint | None

    def __call__(self, *values: Any) -> InterpretedGenerator:
        """The generator."""
        frame = unflatten((self.point,), values)[0] if self.point is not None else None
        return InterpretedGenerator(Machine(), frame, self.started)


class Machine(FrameRunner):
    """Runs frames on real values, with Python's own meaning."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._handlers = instruction_set()

    # --- running ------------------------------------------------------------------------------------------------------

    def step(self, frames: list[Frame]) -> Any:
        """Run one instruction of the innermost frame. ``frames`` are left as they then are: empty once the outermost has returned.

        The result means something only then. An exception that no frame handles is raised.
        """
        self.frames = frames
        frame = frames[-1]
        try:
            outcome = self._one(frame)
        except BaseException as error:  # noqa: BLE001  (the frames may have a handler for it)
            self._unwind(frames, error)
            return None
        return self._advance(frames, outcome)

    def step_to_work(self, frames: list[Frame]) -> Any:
        """:meth:`step`, and on through what rules say: a graph would not make it faster."""
        result = self.step(frames)
        while frames and (count := next(filter(None, (rule(frames[-1]) for rule in real_rule)), 0)):
            for _ in range(count):
                result = self.step(frames)
        return result

    def run(self, frames: list[Frame]) -> Any:
        """Run to the end."""
        result = None
        while frames:
            result = self.step(frames)
        return result

    def run_frame(self, frame: Frame, error: BaseException | None) -> Return | Yield:
        """Run one frame until it returns or yields; ``error`` is raised at the current instruction first."""
        self.frames.append(frame)
        try:
            if error is not None:
                frame.position -= 1
                self._unwind([frame], error)
            while True:
                try:
                    outcome = self._one(frame)
                except BaseException as raised:  # noqa: BLE001  (the frame may have a handler for it)
                    self._unwind([frame], raised)
                    continue
                if isinstance(outcome, (Return, Yield)):
                    frame.position += 1
                    return outcome
                frame.position = frame.position + 1 if outcome is None else outcome
        finally:
            self.frames.pop()

    def _one(self, frame: Frame) -> Any:
        instruction = frame.decoded.instructions[frame.position]
        handler = self._handlers[instruction.opname]
        handling = [item for item in frame.current_exceptions if item is not None]
        if not handling:
            return handler(self, frame, instruction)
        # A function that is called may ask for the exception that is being handled (sys.exc_info, logging.exception), and an
        # exception that is raised has it as its context.
        return while_handling(handling[-1], functools.partial(handler, self, frame, instruction))

    def _advance(self, frames: list[Frame], outcome: Any) -> Any:
        if isinstance(outcome, Return):
            frames.pop()
            if not frames:
                return outcome.value
            frames[-1].stack.append(outcome.value)
            outcome = None
        frame = frames[-1]
        frame.position = frame.position + 1 if outcome is None else outcome
        return None

    @classmethod
    def _unwind(cls, frames: list[Frame], error: BaseException) -> None:
        while frames:
            if cls._enters_handler(frames[-1], error):
                return
            frames.pop()
        raise error

    @staticmethod
    def _enters_handler(frame: Frame, error: BaseException) -> bool:
        """Go to the handler of an exception, if the frame has one."""
        error.__traceback__ = passing_traceback(frame, error)
        entry = frame.handler_of(frame.position)
        if entry is not None:
            frame.enter_handler(entry, error)
        return entry is not None

    # --- the protocol: builtin functions of Python ----------------------------------------------------------------------

    load_attribute: Any = staticmethod(getattr)
    store_attribute: Any = staticmethod(setattr)
    delete_attribute: Any = staticmethod(delattr)
    load_item: Any = staticmethod(operator.getitem)
    store_item: Any = staticmethod(operator.setitem)
    delete_item: Any = staticmethod(operator.delitem)
    truth: Any = staticmethod(bool)
    iterate: Any = staticmethod(iter)

    # --- the rest of the protocol -------------------------------------------------------------------------

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False) -> Any:
        """``function(*args, **kwargs)``; a few builtins look at the frame that calls them."""
        if function is super and not args:
            return super(*super_arguments(self, self.frames[-1]))
        if type(function) in _BLIND and function not in _SEEING:
            return function(*args, **kwargs)
        return call_within(self.frames, _variables, functools.partial(function, *args, **kwargs))()

    def created(self, value: Any) -> None:
        return

    def compared(self, left: Any, right: Any) -> bool:
        return False

    def close_generator(self, generator: InterpretedGenerator) -> None:
        generator.close()

    def make_generator(self, frame: Frame) -> InterpretedGenerator:
        return InterpretedGenerator(Machine(), frame.suspended_copy())

    def restorer(self, started: bool, point: FramePoint | None) -> RestoreGenerator:
        return RestoreGenerator(started, point)

    def first_read(self, value: Unread) -> Any:
        return value.value

    def load_global(self, frame: Frame, name: str) -> Any:
        if name in frame.globals:
            return frame.globals[name]
        table = frame.globals.get("__builtins__", builtins)
        table = table.__dict__ if isinstance(table, types.ModuleType) else table
        if name not in table:
            raise NameError(f"name {name!r} is not defined", name=name)
        return table[name]

    def store_global(self, frame: Frame, name: str, value: Any) -> None:
        frame.globals[name] = value

    def delete_global(self, frame: Frame, name: str) -> None:
        if name not in frame.globals:
            raise NameError(f"name {name!r} is not defined")
        del frame.globals[name]

    def load_cell(self, frame: Frame, name: str) -> Any:
        try:
            return frame.cells[name].cell_contents
        except ValueError:
            raise unbound_variable(frame.code, name) from None

    def store_cell(self, frame: Frame, name: str, value: Any) -> None:
        frame.cells[name].cell_contents = value

    def delete_cell(self, frame: Frame, name: str) -> None:
        self.load_cell(frame, name)
        del frame.cells[name].cell_contents

    def operate(self, function: Callable[..., Any], *operands: Any) -> Any:
        return function(*operands)

    def truth_at_jump(self, frame: Frame, value: Any, target: int, wanted: bool) -> bool:
        return self.truth(value)

    def formatted(self, frame: Frame, value: Any, specification: str) -> str:
        return format(value, specification)

    def advance(self, iterator: Any) -> tuple[bool, Any]:
        try:
            return False, next(iterator)
        except StopIteration as stop:
            return True, stop.value

    def send(self, iterator: Any, value: Any) -> tuple[bool, Any]:
        try:
            return False, next(iterator) if value is None else self.call(iterator.send, (value,), {})
        except StopIteration as stop:
            return True, stop.value

    def drain(self, value: Any, is_hinted: bool = False) -> list[Any]:
        return list(value)

    def items_of(self, mapping: Any) -> dict[Any, Any]:
        return {key: mapping[key] for key in mapping.keys()}  # noqa: SIM118  (a mapping need not be iterable)

    def as_key(self, value: Any, table: Any = None) -> Any:
        return value

    def change(self, container: Any, method: str, *args: Any) -> None:
        getattr(container, method)(*args)


# --- builtins that look at the frame that calls them ------------------------------------------------------------------


def _variables(frame: Frame) -> dict[str, Any]:
    cells = {name: cell.cell_contents for name, cell in frame.cells.items() if is_bound(cell)}
    return {**frame.locals, **cells}


#: Functions written in C look at no frame but for a few; a class may have an ``__init__`` of the user's.
_BLIND = (types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType, types.WrapperDescriptorType)
_SEEING = frozenset(
    {
        *(locals, globals, vars, dir, eval, exec, compile),
        *(sys._getframe, warnings.warn, *map(vars(sys).get, ("_getframemodulename",))),
    }
)
