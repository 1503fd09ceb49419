"""Results that are computed from what a ``backward()`` inside has freed, as the sum of two losses that is logged."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import ArtefactError, GraphBreakError
from tests.differential import same

Tensor = torch.Tensor


def sum_of_losses(x: Tensor, weight: Tensor) -> Tensor:
    real, fake = (x * weight).exp().mean(), (x * weight).sin().mean()
    real.backward()
    fake.backward()
    return real + fake


def mean_of_it(x: Tensor, weight: Tensor) -> Tensor:
    found = (x * weight).exp()
    found.sum().backward()
    return found.view(-1).mean()


def with_something_else(x: Tensor, weight: Tensor) -> Tensor:
    loss = (x * weight).exp().sum()
    loss.backward()
    return loss + weight.sum()


def _run(function: Callable[..., Any]) -> tuple[Any, ...]:
    x, weight = torch.ones(3, 2), torch.tensor([0.5, 2.0], requires_grad=True)
    result = function(x, weight)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        result.backward()
    return result, weight.grad


@pytest.mark.parametrize("program", [sum_of_losses, mean_of_it])
def test_it_has_no_backward_any_more(program: Callable[..., Any]) -> None:
    same(_run(program), _run(dovetail.compile(program, backend="aten", fullgraph=True)))


def test_what_has_a_backward_in_part_is_refused() -> None:
    with pytest.raises(GraphBreakError, match="has freed, and from something else"):
        _run(dovetail.compile(with_something_else, backend="aten", fullgraph=True))


def test_losses_that_are_added_up_without_detach() -> None:
    """The sum of an earlier call has no backward any more either; one of another origin has, and eager takes that call."""

    def make(state: dict[str, Any]) -> tuple[Callable[..., Any], Tensor]:
        weight = torch.tensor([0.5, 2.0], requires_grad=True)

        def step(x: Tensor) -> Tensor:
            weight.grad = None
            loss = (x * weight).exp().sum()
            loss.backward()
            state["total"] = state["total"] + loss
            return state["total"]

        return step, weight

    found = []
    for wrap in (lambda step: step, lambda step: dovetail.compile(step, backend="aten")):
        other, state = torch.ones((), requires_grad=True), {"total": 0}
        step, weight = make(state)
        step, rows = wrap(step), []
        for number in range(6):
            if number == 4:
                state["total"] = other * 2
            rows.append(step(torch.full((3, 2), float(number))))
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                rows[-1].backward()
            if number == 4:
                rows.append(torch.autograd.grad(rows[-1], other)[0])
        found.append([*(row.detach() for row in rows), weight.grad])
        if number_of := getattr(step, "entries", None):
            assert len(number_of) <= 4
    same(*found)


def _in_an_attribute(loss: Tensor, state: Any) -> Tensor:
    state.total += loss
    return state.total


def _in_a_tensor(loss: Tensor, state: Any) -> Tensor:
    state.sums.add_(loss).mul_(0.5)
    return state.sums * 2


def _in_one_place(loss: Tensor, state: Any) -> Tensor:
    state.sums[1] += loss
    return loss


def _in_a_view(loss: Tensor, state: Any) -> Tensor:
    state.part.add_(loss)
    return loss


@pytest.mark.parametrize(
    ("add", "entries"), [(_in_an_attribute, 2), (_in_a_tensor, 2), (_in_one_place, 2), (_in_a_view, None)]
)
@pytest.mark.usefixtures("quiet")
def test_losses_that_are_added_in_place(add: Callable[..., Tensor], entries: int | None) -> None:
    """The tensor requires a gradient from then on, which has no backward, and counts eager's writes."""

    def run(wrap: Callable[..., Any]) -> tuple[list[Any], Any]:
        weight, state = (
            torch.tensor([0.5, 2.0], requires_grad=True),
            types.SimpleNamespace(total=0.0, sums=torch.zeros(3)),
        )
        state.part = state.sums[1:2]

        def step(x: Tensor) -> Tensor:
            weight.grad = None
            loss = (x * weight).exp().sum()
            loss.backward()
            return add(loss, state)

        called, found = wrap(step), []
        for number in range(4):
            result = called(torch.full((3, 2), float(number)))
            kept = state.sums if isinstance(state.total, float) else state.total
            found.append(kept._version)
            for value in (result, kept):
                found += [value.detach().clone(), value.requires_grad, value.is_leaf]
                with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                    value.sum().backward()
                with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                    torch.autograd.grad(value.sum(), weight, allow_unused=True)
        return [*found, weight.grad], called

    expected, _ = run(lambda step: step)
    found, compiled = run(lambda step: dovetail.compile(step, backend="aten"))
    same(expected, found)
    assert entries is None or len(compiled.entries) == entries


@pytest.mark.usefixtures("quiet")
def test_a_loss_that_is_added_to_what_has_a_backward_is_left_to_eager() -> None:
    def gradients(wrap: Callable[..., Any]) -> list[Any]:
        other, weight = torch.ones(3, requires_grad=True), torch.tensor([0.5, 2.0], requires_grad=True)
        total = other * 2

        def step(x: Tensor) -> None:
            loss = (x * weight).exp().sum()
            loss.backward()
            total.add_(loss)

        called = wrap(step)
        for _ in range(2):
            called(torch.ones(3, 2))
        return [total.detach(), torch.autograd.grad(total.sum(), other)[0], weight.grad]

    same(gradients(lambda step: step), gradients(lambda step: dovetail.compile(step, backend="aten")))


def test_a_step_that_adds_a_loss_in_place_is_not_exported(tmp_path: Path) -> None:
    sums = torch.zeros(())

    def step(x: Tensor, weight: Tensor) -> None:
        loss = (x * weight).exp().sum()
        loss.backward()
        sums.add_(loss)

    joint = dovetail.capture(step, (torch.ones(3, 2), torch.tensor([0.5, 2.0], requires_grad=True)))
    with pytest.raises(ArtefactError):
        joint.export(tmp_path / "step")
