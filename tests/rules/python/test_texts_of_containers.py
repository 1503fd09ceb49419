"""The text of a container that existed before the call follows from what is in it today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

pytestmark = pytest.mark.usefixtures("quiet")


def _in_place(items: Any) -> str:
    text = "%s!"
    text %= items
    return text


def _after_a_break(items: Any) -> str:
    mine = list(items)
    print(end="")
    return "%s" % mine + "{}".format({"a": mine})


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "percent": lambda items: "%s" % items,
    "percent, in a tuple": lambda items: "%s %r" % (items, [items]),
    "percent, in a dictionary": lambda items: "%(a)s" % {"a": {"b": items}},
    "percent, in place": _in_place,
    "percent, wide": lambda items: "%-9s|%.3s" % (items, items),
    "braces": lambda items: "{} {a}".format(items, a=[items]),
    "an item by braces": lambda items: "{0[0]}".format(items),
    "a literal": lambda items: f"{items}{[items]!r:>20}",
    "called by name": lambda items: str.__mod__("%s", items) + str.format("{}", items),
    "after a break": _after_a_break,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_made_of_what_is_inside_today(name: str) -> None:
    def program(x: torch.Tensor, items: Any) -> Any:
        return PROGRAMS[name](items), x * 2

    compiled = dovetail.compile(program, backend="aten")
    mine: list[Any] = [0]
    for items in ([1, 2], [1, 2], [2, 1], [2, 1, 3], [2.5], ["a"], [[1], 2], [[2], 2], mine, mine):
        assert compiled(torch.ones(2), items)[0] == program(torch.ones(2), items)[0]
        mine[0] += 1
