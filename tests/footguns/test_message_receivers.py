"""Handlers, filters and what shows warnings may share state with the program: they get a message where the program gives it."""

from __future__ import annotations

import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.errors import GraphBreakError, GraphBreakWarning

Case = tuple[Callable[[Tensor], Any], Callable[[], Any]]
logger = logging.getLogger("tests.receivers")
inner = logging.getLogger("tests.receivers.inner")
COUNT = 0
CASES: dict[str, Callable[[], Case]] = {}


pytestmark = pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


class _Handler(logging.Handler):
    """Calls a function of the test's with each text."""

    def __init__(self, note: Callable[[str], object]) -> None:
        super().__init__()
        self.note = note

    def emit(self, record: logging.LogRecord) -> None:
        self.note(record.getMessage())


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield
    for item in list(logger.handlers):
        logger.removeHandler(item)


@case
def one_list() -> Case:
    log: list[str] = []
    logger.addHandler(_Handler(log.append))

    def program(x: Tensor) -> Any:
        log.append("before")
        logger.info("rows %d", x.shape[0])
        log.append("after")
        return x * 2

    return program, lambda: list(log)


@case
def a_count_that_is_read() -> Case:
    state = {"n": 0}

    def note(text: str) -> None:
        state["n"] += 1

    logger.addHandler(_Handler(note))

    def program(x: Tensor) -> Any:
        logger.info("now")
        return x * state["n"]

    return program, lambda: dict(state)


@case
def a_global_number() -> Case:
    def note(text: str) -> None:
        global COUNT
        COUNT += 1

    logger.addHandler(_Handler(note))

    def program(x: Tensor) -> Any:
        logger.info("now")
        return x * COUNT

    return program, lambda: COUNT


@case
def a_global_number_of_the_programs() -> Case:
    seen: list[int] = []
    logger.addHandler(_Handler(lambda text: seen.append(COUNT)))

    def program(x: Tensor) -> Any:
        global COUNT
        COUNT += 1
        logger.info("now")
        COUNT += 10
        return x * 2

    return program, lambda: list(seen)


@case
def a_variable_of_an_enclosing_function() -> Case:
    count = 0

    def note(text: str) -> None:
        nonlocal count
        count += 1

    logger.addHandler(_Handler(note))

    def program(x: Tensor) -> Any:
        logger.info("now")
        return x + count

    return program, lambda: count


@case
def an_object_that_a_parents_handler_holds() -> Case:
    settings = types.SimpleNamespace(scale=1)

    def note(text: str) -> None:
        settings.scale += 1

    logger.addHandler(_Handler(note))

    def program(x: Tensor) -> Any:
        inner.warning("now")
        return x * settings.scale

    return program, lambda: settings.scale


@case
def a_filter() -> Case:
    seen: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        seen.append(record.getMessage())
        return True

    handler = _Handler(str)
    handler.addFilter(keep)
    logger.addHandler(handler)

    def program(x: Tensor) -> Any:
        logger.info("now")
        return x * len(seen)

    return program, lambda: list(seen)


@case
def an_attribute_of_the_handler() -> Case:
    class Counts(logging.Handler):
        count = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.count += 1

    handler = Counts()
    logger.addHandler(handler)

    def program(x: Tensor) -> Any:
        logger.info("now")
        return x * handler.count

    return program, lambda: handler.count


@case
def a_stream() -> Case:
    class Stream:
        lines = 0

        def write(self, text: str) -> None:
            self.lines += 1

        def flush(self) -> None:
            self.lines += 10

    stream = Stream()
    logger.addHandler(logging.StreamHandler(stream))  # type: ignore[arg-type]

    def program(x: Tensor) -> Any:
        logger.info("now")
        return x * stream.lines

    return program, lambda: stream.lines


@case
def a_warning_that_is_shown_otherwise() -> Case:
    shown: list[str] = []

    def show(message: Any, category: Any, *rest: Any) -> None:
        if category.__module__ != "dovetail.errors":
            shown.append(str(message))

    warnings.showwarning = show  # type: ignore[assignment]

    def program(x: Tensor) -> Any:
        shown.append("before")
        warnings.warn("now", stacklevel=1)
        shown.append("after")
        return x * len(shown)

    return program, lambda: list(shown)


def _run(make: Callable[[], Case], wrap: Callable[..., Any]) -> Any:
    global COUNT
    COUNT = 0
    for item in list(logger.handlers):
        logger.removeHandler(item)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", GraphBreakWarning)
        program, state = make()
        call = wrap(program)
        return [(call(torch.ones(rows)).tolist(), state()) for rows in (2, 2, 3)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_the_order_is_eagers(make: Callable[[], Case]) -> None:
    expected = _run(make, lambda program: program)
    assert _run(make, lambda program: dovetail.compile(program, backend="aten")) == expected


def test_one_graph_is_refused_in_words() -> None:
    program, _ = one_list()
    with pytest.raises(GraphBreakError, match="shares state with the function"):
        dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(2))


def test_a_handler_that_keeps_to_itself_breaks_no_graph() -> None:
    seen: list[str] = []
    logger.addHandler(_Handler(seen.append))
    logger.addHandler(logging.StreamHandler(sys.stderr))
    scales = [2.0]

    def program(x: Tensor) -> Any:
        logger.info("now")
        return x * scales[0]

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [2.0, 2.0]
    assert seen == ["now"] * 2


def test_a_handler_that_is_added_later() -> None:
    log: list[str] = []

    def program(x: Tensor) -> Any:
        logger.info("now")
        return x * (1 + len(log))

    logger.addHandler(_Handler(str))
    compiled = dovetail.compile(program, backend="aten")
    assert compiled(torch.ones(1)).item() == 1.0
    logger.addHandler(_Handler(log.append))
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [2.0, 3.0]
