"""Functions of torch's that call functions of the user's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

SCALE = 2.0


def distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return SCALE * (x - y).square().sum(-1)


class Distance(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return distance(x, y).sqrt()


def loss(function):
    triplet = torch.nn.functional.triplet_margin_with_distance_loss
    return lambda a, p, n: triplet(a, p, n, distance_function=function, swap=True)


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "function", [distance, functools.partial(distance), Distance(), torch.nn.functional.pairwise_distance, None]
)
def test_second_derivative_through_a_distance_of_the_users(function) -> None:
    target = loss(function)

    def second(call):
        given = inputs()
        first = torch.autograd.grad(call(*given), given, create_graph=True)
        return torch.autograd.grad(sum(item.square().sum() for item in first), given)

    compiled = dovetail.compile(target, backend="aten", fullgraph=True)
    for _ in range(2):
        for one, other in zip(second(target), second(compiled), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_the_users_function_reads_is_guarded(monkeypatch) -> None:
    compiled = dovetail.compile(loss(distance), backend="aten", fullgraph=True)
    given = inputs()
    before = compiled(*given)
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert torch.equal(compiled(*given), loss(distance)(*given))
    assert not torch.equal(compiled(*given), before)


class Named:
    def __init__(self) -> None:
        self.size = 1


@pytest.mark.parametrize(
    "item",
    [Named, Named(), distance, Distance, Distance(), Distance().forward, functools.partial, len, 3, torch.ones(1)],
)
def test_the_name_of_what_torch_is_given(item) -> None:
    def program(x):
        return x + 1, torch.typename(item), torch.typename(x)

    x = torch.ones(2)
    assert dovetail.compile(program, backend="aten", fullgraph=True)(x)[1:] == program(x)[1:]


def test_data_parallel_without_devices_is_its_module() -> None:
    def train(compiles: bool) -> Any:
        torch.manual_seed(0)
        model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout()), device_ids=[])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = dovetail.compile(step, backend="aten", fullgraph=True) if compiles else step
        return [run(torch.randn(2, 3)) for _ in range(3)], model.state_dict()

    same(train(False), train(True))
