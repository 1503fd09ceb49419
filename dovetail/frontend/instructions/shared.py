"""What instructions mean, whatever version encodes them."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dovetail.frontend.frame import NULL, Break
from dovetail.frontend.values import Unread, plain_numbers

TABLE: dict[str, Callable[[Any, Any, Any], Any]] = {}


@dataclass(frozen=True)
class Return:
    """The frame is done."""

    value: Any


@dataclass(frozen=True)
class Yield:
    """The frame is suspended; what is sent in is pushed when it goes on."""

    value: Any


def handles(*names: str) -> Callable[[Callable[[Any, Any, Any], Any]], Callable[[Any, Any, Any], Any]]:
    """Register a handler under opcode names that mean the same in every supported version."""

    def register(handler: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
        for name in names:
            TABLE[name] = handler
        return handler

    return register


def pop_many(frame: Any, count: int) -> list[Any]:
    """Pop ``count`` values, the deepest first."""
    if count == 0:
        return []
    values = frame.stack[-count:]
    del frame.stack[-count:]
    return values


@handles("NOP", "RESUME", "CACHE", "PRECALL", "MAKE_CELL", "COPY_FREE_VARS", "ASYNC_GEN_WRAP")
def no_operation(interpreter: Any, frame: Any, instruction: Any) -> None:
    """Set-up that :class:`Frame` has done already."""


@handles("POP_TOP")
def pop_top(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.pop()


@handles("PUSH_NULL")
def push_null(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(NULL)


@handles("COPY")
def copy(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(frame.stack[-instruction.arg])


@handles("SWAP")
def swap(interpreter: Any, frame: Any, instruction: Any) -> None:
    stack = frame.stack
    stack[-1], stack[-instruction.arg] = stack[-instruction.arg], stack[-1]


# --- names ------------------------------------------------------------------------------------------------------------


@handles("LOAD_CONST")
def load_const(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(instruction.argval)


@handles("LOAD_FAST", "LOAD_FAST_CHECK")
def load_fast(interpreter: Any, frame: Any, instruction: Any) -> None:
    name = instruction.argval
    if name not in frame.locals:
        raise UnboundLocalError(f"cannot access local variable {name!r} where it is not associated with a value")
    value = frame.locals[name]
    if type(value) is Unread:
        value = frame.locals[name] = interpreter.values.read(value.value, value.source)
    frame.stack.append(value)


@handles("STORE_FAST")
def store_fast(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.locals[instruction.argval] = frame.stack.pop()


@handles("DELETE_FAST")
def delete_fast(interpreter: Any, frame: Any, instruction: Any) -> None:
    if instruction.argval not in frame.locals:
        raise UnboundLocalError(f"cannot access local variable {instruction.argval!r}")
    del frame.locals[instruction.argval]


@handles("LOAD_DEREF", "LOAD_CLASSDEREF")
def load_deref(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(interpreter.load_cell(frame, instruction.argval))


@handles("STORE_DEREF")
def store_deref(interpreter: Any, frame: Any, instruction: Any) -> None:
    interpreter.store_cell(frame, instruction.argval, frame.stack.pop())


@handles("DELETE_DEREF")
def delete_deref(interpreter: Any, frame: Any, instruction: Any) -> None:
    interpreter.delete_cell(frame, instruction.argval)


@handles("LOAD_CLOSURE")
def load_closure(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(frame.cells[instruction.argval])


@handles("LOAD_NAME")
def load_name(interpreter: Any, frame: Any, instruction: Any) -> None:
    name = instruction.argval
    if name in frame.locals:
        frame.stack.append(frame.locals[name])
    else:
        frame.stack.append(interpreter.load_global(frame, name))


@handles("STORE_NAME")
def store_name(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.locals[instruction.argval] = frame.stack.pop()


@handles("STORE_GLOBAL")
def store_global(interpreter: Any, frame: Any, instruction: Any) -> None:
    interpreter.store_global(frame, instruction.argval, frame.stack.pop())


@handles("DELETE_GLOBAL")
def delete_global(interpreter: Any, frame: Any, instruction: Any) -> None:
    interpreter.delete_global(frame, instruction.argval)


# --- attributes and items ---------------------------------------------------------------------------------------------


@handles("STORE_ATTR")
def store_attr(interpreter: Any, frame: Any, instruction: Any) -> None:
    target = frame.stack.pop()
    interpreter.store_attribute(target, instruction.argval, frame.stack.pop())


@handles("DELETE_ATTR")
def delete_attr(interpreter: Any, frame: Any, instruction: Any) -> None:
    interpreter.delete_attribute(frame.stack.pop(), instruction.argval)


@handles("BINARY_SUBSCR")
def binary_subscr(interpreter: Any, frame: Any, instruction: Any) -> None:
    key = frame.stack.pop()
    frame.stack.append(interpreter.load_item(frame.stack.pop(), key))


@handles("STORE_SUBSCR")
def store_subscr(interpreter: Any, frame: Any, instruction: Any) -> None:
    value, target, key = pop_many(frame, 3)
    interpreter.store_item(target, key, value)


@handles("DELETE_SUBSCR")
def delete_subscr(interpreter: Any, frame: Any, instruction: Any) -> None:
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
def binary_op(interpreter: Any, frame: Any, instruction: Any) -> None:
    right = frame.stack.pop()
    left = frame.stack.pop()
    frame.stack.append(interpreter.operate(BINARY[instruction.arg], left, right))


@handles("COMPARE_OP")
def compare_op(interpreter: Any, frame: Any, instruction: Any) -> None:
    right = frame.stack.pop()
    left = frame.stack.pop()
    frame.stack.append(interpreter.operate(COMPARE[instruction.argval], left, right))


@handles("IS_OP")
def is_op(interpreter: Any, frame: Any, instruction: Any) -> None:
    right = frame.stack.pop()
    left = frame.stack.pop()
    frame.stack.append((left is right) ^ bool(instruction.arg))


@handles("CONTAINS_OP")
def contains_op(interpreter: Any, frame: Any, instruction: Any) -> None:
    container = frame.stack.pop()
    item = frame.stack.pop()
    frame.stack.append(bool(interpreter.operate(operator.contains, container, item)) ^ bool(instruction.arg))


@handles("UNARY_NOT")
def unary_not(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(not interpreter.truth(frame.stack.pop()))


@handles("UNARY_NEGATIVE")
def unary_negative(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(interpreter.operate(operator.neg, frame.stack.pop()))


@handles("UNARY_POSITIVE")
def unary_positive(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(interpreter.operate(operator.pos, frame.stack.pop()))


@handles("UNARY_INVERT")
def unary_invert(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(interpreter.operate(operator.invert, frame.stack.pop()))


# --- containers -------------------------------------------------------------------------------------------------------


@handles("BUILD_TUPLE")
def build_tuple(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(tuple(pop_many(frame, instruction.arg)))


@handles("BUILD_LIST")
def build_list(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(pop_many(frame, instruction.arg))


@handles("BUILD_SET")
def build_set(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append({plain_numbers(item) for item in pop_many(frame, instruction.arg)})


@handles("BUILD_MAP")
def build_map(interpreter: Any, frame: Any, instruction: Any) -> None:
    values = pop_many(frame, 2 * instruction.arg)
    frame.stack.append(dict(zip(map(plain_numbers, values[::2]), values[1::2], strict=True)))


@handles("BUILD_CONST_KEY_MAP")
def build_const_key_map(interpreter: Any, frame: Any, instruction: Any) -> None:
    keys = frame.stack.pop()
    frame.stack.append(dict(zip(keys, pop_many(frame, instruction.arg), strict=True)))


@handles("BUILD_STRING")
def build_string(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append("".join(pop_many(frame, instruction.arg)))


@handles("BUILD_SLICE")
def build_slice(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(slice(*pop_many(frame, instruction.arg)))


@handles("LIST_EXTEND")
def list_extend(interpreter: Any, frame: Any, instruction: Any) -> None:
    values = frame.stack.pop()
    interpreter.change(frame.stack[-instruction.arg], "extend", interpreter.drain(values))


@handles("LIST_APPEND")
def list_append(interpreter: Any, frame: Any, instruction: Any) -> None:
    value = frame.stack.pop()
    interpreter.change(frame.stack[-instruction.arg], "append", value)


@handles("SET_UPDATE")
def set_update(interpreter: Any, frame: Any, instruction: Any) -> None:
    values = frame.stack.pop()
    interpreter.change(frame.stack[-instruction.arg], "update", [plain_numbers(item) for item in interpreter.drain(values)])


@handles("SET_ADD")
def set_add(interpreter: Any, frame: Any, instruction: Any) -> None:
    value = frame.stack.pop()
    interpreter.change(frame.stack[-instruction.arg], "add", plain_numbers(value))


@handles("MAP_ADD")
def map_add(interpreter: Any, frame: Any, instruction: Any) -> None:
    value = frame.stack.pop()
    key = frame.stack.pop()
    interpreter.change(frame.stack[-instruction.arg], "__setitem__", plain_numbers(key), value)


@handles("DICT_UPDATE")
def dict_update(interpreter: Any, frame: Any, instruction: Any) -> None:
    values = frame.stack.pop()
    interpreter.change(frame.stack[-instruction.arg], "update", interpreter.items_of(values))


@handles("DICT_MERGE")
def dict_merge(interpreter: Any, frame: Any, instruction: Any) -> None:
    values = interpreter.items_of(frame.stack.pop())
    target = frame.stack[-instruction.arg]
    for key, value in values.items():
        if key in target:
            raise TypeError(f"got multiple values for keyword argument {key!r}")
        interpreter.change(target, "__setitem__", key, value)


@handles("LIST_TO_TUPLE")
def list_to_tuple(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(tuple(frame.stack.pop()))


@handles("UNPACK_SEQUENCE")
def unpack_sequence(interpreter: Any, frame: Any, instruction: Any) -> None:
    values = interpreter.drain(frame.stack.pop())
    if len(values) < instruction.arg:
        raise ValueError(f"not enough values to unpack (expected {instruction.arg}, got {len(values)})")
    if len(values) > instruction.arg:
        raise ValueError(f"too many values to unpack (expected {instruction.arg})")
    frame.stack.extend(reversed(values))


@handles("UNPACK_EX")
def unpack_ex(interpreter: Any, frame: Any, instruction: Any) -> None:
    values = interpreter.drain(frame.stack.pop())
    before, after = instruction.arg & 255, instruction.arg >> 8
    if len(values) < before + after:
        raise ValueError(f"not enough values to unpack (expected at least {before + after}, got {len(values)})")
    middle = len(values) - after
    frame.stack.extend(reversed([*values[:before], values[before:middle], *values[middle:]]))


@handles("GET_LEN")
def get_len(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(interpreter.call(len, (frame.stack[-1],), {}))


# --- iteration and generators -----------------------------------------------------------------------------------------


@handles("GET_ITER")
def get_iter(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(interpreter.iterate(frame.stack.pop()))


@handles("GET_YIELD_FROM_ITER")
def get_yield_from_iter(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(interpreter.iterate(frame.stack.pop()))


@handles("YIELD_VALUE")
def yield_value(interpreter: Any, frame: Any, instruction: Any) -> Yield:
    return Yield(frame.stack.pop())


@handles("RETURN_VALUE")
def return_value(interpreter: Any, frame: Any, instruction: Any) -> Return:
    return Return(frame.stack.pop())


@handles("RETURN_GENERATOR")
def return_generator(interpreter: Any, frame: Any, instruction: Any) -> Return:
    return Return(interpreter.make_generator(frame))


# --- functions, imports, exceptions -----------------------------------------------------------------------------------


def make_function(
    interpreter: Any, frame: Any, code: types.CodeType, closure: Any, annotations: Any, kwdefaults: Any, defaults: Any
) -> types.FunctionType:
    """A new function object, with the frame's globals."""
    function = types.FunctionType(code, frame.globals, code.co_name, defaults, closure)
    function.__kwdefaults__ = kwdefaults
    function.__qualname__ = code.co_qualname
    if annotations:
        pairs = (
            annotations
            if isinstance(annotations, dict)
            else dict(zip(annotations[::2], annotations[1::2], strict=True))
        )
        function.__annotations__ = pairs
    interpreter.created(function)
    return function


@handles("CALL_FUNCTION_EX")
def call_function_ex(interpreter: Any, frame: Any, instruction: Any) -> None:
    kwargs = interpreter.items_of(frame.stack.pop()) if instruction.arg & 1 else {}
    args = tuple(interpreter.drain(frame.stack.pop()))
    function = frame.stack.pop()
    if frame.stack and frame.stack[-1] is NULL:
        frame.stack.pop()
    frame.stack.append(interpreter.call(function, args, dict(kwargs), direct=True))


@handles("IMPORT_NAME")
def import_name(interpreter: Any, frame: Any, instruction: Any) -> None:
    level, names = pop_many(frame, 2)
    frame.stack.append(interpreter.import_module(frame, instruction.argval, names, level))


@handles("IMPORT_FROM")
def import_from(interpreter: Any, frame: Any, instruction: Any) -> None:
    try:
        value = interpreter.load_attribute(frame.stack[-1], instruction.argval)
    except AttributeError as error:
        raise ImportError(f"cannot import name {instruction.argval!r}") from error
    frame.stack.append(value)


@handles("LOAD_BUILD_CLASS")
def load_build_class(interpreter: Any, frame: Any, instruction: Any) -> None:
    raise Break("a class is defined inside the function", "move the class definition out of the function")


@handles("LOAD_ASSERTION_ERROR")
def load_assertion_error(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(AssertionError)


@handles("RAISE_VARARGS")
def raise_varargs(interpreter: Any, frame: Any, instruction: Any) -> None:
    if instruction.arg == 0:
        current = interpreter.handled_exception(frame)
        if current is None:
            raise RuntimeError("No active exception to reraise")
        raise current
    cause = frame.stack.pop() if instruction.arg == 2 else NULL
    error = frame.stack.pop()
    if isinstance(error, type):
        error = interpreter.call(error, (), {})
    if not isinstance(error, BaseException):
        raise TypeError("exceptions must derive from BaseException")
    if cause is not NULL:
        error.__cause__ = interpreter.call(cause, (), {}) if isinstance(cause, type) else cause  # type: ignore[assignment]
    raise error


@handles("PUSH_EXC_INFO")
def push_exc_info(interpreter: Any, frame: Any, instruction: Any) -> None:
    error = frame.stack.pop()
    frame.stack.append(frame.current_exceptions[-1] if frame.current_exceptions else None)
    frame.current_exceptions.append(error)
    frame.stack.append(error)


@handles("CHECK_EXC_MATCH")
def check_exc_match(interpreter: Any, frame: Any, instruction: Any) -> None:
    kind = frame.stack.pop()
    frame.stack.append(isinstance(frame.stack[-1], kind))


@handles("POP_EXCEPT")
def pop_except(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.pop()
    if frame.current_exceptions:
        frame.current_exceptions.pop()


@handles("RERAISE")
def reraise(interpreter: Any, frame: Any, instruction: Any) -> None:
    raise frame.stack.pop()


@handles("BEFORE_WITH")
def before_with(interpreter: Any, frame: Any, instruction: Any) -> None:
    manager = frame.stack.pop()
    leave = interpreter.load_special(manager, "__exit__")
    enter = interpreter.load_special(manager, "__enter__")
    frame.stack.append(leave)
    frame.stack.append(interpreter.call(enter, (), {}))


@handles("WITH_EXCEPT_START")
def with_except_start(interpreter: Any, frame: Any, instruction: Any) -> None:
    error = frame.stack[-1]
    leave = frame.stack[-4]
    frame.stack.append(interpreter.call(leave, (type(error), error, error.__traceback__), {}))


# --- formatting and matching ------------------------------------------------------------------------------------------


@handles("FORMAT_VALUE")
def format_value(interpreter: Any, frame: Any, instruction: Any) -> None:
    specification = frame.stack.pop() if instruction.arg & 4 else ""
    value = frame.stack.pop()
    convert = (None, str, repr, ascii)[instruction.arg & 3]
    if convert is not None:
        value = interpreter.call(convert, (value,), {})
    frame.stack.append(interpreter.call(format, (value, specification), {}))


@handles("MATCH_MAPPING")
def match_mapping(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(bool(type(frame.stack[-1]).__flags__ & (1 << 6)))


@handles("MATCH_SEQUENCE")
def match_sequence(interpreter: Any, frame: Any, instruction: Any) -> None:
    frame.stack.append(bool(type(frame.stack[-1]).__flags__ & (1 << 5)))


@handles("MATCH_KEYS")
def match_keys(interpreter: Any, frame: Any, instruction: Any) -> None:
    keys = frame.stack[-1]
    subject = interpreter.items_of(frame.stack[-2])
    frame.stack.append(tuple(subject[key] for key in keys) if all(key in subject for key in keys) else None)


@handles("MATCH_CLASS")
def match_class(interpreter: Any, frame: Any, instruction: Any) -> None:
    subject, kind, names = pop_many(frame, 3)
    if not isinstance(subject, kind):
        frame.stack.append(None)
        return
    count = instruction.arg
    found: list[Any] = []
    if count:
        if kind in (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple):
            found.append(subject)
        else:
            names = (*kind.__match_args__[:count], *names)
    for name in names:
        try:
            found.append(interpreter.load_attribute(subject, name))
        except AttributeError:
            frame.stack.append(None)
            return
    frame.stack.append(tuple(found))


@handles(
    "LOAD_LOCALS", "SETUP_ANNOTATIONS", "GET_AWAITABLE", "GET_AITER", "GET_ANEXT", "BEFORE_ASYNC_WITH", "END_ASYNC_FOR"
)
def refuse(interpreter: Any, frame: Any, instruction: Any) -> None:
    raise Break(f"the instruction {instruction.opname} cannot be captured", "keep async code outside of the function")
