"""Errors that only the data, or the real kernel, brings about: eager's, handled where the program handles them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import OutgrownError
from dovetail.reports.explanation import compiled_function

ONE, TWO = torch.tensor([0, 1]), torch.tensor([0, 9])


def other_dtype(x: torch.Tensor, index: torch.Tensor, seen: list[str]) -> torch.Tensor:
    """The kernel for fake tensors does not see that two dtypes do not fit."""
    try:
        return x.index_add(0, index, torch.ones(2, dtype=torch.float64)) * 2
    except RuntimeError as error:
        seen.append(str(error))
        return x * 3


def out_of_range(x: torch.Tensor, index: torch.Tensor, seen: list[str]) -> torch.Tensor:
    """Only the data tells whether an index is in range."""
    seen.append("before")
    try:
        return torch.nn.functional.embedding(index, x.view(3, 1)) * 2
    except IndexError as error:
        seen.append(str(error))
        return x * 3


def not_handled(x: torch.Tensor, index: torch.Tensor, seen: list[str]) -> torch.Tensor:
    """Nobody handles it: an effect before it has happened, one behind it has not."""
    seen.append("before")
    result = x[index] * 2
    seen.append("behind")
    return result


@pytest.mark.parametrize(
    ("function", "backend"),
    [
        (other_dtype, "aten"),  # Inductor's kernels take what eager's refuse here
        (out_of_range, "aten"),
        (out_of_range, "inductor"),
        (not_handled, "aten"),
        (not_handled, "inductor"),
    ],
)
def test_an_error_of_a_real_kernel_is_where_eager_has_it(function: Any, backend: str) -> None:
    compiled = dovetail.compile(function, backend=backend, fullgraph=True)
    for index in (ONE, TWO, ONE):
        outcomes: list[Any] = []
        for run in (function, compiled):
            x, seen = torch.arange(3.0, requires_grad=True), ["start"]
            try:
                result = run(x, index, seen)
                result.sum().backward()
                outcomes.append((result.detach().tolist(), x.grad, seen))
            except IndexError as error:
                outcomes.append((str(error), seen))
        assert repr(outcomes[0]) == repr(outcomes[1])


def test_the_programs_random_numbers_are_drawn_once() -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(2)
        return x[index] * noise

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    states = []
    for run in (function, compiled):
        torch.manual_seed(0)
        with pytest.raises(IndexError, match="out of bounds"):
            run(torch.ones(3), TWO)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def checked(x: torch.Tensor, log: list[int]) -> Any:
    """A check of the data before a graph break, and what it raises handled: the rest must not run again."""
    log.append(1)
    try:
        if x.min() < 0:
            raise ValueError("negative")
    except ValueError:
        return x * 7, "handled"
    y = x.sqrt()
    print("a graph break")
    return y * 2, "rest"


def indexed(x: torch.Tensor, log: list[int]) -> Any:
    """The same with an operator's error, behind a graph break too."""
    log.append(1)
    print("a graph break")
    try:
        y = torch.ones(4)[x.long()]
    except IndexError:
        return x * 7, "handled"
    print("a graph break")
    log.append(2)
    return y * 2, "rest"


@pytest.mark.parametrize("function", [checked, indexed])
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
def test_a_call_that_starts_over_is_whole_despite_graph_breaks(function: Any) -> None:
    compiled = dovetail.compile(function, backend="aten")
    for value in (3.0, -9.0, 2.0, -8.0):
        outcomes = []
        for run in (function, compiled):
            log: list[int] = []
            result, way = run(torch.tensor([value]), log)
            outcomes.append((result.tolist(), way, log))
        assert outcomes[0] == outcomes[1]
    assert len(compiled_function(compiled).entries) == 1


def kept_as_it_is(joint: Any) -> Any:
    return joint


def test_eager_never_takes_the_place_of_a_graph_that_was_edited() -> None:
    """It would leave out what the pass has added: the exchange of gradients between processes, say."""

    def chosen(x: torch.Tensor) -> torch.Tensor:
        if x.min() < 0:
            raise ValueError("negative")
        return x.sqrt()

    def handled(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        try:
            return x[index] * 2
        except IndexError:
            return x

    compiled = dovetail.compile(chosen, backend="aten", fullgraph=True, passes=(kept_as_it_is,))
    compiled(torch.ones(2))
    with pytest.raises(OutgrownError, match="passes have edited"):
        compiled(-torch.ones(2))
    compiled = dovetail.compile(handled, backend="aten", fullgraph=True, passes=(kept_as_it_is,))
    compiled(torch.ones(3), ONE)
    with pytest.raises(IndexError):
        compiled(torch.ones(3), TWO)
