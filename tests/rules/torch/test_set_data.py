"""``p.data = value``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from tests.differential import check_calls

pytestmark = pytest.mark.usefixtures("quiet")


def in_place(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    p.data -= v * 0.1
    p.data *= 0.5
    return p.sum()


def by_a_name(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    data = p.data
    data += v
    p.data = data
    return (p * v).sum()


def a_view_of_its_own(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    p.data = p.detach().t().t()
    return (p * v).sum()


def the_other_way_round(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    p.data = p.data.t()
    return (p * v.t()).sum()


def a_part(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    p.data = p.data[1:]
    return p.sum() + v.sum()


def what_is_written_later(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    fresh = v * 2
    p.data = fresh
    fresh.add_(1)
    return p.sum()


def what_was_read_before(p: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    before = p.data
    p.data = before * 2 + v
    return p.sum(), before


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize(
    ("function", "breaks"),
    [
        *((item, False) for item in (in_place, by_a_name, a_view_of_its_own)),
        *((item, True) for item in (the_other_way_round, a_part, what_is_written_later, what_was_read_before)),
    ],
)
def test_the_data_is_eagers(function: Any, breaks: bool, backend: str) -> None:
    results = []
    for run in (function, dovetail.compile(function, backend=backend, fullgraph=not breaks)):
        torch.manual_seed(0)
        p, v = nn.Parameter(torch.randn(3, 3)), torch.randn(3, 3)
        alias, seen = p.detach(), []
        for _ in range(2 if function is not a_part else 1):
            results_of_call = run(p, v)
            first, *others = results_of_call if isinstance(results_of_call, tuple) else (results_of_call,)
            first.backward()
            seen += [first.item(), *others, p.detach().clone(), alias.clone(), p.grad.clone(), p._version, p.shape]  # type: ignore[union-attr]
            p.grad = None
        results.append(seen)
    assert str(results[1]) == str(results[0])


class Momentum(nn.Module):
    """A network and its slow copy."""

    def __init__(self, update: Callable[[Momentum], None]) -> None:
        super().__init__()
        self.fast = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
        self.slow = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).requires_grad_(False)
        self.update = update

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fast = self.fast(x)
        self.update(self)
        with torch.no_grad():
            slow = self.slow(x)
        return (fast - slow).square().sum()


@torch.no_grad()
def under_no_grad(model: Momentum) -> None:
    for fast, slow in zip(model.fast.parameters(), model.slow.parameters(), strict=True):
        slow.data = slow.data * 0.9 + fast.data * 0.1


def named(model: Momentum) -> None:
    others = dict(model.fast.named_parameters())
    for name, slow in model.slow.named_parameters():
        if name != "2.bias":
            slow.data = slow.data.lerp(others[name].data, 0.1)


@pytest.mark.parametrize("update", [under_no_grad, named])
def test_an_update_of_many_weights_is_part_of_the_graph(update: Any) -> None:
    losses: list[list[float]] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Momentum(update)
        call = dovetail.compile(model.forward, backend="aten") if compiles else model.forward
        optimizer, seen = torch.optim.SGD(model.fast.parameters(), 0.1), []
        for _ in range(3):
            loss = call(torch.randn(4, 2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        losses.append(seen)
    assert losses[1] == losses[0]
    assert call.events.count("graph break") == 0  # type: ignore[attr-defined]


class State:
    """What the programs below write to, and the memory that it has at first."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.p, self.q = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))
        self.b, self.c = torch.randn(3, 3), torch.randn(3, 3)
        self.optimizer = torch.optim.SGD([self.p, self.q], 0.1, momentum=0.9)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.p, self.q, self.b, self.c


def clipped_weights(s: State, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        loss = (s.p * x).square().sum() + (s.q * x).sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        for p in (s.p, s.q):
            p.data = p.data.clamp(-0.5, 0.5)
    return loss.detach()


def by_its_gradient(s: State, x: torch.Tensor) -> torch.Tensor:
    loss = (s.p * x).sum()
    loss.backward()
    s.p.data = s.p.data - 0.1 * s.p.grad  # type: ignore[operator]
    s.p.grad = None
    return loss.detach()


def clipped_gradient(s: State, x: torch.Tensor) -> torch.Tensor:
    loss = (s.p * x).sum()
    loss.backward()
    s.p.grad.data = s.p.grad.data.clamp(-0.1, 0.1)  # type: ignore[union-attr]
    s.optimizer.step()
    return loss.detach()


def written_after(s: State, x: torch.Tensor) -> torch.Tensor:
    s.b.data = x * 2
    s.b.add_(1)
    return s.b.sum()


def written_before_and_after(s: State, x: torch.Tensor) -> torch.Tensor:
    s.b.mul_(2)
    s.b.data = x * 2
    s.b[0] = 5
    return s.b.sum()


def swapped(s: State, x: torch.Tensor) -> torch.Tensor:
    s.p.data, s.q.data = s.q.data, s.p.data
    return (s.p * x).sum() + (s.q * x * 2).sum()


def twice(s: State, x: torch.Tensor) -> torch.Tensor:
    s.p.data = x + 1
    y = (s.p * 2).sum()
    s.p.data = s.p.data * x
    return y + (s.p * s.q).sum()


def the_value_too(s: State, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    value = x * 3
    s.b.data = value
    value.add_(1)
    return value, value[0], s.b[1]


def a_view_of_before(s: State, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    before, data = s.b[0], s.b.data
    s.b.data = x * 2
    data.add_(1)
    return before, s.b


def the_memory_of_another(s: State, x: torch.Tensor) -> torch.Tensor:
    s.p.data = s.c
    return (s.p * x).sum()


def other_strides(s: State, x: torch.Tensor) -> torch.Tensor:
    s.c.data = x.t()
    s.b.data = x[0].expand(3, 3)
    return s.c @ s.b


def a_differentiable_value(s: State, x: torch.Tensor) -> torch.Tensor:
    s.b.data = s.p * x
    return (s.b * s.q).sum()


def a_new_parameter(s: State, x: torch.Tensor) -> torch.Tensor:
    w = nn.Parameter(x * 2)
    w.data = x * 3
    return (w * s.q).sum()


def saved_before(s: State, x: torch.Tensor) -> torch.Tensor:
    y = (s.p @ s.q).square().sum() + (s.p * s.q).sum()
    s.p.data = x * 2
    (y + (s.p @ s.q).sin().sum()).backward()
    return y.detach()


def read_by_a_later_backward(s: State, x: torch.Tensor) -> torch.Tensor:
    y = (s.p.t() @ s.q).square().sum()
    s.p.data = x * 2
    return y


def of_another_shape(s: State, x: torch.Tensor) -> torch.Tensor:
    s.c.data = torch.cat([x, x])
    return s.c.sum()


WHOLE = (
    *(clipped_weights, by_its_gradient, clipped_gradient, written_after, written_before_and_after, swapped, twice),
    *(the_value_too, a_view_of_before, the_memory_of_another, other_strides, a_differentiable_value, a_new_parameter),
    saved_before,
)


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [*WHOLE, read_by_a_later_backward, of_another_shape])
def test_memory_is_eagers(function: Callable[[State, torch.Tensor], Any], backend: str) -> None:
    """Values, gradients, versions, strides and who shares memory with whom; what had the old memory keeps it."""
    found: list[list[Any]] = []
    is_whole = function in WHOLE
    tiers = {"tiers": "wait"} if backend == "inductor" else {}
    for run in (function, dovetail.compile(function, backend=backend, fullgraph=is_whole, **tiers)):
        state, seen = State(), []
        before = [item.detach() for item in state.tensors]
        for number in range(3):
            torch.manual_seed(number)
            x = torch.randn(3, 3)
            results = run(state, x)
            results = results if isinstance(results, tuple) else (results,)
            if results[0].requires_grad:
                results[0].backward()
            held = [*results, *state.tensors, *before, x]
            seen += [
                [item.detach().clone() for item in (*held, *(p.grad for p in (state.p, state.q) if p.grad is not None))]
            ]
            seen += [[(item.stride(), item.requires_grad, item.is_leaf) for item in held]]
            seen += [[item._version for item in state.tensors]]
            seen += [[[_shares(one, other) for one in held] for other in held]]
        found.append(seen)
    for expected, got in zip(*found, strict=True):
        if isinstance(expected[0], torch.Tensor):
            torch.testing.assert_close(got, expected, **({} if backend == "inductor" else {"rtol": 0, "atol": 0}))
        else:
            assert got == expected


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class Shifted(nn.Module):
    """What its backward needs could be computed again from a parameter, had that not other memory by then."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.fast = nn.Parameter(torch.ones(64), requires_grad=False), nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = self.slow + 1
            self.slow.data = self.slow * 0.5 + x
        return (self.fast * shift).cos().sum()


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_nothing_is_computed_again_from_the_old_memory(budget: float) -> None:
    eager, model = Shifted(), Shifted()
    compiled = dovetail.compile(model, backend="aten", memory_budget=budget, fullgraph=True)
    for number in range(3):
        for call in (eager, compiled):
            call(torch.full((64,), float(number))).backward()
        assert torch.equal(model.fast.grad, eager.fast.grad)  # type: ignore[arg-type]
        assert torch.equal(model.slow, eager.slow)


class OwnStorage(torch.UntypedStorage):
    pass


@pytest.mark.parametrize("kind", [torch.UntypedStorage, OwnStorage])
def test_a_storage_that_is_made_of_another_one(kind: Any) -> None:
    """Torch crashed where it was traced."""

    def function(x: torch.Tensor) -> torch.Tensor:
        first = torch.UntypedStorage(8)
        first[0] = 3
        second = kind(first)
        first[0] = 4
        return x + second.nbytes() + second[0] + kind([1, 2]).nbytes()

    check_calls(function, [(torch.ones(2),)] * 3, fullgraph=False)
