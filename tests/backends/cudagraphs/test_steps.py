"""Whole training steps, optimizer included, as one recording: what the step writes is written by the replay itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.backends.cudagraphs import SimulatedRecorder
from dovetail.errors import RecordingWarning
from tests.backends.cudagraphs.recorded import compile_recorded

pytestmark = pytest.mark.filterwarnings(f"error::{RecordingWarning.__module__}.{RecordingWarning.__name__}")


def make_step(model: nn.Module, momenta: list[torch.Tensor]) -> Callable[[torch.Tensor, float], torch.Tensor]:
    """Forward, backward and momentum, in place."""
    parameters = list(model.parameters())

    def step(x: torch.Tensor, rate: float) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient, momentum in zip(parameters, gradients, momenta):
                momentum.mul_(0.9).add_(gradient)
                parameter.sub_(momentum * rate)
        return loss.detach()

    return step


@pytest.mark.parametrize("kernels", ["aten", "inductor"])
@pytest.mark.sampled(2)
def test_a_whole_step_is_one_replay(kernels: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2))
    twin = copy.deepcopy(model)
    momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
    others = [torch.zeros_like(parameter) for parameter in model.parameters()]
    recorder = SimulatedRecorder(opaque=kernels == "inductor")
    eager, step = make_step(model, momenta), compile_recorded(make_step(twin, others), recorder, kernels=kernels)
    exact: dict[str, Any] = {"rtol": 0, "atol": 0} if kernels == "aten" else {"rtol": 1e-4, "atol": 1e-5}
    kept = []
    for number in range(7):
        x, rate = torch.randn(3, 4), 0.1 / (number + 1)
        torch.manual_seed(number)
        wanted = eager(x, rate)
        torch.manual_seed(number)
        versions = [parameter._version for parameter in twin.parameters()]
        kept.append((wanted, step(x, rate)))
        torch.testing.assert_close([a for a, _ in kept], [b for _, b in kept], **exact)
        torch.testing.assert_close(list(model.state_dict().values()), list(twin.state_dict().values()), **exact)
        torch.testing.assert_close(momenta, others, **exact)
        for version, parameter in zip(versions, twin.parameters()):
            assert parameter._version > version, "autograd does not notice that a parameter was written to"
    # One for the step with a constant rate, which nobody has recorded, and one for the step that takes it.
    assert (recorder.live, recorder.replays) == (1, 5)


def run_both(function: Callable[..., Any], *state: torch.Tensor, calls: int = 5) -> None:
    """``function(state, x)`` eagerly and recorded, with state that both keep for themselves."""
    mine, theirs = [value.clone() for value in state], [value.clone() for value in state]
    step = compile_recorded(lambda x: function(theirs, x), SimulatedRecorder())
    for _ in range(calls):
        x = torch.randn(3)
        wanted, found = function(mine, x), step(x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        torch.testing.assert_close(theirs, mine, rtol=0, atol=0)


def test_a_new_value_that_is_returned_as_well() -> None:
    def function(state: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        new = state[0] + x
        state[0].copy_(new)
        return new

    run_both(function, torch.zeros(3))


def test_a_returned_new_value_is_not_the_state() -> None:
    total = torch.zeros(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        new = total + x
        total.copy_(new)
        return new

    step = compile_recorded(function, SimulatedRecorder())
    kept = [step(torch.ones(3)) for _ in range(5)]
    assert [value[0].item() for value in kept] == [1.0, 2.0, 3.0, 4.0, 5.0]
    kept[-1].zero_()
    assert total[0].item() == 5.0


def test_state_that_is_exchanged() -> None:
    def function(state: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        first = state[0].clone()
        state[0].copy_(state[1])
        state[1].copy_(first)
        return state[0] * x

    run_both(function, torch.arange(3.0), torch.ones(3))


def test_state_that_depends_on_other_state() -> None:
    def function(state: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        state[0].add_(x)
        state[1].mul_(0.5).add_(state[0])
        state[0].sub_(state[1])
        return (state[0] * state[1]).sum()

    run_both(function, torch.zeros(3), torch.ones(3))


def test_an_argument_that_is_written_to() -> None:
    step = compile_recorded(lambda x, total: total.add_(x).sum(), SimulatedRecorder())
    for _ in range(5):
        x, total = torch.randn(3), torch.randn(3)
        wanted = total + x
        assert torch.equal(step(x, total), wanted.sum())
        assert torch.equal(total, wanted)


def test_state_that_is_replaced() -> None:
    state = {"total": torch.zeros(3)}
    step = compile_recorded(lambda x: state["total"].add_(x).sum(), SimulatedRecorder())
    for number in range(4):
        assert step(torch.ones(3)).item() == 3.0 * (number + 1)
    old = state["total"]
    state["total"] = torch.full((3,), 10.0)
    for number in range(4):
        assert step(torch.ones(3)).item() == 3.0 * (11 + number)
    assert old[0].item() == 4.0


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_added_up_inside(to_none: bool) -> None:
    """``.grad`` is read and written by the graph; it stays a tensor of the user's own, never a recording's memory."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    twin = copy.deepcopy(model)
    recorder = SimulatedRecorder()

    def backward_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def backward(x: torch.Tensor) -> torch.Tensor:
            loss = module(x).pow(2).mean()
            loss.backward()
            return loss.detach()

        return backward

    eager, recorded = backward_of(model), compile_recorded(backward_of(twin), recorder)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (model, twin)]
    kept = []
    for number in range(15):
        x = torch.randn(3, 4)
        kept.append((eager(x), recorded(x)))
        owned = {value.untyped_storage().data_ptr() for item in recorder.recordings for value in item.memory}
        for one, two in zip(model.parameters(), twin.parameters()):
            assert one.grad is not None and two.grad is not None
            assert torch.equal(one.grad, two.grad)
            assert two.grad.untyped_storage().data_ptr() not in owned
        if number % 3 == 2:
            for wanted, found in kept:
                assert torch.equal(wanted, found)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            kept.clear()
        for one, two in zip(model.parameters(), twin.parameters()):
            assert torch.equal(one, two)
    assert recorder.replays >= 8


def test_a_backward_with_a_retained_graph_inside() -> None:
    model = nn.Linear(4, 3)
    twin = copy.deepcopy(model)

    def step_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(x).tanh().pow(2).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    recorder = SimulatedRecorder()
    eager, recorded = step_of(model), compile_recorded(step_of(twin), recorder)
    for _ in range(5):
        x = torch.randn(2, 4)
        assert torch.equal(eager(x), recorded(x))
        assert torch.equal(model.weight, twin.weight)
    assert (recorder.live, recorder.replays) == (1, 3)
