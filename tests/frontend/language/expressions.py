"""``match`` statements, operators, containers, text."""

# ruff: noqa: E501, F821, F841

from __future__ import annotations

import collections
import enum
import math
from typing import Any

from tests.frontend.language.cases import case


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
    for action in ("a, b = [1]", "a, b = [1, 2, 3]", "a, *b, c = [1]", "a, b = 3"):
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
