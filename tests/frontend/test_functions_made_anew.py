"""Functions that are other objects at each call: known by their code, and by what they close over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dovetail
from tests.differential import same

_LAYER = torch.nn.Linear(3, 3)


def _times(factor: Any) -> Callable[[Any], Any]:
    return lambda value: value * factor


def _default(factor: int) -> Callable[..., Any]:
    def scaled(value: Any, scale: int = factor, *, shift: int = factor + 2) -> Any:
        return value * scale + shift

    return scaled


def _nested(factor: int) -> Callable[..., Any]:
    inner = _times(factor)

    @functools.wraps(inner)
    def outer(value: Any) -> Any:
        return inner(value) + inner(value)

    return outer


def _recursive(factor: int) -> Callable[..., Any]:
    def step(value: Any, left: int = 2) -> Any:
        return step(value, left - 1) + 1 if left else value * factor

    return step


class _Holder:
    def __init__(self, factor: int) -> None:
        self.function = _times(factor)

    def __call__(self, value: Any) -> Any:
        return self.function(value)


_MADE: dict[str, Callable[[int], Any]] = {
    "number": _times,
    "tensor": lambda number: _times(torch.full((3,), float(number))),
    "module": lambda number: lambda value: _LAYER(value).tanh(),
    "default": _default,
    "nested": _nested,
    "recursive": _recursive,
    "partial": lambda number: functools.partial(torch.mul, other=number),
    "partial by position": lambda number: functools.partial(torch.add, torch.ones(3), alpha=number),
    "partial of a closure": lambda number: functools.partial(_times(number)),
    "in an object": _Holder,
    "bound method": lambda number: _Holder(number).__call__,
}
_USED: dict[str, Callable[..., Any]] = {
    "called": lambda function, x: function(x),
    "checkpoint": lambda function, x: checkpoint(function, x, use_reentrant=False),
    "vmap": lambda function, x: torch.vmap(function)(x),
    "map": lambda function, x: sum(map(function, [x, x])),
    "after a break": lambda function, x: function(x * x.sum().sign().tolist()),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("used", _USED)
@pytest.mark.parametrize("made", ["number", "tensor"])
def test_two_entries_by_use(made: str, used: str) -> None:
    _two_entries(made, used)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("made", _MADE)
def test_two_entries(made: str) -> None:
    _two_entries(made, "called")


@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
def _two_entries(made: str, used: str) -> None:
    program = _USED[used]
    compiled = dovetail.compile(program, backend="aten")
    x = torch.randn(2, 3, requires_grad=True)
    before = 0
    for number in range(2, 10):
        function = _MADE[made](number)
        expected, found = program(function, x), compiled(function, x)
        same(expected, found)
        same(torch.autograd.grad(expected.sum(), x), torch.autograd.grad(found.sum(), x))
        if number == 5:
            before = dovetail.events_of(compiled).count("compile")
    assert dovetail.events_of(compiled).count("compile") == before <= (2 if used != "after a break" else 6)


_KNOWN = _times(2)
_TABLE = {_KNOWN: 5}


def _keeps(holder: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
    holder.function = function
    return function(x)


def _wraps(function: Any, x: torch.Tensor) -> Any:
    def wrapped(value: Any) -> Any:
        return function(value) + 1

    return wrapped(x), wrapped


_ASKED: dict[str, Callable[..., Any]] = {
    "is": lambda function, x: x * 2 if function is _KNOWN else x * 3,
    "read first": lambda function, x: (function(x), x * 2 if _KNOWN is function else x * 3)[1],
    "both are called": lambda function, x: _KNOWN(x) + function(x),
    "equal": lambda function, x: x * 2 if function == _KNOWN else x * 3,
    "key": lambda function, x: x * _TABLE.get(function, 7),
    "in a list": lambda function, x: x * (2 if function in [_KNOWN] else 3),
    "in a tuple": lambda function, x: x * (2 if (function, 1) == (_KNOWN, 1) else 3),
}


@pytest.mark.parametrize("name", _ASKED)
def test_which_function_it_is(name: str) -> None:
    program = _ASKED[name]
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    x = torch.randn(2, 3)
    for number in range(8):
        function = _KNOWN if number % 3 == 2 else _times(2)
        same(program(function, x), compiled(function, x))


def test_two_that_may_be_one() -> None:
    compiled = dovetail.compile(lambda one, other, x: x * 2 if one is other else x * 3, backend="aten", fullgraph=True)
    x = torch.randn(2)
    for number in range(8):
        one, other = _times(1), _times(1)
        is_one = number % 3 == 2
        same(x * (2 if is_one else 3), compiled(one, one if is_one else other, x))


def test_it_leaves_the_function() -> None:
    keeps = dovetail.compile(_keeps, backend="aten", fullgraph=True)
    wraps = dovetail.compile(_wraps, backend="aten", fullgraph=True)
    hands_on = dovetail.compile(lambda function, x: (x * 2, function), backend="aten", fullgraph=True)
    x = torch.randn(2)
    for number in range(2, 7):
        function, holder = _times(number), _Holder(0)
        same(x * number, keeps(holder, function, x))
        assert holder.function is function
        result, wrapped = wraps(function, x)
        same((x * number + 1, x * number + 1), (result, wrapped(x)))
        assert hands_on(function, x)[1] is function


def _counter(start: int, is_shared: bool) -> tuple[Callable[[], None], Callable[[Any], Any]]:
    count = start

    def add() -> None:
        nonlocal count
        count += 1

    def read(value: Any) -> Any:
        return value * count

    return add, read if is_shared else _counter(start, True)[1]


def test_cells_that_are_written_to() -> None:
    def program(add: Any, read: Any, x: torch.Tensor) -> torch.Tensor:
        add()
        return read(x)

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    x = torch.ones(2)
    for number in range(1, 9):
        is_shared = number % 3 != 0
        found = []
        for function in (program, compiled):
            add, read = _counter(number, is_shared)
            found.append((function(add, read, x), read(x)))
        same(*found)


def test_the_same_code_with_other_globals() -> None:
    code = compile("lambda x: x * K", "made", "eval")
    compiled = dovetail.compile(lambda function, x: function(x), backend="aten", fullgraph=True)
    x = torch.ones(2)
    for number in range(5):
        same(x * number, compiled(eval(code, {"K": number}), x))


def test_nothing_is_kept_alive() -> None:
    import gc
    import weakref

    compiled = dovetail.compile(lambda function, x: function(x), backend="aten", fullgraph=True)
    x = torch.ones(2)
    held = []
    for number in range(4):
        weight = torch.full((2,), float(number))
        held.append(weakref.ref(weight))
        compiled(_times(weight), x)
        del weight
    gc.collect()
    assert [reference() for reference in held] == [None] * 4


def test_a_function_with_attributes_leaves() -> None:
    def function(x: torch.Tensor, count: int) -> Any:
        scaled = x * count

        def inner(value: torch.Tensor) -> torch.Tensor:
            inner.calls += 1  # type: ignore[attr-defined]
            return value + scaled

        inner.calls = 0  # type: ignore[attr-defined]
        inner.weight = scaled  # type: ignore[attr-defined]
        return inner, inner(x), inner.calls  # type: ignore[attr-defined]

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for count in (1, 2, 3):
        x = torch.ones(2, requires_grad=True)
        inner, result, calls = compiled(x, count)
        expected, wanted, _ = function(x, count)
        same((inner(x), result, calls, inner.weight, inner.calls), (expected(x), wanted, 1, expected.weight, 2))
        inner(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [1.0 + count] * 2
