"""``numpy.float64`` numbers that change from call to call: one entry for many of them, and NumPy's own numbers and types."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import dovetail
from tests.differential import captures, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor
table = numpy.linspace(0.1, 2.0, 20)


def ramp_up(x: Tensor, step: float) -> Any:
    phase = 1.0 - numpy.clip(step, 0.0, 50) / 60
    return x * float(numpy.exp(-5.0 * phase * phase)), phase


def cosine(x: Tensor, step: float) -> Any:
    rate = 0.5 * (1 + numpy.cos(numpy.pi * step / 50))
    y = torch._foreach_mul([x, x], rate)[1]
    y[0] = rate
    return x.mul(rate).add_(x, alpha=-rate), x - rate, rate * x, numpy.sqrt(rate).item(), y, torch.where(x > 2, x, rate)


def types(x: Tensor, step: float) -> Any:
    number = numpy.sqrt(step)
    return (
        type(number) is numpy.float64,
        isinstance(number, float),
        type(-number),
        type(float(number)),
        torch.tensor([1.0]) * number,
        max(number, 0.5),
        min(0.25, number),
        math.exp(number),
        type(number * 2),
        type(2**number),
    )


def branches(x: Tensor, step: float) -> Any:
    number = numpy.log(step)
    return x + number if number > 2.0 else x - 1, type(number > 2.0), not number < 1


def kept(x: Tensor, step: float) -> Any:
    group = {"lr": numpy.tanh(step), "text": 1}
    return x.sub(x, alpha=group["lr"]), group, [group["lr"], (group["lr"],)]


def of_lists(x: Tensor, step: float) -> Any:
    rate = 0.5 * numpy.min([numpy.power(step, -0.5), numpy.power(4.0, -1.5) * step])
    rest = numpy.mean([step, 2.0]), numpy.max((step, rate)), numpy.interp(step, [0.0, 3.0, 50.0], [0.0, 1.0, 0.1])
    return x * rate, rest, numpy.std([step * 0.5, rate, 1])


def places(x: Tensor, step: float) -> Any:
    return x * table[int(step)], table[int(step) - 1]


def made_places(x: Tensor, step: int) -> Any:
    rates = numpy.concatenate([numpy.linspace(0.0, 1.0, 5), 0.5 ** numpy.arange(12.0)])
    number = numpy.float64(step)
    return x * rates[step], rates[-step], type(rates[step]), x * number, number, type(number * 0.5)


def used_otherwise(x: Tensor, step: float) -> Any:
    number = numpy.exp(-step)
    return (
        torch.tensor(number),
        x.new_tensor(number),
        torch.tensor([number]),
        torch.full((2,), number),
        f"{number:.3f}",
        str(number),
        round(number, 2),
        {number: 1},
        number.dtype,
        hash(number),
    )


def test_small_types_are_eagers() -> None:
    def function(x: Tensor, step: Any) -> Any:
        return x * step, step + step, numpy.float32(0.5) * x

    run_both(
        function, [(numpy.float32(step),) for step in range(1, 4)] + [(numpy.int64(step),) for step in range(1, 4)]
    )


def run_both(function: Callable[..., Any], calls: list[tuple[Any, ...]], **options: Any) -> int:
    compiled = dovetail.compile(function, backend="aten", **options)
    for args in calls:
        same(compiled(torch.ones(3), *args), function(torch.ones(3), *args))
    return captures(compiled)


@pytest.mark.parametrize(
    ("function", "most"),
    [(ramp_up, 3), (cosine, 2), (types, 2), (branches, 4), (kept, 2), (places, 3), (made_places, 3)] + [(of_lists, 4)],
)
def test_a_schedule_of_numpys_is_few_entries(function: Any, most: int) -> None:
    kind: Any = int if function in (places, made_places) else float
    assert run_both(function, [(kind(step),) for step in range(3, 15)], fullgraph=True) <= most


def test_what_needs_the_number_itself_is_right() -> None:
    run_both(used_otherwise, [(float(step),) for step in range(1, 5)])


def test_places_behind_the_end_and_other_arguments_of_float64_are_eagers() -> None:
    def function(x: Tensor, place: int) -> Any:
        try:
            rate = numpy.linspace(0.1, 1.0, 6)[place]
        except IndexError:
            rate = numpy.float64(x.sum().item())
        return x * rate, numpy.float64(x[0]), numpy.float64("0.5"), numpy.float64(), numpy.float64([place, 2])

    run_both(function, [(place,) for place in (2, 3, 5, 6, -6, -7, 4)])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "divide",
    [
        lambda n: numpy.sqrt(n) / (n - 4),
        lambda n: numpy.sqrt(n) % (n - 4),
        lambda n: (n - 4.0) / (numpy.sqrt(n) - 2),
        lambda n: numpy.float64(3) / (n - 4.0),
        lambda n: numpy.int64(3) // (n - 4),
        lambda n: numpy.float32(3) / (n - 4),
        lambda n: (n - 4) / numpy.float64(0),
        lambda n: numpy.float64(0) ** (3 - n),
    ],
)
def test_numpy_divides_by_zero(divide: Callable[[int], Any]) -> None:
    """Python's numbers raise."""

    def function(x: Tensor, n: int) -> Any:
        try:
            share = divide(n)
        except ArithmeticError:
            return x
        return x * share, type(share)

    for numbers in [(2, 3, 5, 4, 9), (4, 4, 3, 4)]:
        run_both(function, [(number,) for number in numbers])


def test_an_argument_of_numpys_that_changes_is_one_more_entry() -> None:
    def function(x: Tensor, rate: Any) -> Any:
        return x * rate, rate * x, float(rate) + 1, rate / 2, rate

    numbers = [numpy.float64(0.1 * step) for step in range(1, 9)]
    assert run_both(function, [(number,) for number in numbers], fullgraph=True) == 2


def test_numbers_that_numpy_warns_of_and_such_without_symbols_are_eagers() -> None:
    def function(x: Tensor, number: float) -> Any:
        return x * numpy.log(number), x + numpy.clip(number, -1.0, 1.0)

    run_both(function, [(0.5,), (0.6,), (0.7,), (1.0,), (0.0,), (-1.0,), (math.nan,), (math.inf,), (0.8,)])


def test_a_table_that_is_written_to_between_calls_is_read_anew() -> None:
    rates = numpy.array([0.5, 0.25, 0.125, 0.0625])

    def function(x: Tensor, place: int) -> Any:
        return x * rates[place]

    compiled = dovetail.compile(function, backend="aten")
    for place in (2, 3, 2, 3):
        rates[2] *= 3
        same(compiled(torch.ones(3), place), function(torch.ones(3), place))
    for place in (-1, 7):
        with pytest.raises(IndexError) if place == 7 else torch.no_grad():
            same(compiled(torch.ones(3), place), function(torch.ones(3), place))


def test_gradients_through_a_number_that_changes() -> None:
    def function(x: Tensor, step: float) -> Tensor:
        return (x.square() * numpy.exp(-step)).sum()

    compiled = dovetail.compile(function, backend="aten")
    for step in (0.5, 0.7, 0.9, 1.1):
        found = []
        for call in (function, compiled):
            x = torch.tensor([1.0, 2.0], requires_grad=True)
            call(x, step).backward()
            found.append(x.grad)
        same(*found)
    assert captures(compiled) == 2


def test_numbers_of_other_types_are_not_taken_for_it() -> None:
    """What NumPy computes with them has another type, and another precision."""

    def function(x: Tensor, step: Any) -> Any:
        return x * step, step * 2, numpy.sqrt(step), step

    first, others = (
        [numpy.float64(0.5), numpy.float64(0.7)],
        [0.9, numpy.int64(3), numpy.float64(1.3), numpy.array(0.2)],
    )
    run_both(function, [(number,) for number in (*first, numpy.float32(0.3), *others)])


def test_beside_a_number_that_the_data_decides() -> None:
    def function(x: Tensor, step: float) -> Any:
        rate, count = numpy.power(step, -0.5), x.sum().item()
        change = -(rate / count) * 2.0 + numpy.float64(0.5) - numpy.power(step, 0.25) * x.long().sum().item()
        return x * change, change, x.add(x, alpha=change), (rate * count) * x, abs(change)

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for step in range(3, 10):
        x = torch.linspace(1.0, 2.0, 3) * step
        same(compiled(x, float(step)), function(x, float(step)))
    assert captures(compiled) <= 3


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_a_rate_of_numpys_in_a_whole_step(make: Any) -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer, state = make(model.parameters(), 0.1), {"step": 0}

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer, state: Any = state) -> float:
            state["step"] += 1
            rate = 0.1 * numpy.min([numpy.power(state["step"], -0.5), state["step"] * numpy.power(4, -1.5)])
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return float(loss.item())

        run: Any = dovetail.compile(step, backend="aten", fullgraph=True) if compiles else step
        losses = [run(torch.full((4, 3), 0.1 * index)) for index in range(8)]
        found.append((losses, dict(model.state_dict()), optimizer.state_dict()))
    same(*found)
    assert captures(run) <= 4


@pytest.mark.parametrize(
    "program",
    [
        lambda x, v: v / x.sum().item(),
        lambda x, v: x.sum().item() / v,
        lambda x, v: v // x.sum().item(),
        lambda x, v: v ** x.sum().item(),
        lambda x, v: numpy.float32(v) * x.sum().item(),
        lambda x, v: numpy.float64(2.0) / x.sum().item(),
    ],
)
def test_arithmetic_that_is_not_pythons_is_numpys(program: Any) -> None:
    """Python raises where NumPy divides by zero, and other scalars of NumPy's have other types."""
    compiled = dovetail.compile(program, backend="aten")
    for numbers, v in ((torch.ones(3), 2.0), (torch.zeros(3), 3.0), (torch.full((3,), 2.5), 0.0), (torch.ones(3), 4.0)):
        with numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected, found = (run(numbers, numpy.float64(v)) for run in (program, compiled))
        assert repr(found) == repr(expected) and type(found) is type(expected)
