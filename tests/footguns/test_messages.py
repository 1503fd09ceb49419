"""Log records and warnings are given at every call, in order, with that call's numbers and the program's own line."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.errors import EagerFallbackWarning, GraphBreakError, GraphBreakWarning

logger = logging.getLogger("tests.messages")
adapter = logging.LoggerAdapter(logger, None)
Program = Callable[[Tensor], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelname, record.getMessage(), record.funcName, record.lineno, record.pathname))


@contextlib.contextmanager
def recorded(level: int) -> Iterator[list[Any]]:
    handler = _Records()
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield handler.seen
        own = [item for item in caught if item.category.__module__ != "dovetail.errors"]
        handler.seen.append([(str(item.message), item.category, item.filename, item.lineno) for item in own])
    finally:
        logger.removeHandler(handler)


@program
def a_constant(x: Tensor) -> Any:
    logger.info("step done")
    return x * 2


@program
def sizes(x: Tensor) -> Any:
    logger.info("rows %d of %s", x.shape[0], tuple(x.shape))
    logger.warning(f"{x.shape[0]} rows, {x.shape[0] * 2:04d} twice")
    return x * 2


@program
def an_item(x: Tensor) -> Any:
    loss = x.sum()
    logger.info("loss %.3f", loss.item())
    return loss * 2


@program
def an_item_in_a_text(x: Tensor) -> Any:
    loss = x.sum()
    logger.info(f"loss {loss.item():.3f}")
    return loss * 2


@program
def a_tensor(x: Tensor) -> Any:
    logger.info("x is %s", x)
    return x + 1


@program
def a_tensor_that_changes_afterwards(x: Tensor) -> Any:
    y = x * 2
    logger.info("y is %s", y)
    y.add_(1)
    logger.info("y was %s", [y])
    return y


@program
def a_list_that_grows_afterwards(x: Tensor) -> Any:
    found = [1]
    logger.info("found %s", found)
    found.append(2)
    return x * len(found)


@program
def warns(x: Tensor) -> Any:
    warnings.warn("plain")  # noqa: B028
    warnings.warn(f"{x.shape[0]} rows", RuntimeWarning, stacklevel=1)
    warnings.warn(UserWarning("an object"))  # noqa: B028
    return x + 1


@program
def warns_of_data(x: Tensor) -> Any:
    warnings.warn(f"loss {x.sum().item():.2f}", stacklevel=1)
    return x + 1


def _inner(x: Tensor) -> Tensor:
    logger.debug("inside")
    logger.error("inside, %s", "an error")
    warnings.warn("of the caller", stacklevel=2)
    return x.sin()


@program
def in_a_called_function(x: Tensor) -> Any:
    logger.info("before")
    y = _inner(x)
    logger.info("after")
    return y


@program
def in_a_branch(x: Tensor) -> Any:
    if x.sum() > 3:
        logger.info("large")
        return x * 2
    logger.info("small")
    return x * 3


@program
def through_an_adapter(x: Tensor) -> Any:
    adapter.info("adapted %d", 3)
    return x * 2


@program
def by_level(x: Tensor) -> Any:
    logger.log(logging.INFO, "by level")
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("only where it is shown: %s", x.shape[0])
    return x * 2


@program
def of_an_exception(x: Tensor) -> Any:
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("caught")
        logger.info("still handling")
    return x * 2


@program
def in_a_loop(x: Tensor) -> Any:
    for round_ in range(3):
        logger.info("round %d", round_)
        x = x * 2
    return x


@program
def before_an_error(x: Tensor) -> Any:
    logger.info("soon")
    if x.shape[0] == 4:
        raise ValueError("four")
    return x * 2


@program
def in_a_hook(x: Tensor) -> Any:
    y = x.detach().requires_grad_()
    z = y * 2
    z.register_hook(lambda gradient: logger.info("in the backward"))
    z.sum().backward()
    return y.grad


def run(call: Program, level: int) -> Any:
    out: list[Any] = []
    with recorded(level) as seen:
        for rows in (2, 3, 2, 4, 5):
            try:
                out.append(call(torch.arange(float(rows))).tolist())
            except ValueError as error:
                out.append(str(error))
            out.append(len(seen))
    return out, seen


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.CRITICAL])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.sampled(4)
def test_messages_are_those_of_eager(name: str, level: int) -> None:
    expected = run(PROGRAMS[name], level)
    assert run(dovetail.compile(PROGRAMS[name], backend="aten"), level) == expected


@pytest.mark.parametrize("name", ["a_constant", "an_item", "an_item_in_a_text", "sizes", "in_a_called_function"])
def test_messages_of_numbers_break_no_graph(name: str) -> None:
    expected = run(PROGRAMS[name], logging.INFO)
    compiled = dovetail.compile(PROGRAMS[name], backend="aten", fullgraph=True)
    assert run(compiled, logging.INFO) == expected


def test_a_message_that_is_dropped_breaks_no_graph_until_it_is_not() -> None:
    compiled = dovetail.compile(a_tensor, backend="aten", fullgraph=True)
    x = torch.ones(2)
    with recorded(logging.WARNING) as seen:
        assert torch.equal(compiled(x), x + 1)
    with recorded(logging.INFO) as seen, pytest.raises(GraphBreakError, match="object in it"):
        compiled(x)
    assert seen == [[]]


def test_warnings_that_become_errors_are_raised_where_eager_raises_them() -> None:
    log: list[str] = []

    def call(x: Tensor) -> Tensor:
        try:
            warnings.warn("now", stacklevel=1)
        except UserWarning:
            log.append("raised")
        return x * 2

    compiled = dovetail.compile(call, backend="aten")
    for action in ("ignore", "error", "ignore", "error"):
        with warnings.catch_warnings():
            warnings.simplefilter(action)  # type: ignore[arg-type]
            for category in (EagerFallbackWarning, GraphBreakWarning):
                warnings.simplefilter("ignore", category)
            compiled(torch.ones(2))
    assert log == ["raised"] * 2


def test_a_logger_that_is_replaced_is_another_one() -> None:
    class Holder:
        log = logging.getLogger("tests.messages")

    def call(x: Tensor) -> Tensor:
        Holder.log.info("here")
        return x * 2

    compiled = dovetail.compile(call, backend="aten")
    with recorded(logging.INFO) as seen:
        compiled(torch.ones(2))
        Holder.log = logging.getLogger("tests.messages.other")
        compiled(torch.ones(2))
        Holder.log.setLevel(logging.ERROR)
        compiled(torch.ones(2))
        assert len(seen) == 2


def _recorded(x: Tensor, n: int, seen: list[str]) -> Tensor:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(f"number {n}", RuntimeWarning, stacklevel=1)
        y = x * n
    seen.extend(str(item.message) for item in caught)
    return y * len(caught)


def _recorded_after_a_break(x: Tensor, n: int, seen: list[str]) -> Tensor:
    return _recorded(x * x.sum().item(), n, seen)


def _ignored(x: Tensor, n: int, seen: list[str]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("nobody sees it", stacklevel=1)
        y = x * n
    warnings.warn(f"number {n}", stacklevel=1)
    return y


def _filtered(x: Tensor, n: int, seen: list[str]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.warn("nobody sees it", DeprecationWarning, stacklevel=1)
        warnings.warn(f"number {n}", RuntimeWarning, stacklevel=1)
    return x * n


@pytest.mark.parametrize("function", [_recorded, _recorded_after_a_break, _ignored, _filtered])
def test_warnings_in_a_block_that_records_or_filters_them(function: Callable[..., Tensor]) -> None:
    outcomes = []
    for call in (function, dovetail.compile(function, backend="aten")):
        seen: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = [call(torch.ones(2), n, seen).tolist() for n in (1, 2, 3)]
        given = [str(item.message) for item in caught if not issubclass(item.category, EagerFallbackWarning)]
        outcomes.append((results, seen, given))
    assert outcomes[1] == outcomes[0]


def test_a_block_that_ignores_warnings_breaks_no_graph() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dovetail.compile(_ignored, backend="aten", fullgraph=True)(torch.ones(2), 2, [])
