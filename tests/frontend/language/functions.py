"""Functions, names, and graph breaks in places where the frame holds more than locals."""

# ruff: noqa: E501, F821, F841

from __future__ import annotations

import functools
from typing import Any

from tests.frontend.language.cases import case, plain
from tests.frontend.language.expressions import PointOf
from tests.frontend.language.generators import Manager


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
    from functools import partial
    from functools import reduce as folded

    try:
        from functools import nothing_like_that  # type: ignore[attr-defined]  # noqa: F401
    except ImportError as error:
        kind = type(error).__name__
    return partial(folded, lambda a, b: a + b)([1, 2, x]), os.path.join("a", "b"), renamed.Sized.__name__, kind


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


@case(breaks="CHECK_EG_MATCH")
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


@case(breaks="a class is defined")
def break_in_a_class_body(x: Any) -> Any:
    class Body:
        print(end="")
        value = 3

    return x * Body.value
