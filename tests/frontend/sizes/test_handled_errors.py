"""Errors that a program handles while sizes change: two graphs are enough where the error depends on no size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same


class _Wrapper(torch.nn.Module):
    """As libraries of adapters wrap a model."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(self.base, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale


def _wrapper() -> Callable[..., Any]:
    base = torch.nn.Linear(3, 3)
    base.scale = 2.0
    return _Wrapper(_Wrapper(base))


def _checked(x: torch.Tensor, limit: int = 5) -> torch.Tensor:
    if x.shape[0] > limit:
        raise ValueError("too long")
    return x * 2


class _Quiet:
    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *error: object) -> bool:
        return False


def _raised_by_a_function(x: torch.Tensor) -> torch.Tensor:
    try:
        with _Quiet():
            return _checked(x, 0)
    except ValueError as error:
        return x * len(error.args)


def _raised_again(x: torch.Tensor) -> torch.Tensor:
    try:
        try:
            return _checked(x, 0)
        except ValueError:
            raise
        finally:
            x = x + 1
    except ValueError:
        return x * 3


def _missing_attribute(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * x.nothing
    except AttributeError:
        return x * getattr(x, "nothing", 3)


def _missing_name(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * nothing  # type: ignore[name-defined]  # noqa: F821
    except NameError:
        return x * 3


def _not_subscriptable(x: torch.Tensor) -> torch.Tensor:
    skip: Any = 0
    for part in (x, x[:, 1:]):
        try:
            skip = skip[:, -part.shape[1] :]
        except TypeError:
            skip = 0
        skip = part + skip
    return skip * x.shape[0]


_PROGRAMS: dict[str, Callable[[], Callable[..., Any]]] = {
    "a wrapper's attributes": _wrapper,
    "raised by a function": lambda: _raised_by_a_function,
    "raised again": lambda: _raised_again,
    "no such attribute": lambda: _missing_attribute,
    "no such name": lambda: _missing_name,
    "no sequence": lambda: _not_subscriptable,
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_two_graphs_for_all_sizes(name: str) -> None:
    program = _PROGRAMS[name]()
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for size in range(2, 8):
        x = torch.randn(size, 3)
        same(program(x), compiled(x))
    events = dovetail.events_of(compiled)
    assert (events.count("compile"), events.count("static shapes")) == (2, 0)


def test_an_error_that_a_size_decides() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        try:
            return _checked(x)
        except ValueError:
            return x * 3

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for size in (2, 3, 7, 5, 9, 4):
        x = torch.randn(size, 3)
        same(program(x), compiled(x))
    assert dovetail.events_of(compiled).count("compile") == 3


def test_a_number_of_the_data_behind_an_error_that_a_size_decides() -> None:
    """Symbols for what the data decides are given up first, and tried again with plain sizes."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        rows = x.shape[0]
        try:
            x = x * [1, 2, 3][rows:].index(7)
        except ValueError:
            x = x * 2
        return x * x.sum().item(), x.sum().item()

    compiled = dovetail.compile(program, backend="aten")
    for size in (4, 4, 5, 6, 4, 5):
        x = torch.randn(size, 3)
        same(program(x), compiled(x))
    events = dovetail.events_of(compiled)
    assert not events.count("graph break")
    assert len(compiled.entries) == 3


def test_methods_of_numbers() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * x.shape[0].bit_length() + int.from_bytes(x.shape[0].to_bytes(2, "big"), "big")
        except AttributeError:
            return x * 0

    compiled = dovetail.compile(program, backend="aten")
    for size in (2, 3, 7):
        x = torch.randn(size, 3)
        same(program(x), compiled(x))
