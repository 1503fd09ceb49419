"""``contextvars.ContextVar`` in a compiled function: read anew at each call; the graph breaks where it is set."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch

import dovetail
from dovetail import errors
from tests.differential import same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor
SCALE: ContextVar[Any] = ContextVar("SCALE", default=3.0)
UNSET: ContextVar[Any] = ContextVar("UNSET")


class Settings:
    """An object that a variable holds."""

    def __init__(self, rate: float) -> None:
        self.rate = rate


@contextlib.contextmanager
def scaled(value: Any) -> Iterator[None]:
    """The usual way to set a variable for a block."""
    token = SCALE.set(value)
    try:
        yield
    finally:
        SCALE.reset(token)


def reads(x: Tensor) -> Any:
    return x * SCALE.get()


def reads_an_object(x: Tensor) -> Any:
    found = UNSET.get(None)
    return x if found is None else x * found.rate


def in_a_block(x: Tensor) -> Any:
    before = SCALE.get()
    with scaled(5.0):
        y = x * SCALE.get()
        with scaled(x.sum()):
            y = y + SCALE.get()
    assert float(SCALE.get()) == float(before)
    return y * SCALE.get()


def stays_set(x: Tensor) -> Any:
    SCALE.set(SCALE.get() + 1)
    SCALE.set(SCALE.get() * 2)
    UNSET.set(x.sin())
    return x * SCALE.get()


def hands_out_its_token(x: Tensor) -> Any:
    UNSET.set(x * 2)
    return x * 2, SCALE.set(7.0)


def handled(x: Tensor) -> Any:
    try:
        return x * UNSET.get()
    except LookupError:
        return x - 1


def across_a_break(x: Tensor) -> Any:
    token = SCALE.set(x.mean())
    print(end="")
    y = x * SCALE.get()
    SCALE.reset(token)
    return y + SCALE.get()


def _steps(function: Any) -> list[Any]:
    found = []
    for value in (3.0, 3.0, 2.0, 1.5):
        if value != 3.0:
            SCALE.set(value)
            UNSET.set(Settings(value))
        x = torch.linspace(0, 1, 3, requires_grad=True)
        result = function(x)
        if isinstance(result, tuple):
            result, token = result
            SCALE.reset(token)
        gradient = torch.autograd.grad(result.square().sum(), x)
        seen = UNSET.get(None)
        found.append((result, gradient, SCALE.get(), seen.rate if isinstance(seen, Settings) else seen))
    return found


@pytest.mark.parametrize("program", [reads, reads_an_object])
def test_one_graph(program: Any) -> None:
    eager = contextvars.copy_context().run(_steps, program)
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    same(eager, contextvars.copy_context().run(_steps, compiled))
    assert len(compiled.entries) <= 4


@pytest.mark.parametrize("program", [in_a_block, stays_set, hands_out_its_token, across_a_break])
def test_it_is_set_at_a_break(program: Any) -> None:
    eager = contextvars.copy_context().run(_steps, program)
    same(eager, contextvars.copy_context().run(_steps, dovetail.compile(program, backend="aten")), exact=False)


def test_a_variable_without_a_value() -> None:
    x = torch.ones(3)
    compiled = dovetail.compile(handled, backend="aten", fullgraph=True)

    def run(function: Any) -> Any:
        first = function(x)
        UNSET.set(2.0)
        return first, function(x)

    same(contextvars.copy_context().run(run, handled), contextvars.copy_context().run(run, compiled))


def test_a_token_of_before_is_refused() -> None:
    def resets(x: Tensor, token: Any) -> Any:
        SCALE.reset(token)
        return x * SCALE.get()

    def run(function: Any) -> Any:
        return function(torch.ones(2), SCALE.set(4.0)), SCALE.get()

    with pytest.raises(errors.GraphBreakError):
        contextvars.copy_context().run(run, dovetail.compile(resets, backend="aten", fullgraph=True))
    compiled = dovetail.compile(resets, backend="aten")
    same(contextvars.copy_context().run(run, resets), contextvars.copy_context().run(run, compiled))


def test_nothing_stays_set_where_the_function_raises() -> None:
    def raises(x: Tensor) -> Any:
        with scaled(9.0):
            raise ValueError(SCALE.get())

    def run(function: Any) -> Any:
        with pytest.raises(ValueError, match=r"9\.0"):
            function(torch.ones(2))
        return SCALE.get()

    assert contextvars.copy_context().run(run, dovetail.compile(raises, backend="aten")) == 3.0
