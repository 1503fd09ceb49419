"""Messages that tell a size hold no graph to that size, and nothing else that looks alike escapes its guard."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

import pytest

from tests.differential import check_calls, randn

logger = logging.getLogger("told_sizes")
CALLS = [(randn(rows, 3, grad=True),) for rows in (4, 5, 7, 9)]


@functools.lru_cache(None)
def _warning_once(self: Any, *args: Any, **kwargs: Any) -> None:
    self.warning(*args, **kwargs)


class _Once(logging.Logger):
    warning_once = _warning_once


once = _Once("told_sizes.once")


def _plain(x: Any) -> Any:
    logger.warning(f"{x.shape[0]} rows")
    return x * 2


def _longer(x: Any) -> Any:
    rows = x.shape[0]
    padding = -rows % 4
    logger.info(f"padded from {rows:d} to {rows + padding} rows, {'a multiple'} of {4}", stacklevel=1)
    return x * 2


def _arguments(x: Any) -> Any:
    logger.error("%d of %s", x.shape[0], "rows")
    return x * 2


def _once_each(x: Any) -> Any:
    once.warning_once(f"padded from {x.shape[0]} to {x.shape[0] + 1}")
    return x * 2


@pytest.mark.parametrize("function", [_plain, _longer, _arguments])
def test_a_message_with_a_size_compiles_once_more(function: Any) -> None:
    check_calls(function, CALLS, entries=2)


def test_a_warning_with_a_size_compiles_once_more() -> None:
    def warn(x: Any) -> Any:
        warnings.warn(f"{x.shape[0]} rows", stacklevel=1)
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_calls(warn, CALLS, entries=2)


def test_the_message_tells_the_numbers_of_the_call(caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "told_sizes")
    check_calls(_plain, [(randn(rows, 3),) for rows in (4, 5, 6)], entries=2)
    # Eager's and ours, call by call.
    assert [item.getMessage() for item in caplog.records if item.name == "told_sizes"] == [
        text for text in ("4 rows", "5 rows", "6 rows") for _ in range(2)
    ]


def _used_result(x: Any) -> Any:
    found = logger.warning(f"{x.shape[0]} rows")
    return x * 2, found


def _kept_text(x: Any) -> Any:
    text = f"{x.shape[0]} rows"
    logger.warning(text)
    return x * 2, text


def _part_of_a_comparison(x: Any) -> Any:
    logger.warning(f"{x.shape[0]}" == "7")
    return x * (2 if f"{x.shape[0]}" == "7" else 3)


class _Keeps(logging.Logger):
    def warning(self, message: Any, *args: Any, **kwargs: Any) -> None:
        self.last = message


def _own_logger(x: Any) -> Any:
    keeps = _Keeps("told_sizes.keeps")
    keeps.warning(f"{x.shape[0]} rows")
    return x * 2, keeps.last


def _named_by_size(x: Any) -> Any:
    table = {"4": 2, "5": 3, "7": 5, "9": 7}
    logger.warning(f"{table[f'{x.shape[0]}']} of them")
    return x * table[f"{x.shape[0]}"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "function", [_used_result, _kept_text, _part_of_a_comparison, _own_logger, _named_by_size, _once_each]
)
def test_text_that_is_used_otherwise_is_right(function: Any) -> None:
    check_calls(function, CALLS)
