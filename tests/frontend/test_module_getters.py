"""Modules that are asked by a function for what they do not have: ``__getattr__`` of the module, or of its class."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError
from tests.differential import same

X = torch.ones(2)


class Lazy(types.ModuleType):
    """As the top module of transformers: some names from a table, others are made when they are first asked for."""

    def __init__(self) -> None:
        super().__init__("lazy")
        self._objects: dict[str, Any] = {"__version__": "1.2", "scale": 3.0}

    def __getattr__(self, name: str) -> Any:
        if name in self._objects:
            return self._objects[name]
        if name == "made":
            self.made = 7.0
            return self.made
        raise AttributeError(name)


@pytest.fixture
def plain() -> Iterator[Any]:
    module = types.ModuleType("plain")
    module.table = {"scale": 5.0}  # type: ignore[attr-defined]

    def getter(name: str) -> Any:
        if name in module.table:  # type: ignore[attr-defined]
            return module.table[name]  # type: ignore[attr-defined]
        raise AttributeError(name)

    module.__getattr__ = getter  # type: ignore[method-assign]
    yield module


def test_a_module_class_with_a_getter() -> None:
    lazy: Any = Lazy()

    def function(x: torch.Tensor) -> torch.Tensor:
        more = 1 if lazy.__version__ == "1.2" else 2
        return x * lazy.scale + more + lazy.made + hasattr(lazy, "other")

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    same(function(X), compiled(X))
    same(function(X), compiled(X))
    assert len(compiled.entries) == 1
    for change in (
        lambda: lazy._objects.update(scale=4.0),
        lambda: lazy._objects.update(__version__="2"),
        lambda: setattr(lazy, "scale", 9.0),
        lambda: setattr(lazy, "other", 1),
        lambda: delattr(lazy, "scale"),
    ):
        change()
        same(function(X), compiled(X))


def test_a_function_of_the_module(plain: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * plain.scale + getattr(plain, "other", 1)

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    same(function(X), compiled(X))
    for change in (
        lambda: plain.table.update(scale=1.0),
        lambda: plain.table.update(other=6),
        lambda: setattr(plain, "other", 8),
        lambda: setattr(plain, "__getattr__", lambda name: 100.0),
        lambda: setattr(plain, "scale", 2.0),
    ):
        change()
        same(function(X), compiled(X))


def test_a_name_that_is_nowhere() -> None:
    lazy: Any = Lazy()
    compiled = dovetail.compile(lambda x: x * lazy.nothing, backend="aten", fullgraph=True)
    with pytest.raises((AttributeError, GraphBreakError), match="nothing"):
        compiled(X)
    lazy.nothing = 2.0
    same(compiled(X), X * 2)


def test_what_is_called_is_asked_for_what_the_program_reads_alone() -> None:
    asked: list[str] = []

    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Layer(torch.nn.Module):
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return super().__getattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    wrapper, layer = Wrapper(), Layer()
    functions = [dovetail.compile(lambda x: wrapper(x), backend="aten"), dovetail.compile(layer, backend="aten")]
    asked.clear()  # for the name of the module
    for compiled in functions:
        for _ in range(2):
            compiled(torch.ones(3))
    assert asked == []
