"""What a compiled step does with memory: writes in place, and gradients that it drops before it computes anything."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from tests.differential import same

Step = Callable[[torch.Tensor], Any]


def twins(make: Callable[[torch.nn.Module, torch.optim.Optimizer], Step], backend: Any = "aten", steps: int = 4) -> Any:
    """Run a step eagerly and compiled, and compare all that it leaves behind."""
    sides = []
    for _ in range(2):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        sides.append((model, optimizer, make(model, optimizer)))
    (model, optimizer, eager), (twin, twin_optimizer, step) = sides
    compiled = dovetail.compile(step, backend=backend, fullgraph=True)
    for index in range(steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(index))
        exact = backend != "inductor"
        same(eager(x), compiled(x), f"the result of step {index}", exact)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            same(one, other, "a parameter", exact)
            same(one.grad, other.grad, "a gradient", exact)
        same(optimizer.state_dict(), twin_optimizer.state_dict(), "the state", exact)
    return compiled


def zero_first(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def looks_at_old_gradients(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor) -> Any:
        old = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return [item * 2 for item in old if item is not None]

    return step


def returns_old_gradients(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor) -> Any:
        old = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return old

    return step


def sets_old_gradients_again(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor) -> Any:
        old = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        for parameter, item in zip(model.parameters(), old, strict=True):
            if item is not None:
                parameter.grad = item
        return loss.detach()

    return step


def zero_after_the_forward(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


STEPS = [zero_first, looks_at_old_gradients, returns_old_gradients, sets_old_gradients_again, zero_after_the_forward]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_old_gradients_are_what_they_are_in_eager(make: Any) -> None:
    twins(make)


def test_old_gradients_are_freed_before_the_graph_runs() -> None:
    alive: list[int] = []
    old: list[weakref.ref[torch.Tensor]] = []

    def watching(graph: torch.fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        def run(values: list[Any]) -> list[Any]:
            alive.append(sum(item() is not None for item in old))
            return list(graph(*values))

        return run

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    compiled = dovetail.compile(zero_first(model, optimizer), backend=watching, fullgraph=True)
    for _ in range(4):
        old[:] = [weakref.ref(item.grad) for item in model.parameters() if item.grad is not None]
        compiled(torch.ones(5, 4))
    assert len(old) == 4
    # The second call captures the graph for the state that the first one has made.
    assert alive[2:] == [0, 0]


def test_an_error_after_gradients_were_dropped_leaves_none_as_in_eager() -> None:
    class Trouble(BaseException):
        """No exception after which operators would finish the graph."""

    broken = []

    def breaking(graph: torch.fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        def run(values: list[Any]) -> list[Any]:
            if broken:
                raise Trouble
            return list(graph(*values))

        return run

    model = torch.nn.Linear(4, 2)
    step = dovetail.compile(
        zero_first(model, torch.optim.SGD(model.parameters(), lr=0.1)), backend=breaking, fullgraph=True
    )
    for _ in range(3):
        step(torch.ones(1, 4))
    broken.append(True)
    with pytest.raises(Trouble):
        step(torch.ones(1, 4))
    assert all(parameter.grad is None for parameter in model.parameters())
    broken.clear()
    before = model.weight.detach().clone()
    step(torch.ones(1, 4))
    assert not torch.equal(before, model.weight)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.sampled(2)
def test_inductor_writes_in_place(fused: bool) -> None:
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    compiled = dovetail.compile(zero_first(model, optimizer), backend="inductor", fullgraph=True)
    x = torch.ones(5, 4)
    for _ in range(2):
        compiled(x)
    average = optimizer.state[model.weight]["exp_avg"]
    before = [(item.data_ptr(), item._version) for item in (model.weight, average)]
    compiled(x)
    after = [(item.data_ptr(), item._version) for item in (model.weight, average)]
    for (address, version), (new_address, new_version) in zip(before, after, strict=True):
        assert address == new_address
        assert new_version > version


def test_what_autograd_has_saved_is_refused_after_a_write_by_inductor() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = dovetail.compile(zero_first(model, optimizer), backend="inductor", fullgraph=True)
    x = torch.ones(5, 4, requires_grad=True)
    saved = model(x).sum()
    compiled(x.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_new_values_that_depend_on_each_other_are_written_by_inductor() -> None:
    def swap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        old = x.clone()
        x.copy_(y)
        y.copy_(old)
        y.add_(x)
        return x + y

    compiled = dovetail.compile(swap, backend="inductor", fullgraph=True)
    for _ in range(2):
        one, two = torch.arange(6.0), torch.ones(6)
        other, another = one.clone(), two.clone()
        same(swap(one, two), compiled(other, another), "the result", False)
        same([one, two], [other, another], "what was written to", False)


@pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")
def test_memory_that_is_shared_later_is_found() -> None:
    def move(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    compiled = dovetail.compile(move, backend="inductor")
    for share in (False, True, False):
        one = torch.arange(6.0)
        two = one[:] if share else torch.ones(6)
        other = one.clone()
        another = other[:] if share else torch.ones(6)
        same(move(one, two), compiled(other, another), "the result", False)
        same(one, other, "what was written to", False)


@pytest.mark.slow
def test_fused_optimizers_follow_strides_under_inductor() -> None:
    """Inductor lays out gradients of convolutions as it likes, and torch's fused kernels do not look at strides."""
    sides = []
    for _ in range(2):
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.Tanh(), torch.nn.Conv2d(8, 4, 3, bias=False)
        )
        groups = [{"params": [item], "lr": 0.01 * place} for place, item in enumerate(model.parameters(), 1)]
        optimizer = torch.optim.AdamW(groups, fused=True, amsgrad=True)
        sides.append((model, zero_first(model, optimizer)))
    (model, eager), (twin, step) = sides
    compiled = dovetail.compile(step, backend="inductor", fullgraph=True)
    for index in range(3):
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(index))
        same(eager(x), compiled(x), f"the loss of step {index}", False)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-4)
