"""Two arguments that are parts of one memory: one graph where they have no element in common, as in eager where they have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail.errors import GraphBreakError

Pair = tuple[Tensor, Tensor]


def _numbers(*sizes: int) -> Tensor:
    return torch.arange(float(torch.Size(sizes).numel())).reshape(sizes)


def _halves() -> Pair:
    whole = _numbers(8)
    return whole[:4], whole[4:]


def _columns() -> Pair:
    whole = _numbers(4, 6)
    return whole[:, :3], whole[:, 3:]


def _every_second() -> Pair:
    whole = _numbers(8)
    return whole[1::2], whole[::2]


def _in_other_shapes() -> Pair:
    whole = _numbers(12)
    return whole[6:].view(2, 3).t(), whole[:6].view(3, 2)


def _overlapping() -> Pair:
    whole = _numbers(8)
    return whole[:5], whole[3:]


def _columns_that_overlap() -> Pair:
    whole = _numbers(4, 6)
    return whole[:, :4], whole[:, 2:]


def _row_and_column() -> Pair:
    whole = _numbers(4, 4)
    return whole[0], whole[:, 0]


def _separate() -> Pair:
    return _numbers(4), _numbers(4) + 4


def _write_both(left: Tensor, right: Tensor) -> Tensor:
    left.add_(1)
    right.mul_(2)
    return left * right + left.sum()


def _write_one(left: Tensor, right: Tensor) -> Tensor:
    left.copy_(right * 2)
    return right + 1


def _agree(compiled: Callable[..., Tensor], program: Callable[..., Tensor], make: Callable[[], Pair]) -> None:
    expected, found = make(), make()
    assert torch.equal(program(*expected), compiled(*found))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) and one._version == other._version
    bases = [item._base for item in (*expected, *found) if item._base is not None]
    assert all(torch.equal(bases[0], base) for base in bases)


@pytest.mark.parametrize("program", [_write_both, _write_one])
@pytest.mark.parametrize("make", [_halves, _columns, _every_second, _in_other_shapes])
def test_parts_without_a_common_element(program: Callable[..., Tensor], make: Callable[[], Pair]) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for _ in range(2):
        _agree(compiled, program, make)
    assert len(compiled.entries) == 1


@pytest.mark.parametrize("make", [_overlapping, _columns_that_overlap, _row_and_column])
@pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")
def test_parts_with_a_common_element(make: Callable[[], Pair]) -> None:
    _agree(dovetail.compile(_write_both, backend="aten"), _write_both, make)
    with pytest.raises(GraphBreakError, match="shares memory with"):
        dovetail.compile(_write_both, backend="aten", fullgraph=True)(*make())


@pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")
def test_what_is_shared_changes_between_calls() -> None:
    def near() -> Pair:
        whole = _numbers(8)
        return whole[:4], whole[2:6]

    compiled = dovetail.compile(_write_both, backend="aten")
    for make in (_separate, _halves, near, _separate, _halves, near):
        _agree(compiled, _write_both, make)


@pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")
def test_where_gradients_are_recorded_eager_takes_the_call() -> None:
    weight = torch.ones(4, requires_grad=True)

    def program(left: Tensor, right: Tensor) -> Tensor:
        left.add_(weight)
        return left * right

    def run(function: Callable[..., Tensor]) -> tuple[bool, Tensor]:
        left, right = _halves()
        (slope,) = torch.autograd.grad(function(left, right).sum(), weight)
        return right.requires_grad, slope

    expected, found = run(program), run(dovetail.compile(program, backend="aten"))
    assert expected[0] == found[0] and torch.equal(expected[1], found[1])
