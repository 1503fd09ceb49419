"""A generator whose frame an interpreter runs: the tracing one, or the machine that runs frames for real."""

from __future__ import annotations

import collections.abc
import itertools
import sys
import types
from typing import Any

from dovetail.errors import Interruption
from dovetail.frontend.code.frame import NULL, Frame, Yield
from dovetail.frontend.code.points import frame_values, is_bound
from dovetail.frontend.protocol import FrameRunner

#: Values in containers that are searched for generators.
_MOST_LOOKED_AT = 1000


class InterpretedGenerator(collections.abc.Generator[Any, Any, Any]):
    """A generator whose frame the interpreter runs. To the program it is a generator like any other."""

    __class__ = types.GeneratorType  # type: ignore[assignment]
    gi_running = property(lambda self: self._running)
    gi_suspended = property(lambda self: self._started and self._frame is not None and not self._running)
    # Variables that nothing reads any more may be gone, so it does not show them.
    gi_frame = property(lambda self: self._frame and types.SimpleNamespace(f_code=self._frame.code))

    def __init__(self, interpreter: FrameRunner, frame: Frame | None, started: bool = False) -> None:
        self._interpreter = interpreter
        self.gi_code = frame and frame.code
        self.__name__, self.__qualname__ = (frame.code.co_name, frame.code.co_qualname) if frame else ("generator",) * 2
        self._frame: Frame | None = frame
        self._started = started
        self._running = False

    @property
    def gi_state(self) -> str:
        """The state, as ``inspect.getgeneratorstate`` asks for it from Python 3.15 on."""
        waiting = "SUSPENDED" if self._started else "CREATED"
        return "GEN_" + ("RUNNING" if self._running else "CLOSED" if self._frame is None else waiting)

    def __repr__(self) -> str:
        return f"<generator object {self.__qualname__} at {id(self):#x}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle 'generator' object")

    def send(self, value: Any) -> Any:
        """Go on with ``value`` as the result of the yield."""
        if self._frame is None:
            raise StopIteration
        if self._started:
            self._frame.stack.append(value)
        elif value is not None:
            raise TypeError("can't send non-None value to a just-started generator")
        self._started = True
        return self._go_on(None)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        """Raise an exception at the yield."""
        error = kind
        if not isinstance(kind, BaseException) or value is not None:
            # A generator that has not begun raises what it is given, as Python takes it, and is then done.
            thrower: Any = (None for _ in ())
            try:
                thrower.throw(kind, *[item for item in (value, traceback) if item is not None])
            except BaseException as thrown:
                if thrower.gi_frame is not None:
                    raise
                # A StopIteration leaves a generator as the cause of a RuntimeError.
                error = (isinstance(kind, type) and issubclass(kind, StopIteration) and thrown.__cause__) or thrown
        frame = self._frame
        if frame is None:
            raise error
        self._started = True
        inner = self._delegate(frame)
        if inner is None:
            return self._go_on(error)
        try:
            name, args = ("close", ()) if isinstance(error, GeneratorExit) else ("throw", (error,))
            found, result = self._call_if_there(inner, name, *args)
        except Interruption:
            raise
        except BaseException as raised:  # noqa: BLE001  (the frame may have a handler for it)
            error = raised
        else:
            if found and name == "throw":
                return result
            return self._go_on(error)
        if isinstance(error, StopIteration) and sys.version_info < (3, 12):
            # Python 3.11 has no instruction for this: the end of the inner iterator is the value of the ``yield from``.
            frame.stack[-1] = error.value
            frame.position = frame.decoded.index_of[frame.decoded.instructions[frame.position - 2].argval]
            return self._go_on(None)
        return self._go_on(error)

    @staticmethod
    def _delegate(frame: Frame) -> Any:
        """The iterator of the ``yield from`` at which the frame stands, or None."""
        instruction = frame.decoded.instructions[frame.position]
        is_delegating = instruction.opname == "RESUME" and instruction.arg & 3 == 2
        return next(item for item in reversed(frame.stack) if item is not NULL) if is_delegating else None

    def _call_if_there(self, target: Any, name: str, *args: Any) -> tuple[bool, Any]:
        try:
            method = self._interpreter.load_attribute(target, name)
        except AttributeError:
            return False, None
        return True, self._interpreter.call(method, args, {})

    def close(self) -> Any:
        """Raise GeneratorExit at the yield; from Python 3.13 on the value is what the generator then returns."""
        if self._frame is None or not self._started:
            self._frame = None
            return None
        try:
            self.throw(GeneratorExit())
        except GeneratorExit:
            return None
        except StopIteration as stop:
            return stop.value if sys.version_info >= (3, 13) else None
        raise RuntimeError("generator ignored GeneratorExit")

    def _go_on(self, error: BaseException | None) -> Any:
        frame = self._frame
        assert frame is not None
        if self._running:
            raise ValueError("generator already executing")
        self._running = True
        # Where an exception is thrown in, Python has sent a None first: handlers of a ``yield from`` count on it.
        frame.stack += [] if error is None else [None]
        try:
            result = self._interpreter.run_frame(frame, error)
        except StopIteration as stop:
            self._frame = None
            raise RuntimeError("generator raised StopIteration") from stop
        except BaseException:
            self._frame = None
            raise
        finally:
            error = None
            self._running = False
        if isinstance(result, Yield):
            return result.value
        self._frame = None
        raise StopIteration() if result.value is None else StopIteration(result.value)

    def __del__(self) -> None:
        """Python closes a generator that nobody refers to any more, which runs its ``finally`` blocks."""
        if self.has_cleaning_up():
            self._interpreter.close_generator(self)

    def has_cleaning_up(self) -> bool:
        """Whether closing the generator now would run code of its own."""
        frame = self._frame
        if frame is None or not self._started:
            return False
        handler = frame.handler_of(frame.position - 1)
        while handler is not None and frame.decoded.instructions[handler.target].opname == "CLEANUP_THROW":
            # From Python 3.12 on, a ``yield from`` has a handler that passes on to the next one what is no StopIteration.
            handler = frame.handler_of(handler.target)
        # And every generator has one that turns a StopIteration into a RuntimeError.
        return handler is not None and frame.decoded.instructions[handler.target].opname != "CALL_INTRINSIC_1"

    def __recipe__(self) -> tuple[Any, list[Any]]:
        """Maker and parts of a generator that goes on outside of the trace; see :mod:`dovetail.runtime.recipe_builder`."""
        if self._frame is None:
            return self._interpreter.restorer(self._started, None), []
        point, values = frame_values(self._frame)
        return self._interpreter.restorer(self._started, point), values


def cleans_up(value: object) -> bool:
    """Whether a live value is, or holds, a generator that runs code of its own once nobody refers to it any more.

    >>> cleans_up([1, (2, 3)])
    False
    """
    stack, seen = [value], 0
    while stack and seen < _MOST_LOOKED_AT:
        seen += 1
        item = stack.pop()
        # Not isinstance: an abstract class asks the object for its class, which may run code of the user's.
        if type(item) is InterpretedGenerator:
            if item.has_cleaning_up():
                return True
        elif type(item) in (list, tuple):
            stack += item[:_MOST_LOOKED_AT]  # type: ignore[index]
        elif type(item) is dict:
            stack += itertools.islice(item.values(), _MOST_LOOKED_AT)
        elif type(item) is types.CellType and is_bound(item):
            stack.append(item.cell_contents)
    return False
