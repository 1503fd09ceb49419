"""Functions of ``operator`` that write, called by the program and by native code, on what existed before the call."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import check_calls, compilations, leaf

pytestmark = pytest.mark.usefixtures("quiet")

PROGRAMS: dict[str, Any] = {
    "joined": lambda x, old: operator.iconcat(old, [x.shape[0]]),
    "joined with a set": lambda x, old: operator.iconcat(old, {7}),
    "joined with a number": lambda x, old: operator.iconcat(old, 7),
    "joined with too little": lambda x, old: operator.iconcat(old),  # type: ignore[call-arg]
    "a tuple": lambda x, old: operator.iconcat(tuple(old), (1,)),
    "reduced": lambda x, old: functools.reduce(operator.iconcat, [[1], [2, 3]], old),
    "reduced by +=": lambda x, old: functools.reduce(operator.iadd, [[1], (2, 3)], old),
    "reduced from new": lambda x, old: functools.reduce(operator.iconcat, [old, [2]], []),
    "sums": lambda x, old: list(itertools.accumulate([[1], [2]], operator.iadd, initial=old)),
    "sums by keyword": lambda x, old: list(itertools.accumulate([[1], [2]], func=operator.iconcat, initial=old)),
    "deleted": lambda x, old: list(itertools.starmap(operator.delitem, [(old, 0), (old, 0)])),
    "set": lambda x, old: list(itertools.starmap(operator.setitem, [(old, 0, len(old)), (old, slice(1, 1), "ab")])),
    "numbers": lambda x, old: functools.reduce(operator.imul, x.shape, len(old)),
    "tensors": lambda x, old: functools.reduce(operator.iadd, [x, x * 2], x.clone()),
}


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_they_write_is_written_once(name: str, backend: str) -> None:
    def answers(call: Any) -> list[str]:
        old, seen = [3, 1, 4], []
        for rows in (2, 2, 3):
            try:
                seen.append(str(call(torch.ones(rows, 2), old)))
            except TypeError as error:
                seen.append(str(error))
            seen.append(str(old))
            old += [5] * (3 - len(old))
        return seen

    assert answers(dovetail.compile(PROGRAMS[name], backend=backend)) == answers(PROGRAMS[name])


def test_divmod_of_sizes_and_numbers_that_change() -> None:
    def function(x: torch.Tensor, number: int) -> Any:
        size = x.shape[0]
        return x + 1, divmod(size * 3 - 1, 4), divmod(17, size), divmod(number - size, -3), divmod(size, 1.5)

    compiled = dovetail.compile(function, backend="aten", dynamic=True, fullgraph=True)
    for size in (5, 6, 9):
        for number in (-4, 3, 8):
            assert compiled(torch.ones(size), number)[1:] == function(torch.ones(size), number)[1:]
    with pytest.raises(ZeroDivisionError):
        compiled(torch.ones(0), 3)


class Scaled:
    """Has a method and an attribute for getters."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def times(self, x: torch.Tensor, number: int = 1) -> torch.Tensor:
        return x * self.factor * number


OBJECTS = [Scaled(2), Scaled(1)]


def _made_inside(x: torch.Tensor, number: int) -> Any:
    with_tensor = operator.methodcaller("times", x * 2, number=number)
    of_tensor = operator.methodcaller("add", x * 2)
    places = operator.itemgetter(number % 2, slice(1))
    before = with_tensor(OBJECTS[0]).detach(), places([x.shape, 1])
    torch._dynamo.graph_break()
    after = (
        with_tensor(OBJECTS[1]),
        places([1, x.shape]),
        of_tensor(x.detach()).detach(),
        len([*map(with_tensor, OBJECTS)]),
    )
    smallest = min(OBJECTS, key=operator.attrgetter("factor")).factor
    return before, after, smallest, sorted([[3, 1], [2, 4]], key=operator.itemgetter(0))


def test_getters_keep_tensors_of_the_graph_over_a_break() -> None:
    check_calls(_made_inside, [(leaf(2), 1), (leaf(2), 2), (leaf(2), 3)], fullgraph=False)


def test_what_a_getter_of_before_holds_is_read_where_it_is() -> None:
    weight, more = torch.ones(2), [1]
    times, more_by = operator.methodcaller("mul", weight), operator.methodcaller("extend", more)

    def function(x: torch.Tensor, pick: Any) -> Any:
        numbers = [x.shape[0]]
        more_by(numbers)
        return times(x), numbers, pick([4, 5, 6])

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for pick in (
        operator.itemgetter(1),
        operator.itemgetter(1),
        operator.itemgetter(2),
        operator.itemgetter(0, 1),
        operator.methodcaller("index", 5),
    ):
        weight.add_(1)
        more.append(7)
        (result, *rest), (expected, *others) = compiled(torch.ones(2), pick), function(torch.ones(2), pick)
        assert torch.equal(result, expected)
        assert str(rest) == str(others)
    made = compilations(compiled)
    compiled(torch.ones(2), operator.methodcaller("index", 5))
    assert compilations(compiled) == made
