"""Exceptions and groups of them."""

from __future__ import annotations

from typing import Any

from tests.frontend.language.cases import case, plain
from tests.frontend.language.generators import Manager, noting


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


@case(breaks="CHECK_EG_MATCH")
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


@case(breaks="CHECK_EG_MATCH")
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


@case(breaks="CHECK_EG_MATCH")
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


@case(breaks="CHECK_EG_MATCH")
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


@case
def wrong_arguments(x: Any) -> Any:
    calls = {
        "isinstance": lambda: isinstance(x, int, strict=True),  # type: ignore[call-arg]
        "isinstance, one": lambda: isinstance(x),  # type: ignore[call-arg]
        "issubclass": lambda: issubclass(int, int, strict=True),  # type: ignore[call-arg]
        "len": lambda: len([1], default=3),  # type: ignore[call-arg]
        "len, two": lambda: len([1], [2]),  # type: ignore[call-arg]
        "getattr": lambda: getattr(x, "shape", default=3),  # type: ignore[call-overload]
        "getattr, four": lambda: getattr(x, "shape", 3, 4),  # type: ignore[call-overload]
        "hasattr": lambda: hasattr(x, "a", "b"),  # type: ignore[call-arg]
        "setattr": lambda: setattr(x, "a"),  # type: ignore[call-arg]
        "next": lambda: next(iter([]), default=3),  # type: ignore[call-overload]
        "iter": lambda: iter(object=[1]),  # type: ignore[call-overload]
        "type": lambda: type(x, bases=()),  # type: ignore[call-overload]
        "tuple": lambda: tuple(iterable=[1]),  # type: ignore[call-arg]
        "list": lambda: list([1], [2]),  # type: ignore[call-arg]
        "append": lambda: [].append(1, index=0),  # type: ignore[call-arg]
        "callable": lambda: callable(obj=x),  # type: ignore[call-arg]
        "ascii": lambda: ascii("a", "b"),  # type: ignore[call-arg]
        "hash": lambda: hash("a", "b"),  # type: ignore[call-arg]
        "set": lambda: set([1], [2]),  # type: ignore[call-arg]
        "frozenset": lambda: frozenset(iterable=[1]),  # type: ignore[call-arg]
        "format": lambda: format(1, format_spec="d"),  # type: ignore[call-arg]
        "pow": lambda: pow(2, 3, modulo=5),  # type: ignore[call-overload]
        "iter, two": lambda: iter([1], 2),  # type: ignore[call-overload]
        "getattr, no name": lambda: getattr(x, 1, 3),  # type: ignore[call-overload]
        "hasattr, no name": lambda: hasattr(x, None),  # type: ignore[arg-type]
        "vars": lambda: vars(3),
        "an empty iterator": lambda: next(iter(())),
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except (TypeError, StopIteration) as error:
            found[name] = (type(error).__name__, *error.args)
    return x, found


class OwnSystemError(OSError):
    def __init__(self, wanted: str) -> None:
        super().__init__(2, "not there", wanted)
        self.wanted = wanted


@case
def native_exceptions_leave(x: Any) -> Any:
    """What they hold beside their arguments leaves with them."""

    def answering() -> Any:
        return (yield 1)

    generator = answering()
    next(generator)
    made: list[BaseException] = [StopIteration(3, 4), SystemExit(2), FileNotFoundError(2, "a", "b", None, "c")]
    made += [UnicodeDecodeError("utf8", b"ab", 0, 1, "why"), SyntaxError("a", ("file", 1, 2, "text"))]
    made += [ImportError("a", name="b", path="c"), KeyError(1), OwnSystemError("file"), StopIteration()]
    try:
        generator.send((x, 2))
    except StopIteration as stop:
        made.append(stop)
    return made
