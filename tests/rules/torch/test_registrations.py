"""Operators that are registered inside of a compiled function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same


@pytest.fixture
def library() -> Iterator[Any]:
    with torch.library._scoped_library("dovetail_tests_registrations", "FRAGMENT") as found:
        yield found


def test_a_custom_operator_is_the_programs_own() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        @torch.library.custom_op("dovetail_tests_registrations::added", mutates_args={"x"})
        def added(x: torch.Tensor) -> None:
            x.add_(1)

        added(x)
        return x * 2

    compiled, x = dovetail.compile(program, backend="aten"), torch.zeros(3)
    assert torch.equal(compiled(x), torch.full((3,), 2.0))
    assert torch.equal(x, torch.ones(3))
    # Nothing that is kept belongs to the interpreter, which is gone.
    torch.ops.dovetail_tests_registrations.added(x)
    assert torch.equal(x, torch.full((3,), 2.0))


def test_a_library_is_filled(library: Any) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        return torch.ops.dovetail_tests_registrations.twice(x)

    compiled = dovetail.compile(program, backend="aten")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(torch.ops.dovetail_tests_registrations.twice(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.filterwarnings("ignore")
def test_a_list_with_none_in_it_is_written() -> None:
    # Torch's functionalisation raises AttributeError of its own.
    def program(x: torch.Tensor) -> torch.Tensor:
        @torch.library.custom_op("dovetail_tests_registrations::filled", mutates_args={"others"})
        def filled(x: torch.Tensor, others: list[torch.Tensor | None]) -> None:
            for item in others:
                if item is not None:
                    item.copy_(x)

        others = [torch.zeros(2), None, torch.zeros(2)]
        filled(x, others)
        return x + sum(item for item in others if item is not None)

    compiled = dovetail.compile(program, backend="aten")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert "capture failed" not in str(dovetail.events_of(compiled))


def test_tensors_are_functionalised_inside() -> None:
    def by_hand(x: torch.Tensor) -> Any:
        wrapped = torch._to_functional_tensor(x)
        torch._enable_functionalization(reapply_views=True)
        try:
            view = wrapped.view(-1)
            wrapped.add_(1)
            result = view * 2
        finally:
            torch._disable_functionalization()
        torch._sync(result)
        return torch._from_functional_tensor(result)

    def by_transform(x: torch.Tensor) -> Any:
        return torch.func.functionalize(lambda y: y.view(-1).add_(1) * 2)(x)

    for function in (by_hand, by_transform):
        compiled = dovetail.compile(function, backend="aten")
        for _ in range(2):
            same(function(torch.ones(3)), compiled(torch.ones(3)))
