"""Classes derived from torch's own, and classes that override how attributes are set: what libraries are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributions import Transform, constraints
from torch.distributions.utils import lazy_property

import dovetail
from dovetail.reports.explanation import compiled_function

FACTOR = 2.0


class Scaling(Transform):
    """A transform of the user's own, which can be called."""

    domain = constraints.real
    codomain = constraints.real
    bijective = True

    def __init__(self, shift: float) -> None:
        super().__init__(cache_size=0)
        self.shift = shift

    def _call(self, x: Any) -> Any:
        return x * FACTOR + self.shift

    def _inverse(self, y: Any) -> Any:
        return (y - self.shift) / FACTOR


class Spread(torch.distributions.Normal):
    """A distribution that has a lazy property and can be called."""

    @lazy_property
    def doubled(self) -> torch.Tensor:
        return self.loc * FACTOR

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return self.log_prob(value) + self.mean


SCALING = Scaling(1.0)


@pytest.mark.parametrize("made", ["outside", "inside"])
def test_a_class_of_torchs_calls_what_the_user_has_written(made: str) -> None:
    def program(x: torch.Tensor) -> Any:
        scaling = SCALING if made == "outside" else Scaling(0.5)
        return scaling(x), scaling.inv(x)

    compiled = dovetail.compile(program, backend="aten")
    global FACTOR
    try:
        for FACTOR, shift in ((2.0, 1.0), (3.0, 1.0), (3.0, 4.0)):
            SCALING.shift = shift
            for expected, actual in zip(program(torch.ones(2)), compiled(torch.ones(2)), strict=True):
                assert torch.equal(expected, actual)
    finally:
        FACTOR = 2.0


def test_a_distribution_of_the_users_own_is_called() -> None:
    def program(x: torch.Tensor) -> Any:
        spread = Spread(x, 1.0, validate_args=False)
        return spread(x * 2), spread.doubled

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for size in (2, 3):
        x = torch.linspace(0.0, 1.0, size)
        for expected, actual in zip(program(x), compiled(x), strict=True):
            assert torch.equal(expected, actual)


class Counting(torch.nn.Module):
    """A module that counts its calls through a ``__setattr__`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x * 2


def test_a_counter_that_is_set_by_a_setattr_of_its_own_does_not_grow_entries() -> None:
    module = Counting()
    compiled = dovetail.compile(module, backend="aten", fullgraph=True)
    for number in range(8):
        compiled(torch.ones(2))
        assert type(module.calls) is int and module.calls == number + 1
    assert len(compiled_function(compiled).entries) <= 3
