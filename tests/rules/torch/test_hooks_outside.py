"""Hooks and ``retain_grad()`` in a compiled function that outlive the call: on inputs, on results, or with a write to an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail import errors
from tests.differential import captures, same

pytestmark = pytest.mark.usefixtures("quiet")
Tensor = torch.Tensor


class Model(torch.nn.Module):
    """A model that keeps what its hooks find."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.found: list[Tensor] = []
        self.kept: Any = None
        self.scale = 2.0

    def save(self, gradient: Tensor) -> None:
        """A hook of Grad-CAM."""
        self.found.append(gradient)

    def after(self, parameter: Tensor) -> None:
        """A hook that follows the sum of gradients."""
        self.found.append(parameter.grad.clone())  # type: ignore[union-attr]

    def body(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features, and the result that is computed from them."""
        features = self.first(x).relu()
        return features, self.second(features).sum(1)


def that_saves(model: Model, x: Tensor) -> Any:
    features = model.first(x).relu()
    features.register_hook(model.save)
    return model.second(features).sum(1)


def retained_and_kept(model: Model, x: Tensor) -> Any:
    model.kept = features = model.first(x).relu()
    features.retain_grad()
    return model.second(features).sum(1) * (2 if features.retains_grad else 1)


def retained_and_returned(model: Model, x: Tensor) -> Any:
    features, result = model.body(x)
    features.retain_grad()
    return result, features


def retained_in_vain(model: Model, x: Tensor) -> Any:
    features, result = model.body(x)
    features.retain_grad()
    x.detach().requires_grad_().retain_grad()
    return result


def on_an_input(model: Model, x: Tensor) -> Any:
    x.register_hook(lambda gradient: gradient * model.scale)
    model.scale += 1
    return model.body(x)[1]


def on_an_input_with_its_handle(model: Model, x: Tensor) -> Any:
    model.kept = x.register_hook(model.save)
    return model.body(x)[1]


def several_on_one(model: Model, x: Tensor) -> Any:
    features = model.first(x).relu()
    features.register_hook(lambda gradient: gradient * 3)
    features.register_hook(model.save)
    result = model.second(features)
    result.register_hook(lambda gradient: gradient + 1)
    return result.sum(1), features, result


def removed_again(model: Model, x: Tensor) -> Any:
    features = model.first(x).relu()
    handle = features.register_hook(model.save)
    result = model.second(features).sum(1)
    handle.remove()
    return result, features


def with_a_closure(model: Model, x: Tensor) -> Any:
    features = model.first(x).relu()
    mean = features.detach().mean()
    features.register_hook(lambda gradient: gradient * mean)
    result = model.second(features).sum(1)
    mean = mean + 1
    return result, features


def on_parameters(model: Model, x: Tensor) -> Any:
    model.first.weight.register_hook(lambda gradient: gradient * 2)
    if not model.found:
        model.first.bias.register_post_accumulate_grad_hook(model.after)
    return model.body(x)[1]


def on_a_view(model: Model, x: Tensor) -> Any:
    part = x[1:]
    part.register_hook(model.save)
    part.retain_grad()
    return model.body(part)[1], part


def in_a_loop(model: Model, x: Tensor) -> Any:
    for _ in range(3):
        x = x * 2 + 1
        x.register_hook(model.save)
    return model.body(x)[1]


PROGRAMS = [
    *(that_saves, retained_and_kept, retained_and_returned, retained_in_vain, on_an_input, on_an_input_with_its_handle),
    *(several_on_one, removed_again, with_a_closure, on_parameters, on_a_view, in_a_loop),
]


def _trained(program: Callable[..., Any], compiler: Callable[..., Any], is_leaf: bool) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    model, seen = Model(), []
    step = compiler(program)
    for size in (5, 5, 4):
        x = torch.randn(size, 3, requires_grad=True)
        given = x if is_leaf else x * 1
        results = step(model, given)
        results = results if isinstance(results, tuple) else (results,)
        sum(item.square().sum() for item in results).backward()
        if isinstance(model.kept, torch.utils.hooks.RemovableHandle):
            model.kept.remove()
        tensors = [item for item in (*results, model.kept) if isinstance(item, Tensor)]
        retained = [item.grad for item in tensors if item.retains_grad]
        gradients = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        seen.append((x.grad, [*model.found], retained, gradients, model.scale))
    return seen, step


@pytest.mark.sampled(8)
@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_graph_with_the_gradients_of_eager(program: Callable[..., Any], is_leaf: bool) -> None:
    eager, _ = _trained(program, lambda function: function, is_leaf)
    compiler = dovetail.compile(backend="aten", fullgraph=True)
    found, step = _trained(program, compiler, is_leaf)
    same(eager, found, exact=False)  # a divided gradient is added up in another order
    assert len(step.entries) <= 4


@pytest.mark.parametrize("program", [on_an_input, on_an_input_with_its_handle, on_parameters])
def test_hooks_on_inputs_need_no_fullgraph(program: Callable[..., Any]) -> None:
    eager, _ = _trained(program, lambda function: function, True)
    found, step = _trained(program, dovetail.compile(backend="aten"), True)
    same(eager, found, exact=False)
    assert all(entry.run is not None for entry in step.entries)


@pytest.mark.parametrize("program", [that_saves, several_on_one, retained_and_kept])
def test_results_are_left_to_eager_without_fullgraph(program: Callable[..., Any]) -> None:
    eager, _ = _trained(program, lambda function: function, True)
    found, _ = _trained(program, dovetail.compile(backend="aten"), True)
    same(eager, found, exact=False)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_other_backends(backend: str) -> None:
    eager, _ = _trained(several_on_one, lambda function: function, True)
    found, _ = _trained(several_on_one, dovetail.compile(backend=backend, fullgraph=True), True)
    same(eager, found, exact=False)


@pytest.mark.parametrize("program", [that_saves, retained_and_returned, several_on_one])
def test_a_second_derivative_is_refused(program: Callable[..., Any]) -> None:
    """The hook would miss the gradient that comes by in the second backward."""
    model, x = Model(), torch.randn(5, 3, requires_grad=True)
    result = dovetail.compile(program, backend="aten", fullgraph=True)(model, x)
    loss = result if isinstance(result, Tensor) else result[0]
    with pytest.raises(errors.PartialGradientError, match="create_graph=True"):
        torch.autograd.grad(loss.square().sum(), x, create_graph=True)


def test_a_second_derivative_goes_through_the_hook_of_an_input() -> None:
    def function(x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * 2)
        return x.sin().sum()

    found = []
    for run in (function, dovetail.compile(function, backend="aten", fullgraph=True)):
        x = torch.linspace(0, 1, 4, requires_grad=True)
        (first,) = torch.autograd.grad(run(x), x, create_graph=True)
        found.append((first.detach(), torch.autograd.grad(first.sum(), x)))
    same(found[0], found[1])


def test_a_gradient_inside_for_a_hook_that_stays_is_refused() -> None:
    def stays(x: Tensor) -> Any:
        x.register_hook(lambda gradient: gradient * 2)
        return torch.autograd.grad(x.sin().sum(), x)[0]

    def is_removed(x: Tensor) -> Any:
        handle = x.register_hook(lambda gradient: gradient * 2)
        found = torch.autograd.grad(x.sin().sum(), x)[0]
        handle.remove()
        return found

    def retained(x: Tensor) -> Any:
        y = x.sin()
        y.retain_grad()
        y.sum().backward()
        return y.grad

    x = torch.linspace(0, 1, 4, requires_grad=True)
    for refused in (stays, retained):
        with pytest.raises(errors.GraphBreakError, match="gradient is? ?computed inside|gradient computed inside"):
            dovetail.compile(refused, backend="aten", fullgraph=True)(x)
    assert x.grad is None
    assert not x._backward_hooks
    found = dovetail.compile(is_removed, backend="aten", fullgraph=True)(x)
    same(is_removed(x), found)


def test_a_write_after_the_hook_is_refused() -> None:
    def function(x: Tensor) -> Any:
        y = x.sin()
        y.retain_grad()
        y.mul_(2)
        return y

    with pytest.raises(errors.GraphBreakError):
        dovetail.compile(function, backend="aten", fullgraph=True)(torch.ones(2, requires_grad=True))


def test_handles_that_leave_in_another_order_are_refused() -> None:
    def function(x: Tensor, handles: list[Any]) -> Any:
        x.register_hook(lambda gradient: gradient * 2)
        handles.append(x.register_hook(lambda gradient: gradient + 1))
        return x.sin().sum()

    found = []
    for run in (function, dovetail.compile(function, backend="aten")):
        x = torch.ones(2, requires_grad=True)
        handles: list[Any] = []
        run(x, handles).backward()
        hooks: Any = x._backward_hooks
        found.append((x.grad, len(hooks), handles[0].remove(), len(hooks)))
    same(found[0], found[1])


def test_nothing_is_registered_where_the_function_raises() -> None:
    def function(x: Tensor) -> Any:
        x.register_hook(lambda gradient: gradient * 2)
        raise ValueError("after the hook")

    found = []
    for run in (function, dovetail.compile(function, backend="aten", fullgraph=True)):
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(ValueError, match="after the hook"):
            run(x)
        found.append(len(x._backward_hooks or ()))
    assert found == [1, 1]


def test_one_capture_for_all_calls() -> None:
    compiled = dovetail.compile(retained_and_returned, backend="aten", fullgraph=True)
    model = Model()
    for _ in range(3):
        compiled(model, torch.randn(5, 3, requires_grad=True))
    assert len(compiled.entries) == 1
    assert captures(compiled) == 2  # the first attempt has found that the features leave


def made_and_returned(method: str, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def function(x: Tensor) -> Any:
        leaf = torch.zeros(3, requires_grad=True)
        getattr(leaf, method)(hook)
        return leaf, x * 2

    return function


def made_and_used_behind_a_break(method: str, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def function(x: Tensor) -> Any:
        leaf = torch.zeros(3, requires_grad=True)
        getattr(leaf, method)(hook)
        (leaf * 2).sum().backward()
        first = leaf.grad.clone()
        scale = float(x.sum())
        (leaf * scale).sum().backward()
        return leaf, first

    return function


@pytest.mark.parametrize("program", [made_and_returned, made_and_used_behind_a_break])
@pytest.mark.parametrize(
    ("method", "hook"),
    [
        ("register_hook", lambda gradient: gradient * 7),
        ("register_post_accumulate_grad_hook", lambda leaf: [leaf.grad.mul_(5), None][1]),
    ],
)
def test_the_hook_of_a_leaf_that_is_made_inside_stays_on_it(program: Any, method: str, hook: Any) -> None:
    function = program(method, hook)
    found = []
    for run in (function, dovetail.compile(function, backend="aten")):
        leaf, other = run(torch.ones(3))
        (leaf * 3).sum().backward()
        found.append((leaf.grad, other))
    same(found[0], found[1])


def written_with_a_gradient(x: Tensor, y: Tensor) -> Any:
    x.sub_(y)
    x.retain_grad()
    return x.is_leaf


def written_in_part(x: Tensor, y: Tensor) -> Any:
    x[:2].mul_(y[:2])
    x.register_hook(lambda gradient: gradient * 5)
    x.retain_grad()
    return x.is_leaf


def written_unrecorded(x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        x.sub_(y)
    x.requires_grad_()
    return x.is_leaf


@pytest.mark.parametrize("program", (written_with_a_gradient, written_in_part, written_unrecorded))
def test_an_input_that_was_written_to_is_a_leaf_no_more(program: Callable[..., Any]) -> None:
    seen = []
    for run in (program, dovetail.compile(program, backend="aten")):
        x, y = torch.arange(3.0), torch.full((3,), 2.0, requires_grad=True)
        is_leaf = run(x, y)
        (x * 3).sum().backward()
        seen.append((is_leaf, x.is_leaf, x.retains_grad, x.grad, y.grad))
    same(*seen)


def overwritten(x: Tensor) -> Any:
    tripled = x * 3
    x.clamp_(-1, 1)
    return tripled


def hooked_before_a_break(x: Tensor) -> Any:
    x.register_hook(lambda gradient: gradient * 2)
    torch._dynamo.graph_break()
    x.clamp_(-1, 1)
    return x * 1


def hooked_first(x: Tensor) -> Any:
    x.register_hook(lambda gradient: gradient * 2)
    x.clamp_(-1, 1)
    return x * 1


@pytest.mark.parametrize("program", (overwritten, hooked_before_a_break, hooked_first))
def test_a_write_to_a_view_takes_its_hooks_out_of_the_graph(program: Callable[..., Any]) -> None:
    seen = []
    for run in (program, dovetail.compile(program, backend="aten")):
        for is_hooked in (False, True):
            root = torch.linspace(-1, 1, 4, requires_grad=True)
            x = (root * 2)[:]
            if is_hooked:
                x.register_hook(lambda gradient: gradient * 5)
            (x.sum() + run(x).sum() + x.sum()).backward()
            seen.append(root.grad)
    same(seen[:2], seen[2:])


def retained_and_written(x: Tensor) -> Any:
    x.retain_grad()
    torch._dynamo.graph_break()
    with torch.no_grad():
        x.view(-1)[1] = 3.0
    return x * 2


def written_in_whole(x: Tensor) -> Any:
    with torch.no_grad():
        x.mul_(2)
    return x * 2


@pytest.mark.parametrize("program", (retained_and_written, written_in_whole))
def test_a_view_that_is_written_to_without_gradients_has_the_node_that_eager_makes_anew(
    program: Callable[..., Any],
) -> None:
    seen = []
    for run in (program, dovetail.compile(program, backend="aten")):
        for part in (lambda x: x * 1, lambda x: (x * 1)[:], lambda x: x[:], lambda x: x.unflatten(0, (2, 2))):
            root = torch.linspace(-1, 1, 4).view(4).requires_grad_()
            x = part(root)
            (run(x) ** 2).sum().backward()
            seen.append((root.grad, x.retains_grad, x.grad))
    same(seen[:4], seen[4:])
