"""Arguments that are numbers, texts or flags: nobody guards what the program does not read of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

X = torch.arange(3.0)
OTHERS: tuple[Any, ...] = (0, 1, 2, 7, "name", None, 2.5, True)


def unused(x: torch.Tensor, number: Any) -> torch.Tensor:
    return x * 2


def replaced(x: torch.Tensor, number: Any) -> torch.Tensor:
    number = 3
    return x * number


def deleted(x: torch.Tensor, number: Any) -> torch.Tensor:
    del number
    return x * 2


def kept_by_name(x: torch.Tensor, *, number: Any = 4) -> torch.Tensor:
    return x + 1


def behind_a_branch(x: torch.Tensor, number: Any, reads: bool = False) -> torch.Tensor:
    return x * number if reads else x


def returned(x: torch.Tensor, number: Any) -> Any:
    return x + 1, number


def stored(x: torch.Tensor, number: Any) -> Any:
    return {"x": x * 2, "numbers": [number, (number,)]}


def in_a_closure(x: torch.Tensor, number: Any) -> Any:
    return x * 2, lambda: number


def handed_on(x: torch.Tensor, number: Any) -> Any:
    return unused(x, number), stored(x, number=number)


def all_locals(x: torch.Tensor, number: Any) -> Any:
    return x * 2, sorted((key, str(value)) for key, value in locals().items() if key != "x")


def collected(x: torch.Tensor, *numbers: Any, **named: Any) -> Any:
    return x * 2, numbers, named


def positional(number: Any, x: torch.Tensor, /, **named: Any) -> Any:
    return x * 2, named


def compared(x: torch.Tensor, number: Any) -> torch.Tensor:
    return x + 1 if number == 1 else x


def broken(x: torch.Tensor, number: Any) -> Any:
    y = x * 2
    print(end="")
    torch._dynamo.graph_break()
    return y + 1, number


@pytest.mark.parametrize("function", [unused, replaced, deleted, behind_a_branch])
def test_what_is_not_read_is_not_guarded(function: Callable[..., Any]) -> None:
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for other in OTHERS:
        same(function(X, other), compiled(X, other))
    assert dovetail.events_of(compiled).count("capture") == 1


def test_a_keyword_that_is_not_read_is_not_guarded() -> None:
    compiled = dovetail.compile(kept_by_name, backend="aten", fullgraph=True)
    for other in OTHERS:
        same(kept_by_name(X, number=other), compiled(X, number=other))
    assert dovetail.events_of(compiled).count("capture") == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", [returned, stored, handed_on, all_locals, collected, compared, broken])
def test_what_is_read_is_eagers(function: Callable[..., Any], quiet: None) -> None:
    compiled = dovetail.compile(function, backend="aten", recompile_limit=20)
    for other in (*OTHERS, *OTHERS):
        same(function(X, other), compiled(X, other))


def test_what_is_read_later_is_guarded_then(quiet: None) -> None:
    compiled = dovetail.compile(behind_a_branch, backend="aten")
    for number, reads in ((2, False), (3, False), (3, True), (4, True), (4, False), (5.0, True), (2, True)):
        same(behind_a_branch(X, number, reads), compiled(X, number, reads))


def test_a_closure_keeps_the_call_s_own(quiet: None) -> None:
    compiled = dovetail.compile(in_a_closure, backend="aten", recompile_limit=20)
    for other in OTHERS:
        assert compiled(X, other)[1]() == other


def test_names_that_are_positional_only(quiet: None) -> None:
    compiled = dovetail.compile(positional, backend="aten", recompile_limit=20)
    for other in OTHERS:
        same(positional(1, X, number=other), compiled(1, X, number=other))


def test_a_method_and_its_module() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, number: Any) -> torch.Tensor:
            return x * 2

        def step(self, x: torch.Tensor, number: Any) -> torch.Tensor:
            return self(x, number)

    model = Model()
    compiled, whole = (
        dovetail.compile(item, backend="aten", fullgraph=True, recompile_limit=20) for item in (model.step, model)
    )
    for other in OTHERS:
        same(model.step(X, other), compiled(X, other))
        same(model(X, other), whole(X, other))
