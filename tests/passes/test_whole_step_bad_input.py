"""Whole steps that go wrong, or whose parts change between calls: eager's error, eager's state after it, and a next step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import EagerFallbackWarning, GraphBreakWarning
from tests.differential import same
from tests.passes.test_whole_step import batch, gradients, network

mse_loss = torch.nn.functional.mse_loss


class Training:
    """A model, its optimizer and a step; ``compiled`` or not."""

    def __init__(self, compiled: bool) -> None:
        self.model = network()
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.hook: Callable[[torch.Tensor], Any] | None = None
        self.take: Any = dovetail.compile(self.step, backend="aten") if compiled else self.step

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        hidden = self.model[0](x)
        if self.hook is not None:
            hidden.register_hook(self.hook)
        loss = mse_loss(self.model[1:](hidden), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def outcome(training: Training, index: int) -> Any:
    """What a step returns or raises, and what it leaves behind: the gradients too that were added before an error."""
    parameters = list(training.model.parameters())
    try:
        result: Any = training.take(*batch(index))
    except Exception as error:
        return (
            (type(error), str(error).split("\n")[0]),
            parameters,
            gradients(parameters),
            training.optimizer.state_dict(),
        )
    return result, parameters, gradients(parameters), training.optimizer.state_dict()


def compare(before: Callable[[Training, int], None], steps: int = 6) -> list[Any]:
    """Do the same to an eager and a compiled training before each step; returns what eager's steps gave."""
    eager, compiled = Training(False), Training(True)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        warnings.simplefilter("ignore", EagerFallbackWarning)
        for index in range(steps):
            before(eager, index)
            before(compiled, index)
            expected = outcome(eager, index)
            same(expected, outcome(compiled, index), f"step {index}")
            found.append(expected[0])
    return found


def fail(*given: Any) -> Any:
    raise ValueError("the hook does not like it")


def halve(gradient: torch.Tensor) -> None:
    gradient.mul_(0.5)


HOOKS: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception] | None]] = {
    "raises": (fail, ValueError),
    "writes to its gradient": (halve, None),
    "returns the wrong shape": (lambda gradient: gradient[:1], RuntimeError),
    "returns another type": (lambda gradient: gradient.double(), RuntimeError),
    "returns no tensor": (lambda gradient: 3, TypeError),
    "returns a new gradient": (lambda gradient: gradient * 2, None),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.sampled(6)
def test_a_hook_in_the_step(name: str) -> None:
    hook, error = HOOKS[name]

    def before(training: Training, index: int) -> None:
        training.hook = hook if index in (2, 4) else None

    found = compare(before)
    assert [isinstance(item, tuple) for item in found] == [index in (2, 4) and error is not None for index in range(6)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("register_hook", "raises"),
        ("register_hook", "writes to its gradient"),
        ("register_hook", "returns the wrong shape"),
        ("register_post_accumulate_grad_hook", "raises"),
        ("register_post_accumulate_grad_hook", "writes to its gradient"),
    ],
)
@pytest.mark.sampled(6)
def test_a_hook_of_a_parameter(kind: str, name: str) -> None:
    hook, _ = HOOKS[name]

    def given(value: torch.Tensor) -> Any:
        if kind == "register_hook":
            return hook(value)
        return hook(value.grad)  # type: ignore[arg-type]

    handles: dict[int, Any] = {}

    def before(training: Training, index: int) -> None:
        if index == 2:
            handles[id(training)] = getattr(training.model[0].weight, kind)(given)
        if index == 4:
            handles[id(training)].remove()

    compare(before)


@pytest.mark.parametrize("name", ["raises", "writes to its gradient", "returns the wrong shape"])
@pytest.mark.sampled(4)
def test_a_hook_of_a_module(name: str) -> None:
    hook, _ = HOOKS[name]
    handles: dict[int, Any] = {}

    def given(module: Any, inputs: Any, outputs: Any) -> Any:
        result = hook(outputs[0])
        return None if result is None else (result,)

    def before(training: Training, index: int) -> None:
        if index == 2:
            handles[id(training)] = training.model[1].register_full_backward_hook(given)
        if index == 4:
            handles[id(training)].remove()

    compare(before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_of_the_optimizer_that_raises(kind: str) -> None:
    handles: dict[int, Any] = {}

    def before(training: Training, index: int) -> None:
        if index == 2:
            handles[id(training)] = getattr(training.optimizer, kind)(fail)
        if index == 4:
            handles[id(training)].remove()

    found = compare(before)
    assert [isinstance(item, tuple) for item in found] == [False, False, True, True, False, False]


def test_the_optimizer_is_swapped() -> None:
    kept: dict[int, Any] = {}

    def before(training: Training, index: int) -> None:
        if index == 2:
            kept[id(training)] = training.optimizer
            training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, momentum=0.9)
        if index == 4:
            training.optimizer = kept[id(training)]

    compare(before)


@pytest.mark.slow
def test_a_new_module_gets_its_parameters_into_the_optimizer() -> None:
    def before(training: Training, index: int) -> None:
        if index in (2, 4):
            torch.manual_seed(index)
            layer = torch.nn.Linear(2, 2)
            training.model.append(layer)
            training.optimizer.add_param_group({"params": layer.parameters(), "lr": 0.1})

    compare(before)


def test_a_parameter_that_is_in_two_groups_is_refused_as_in_eager() -> None:
    def before(training: Training, index: int) -> None:
        if index == 2:
            with pytest.raises(ValueError, match="more than one parameter group"):
                training.optimizer.add_param_group({"params": [training.model[0].weight]})

    compare(before)


def test_parameters_are_frozen() -> None:
    def before(training: Training, index: int) -> None:
        for parameter in training.model.parameters():
            parameter.requires_grad_(index not in (2, 3))
        if index == 1:
            training.model[2].bias.requires_grad_(False)

    found = compare(before)
    assert isinstance(found[2], tuple) and "does not require grad" in found[2][1]


def test_a_layer_is_replaced_without_telling_the_optimizer() -> None:
    def before(training: Training, index: int) -> None:
        if index == 3:
            torch.manual_seed(index)
            training.model[2] = torch.nn.Linear(8, 2)

    compare(before)


def test_the_state_is_thrown_away() -> None:
    def before(training: Training, index: int) -> None:
        if index == 3:
            training.optimizer.state.clear()
        if index == 4:
            del training.optimizer.state[training.model[0].weight]["exp_avg"]

    found = compare(before)
    assert found[4][0] is KeyError
