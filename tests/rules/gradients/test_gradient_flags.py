"""``requires_grad`` of inputs, set inside of the function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import ArtefactError, GraphBreakError
from tests.differential import same

Tensor = torch.Tensor


def energy(x: Tensor, w: Tensor) -> Tensor:
    x.requires_grad_()
    return (x * w).sin().sum()


def energy_and_forces(x: Tensor, w: Tensor) -> Any:
    x.requires_grad = True
    result = (x * w).sin().sum()
    (forces,) = torch.autograd.grad(result, x, create_graph=True)
    return result, forces


def backward_inside(x: Tensor, w: Tensor) -> Any:
    x.requires_grad_(True)
    result = (x * w).sin().sum()
    result.backward()
    return result, x.grad


def on_and_off(x: Tensor, w: Tensor) -> Any:
    x.requires_grad_()
    result = (x * 2).sum()
    x.requires_grad_(False)
    return result, x * 3


def frozen_for_a_while(x: Tensor, w: Tensor) -> Any:
    w.requires_grad_(False)
    first = (x * w).sum()
    w.requires_grad_(True)
    return first, (x * w).sum()


def frozen_from_here_on(x: Tensor, w: Tensor) -> Any:
    result = (x * w).sum()
    w.requires_grad = False
    return result, x * w


def what_it_says(x: Tensor, w: Tensor) -> Any:
    before = x.requires_grad
    x.requires_grad_()
    return before, x.requires_grad, x.is_leaf, x


def without_gradients(x: Tensor, w: Tensor) -> Any:
    with torch.no_grad():
        x.requires_grad_()
        y = x * 2
    return y, x * w


PROGRAMS: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    energy,
    energy_and_forces,
    backward_inside,
    on_and_off,
    frozen_for_a_while,
    frozen_from_here_on,
    what_it_says,
    without_gradients,
)


def _outcome(function: Callable[..., Any], needs_gradient: bool) -> Any:
    found = []
    weight = torch.nn.Parameter(torch.tensor([0.3, -0.4]))
    for call in range(3):
        x = torch.full((2,), call + 1.0, requires_grad=needs_gradient)
        result = function(x, weight)
        results = result if isinstance(result, tuple) else (result,)
        flags = x.requires_grad, weight.requires_grad, [item is x for item in results]
        values = [item.detach().clone() if isinstance(item, Tensor) else item for item in results]
        kinds = [(item.requires_grad, item.is_leaf) for item in results if isinstance(item, Tensor)]
        roots = [item for item in results if isinstance(item, Tensor) and item.requires_grad]
        weight.requires_grad_()
        refused = 0
        for root in roots:
            try:
                root.sum().backward(retain_graph=True)
            except RuntimeError:
                refused += 1
        found.append((flags, values, kinds, refused, x.grad, None if weight.grad is None else weight.grad.clone()))
    return found


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda item: item.__name__)
def test_as_in_eager_and_in_one_graph(function: Callable[..., Any], needs_gradient: bool) -> None:
    """It was left to eager, all of the function."""
    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    same(_outcome(function, needs_gradient), _outcome(compiled, needs_gradient))
    assert all(entry.run is not None for entry in compiled.entries)


def test_sizes_may_be_read_before_and_may_change() -> None:
    def mean(x: Tensor, w: Tensor) -> Any:
        count = x.shape[0]
        x.requires_grad_()
        result = (x * w).sin().sum() / count
        return torch.autograd.grad(result, x, create_graph=True)[0]

    compiled = dovetail.compile(mean, backend="aten", fullgraph=True)
    weight = torch.tensor(0.3)
    for count in (3, 4, 5, 6):
        same(mean(torch.ones(count), weight), compiled(torch.ones(count), weight))
    assert len(compiled.entries) == 2


def test_an_input_that_was_used_before_is_refused() -> None:
    def late(x: Tensor) -> Any:
        y = x * 2
        x.requires_grad_()
        return y * x

    with pytest.raises(GraphBreakError, match="has been used already"):
        dovetail.compile(late, backend="aten", fullgraph=True)(torch.ones(2))
    x = torch.ones(2)
    broken = dovetail.compile(late, backend="aten")
    with pytest.warns(dovetail.errors.GraphBreakWarning, match="has been used already"):
        result = broken(x)
    result.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]


def test_no_artefact_holds_it(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="sets requires_grad"):
        dovetail.aot.export_joint(None, dovetail.capture(energy, (torch.ones(2), torch.ones(2))), tmp_path / "energy")


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("again", [True, False], ids=["on again", "stays off"])
def test_a_part_that_is_frozen_for_a_backward_inside(backend: str, again: bool) -> None:
    def made() -> tuple[torch.nn.Module, torch.nn.Module]:
        torch.manual_seed(1)
        return torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)

    def step(generator: Any, critic: Any, z: Tensor) -> Any:
        critic.requires_grad_(False)
        loss = critic(generator(z)).sum()
        loss.backward()
        before = [parameter.grad is None for parameter in critic.parameters()]
        critic.requires_grad_(again)
        if again:
            critic(generator(z).detach()).mean().backward()
        return loss.detach(), before

    expected, actual = made(), made()
    compiled = dovetail.compile(step, backend=backend)
    for _ in range(3):
        z = torch.randn(2, 3)
        same(step(*expected, z), compiled(*actual, z))
        for left, right in zip(expected, actual, strict=True):
            left_parameters, right_parameters = [*left.parameters()], [*right.parameters()]
            assert [item.requires_grad for item in left_parameters] == [item.requires_grad for item in right_parameters]
            same([item.grad for item in left_parameters], [item.grad for item in right_parameters])


def view_before_a_write(x: Tensor) -> Tensor:
    view = x.t().t()
    with torch.no_grad():
        x.mul_(2)
    return view


def value_after_a_write(x: Tensor) -> Tensor:
    x.detach().mul_(2)
    return x * 3


@pytest.mark.parametrize("program", [view_before_a_write, value_after_a_write])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_leaf_that_is_a_view_is_written_to(program: Callable[[Tensor], Tensor], first: bool) -> None:
    seen = []
    for run in (program, dovetail.compile(program, backend="aten")):
        for is_view in (first, not first, first):
            memory = torch.arange(12.0).reshape(4, 3)
            x = (memory[1:3] if is_view else memory[1:3].clone()).requires_grad_()
            run(x).sum().backward()
            seen.append((x.detach(), x.grad))
    same(seen[:3], seen[3:])


@pytest.mark.filterwarnings("ignore")
def test_a_view_of_a_leaf_is_turned_around_in_place() -> None:
    def program(x: Tensor, y: Tensor) -> None:
        x.mul_(2)
        y.t_()

    seen = []
    for run in (program, dovetail.compile(program, backend="aten")):
        x, leaf = torch.ones(2), torch.ones(3, 2, requires_grad=True)
        run(x, leaf * 1)
        with pytest.raises(RuntimeError, match="view of a leaf"):
            run(x, leaf.t())
        seen.append(x)
    same(*seen)


def _turned_on(view: Tensor, base: Tensor) -> Any:
    base.requires_grad_()
    return view.requires_grad, view * 2


def _turned_off(view: Tensor, base: Tensor) -> Any:
    base.requires_grad_(False)
    return view.requires_grad, view * 2


@pytest.mark.parametrize("function", [_turned_on, _turned_off])
@pytest.mark.filterwarnings("ignore")
def test_a_view_of_an_input_whose_flag_changes(function: Any) -> None:
    def calls(run: Any) -> list[Any]:
        found = []
        for is_view in (False, True, False, True):
            base = torch.ones(2, 3, requires_grad=function is _turned_off)
            with torch.no_grad():
                view = base[:] if is_view else torch.ones(2, 3)
            flag, result = run(view, base)
            found.append((flag, result.requires_grad, view.requires_grad, base.requires_grad))
        return found

    assert calls(dovetail.compile(function, backend="aten")) == calls(function)


def _apart(base: Tensor) -> Tensor:
    return torch.ones(2, 3)


def _shares(base: Tensor) -> Tensor:
    return base.detach()


def _is_view(base: Tensor) -> Tensor:
    return base.view(2, 3)


def _is_view_of_what_shares(base: Tensor) -> Tensor:
    return base.detach()[:]


@pytest.mark.parametrize("function", [_turned_on, _turned_off])
@pytest.mark.parametrize("first", [_apart, _shares, _is_view, _is_view_of_what_shares])
@pytest.mark.parametrize("base_is_view", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_inputs_that_share_memory_with_one_whose_flag_changes(function: Any, first: Any, base_is_view: bool) -> None:
    """What was captured for memory that is shared in one way, is not used for a view."""

    def calls(run: Any) -> list[Any]:
        found = []
        for kind in (first, _apart, _shares, _is_view, _is_view_of_what_shares):
            base = torch.ones(3, 2, 3)[1] if base_is_view else torch.ones(2, 3)
            base.requires_grad_(function is _turned_off)
            with torch.no_grad():
                view = kind(base)
            flag, result = run(view, base)
            found.append((flag, result.requires_grad, view.requires_grad, base.requires_grad))
        return found

    assert calls(dovetail.compile(function, backend="aten")) == calls(function)
