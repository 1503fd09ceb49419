"""Attributes of thread-local objects: guarded by what the running thread has."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

X = torch.ones(2)


class State(threading.local):
    def __init__(self) -> None:
        self.scale = 2.0
        self.is_on = False


class Holder:
    def __init__(self) -> None:
        self.state = State()

    @property
    def is_on(self) -> bool:
        return self.state.is_on


def in_a_thread(function: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed, failed


def test_what_the_running_thread_has_set() -> None:
    holder, weights = Holder(), threading.local()
    weights.w = torch.ones(2, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * holder.state.scale
        return (y + 1 if holder.is_on else y) * weights.w

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)

    def check() -> None:
        same(function(X), compiled(X))

    def another() -> None:
        weights.w = torch.full((2,), 5.0)
        check()
        holder.state.scale = 11.0
        check()

    check()
    holder.state.scale = 3.0
    check()
    holder.state.is_on = True
    check()
    # The check of a hit remembers what it has found, in this thread.
    for _ in range(3):
        check()
        in_a_thread(another)
        check()
    weights.w = torch.zeros(2)
    check()


def test_what_the_thread_has_not_set() -> None:
    state = threading.local()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(state, "scale", 4)

    compiled = dovetail.compile(function, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scale in (None, 2, 3):
            if scale is not None:
                state.scale = scale
            same(function(X), compiled(X))
            in_a_thread(lambda: same(compiled(X), X * 4))


class Shadowed(threading.local):
    """What an instance holds under ``scale`` is not what its property gives."""

    def __init__(self) -> None:
        self.__dict__["scale"] = 5.0

    @property
    def scale(self) -> float:
        return 7.0


class Doubled(threading.local):
    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        return found * 2 if isinstance(found, float) else found


class WithDefault(threading.local):
    scale = 3.0


@pytest.mark.parametrize("kind", [Shadowed, Doubled, WithDefault])
def test_what_the_class_says_comes_first(kind: type[threading.local], quiet: None) -> None:
    state = kind()
    state.__dict__["scale"] = 5.0
    compiled = dovetail.compile(lambda x: x * state.scale, backend="aten")  # type: ignore[attr-defined]
    for _ in range(2):
        same(X * state.scale, compiled(X))  # type: ignore[attr-defined]


def test_a_property_that_the_class_gets_later(quiet: None) -> None:
    class Own(threading.local):
        pass

    state = Own()
    state.__dict__["scale"] = 5.0
    compiled = dovetail.compile(lambda x: x * state.scale, backend="aten")  # type: ignore[attr-defined]
    same(X * 5.0, compiled(X))
    Own.scale = property(lambda self: 7.0)  # type: ignore[attr-defined]
    same(X * 7.0, compiled(X))


def test_the_dictionary_of_the_running_thread() -> None:
    state = threading.local()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * state.__dict__.get("scale", 4) + len(state.__dict__)

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)

    def check() -> None:
        same(function(X), compiled(X))

    def another() -> None:
        check()
        state.scale = 5
        check()

    for scale in (None, None, 2, 3, 3):
        if scale is not None:
            state.scale = scale
        check()
        in_a_thread(check)
        in_a_thread(another)
        check()
    del state.scale
    check()


def test_a_write_to_the_dictionary_of_the_running_thread(quiet: None) -> None:
    states = [threading.local(), threading.local()]

    def function(state: threading.local, x: torch.Tensor) -> torch.Tensor:
        state.__dict__["count"] = state.__dict__.get("count", 0) + 1
        return x * state.count

    compiled = dovetail.compile(function, backend="aten")

    def check() -> None:
        for _ in range(2):
            same(function(states[0], X), compiled(states[1], X))
            assert states[0].count == states[1].count

    for _ in range(2):
        check()
        in_a_thread(check)


def test_the_number_of_the_running_thread(quiet: None) -> None:
    scales: dict[int, float] = {}

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * scales[threading.get_ident()] if threading.get_ident() in scales else x + 1

    compiled = dovetail.compile(function, backend="aten")

    def check() -> None:
        same(function(X), compiled(X))

    for scale in (None, 2.0, 3.0):
        if scale is not None:
            scales[threading.get_ident()] = scale
        check()
    assert dovetail.events_of(compiled).count("graph break") == 0
    for _ in range(3):
        in_a_thread(check)
        check()


def test_what_the_thread_sets_and_has_not_set() -> None:
    states = [threading.local(), threading.local()]

    def function(state: threading.local, x: torch.Tensor) -> Any:
        depth = getattr(state, "depth", None)
        state.depth = 1 if depth is None else depth + 1
        state.last = x * state.depth
        return state.last + 1, hasattr(state, "missing"), state.depth

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)

    def check() -> None:
        for _ in range(3):
            same(function(states[0], X), compiled(states[1], X))
            same(vars(states[0]), vars(states[1]))

    for _ in range(2):
        check()
        in_a_thread(check)
    for state in states:
        del state.depth
        state.missing = 1
    check()


def test_a_class_of_thread_local_objects_that_gets_a_property_for_what_is_set(quiet: None) -> None:
    class State(threading.local):
        pass

    states = [State(), State()]

    def function(state: State, x: torch.Tensor) -> Any:
        state.scale = 3
        return x * state.scale

    compiled = dovetail.compile(function, backend="aten")
    same(function(states[0], X), compiled(states[1], X))
    State.scale = property(lambda self: 5, lambda self, value: None)  # type: ignore[attr-defined]
    same(function(states[0], X), compiled(states[1], X))
