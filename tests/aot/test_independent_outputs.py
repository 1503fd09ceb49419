"""Backwards of independent outputs, one after the other and without ``retain_graph``, as eager allows them."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import dovetail
from tests.differential import same

SECOND_TIME = "backward through the graph a second time"


def disjoint(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return a.sin().exp().sum(), (b * b).sum(), c.exp().sum()


def shared_without_saving(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = a + b - c
    return total.sin().sum(), total.cos().sum(), total.exp().sum()


def shared_with_saving(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    shared = a.sin()
    return (shared * b).sum(), (shared + c).sum(), b.exp().sum()


def one_of_the_other(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first = a.sin()
    return first, first.exp().sum(), (b * c).sum()


def without_saving(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (a + b).sum(), (a - c).sum(), a.exp().sum()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


def custom(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cubed = Cube.apply(a)
    return (cubed + b).sum(), (cubed - c).sum(), Cube.apply(b).sum()


def views(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    both = torch.stack([a.sin(), b.exp()])
    return both[0].sum(), both[1].sum(), (c * c).view(-1)


PROGRAMS = [disjoint, shared_without_saving, shared_with_saving, one_of_the_other, without_saving, custom, views]
ORDERS = [(0, 1, 2), (2, 0, 1), (0, 0, 2), (1, 2, 1), (2, 2, 0)]


def outcome(function: Callable[..., Any], order: tuple[int, ...], create_graph: bool = False) -> list[Any]:
    """The gradients after each backward, or that there was an error."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(3, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]
    outputs = function(*inputs)
    found: list[Any] = []
    for index in order:
        output = outputs[index]
        try:
            given = torch.autograd.grad(
                output,
                inputs,
                torch.ones_like(output),
                allow_unused=True,
                create_graph=create_graph,
                retain_graph=False,
            )
            found.append(given)
        except RuntimeError as error:
            assert SECOND_TIME in str(error)
            found.append("freed")
            break
    return found


def equal(one: list[Any], other: list[Any]) -> bool:
    if len(one) != len(other):
        return False
    for left, right in zip(one, other, strict=True):
        if isinstance(left, str) or isinstance(right, str):
            if left != right:
                return False
        elif not all(
            torch.equal(a if a is not None else torch.zeros(3), b if b is not None else torch.zeros(3))
            if a is None or b is None
            else torch.equal(a, b)
            for a, b in zip(left, right, strict=True)
        ):
            return False
    return True


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.sampled(4)
def test_one_after_the_other(program: Any, order: tuple[int, ...]) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for _ in range(2):
        assert equal(outcome(compiled, order), outcome(program, order))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_higher_orders_of_what_is_left(order: tuple[int, ...]) -> None:
    compiled = dovetail.compile(disjoint, backend="aten", fullgraph=True)

    def second(function: Any) -> list[torch.Tensor]:
        inputs = [torch.linspace(0.1, 1, 3, dtype=torch.float64).requires_grad_() for _ in range(3)]
        outputs = function(*inputs)
        found = list(torch.autograd.grad(outputs[order[0]], inputs[order[0]]))
        for index in order[1:]:
            (first,) = torch.autograd.grad(outputs[index], inputs[index], create_graph=True)
            found += torch.autograd.grad(first.sum(), inputs[index])
        return found

    for one, other in zip(second(compiled), second(disjoint), strict=True):
        assert torch.equal(one, other)


def test_two_models_with_optimizers() -> None:
    """The usual case: two networks in one compiled step, each with a loss of its own."""

    def run(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        one, two = (torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)) for _ in "ab")
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (one, two)]
        step = wrap(lambda x: (one(x).square().mean(), two(x).abs().mean()))
        for _ in range(3):
            first, second = step(torch.randn(5, 4))
            for optimizer in optimizers:
                optimizer.zero_grad()
            first.backward()
            second.backward()
            for optimizer in optimizers:
                optimizer.step()
        return [parameter.detach() for model in (one, two) for parameter in model.parameters()]

    compiled = run(lambda function: dovetail.compile(function, backend="aten", fullgraph=True))
    for one, other in zip(compiled, run(lambda function: function), strict=True):
        assert torch.equal(one, other)


def test_a_write_in_between_is_noticed() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (a * a).sum(), (b * b).sum()

    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for function in (program, compiled):
        a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
        first, second = function(a, b)
        first.backward()
        with torch.no_grad():
            b.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()


class Recorder:
    """A backend that notes which of the results of its forward graphs are alive."""

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: Any, *, kind: str, options: Any) -> Callable[..., Any]:
        def run(values: list[Any]) -> list[Any]:
            given = {item.data_ptr() for item in values}
            results = list(graph(*values))
            if kind == "forward":
                big = [item for item in results if item.numel() == 64 and item.data_ptr() not in given]
                self.storages = [StorageWeakRef(item.untyped_storage()) for item in big]
            return results

        return run

    def alive(self) -> int:
        gc.collect()
        return sum(not item.expired() for item in self.storages)


def chains(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (a @ a).sin().sum(), (b @ b).sin().sum(), (c @ c).sin().sum()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_saved_tensors_are_freed_when_no_output_needs_them(order: tuple[int, ...]) -> None:
    recorder = Recorder()
    compiled = dovetail.compile(chains, backend=recorder, fullgraph=True)
    inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    outputs = compiled(*inputs)
    counts = [recorder.alive()]
    for index in order:
        outputs[index].backward()
        counts.append(recorder.alive())
    whole = counts[0]
    assert whole >= 3
    assert counts == [whole, whole * 2 // 3, whole // 3, 0]


def loss_and_logits(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = (a @ b).sin()
    return hidden.sum(), hidden * 2, hidden.detach()


def test_a_loss_frees_what_its_logits_were_computed_from() -> None:
    """The usual pair of results: eager frees all of it in the backward of the loss."""
    recorder = Recorder()
    compiled = dovetail.compile(loss_and_logits, backend=recorder, fullgraph=True)
    inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    loss, logits, shown = compiled(*inputs)
    del shown
    logits = logits[:1].clone()
    assert recorder.alive() == 1
    loss.backward()
    assert recorder.alive() == 0
    with pytest.raises(RuntimeError, match=SECOND_TIME):
        logits.sum().backward()


def some_of_each(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (a * b).sum(), (b * 2).sum(), (c * a).sum()


def views_and_numbers(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.stack([a, b]).unbind(0)[0] * a.shape[0], (b * 2).view(-1), c.view(-1) * c


def gradients_of_leaves(function: Callable[..., Any], are_leaves: tuple[bool, ...], how: str) -> list[Any]:
    """The gradients after each backward through what the inputs were computed from, or that there was an error."""
    leaves = [torch.linspace(0.1, place, 3, dtype=torch.float64).requires_grad_() for place in (1, 2, 3)]
    outputs = function(*(leaf if flag else leaf.exp() for leaf, flag in zip(leaves, are_leaves, strict=True)))
    seen: list[Any] = []
    if how == "hooks":
        for place, output in enumerate(outputs):
            output.register_hook(lambda gradient, place=place: seen.append(place))
    if how == "all at once":
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    for place in () if how == "all at once" else (2, 0, 1):
        try:
            outputs[place].sum().backward(retain_graph=how == "kept")
        except RuntimeError as error:
            assert SECOND_TIME in str(error)
            seen.append("freed")
        seen.append([None if leaf.grad is None else leaf.grad.clone() for leaf in leaves])
    return [*seen, [leaf.grad for leaf in leaves]]


@pytest.mark.parametrize("how", ["plain", "kept", "hooks", "all at once"])
@pytest.mark.parametrize("are_leaves", [(False, False, False), (True, False, True), (False, True, False)], ids=str)
@pytest.mark.parametrize("program", [disjoint, some_of_each, custom, views_and_numbers], ids=lambda item: item.__name__)
@pytest.mark.sampled(6)
def test_what_the_inputs_were_computed_from_is_freed_by_its_own_outputs(
    program: Any, are_leaves: tuple[bool, ...], how: str
) -> None:
    if program is custom and how in ("plain", "hooks"):
        pytest.skip("how far a backward comes that raises is the engine's")
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for _ in range(2):
        same(gradients_of_leaves(program, are_leaves, how), gradients_of_leaves(compiled, are_leaves, how))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_higher_orders_behind_nodes_of_their_own(order: tuple[int, int]) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.sin() * a, b.exp()

    def second(function: Any) -> list[torch.Tensor]:
        leaves = [torch.linspace(0.1, 1, 3, dtype=torch.float64).requires_grad_() for _ in range(2)]
        outputs = function(leaves[0] ** 3, leaves[1].cos())
        found: list[torch.Tensor] = []
        for place in order:
            (first,) = torch.autograd.grad(outputs[place].sum(), leaves[place], create_graph=True)
            found += [first.detach(), *torch.autograd.grad(first.square().sum(), leaves[place])]
        return found

    same(second(program), second(dovetail.compile(program, backend="aten", fullgraph=True)))


def test_nodes_of_their_own_under_compiled_autograd() -> None:
    def run(function: Any) -> list[Any]:
        one, two = (torch.linspace(0.1, 1, 3).requires_grad_() for _ in range(2))
        first, second = function(one.exp(), two.exp())
        first.sum().backward()
        second.sum().backward()
        return [one.grad, two.grad]

    def program(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.sin() * a.shape[0], b * b

    expected, compiled = run(program), dovetail.compile(program, backend="aten", fullgraph=True)
    with dovetail.compiled_autograd(backend="aten"), pytest.warns(dovetail.errors.GraphBreakWarning, match="prologue"):
        same(expected, run(compiled))
