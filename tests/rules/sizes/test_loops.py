"""Loops over a symbolic size: eager's numbers and gradients for all sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import clone_inputs, compare_call, leaf, same

SIZES = ((2, 3), (3, 4), (3, 2))


pytestmark = pytest.mark.usefixtures("quiet")


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(x.shape[0], 4)
    outputs = torch.zeros_like(x)
    for step in range(x.shape[1]):
        state = torch.tanh(state @ weight + x[:, step])
        outputs[:, step] = state * 2
    return outputs.sum() + state.mean() * step


def from_the_second_on(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = x[:, 0] * 1
    length = x.shape[1]
    for at in range(1, length):
        total = total * 0.5 + (x[:, at] - x[:, length - 1 - at]) @ weight
    return total.square().sum()


def through_views(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    outputs = x * 0
    for at in range(x.shape[1]):
        row = outputs[:, at]
        row += x[:, at] @ weight
    return outputs.cos().sum()


def state_is_changed_in_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    state = x[:, 0].clone()
    before = state
    for at in range(x.shape[1]):
        state *= 0.5
        state += x[:, at] @ weight
    return (before.sin() + state).sum()


def argument_is_written(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    for at in range(x.shape[1]):
        cache[:, at] = x.detach()[:, at] * 2
    return (x * cache).sum()


def in_float64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    kind = torch.float64
    state = torch.zeros(x.shape[0], 4, dtype=kind)
    for at in range(x.shape[1]):
        state = state + torch.nn.functional.gelu(x[:, at]).to(kind)
    return (state @ weight.to(kind)).sum()


def without_gradients(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        level = torch.zeros(4)
        for at in range(x.shape[1]):
            level = level * 0.9 + x[:, at].mean(0) * 0.1
    return ((x - level) @ weight).sin().sum()


def a_state_without_gradient(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    count, total = torch.zeros(4), torch.zeros(4)
    for at in range(x.shape[1]):
        count = count + 0.5
        total = total + x[0, at] + x[0, at].detach()
    if count.requires_grad:
        raise ValueError
    return (count * total @ weight).sum()


@pytest.mark.parametrize(
    "program",
    [gated, from_the_second_on, through_views, state_is_changed_in_place, in_float64, a_state_without_gradient],
)
@pytest.mark.sampled(6)
def test_values_and_gradients_at_each_length(program: Callable[..., Any]) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    weight = leaf(4, 4)
    for rows, length in SIZES:
        compare_call(program, compiled, (leaf(rows, length, 4), weight))


@pytest.mark.slow
def test_an_argument_that_the_loop_writes_to() -> None:
    compiled = dovetail.compile(argument_is_written, backend="aten", fullgraph=True)
    for rows, length in SIZES:
        compare_call(argument_is_written, compiled, (leaf(rows, length, 4), torch.ones(rows, length, 4)))
    whole = torch.ones(3, 7, 8)
    other = whole.clone()
    x = leaf(3, 7, 4)
    same(argument_is_written(x, other[..., 4:]), compiled(x, whole[..., 4:]), exact=True)
    same(other, whole, exact=True)


def test_second_derivatives() -> None:
    compiled = dovetail.compile(gated, backend="aten", fullgraph=True)
    weight = leaf(4, 4)
    for rows, length in SIZES[:1]:
        found = []
        for function in (gated, compiled):
            x, own = leaf(rows, length, 4).double(), weight.detach().double().requires_grad_()
            x = x.detach().requires_grad_()
            with torch.no_grad():
                x.copy_(torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape))
            (first,) = torch.autograd.grad(function(x.float(), own.float()), own, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), (x, own)))
        for left, right in zip(*found, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def grows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    found = x[:, :1]
    for at in range(x.shape[1]):
        found = torch.cat([found, x[:, at : at + 1] @ weight], 1)
    return found.sum()


def draws(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    state = x[:, 0] * 1
    for at in range(x.shape[1]):
        state = torch.nn.functional.dropout(state + x[:, at], 0.5)
    return state.sum()


def branches(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    state = x[:, 0] * 1
    for at in range(x.shape[1]):
        if at % 2:
            state = state + x[:, at] @ weight
    return state.sum()


def appends(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    found = []
    for at in range(x.shape[1]):
        found.append(x[:, at] @ weight)
    return torch.stack(found).sin().sum()


def reads_another_name_of_what_it_writes(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    outputs = x * 1
    flat = outputs.view(-1)
    for at in range(x.shape[1]):
        outputs[:, at] = flat[at] + x[:, at] @ weight
    return outputs.sum()


def two_names_for_one_state(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    first, second = x[:, 0] * 1, x[:, 0] * 2
    for at in range(x.shape[1]):
        first = first + x[:, at]
        second = first
    first *= 2
    return (second @ weight).sum()


def a_state_that_is_a_view(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.sin()
    last = wide[:, 0]
    for at in range(x.shape[1]):
        last = wide[:, at]
    last += 1
    return (wide @ weight).sum()


@pytest.mark.parametrize(
    "program",
    [
        grows,
        draws,
        branches,
        appends,
        reads_another_name_of_what_it_writes,
        two_names_for_one_state,
        a_state_that_is_a_view,
        without_gradients,
    ],
)
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.sampled(10)
def test_other_loops_are_eagers_too(program: Callable[..., Any], fullgraph: bool) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=fullgraph)
    weight = leaf(4, 4)
    for rows, length in SIZES[:2]:
        arguments = (leaf(rows, length, 4), weight)
        ours, theirs = clone_inputs(arguments), clone_inputs(arguments)
        torch.manual_seed(0)
        expected = program(*theirs)
        torch.manual_seed(0)
        actual = compiled(*ours)
        same(expected, actual)
        expected.backward()
        actual.backward()
        for left, right in zip(theirs, ours, strict=True):
            torch.testing.assert_close(left.grad, right.grad)


@pytest.mark.slow
def test_no_round_and_one_round() -> None:
    compiled = dovetail.compile(gated_or_nothing, backend="aten", dynamic=True)
    weight = leaf(4, 4)
    for length in (3, 1, 0, 1, 4):
        compare_call(gated_or_nothing, compiled, (leaf(3, length, 4), weight))


def gated_or_nothing(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    state = weight[:3] * 1
    for at in range(x.shape[1]):
        state = state @ weight + x[:, at]
    return state.sum()


@pytest.mark.slow
def test_in_autocast() -> None:
    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for at in range(x.shape[1]):
                state = (state @ weight + x[:, at]).float()
        return state.sum()

    compiled = dovetail.compile(program, backend="aten")
    weight = leaf(4, 4)
    for rows, length in SIZES[:2]:
        arguments = (leaf(rows, length, 4), weight)
        torch.testing.assert_close(compiled(*arguments), program(*arguments))


@pytest.mark.parametrize(
    "program", [reads_another_name_of_what_it_writes, two_names_for_one_state, a_state_that_is_a_view]
)
def test_shared_memory_without_gradients(program: Callable[..., Any]) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    weight = leaf(4, 4).detach()
    for rows, length in SIZES[:2]:
        x = leaf(rows, length, 4).detach()
        same(program(x, weight), compiled(x, weight))


def test_under_a_transform() -> None:
    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda rows: gated(rows, weight))(x.unflatten(0, (2, -1))).sum()

    compiled = dovetail.compile(program, backend="aten")
    weight = leaf(4, 4)
    for rows, length in ((4, 2), (6, 3)):
        arguments = (leaf(rows, length, 4), weight)
        torch.testing.assert_close(compiled(*arguments), program(*arguments))
