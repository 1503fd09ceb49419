"""A size that was marked as one that changes, of which values cross a graph break: ``torch._dynamo.mark_dynamic`` and its kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail import errors
from tests.differential import compare_call, leaf

pytestmark = pytest.mark.usefixtures("quiet")


def in_a_tensor(x: torch.Tensor) -> torch.Tensor:
    doubled = x * 2
    print(end="")
    return x + doubled.view(x.shape[0], -1)


def in_containers(x: torch.Tensor) -> torch.Tensor:
    parts: Any = [x.sin(), (x.shape[0], x.cos())]
    print(end="")
    return x * parts[0] + parts[1][1] * parts[1][0]


def over_two_breaks(x: torch.Tensor) -> torch.Tensor:
    y = x.relu()
    print(end="")
    z = y + x
    print(end="")
    return (z * y).sum(1) + torch.ones(x.shape[0])


def held_after_the_break(x: torch.Tensor) -> torch.Tensor:
    total = x.sum()
    print(end="")
    return x.view(4, -1) * total if x.shape[0] == 8 else x * 2


def made_at_the_break(x: torch.Tensor) -> torch.Tensor:
    mask = torch.tensor([True] * len(x.tolist()))
    return x[:, 0] * mask


@pytest.mark.parametrize(
    "program", [in_a_tensor, in_containers, over_two_breaks, held_after_the_break, made_at_the_break]
)
@pytest.mark.sampled(6)
@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, dovetail.mark_dynamic, torch._dynamo.maybe_mark_dynamic])
def test_values_of_a_marked_size_cross_a_break(program: Callable[..., Any], mark: Callable[..., Any]) -> None:
    compiled = dovetail.compile(program, backend="aten")
    for size in (5, 8, 1):
        x = leaf(size, 4)
        mark(x, 0)
        compare_call(program, compiled, (x,), exact=False)  # gradients meet at the break in another order
    assert len(compiled.entries) <= 2


def test_what_crosses_a_break_is_symbolic_too() -> None:
    compiled: Any = dovetail.compile(in_a_tensor, backend="aten")
    for size in (5, 8, 6):
        x = leaf(size, 4)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x)
    assert [len(part.entries) for part in (compiled, *compiled.continuations())] == [1, 1]


def test_a_mark_that_is_not_kept_before_the_break_is_still_an_error() -> None:
    def fixed(x: torch.Tensor) -> torch.Tensor:
        y = x.view(4, 2, 4)
        print(end="")
        return y.sum()

    x = leaf(8, 4)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(errors.InputError, match="marked as dynamic"):
        dovetail.compile(fixed, backend="aten")(x)
