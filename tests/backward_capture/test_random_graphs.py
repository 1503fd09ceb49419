"""Random autograd graphs: gradients to the last bit, and hooks in eager's order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import dovetail
from dovetail.backward_capture import BackwardSession, open_session
from tests.backward_capture.test_scenarios import assert_same
from tests.differential import Rule, same


def program(seed: int, higher: bool = False) -> list[Any]:
    """Random operators on random leaves, hooks on half of the values, gradients by one of four calls.

    With ``higher`` the gradients are taken with ``create_graph=True``, and their own gradients after them.
    """
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
    if higher:
        return second_derivative(choose, leaves, values, total, notes)
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


def second_derivative(
    choose: random.Random, leaves: list[torch.Tensor], values: list[torch.Tensor], total: torch.Tensor, notes: list[Any]
) -> list[Any]:
    """The gradients of gradients, by ``grad`` or by ``backward``."""
    wanted = choose.sample(values, min(len(values), 3))
    first = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
    known = [item.square().sum() for item in first if item is not None and item.requires_grad]
    if known and choose.random() < 0.5:
        sum(known).backward()
        second: list[Any] = []
    else:
        second = list(torch.autograd.grad(sum(known), leaves, allow_unused=True)) if known else []
    return [[None if item is None else item.detach() for item in first], second, [leaf.grad for leaf in leaves], notes]


def more(seeds: range, default: int) -> list[Any]:
    """Some seeds for the default run, the others with ``--slow``."""
    return [*seeds[:default], *(pytest.param(seed, marks=pytest.mark.slow) for seed in seeds[default:])]


def not_expected(session: BackwardSession) -> list[str]:
    """The fallbacks but for those of programs that ask for the gradient of a tensor with a hook, and of one before it."""
    return [reason for reason in session.fallbacks if "a tensor with a hook" not in reason]


#: The order of sums: a compiled part is one node of the record, and sums its inputs' gradients itself.
ROUNDED = Rule("close", ignored=frozenset({"strides", "requires_grad", "is_leaf"}))


@pytest.mark.slow
@pytest.mark.parametrize("start", more(range(2000, 2060, 20), default=1))
def test_differentiated_twice(start: int) -> None:
    session = BackwardSession()
    for seed in range(start, start + 20):
        expected = program(seed, higher=True)
        with open_session(session):
            found = program(seed, higher=True)
        assert_same(expected, found, f"seed {seed}")
    assert not_expected(session) == []


@pytest.mark.parametrize("seed", range(3000, 3006))
@pytest.mark.sampled(6)
def test_compiled_and_differentiated_twice(seed: int) -> None:
    expected = program(seed, higher=True)
    session = BackwardSession(lambda function: dovetail.compile(function, backend="aten"))
    with open_session(session):
        found = program(seed, higher=True)
    same(expected, found, exact=ROUNDED)
    assert not_expected(session) == []


@pytest.mark.parametrize("start", more(range(0, 200, 20), default=5))
@pytest.mark.slow
def test_captured(start: int) -> None:
    session = BackwardSession()
    for seed in range(start, start + 20):
        expected = program(seed)
        with open_session(session):
            found = program(seed)
        assert_same(expected, found, f"seed {seed}")
    assert not_expected(session) == []
    assert session.runs >= 20


@pytest.mark.parametrize("seed", more(range(1000, 1012), default=6))
@pytest.mark.sampled(4)
def test_compiled(seed: int) -> None:
    expected = program(seed)
    session = BackwardSession(lambda function: dovetail.compile(function, backend="aten"))
    with open_session(session):
        found = program(seed)
    assert_same(expected, found)
    assert not_expected(session) == []
