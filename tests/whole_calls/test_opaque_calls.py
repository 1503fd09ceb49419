"""Calls that need the values of tensors, in one graph: whole operators, numbers made of data, guards on small tensors."""

from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError
from dovetail.report.explanation import compiled_function
from tests.differential import same


def _compiled(function):
    return dovetail.compile(function, fullgraph=True, backend="aten")


@pytest.mark.parametrize(
    "function",
    [
        torch.equal,
        torch.allclose,
        lambda x, y: (torch.equal(x, y), x + y),
        lambda x, y: {"same": torch.allclose(x, y, atol=1e-3), "first": x[0].item()},
    ],
)
def test_truth_values_leave_the_graph(function) -> None:
    compiled = _compiled(function)
    x = torch.linspace(0, 1, 4)
    for y in (x.clone(), x + 1e-4, x + 1, torch.full((4,), float("nan"))):
        same(function(x, y), compiled(x, y))
    assert len(compiled_function(compiled).entries) == 1


def test_a_branch_on_a_truth_value_is_refused() -> None:
    with pytest.raises(GraphBreakError):
        _compiled(lambda x, y: x + 1 if torch.equal(x, y) else x)(torch.ones(2), torch.ones(2))


def test_one_python_operation_on_a_number_made_of_data() -> None:
    def function(x, count):
        return x * (1.0 / float(count))

    compiled = _compiled(function)
    for count in (3, 7, 11):
        same(
            function(torch.linspace(0, 1, 5), torch.tensor(count)),
            compiled(torch.linspace(0, 1, 5), torch.tensor(count)),
        )
    assert len(compiled_function(compiled).entries) == 1


def test_batch_norm_over_all_batches_writes_its_buffers() -> None:
    plain, other = (torch.nn.BatchNorm1d(3, momentum=None) for _ in range(2))
    compiled = _compiled(other)
    for number in range(4):
        batch = torch.linspace(-1, number, 12).reshape(4, 3)
        same(plain(batch).detach(), compiled(batch).detach())
    same(dict(plain.named_buffers()), dict(other.named_buffers()))


def test_views_at_places_that_small_inputs_say() -> None:
    def function(x, start, cuts):
        return x.narrow(0, start, 2), torch.tensor_split(x, cuts)

    compiled = _compiled(function)
    x = torch.arange(6.0)
    start, cuts = torch.tensor(1), torch.tensor([1, 4])
    for value, places in ((1, [1, 4]), (3, [1, 4]), (3, [0, 2]), (1, [1, 4])):
        # In place: the tensor is the same object, and what it holds is not.
        start.fill_(value)
        cuts.copy_(torch.tensor(places))
        expected, actual = function(x, start, cuts), compiled(x, start, cuts)
        same(expected, actual)
        assert all(item._base is x for item in (actual[0], *actual[1]))
    assert len(compiled_function(compiled).entries) == 3


def test_a_view_at_a_computed_place_used_inside() -> None:
    def function(x, start):
        return x.narrow(0, start + 1, 2) * 2

    compiled = _compiled(function)
    for value in (0, 2, 3):
        same(function(torch.arange(6.0), torch.tensor(value)), compiled(torch.arange(6.0), torch.tensor(value)))
    with pytest.raises((RuntimeError, IndexError)):
        compiled(torch.arange(6.0), torch.tensor(5))


def test_lazy_modules_run_eagerly_once() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.ReLU())
    expected = [plain(torch.ones(2, 4)), plain(torch.zeros(2, 4))]
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.ReLU())
    compiled = _compiled(module)
    actual = [compiled(torch.ones(2, 4)), compiled(torch.zeros(2, 4))]
    same([item.detach() for item in expected], [item.detach() for item in actual])
    assert len(compiled_function(compiled).entries) == 1


def test_borders_of_one_tensor_are_disjoint() -> None:
    def function(x):
        return torch.nn.functional.pad(x, (2, 1), "circular")

    same(function(torch.rand(1, 2, 5).square() * 0 + 1), _compiled(function)(torch.ones(1, 2, 5)))

    def overlapping(x):
        x[1:].copy_(x[:-1])
        return x

    with pytest.raises(GraphBreakError, match="also reads"):
        _compiled(overlapping)(torch.arange(4.0))
