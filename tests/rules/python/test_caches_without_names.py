"""A cache around a partial function, which has neither a name nor a module."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

import dovetail


class Recipe:
    """A result of a cache that is no constant."""

    def __init__(self, factor: int) -> None:
        self.factor = factor


cached_number = functools.lru_cache(functools.partial(max, 3))
cached_object = functools.lru_cache(functools.partial(Recipe))


def by_number(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * cached_number(n)


def by_object(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * cached_object(n).factor


def test_constants_stay_in_one_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    compiled = dovetail.compile(by_number, backend="aten", fullgraph=True)
    for n in (2, 5, 2):
        assert torch.equal(compiled(x, n), by_number(x, n))


def test_an_object_of_the_cache_stays_in_one_graph() -> None:
    x = torch.ones(3)
    compiled = dovetail.compile(by_object, backend="aten", fullgraph=True)
    for n in (2, 5, 2):
        assert torch.equal(compiled(x, n), by_object(x, n))


#: A library that compiles an expression for the sizes that it is called with, and keeps what it has compiled (einx does).
LIBRARY = """
import dataclasses, functools

@dataclasses.dataclass(frozen=True)
class Shaped:
    sizes: tuple

class Engine:
    factor = 3

def plan(function, shaped, engine):
    made.append(shaped)
    scope = {}
    exec(f"def planned(x): return x.reshape({shaped.sizes[0] * shaped.sizes[1]}) * {function(engine.factor)}", scope)
    return scope["planned"], "text"

made, engine = [], Engine()
kept = functools.lru_cache(functools.partial(plan, lambda n: n + 1))

def call(x):
    planned, _ = kept(shaped=Shaped(tuple(x.shape)), engine=engine)
    return planned(x)
"""


def test_plans_of_a_library_are_kept_by_equal_objects() -> None:
    library: dict[str, Any] = {"__name__": "planner"}
    exec(compile(LIBRARY, os.path.join(os.path.dirname(torch.__file__), "planner.py"), "exec", 0, True), library)
    call = library["call"]
    compiled = dovetail.compile(lambda x: call(x) + 1, backend="aten", fullgraph=True)
    for rows in (2, 2, 3, 5, 2):
        x = torch.randn(rows, 4)
        assert torch.equal(compiled(x), call(x) + 1)
    assert len(library["made"]) == 3
    library["engine"].factor = 5
    library["kept"].cache_clear()
    x = torch.randn(2, 4)
    assert torch.equal(compiled(x), call(x) + 1)


def test_a_library_keeps_nothing_of_a_capture() -> None:
    """A function made inside is another key in each call, and what it closes over would be the trace's."""
    library: dict[str, Any] = {"__name__": "planner"}
    source = "import functools\nkept = functools.lru_cache(functools.partial(lambda parts: parts[0]))"
    exec(compile(source, os.path.join(os.path.dirname(torch.__file__), "keeper.py"), "exec", 0, True), library)
    kept = library["kept"]

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return kept(parts=(lambda: y, "plan"))() + 1

    compiled = dovetail.compile(program, backend="aten")
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(compiled(x), x * 2 + 1)
    assert kept.cache_info().currsize == 3
