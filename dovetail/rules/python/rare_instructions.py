"""Instructions that few functions have: sets, targets with a star, ``import`` statements, class bodies."""

from __future__ import annotations

import builtins
import sys
from typing import Any

from dovetail.frontend.code.frame import Frame, Instruction
from dovetail.frontend.instructions.operations import unpacked
from dovetail.frontend.instructions.shared import TABLE, handles, pop_many, pushes
from dovetail.frontend.protocol import FrameRunner, TracingInterpreter
from dovetail.frontend.rules import Arguments, Keywords, rule
from dovetail.frontend.values.leaves import is_trusted
from dovetail.guards import Identity, ItemSource
from dovetail.rules.python.callables import is_in_library
from dovetail.torch_private import tracing as private_tracing

TABLE["BUILD_SET"] = pushes(lambda interpreter, frame, item: set(map(interpreter.as_key, pop_many(frame, item.arg))))
TABLE["LOAD_BUILD_CLASS"] = lambda interpreter, frame, item: frame.stack.append(builtins.__build_class__)


@handles("SET_ADD")
def set_add(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """Add the value on the stack to the set that a comprehension builds."""
    value = interpreter.as_key(frame.stack.pop())
    interpreter.change(frame.stack[-instruction.arg], "add", value)


@handles("SET_UPDATE")
def set_update(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """``{*values}``."""
    values = [interpreter.as_key(item) for item in interpreter.drain(frame.stack.pop())]
    interpreter.change(frame.stack[-instruction.arg], "update", values)


@handles("UNPACK_EX")
def unpack_ex(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """``first, *others = values``."""
    values = interpreter.drain(unpacked(interpreter, frame.stack.pop()))
    before, after = instruction.arg & 255, instruction.arg >> 8
    if len(values) < before + after:
        raise ValueError(f"not enough values to unpack (expected at least {before + after}, got {len(values)})")
    middle = len(values) - after
    frame.stack.extend(reversed([*values[:before], values[before:middle], *values[middle:]]))


# --- import -----------------------------------------------------------------------------------------------------------


@handles("IMPORT_NAME")
def import_name(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """The module of an ``import`` statement."""
    level, names = pop_many(frame, 2)
    arguments = (instruction.argval, frame.globals, None, names, level)
    frame.stack.append(interpreter.call(builtins.__import__, arguments, {}))


@handles("IMPORT_FROM")
def import_from(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """A name that is imported from a module."""
    try:
        value = interpreter.load_attribute(frame.stack[-1], instruction.argval)
    except AttributeError as error:
        raise ImportError(f"cannot import name {instruction.argval!r}") from error
    frame.stack.append(value)


@rule(builtins.__import__)
def _import(interpreter: TracingInterpreter, args: Arguments, kwargs: Keywords) -> Any:
    """The module must be loaded already, or load without touching tensors."""
    with private_tracing.disable_current_modes():
        found = builtins.__import__(*args, **kwargs)
    name = args[0] if args else kwargs["name"]
    level = args[4] if len(args) > 4 else kwargs.get("level", 0)
    module = sys.modules.get(name) if level == 0 else None
    if module is not None and not is_trusted(name) and not is_library_module(module):
        source = ItemSource(interpreter.values.pin(sys.modules, "sys.modules"), name)
        interpreter.values.guard(source, Identity(module), f"{name} was imported")
    return found


def is_library_module(module: Any) -> bool:
    """Whether a module is Python's own or belongs to an installed package: nobody puts another one in its place."""
    name = getattr(module, "__name__", None) or ""
    return name.split(".", 1)[0] in sys.stdlib_module_names or is_in_library(getattr(module, "__file__", None))
