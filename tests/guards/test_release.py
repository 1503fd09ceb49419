"""Guards hold on to nothing that the program may let go, and what is gone never matches."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import dovetail
from dovetail.guards import (
    ArgumentSource,
    CalleeSource,
    Checker,
    DictKeys,
    Equals,
    GuardSet,
    HasNoKey,
    Identity,
    ItemSource,
    Predicate,
    SetEquals,
    TypeIs,
    compile_checker,
)

X = ArgumentSource(0, "L['x']")


def checker_of(*pairs: tuple[Any, Predicate]) -> Checker:
    guards = GuardSet()
    for source, predicate in pairs:
        guards.add(source, predicate)
    guards.set_call_shape(1, ())
    return compile_checker(guards)


def hits(checker: Checker, value: Any) -> bool:
    found = checker.check(None, (value,), {}) is not None
    assert found is not bool(checker.explain(None, (value,), {}))
    return found


@pytest.mark.parametrize("typed", [True, False])
def test_keys_that_are_objects_die(typed: bool) -> None:
    """A step that reads ``optimizer.state[parameter]`` outlives the optimizer."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    gone = weakref.ref(parameter)
    types = [(X, TypeIs(dict))] if typed else []
    item = checker_of((ItemSource(X, parameter), Equals(1)), *types)
    keys = checker_of((X, DictKeys((parameter, "a"))), *types)
    absent = checker_of((X, HasNoKey(parameter)), *types)
    items = checker_of((X, SetEquals({parameter})))
    assert hits(item, {parameter: 1}) and not hits(item, {parameter: 2}) and not hits(item, {})
    assert hits(keys, {parameter: 0, "a": 0}) and not hits(keys, {"a": 0, parameter: 0})
    assert hits(absent, {}) and not hits(absent, {parameter: 0})
    assert hits(items, {parameter}) and not hits(items, {torch.nn.Parameter(torch.zeros(2))})
    del parameter
    assert gone() is None
    # None is how a dead weak reference looks.
    assert not hits(item, {None: 1}) and not hits(keys, {None: 0, "a": 0}) and not hits(items, {None})
    assert hits(absent, {None: 1})


def test_an_object_that_is_gone_never_matches_again() -> None:
    module = torch.nn.Linear(2, 2)
    gone = weakref.ref(module)
    checker = checker_of((X, Identity(module)))
    assert hits(checker, module) and not checker.guards.is_dead
    del module
    assert gone() is None and checker.guards.is_dead
    assert not hits(checker, torch.nn.Linear(2, 2)) and not hits(checker, None)


def test_a_check_keeps_neither_the_call_nor_the_model() -> None:
    """The fast check remembers what it found below the model, and lets go of it with the model."""
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)])
    guards = GuardSet()
    from tests.guards.time_check import guard_module

    guard_module(guards, CalleeSource(), model)
    checker = compile_checker(guards)
    for _ in range(6):
        assert checker.check(model, (), {}) is not None
    gone = [weakref.ref(item) for item in (model, model[0], model[0].weight)]
    del model
    assert [item() for item in gone] == [None] * 3


def _closure() -> tuple[Any, list[weakref.ref[Any]], Any]:
    model, offset = torch.nn.Linear(4, 4), torch.zeros(4)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (model(x) + offset).sum()

    def function(loss: Any, x: torch.Tensor) -> torch.Tensor:
        return loss(x) * 2

    return function, [weakref.ref(item) for item in (loss, model, model.weight, offset)], loss


def _closures_in_a_list() -> tuple[Any, list[weakref.ref[Any]], Any]:
    offset = torch.zeros(4)
    steps = [lambda x: x + offset, lambda x: x * offset]

    def function(steps: Any, x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = step(x)
        return x.sum()

    return function, [weakref.ref(item) for item in (*steps, offset)], steps


def _optimizer() -> tuple[Any, list[weakref.ref[Any]], Any]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def function(pair: Any, x: torch.Tensor) -> torch.Tensor:
        model, optimizer = pair
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return function, [weakref.ref(item) for item in (model, model.weight, optimizer)], (model, optimizer)


def _tensor_keys() -> tuple[Any, list[weakref.ref[Any]], Any]:
    table = {torch.zeros(2): 2.0, torch.zeros(2): 3.0}

    def function(table: Any, x: torch.Tensor) -> torch.Tensor:
        return sum(table.values()) * x.sum()  # type: ignore[no-any-return]

    return function, list(map(weakref.ref, table)), table


@pytest.mark.parametrize("make", [_closure, _closures_in_a_list, _optimizer, _tensor_keys])
def test_what_a_kept_function_was_given_dies(make: Any) -> None:
    function, gone, given = make()
    compiled = dovetail.compile(function, backend="aten")
    for _ in range(6):
        compiled(given, torch.randn(4, 4))
    assert all(item() is not None for item in gone)
    del function, given
    gc.collect()
    assert [item() for item in gone] == [None] * len(gone)
    assert compiled is not None
