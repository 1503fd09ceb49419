"""What instructions mean, whatever version encodes them."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

from dovetail.frontend.code.frame import NULL, Frame, Instruction, Return, Unread, Yield
from dovetail.frontend.protocol import FrameRunner

Handler = Callable[[FrameRunner, Frame, Instruction], int | Return | Yield | None]
"""None: go on; a number: jump to that instruction; else the frame ends or is suspended."""

TABLE: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler under opcode names that mean the same in every supported version."""

    def register(handler: Handler) -> Handler:
        for name in names:
            TABLE[name] = handler
        return handler

    return register


def pop_many(frame: Frame, count: int) -> list[Any]:
    """Pop ``count`` values, the deepest first."""
    if count == 0:
        return []
    values = frame.stack[-count:]
    del frame.stack[-count:]
    return values


@handles("NOP", "RESUME", "CACHE", "COPY_FREE_VARS")
def no_operation(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """Set-up that :class:`Frame` has done already."""


@handles("MAKE_CELL")
def make_cell(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    """A cell for a variable of an inlined comprehension; those at a function's start :class:`Frame` has made."""
    frame.cells.setdefault(instruction.argval, types.CellType())


@handles("POP_TOP")
def pop_top(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.pop()


@handles("PUSH_NULL")
def push_null(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(NULL)


@handles("COPY")
def copy(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(frame.stack[-instruction.arg])


@handles("SWAP")
def swap(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    stack = frame.stack
    stack[-1], stack[-instruction.arg] = stack[-instruction.arg], stack[-1]


# --- names ------------------------------------------------------------------------------------------------------------


@handles("LOAD_CONST")
def load_const(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(instruction.argval)


def unbound_variable(code: types.CodeType, name: str) -> NameError:
    """The error of a variable that has no value."""
    if name in code.co_freevars:
        return NameError(
            f"cannot access free variable {name!r} where it is not associated with a value in enclosing scope"
        )
    return UnboundLocalError(f"cannot access local variable {name!r} where it is not associated with a value")


def read_variable(interpreter: FrameRunner, frame: Frame, name: str) -> Any:
    """A local variable; from 3.12 on also the cell that stands in its place, which is what closures are made of."""
    value = frame.locals.get(name, NULL)
    if value is NULL:
        cell = frame.cells.get(name)
        if cell is None:
            raise unbound_variable(frame.code, name)
        return cell
    if type(value) is Unread:
        value = frame.locals[name] = interpreter.first_read(value)
    return value


def write_variable(frame: Frame, name: str, value: Any) -> None:
    """Write a local variable, or give a cell or "unbound" (NULL) back that an inlined comprehension had put aside."""
    if name not in frame.decoded.shared_names:
        if value is NULL:
            frame.locals.pop(name, None)
        else:
            frame.locals[name] = value
        return
    frame.locals.pop(name, None)
    frame.cells.pop(name, None)
    if isinstance(value, types.CellType):
        frame.cells[name] = value
    elif value is not NULL:
        frame.locals[name] = value


@handles("LOAD_FAST", "LOAD_FAST_CHECK")
def load_fast(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(read_variable(interpreter, frame, instruction.argval))


@handles("STORE_FAST")
def store_fast(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    write_variable(frame, instruction.argval, frame.stack.pop())


@handles("DELETE_FAST")
def delete_fast(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    name = instruction.argval
    if name not in frame.locals:
        raise unbound_variable(frame.code, name)
    del frame.locals[name]


@handles("LOAD_DEREF")
def load_deref(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(interpreter.load_cell(frame, instruction.argval))


@handles("STORE_DEREF")
def store_deref(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    interpreter.store_cell(frame, instruction.argval, frame.stack.pop())


@handles("DELETE_DEREF")
def delete_deref(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    interpreter.delete_cell(frame, instruction.argval)


@handles("LOAD_CLOSURE")
def load_closure(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(frame.cells[instruction.argval])


@handles("STORE_GLOBAL")
def store_global(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    interpreter.store_global(frame, instruction.argval, frame.stack.pop())


@handles("DELETE_GLOBAL")
def delete_global(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    interpreter.delete_global(frame, instruction.argval)


# --- attributes and items ---------------------------------------------------------------------------------------------


@handles("STORE_ATTR")
def store_attr(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    target = frame.stack.pop()
    interpreter.store_attribute(target, instruction.argval, frame.stack.pop())


@handles("DELETE_ATTR")
def delete_attr(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    interpreter.delete_attribute(frame.stack.pop(), instruction.argval)


@handles("BINARY_SUBSCR")
def binary_subscr(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    key = frame.stack.pop()
    frame.stack.append(interpreter.load_item(frame.stack.pop(), key))


@handles("STORE_SUBSCR")
def store_subscr(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value, target, key = pop_many(frame, 3)
    interpreter.store_item(target, key, value)


@handles("DELETE_SUBSCR")
def delete_subscr(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    target, key = pop_many(frame, 2)
    interpreter.delete_item(target, key)


# --- operators --------------------------------------------------------------------------------------------------------

BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    operator.add,
    operator.and_,
    operator.floordiv,
    operator.lshift,
    operator.matmul,
    operator.mul,
    operator.mod,
    operator.or_,
    operator.pow,
    operator.rshift,
    operator.sub,
    operator.truediv,
    operator.xor,
    operator.iadd,
    operator.iand,
    operator.ifloordiv,
    operator.ilshift,
    operator.imatmul,
    operator.imul,
    operator.imod,
    operator.ior,
    operator.ipow,
    operator.irshift,
    operator.isub,
    operator.itruediv,
    operator.ixor,
)

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}


@handles("BINARY_OP")
def binary_op(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    right = frame.stack.pop()
    left = frame.stack.pop()
    frame.stack.append(interpreter.operate(BINARY[instruction.arg], left, right))


@handles("COMPARE_OP")
def compare_op(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    right = frame.stack.pop()
    left = frame.stack.pop()
    frame.stack.append(interpreter.operate(COMPARE[instruction.argval], left, right))


@handles("IS_OP")
def is_op(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    right = frame.stack.pop()
    left = frame.stack.pop()
    if left is not right:
        interpreter.compared(left, right)
    frame.stack.append((left is right) ^ bool(instruction.arg))


@handles("CONTAINS_OP")
def contains_op(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    container = frame.stack.pop()
    item = frame.stack.pop()
    found = interpreter.truth(interpreter.operate(operator.contains, container, item))
    frame.stack.append(found ^ bool(instruction.arg))


@handles("UNARY_NOT")
def unary_not(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(not interpreter.truth(frame.stack.pop()))


@handles("UNARY_NEGATIVE")
def unary_negative(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(interpreter.operate(operator.neg, frame.stack.pop()))


@handles("UNARY_POSITIVE")
def unary_positive(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(interpreter.operate(operator.pos, frame.stack.pop()))


@handles("UNARY_INVERT")
def unary_invert(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(interpreter.operate(operator.invert, frame.stack.pop()))


# --- containers -------------------------------------------------------------------------------------------------------


@handles("BUILD_TUPLE")
def build_tuple(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(tuple(pop_many(frame, instruction.arg)))


@handles("BUILD_LIST")
def build_list(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(pop_many(frame, instruction.arg))


@handles("BUILD_SET")
def build_set(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append({interpreter.as_key(item) for item in pop_many(frame, instruction.arg)})


@handles("BUILD_MAP")
def build_map(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    values = pop_many(frame, 2 * instruction.arg)
    frame.stack.append(dict(zip(map(interpreter.as_key, values[::2]), values[1::2], strict=True)))


@handles("BUILD_CONST_KEY_MAP")
def build_const_key_map(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    keys = frame.stack.pop()
    frame.stack.append(dict(zip(keys, pop_many(frame, instruction.arg), strict=True)))


@handles("BUILD_STRING")
def build_string(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append("".join(pop_many(frame, instruction.arg)))


@handles("BUILD_SLICE")
def build_slice(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(slice(*pop_many(frame, instruction.arg)))


@handles("LIST_EXTEND")
def list_extend(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    values = frame.stack.pop()
    kind = type(values)
    if not hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"):
        raise TypeError(f"Value after * must be an iterable, not {kind.__name__}")
    interpreter.change(frame.stack[-instruction.arg], "extend", interpreter.drain(values, is_hinted=True))


@handles("LIST_APPEND")
def list_append(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value = frame.stack.pop()
    interpreter.change(frame.stack[-instruction.arg], "append", value)


@handles("SET_UPDATE")
def set_update(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    values = frame.stack.pop()
    interpreter.change(
        frame.stack[-instruction.arg], "update", [interpreter.as_key(item) for item in interpreter.drain(values)]
    )


@handles("SET_ADD")
def set_add(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value = frame.stack.pop()
    interpreter.change(frame.stack[-instruction.arg], "add", interpreter.as_key(value))


@handles("MAP_ADD")
def map_add(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    value = frame.stack.pop()
    key = frame.stack.pop()
    interpreter.change(frame.stack[-instruction.arg], "__setitem__", interpreter.as_key(key), value)


@handles("DICT_UPDATE")
def dict_update(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    values = frame.stack.pop()
    if not hasattr(type(values), "keys"):
        raise TypeError(f"{type(values).__name__!r} object is not a mapping")
    interpreter.change(frame.stack[-instruction.arg], "update", interpreter.items_of(values))


@handles("DICT_MERGE")
def dict_merge(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    values = frame.stack.pop()
    target = frame.stack[-instruction.arg]
    # Below the dictionary: the positional arguments, then the function (and before or behind it NULL, by version).
    below = frame.stack[-instruction.arg - 2]
    name = _function_name(frame.stack[-instruction.arg - 3] if below is NULL else below)
    if not hasattr(type(values), "keys"):
        raise TypeError(f"{name} argument after ** must be a mapping, not {type(values).__name__}")
    for key, value in interpreter.items_of(values).items():
        if key in target:
            raise TypeError(f"{name} got multiple values for keyword argument {key!r}")
        interpreter.change(target, "__setitem__", key, value)


def _function_name(function: Any) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(name, str):
        return str(function) if isinstance(function, type) else f"{type(function).__name__} object"
    return f"{name}()" if module in (None, "builtins") else f"{module}.{name}()"


@handles("LIST_TO_TUPLE")
def list_to_tuple(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(tuple(interpreter.drain(frame.stack.pop())))


def _unpacked(interpreter: FrameRunner, value: Any) -> Any:
    try:
        return interpreter.iterate(value)
    except TypeError as error:
        if hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__"):
            raise
        raise TypeError(f"cannot unpack non-iterable {type(value).__name__} object") from error


@handles("UNPACK_SEQUENCE")
def unpack_sequence(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    iterator = _unpacked(interpreter, frame.stack.pop())
    expected = instruction.arg
    values: list[Any] = []
    while True:
        done, value = interpreter.advance(iterator)
        if done:
            break
        if len(values) == expected:
            raise ValueError(f"too many values to unpack (expected {expected})")
        values.append(value)
    if len(values) < expected:
        raise ValueError(f"not enough values to unpack (expected {expected}, got {len(values)})")
    frame.stack.extend(reversed(values))


@handles("UNPACK_EX")
def unpack_ex(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    values = interpreter.drain(_unpacked(interpreter, frame.stack.pop()))
    before, after = instruction.arg & 255, instruction.arg >> 8
    if len(values) < before + after:
        raise ValueError(f"not enough values to unpack (expected at least {before + after}, got {len(values)})")
    middle = len(values) - after
    frame.stack.extend(reversed([*values[:before], values[before:middle], *values[middle:]]))


@handles("GET_LEN")
def get_len(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(interpreter.call(len, (frame.stack[-1],), {}))


# --- iteration and generators -----------------------------------------------------------------------------------------


@handles("GET_ITER")
def get_iter(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(interpreter.iterate(frame.stack.pop()))


@handles("GET_YIELD_FROM_ITER")
def get_yield_from_iter(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    frame.stack.append(interpreter.iterate(frame.stack.pop()))


@handles("YIELD_VALUE")
def yield_value(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Yield:
    return Yield(frame.stack.pop())


@handles("RETURN_VALUE")
def return_value(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Return:
    return Return(frame.stack.pop())


@handles("RETURN_GENERATOR")
def return_generator(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> Return:
    return Return(interpreter.make_generator(frame))


# --- functions, imports, exceptions -----------------------------------------------------------------------------------


def new_function(interpreter: FrameRunner, frame: Frame, code: types.CodeType, closure: Any) -> types.FunctionType:
    """A new function object, with the frame's globals."""
    function = types.FunctionType(code, frame.globals, code.co_name, None, closure)
    function.__qualname__ = code.co_qualname
    interpreter.created(function)
    return function


def set_function_part(function: types.FunctionType, part: int, value: Any) -> None:
    """Give a new function its positional defaults (1), keyword-only defaults (2) or annotations (4)."""
    if part == 1:
        function.__defaults__ = value
    elif part == 2:
        function.__kwdefaults__ = value
    else:
        pairs = value if isinstance(value, dict) else dict(zip(value[::2], value[1::2], strict=True))
        function.__annotations__ = pairs


def call_with_names(interpreter: FrameRunner, function: Any, values: list[Any], names: tuple[str, ...]) -> Any:
    """Call a function; the last of the values are keyword arguments with these names."""
    count = len(values) - len(names)
    keywords = dict(zip(names, values[count:], strict=True))
    return interpreter.call(function, tuple(values[:count]), keywords, direct=True)


def call_with_star(interpreter: FrameRunner, function: Any, args: Any, kwargs: Any) -> Any:
    """``function(*args, **kwargs)``."""
    if not hasattr(type(args), "__iter__") and not hasattr(type(args), "__getitem__"):
        name, kind = _function_name(function), type(args).__name__
        raise TypeError(f"{name} argument after * must be an iterable, not {kind}")
    if not hasattr(type(kwargs), "keys"):
        name, kind = _function_name(function), type(kwargs).__name__
        raise TypeError(f"{name} argument after ** must be a mapping, not {kind}")
    args = tuple(interpreter.drain(args, is_hinted=True))
    keywords = dict(interpreter.items_of(kwargs))
    if not all(isinstance(key, str) for key in keywords):
        raise TypeError("keywords must be strings")
    return interpreter.call(function, args, keywords, direct=True)


@handles("IMPORT_NAME")
def import_name(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    level, names = pop_many(frame, 2)
    frame.stack.append(interpreter.import_module(frame, instruction.argval, names, level))


@handles("IMPORT_FROM")
def import_from(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    try:
        value = interpreter.load_attribute(frame.stack[-1], instruction.argval)
    except AttributeError as error:
        raise ImportError(f"cannot import name {instruction.argval!r}") from error
    frame.stack.append(value)


# --- formatting -------------------------------------------------------------------------------------------------------


@handles("FORMAT_VALUE")
def format_value(interpreter: FrameRunner, frame: Frame, instruction: Instruction) -> None:
    specification = frame.stack.pop() if instruction.arg & 4 else ""
    value = frame.stack.pop()
    convert = (None, str, repr, ascii)[instruction.arg & 3]
    if convert is not None:
        value = interpreter.call(convert, (value,), {})
    append_text(interpreter, frame, value, specification)


def append_text(interpreter: FrameRunner, frame: Frame, value: Any, specification: str) -> None:
    """Push ``format(value, specification)``."""
    frame.stack.append(interpreter.formatted(frame, value, specification))
