"""Gradients of a result with respect to another one that it was computed from: features, attention maps, new values of inputs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from tests.differential import same

Run = Callable[[Callable[..., Any]], list[torch.Tensor]]
PROGRAMS: list[Run] = []


def program(run: Run) -> Run:
    PROGRAMS.append(run)
    return run


def _weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4), requires_grad=True)


def _model() -> nn.Sequential:
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 2)]
    return nn.Sequential(*layers)


@program
def asked_by_name(compiled: Callable[..., Any]) -> list[torch.Tensor]:
    model, kept = _model(), {}
    model[2].register_forward_hook(lambda module, args, result: kept.update(features=result))
    run, found = compiled(model), []
    for _ in range(3):
        scores = run(torch.randn(2, 2, 6, 6))
        found += torch.autograd.grad(scores[:, 0].sum(), kept["features"], retain_graph=True)
        scores.sum().backward()
        found += [model[0].weight.grad.clone(), model[1].running_mean.clone()]
    return found


@program
def kept_by_retain_grad(compiled: Callable[..., Any]) -> list[torch.Tensor]:
    weight, kept = _weight(4, 4), SimpleNamespace(hidden=None)

    def function(x: torch.Tensor) -> torch.Tensor:
        kept.hidden = x @ weight
        return kept.hidden.sin().sum()

    run, found = compiled(function), []
    for rows in (2, 3, 5):
        loss = run(torch.randn(rows, 4))
        kept.hidden.retain_grad()
        loss.backward()
        found += [kept.hidden.grad, weight.grad.clone()]
    return found


@program
def changed_by_hooks(compiled: Callable[..., Any]) -> list[torch.Tensor]:
    weight = _weight(4, 4)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x @ weight
        b = a.sin()
        c = (a * b).exp()
        return a, b, c, (c * a).sum() + b.sum()

    run, found = compiled(function), []
    for _ in range(2):
        a, b, c, loss = run(torch.randn(2, 4))
        found += torch.autograd.grad(loss, (a, b, c, weight), retain_graph=True)
        a.register_hook(lambda gradient: gradient * 2)
        b.register_hook(lambda gradient: found.append(gradient) or gradient * 3)
        (loss + c.sum()).backward()
        found.append(weight.grad.clone())
    return found


@program
def twice_differentiated(compiled: Callable[..., Any]) -> list[torch.Tensor]:
    weight, found = _weight(4, 4), []
    run = compiled(lambda x: (hidden := (x @ weight).tanh(), (hidden * x).exp().sum()))
    for _ in range(2):
        x = torch.randn(2, 4, requires_grad=True)
        hidden, loss = run(x)
        slopes = torch.autograd.grad(loss, (hidden, x, weight), create_graph=True)
        found += [*slopes, *torch.autograd.grad(sum(item.square().sum() for item in slopes), (x, weight))]
    return found


@program
def views(compiled: Callable[..., Any]) -> list[torch.Tensor]:
    weight, found = _weight(4, 6), []

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, two = (x @ weight).chunk(2, -1)
        flat = x.view(-1)
        turned = two.t()
        return one, turned, flat, (one * turned.t()).sum() + flat.cos().sum()

    run = compiled(function)
    for _ in range(2):
        *sources, loss = run(torch.randn(2, 4).requires_grad_().clone())
        sources[1].register_hook(lambda gradient: gradient * 3)
        found += torch.autograd.grad(loss, [*sources, weight])
    return found


@program
def written_in_place(compiled: Callable[..., Any]) -> list[torch.Tensor]:
    weight, found = _weight(4, 6), []

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = x @ weight
        before = hidden * 2
        hidden.mul_(2)
        hidden[0].add_(1)
        return hidden, (before + hidden.sin()).sum()

    run = compiled(function)
    for _ in range(2):
        hidden, loss = run(torch.randn(2, 4))
        hidden.register_hook(lambda gradient: gradient * 3)
        found += torch.autograd.grad(loss, (hidden, weight))
    return found


@program
def written_inputs(compiled: Callable[..., Any]) -> list[torch.Tensor]:
    weight, found = _weight(4, 6), []
    run = compiled(lambda x, total: total.add_(x @ weight).square().sum())
    for _ in range(2):
        total = torch.randn(2, 6).requires_grad_().clone()
        found += torch.autograd.grad(run(torch.randn(2, 4), total), (total, weight))
    return found


@program
def random_numbers(compiled: Callable[..., Any]) -> list[torch.Tensor]:
    weight, found = _weight(4, 4), []
    drop = nn.functional.dropout
    run = compiled(lambda x: (hidden := drop(x @ weight), drop(hidden.sin())))
    for _ in range(3):
        hidden, result = run(torch.randn(8, 4))
        found += [*torch.autograd.grad(result.sum(), (hidden, weight)), torch.rand(2)]
    return found


@program
def independent_results(compiled: Callable[..., Any]) -> list[torch.Tensor]:
    one, two, found = _weight(4, 4), _weight(4, 3), []
    run = compiled(lambda x: (hidden := x @ one, hidden.square().sum(), (x.detach() @ two).sum()))
    for _ in range(2):
        x = torch.randn(2, 4, requires_grad=True)
        hidden, first, second = run(x.sin())
        found += torch.autograd.grad(first, (hidden, x))
        second.backward()
        found.append(two.grad.clone())
    return found


@program
def errors(compiled: Callable[..., Any]) -> list[torch.Tensor]:
    weight, found = _weight(4, 4), []
    run = compiled(lambda x: (hidden := x @ weight, hidden.square().sum()))
    hidden, loss = run(torch.randn(2, 4))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, hidden)
    hidden, loss = run(torch.randn(2, 4))
    (found,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    # What nobody asks for any more leaves nothing behind.
    loss.backward()
    return [found, weight.grad]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run", PROGRAMS)
def test_gradients_between_results_are_eagers(run: Run) -> None:
    outcomes = []
    for backend in (None, "aten"):
        torch.manual_seed(0)
        options: Any = {"backend": backend, "fullgraph": True}
        outcomes.append(run(lambda function: function if backend is None else dovetail.compile(function, **options)))  # noqa: B023
    same(*outcomes, exact=False)


class _Scaled(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.factor = _Scaled.factor
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent * ctx.factor


@torch.library.custom_op("dovetail_between::scaled", mutates_args=())
def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * _Scaled.factor


_scaled.register_fake(torch.empty_like)
_scaled.register_autograd(lambda ctx, tangent: tangent * _Scaled.factor)


def _with_saved_tensor_hooks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x.sin()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda saved: saved / 2):
        return hidden, hidden.exp()


REFUSED = [
    (_with_saved_tensor_hooks, "saved-tensor hooks"),
    (lambda x: (hidden := x.sin(), torch.func.vmap(torch.exp)(hidden)), "uses torch.func"),
    (lambda x: (hidden := x.sin(), torch.func.grad(lambda y: y.exp().sum())(hidden)), "uses torch.func"),
]
#: Called once more, these read the factor of that moment.
READING = [
    (lambda x: (hidden := x.sin(), _Scaled.apply(hidden.exp())), "custom autograd.Function"),
    (lambda x: (hidden := _Scaled.apply(x), hidden.exp() * x), "custom autograd.Function"),
    (lambda x: (hidden := x.sin(), _scaled(hidden.exp())), "dovetail_between.scaled.default, a custom operator"),
]


@pytest.mark.parametrize("function", [function for function, _ in READING])
@pytest.mark.parametrize("asked", ["feature", "both", "hook", "kept"])
def test_custom_functions_that_read_what_they_have_read(function: Callable[..., Any], asked: str) -> None:
    def gradients(run: Callable[..., Any]) -> Any:
        x, found = torch.tensor([0.2, -0.5, 0.7]).requires_grad_(), []
        hidden, result = run(x)
        if asked in ASKED:
            return ASKED[asked](x, hidden, result)
        if asked == "hook":
            hidden.register_hook(lambda gradient: found.append(gradient) or gradient * 2)
        else:
            hidden.retain_grad()
        (result * x.detach()).sum().backward()
        return x.grad, *found, hidden.grad

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for _ in range(2):
        same(gradients(compiled), gradients(function), exact=False)


@pytest.mark.parametrize(("function", "reason"), [*REFUSED, *READING])
def test_what_cannot_be_replayed_as_it_was_is_refused(
    function: Callable[..., Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, result = dovetail.compile(function, backend="aten", fullgraph=True)(torch.ones(2, requires_grad=True))
    monkeypatch.setattr(_Scaled, "factor", 5.0)
    with pytest.raises(dovetail.errors.PartialGradientError, match=reason):
        torch.autograd.grad(result.sum(), hidden)


def _give_other_memory(tensor: torch.Tensor) -> None:
    tensor.data = torch.full_like(tensor, 0.3)


PAST_AUTOGRAD: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda tensor: tensor.data.mul_(3),
    "a little": lambda tensor: tensor.data.mul_(1.001),
    "detach": lambda tensor: tensor.detach().mul_(3),
    "other memory": _give_other_memory,
    "nothing": lambda tensor: None,
}
ASKED: dict[str, Callable[..., Any]] = {
    "feature": lambda x, hidden, result: torch.autograd.grad(result.sum(), [hidden, x]),
    "input": lambda x, hidden, result: torch.autograd.grad(result.sum(), x),
    "both": lambda x, hidden, result: torch.autograd.grad((result * hidden).sum(), x),
    "twice": lambda x, hidden, result: torch.autograd.grad(
        torch.autograd.grad(result.sum(), x, create_graph=True)[0].square().sum(), x
    ),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("how", PAST_AUTOGRAD)
@pytest.mark.parametrize("first", [torch.sin, torch.exp, torch.clone])
@pytest.mark.parametrize("last", [torch.square, torch.exp, torch.relu])
@pytest.mark.sampled(6)
def test_results_that_were_written_to(
    first: Callable[..., Any], last: Callable[..., Any], how: str, asked: str
) -> None:
    """A formula that has saved a tensor reads what has been written to it past autograd, or the memory that it was given."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = first(x)
        return hidden, (hidden * hidden if last is torch.square else last(hidden))

    def gradients(run: Callable[..., Any], written: int) -> Any:
        x = torch.tensor([0.2, -0.5, 0.7]).requires_grad_()
        results = run(x)
        PAST_AUTOGRAD[how](results[written])
        try:
            return ASKED[asked](x, *results)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            return "refused"

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for written in (0, 1, 0):
        found, expected = gradients(compiled, written), gradients(function, written)
        # What the feature's own formula has saved is not read for the gradient between the two; a counted write to it is refused.
        if not (found == "refused" and how == "detach" and asked == "feature"):
            same(found, expected, exact=False)
