"""The whole training step, forward, backward, optimizer and ``zero_grad``, in one compiled function, against eager."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Step = Callable[..., Any]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
MakeStep = Callable[[torch.nn.Module, torch.optim.Optimizer], Step]


def network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def batch(seed: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)


def plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def zeroing_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def train(
    make_optimizer: MakeOptimizer,
    make_step: MakeStep = zeroing_step,
    steps: int = 20,
    between: Callable[[int, torch.nn.Module, torch.optim.Optimizer], None] = lambda index, model, optimizer: None,
    fullgraph: bool = True,
    backend: str = "aten",
) -> Any:
    """Train twins, one eagerly and one compiled, and compare all that a step leaves behind after each step."""
    models = network(), network()
    optimizers = [make_optimizer(model.parameters()) for model in models]
    eager = make_step(models[0], optimizers[0])
    compiled = dovetail.compile(make_step(models[1], optimizers[1]), backend=backend, fullgraph=fullgraph)
    exact = backend == "aten"
    for index in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            between(index, model, optimizer)
        torch.manual_seed(index)
        expected = eager(*batch(index))
        torch.manual_seed(index)
        same(expected, compiled(*batch(index)), f"the result of step {index}", exact)
        for name, twin in zip(("parameters", "grad"), (list, gradients), strict=True):
            same(twin(models[0].parameters()), twin(models[1].parameters()), f"{name} after step {index}", exact)
        same(optimizers[0].state_dict(), optimizers[1].state_dict(), f"the state after step {index}", exact)
    return compiled


def gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in parameters]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd-nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "sgd-maximize": lambda parameters: torch.optim.SGD(parameters, lr=0.001, maximize=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adam-amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adam-foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "adam-fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "adam-tensor-lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)),
    "adam-tensor-betas": lambda parameters: torch.optim.Adam(
        parameters, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True, amsgrad=True),
    "adamax": lambda parameters: torch.optim.Adamax(parameters),
    "adamax-foreach": lambda parameters: torch.optim.Adamax(parameters, foreach=True),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "adadelta-foreach": lambda parameters: torch.optim.Adadelta(parameters, foreach=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "adafactor-foreach": lambda parameters: torch.optim.Adafactor(parameters, foreach=True, weight_decay=0.1),
    "adafactor-tensor-lr": lambda parameters: torch.optim.Adafactor(parameters, lr=torch.tensor(0.3)),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, t0=3, weight_decay=0.1),
    "asgd-foreach": lambda parameters: torch.optim.ASGD(parameters, t0=3, foreach=True),
    "radam": lambda parameters: torch.optim.RAdam(parameters, weight_decay=0.1),
    "radam-foreach": lambda parameters: torch.optim.RAdam(parameters, foreach=True, decoupled_weight_decay=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
    "adagrad-decay": lambda parameters: torch.optim.Adagrad(parameters, lr_decay=0.1, weight_decay=0.1),
    "adagrad-foreach": lambda parameters: torch.optim.Adagrad(parameters, foreach=True),
    "sgd-fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adagrad-fused": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, weight_decay=0.1),
    "nadam-foreach": lambda parameters: torch.optim.NAdam(parameters, foreach=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters),
    "rmsprop-centred": lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.9),
    "rmsprop-foreach": lambda parameters: torch.optim.RMSprop(parameters, foreach=True, momentum=0.9),
    "rprop": lambda parameters: torch.optim.Rprop(parameters),
    "rprop-foreach": lambda parameters: torch.optim.Rprop(parameters, foreach=True),
    "sgd-foreach-nesterov": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "sgd-dampening": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "adam-foreach-amsgrad": lambda parameters: torch.optim.Adam(
        parameters, foreach=True, amsgrad=True, maximize=True, weight_decay=0.1
    ),
    "adam-decoupled": lambda parameters: torch.optim.Adam(parameters, weight_decay=0.1, decoupled_weight_decay=True),
    "nadam-decoupled": lambda parameters: torch.optim.NAdam(
        parameters, weight_decay=0.1, decoupled_weight_decay=True, foreach=True, maximize=True
    ),
    "adamax-decay": lambda parameters: torch.optim.Adamax(parameters, weight_decay=0.1, maximize=True, foreach=True),
    "adadelta-decay": lambda parameters: torch.optim.Adadelta(parameters, weight_decay=0.1, maximize=True),
    "rmsprop-foreach-centred": lambda parameters: torch.optim.RMSprop(
        parameters, foreach=True, centered=True, weight_decay=0.1, maximize=True
    ),
    "rprop-maximize": lambda parameters: torch.optim.Rprop(parameters, maximize=True, foreach=True),
    "adafactor-maximize": lambda parameters: torch.optim.Adafactor(parameters, maximize=True, weight_decay=0.1),
    "muon": lambda parameters: torch.optim.Muon([item for item in parameters if item.dim() == 2]),
    "groups": lambda parameters: torch.optim.AdamW(
        [{"params": [item], "lr": 0.01 * (index + 1)} for index, item in enumerate(parameters)]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(18)
def test_twenty_steps_leave_what_eager_leaves(name: str) -> None:
    train(OPTIMIZERS[name])


@pytest.mark.parametrize("name", ["sgd-momentum", "adam"])
def test_gradients_are_kept_and_accumulate_without_zero_grad(name: str) -> None:
    train(OPTIMIZERS[name], plain_step, steps=4)


def clipping_step(norm: bool) -> MakeStep:
    def make(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad(set_to_none=norm)
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            total = None
            if norm:
                total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            else:
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            return loss, total

        return step

    return make


@pytest.mark.sampled(2)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("name", ["sgd-momentum", "adam"])
def test_gradients_are_clipped(name: str, norm: bool) -> None:
    train(OPTIMIZERS[name], clipping_step(norm), steps=6)


def accumulating_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for some_x, some_y in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = torch.nn.functional.mse_loss(model(some_x), some_y) / 4
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def test_gradients_are_accumulated_over_micro_batches() -> None:
    train(OPTIMIZERS["adamw"], accumulating_step, steps=6)


def autocast_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_forward_runs_under_autocast(name: str) -> None:
    train(OPTIMIZERS[name], autocast_step, steps=6)


def closure_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return step


def test_a_closure_computes_the_loss() -> None:
    train(OPTIMIZERS["adam"], closure_step, steps=4)


@pytest.mark.parametrize("name", ["sgd-momentum", "adam", "adamw-foreach"])
def test_a_changed_learning_rate_does_not_recompile(name: str) -> None:
    def schedule(index: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (index + 1)

    compiled = train(OPTIMIZERS[name], steps=12, between=schedule)
    # The first step makes the state; the rate changes at the second.
    assert len(compiled.entries) <= 3


def test_a_scheduler_outside_of_the_step() -> None:
    schedulers: dict[int, Any] = {}

    def schedule(index: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in schedulers:
            schedulers[id(optimizer)] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        else:
            schedulers[id(optimizer)].step()

    compiled = train(OPTIMIZERS["adam"], steps=12, between=schedule)
    assert len(compiled.entries) <= 3


def averaging_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    average = [parameter.detach().clone() for parameter in model.parameters()]

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, parameter in zip(average, model.parameters(), strict=True):
                kept.lerp_(parameter, 0.1)
        return [kept.clone() for kept in average]

    return step


def test_weights_are_averaged() -> None:
    train(OPTIMIZERS["sgd"], averaging_step, steps=4)


def test_the_loss_behaves_as_that_of_eager_afterwards() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = dovetail.compile(zeroing_step(model, optimizer), backend="aten", fullgraph=True)
    loss = compiled(*batch(0))
    assert loss.requires_grad
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("name", ["sgd-momentum", "adam"])
def test_the_state_is_loaded_between_steps(name: str) -> None:
    saved: dict[int, Any] = {}

    def reload(index: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if index == 2:
            saved[id(optimizer)] = copy.deepcopy(optimizer.state_dict())
        if index in (4, 6):
            optimizer.load_state_dict(copy.deepcopy(saved[id(optimizer)]))

    train(OPTIMIZERS[name], steps=8, between=reload)


def test_a_parameter_is_frozen_and_thawed() -> None:
    def freeze(index: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        next(model.parameters()).requires_grad_(not 2 <= index < 4)

    train(OPTIMIZERS["adam"], steps=7, between=freeze)


def test_a_parameter_is_added_between_steps() -> None:
    def make(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(parameters)[:2], lr=0.01)

    def add(index: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if index == 3:
            optimizer.add_param_group({"params": list(model.parameters())[2:], "lr": 0.1})

    train(make, steps=6, between=add)


def test_weights_are_replaced_between_steps() -> None:
    def replace(index: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if index == 3:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data = torch.ones_like(parameter)

    train(OPTIMIZERS["adam"], steps=6, between=replace)


@pytest.mark.slow
def test_the_optimizer_is_swapped_between_steps() -> None:
    class Holder:
        optimizer: torch.optim.Optimizer

    results = []
    for compiled in (False, True):
        model, holder = network(), Holder()

        def step(x: torch.Tensor, y: torch.Tensor, model: Any = model, holder: Holder = holder) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            holder.optimizer.step()
            holder.optimizer.zero_grad()
            return loss

        call = dovetail.compile(step, backend="aten", fullgraph=True) if compiled else step
        first, second = (torch.optim.Adam(model.parameters(), lr=rate) for rate in (0.01, 0.02))
        third = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        found = []
        for index, optimizer in enumerate([first, first, second, second, first, third, third, second]):
            holder.optimizer = optimizer
            found.append(call(*batch(index)).detach())
        states = [optimizer.state_dict() for optimizer in (first, second, third)]
        results.append((found, list(model.parameters()), states))
    same(results[0], results[1])


def test_a_hook_of_the_optimizer_runs() -> None:
    def make(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)

        optimizer.register_step_pre_hook(before)
        return optimizer

    train(make, steps=4)


def test_sizes_of_batches_change() -> None:
    model, twin = network(), network()
    optimizer, other = (torch.optim.Adam(item.parameters(), lr=0.01) for item in (model, twin))
    eager = zeroing_step(model, optimizer)
    compiled = dovetail.compile(zeroing_step(twin, other), backend="aten", fullgraph=True)
    for index, size in enumerate([16, 16, 8, 12, 1, 5, 16]):
        same(eager(*batch(index, size)), compiled(*batch(index, size)))
        same(list(model.parameters()), list(twin.parameters()))
        same(optimizer.state_dict(), other.state_dict())


def test_an_error_in_the_step_leaves_everything_as_eager_does() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    compiled = dovetail.compile(zeroing_step(model, optimizer), backend="aten")
    compiled(*batch(0))
    with pytest.raises(RuntimeError, match="shapes"):
        compiled(torch.randn(3, 5), torch.randn(3, 2))
    twin = network()
    other = torch.optim.Adam(twin.parameters(), lr=0.01)
    eager = zeroing_step(twin, other)
    eager(*batch(0))
    with pytest.raises(RuntimeError, match="shapes"):
        eager(torch.randn(3, 5), torch.randn(3, 2))
    same(eager(*batch(1)), compiled(*batch(1)))
    same(list(twin.parameters()), list(model.parameters()))
    same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    "name", ["adam-fused", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adam", "adamw", "sgd-momentum"))]
)
def test_the_step_is_compiled_by_inductor(name: str) -> None:
    compiled = train(OPTIMIZERS[name], steps=6, backend="inductor")
    assert len(compiled.entries) == 2


def test_a_power_that_is_complex_is_no_number_of_the_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (x.sum().item() ** 0.5).real

    compiled = dovetail.compile(function, backend="aten")
    for start in (1.0, 2.0, -1.0, 3.0):
        x = torch.full((3,), start)
        same(function(x), compiled(x))


def test_python_computes_numbers_read_from_a_tensor() -> None:
    def function(x: torch.Tensor) -> list[Any]:
        number = x.sum().item()
        scaled = number * 3.0 / 7 - 0.1
        kept = max(scaled, 0.5)
        return [
            x * scaled,
            x + math.sqrt(kept),
            x * abs(-scaled),
            scaled,
            scaled > 1.0,
            x * (scaled > 1.0),
            x / (kept * 2),
        ]

    compiled = dovetail.compile(function, backend="aten")
    for start in (0.1, 0.7, -1.0, float("inf"), float("nan")):
        x = torch.full((3,), start)
        same(function(x), compiled(x))
