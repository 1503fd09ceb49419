"""Small programs over the whole Python language. They need no torch: ``x`` is a tensor or a plain number.

:data:`CASES` is used by test_language.py (compiled against eager) and by machine_language.py (the frame machine against Python
itself, on interpreters that may have no torch).
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import math
import operator
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Case:
    """One program. ``breaks`` is a part of the reason why it cannot be one graph; None where it must be one."""

    name: str
    function: Callable[[Any], Any]
    breaks: str | None = None


CASES: list[Case] = []


def case(function: Any = None, *, breaks: str | None = None) -> Any:
    """Register a program."""
    if function is None:
        return lambda inner: case(inner, breaks=breaks)
    CASES.append(Case(function.__name__, function, breaks))
    return function


def source_case(since: tuple[int, int], text: str, breaks: str | None = None) -> None:
    """Register a program in the syntax of a newer Python: the last function that ``text`` defines."""
    if sys.version_info[:2] < since:
        return
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(text, namespace)
    function = [value for value in namespace.values() if isinstance(value, types.FunctionType)][-1]
    case(function, breaks=breaks)


def plain(value: Any) -> Any:
    """A result as something that can be compared: exceptions by type, text and chain; objects by class name and attributes."""
    if isinstance(value, BaseExceptionGroup):
        return (type(value).__name__, value.message, [plain(item) for item in value.exceptions])
    if isinstance(value, BaseException):
        chain = (plain(value.__cause__), plain(value.__context__), value.__suppress_context__)
        return (type(value).__name__, [plain(item) for item in value.args], chain)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, sorted(value, key=repr)]
    if hasattr(value, "__dict__") and type(value).__module__ == __name__ and not isinstance(value, enum.Enum):
        return (type(value).__name__, plain(vars(value)))
    return value


# --- generators -------------------------------------------------------------------------------------------------------


@case
def generator_in_a_loop(x: Any) -> Any:
    def steps(count: int) -> Iterator[Any]:
        for index in range(count):
            yield x * index

    total = x
    for item in steps(3):
        total = total + item
    return total


@case
def generator_send(x: Any) -> Any:
    def running() -> Any:
        total = x
        while True:
            received = yield total
            if received is None:
                return "done"
            total = total + received

    it = running()
    seen = [next(it), it.send(1), it.send(x)]
    try:
        it.send(None)
    except StopIteration as stop:
        seen.append(stop.value)
    return seen


@case
def generator_throw_and_close(x: Any) -> Any:
    log: list[Any] = []

    def body() -> Any:
        try:
            while True:
                try:
                    yield x
                except ValueError as error:
                    log.append(("caught", str(error)))
                    yield x * 3
        finally:
            log.append("closed")

    it = body()
    first = next(it)
    second = it.throw(ValueError("a"))
    third = next(it)
    it.close()
    with contextlib.suppress(StopIteration):
        next(it)
        log.append("not reached")
    return first, second, third, log


@case
def yield_from_values(x: Any) -> Any:
    def inner() -> Any:
        a = yield x
        b = yield x * 2
        return (a, b)

    def outer() -> Any:
        result = yield from inner()
        yield result
        yield from [x, x + 1]
        yield from (item * 2 for item in (1, 2))

    it = outer()
    return [next(it), it.send(5), it.send(6), *it]


@case
def yield_from_throw(x: Any) -> Any:
    def inner() -> Any:
        try:
            yield x
        except KeyError:
            yield x * 2
        return "inner"

    def outer() -> Any:
        result = yield from inner()
        yield result

    it = outer()
    first = next(it)
    second = it.throw(KeyError("k"))
    return first, second, next(it)


@case
def yield_from_throw_ends_inner(x: Any) -> Any:
    def inner() -> Any:
        try:
            yield x
        except KeyError:
            return "returned"

    def outer() -> Any:
        result = yield from inner()
        yield result

    it = outer()
    next(it)
    return it.throw(KeyError("k"))


@case
def yield_from_close(x: Any) -> Any:
    log: list[str] = []

    def inner() -> Any:
        try:
            yield x
        except GeneratorExit:
            log.append("inner exit")
            raise
        finally:
            log.append("inner finally")

    def outer() -> Any:
        try:
            yield from inner()
        finally:
            log.append("outer finally")

    it = outer()
    first = next(it)
    it.close()
    return first, log


class Delegate:
    """An iterator with ``send`` and ``throw`` of its own."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.log: list[Any] = []

    def __iter__(self) -> Delegate:
        return self

    def __next__(self) -> Any:
        self.log.append("next")
        return self.x

    def send(self, value: Any) -> Any:
        self.log.append(("send", value))
        return self.x * value

    def throw(self, error: BaseException) -> Any:
        self.log.append(("throw", type(error).__name__))
        raise StopIteration("result")


@case
def yield_from_own_iterator(x: Any) -> Any:
    delegate = Delegate(x)

    def outer() -> Any:
        result = yield from delegate
        yield result

    it = outer()
    return next(it), it.send(3), it.throw(KeyError("k")), delegate.log


@case
def stop_iteration_in_a_generator(x: Any) -> Any:
    def body() -> Any:
        yield x
        raise StopIteration("inside")

    seen = []
    try:
        for item in body():
            seen.append(item)
    except RuntimeError as error:
        return seen, str(error), type(error.__cause__).__name__
    return seen


@case
def generator_already_closed(x: Any) -> Any:
    it = (x * i for i in range(2))
    values = list(it)
    try:
        it.throw(ValueError("late"))
    except ValueError as error:
        return values, str(error), next(it, "end")
    return None


@case
def generator_expressions(x: Any) -> Any:
    rows = [[1, 2], [3, 4]]
    flat = (item for row in rows for item in row if item != 2)
    return (
        sum(item * x for item in flat),
        any(item > 3 for row in rows for item in row),
        max(i for r in rows for i in r),
    )


@case
def generator_ignores_exit(x: Any) -> Any:
    def body() -> Any:
        try:
            yield x
        except GeneratorExit:
            yield x * 2

    it = body()
    next(it)
    try:
        it.close()
    except RuntimeError as error:
        return str(error)
    return None


@contextlib.contextmanager
def noting(log: list[Any], name: str, swallow: bool = False) -> Iterator[str]:
    """A context manager that writes down what happens."""
    log.append(f"enter {name}")
    try:
        yield name
    except ValueError as error:
        log.append(f"error {name} {error}")
        if not swallow:
            raise
    finally:
        log.append(f"exit {name}")


@case
def context_managers(x: Any) -> Any:
    log: list[Any] = []
    with noting(log, "a") as a, noting(log, "b") as b:
        y = x * 2
    return y, a, b, log


@case
def context_manager_passes_exception(x: Any) -> Any:
    log: list[Any] = []
    try:
        with noting(log, "a"), noting(log, "b"):
            y = x * 2
            raise ValueError("v")
    except ValueError as error:
        log.append(("outside", str(error)))
    return y, log


@case
def context_manager_swallows(x: Any) -> Any:
    log: list[Any] = []
    with noting(log, "a"), noting(log, "b", swallow=True):
        x = x * 2
        raise ValueError("v")
    return x, log


@case
def context_manager_as_decorator(x: Any) -> Any:
    log: list[Any] = []

    @noting(log, "d")
    def work(y: Any) -> Any:
        log.append("work")
        return y * 3

    return work(x), work(x), log


class Manager:
    """A context manager class."""

    def __init__(self, log: list[Any], result: Any = False) -> None:
        self.log = log
        self.result = result

    def __enter__(self) -> Manager:
        self.log.append("enter")
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        self.log.append(("exit", kind.__name__ if kind else None, str(error) if error else None))
        return self.result


class Truthy:
    """An object whose truth is computed."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return self.value


@case
def manager_result_is_an_object(x: Any) -> Any:
    log: list[Any] = []
    with Manager(log, Truthy(True)):
        raise KeyError("gone")
    try:
        with Manager(log, Truthy(False)):
            raise KeyError("kept")
    except KeyError as error:
        log.append(str(error))
    return x + 1, log


@case
def exit_stack(x: Any) -> Any:
    log: list[Any] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(Manager(log))
        stack.callback(log.append, "callback")
        stack.enter_context(noting(log, "n"))
        y = x + 1
    return y, log


@case
def null_context_and_closing(x: Any) -> Any:
    class Thing:
        closed = False

        def close(self) -> None:
            self.closed = True

    thing = Thing()
    with contextlib.nullcontext(x) as y, contextlib.closing(thing) as same:
        z = y * 2
    return z, thing.closed, same is thing


@case
def not_a_context_manager(x: Any) -> Any:
    seen = []
    for candidate in (1, type("Half", (), {"__enter__": lambda self: None})()):
        try:
            with candidate:
                pass
        except TypeError as error:
            seen.append("context manager protocol" in str(error))
    return x, seen


# --- exceptions -------------------------------------------------------------------------------------------------------


@case
def exception_chain(x: Any) -> Any:
    try:
        try:
            raise ValueError("a")
        except ValueError as error:
            raise KeyError("b") from error
    except KeyError as error:
        found = error
    return x, plain(found)


@case
def exception_context(x: Any) -> Any:
    try:
        try:
            raise ValueError("a")
        except ValueError:
            raise KeyError("b")  # noqa: B904
    except KeyError as error:
        first = plain(error)
    try:
        try:
            raise ValueError("a")
        except ValueError:
            raise KeyError("b") from None
    except KeyError as error:
        second = plain(error)
    return x, first, second


@case
def finally_orders(x: Any) -> Any:
    log: list[Any] = []

    def run(kind: str) -> Any:
        for step in range(3):
            try:
                log.append(("try", step))
                if kind == "return":
                    return x * step
                if kind == "break":
                    break
                if kind == "continue":
                    continue
                if kind == "raise":
                    raise ValueError(kind)
            except ValueError:
                log.append("except")
            else:
                log.append("else")
            finally:
                log.append(("finally", step))
        return "end"

    return [run(kind) for kind in ("return", "break", "continue", "raise", "none")], log


@case
def finally_overrides_return(x: Any) -> Any:
    def run() -> Any:
        try:
            return x
        finally:
            return x * 2  # noqa: B012

    def swallow() -> Any:
        for _ in range(2):
            try:
                raise ValueError
            finally:
                break  # noqa: B012
        return "left"

    return run(), swallow()


@case
def nested_finally(x: Any) -> Any:
    log: list[Any] = []
    try:
        try:
            try:
                raise ValueError("in")
            finally:
                log.append(1)
                try:
                    raise KeyError("k")
                except KeyError:
                    log.append(2)
        except ValueError as error:
            log.append(str(error))
            raise TypeError("out") from error
        finally:
            log.append(3)
    except TypeError as error:
        log.append(plain(error))
    return x, log


@case
def bare_raise(x: Any) -> Any:
    def again() -> None:
        raise

    try:
        try:
            raise ValueError("a")
        except ValueError:
            again()
    except ValueError as error:
        first = str(error)
    try:
        raise  # noqa: PLE0704
    except RuntimeError as error:
        return x, first, str(error)


@case
def raise_old_exception_in_handler(x: Any) -> Any:
    try:
        raise ValueError("old")
    except ValueError as error:
        old = error
    try:
        try:
            raise KeyError("new")
        except KeyError:
            raise old  # noqa: B904
    except ValueError as error:
        first = plain(error)
    try:
        raise old
    except ValueError as error:
        second = plain(error)
    return x, first, second


@case
def exception_variable_is_deleted(x: Any) -> Any:
    error = "before"
    try:
        raise ValueError
    except ValueError as error:  # noqa: F841
        pass
    try:
        return error
    except UnboundLocalError as unbound:
        return x, str(unbound)


class OwnError(Exception):
    """An exception with state."""

    def __init__(self, code: int, x: Any = None) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.x = x


@case
def own_exception(x: Any) -> Any:
    try:
        raise OwnError(3, x * 2)
    except (KeyError, OwnError) as error:
        return error.code, error.x, str(error), isinstance(error, Exception)


@case
def raise_wrong_things(x: Any) -> Any:
    seen = []
    for thing in (1, int, "text"):
        try:
            raise thing  # type: ignore[misc]
        except TypeError as error:
            seen.append(str(error))
    try:
        raise ValueError from 3  # type: ignore[misc]
    except TypeError as error:
        seen.append(str(error))
    try:
        try:
            raise ValueError
        except 3:  # type: ignore[misc]
            pass
    except TypeError as error:
        seen.append(str(error))
    return x, seen


@case
def exception_groups(x: Any) -> Any:
    log: list[Any] = []
    try:
        try:
            raise ExceptionGroup("g", [ValueError("v"), ExceptionGroup("in", [KeyError("k"), TypeError("t")])])
        except* ValueError as group:
            log.append(plain(group))
        except* KeyError as group:
            log.append(plain(group))
    except ExceptionGroup as rest:
        log.append(plain(rest))
    return x, log


@case
def exception_groups_reraise(x: Any) -> Any:
    seen = []
    for kind in ("bare", "same", "new", "none"):
        try:
            try:
                raise ExceptionGroup("g", [ValueError("v"), KeyError("k"), TypeError("t")])
            except* ValueError as group:
                if kind == "bare":
                    raise
                if kind == "same":
                    raise group
                if kind == "new":
                    raise RuntimeError("new") from None
            except* KeyError:
                if kind == "bare":
                    raise
        except BaseException as error:
            seen.append(plain(error)[:2] if kind == "new" else plain(error))
    return x, seen


@case
def exception_groups_naked(x: Any) -> Any:
    log: list[Any] = []
    try:
        raise ValueError("naked")
    except* ValueError as group:
        log.append(plain(group))
    try:
        try:
            raise ValueError("naked")
        except* KeyError:
            log.append("not reached")
    except ValueError as error:
        log.append(plain(error))
    try:
        try:
            raise ValueError("naked")
        except* ValueError:
            raise
    except BaseException as error:
        log.append(plain(error))
    try:
        log.append("no error")
    except* ValueError:
        log.append("not reached")
    return x, log


@case
def exception_groups_all_handled(x: Any) -> Any:
    try:
        raise ExceptionGroup("g", [ValueError(1), ValueError(2)])
    except* ValueError as group:
        count = len(group.exceptions)
    else:
        count = -1
    finally:
        x = x + 1
    return x, count


@case
def exception_notes(x: Any) -> Any:
    try:
        error = ValueError("v")
        error.add_note("note")
        raise error
    except ValueError as caught:
        return x, caught.__notes__


@case
def asserts(x: Any) -> Any:
    try:
        assert 1 == 2, "message"  # noqa: PLR0133
    except AssertionError as error:
        return x, str(error)


@case
def try_in_loops_with_managers(x: Any) -> Any:
    log: list[Any] = []
    for step in range(4):
        with noting(log, f"m{step}"), Manager(log):
            try:
                if step == 1:
                    continue
                if step == 3:
                    break
                x = x + step
            finally:
                log.append(("f", step))
    else:
        log.append("else")
    return x, log


@case
def key_and_index_errors(x: Any) -> Any:
    seen: list[Any] = []
    table = {"a": x}
    for action in (lambda: table["b"], lambda: [1][3], lambda: (1).nothing, lambda: int("z"), lambda: 1 / 0):  # type: ignore[attr-defined]
        try:
            seen.append(action())
        except (KeyError, IndexError, AttributeError, ValueError, ZeroDivisionError) as error:
            seen.append(type(error).__name__)
    return table["a"], seen


# --- match ------------------------------------------------------------------------------------------------------------


class PointOf:
    """A class with positional patterns."""

    __match_args__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a = a
        self.b = b


class SubInt(int):
    """A subclass of a class that matches itself."""


@case
def match_kinds(x: Any) -> Any:
    def describe(value: Any) -> Any:
        match value:
            case 0 | 1:
                return "small"
            case int(n) if n > 100:
                return ("big", n)
            case bool() | int():
                return "int"
            case "a" | "b" as letter:
                return ("letter", letter)
            case str():
                return "text"
            case []:
                return "empty"
            case [single]:
                return ("one", single)
            case [first, *middle, last] if len(middle) < 3:
                return ("many", first, middle, last)
            case [_, *_]:
                return "long"
            case {"kind": "circle", "r": r, **rest}:
                return ("circle", r, rest)
            case {"kind": kind}:
                return ("kind", kind)
            case {}:
                return "mapping"
            case PointOf(0, b):
                return ("on axis", b)
            case PointOf(a=a, b=PointOf(c, d)):
                return ("nested", a, c, d)
            case PointOf(a, b):
                return ("point", a, b)
            case float(f):
                return ("float", f)
            case None:
                return None
        return "other"

    values: list[Any] = [
        0, 1, 7, 1000, True, "a", "zz", [], [x], [1, x, 3], (1, 2), list(range(9)), {"kind": "circle", "r": x, "c": 1},
        {"kind": "square"}, {}, PointOf(0, x), PointOf(1, PointOf(2, x)), PointOf("x", 1), 2.5, None, b"bytes", {1, 2},
        SubInt(5), range(2),
    ]  # fmt: skip
    return [describe(value) for value in values]


@case
def match_errors(x: Any) -> Any:
    seen = []
    try:
        match PointOf(1, 2):
            case PointOf(1, 2, 3):
                pass
    except TypeError as error:
        seen.append(str(error))
    try:
        match 3:
            case int(1, 2):
                pass
    except TypeError as error:
        seen.append(str(error))
    try:
        match PointOf(1, 2):
            case PointOf(1, a=1):
                pass
    except TypeError as error:
        seen.append(str(error))
    return x, seen


@case
def match_default_dictionary(x: Any) -> Any:
    table: Any = collections.defaultdict(list, {"a": x})
    match table:
        case {"b": value}:
            found = value
        case {"a": value}:
            found = value
    return found, list(table)


class Shade(enum.Enum):
    """An enum with behaviour."""

    RED = 1
    BLUE = 2

    @property
    def other(self) -> Shade:
        return Shade.BLUE if self is Shade.RED else Shade.RED

    def scaled(self, x: Any) -> Any:
        return x * self.value


@case
def match_values(x: Any) -> Any:
    def name(value: Any) -> str:
        match value:
            case Shade.RED:
                return "red"
            case Shade.BLUE:
                return "blue"
            case math.pi:
                return "pi"
            case -1 | 1.5 | 2j:
                return "number"
        return "no"

    return x, [name(value) for value in (Shade.RED, Shade.BLUE, math.pi, -1, 1.5, 2j, 9)]


# --- expressions ------------------------------------------------------------------------------------------------------


@case
def walrus_and_scopes(x: Any) -> Any:
    values = [y := x * 2, y + 1]
    found = [last := item for item in (1, 2, 3)]
    if (n := len(values)) > 1:
        values.append(n)
    return values, found, last


@case
def star_expressions(x: Any) -> Any:
    def take(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    head, *middle, tail = [1, 2, x, 4]
    (a, b), *c = ((1, 2), 3)
    first, *none = [x]
    merged = {**{"a": 1}, "b": x, **{"a": 3}}
    return (
        take(*[1, 2], 3, *(4,), k=1, **{"z": x}),
        [*range(3), *"ab"],
        {*[1, 2], 2},
        merged,
        (*c, a, b),
        head,
        middle,
        tail,
        first,
        none,
    )


@case
def unpack_errors(x: Any) -> Any:
    seen = []
    for action in (
        "a, b = [1]",
        "a, b = [1, 2, 3]",
        "a, *b, c = [1]",
        "a, b = 3",
    ):
        try:
            if action == "a, b = [1]":
                a, b = [1]
            elif action == "a, b = [1, 2, 3]":
                a, b = [1, 2, 3]
            elif action == "a, *b, c = [1]":
                a, *b, c = [1]
            else:
                a, b = 3  # type: ignore[misc]
        except (ValueError, TypeError) as error:
            seen.append(str(error).replace(", got 3", ""))
    return x, seen


@case
def unpack_takes_one_more(x: Any) -> Any:
    taken: list[int] = []

    def source() -> Any:
        for index in range(10):
            taken.append(index)
            yield index

    try:
        a, b = source()
    except ValueError:
        return x, taken


@case
def call_errors(x: Any) -> Any:
    def function(a: Any, /, b: Any = 1, *, c: Any = 2) -> Any:
        return a, b, c

    seen: list[Any] = []
    for action in (
        lambda: function(),  # type: ignore[call-arg]
        lambda: function(1, 2, 3),  # type: ignore[misc]
        lambda: function(a=1),  # type: ignore[call-arg]
        lambda: function(1, **{"b": 1}, b=2),  # type: ignore[misc]
        lambda: function(*3),  # type: ignore[misc]
        lambda: function(**3),  # type: ignore[arg-type]
        lambda: function(1, d=4),  # type: ignore[call-arg]
    ):
        try:
            seen.append(action())
        except TypeError:
            seen.append("TypeError")
    return function(x, 5, c=6), seen


@case
def chained_comparisons(x: Any) -> Any:
    log: list[int] = []

    def value(number: int) -> int:
        log.append(number)
        return number

    return x, value(1) < value(2) < value(3), value(3) < value(2) < value(9), value(1) == value(1) != value(2), log


@case
def boolean_operators(x: Any) -> Any:
    empty: list[int] = []
    return (
        x,
        empty or "x",
        empty and 1,
        not empty,
        1 and 2 and 3,
        0 or "" or None,
        (1 if empty else 2),
        empty is not None,
    )


@case
def operators_of_numbers(x: Any) -> Any:
    a, b = 7, 3
    return (
        x, a + b, a - b, a * b, a / b, a // b, a % b, a**b, a & b, a | b, a ^ b, a << b, a >> b, -a, +a, ~a, divmod(a, b),
        1 < 2.5, 2j * 1, round(2.567, 2), abs(-3), pow(2, 5, 7), 3 in [1, 3], "b" not in "abc",
    )  # fmt: skip


@case
def augmented_assignments(x: Any) -> Any:
    a = 7
    a += 3
    a -= 1
    a *= 2
    a //= 4
    a **= 2
    a %= 10
    a <<= 3
    a >>= 1
    a |= 1
    a &= 15
    a ^= 3
    b = 9.0
    b /= 2
    items = [1]
    same = items
    items += [x]
    items *= 2
    table = {"a": 1}
    table |= {"b": 2}
    numbers = {1, 2}
    numbers &= {2}
    return a, b, items, same is items, table, numbers


@case
def slices(x: Any) -> Any:
    values = list(range(10))
    low, high = 2, 8
    values[low:high:2] = [x, x, x]
    del values[:1]
    tail = values[-3:]
    values[1:2] = [0, 0]
    middle = values[low:high]
    text = "abcdef"
    return values, tail, middle, text[1:-1], text[::-1], (1, 2, 3)[low:], values[slice(None, None, 3)]


@case
def string_formatting(x: Any) -> Any:
    value, width, name = 3.14159, 10, "pi"
    return (
        x,
        f"{value:.2f} {name!r} {name!s:>{width}} {value=:.1f} {{}} {name:*^8} {1000000:,} {0.5:%} {255:#x}",
        f"{'nested ' + name} {[1, 2]} {{'a': 1}} {name!a}",
        "{} {1}".replace("{}", "{0}").format(1, 2),
        "{name} {0:>4} {1[0]} {2.real}".format(1, [7], 2, name=name),
        "%s %d %.3f %r %5s|%-5s|%%" % ("a", 3, value, "q", "r", "l"),
        "%(k)s" % {"k": 5},
        name.center(6, "-") + "x".join(["a", "b"]),
        format(value, ".3e"),
        str(Shade.RED) + repr(SubInt(3)),
    )


class Formatted:
    """An object with formats of its own."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __format__(self, specification: str) -> str:
        return f"<{specification}:{self.value}>"

    def __str__(self) -> str:
        return f"str {self.value}"

    def __repr__(self) -> str:
        return f"Formatted({self.value})"


@case
def formatting_of_objects(x: Any) -> Any:
    item = Formatted(3)
    return x, f"{item} {item:abc} {item!s} {item!r} {item!s:>8}", str(item), repr(item), format(item, "z"), [str(item)]


@case
def lambda_defaults(x: Any) -> Any:
    functions = [lambda y, k=k: y * k for k in range(3)]
    late = [lambda: k for k in range(3)]
    return [function(x) for function in functions], [function() for function in late]


@case
def comprehension_scopes(x: Any) -> Any:
    k = "outer"
    squares = [k * k for k in range(3)]
    table = {k: v for k, v in zip("ab", squares, strict=False)}
    nested = [[i * j for j in range(i)] for i in range(4)]
    unique = {k % 2 for k in range(5)}
    captured = [(lambda: k) for k in range(2)]
    conditional = [i for i in range(10) if i % 2 if i > 3]
    return k, squares, table, nested, unique, [f() for f in captured], conditional, [x * i for i in range(2)]


@case
def comprehension_hides_a_cell(x: Any) -> Any:
    k = 5

    def read() -> Any:
        return k

    plain_values = [k for k in range(3)]
    cells = [(lambda: k) for k in range(2)]
    k = k + 1
    return x, read(), plain_values, [f() for f in cells]


@case
def comprehension_with_an_error(x: Any) -> Any:
    k = 3
    try:
        [1 / k for k in (1, 0)]
    except ZeroDivisionError:
        return x, k
    return None


@case
def comprehension_of_unbound_name(x: Any) -> Any:
    values = [later for later in range(2)]
    try:
        return later  # type: ignore[name-defined]  # noqa: F821
    except (UnboundLocalError, NameError) as error:
        kind = type(error).__name__
    if values is None:
        later = 1  # noqa: F841
    return x, kind, values


@case
def comprehension_in_a_nested_function(x: Any) -> Any:
    k = x

    def inner() -> Any:
        values = [k for k in range(3)]
        return values, k

    return inner()


# --- functions and names ----------------------------------------------------------------------------------------------


@case
def recursion(x: Any) -> Any:
    def fib(n: int) -> int:
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    return x * fib(8), even(10), odd(10)


@case
def nonlocal_counters(x: Any) -> Any:
    def counter() -> Any:
        count = 0

        def step(by: Any = 1) -> Any:
            nonlocal count
            count = count + by
            return count

        def reset() -> None:
            nonlocal count
            del count
            count = 10

        return step, reset

    step, reset = counter()
    values = [step(), step(x), step()]
    reset()
    return values, step()


@case
def mutable_default(x: Any) -> Any:
    def add(item: Any, items: list[Any] = []) -> list[Any]:  # noqa: B006
        items.append(item)
        return items

    add(1)
    return add(x)


@case
def signatures(x: Any) -> Any:
    def mixed(a: Any, /, b: Any, c: Any = 3, *rest: Any, d: Any, e: Any = 5, **more: Any) -> Any:
        return a, b, c, rest, d, e, more

    return mixed(1, 2, d=4), mixed(1, b=x, d=0, a=9), mixed(1, 2, 3, 4, 5, d=6, e=7, f=8)


@case
def decorators(x: Any) -> Any:
    def times(factor: int) -> Any:
        def wrap(function: Any) -> Any:
            @functools.wraps(function)
            def inner(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) * factor

            return inner

        return wrap

    @times(2)
    @times(3)
    def work(y: Any, /, *, k: int = 1) -> Any:
        """Doc."""
        return y + k

    return work(x, k=2), work.__name__, work.__doc__, hasattr(work, "__wrapped__")


@case
def function_attributes(x: Any) -> Any:
    def work(a: int, b: str = "x") -> float:
        return 1.0

    work.count = 1  # type: ignore[attr-defined]
    work.count += 1  # type: ignore[attr-defined]
    return x, work.count, work.__defaults__, work.__name__, sorted(work.__annotations__)  # type: ignore[attr-defined]


COUNTER = 0


@case
def global_statements(x: Any) -> Any:
    global COUNTER, MADE
    COUNTER = 5
    COUNTER += 1
    MADE = x
    first = COUNTER, MADE
    del MADE
    try:
        MADE  # noqa: B018
    except NameError as error:
        return first, str(error)
    return None


@case
def deletions(x: Any) -> Any:
    a, b = [1, 2, 3], {"k": 1}
    del a[0], b["k"]
    c = x
    del c
    try:
        return c
    except UnboundLocalError as error:
        text = str(error)
    thing = PointOf(1, 2)
    del thing.a
    return a, b, text, hasattr(thing, "a")


@case
def unbound_closure(x: Any) -> Any:
    def read() -> Any:
        return later

    try:
        read()
    except NameError as error:
        text = str(error)
    later = x
    return text, read()


@case
def imports(x: Any) -> Any:
    import collections.abc as renamed
    import os.path
    from functools import partial, reduce as folded

    try:
        from functools import nothing_like_that  # type: ignore[attr-defined]  # noqa: F401
    except ImportError as error:
        kind = type(error).__name__
    return partial(folded, lambda a, b: a + b)([1, 2, x]), os.path.join("a", "b"), renamed.Sized.__name__, kind


# --- classes ----------------------------------------------------------------------------------------------------------


@case
def class_in_a_function(x: Any) -> Any:
    scale = 3

    class Base:
        factor = scale * 2
        table: typing.ClassVar[dict[str, int]] = {name: len(name) for name in ("a", "bb")}

        def __init__(self, value: Any) -> None:
            self.value = value

        def work(self) -> Any:
            return self.value * self.factor + scale

        @property
        def twice(self) -> Any:
            return self.value * 2

        @classmethod
        def make(cls, value: Any) -> Any:
            return cls(value)

        @staticmethod
        def add(a: Any, b: Any) -> Any:
            return a + b

    class Child(Base):
        factor = Base.factor + 1

        def work(self) -> Any:
            return super().work() + 1

        @classmethod
        def make(cls, value: Any) -> Any:
            return super().make(value * 2)

    child = Child.make(x)
    return (
        child.work(),
        child.twice,
        Child.add(1, x),
        Base.table,
        isinstance(child, Base),
        Child.__name__,
        Child.__mro__[1] is Base,
    )


@case
def class_body_names(x: Any) -> Any:
    enclosing = "outer"

    class Body:
        first = enclosing
        name = "inner"
        second = name
        third = [i for i in range(2)]
        for index in range(3):
            pass
        del index
        try:
            fourth = missing  # type: ignore[name-defined]  # noqa: F821
        except NameError:
            fourth = "caught"
        annotated: int = 3
        only: str

    return x, Body.first, Body.second, Body.third, Body.fourth, hasattr(Body, "index"), sorted(Body.__annotations__)


@case
def class_decorator_and_metaclass(x: Any) -> Any:
    log: list[Any] = []

    class Meta(type):
        @classmethod
        def __prepare__(mcs, name: str, bases: Any, **kwargs: Any) -> Any:
            log.append(("prepare", name, kwargs))
            return {"prepared": 1}

        def __new__(mcs, name: str, bases: Any, namespace: Any, **kwargs: Any) -> Any:
            log.append(("new", name))
            return super().__new__(mcs, name, bases, namespace)

        def __init__(cls, name: str, bases: Any, namespace: Any, **kwargs: Any) -> None:
            log.append(("init", name, kwargs))
            super().__init__(name, bases, namespace)

        def __call__(cls, *args: Any) -> Any:
            log.append("call")
            return super().__call__(*args)

    def tagged(cls: Any) -> Any:
        cls.tag = "t"
        return cls

    @tagged
    class Thing(metaclass=Meta, flag=1):
        def __init__(self, value: Any) -> None:
            self.value = value

    thing = Thing(x)
    return thing.value * 2, Thing.tag, Thing.prepared, type(Thing).__name__, log


class Typed:
    """A descriptor that is told its name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = "_" + name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        return getattr(instance, self.name, "unset")

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance, self.name, value)


@case
def set_name_and_descriptors(x: Any) -> Any:
    class Holder:
        one = Typed()
        two = Typed()

        def __init__(self, one: Any) -> None:
            self.one = one

    holder = Holder(x)
    before = holder.two
    holder.two = 2
    return holder.one, before, holder.two, Holder.__dict__["two"].name, sorted(vars(holder))


class Registered:
    """A class that keeps track of its subclasses."""

    known: typing.ClassVar[list[str]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()
        cls.option = kwargs.get("option")


@case(breaks="__init_subclass__")
def init_subclass(x: Any) -> Any:
    class Child(Registered, option=3):
        pass

    return x * 2, Child.option


@case
def abstract_class_in_a_function(x: Any) -> Any:
    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self) -> Any: ...

    class Square(Shape):
        def area(self) -> Any:
            return x * 2

    try:
        Shape()  # type: ignore[abstract]
    except TypeError:
        return Square().area(), isinstance(Square(), Shape)


@case
def dataclass_in_a_function(x: Any) -> Any:
    @dataclass
    class Pair:
        a: Any
        b: int = 2

        def total(self) -> Any:
            return self.a * self.b

    return Pair(x).total(), Pair(1, 2) == Pair(1, 2), [item.name for item in dataclasses.fields(Pair)]


@case
def enum_in_a_function(x: Any) -> Any:
    class Level(enum.IntEnum):
        LOW = 1
        HIGH = 2

    return x * Level.HIGH, Level(1).name, [item.value for item in Level], Level["LOW"] < Level.HIGH


@case
def named_tuple_in_a_function(x: Any) -> Any:
    class Pair(NamedTuple):
        a: Any
        b: int = 2

    pair = Pair(x)
    a, b = pair
    return a * b, pair.b, pair._fields, pair._replace(b=5)[1]


@case
def type_with_three_arguments(x: Any) -> Any:
    made = type("Made", (PointOf,), {"c": 3, "total": lambda self: self.a * self.c})
    return made(x, 1).total(), made.__name__, issubclass(made, PointOf)


@case
def exception_class_in_a_function(x: Any) -> Any:
    class Stop(Exception):
        pass

    try:
        for index in itertools.count():
            x = x + index
            if index == 3:
                raise Stop
    except Stop:
        return x


class Cooperative:
    def work(self, x: Any) -> list[Any]:
        return ["root"]


class Left(Cooperative):
    def work(self, x: Any) -> list[Any]:
        return ["left", x * 2, *super().work(x)]


class Right(Cooperative):
    value = 4

    def work(self, x: Any) -> list[Any]:
        return ["right", *super(Right, self).work(x)]


class Bottom(Left, Right):
    """A diamond."""

    @property
    def value(self) -> Any:  # type: ignore[override]
        return super().value + 1

    def work(self, x: Any) -> list[Any]:
        parent = super()
        return ["bottom", *parent.work(x)]


@case
def super_in_a_diamond(x: Any) -> Any:
    item = Bottom()
    try:
        super(Left, item).nothing  # noqa: B018
    except AttributeError as error:
        return item.work(x), item.value, type(error).__name__


class Dynamic:
    """Attributes that are computed."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.real = 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.log.append(name)
        return len(name)


class Intercepting:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __getattribute__(self, name: str) -> Any:
        if name == "double":
            return object.__getattribute__(self, "x") * 2
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        super().__setattr__("last", name)


@case
def attribute_hooks(x: Any) -> Any:
    item = Dynamic()
    other = Intercepting(x)
    other.y = 3  # type: ignore[attr-defined]
    return (
        item.abc, item.real, getattr(item, "_no", "default"), hasattr(item, "_no"), item.log, other.double, other.x,
        other.last,  # type: ignore[attr-defined]
    )  # fmt: skip


class Tracked:
    """A property with all three functions."""

    def __init__(self, x: Any) -> None:
        self._x = x
        self.deleted = False

    @property
    def x(self) -> Any:
        return self._x

    @x.setter
    def x(self, value: Any) -> None:
        self._x = value * 2

    @x.deleter
    def x(self) -> None:
        self.deleted = True


@case
def properties(x: Any) -> Any:
    item = Tracked(x)
    item.x = x + 1
    item.x += 1
    del item.x
    try:
        type("P", (), {"p": property(lambda self: 1)})().p = 3
    except AttributeError:
        return item.x, item.deleted


class Meta(type):
    """A metaclass with behaviour on its classes."""

    instances = 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.tagged = True
        return made

    def __len__(cls) -> int:
        return 7

    def __getitem__(cls, key: Any) -> Any:
        return (cls.__name__, key)

    def __contains__(cls, item: Any) -> bool:
        return item == "member"

    def __iter__(cls) -> Iterator[int]:
        return iter((1, 2))

    @property
    def label(cls) -> str:
        return "label " + cls.__name__


class WithMeta(metaclass=Meta):
    def __init__(self, x: Any) -> None:
        self.x = x

    def __class_getitem__(cls, key: Any) -> Any:
        return "not reached: the metaclass goes first"


@case
def metaclass_behaviour(x: Any) -> Any:
    item = WithMeta(x)
    return item.x * 2, item.tagged, len(WithMeta), WithMeta["k"], "member" in WithMeta, list(WithMeta), WithMeta.label  # type: ignore[attr-defined]


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a


@case
def slots(x: Any) -> Any:
    item = Slotted(x)
    item.a = item.a * 2
    seen: list[Any] = []
    for name in ("b", "c"):
        try:
            seen.append(getattr(item, name))
        except AttributeError:
            seen.append("unset")
    try:
        item.c = 1  # type: ignore[attr-defined]
    except AttributeError:
        seen.append("refused")
    return item.a, seen


class Number:
    """All the special methods of a number and a container."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return self.value != 0

    def __len__(self) -> int:
        return 3

    def __contains__(self, item: Any) -> bool:
        return bool(item == self.value)

    def __iter__(self) -> Iterator[Any]:
        yield self.value
        yield self.value + 1

    def __reversed__(self) -> Iterator[Any]:
        yield "reversed"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value, args, kwargs

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: Any) -> Any:
        return isinstance(other, Number) and self.value == other.value

    def __lt__(self, other: Any) -> Any:
        return self.value < getattr(other, "value", other)

    def __add__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, str) else Number(self.value + getattr(other, "value", other))

    def __radd__(self, other: Any) -> Any:
        return Number(other + self.value)

    def __sub__(self, other: Any) -> Any:
        return ("sub", other)

    def __rsub__(self, other: Any) -> Any:
        return ("rsub", other)

    def __iadd__(self, other: Any) -> Any:
        self.value = self.value + other
        return self

    def __neg__(self) -> Any:
        return Number(-self.value)

    def __invert__(self) -> Any:
        return "inverted"

    def __abs__(self) -> Any:
        return "abs"

    def __round__(self, digits: int | None = None) -> Any:
        return ("round", digits)

    def __getitem__(self, key: Any) -> Any:
        return ("get", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.set = (key, value)

    def __delitem__(self, key: Any) -> None:
        self.deleted = key

    def __matmul__(self, other: Any) -> Any:
        return ("matmul", other)

    def __rmatmul__(self, other: Any) -> Any:
        return ("rmatmul", other)

    def __floordiv__(self, other: Any) -> Any:
        return ("floordiv", other)

    def __ifloordiv__(self, other: Any) -> Any:
        return ("ifloordiv", other)

    def __xor__(self, other: Any) -> Any:
        return ("xor", other)

    def __rpow__(self, other: Any) -> Any:
        return ("rpow", other)

    def __divmod__(self, other: Any) -> Any:
        return ("divmod", other)

    def __int__(self) -> int:
        return 40

    def __float__(self) -> float:
        return 4.5

    def __complex__(self) -> complex:
        return 1j

    def __str__(self) -> str:
        return "number"


@case
def special_methods(x: Any) -> Any:
    a, b = Number(2), Number(5)
    c = Number(1)
    c += 4
    c[1:2] = "v"
    c["k"] = x
    del c["d"]
    d = Number(1)
    d //= 3
    return (
        [10, 20, 30, 40][a], bool(Number(0)), len(a), 2 in a, list(a), list(reversed(a)), a(1, k=x),  # type: ignore[call-overload]
        hash(a) == hash(2), a == Number(2), a != b, a < b, a > b, (a + b).value, (a + 1).value, (1 + a).value, sum([a, b]).value,  # type: ignore[operator, type-var, attr-defined]
        a - 1, 1 - a, c.value, c.set, c.deleted, (-a).value, ~a, abs(a), round(a), round(a, 2), a["key"], a[1:2], a @ 3, 3 @ a,  # type: ignore[call-overload]
        a // 2, d, a ^ 1, 2 ** a, divmod(a, 3), int(a), float(a), complex(a), str(a), "1" + str(a), {a: 1}[Number(2)],
        sorted([b, a])[0].value, max(a, b).value, not a, a and 1, range(a), "x" * a, bin(a),
    )  # fmt: skip


@case
def reflected_on_failure(x: Any) -> Any:
    try:
        Number(1) + "text"  # noqa: B018
    except TypeError as error:
        kind = type(error).__name__

    class Base:
        def __add__(self, other: Any) -> str:
            return "base add"

        def __radd__(self, other: Any) -> str:
            return "base radd"

    class Derived(Base):
        def __radd__(self, other: Any) -> str:
            return "derived radd"

    return x, kind, Base() + Derived(), Derived() + Base(), 1 + Base()


class SequenceByItem:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Counted:
    def __init__(self, limit: int) -> None:
        self.left = limit

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


@case
def iteration_protocols(x: Any) -> Any:
    old = SequenceByItem([1, x, 3])
    a, b, c = Counted(3)
    return (
        list(old), 3 in SequenceByItem([1, 3]), list(Counted(2)), a, b, c, list(zip(Counted(2), old, strict=False)), [*Counted(3)],
        dict(enumerate("ab")), list(map(lambda p, q: p * q, [1, 2], [x, x])), list(filter(None, [0, 1, 2])), sum(Counted(4)),
        min([3, 1, 2], key=lambda v: -v), sorted("bca", reverse=True), tuple(reversed([1, 2])), iter([1]).__next__(),
        list(iter(functools.partial(next, iter([1, 2, 9, 3])), 9)), next(iter([]), "default"),
    )  # fmt: skip


# --- the standard library ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def cached_square(n: int) -> int:
    """A cached pure function."""
    return n * n


class Lazy:
    def __init__(self, x: Any) -> None:
        self.x = x
        self.runs = 0

    @functools.cached_property
    def doubled(self) -> Any:
        self.runs += 1
        return self.x * 2

    def scale(self, x: Any, factor: int = 2) -> Any:
        return x * factor

    triple = functools.partialmethod(scale, factor=3)


@functools.singledispatch
def describe_type(value: Any) -> str:
    """A generic function."""
    return "other"


@describe_type.register
def _(value: int) -> str:
    return "int"


@describe_type.register(list)
def _(value: Any) -> str:
    return f"list of {describe_type(value[0])}"


@functools.total_ordering
class Ordered:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return bool(self.value == other.value)

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < other.value)

    __hash__ = None  # type: ignore[assignment]


@case
def functools_functions(x: Any) -> Any:
    bound = functools.partial(lambda a, b, c=0: (a, b, c), 1, c=x)
    return (
        bound(2), functools.partial(bound, 5)(), functools.reduce(operator.add, [1, 2, x]), cached_square(3), cached_square(3),
        describe_type(1), describe_type([2]), describe_type("s"), Ordered(1) <= Ordered(2), Ordered(3) > Ordered(2),
        sorted([3, 1, 2], key=functools.cmp_to_key(lambda a, b: b - a)),
    )  # fmt: skip


@case
def cached_property_and_partialmethod(x: Any) -> Any:
    item = Lazy(x)
    return item.doubled, item.doubled, item.runs, item.triple(x), item.scale(x)


@case
def cache_inside(x: Any) -> Any:
    runs: list[int] = []

    @functools.cache
    def work(n: int) -> int:
        runs.append(n)
        return n * 2

    return x * work(2), work(2), work(3), len(set(runs))


@case
def itertools_functions(x: Any) -> Any:
    counter = itertools.count(5, 2)
    return (
        list(itertools.chain([1], [x])), list(itertools.chain.from_iterable([[1], [2]])), list(itertools.islice(counter, 2)),
        next(counter), list(itertools.product([1, 2], "a")), list(itertools.permutations([1, 2])),
        list(itertools.combinations([1, 2, 3], 2)), list(itertools.accumulate([1, 2, x])), list(itertools.pairwise("abc")),
        list(itertools.zip_longest([1, 2], [3], fillvalue=0)), [(k, list(g)) for k, g in itertools.groupby([1, 1, 2])],
        list(itertools.takewhile(lambda v: v < 3, [1, 2, 3, 1])), list(itertools.dropwhile(lambda v: v < 3, [1, 2, 3, 1])),
        list(itertools.starmap(lambda a, b: a * b, [(1, 2), (x, 4)])), list(itertools.repeat(x, 2)),
        list(itertools.compress("abc", [1, 0, 1])), [list(part) for part in itertools.tee([1, 2])],
        list(itertools.filterfalse(lambda v: v, [0, 1])), list(itertools.islice(itertools.cycle([1, 2]), 3)),
    )  # fmt: skip


class Flagged(enum.Flag):
    A = enum.auto()
    B = enum.auto()


@case
def enums(x: Any) -> Any:
    return (
        Shade.RED.name, Shade(2).value, Shade["BLUE"] is Shade.BLUE, list(Shade), Shade.RED.other.name, Shade.BLUE.scaled(x),
        Shade.RED in {Shade.RED: 1}, len(Shade), (Flagged.A | Flagged.B).value, Flagged.A in (Flagged.A | Flagged.B),
        isinstance(Shade.RED, Shade), repr(Shade.RED), Shade.RED == Shade.BLUE, Shade.RED is Shade(1),
    )  # fmt: skip


@dataclass
class Config:
    """A dataclass with factories."""

    a: Any
    items: list[Any] = dataclasses.field(default_factory=list)
    hidden: int = dataclasses.field(default=3, repr=False, compare=False)
    total: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = self.a * self.hidden


@dataclass(frozen=True, order=True)
class Frozen:
    a: int
    b: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Compact:
    a: Any
    b: int = 1


@dataclass
class Derived(Config):
    extra: int = 9


@case
def dataclasses_of_all_kinds(x: Any) -> Any:
    config = Config(x, hidden=4)
    config.items.append(1)
    frozen = Frozen(1, (2,))
    compact = Compact(a=x)
    compact.b += 1
    try:
        frozen.a = 5  # type: ignore[misc]
    except dataclasses.FrozenInstanceError:
        kind = "frozen"
    return (
        config.total, config.items, Config(1).items, frozen == Frozen(1, (2,)), frozen < Frozen(2), hash(frozen) == hash(Frozen(1, (2,))),
        dataclasses.replace(frozen, a=7).a, compact.a, compact.b, kind, Derived(2).extra, [f.name for f in dataclasses.fields(config)],
        dataclasses.asdict(frozen), dataclasses.astuple(frozen), repr(frozen), dataclasses.is_dataclass(config),
    )  # fmt: skip


class Named(NamedTuple):
    a: Any
    b: int = 2

    def total(self) -> Any:
        return self.a * self.b


Old = collections.namedtuple("Old", "p q", defaults=[5])


@case
def named_tuples(x: Any) -> Any:
    item = Named(x)
    a, b = item
    return (
        a, b, item.total(), item[0], item._replace(b=5).b, item._fields, Old(1), Old(1, q=2)._asdict(), Old._make([3, 4]),
        isinstance(item, tuple), len(item), Named(a=1, b=2) == (1, 2), Old(1) + (2,),
    )  # fmt: skip


T = typing.TypeVar("T")


class Box(typing.Generic[T]):
    def __init__(self, item: T) -> None:
        self.item = item

    def get(self) -> T:
        return self.item


@typing.runtime_checkable
class HasGet(typing.Protocol):
    def get(self) -> Any: ...


class Settings(typing.TypedDict, total=False):
    a: int


@case
def typing_machinery(x: Any) -> Any:
    box: Box[int] = Box(x)
    alias = Box[int]
    settings: Settings = {"a": 1}
    value = typing.cast("int", x)
    made = alias(x)
    return (
        value, box.get(), made.get(), isinstance(box, HasGet), isinstance(3, HasGet), settings, typing.get_origin(alias) is Box,
        typing.get_args(alias), Settings(a=2), typing.Optional[int] == (int | None), isinstance(3, int | str),
    )  # fmt: skip


@case
def generic_class_in_a_function(x: Any) -> Any:
    class Local(typing.Generic[T]):
        def __init__(self, item: T) -> None:
            self.item = item

    class Sub(Local[int]):
        pass

    return Sub(x).item * 2, Sub.__orig_bases__[0].__args__  # type: ignore[attr-defined]


@case
def collections_types(x: Any) -> Any:
    counts = collections.Counter("abca")
    counts.update("a")
    queue = collections.deque([1, 2], maxlen=2)
    queue.append(x)
    table = collections.defaultdict(list)
    table["k"].append(1)
    ordered = collections.OrderedDict(a=1, b=2)
    ordered.move_to_end("a")
    chain = collections.ChainMap({"a": 1}, {"a": 2, "b": 3})
    return counts["a"], counts.most_common(1), list(queue), dict(table), list(ordered), chain["a"], chain["b"]


@case
def builtin_methods(x: Any) -> Any:
    items = [3, 1, 2]
    items.sort()
    items.extend([5])
    items.insert(0, 9)
    popped = items.pop()
    table = {"a": 1}
    table.setdefault("b", 2)
    table.update(c=x)
    numbers = {1, 2} | {3}
    numbers.discard(1)
    return (
        items, popped, items.index(2), items.count(9), table.pop("a"), list(table.items()), table.get("zz", 0), numbers, (1, 2).count(1),
        "a-b".split("-"), "abc".upper().startswith("AB"), b"ab".decode(), "{}".format(3), dict.fromkeys("ab", 0), [].copy(),
        type(x) is type(x), isinstance(3, (int, str)), issubclass(bool, int), callable(len), divmod(7, 2), list(zip(*[(1, 2), (3, 4)])),
        int("12", 16), chr(97), ord("a"), hex(255), round(3.7), all([]), any([0, 1]), dict(a=1), tuple("ab"), set("aa"), frozenset([1]),
        bytes([65]), float("1.5"), bool([]), slice(1, 2).stop, range(3)[1], memoryview(b"ab")[0], id(x) == id(x) if False else 1,
    )  # fmt: skip


logger = logging.getLogger("dovetail.tests.language")


@case
def warnings_and_logging(x: Any) -> Any:
    logger.debug("not shown %s", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("quiet", stacklevel=1)
    return x * 2, logger.isEnabledFor(logging.DEBUG)


@case(breaks="print")
def printing(x: Any) -> Any:
    y = x * 2
    print(end="")
    return y + 1


@case(breaks="locals")
def locals_and_comprehensions(x: Any) -> Any:
    a = x * 2
    names = sorted(locals())
    return a, names, [i for i in range(2)]


@case(breaks="async")
def coroutine_is_made(x: Any) -> Any:
    async def work() -> Any:
        return x * 2

    coroutine = work()
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        coroutine.close()


# --- graph breaks in places where the frame holds more than locals ----------------------------------------------------


@case(breaks="print")
def break_in_a_comprehension(x: Any) -> Any:
    k = 7

    def read() -> Any:
        return k

    def note(value: Any) -> Any:
        print(end="")
        return value * 2

    values = [note(x * k) for k in range(3)]
    return values, k, read()


@case(breaks="print")
def break_in_a_comprehension_of_cells(x: Any) -> Any:
    k = 7

    def note(value: Any) -> Any:
        print(end="")
        return value

    functions = [note(lambda: k) for k in range(3)]
    return x * 2, [function() for function in functions], k


@case(breaks="print")
def break_in_an_except_star(x: Any) -> Any:
    log: list[Any] = []
    try:
        try:
            raise ExceptionGroup("g", [ValueError("v"), KeyError("k")])
        except* ValueError as group:
            print(end="")
            log.append(len(group.exceptions))
    except ExceptionGroup as rest:
        log.append(plain(rest))
    return x * 2, log


@case(breaks="print")
def break_in_a_with_and_finally(x: Any) -> Any:
    log: list[Any] = []
    for step in range(2):
        with Manager(log):
            try:
                x = x + step
                print(end="")
                if step:
                    raise ValueError("v")
            except ValueError as error:
                log.append(str(error))
            finally:
                print(end="")
                x = x * 2
    return x, log


@case(breaks="print")
def break_in_a_generator(x: Any) -> Any:
    def items() -> Any:
        for index in range(3):
            print(end="")
            yield x * index

    return list(items())


@case(breaks="print")
def break_in_a_class_body(x: Any) -> Any:
    class Body:
        print(end="")
        value = 3

    return x * Body.value


# --- newer syntax -----------------------------------------------------------------------------------------------------

source_case(
    (3, 12),
    """
def type_parameters(x):
    class Box[T]:
        def __init__(self, item: T):
            self.item = item
        def map[U](self, function) -> "Box[U]":
            return Box(function(self.item))
    def first[T: (int, str), *Ts, **P](item: T) -> T:
        return item
    def bounded[T: int](item: T) -> T:
        return item
    return (Box(x).map(lambda v: v * 2).item, first(x), [p.__name__ for p in first.__type_params__],
            bounded.__type_params__[0].__bound__, first.__type_params__[0].__constraints__, Box.__type_params__[0].__name__,
            Box[int].__args__, Box.__orig_bases__[0].__args__[0].__name__)
""",
)
source_case(
    (3, 12),
    """
def type_statement(x):
    type Number = int | float
    type Pair[T] = tuple[T, T]
    return x * 2, Number.__name__, Number.__value__, Pair.__type_params__[0].__name__, isinstance(3, Number.__value__)
""",
)
source_case(
    (3, 12),
    """
def nested_f_strings(x):
    name = "a"
    return x, f"{f"{name + "b"}"} {name!r:>{len("four")}}"
""",
)
source_case(
    (3, 12),
    """
def class_scope_with_type_parameters(x):
    outer = 3
    class Box[T]:
        outer = 4
        seen = outer
        def method[U](self, value: U = outer) -> U:
            return value
        values = [outer for outer in range(2)]
    return x, Box.seen, Box().method(), Box.values
""",
)
source_case(
    (3, 13),
    """
def type_parameter_defaults(x):
    class Box[T: int = int, **P = [int]]:
        pass
    type Rest[*Ts = *tuple[int, str]] = tuple[*Ts]
    return x * 2, [p.__default__ for p in (*Box.__type_params__, *Rest.__type_params__)], Box.__firstlineno__
""",
)
