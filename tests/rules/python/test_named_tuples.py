"""``collections.namedtuple`` inside of a compiled function."""

from __future__ import annotations

import collections
import sys
from collections import namedtuple
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import entries_of, same

FIELDS = ["first", "second"]


def _features(x: torch.Tensor) -> Any:
    made = namedtuple("Features", FIELDS)  # noqa: PYI024
    return made(x * 2, x + 1)


def _used(x: torch.Tensor) -> Any:
    features = _features(x)
    return features.first * features[1] + len(features._fields), features._replace(first=x)._asdict()


def _twice(x: torch.Tensor) -> Any:
    made = collections.namedtuple("Features", "first second", defaults=(3,))  # noqa: PYI024
    found = made(x)
    return isinstance(found, made), made.__module__, made.__name__, found.second, hash(made(1, 2)), x * 2


def _renamed(x: torch.Tensor) -> Any:
    made = namedtuple("Features", ["first", "class"], rename=True)  # type: ignore[misc]  # noqa: PYI024
    return made._fields, made(x, x)._1 * 2


def _refused(x: torch.Tensor) -> Any:
    try:
        namedtuple("Features", ["first", "first"])  # type: ignore[misc]  # noqa: PYI024
    except ValueError as error:
        return str(error), x * 2


@pytest.mark.parametrize("program", [_used, _twice, _renamed, _refused])
def test_one_graph(program: Any) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for number in range(3):
        x = torch.full((2,), float(number))
        same(program(x), compiled(x))
    assert entries_of(compiled) == 1


def test_a_result_is_of_a_class_of_its_call() -> None:
    def program(x: torch.Tensor) -> Any:
        result = _features(x)
        return result, type(result)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    expected, kind = program(torch.ones(2))
    kinds = set()
    for _ in range(3):
        found, made = compiled(torch.ones(2))
        assert type(found) is made and vars(made).keys() == vars(kind).keys() and made.__module__ == kind.__module__
        same(tuple(expected), tuple(found))
        kinds.add(made)
    assert len(kinds) == 3 and entries_of(compiled) == 1


def test_names_of_fields_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = dovetail.compile(_features, backend="aten", fullgraph=True)
    assert compiled(torch.ones(2))._fields == ("first", "second")
    monkeypatch.setattr(sys.modules[__name__], "FIELDS", ["first", "other"])
    assert compiled(torch.ones(2))._fields == ("first", "other")


@pytest.mark.usefixtures("quiet")
def test_a_class_that_is_alive_at_a_break() -> None:
    def program(x: torch.Tensor) -> Any:
        result = _features(x)
        print(end="")
        return isinstance(result, tuple), result.first * 2, result._fields, type(result)(1, 2)._asdict()

    compiled = dovetail.compile(program, backend="aten")
    for _ in range(3):
        same(program(torch.ones(2)), compiled(torch.ones(2)))
