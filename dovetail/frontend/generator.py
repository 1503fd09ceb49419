"""A generator whose frame an interpreter runs: the tracing one, or the machine that runs frames for real."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from typing import Any

from dovetail.frontend.frame import Frame
from dovetail.frontend.instructions import Yield
from dovetail.frontend.points import FramePoint, frame_values, unflatten


class InterpretedGenerator(collections.abc.Generator[Any, Any, Any]):
    """A generator whose frame the interpreter runs."""

    def __init__(self, interpreter: Any, frame: Frame | None, started: bool = False) -> None:
        self._interpreter = interpreter
        self._frame: Frame | None = frame
        self._started = started
        if frame is not None and not started and not frame.stack:
            frame.stack.append(None)

    def send(self, value: Any) -> Any:
        """Go on with ``value`` as the result of the yield."""
        if self._frame is None:
            raise StopIteration
        if self._started:
            self._frame.stack.append(value)
        self._started = True
        return self._go_on(None)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        """Raise an exception at the yield."""
        error = kind if isinstance(kind, BaseException) else (value if value is not None else kind())
        if self._frame is None:
            raise error
        self._started = True
        return self._go_on(error)

    def close(self) -> None:
        """Raise GeneratorExit at the yield."""
        if self._frame is None or not self._started:
            self._frame = None
            return
        try:
            self.throw(GeneratorExit())
        except (GeneratorExit, StopIteration):
            return
        raise RuntimeError("generator ignored GeneratorExit")

    def _go_on(self, error: BaseException | None) -> Any:
        frame = self._frame
        assert frame is not None
        try:
            result = self._interpreter.run_frame(frame, error)
        except BaseException:
            self._frame = None
            raise
        if isinstance(result, Yield):
            return result.value
        self._frame = None
        raise StopIteration(result.value)

    @property
    def frame(self) -> Frame | None:
        """The suspended frame; None once the generator has ended."""
        return self._frame

    @property
    def started(self) -> bool:
        """Whether the first item has been asked for."""
        return self._started

    def __recipe__(self) -> tuple[Any, list[Any]]:
        """How a generator is made again outside of the trace; see :mod:`dovetail.runtime.recipe`."""
        if self._frame is None:
            return RestoreGenerator(self._started, None), []
        point, values, _ = frame_values(self._frame, 0, 1)
        return RestoreGenerator(self._started, point), values


@dataclass(frozen=True)
class RestoreGenerator:
    """Makes a generator that goes on for real from the live values of its frame."""

    started: bool
    point: FramePoint | None

    def __call__(self, *values: Any) -> InterpretedGenerator:
        """The generator."""
        # The machine makes generators itself, so it imports this module.
        from dovetail.frontend.machine import Machine

        frame = unflatten((self.point,), values)[0] if self.point is not None else None
        return InterpretedGenerator(Machine(), frame, self.started)
