"""``match`` statements."""

from __future__ import annotations

from typing import Any

from dovetail.frontend.code.frame import Frame, Instruction
from dovetail.frontend.instructions.shared import TABLE, handles, pop_many, pushes
from dovetail.frontend.protocol import FrameRunner

SEQUENCE_FLAG = 1 << 5
MAPPING_FLAG = 1 << 6
MATCHES_ITSELF_FLAG = 1 << 22


TABLE["GET_LEN"] = pushes(lambda interpreter, frame, item: interpreter.call(len, (frame.stack[-1],), {}))


@handles("MATCH_MAPPING")
def match_mapping(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """Whether the subject is a mapping."""
    frame.stack.append(bool(type(frame.stack[-1]).__flags__ & MAPPING_FLAG))


@handles("MATCH_SEQUENCE")
def match_sequence(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """Whether the subject is a sequence."""
    frame.stack.append(bool(type(frame.stack[-1]).__flags__ & SEQUENCE_FLAG))


@handles("MATCH_KEYS")
def match_keys(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """The values of keys of a mapping; None where one is missing."""
    subject, keys = frame.stack[-2:]
    look_up = interpreter.load_attribute(subject, "get")
    missing = object()
    found: list[Any] = []
    seen: set[Any] = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"mapping pattern checks duplicate key ({key!r})")
        seen.add(key)
        value = interpreter.call(look_up, (key, missing), {})
        if value is missing:
            frame.stack.append(None)
            return
        found.append(value)
    frame.stack.append(tuple(found))


def _positional_names(interpreter: FrameRunner, kind: type, count: int) -> tuple[str, ...] | None:
    """The attributes that positional patterns stand for; None where the one pattern stands for the subject itself."""
    try:
        names = interpreter.load_attribute(kind, "__match_args__")
    except AttributeError:
        if kind.__flags__ & MATCHES_ITSELF_FLAG:
            if count == 1:
                return None
            raise TypeError(f"{kind.__name__}() accepts 1 positional sub-pattern ({count} given)") from None
        names = ()
    if type(names) is not tuple:
        raise TypeError(f"{kind.__name__}.__match_args__ must be a tuple (got {type(names).__name__})")
    if len(names) < count:
        plural = "" if len(names) == 1 else "s"
        raise TypeError(f"{kind.__name__}() accepts {len(names)} positional sub-pattern{plural} ({count} given)")
    for name in names[:count]:
        if type(name) is not str:
            raise TypeError(f"__match_args__ elements must be strings (got {type(name).__name__})")
    return names[:count]


@handles("MATCH_CLASS")
def match_class(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """The attributes of an instance that patterns ask for; None for an instance of another class."""
    subject, kind, names = pop_many(frame, 3)
    if not isinstance(kind, type):
        raise TypeError("called match pattern must be a class")
    if not interpreter.truth(interpreter.call(isinstance, (subject, kind), {})):
        frame.stack.append(None)
        return
    found: list[Any] = []
    if instruction.arg:
        positional = _positional_names(interpreter, kind, instruction.arg)
        if positional is None:
            found.append(subject)
        else:
            names = (*positional, *names)
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise TypeError(f"{kind.__name__}() got multiple sub-patterns for attribute {name!r}")
        seen.add(name)
        try:
            found.append(interpreter.load_attribute(subject, name))
        except AttributeError:
            frame.stack.append(None)
            return
    frame.stack.append(tuple(found))
