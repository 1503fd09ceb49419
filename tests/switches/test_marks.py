"""Marks of torch.compile on sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.errors import InputError

MARKS = torch._dynamo


def entries(mark: str, *sizes: int, dynamic: bool | None = None, **bounds: int) -> int:
    compiled = dovetail.compile(lambda values: values.sin() * values.shape[0], backend="aten", dynamic=dynamic)
    for size in sizes:
        values = torch.ones(size, 3)
        (getattr(MARKS, mark, None) or getattr(MARKS.decorators, mark))(values, 0, **bounds)
        assert torch.equal(compiled(values), values.sin() * size)
    return len(compiled.entries)


def branching(values: Tensor) -> Tensor:
    return values.sin() if values.shape[0] == 5 else values.cos()


def test_a_mark_that_is_not_kept() -> None:
    values = torch.ones(5, 3)
    MARKS.mark_dynamic(values, 0)
    with pytest.raises(InputError, match=r"dimension 0 of .*values.* was marked as dynamic(.|\n)*maybe_mark_dynamic"):
        dovetail.compile(branching, backend="aten")(values)


def test_a_strict_mark_that_is_not_kept() -> None:
    values = torch.ones(5, 3)
    MARKS.decorators.mark_unbacked(values, 0, strict=True)
    with pytest.raises(InputError, match="dimension 0 of `values` was marked as dynamic"):
        dovetail.compile(branching, backend="aten")(values)
    whole = dovetail.compile(torch.sin, backend="aten")
    for size in (5, 6, 7):
        values = torch.ones(size, 3)
        MARKS.decorators.mark_unbacked(values, 0, strict=True)
        assert torch.equal(whole(values), values.sin())
    assert len(whole.entries) == 1


@pytest.mark.parametrize("bounds", ({"min": 6}, {"max": 4}, {"min": 6, "max": 8}, {"min": 2, "max": 3}))
def test_a_size_outside_of_its_own_bounds(bounds: dict[str, int]) -> None:
    values = torch.ones(5, 3)
    MARKS.mark_dynamic(values, 0, **bounds)
    compiled = dovetail.compile(torch.sin, backend="aten")
    with pytest.raises(InputError, match=r"dimension 0 of `.*` was marked as .*size.*, and is 5"):
        compiled(values)
    assert compiled(torch.ones(5, 3)).shape == (5, 3)


def test_other_marks(recwarn: pytest.WarningsRecorder) -> None:
    assert entries("mark_dynamic", 5, 6, 7) == 1
    assert entries("maybe_mark_dynamic", 5, 6, 7) == 1
    assert entries("mark_unbacked", 5, 6, 7) == 1
    assert entries("mark_static", 5, 6, 7, dynamic=True) == 3
    values = torch.ones(5, 3)
    MARKS.maybe_mark_dynamic(values, 0)
    assert torch.equal(dovetail.compile(branching, backend="aten")(values), values.sin())
    assert not [item for item in recwarn if "marked" in str(item.message)]


def test_bounds() -> None:
    compiled = dovetail.compile(lambda values: values.sin(), backend="aten")
    values = torch.ones(5, 3)
    MARKS.mark_dynamic(values, 0, min=4, max=6)
    for given in (values, torch.ones(6, 3), torch.ones(9, 3)):
        compiled(given)
    assert len(compiled.entries) == 2
