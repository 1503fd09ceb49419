"""``backward()``, ``torch.autograd.grad`` and ``.grad`` inside of a compiled function, against eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import EagerFallbackWarning, GraphBreakError
from tests.differential import same

Function = Callable[..., Any]


def network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def gradients(module: torch.nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def both(
    make: Callable[[torch.nn.Module], Function],
    prepare: Callable[[torch.nn.Module], None] = lambda module: None,
    calls: int = 3,
    backend: str = "aten",
    exact: bool = True,
) -> Function:
    """Call a function of a module a few times, eagerly and compiled, and compare results and ``.grad`` after each call."""
    module, twin = network(), network()
    function, compiled = make(module), dovetail.compile(make(twin), backend=backend, fullgraph=True)
    for step in range(calls):
        prepare(module)
        prepare(twin)
        before = gradients(twin)
        x, y = leaf(5, 3, seed=step), leaf(5, 3, seed=step)
        objects = gradients(module)
        same(function(x), compiled(y), exact=exact)
        same([x.grad, gradients(module)], [y.grad, gradients(twin)], ".grad", exact)
        # Accumulated into in place, or a new tensor: the same as in eager.
        kept = [one is not None and one is other for one, other in zip(objects, gradients(module), strict=True)]
        assert kept == [one is not None and one is other for one, other in zip(before, gradients(twin), strict=True)]
    return compiled


@pytest.mark.parametrize("backend", ["aten", "eager"])
def test_backward_sets_and_then_accumulates(backend: str) -> None:
    def make(module: torch.nn.Module) -> Function:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = module(x).pow(2).mean()
            loss.backward()
            return loss.detach()

        return step

    compiled = both(make, backend=backend)
    # No gradients at first, then there are some.
    assert len(compiled.entries) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["aten", "eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_set_to_none_before_each_step(backend: str) -> None:
    def make(module: torch.nn.Module) -> Function:
        def step(x: torch.Tensor) -> torch.Tensor:
            for parameter in module.parameters():
                parameter.grad = None
            loss = module(x).pow(2).mean()
            loss.backward()
            return loss

        return step

    both(make, backend=backend, exact=backend != "inductor")


def test_zero_grad_of_the_module() -> None:
    def make(module: torch.nn.Module) -> Function:
        def step(x: torch.Tensor) -> torch.Tensor:
            module.zero_grad()
            loss = module(x).pow(2).mean()
            loss.backward()
            return loss.detach()

        return step

    both(make)


def test_gradients_that_are_read_and_written() -> None:
    def make(module: torch.nn.Module) -> Function:
        def step(x: torch.Tensor) -> Any:
            module.zero_grad()
            torch.autograd.backward([module(x).pow(2).mean()])
            total = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()
            for p in module.parameters():
                assert p.grad is not None
                p.grad.mul_(1 / (total + 1))
            first = next(module.parameters())
            first.grad = first.grad * 2
            return total, first.grad

        return step

    both(make)


def test_gradients_are_added_twice_in_one_call() -> None:
    def make(module: torch.nn.Module) -> Function:
        def step(x: torch.Tensor) -> torch.Tensor:
            module(x).sum().backward()
            module(x * 2).pow(2).sum().backward()
            return x.detach()

        return step

    both(make)


def test_a_step_of_gradient_descent() -> None:
    def make(module: torch.nn.Module) -> Function:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = module(x).pow(2).mean()
            loss.backward()
            with torch.no_grad():
                for p in module.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
            return loss.detach()

        return step

    both(make)


@pytest.mark.parametrize("backend", ["aten", "eager"])
def test_create_graph_and_a_loss_on_the_gradient(backend: str) -> None:
    def make(module: torch.nn.Module) -> Function:
        def step(x: torch.Tensor) -> torch.Tensor:
            (forces,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
            loss = (forces - 0.1).pow(2).sum()
            loss.backward()
            return forces.detach()

        return step

    both(make, backend=backend)


def test_backward_with_create_graph_leaves_a_differentiable_gradient() -> None:
    def style(f: Function) -> Any:
        x = leaf(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            f(x)
        first = x.grad
        x.grad = None
        assert first is not None and first.requires_grad
        return [first.detach(), *torch.autograd.grad(first.pow(2).sum(), x)]

    def function(x: torch.Tensor) -> None:
        (x.sin() * x).sum().backward(create_graph=True)

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    torch.testing.assert_close(style(compiled), style(function), rtol=1e-12, atol=1e-12)


def test_only_for_some_inputs() -> None:
    def make(module: torch.nn.Module) -> Function:
        def step(x: torch.Tensor) -> None:
            module(x).sum().backward(inputs=[module[0].weight, x])  # type: ignore[index]

        return step

    both(make)


def test_gradient_argument_and_retained_graph() -> None:
    def make(module: torch.nn.Module) -> Function:
        def step(x: torch.Tensor) -> torch.Tensor:
            result = module(x)
            result.backward(torch.ones_like(result), retain_graph=True)
            result.backward(gradient=result.detach(), retain_graph=True)
            return result

        return step

    both(make)


def test_a_result_whose_graph_was_freed() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x.sin()
        (g,) = torch.autograd.grad(y.pow(2).sum(), x)
        return y, g, x.cos()

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for f in (function, compiled):
        x = leaf(3)
        y, g, z = f(x)
        assert y.requires_grad and not y.is_leaf and not g.requires_grad
        with pytest.raises(RuntimeError, match="a second time"):
            y.sum().backward()
        z.sum().backward()
        assert torch.equal(x.grad, -x.sin())


def test_a_graph_that_was_freed_is_used_again() -> None:
    def function(x: torch.Tensor) -> None:
        loss = x.sin().pow(2).sum()
        loss.backward()
        loss.backward()

    compiled = dovetail.compile(function, backend="aten")
    with pytest.raises(RuntimeError, match="a second time"):
        function(leaf(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerFallbackWarning)
        with pytest.raises(RuntimeError, match="a second time"):
            compiled(leaf(3))


def twice_through_what_saves_nothing(x: torch.Tensor) -> Any:
    shifted = x + 1
    shifted.sum().backward()
    shifted.sum().backward()
    return shifted


def beside_what_was_freed(x: torch.Tensor) -> Any:
    grown, shifted = x.exp(), x - 1
    (grown.sum() + shifted.sum()).backward()
    return shifted.reshape(-1) + 2


def by_stages(x: torch.Tensor) -> Any:
    middle = x.exp()
    end = middle.sin()
    (first,) = torch.autograd.grad(end.sum(), middle)
    (second,) = torch.autograd.grad(middle, x, first)
    return first, second


def up_to_a_middle_that_is_returned(x: torch.Tensor) -> Any:
    middle = x.exp()
    (slope,) = torch.autograd.grad(middle.sin().sum(), middle)
    return middle, slope


def for_some_inputs_only(x: torch.Tensor) -> Any:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (x.exp() * weight).sin().sum().backward(inputs=[weight])
    return x.cos(), weight.grad


@pytest.mark.parametrize(
    "function",
    [
        twice_through_what_saves_nothing,
        beside_what_was_freed,
        by_stages,
        up_to_a_middle_that_is_returned,
        for_some_inputs_only,
    ],
)
def test_a_backward_frees_only_what_it_visits_and_what_was_saved(function: Function) -> None:
    found = []
    for f in (function, dovetail.compile(function, backend="aten", fullgraph=True)):
        x = leaf(3)
        for _ in range(2):
            results = f(x)
            roots = [item for item in torch.utils._pytree.tree_leaves(results) if item.requires_grad]
            for _ in range(1 if function is up_to_a_middle_that_is_returned or len(roots) == 0 else 2):
                for root in roots:
                    root.sum().backward(retain_graph=function is for_some_inputs_only)
        found.append((results, x.grad))
    same(found[0], found[1])


def freed_behind(x: torch.Tensor) -> Any:
    end = x.exp().sin()
    torch.autograd.grad(end.sum(), x)
    return end + 1


def freed_up_to_the_middle(x: torch.Tensor) -> Any:
    middle = x.exp()
    end = middle.sin()
    torch.autograd.grad(end.sum(), middle)
    return end.reshape(-1)


@pytest.mark.parametrize("function", [freed_behind, freed_up_to_the_middle])
def test_what_was_freed_behind_a_result_is_missed_by_its_backward(function: Function) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerFallbackWarning)
        for f in (function, dovetail.compile(function, backend="aten")):
            with pytest.raises(RuntimeError, match="a second time"):
                f(leaf(3)).sum().backward()


def test_backward_behind_a_non_leaf_runs_in_eager() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        loss = x.sin().sum()
        loss.backward()
        return loss.detach() + 1

    compiled = dovetail.compile(function, backend="aten")
    found = []
    for f in (function, compiled):
        x = leaf(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerFallbackWarning)
            found.append((f(x * 2), x.grad))
    same(*found)
    with pytest.raises(GraphBreakError, match="no leaf"):
        dovetail.compile(function, backend="aten", fullgraph=True)(leaf(3) * 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_on_parameters(how: str, late: bool) -> None:
    def make(module: torch.nn.Module) -> Function:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = module(x).pow(2).mean()
            loss.backward()
            return loss.detach()

        return step

    found = []
    for compiled in (False, True):
        module, seen = network(), []
        weight = module[0].weight
        step = dovetail.compile(make(module), backend="aten") if compiled else make(module)
        if late:
            step(leaf(5, 3))
            module.zero_grad()
        hook: Any = (
            (lambda g: seen.append(g.sum()) or g * 2) if how == "register_hook" else (lambda p: seen.append(p.grad))
        )  # noqa: B023
        getattr(weight, how)(hook)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerFallbackWarning)
            result = step(leaf(5, 3))
        found.append([result, copy.copy(seen), gradients(module)])
    same(*found)
    assert found[0][1]


def test_hook_on_an_input_of_autograd_grad() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x.sin().sum(), x)[0]

    found = []
    for f in (function, dovetail.compile(function, backend="aten")):
        x = leaf(3)
        x.register_hook(lambda g: g * 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerFallbackWarning)
            found.append(f(x))
    same(*found)


def test_hooks_registered_inside() -> None:
    def make(module: torch.nn.Module) -> Function:
        def step(x: torch.Tensor) -> None:
            hidden = module[0](x)  # type: ignore[index]
            hidden.register_hook(lambda g: g * 2)
            module[2](hidden.tanh()).sum().backward()  # type: ignore[index]

        return step

    both(make)


def test_a_leaf_that_is_made_inside() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x.detach().clone().requires_grad_()
        y.pow(3).sum().backward()
        return y.grad

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    same(function(leaf(3)), compiled(leaf(3)))


def test_a_leaf_with_a_gradient_that_leaves_the_function() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x.detach().clone().requires_grad_()
        y.pow(3).sum().backward()
        return y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerFallbackWarning)
        compiled = dovetail.compile(function, backend="aten")
        assert torch.equal(compiled(leaf(3)).grad, function(leaf(3)).grad)


def test_gradient_of_an_input_is_kept_by_the_caller() -> None:
    """The tensor in ``.grad`` is the same object as the one that the function returns."""

    def function(x: torch.Tensor) -> Any:
        x.sin().sum().backward()
        return x.grad

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for f in (function, compiled):
        x = leaf(3)
        first = f(x)
        assert first is x.grad
        assert f(x) is first
        assert torch.equal(x.grad, 2 * x.cos())


def test_gradient_of_another_size() -> None:
    """A parameter that was resized after its gradient was set: the old one can be dropped, as in eager."""

    def step(weight: torch.Tensor) -> Any:
        try:
            weight.grad = None
        except RuntimeError as error:
            return error
        (weight * 3).sum().backward()
        return weight.grad

    results = []
    for function in (step, dovetail.compile(step, backend="aten")):
        weight = torch.ones(4, requires_grad=True)
        weight.sum().backward()
        with torch.no_grad():
            weight.set_(weight[1:])
        with warnings.catch_warnings():
            # torch says that this is going to be an error once.
            warnings.simplefilter("ignore")
            results.append(function(weight))
    same(*results)
