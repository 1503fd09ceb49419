"""Objects with a ``__del__`` are gone when eager's are, and what they do then is done in eager's order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

LOG: list[Any] = []


class Logged:
    """An object that says when it goes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        LOG.append(self.number)


class Holder:
    """Somewhere to keep an object."""

    kept: Any = None
    items: list[Any]
    table: dict[str, Any]


HOLDER = Holder()


def _made(x: torch.Tensor, number: int) -> Any:
    logged = Logged(number)
    y = x * logged.number
    logged = None  # type: ignore[assignment]
    LOG.append("after")
    return y


def _returned(x: torch.Tensor, number: int) -> Any:
    logged = Logged(number)
    return x * logged.number, logged


def _replaced(x: torch.Tensor, number: int) -> Any:
    y = x * HOLDER.kept.number
    HOLDER.kept = None
    LOG.append("after")
    return y


def _popped(x: torch.Tensor, number: int) -> Any:
    HOLDER.items.pop()
    LOG.append("after")
    return x * number


def _deleted(x: torch.Tensor, number: int) -> Any:
    del HOLDER.table["a"]
    LOG.append("after")
    return x * number


@pytest.mark.parametrize("program", [_made, _returned, _replaced, _popped, _deleted])
def test_an_object_with_a_del_goes_when_it_goes_in_eager(program: Callable[[torch.Tensor, int], Any]) -> None:
    def logged(function: Callable[[torch.Tensor, int], Any]) -> list[Any]:
        LOG.clear()
        for number in (1, 1, 2, 3):
            HOLDER.kept, HOLDER.items, HOLDER.table = Logged(number), [Logged(10)], {"a": Logged(20)}
            LOG.append("begin")
            function(torch.ones(2), number)
            LOG.append("end")
        HOLDER.kept, HOLDER.items, HOLDER.table = None, [], {}
        return list(LOG)

    expected = logged(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert logged(dovetail.compile(program, backend="aten")) == expected
