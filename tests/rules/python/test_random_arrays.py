"""Arrays that NumPy draws inside: inputs of the graph, with eager's numbers and the state that eager leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

import dovetail
from tests.differential import captures, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _generator_as_it_was() -> Iterator[None]:
    before = numpy.random.get_state()
    yield
    numpy.random.set_state(before)


def noise(x: Tensor) -> Any:
    z = torch.FloatTensor(numpy.random.normal(0, 1, (x.shape[0], 2)))
    return x * z + torch.Tensor(numpy.random.random((x.shape[0], 1)))


def by_name(x: Tensor) -> Any:
    first = torch.tensor(numpy.random.normal(size=(4, 2), loc=1.0), dtype=torch.float32)
    return x * first + torch.as_tensor(numpy.random.uniform(-1, 1, size=2))


def indices(x: Tensor) -> Any:
    return x[numpy.random.choice(4, size=[3], replace=False)], x[torch.from_numpy(numpy.random.permutation(4))]


def whole_numbers(x: Tensor) -> Any:
    return x[numpy.random.randint(0, 4, 6)].sum(), torch.LongTensor(numpy.random.randint(0, 5, (2, 2)))


def computed_with(x: Tensor) -> Any:
    z = 2 * numpy.random.rand(4, 2) - 1
    return x + torch.from_numpy(z), z.mean(), z.T


def in_turns(x: Tensor) -> Any:
    for _ in range(3):
        x = x * torch.Tensor(numpy.random.rand(2)) + numpy.random.rand()
    return x


def penalty(x: Tensor) -> Any:
    at = torch.Tensor(numpy.random.random((4, 1))) * x.detach()
    at.requires_grad_()
    (slope,) = torch.autograd.grad((at * at * x).sum(), at, create_graph=True)
    return slope.square().sum()


def across_a_break(x: Tensor) -> Any:
    z = numpy.random.rand(2)
    print(end="")
    return x * torch.from_numpy(z) + torch.from_numpy(numpy.random.rand(2))


def written_to(x: Tensor) -> Any:
    z = numpy.random.rand(2)
    z[0] = 5
    return x * torch.from_numpy(z), z


def refused(x: Tensor) -> Any:
    return x * torch.from_numpy(numpy.random.standard_normal(2)) * numpy.random.randint(1, 4), numpy.random.rand(2)


def _run(function: Callable[..., Any], sizes: tuple[int, ...] = (4,) * 5) -> list[Any]:
    numpy.random.seed(2)
    found = []
    for size in sizes:
        x = torch.linspace(0.1, 1, 2 * size).view(size, 2).requires_grad_()
        result = function(x)
        value = result[0] if isinstance(result, tuple) else result
        (first,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, allow_unused=True)
        state: Any = numpy.random.get_state()
        found.append((result, first.detach(), second, state[1].tolist(), state[2:]))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [noise, by_name, indices, whole_numbers, in_turns, penalty])
def test_one_graph_draws_as_eager(program: Callable[..., Any]) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    # The third derivative of a gradient inside is another sum than eager's.
    same(_run(program), _run(compiled), exact=program is not penalty)
    assert captures(compiled) <= 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [across_a_break, computed_with, written_to, refused])
def test_where_the_graph_breaks_the_numbers_are_eagers(program: Callable[..., Any]) -> None:
    same(_run(program), _run(dovetail.compile(program, backend="aten")))


def test_numpy_computes_in_one_graph() -> None:
    compiled, found = dovetail.compile(computed_with, backend="aten", fullgraph=True), []
    for function in (computed_with, compiled):
        numpy.random.seed(2)
        found.append([function(torch.ones(4, 2)) for _ in range(3)])
    same(*found)
    assert captures(compiled) == 1


def test_sizes_that_change() -> None:
    compiled = dovetail.compile(noise, backend="aten", fullgraph=True)
    sizes = (4, 4, 3, 4, 3)
    same(_run(noise, sizes), _run(compiled, sizes))
    assert len(compiled.entries) <= 3


def test_sizes_that_change_beside_a_number_of_the_data() -> None:
    """The attempt without symbols for sizes keeps those for what the data decides."""

    def step(x: Tensor) -> list[float]:
        return [noise(x).sum().item() * 2]

    compiled = dovetail.compile(step, backend="aten", fullgraph=True)
    found = []
    for function in (step, compiled):
        numpy.random.seed(2)
        found.append([function(torch.ones(size, 2)) for size in (4, 4, 3, 4, 3)])
    same(*found)
    assert len(compiled.entries) <= 3


def test_an_array_and_its_tensor_share_memory() -> None:
    def both(x: Tensor) -> Any:
        z = numpy.random.rand(3)
        return z, torch.from_numpy(z)

    compiled = dovetail.compile(both, backend="aten", fullgraph=True)
    found = [compiled(torch.ones(2)) for _ in range(3)]
    for array, tensor in found:
        tensor.zero_()
        assert type(array) is numpy.ndarray
        assert not array.any()


def test_an_error_is_eagers() -> None:
    def negative(x: Tensor) -> Any:
        return x + torch.from_numpy(numpy.random.rand(2, -3))

    for function in (negative, dovetail.compile(negative, backend="aten")):
        with pytest.raises(ValueError, match="negative dimensions"):
            function(torch.ones(2))


def test_bounds_that_grow_are_no_capture_each() -> None:
    """The rows of a replay buffer that is being filled."""
    rows, filled = numpy.arange(200, dtype=numpy.float32).reshape(100, 2), {"count": 10}

    def program(x: Tensor) -> Any:
        chosen = numpy.random.randint(0, filled["count"], size=4)
        return x * torch.as_tensor(rows[chosen])

    compiled, captured = dovetail.compile(program, backend="aten"), []
    for call in range(9):
        filled["count"] += call
        numpy.random.seed(call)
        expected = program(torch.ones(4, 2)), numpy.random.rand()
        numpy.random.seed(call)
        same(expected, (compiled(torch.ones(4, 2)), numpy.random.rand()))
        captured.append(captures(compiled))
    assert captured[5] == captured[-1]
