"""Numbers of the module ``random`` and of ``numpy.random`` inside: anew at each call, with the state that eager leaves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

import dovetail
from dovetail import errors
from tests.differential import captures, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor
probability = 0.5


@pytest.fixture(autouse=True)
def _generators_as_they_were() -> Iterator[None]:
    before = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])


def jitter(x: Tensor) -> Any:
    factor = random.uniform(0.8, 1.2)
    return x * factor + torch.randn(3) * (1 - factor), factor


def stochastic_depth(x: Tensor) -> Any:
    if random.random() < probability:
        return x
    return x.sin() / (1 - probability) + random.random()


def mixup(x: Tensor) -> Any:
    share = numpy.random.beta(0.4, 0.4)
    return share * x + (1 - share) * x.flip(0), share


def both_generators(x: Tensor) -> Any:
    return (
        x * random.gauss(0, 1) + numpy.random.rand() * random.gauss(1, 2) - random.random() * numpy.random.normal(0.5)
    )


def rotation(x: Tensor) -> Any:
    angle = random.uniform(-math.pi, math.pi)
    return x * math.cos(angle) + x.flip(0) * math.sin(angle)


def bounds_that_change(x: Tensor) -> Any:
    return x * random.uniform(random.random(), 3)


def many(x: Tensor) -> Any:
    for _ in range(20):
        x = x + random.random()
    return x


def with_a_gradient_inside(x: Tensor) -> Any:
    y = (x * random.random()).sin().sum()
    return torch.autograd.grad(y, x)[0] * random.random()


PROGRAMS = [
    jitter,
    stochastic_depth,
    mixup,
    both_generators,
    rotation,
    bounds_that_change,
    many,
    with_a_gradient_inside,
]


def _run(function: Callable[..., Any], calls: int = 6) -> list[Any]:
    torch.manual_seed(0)
    random.seed(1)
    numpy.random.seed(2)
    found = []
    for _ in range(calls):
        x = torch.linspace(0.1, 1, 3, requires_grad=True)
        result = function(x)
        value = result[0] if isinstance(result, tuple) else result
        first: Any = None
        if value.requires_grad:
            (first,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
            first = (
                first.detach(),
                torch.autograd.grad(first.sum(), x, allow_unused=True) if first.requires_grad else None,
            )
        found.append((result, first, _state(), torch.get_rng_state()))
    return found


def _state() -> Any:
    of_numpy: Any = numpy.random.get_state()
    return random.getstate(), of_numpy[1].tolist(), of_numpy[2:]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_graph_draws_as_eager(program: Callable[..., Any]) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    same(_run(program), _run(compiled))
    assert len(compiled.entries) <= 2
    assert captures(compiled) <= 4


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_other_backends(backend: str) -> None:
    same(_run(jitter), _run(dovetail.compile(jitter, backend=backend)), exact=False)


def test_the_probability_changes_between_calls() -> None:
    global probability
    found = []
    for function in (stochastic_depth, dovetail.compile(stochastic_depth, backend="aten", fullgraph=True)):
        random.seed(0)
        for probability in (0.0, 1.0, 0.5, 0.2, 0.9):
            found.append((function(torch.ones(3)), random.getstate()))
    probability = 0.5
    same(found[:5], found[5:])


def in_a_key(x: Tensor) -> Any:
    return x * len({random.random(): 1})


def as_an_index(x: Tensor) -> Any:
    return x[int(random.random() * 3)] * 2


def six_branches(x: Tensor) -> Any:
    for _ in range(6):
        if random.random() < 0.5:
            x = x * 2 + 1
    return x


def a_choice(x: Tensor) -> Any:
    return x * random.choice([1, 2, 3]) * random.random() + random.randint(0, 1)


def across_a_break(x: Tensor) -> Any:
    y = x * random.random()
    print(end="")
    return y + random.random() * numpy.random.uniform(1, 2)


def seeded_inside(x: Tensor) -> Any:
    y = x * random.random()
    random.seed(3)
    return y * random.random()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [in_a_key, as_an_index, six_branches, a_choice, across_a_break, seeded_inside])
def test_where_the_graph_breaks_the_numbers_are_eagers(program: Callable[..., Any]) -> None:
    compiled: Any = dovetail.compile(program, backend="aten")
    same(_run(program, 8), _run(compiled, 8))
    parts = (compiled, *compiled.continuations()) if program is not in_a_key else (compiled,)
    assert max(len(part.entries) for part in parts) <= 4


def test_a_number_that_must_be_known_is_refused_in_one_graph() -> None:
    for program in (in_a_key, a_choice):
        before = _state()
        with pytest.raises(errors.GraphBreakError):
            dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(3))
        assert _state() == before


def test_nothing_is_drawn_by_a_capture_that_is_given_up() -> None:
    def raises(x: Tensor) -> Any:
        y = x * random.random()
        if y.shape[0] == 3:
            raise ValueError(y.shape)
        return y

    found = []
    for function in (raises, dovetail.compile(raises, backend="aten", fullgraph=True)):
        random.seed(0)
        with pytest.raises(ValueError, match="3"):
            function(torch.ones(3))
        found.append((function(torch.ones(2)), random.getstate()))
    same(found[0], found[1])


def test_a_generator_of_the_programs_own_is_left_alone() -> None:
    generator = random.Random(0)

    def own(x: Tensor) -> Any:
        return x * generator.uniform(1, 2)

    with pytest.raises(errors.GraphBreakError):
        dovetail.compile(own, backend="aten", fullgraph=True)(torch.ones(3))
    twin = random.Random(0)
    compiled = dovetail.compile(own, backend="aten")
    assert [float(compiled(torch.ones(1, dtype=torch.float64))) for _ in range(3)] == [
        twin.uniform(1, 2) for _ in range(3)
    ]


def test_drawn_in_the_backward_is_left_to_eager() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0] * random.random()

    def function(x: Tensor) -> Any:
        return Noisy.apply(x * random.random())

    with pytest.raises(errors.GraphBreakError):
        dovetail.compile(function, backend="aten", fullgraph=True)(torch.ones(3, requires_grad=True))


def chosen_by_the_library(x: Tensor) -> Any:
    y = x * 2
    share = random.randint(2, 9)
    order = [0, 1, 2]
    random.shuffle(order)
    return (
        y.sin() * share + x[order],
        random.sample(range(9), 3),
        random.choices([x, y], k=2)[0] * 2,
        random.choice("abc"),
    )


@pytest.mark.slow
def test_a_choice_of_the_library_is_one_graph_break() -> None:
    compiled = dovetail.compile(chosen_by_the_library, backend="aten")
    same(_run(chosen_by_the_library), _run(compiled))
    assert compiled.events.count("recompile") <= 20
    assert len(compiled.continuations()) <= 5
