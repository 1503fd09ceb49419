"""Generators and context managers."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

from tests.frontend.language.cases import case


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
def yield_from_throw_amid_an_expression(x: Any) -> Any:
    def inner(v: Any) -> Iterator[Any]:
        try:
            yield v
        except KeyError:
            return v * 5

    def outer(v: Any) -> Iterator[Any]:
        yield [10, v, (yield from inner(v)), (yield 3)]

    it = outer(x)
    next(it)
    return it.throw(KeyError("k")), it.send(4)


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


@case(breaks="a class is defined")
def null_context_and_closing(x: Any) -> Any:
    class Thing:
        closed = False

        def close(self) -> None:
            self.closed = True

    thing = Thing()
    with contextlib.nullcontext(x) as y, contextlib.closing(thing) as same:
        z = y * 2
    return z, thing.closed, same is thing


@case(breaks="a class is defined")
def not_a_context_manager(x: Any) -> Any:
    seen = []
    for candidate in (1, type("Half", (), {"__enter__": lambda self: None})()):
        try:
            with candidate:
                pass
        except TypeError as error:
            seen.append(str(error))
    return x, seen


@case
def generators_are_generators(x: Any) -> Any:
    def counted(count: int) -> Iterator[Any]:
        for index in range(count):
            yield x * index

    new, begun, ended = counted(3), counted(2), counted(0)
    next(begun)
    list(ended)

    def told(made: Any) -> Any:
        kinds = isinstance(made, types.GeneratorType), isinstance(made, Iterator), isinstance(made, list)
        return kinds, made.__name__, made.__qualname__, inspect.getgeneratorstate(made), made.gi_frame is None

    return [told(made) for made in (new, begun, ended)], inspect.isgenerator(new)


class NoException(Exception):  # noqa: N818
    def __new__(cls, *args: Any) -> Any:
        return cls


@case
def what_is_thrown_into_generators(x: Any) -> Any:
    """Classes, instances, and a class with its value, and what is none of these."""

    def caught() -> Iterator[Any]:
        try:
            yield x
        except Exception as error:  # noqa: BLE001
            yield type(error).__name__, str(error)

    thrown: list[tuple[Any, ...]] = [(ValueError,), (ValueError("a"),), (ValueError, "a"), (OSError, (2, "b"))]
    thrown += [(ValueError, KeyError(1)), (KeyError, KeyError(1)), (NoException,), (5,), (int,), (ValueError("a"), 3)]
    seen: list[Any] = []
    for args in thrown:
        for begins in (False, True):
            made: Any = caught()
            if begins:
                next(made)
            try:
                seen.append(made.throw(*args))
            except Exception as error:  # noqa: BLE001
                seen.append((type(error).__name__, str(error)))
            seen.append(next(made, "ended"))
    return seen
