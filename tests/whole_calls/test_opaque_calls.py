"""Calls that need the values of tensors, in one graph: whole operators, numbers made of data, guards on small tensors."""

from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError, GraphBreakWarning
from dovetail.reports.explanation import compiled_function
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


def _losses(x, y):
    lengths = torch.full((4,), 4)
    labels = torch.ones(4, 2, dtype=torch.long)
    paths = torch.nn.functional.ctc_loss(x.log_softmax(-1), labels, lengths, lengths // 2)
    return paths, torch.nn.functional.gaussian_nll_loss(x, y, y.exp()), torch.linalg.lstsq(x[0], y[0]).solution


@pytest.mark.parametrize(
    ("function", "backend"),
    [
        (_losses, "of_tolerance"),
        pytest.param(_losses, "inductor", marks=pytest.mark.slow),
        pytest.param(torch.equal, "inductor", marks=pytest.mark.slow),
    ],
)
def test_backends_whose_numbers_are_not_eagers(function, backend: str) -> None:
    dovetail.register_backend("of_tolerance", lambda graph, inputs: graph, replace=True)
    torch.manual_seed(0)
    values = [torch.randn(4, 4, 3) for _ in range(2)]
    compiled = dovetail.compile(function, fullgraph=True, backend=backend)
    found = []
    for run in (function, compiled, function, compiled):
        x, y = (value.clone().requires_grad_() for value in values)
        result = run(x, y)
        gradients = () if function is torch.equal else torch.autograd.grad(sum(part.sum() for part in result), [x, y])
        found.append([result, *gradients])
    for expected, actual in (found[:2], found[2:]):
        same(expected, actual, exact=False)
    assert len(compiled_function(compiled).entries) == 1


@pytest.mark.parametrize("backend", ["of_tolerance", "aten"])
def test_a_call_that_reads_a_fake_tensor_is_a_break(backend: str) -> None:
    dovetail.register_backend("of_tolerance", lambda graph, inputs: graph, replace=True)

    def function(x, places):
        first, *rest = x.sin().tensor_split(places, 1)
        return first.sum() + len(rest)

    compiled = dovetail.compile(function, backend=backend)
    x, places = torch.linspace(0, 1, 12).reshape(2, 6), torch.tensor([1, 4])
    with pytest.warns(GraphBreakWarning, match="tensor_split needs the values of a tensor"):
        same(function(x, places), compiled(x, places), exact=False)
    same(function(x, places + 1), compiled(x, places + 1), exact=False)


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


@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
def test_views_at_places_that_small_inputs_say() -> None:
    def function(x, start, cuts):
        return x.narrow(0, start, 2), torch.tensor_split(x, cuts)

    compiled = dovetail.compile(function, backend="aten")
    x = torch.arange(6.0)
    start, cuts = torch.tensor(1), torch.tensor([1, 4])
    for value, places in ((1, [1, 4]), (3, [1, 4]), (3, [0, 2]), (1, [1, 4])):
        # In place: the tensor is the same object, and what it holds is not.
        start.fill_(value)
        cuts.copy_(torch.tensor(places))
        expected, actual = function(x, start, cuts), compiled(x, start, cuts)
        same(expected, actual)
        assert all(item._base is x for item in (actual[0], *actual[1]))


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


def test_gradients_in_a_batch() -> None:
    def function(x, w):
        return (x * w).sin() * x.prod()

    x, w = torch.linspace(0.5, 2, 3, requires_grad=True), torch.linspace(1, 2, 3, requires_grad=True)
    compiled = _compiled(function)

    def batched(run):
        jacobian = torch.autograd.functional.jacobian(run, (x, w), vectorize=True)
        hessian = torch.autograd.functional.hessian(lambda *given: run(*given).sum(), (x, w), vectorize=True)
        result = run(x, w)
        rows = torch.vmap(lambda row: torch.autograd.grad(result, x, row, retain_graph=True)[0])(torch.eye(3))
        return jacobian, hessian, rows

    torch.testing.assert_close(batched(compiled), batched(function))
