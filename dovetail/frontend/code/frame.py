"""One activation of a Python function: code, locals, cells, stack and the next instruction."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dovetail.errors import Interruption, UnsupportedVersionError, UserLocation


class Null:
    """The value that PUSH_NULL pushes."""

    def __repr__(self) -> str:
        return "NULL"


NULL = Null()


class Break(Interruption):
    """The program does something that cannot be captured.

    Where the graph cannot be broken here, the strategy ``otherwise`` is given up. ``varies``: the code that runs from here on sees
    sizes that vary, so that it is compiled for all sizes. ``is_clean``: the instruction has done nothing yet but take its operands,
    so that the graph may end before it without another capture.
    """

    def __init__(
        self,
        reason: str,
        advice: str = "",
        where: UserLocation | None = None,
        resumable: bool = True,
        otherwise: str = "",
        varies: bool = False,
        is_clean: bool = False,
    ) -> None:
        self.reason = reason
        self.advice = advice
        self.where = where
        self.resumable = resumable
        self.otherwise = otherwise
        self.varies = varies
        self.is_clean = is_clean
        # Instruction numbers of the frames that can go on after this break, outermost first; found while it is raised.
        self.steps: tuple[int, ...] | None = None
        super().__init__(reason)


class LockTaken(Break):
    """A lock is taken. Work under a lock is often done once (``if not ready: with lock: prepare()``)."""


class LetGo(Break):
    """An object is let go that has a ``__del__``: the capture may not refer to it any more when the call runs eagerly."""


class Stop(Interruption):
    """The capture has reached the instruction before which its graph ends; ``frames`` are those that go on, outermost first."""

    def __init__(self, frames: tuple[Frame, ...]) -> None:
        self.frames = frames
        super().__init__("the graph ends here")


class Unread:
    """An argument, or a local variable of a resumed function, that nothing has read yet: no guard, and it leaves as it came."""

    __slots__ = ("source", "value")

    def __init__(self, value: Any, source: Any) -> None:
        self.value = value
        self.source = source


@dataclass(frozen=True)
class Return:
    """The frame is done."""

    value: Any


@dataclass(frozen=True)
class Yield:
    """The frame is suspended; what is sent in is pushed when it goes on."""

    value: Any


class Instruction(NamedTuple):
    """One instruction: ``arg`` is its argument as it is encoded, ``argval`` as it is meant (a name, a constant, an offset)."""

    opname: str
    opcode: int
    arg: int
    argval: Any
    offset: int
    positions: dis.Positions | None
    is_jump_target: bool


@dataclass(frozen=True)
class ExceptionEntry:
    """One row of a code object's exception table; positions are indices into the instruction list."""

    start: int
    end: int
    target: int
    depth: int
    push_position: bool


@dataclass(frozen=True)
class Decoded:
    """Instructions of a code object with jump targets as indices."""

    instructions: tuple[Instruction, ...]
    index_of: Mapping[int, int]
    exceptions: tuple[ExceptionEntry, ...]
    # Variables that may be in a cell; in an inlined comprehension (3.12 on) a plain variable can have such a name too.
    shared_names: frozenset[str]


def unknown_instruction(
    code: types.CodeType, instruction: Instruction | None = None
) -> Break | UnsupportedVersionError:
    """The exception for code that this Python has not made, or for an instruction that this package does not know.

    The former is no :class:`Break`: run for real, it can end the process.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if instruction is None or instruction.opname.startswith("<"):
        return UnsupportedVersionError(
            f"the code of {code.co_qualname} is not code of Python {version}",
            advice="compile it from its source with this Python",
        )
    return Break(
        f"{code.co_qualname} has an instruction that is not interpreted ({instruction.opname})",
        "keep except*, type parameters and asynchronous code outside of the function",
    )


@functools.lru_cache(maxsize=4096)
def _location(code: types.CodeType, line: int, module: str) -> UserLocation:
    return UserLocation.of(code, line, module)


@functools.lru_cache(maxsize=4096)
def decode(code: types.CodeType) -> Decoded:
    """Decode a code object once; the cache holds the 4096 latest."""
    try:
        instructions = tuple(
            Instruction(
                item.opname, item.opcode, item.arg or 0, item.argval, item.offset, item.positions, item.is_jump_target
            )
            for item in dis.get_instructions(code, show_caches=False)
            if item.opname != "EXTENDED_ARG"
        )
    except (IndexError, KeyError, ValueError) as error:
        # An argument that counts names or constants which are not there.
        raise unknown_instruction(code) from error
    if any(item.opname == "CACHE" for item in instructions):
        # Room that belongs to another instruction, as what this Python reads an operation as that it does not have.
        raise unknown_instruction(code)
    index_of: dict[int, int] = {}
    position = 0
    offsets = [item.offset for item in instructions]
    for offset in range(0, len(code.co_code) + 2, 2):
        while position < len(offsets) and offsets[position] < offset:
            position += 1
        index_of[offset] = position
    exceptions = tuple(
        ExceptionEntry(index_of[entry.start], index_of[entry.end], index_of[entry.target], entry.depth, entry.lasti)
        for entry in dis._parse_exception_table(code)  # type: ignore[attr-defined]
    )
    return Decoded(instructions, index_of, exceptions, frozenset(code.co_cellvars + code.co_freevars))


class Frame:
    """A function being interpreted.

    ``direct`` says that its result is pushed on the caller's stack by the caller's current instruction and goes nowhere else,
    so that the caller can go on without that instruction being run again; ``step`` numbers the instruction that runs now.
    """

    __slots__ = (
        *("cells", "code", "current_exceptions", "decoded", "direct", "function", "globals"),
        *("keyword_names", "locals", "position", "stack", "step"),
    )

    def __init__(self, function: types.FunctionType, local_values: dict[str, Any]) -> None:
        code = function.__code__
        self.function = function
        self.code = code
        self.decoded = decode(code)
        self.globals = function.__globals__
        self.locals = local_values
        self.stack: list[Any] = []
        self.position = 0
        self.direct = False
        self.step = 0
        self.keyword_names: tuple[str, ...] = ()
        self.current_exceptions: list[BaseException | None] = []
        self.cells: dict[str, types.CellType] = {}
        for name in code.co_cellvars:
            cell = types.CellType()
            if name in local_values:
                cell.cell_contents = local_values.pop(name)
            self.cells[name] = cell
        self.cells.update(zip(code.co_freevars, function.__closure__ or (), strict=True))

    def suspended_copy(self) -> Frame:
        """This frame as a generator's own, about to run the next instruction."""
        copy = object.__new__(Frame)
        for name in Frame.__slots__:
            setattr(copy, name, getattr(self, name))
        # The first ``next`` sends None; from Python 3.15 on, a generator may have begun with its iterator.
        copy.stack = [*self.stack, None]
        copy.position = self.position + 1
        copy.current_exceptions = []
        copy.direct = False
        return copy

    def handler_of(self, position: int) -> ExceptionEntry | None:
        """The row of the exception table for an instruction, or None where an exception leaves the frame."""
        return next((entry for entry in self.decoded.exceptions if entry.start <= position < entry.end), None)

    def catches(self, entry: ExceptionEntry) -> bool:
        """Whether a handler is an ``except`` clause; those of ``with`` and ``finally`` raise again."""
        first, *following = self.decoded.instructions[entry.target :]
        if first.opname != "PUSH_EXC_INFO":
            return False
        preparing = ("LOAD_", "BUILD_", "COPY", "SWAP", "PUSH_NULL", "NOP")
        deciding = next((item.opname for item in following if not item.opname.startswith(preparing)), "")
        return deciding in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_TOP")

    def enter_handler(self, entry: ExceptionEntry, error: BaseException) -> None:
        """Go to a handler: the stack is cut to its depth and the exception pushed."""
        if self.stack and type(self.stack[-1]) is types.TracebackType:
            # Left by an instruction that raises again: the exception keeps its traceback, groups are told apart by it.
            error.__traceback__ = self.stack[-1]
        del self.stack[entry.depth :]
        if entry.push_position:
            self.stack.append(self.position)
        self.stack.append(error)
        self.position = entry.target

    def line(self) -> int:
        """The line number of the current instruction."""
        positions = [item.positions for item in self.decoded.instructions[self.position : self.position + 1]]
        line = positions[0].lineno if positions and positions[0] is not None else None
        return self.code.co_firstlineno if line is None else line

    def location(self, module: str = "") -> UserLocation:
        """The current place in the user's source; ``module`` is the path of the module whose code runs there."""
        return _location(self.code, self.line(), module)


def mark_native(error: BaseException) -> None:
    """Note on an exception that a tensor operation raised it, not the user's own code."""
    error._dovetail_native = True  # type: ignore[attr-defined]


def is_marked_native(error: BaseException) -> bool:
    """Whether :func:`mark_native` was called on an exception."""
    return bool(getattr(error, "_dovetail_native", False))
