"""Full backward hooks of modules: such a module runs eagerly at a graph break, with its hooks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail import errors
from tests.differential import same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor
scale = 2.0


class Several(torch.nn.Module):
    """A module with arguments and results that are no tensors, or need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, a: Tensor, n: int, b: Tensor) -> Any:
        """Three results."""
        return self.inner(a) * n + b, a.sin(), n


class Around(torch.nn.Module):
    """What calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.several = torch.nn.Linear(3, 3), Several()

    def forward(self, x: Tensor) -> Tensor:
        """One result."""
        u, v, _ = self.several(self.first(x), 2, x.detach())
        return (u * v).sum(1)


def _plain() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def _scaled(gradients: Any, by: float) -> Any:
    return tuple(None if item is None else item * by for item in gradients)


def a_number_that_changes() -> Any:
    model: Any = _plain()
    model[1].register_full_backward_hook(lambda module, given, found: _scaled(given, scale))
    return model


def in_front() -> Any:
    model: Any = _plain()
    model[1].register_full_backward_pre_hook(lambda module, found: _scaled(found, 3.0))
    return model


def of_everything() -> Any:
    model: Any = _plain()
    for module in model:
        module.register_full_backward_hook(lambda module, given, found: None)
        module.register_full_backward_pre_hook(lambda module, found: tuple(item + 1 for item in found))
    return model


def clipped() -> Any:
    model: Any = _plain()
    module: Any
    for module in list(model)[1:]:
        module.register_full_backward_hook(lambda module, given, found: tuple(item.clamp(-0.1, 0.1) for item in given))
        module.register_full_backward_hook(lambda module, given, found: (given[0] * found[0].mean(),))
    return model


def of_the_whole() -> Any:
    model: Any = _plain()
    model.register_full_backward_hook(lambda module, given, found: None if given[0] is None else (given[0] * 2,))
    return model


def that_reads_its_module() -> Any:
    model: Any = _plain()
    model[2].register_full_backward_hook(lambda module, given, found: (given[0] * module.weight.detach().norm(),))
    return model


def several_arguments() -> Any:
    model: Any = Around()
    model.several.register_full_backward_hook(lambda module, given, found: _scaled(given, 2.0))
    model.several.register_full_backward_pre_hook(lambda module, found: _scaled(found, 3.0))
    return model


PROGRAMS = [
    *(a_number_that_changes, in_front, of_everything, clipped, of_the_whole, that_reads_its_module, several_arguments)
]


def _trained(make: Callable[[], torch.nn.Module], compiler: Callable[..., Any], needed: bool = True) -> tuple[Any, Any]:
    global scale
    torch.manual_seed(0)
    model = make()
    run, found = compiler(model), []
    for number in range(4):
        scale = 2.0 + number // 2
        x = torch.randn(5, 3, requires_grad=needed)
        run(x).square().sum().backward()
        found.append((x.grad, [parameter.grad.clone() for parameter in model.parameters()]))  # type: ignore[union-attr]
    return found, run


@pytest.mark.parametrize("make", PROGRAMS)
def test_eager_has_them_at_a_graph_break(make: Callable[[], torch.nn.Module]) -> None:
    eager, _ = _trained(make, lambda model: model)
    found, compiled = _trained(make, dovetail.compile(backend="aten"))
    same(eager, found, exact=False)
    assert dovetail.events_of(compiled).count("graph break")


def test_a_hook_that_writes_is_left_to_eager() -> None:
    store: list[Any] = []

    def saves() -> torch.nn.Module:
        model: Any = _plain()
        model[1].register_full_backward_hook(lambda module, given, found: store.append(given[0].clone()))
        return model

    eager, _ = _trained(saves, lambda model: model)
    expected = [*store]
    store.clear()
    found, _ = _trained(saves, dovetail.compile(backend="aten"))
    same((eager, expected), (found, store), exact=False)
    with pytest.raises(errors.GraphBreakError, match="a module has backward hooks"):
        dovetail.compile(saves(), backend="aten", fullgraph=True)(torch.ones(2, 3, requires_grad=True))


def test_a_whole_step_keeps_what_its_hooks_write() -> None:
    found = []
    model: Any = _plain()
    for is_compiled in (False, True):
        own: Any = copy.deepcopy(model)
        store: list[Any] = []
        own[1].register_full_backward_hook(
            lambda module, given, found, store=store: store.append(found[0].detach().clone())
        )
        optimizer = torch.optim.SGD(own.parameters(), 0.1)

        def step(x: Tensor, own: Any = own, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = own(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = dovetail.compile(step, backend="aten") if is_compiled else step
        losses = [run(torch.ones(4, 3) * number) for number in range(3)]
        found.append((losses, store, [*own.parameters()]))
    same(found[0], found[1])


def test_a_second_derivative() -> None:
    found = []
    torch.manual_seed(0)
    model, x = of_the_whole(), torch.randn(5, 3)
    for run in (model, dovetail.compile(model, backend="aten")):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        found.append((first, torch.autograd.grad(first.square().sum(), x)))
    same(found[0], found[1], exact=False)


def test_a_hook_that_is_removed_between_calls() -> None:
    model: Any = _plain()
    found = []
    handle = model[1].register_full_backward_hook(lambda module, given, found: (given[0] * 2,))
    compiled = dovetail.compile(model, backend="aten")
    for run in (compiled, model):
        x = torch.ones(2, 3, requires_grad=True)
        (first,) = torch.autograd.grad(run(x).sum(), x)
        if run is model:
            handle.remove()
        found.append(first)
    same(found[0], found[1])
    x = torch.ones(2, 3, requires_grad=True)
    same(torch.autograd.grad(model(x).sum(), x), torch.autograd.grad(compiled(x).sum(), x))


def test_hooks_for_all_modules() -> None:
    register = torch.nn.modules.module.register_module_full_backward_hook
    handle = register(lambda module, given, found: _scaled(given, 2.0))
    try:
        eager, _ = _trained(_plain, lambda model: model)
        found, _ = _trained(_plain, dovetail.compile(backend="aten"))
    finally:
        handle.remove()
    same(eager, found)
    same(_trained(_plain, lambda model: model)[0], _trained(_plain, dovetail.compile(backend="aten"))[0])


def test_a_hook_for_all_modules_that_is_registered_inside() -> None:
    model: Any = _plain()

    def function(x: Tensor) -> Any:
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, result: result * 2)
        y = model(x)
        handle.remove()
        return y

    x = torch.ones(2, 3)
    with pytest.raises(errors.GraphBreakError, match="a hook for all modules is registered"):
        dovetail.compile(function, backend="aten", fullgraph=True)(x)
    compiled = dovetail.compile(function, backend="aten")
    for _ in range(2):
        same(function(x), compiled(x))
    assert not torch.nn.modules.module._global_forward_hooks


def test_the_warning_of_a_module_whose_inputs_need_no_gradient() -> None:
    model = dovetail.compile(of_the_whole(), backend="aten")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2, 3)).sum().backward()
    assert any("no inputs require gradients" in str(item.message) for item in caught)
