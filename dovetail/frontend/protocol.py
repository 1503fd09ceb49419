"""The protocols of frame runners: all that instruction handlers and rules may ask for.

Two classes run frames: the interpreter that traces, and the :class:`Machine <dovetail.frontend.interpreter.machine.Machine>` that
runs them for real after a graph break. Instruction handlers ask only for :class:`FrameRunner`, which both are. Rules run while a
program is traced; they may ask for :class:`TracingInterpreter`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import collections

    import torch

    from dovetail.errors import UserLocation
    from dovetail.frontend.code.frame import Frame, Return, Unread, Yield
    from dovetail.frontend.code.points import FramePoint
    from dovetail.frontend.effects.journal import EffectJournal
    from dovetail.frontend.values.values import Values
    from dovetail.trace import Trace


State = TypeVar("State")


class FrameRunner(Protocol):
    """Runs frames: each method is the meaning of one thing that bytecode does."""

    #: The frames that run, outermost first.
    frames: list[Frame]

    # --- frames -------------------------------------------------------------------------------------------------------

    def run_frame(self, frame: Frame, error: BaseException | None) -> Return | Yield:
        """Run a frame until it returns or yields; ``error`` is raised at the current instruction first."""

    def restorer(self, started: bool, point: FramePoint | None) -> Any:
        """Makes a generator that goes on for real from the live values of its frame."""

    def handled_exception(self) -> BaseException | None:
        """The exception that a bare ``raise`` raises again."""
        found = (frame.current_exceptions[-1] for frame in reversed(self.frames) if frame.current_exceptions)
        return next(found, None)

    def make_generator(self, frame: Frame) -> Any:
        """The generator object for a frame that starts with RETURN_GENERATOR."""

    def close_generator(self, generator: Any) -> None:
        """Close a generator that nothing refers to any more."""

    def created(self, value: Any) -> None:
        """Note that an object was made by the program."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False) -> Any:
        """``function(*args, **kwargs)``; ``direct``: its result is pushed on the frame's stack and goes nowhere else."""

    # --- names --------------------------------------------------------------------------------------------------------

    def first_read(self, value: Unread) -> Any:
        """A local variable of a resumed function that is read for the first time."""

    def load_global(self, frame: Frame, name: str) -> Any:
        """A global or builtin name."""

    def store_global(self, frame: Frame, name: str, value: Any) -> None:
        """Write a global name."""

    def delete_global(self, frame: Frame, name: str) -> None:
        """Delete a global name."""

    def load_cell(self, frame: Frame, name: str) -> Any:
        """The content of a closure cell."""

    def store_cell(self, frame: Frame, name: str, value: Any) -> None:
        """Write a closure cell."""

    def delete_cell(self, frame: Frame, name: str) -> None:
        """Empty a closure cell."""

    # --- attributes, items, operators ---------------------------------------------------------------------------------

    def load_attribute(self, target: Any, name: str) -> Any:
        """``target.name``."""

    def store_attribute(self, target: Any, name: str, value: Any) -> None:
        """``target.name = value``."""

    def delete_attribute(self, target: Any, name: str) -> None:
        """``del target.name``."""

    def load_item(self, target: Any, key: Any) -> Any:
        """``target[key]``."""

    def store_item(self, target: Any, key: Any, value: Any) -> None:
        """``target[key] = value``."""

    def delete_item(self, target: Any, key: Any) -> None:
        """``del target[key]``."""

    def operate(self, function: Callable[..., Any], *operands: Any) -> Any:
        """An operator, by its function of the module ``operator``."""

    def compared(self, left: Any, right: Any) -> bool:
        """Whether two objects that were compared by identity, and are not the same, stand for one."""

    def truth(self, value: Any) -> bool:
        """``bool(value)``."""

    def truth_at_jump(self, frame: Frame, value: Any, target: int, wanted: bool) -> bool:
        """The truth of a value for a jump to ``target`` where it is ``wanted``."""

    def formatted(self, frame: Frame, value: Any, specification: str) -> str:
        """``format(value, specification)``, which is pushed next."""

    # --- iteration and containers -------------------------------------------------------------------------------------

    def iterate(self, value: Any) -> Any:
        """``iter(value)``."""

    def advance(self, iterator: Any) -> tuple[bool, Any]:
        """One step of an iterator: (True, return value) at its end, else (False, item)."""

    def send(self, iterator: Any, value: Any) -> tuple[bool, Any]:
        """One step of ``yield from``."""

    def drain(self, value: Any, is_hinted: bool = False) -> list[Any]:
        """All items of an iterable; ``is_hinted``: Python asks for their number first."""

    def items_of(self, mapping: Any) -> dict[Any, Any]:
        """A mapping as a plain dictionary."""

    def as_key(self, value: Any, table: Any = None) -> Any:
        """A value that is to be hashed, as ``table`` has it."""

    def change(self, container: Any, method: str, *args: Any) -> None:
        """Call a method of a list, dictionary or set that an instruction builds."""


class TracingInterpreter(FrameRunner, Protocol):
    """The interpreter that traces, as rules see it."""

    trace: Trace
    #: Where objects came from, and the guards that reading them needs.
    values: Values
    #: Writes to objects that existed before the capture.
    effects: EffectJournal
    #: How many times each loop over a range has begun, by code and position.
    loops: collections.Counter[tuple[types.CodeType, int]]

    def locate(self) -> UserLocation | None:
        """The innermost line outside of torch."""

    def state(self, kind: Callable[[TracingInterpreter], State]) -> State:
        """The object of a class that a rule keeps for the length of this capture; made when it is first asked for."""

    def is_created(self, value: Any) -> bool:
        """Whether an object was made by the program while it was traced."""

    # --- calls --------------------------------------------------------------------------------------------------------

    def run_function(
        self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False
    ) -> Any:
        """Interpret a Python function, whatever the rules say of it."""

    def call_torch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch under the trace's modes; rules for this very function are not asked again."""

    def call_guarded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``call_torch``, with guards on what the function has read."""

    def call_native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a builtin function or class with its own meaning; :class:`Break` where nobody could guard what it reads."""

    def native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hands_on: bool = False) -> Any:
        """Run native code that is known to be pure. ``hands_on``: it calls its callable arguments by the interpreter."""

    def native_argument(self, value: Any) -> Any:
        """A value as native code may have it: what it could call goes through the interpreter."""

    def called_argument(self, value: Any) -> Any:
        """An argument that native code calls: modules, classes and callable objects are interpreted too."""

    def trampoline(self, function: Any) -> Callable[..., Any]:
        """A plain function that native code may call: it goes through the interpreter."""

    def call_container_method(self, owner: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of a list, dictionary or set, journalled and guarded."""

    def call_plain_module(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False
    ) -> Any:
        """``torch.nn.Module.__call__(module, ...)``, whatever the module's own class makes of a call."""

    def call_module_impl(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False
    ) -> Any:
        """Call the module's hooks and its forward."""

    def make_instance(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the work of ``type.__call__``."""

    # --- reading ------------------------------------------------------------------------------------------------------

    def load_default_attribute(self, target: Any, name: str) -> Any:
        """Do the work of ``object.__getattribute__`` and ``__getattr__``."""

    def store_default_attribute(self, target: Any, name: str, value: Any) -> None:
        """Do the work of ``object.__setattr__``."""

    def search(self, container: Any, name: str, args: tuple[Any, ...]) -> Any:
        """``count``, ``index`` or ``remove`` of a list or tuple, with the items' own methods interpreted."""

    def as_index(self, key: Any) -> Any:
        """An index of a list, or a slice of indices, with the user's own ``__index__`` interpreted."""

    def called_length(self, method: types.FunctionType, value: Any) -> Any:
        """The length that a class's own ``__len__`` gives, which may be symbolic."""

    def derive(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """The result of a pure function of numbers, one of them symbolic; NotImplemented where torch's symbols compute it."""

    # --- guards -------------------------------------------------------------------------------------------------------

    def guard_length(self, value: Any) -> None:
        """Guard how many items a container has."""

    def guard_class_item(self, owner: type, name: str, found: Any) -> None:
        """Guard what a class has under a name."""

    def guard_not_shadowed(self, kind: type, owner: type | None, name: str, after: type | None = None) -> None:
        """Guard that no class gets such an attribute that is asked before ``owner``."""

    def guard_order(self, kind: type) -> None:
        """Guard which classes a class inherits from."""

    def guard_registration(self, kind: type, among: Any) -> None:
        """Guard whether a class counts as a subclass of an abstract one that it does not inherit from."""
