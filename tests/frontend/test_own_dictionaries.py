"""Objects that keep their attributes in an unusual dictionary: in themselves, or in one of a class of its own."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same


class Settings(dict[str, Any]):
    """Each key is an attribute, as many configurations have it."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


def is_read(x: torch.Tensor, settings: Any) -> Any:
    return x * settings.rate + settings["rate"] + getattr(settings, "missing", 2)


def is_counted(x: torch.Tensor, settings: Any) -> Any:
    settings.step = settings.get("step", 0) + 1
    settings["step"] += 1
    return x * settings.step, dict(settings), vars(settings) is settings, len(settings)


def is_deleted(x: torch.Tensor, settings: Any) -> Any:
    settings.other = 1
    del settings.other
    return x * len(settings), list(settings)


def holds_a_tensor(x: torch.Tensor, settings: Any) -> Any:
    settings.sum = x.sum().detach()
    settings["sum"] = settings["sum"] * 2
    return x * settings.sum


def is_made_inside(x: torch.Tensor, settings: Any) -> Any:
    made = Settings(rate=settings.rate)
    made.scale = 3
    return x * made["scale"] + made.rate, dict(made)


@pytest.mark.parametrize("function", [is_read, is_counted, is_deleted, holds_a_tensor, is_made_inside])
def test_dictionaries_that_are_their_own_attributes(function: Callable[..., Any]) -> None:
    found = []
    for run in (function, dovetail.compile(function, backend="aten", fullgraph=True)):
        settings, results = Settings(rate=0.5), []
        for call in range(4):
            if call == 2:
                settings["rate"] = 4.0
            if call == 3:
                settings.missing = 5
            results.append(run(torch.ones(2), settings))
        found.append((results, dict(settings)))
    same(found[0], found[1])


def test_a_dictionary_that_is_no_longer_its_own() -> None:
    compiled = dovetail.compile(is_read, backend="aten", fullgraph=True)
    settings = Settings(rate=0.5)
    same(is_read(torch.ones(2), settings), compiled(torch.ones(2), settings))
    settings.__dict__ = Settings(rate=9.0)
    same(is_read(torch.ones(2), settings), compiled(torch.ones(2), settings))


class Holder:
    """Its attributes may be kept in any dictionary."""


class Odd(dict[str, Any]):
    """Attributes are read past its methods."""

    def __getitem__(self, key: str) -> Any:
        return 5


class Named(dict[str, Any]):
    """A dictionary with a method more."""

    def names(self) -> list[str]:
        return list(self)


@pytest.mark.parametrize("kind", [collections.OrderedDict, Odd, Named])
def test_attributes_in_a_dictionary_of_another_class(kind: Callable[..., Any]) -> None:
    def function(x: torch.Tensor, holder: Any) -> Any:
        holder.count += 1
        holder.other = getattr(holder, "other", 0) + 2
        return x * holder.count + holder.other

    found = []
    for run in (function, dovetail.compile(function, backend="aten")):
        holder = Holder()
        holder.__dict__ = kind(count=1)
        found.append([run(torch.ones(2), holder) for _ in range(3)])
        found.append(list(vars(holder).items()))
    same(found[:2], found[2:])
