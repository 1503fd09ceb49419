"""Random autograd graphs: gradients to the last bit, and hooks in eager's order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import dovetail
from dovetail.compiled_autograd import BackwardSession, open_session
from tests.compiled_autograd.test_scenarios import assert_same


def program(seed: int) -> list[Any]:
    """Random operators on random leaves, hooks on half of the values, gradients by one of four calls."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    notes: list[Any] = []
    leaves = [torch.randn(4, requires_grad=True) for _ in range(choose.randint(1, 6))]
    values = list(leaves)

    def watch(name: int, tensor: torch.Tensor) -> None:
        tensor.register_hook(lambda gradient: notes.append((name, gradient.clone())))

    for number in range(choose.randint(3, 25)):
        x, y = choose.choice(values), choose.choice(values[-4:])
        result = choose.choice(
            [
                lambda x, y: x * y,
                lambda x, y: x + y,
                lambda x, y: x.sin() - y,
                lambda x, y: torch.cat([x, y])[2:6],
                lambda x, y: torch.stack([x, y, x]).sum(0),
                lambda x, y: (x * 1).mul_(y),
                lambda x, y: torch.where(x > 0, x, y),
                lambda x, y: torch.outer(x, y).mean(0),
                lambda x, y: x.clone().index_add_(0, torch.tensor([0, 0, 3]), y[:3]),
            ]
        )(x, y).tanh()
        if result.requires_grad and choose.random() < 0.5:
            watch(number, result)
        values.append(result)
    for number, leaf in enumerate(leaves):
        if choose.random() < 0.5:
            watch(-number - 1, leaf)
            leaf.register_post_accumulate_grad_hook(
                lambda leaf, number=number: notes.append((number, leaf.grad.clone()))
            )
    total = sum(choose.sample(values, min(len(values), 4))).sum()
    way = choose.randrange(4)
    results: list[Any] = []
    if way == 0:
        total.backward()
    elif way == 1:
        total.backward(inputs=choose.sample(leaves, choose.randint(1, len(leaves))))
    elif way == 2:
        wanted = choose.sample(values, min(len(values), 3))
        results = list(torch.autograd.grad(total, wanted, allow_unused=True))
    else:
        torch.autograd.backward([values[-1], total], [torch.ones(4), None], retain_graph=True)
        total.backward()
    return [results, [leaf.grad for leaf in leaves], notes]


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_captured(start: int) -> None:
    session = BackwardSession()
    for seed in range(start, start + 20):
        expected = program(seed)
        with open_session(session):
            found = program(seed)
        assert_same(expected, found, f"seed {seed}")
    assert session.fallbacks == []
    assert session.runs >= 20


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_compiled(seed: int) -> None:
    expected = program(seed)
    session = BackwardSession(lambda function: dovetail.compile(function, backend="aten"))
    with open_session(session):
        found = program(seed)
    assert_same(expected, found)
    assert session.fallbacks == []
