"""Where a tensor lies in its storage is not guarded for every input: it is where the program depends on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import entries_of, same


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dovetail.errors.EagerFallbackWarning)
        warnings.simplefilter("ignore", dovetail.errors.GraphBreakWarning)
        yield


def places() -> list[torch.Tensor]:
    """Four numbers each, some of them from the midst of more."""
    base = torch.arange(20.0)
    return [base[:4], base[2:6], torch.arange(4.0), base[5:9], base[::2][:4], base[1:5], torch.arange(30.0, 35.0)[1:]]


def outcome(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    """What a call returns, or the class of its error."""
    try:
        return function(x)
    except RuntimeError as error:
        return type(error).__name__


QUESTIONS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.storage_offset(),
    lambda x: (x.view(2, 2).storage_offset(), x[1:].storage_offset()),
    lambda x: x * x.storage_offset(),
    lambda x: x._base is None,
    lambda x: x._is_view(),
    lambda x: x.as_strided((2,), (1,), 3) * 1,
    lambda x: torch.as_strided(x, (2,), (1,), x.storage_offset()) * 1,
    lambda x: x.as_strided((6,), (1,)) * 1,
    lambda x: torch.as_strided_scatter(x, torch.ones(2), (2,), (1,), 1),
    lambda x: (x.as_strided((2,), (1,), 1).add_(5), x * 1)[1],
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("question", range(len(QUESTIONS)))
def test_each_place_has_its_own_answer(question: int) -> None:
    function = QUESTIONS[question]
    compiled = dovetail.compile(function, backend="aten")
    for mine, other in zip(places(), places(), strict=True):
        same(outcome(function, mine), outcome(compiled, other))
        same(mine, other)
        same(mine._base, other._base)


@pytest.mark.slow
def test_the_default_backend_reads_what_is_asked_for() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((2,), (1,), 2) * 1 + x.as_strided((2,), (1,)).flip(0)

    compiled = dovetail.compile(function, backend="inductor")
    for mine, other in zip(places(), places(), strict=True):
        same(outcome(function, mine), outcome(compiled, other))


def test_windows_of_a_tensor_alone_stay_one_graph() -> None:
    compiled = dovetail.compile(lambda x: x.as_strided((2, 2), (1, 1)) * 2, backend="aten", fullgraph=True)
    for x in (torch.arange(4.0), torch.arange(10.0)[3:7]):
        same(x.as_strided((2, 2), (1, 1)) * 2, compiled(x))
    assert entries_of(compiled) == 1


def test_memory_that_is_shared_with_other_processes() -> None:
    compiled = dovetail.compile(lambda x: (x.is_shared(), x + 1), backend="aten")
    for x in (torch.ones(2), torch.ones(2).share_memory_()):
        assert compiled(x)[0] is x.is_shared()


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_one_element_of_an_expanded_input_is_written_to(backend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x[0, 0] = 5.0
        return x * 1

    compiled = dovetail.compile(function, backend=backend)
    for make in (
        lambda: torch.ones(3, 4),
        lambda: torch.ones(1, 4).expand(3, 4),
        lambda: torch.arange(8.0).as_strided((3, 4), (1, 1)),
        lambda: torch.ones(4, 3).t(),
    ):
        mine, other = make(), make()
        same(function(mine), compiled(other))
        same(mine, other)


def test_an_input_that_an_operator_resizes_by_out() -> None:
    def make() -> Callable[[torch.Tensor], Any]:
        kept = torch.zeros(0)

        def function(x: torch.Tensor) -> Any:
            torch.mul(x, 2, out=kept)
            return x * kept, kept

        return function

    expected, actual = make(), dovetail.compile(make(), backend="aten")
    for size in (3, 3, 4, 5, 2):
        same(expected(torch.ones(size)), actual(torch.ones(size)))
