"""Objects that the function makes by way of a metaclass's ``__call__``, and of subclasses of ``functools.partial``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import check_calls, compare_call, leaf


class Counting(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "scale" in kwargs:
            kwargs["scale"] += 1
        made = super().__call__(*args, **kwargs)
        made.is_marked = True
        return made


class Scaled(metaclass=Counting):
    def __init__(self, value: torch.Tensor, scale: int = 1) -> None:
        if value.sum() > 1e9:
            raise ValueError("the value is too large")
        self.value, self.scale = value, scale

    def get(self) -> torch.Tensor:
        return self.value * self.scale


class Chosen(metaclass=Counting):
    def __new__(cls, value: torch.Tensor) -> Any:
        return Scaled(value, scale=3) if cls is Chosen else super().__new__(cls)

    def __init__(self, value: torch.Tensor) -> None:
        raise AssertionError("the object that __new__ has given is of another class")


class Single(type):
    made: dict[type, Any] = {}

    def __call__(cls, *args: Any) -> Any:
        if cls not in cls.made:
            cls.made[cls] = super().__call__(*args)
        return cls.made[cls]


class Settings(metaclass=Single):
    def __init__(self) -> None:
        self.factor = 3


class Bound(functools.partial):  # type: ignore[type-arg]
    """Its attribute has the name of one of ``functools.partial``, as that of a library for probabilistic programs."""

    __slots__ = ("func",)

    def __init__(self, func: Any) -> None:
        self.func = torch.cos


class Repeating(functools.partial):  # type: ignore[type-arg]
    def __new__(cls, function: Any, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls, function, *args, **kwargs)
        made.times = 2
        return made

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self(x)
        return x


class Doubled(functools.partial):  # type: ignore[type-arg]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


PROGRAMS = {
    "by a metaclass": lambda x: (made := Scaled(x, scale=2)).get() + made.scale + made.is_marked,
    "of another class": lambda x: Chosen(x).get(),
    "by type itself": lambda x: type.__call__(Scaled, x).get(),
    "once": lambda x: x * Settings().factor,
    "a partial function with an attribute of the same name": lambda x: Bound(torch.sin)(x),
    "a partial function with an attribute": lambda x: Repeating(torch.mul, x.detach()).repeat(x),
    "a partial function with keywords": lambda x: Repeating(torch.add, x, alpha=2)(x, alpha=3),
    "a partial function of another": lambda x: Repeating(Repeating(torch.add, x), alpha=2)(x),
    "a partial function with a call of its own": lambda x: Doubled(torch.add, x)(x),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_objects_are_made_in_one_graph(program: Callable[[torch.Tensor], Any]) -> None:
    check_calls(program, [(leaf(4),), (leaf(4) * 2,), (leaf(3),)])


def test_a_check_in_a_constructor_behind_a_metaclass_raises_at_the_users_line() -> None:
    compiled = dovetail.compile(lambda x: Scaled(x).get(), backend="aten", fullgraph=True)
    compare_call(lambda x: Scaled(x).get(), compiled, (leaf(4),))
    with pytest.raises(ValueError, match="the value is too large"):
        compiled(torch.full((4,), 1e9))


@pytest.mark.usefixtures("quiet")
def test_a_partial_function_from_outside_is_called_as_in_eager() -> None:
    given = Bound(torch.sin), Doubled(torch.add, torch.ones(4))
    check_calls(lambda x: given[0](x) + given[1](x), [(leaf(4),), (leaf(4) * 2,)], fullgraph=False)
