"""Hooks for saved tensors, torch.utils.checkpoint and save_on_cpu among them, around compiled calls."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import warnings
from typing import Any

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.errors import EagerFallbackWarning, GraphBreakError
from tests.differential import same


class Noisy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(self.linear(x).tanh(), 0.4, True).exp()


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x)).tanh()


class Broken(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.dropout(self.first(x).tanh(), 0.4, True)
        scale = 1.0 + float(y.detach().sum() > 0)
        return torch.dropout(self.second(y).tanh() * scale, 0.4, True)


SETTINGS: dict[str, dict[str, Any]] = {
    "early stop": {"use_reentrant": False},
    "to the end": {"use_reentrant": False, "early_stop": False},
    "other numbers": {"use_reentrant": False, "preserve_rng_state": False},
    "reentrant": {"use_reentrant": True},
}


def train(kind: type[torch.nn.Module], settings: dict[str, Any], *, compiles: bool) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    blocks = [kind() for _ in range(2)]
    calls = [dovetail.compile(block, backend="aten") if compiles else block for block in blocks]
    seen: list[Any] = []
    for rows in (5, 6):
        x = torch.randn(rows, 4, requires_grad=True)
        y = x
        for call in calls:
            y = checkpoint(call, y, **settings)
        y.sum().backward()
        seen += [y.detach(), x.grad]
    parameters = [item.grad for block in blocks for item in block.parameters()]
    buffers = [item.clone() for block in blocks for item in block.buffers()]
    return [seen, parameters, buffers, torch.rand(1)], calls if compiles else []


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Noisy, "early stop"),
        (Noisy, "to the end"),
        (Normed, "early stop"),
        *[
            pytest.param(kind, name, marks=pytest.mark.slow)
            for kind in (Noisy, Normed, Broken)
            for name in SETTINGS
            if (kind is Broken or name in ("other numbers", "reentrant") or (kind, name) == (Normed, "to the end"))
        ],
    ],
)
def test_blocks_compiled_one_by_one_inside_of_checkpoints(kind: type[torch.nn.Module], settings: str) -> None:
    expected, _ = train(kind, SETTINGS[settings], compiles=False)
    actual, calls = train(kind, SETTINGS[settings], compiles=True)
    same(expected, actual)
    if kind is Noisy and settings != "other numbers":
        assert all(dovetail.events_of(call).count("graph break") == 0 for call in calls)


def test_what_a_checkpointed_call_saves_is_not_kept() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh(), torch.nn.Linear(48, 48), torch.nn.Tanh())
    call = dovetail.compile(block, backend="aten", fullgraph=True)
    x = torch.randn(8, 48, requires_grad=True)

    def alive() -> int:
        gc.collect()
        return sum(1 for item in gc.get_objects() if isinstance(item, torch.Tensor) and tuple(item.shape) == (8, 48))

    def region(x: torch.Tensor) -> torch.Tensor:
        return call(call(x).sin())

    for _ in range(2):
        checkpoint(region, x, use_reentrant=False).sum().backward()
    before = alive()
    y = checkpoint(region, x, use_reentrant=False)
    assert alive() == before + 1
    y.sum().backward()


def scaled(x: torch.Tensor, weight: torch.Tensor, text: str = "") -> torch.Tensor:
    return torch.tanh(x @ weight).sin() * (x.shape[0] + len(text))


def test_a_region_is_computed_again_by_the_entry_that_computed_it() -> None:
    """Meanwhile the function has been compiled for other sizes, which save other tensors."""

    def run(function: Any) -> list[Any]:
        torch.manual_seed(0)
        weights = [torch.randn(*size, requires_grad=True) for size in ((4, 4), (4, 8))]
        calls = []
        for rows in (5, 6, 5):
            x = y = torch.randn(rows, 4, requires_grad=True)
            for weight in weights:
                y = checkpoint(function, y, weight, use_reentrant=False)
            calls.append((x, y))
        for _, y in reversed(calls):
            y.sum().backward()
        return [[x.grad for x, _ in calls], [weight.grad for weight in weights]]

    same(run(scaled), run(dovetail.compile(scaled, backend="aten")))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_region_is_computed_again_eagerly_where_eager_computed_it() -> None:
    compiled = dovetail.compile(scaled, backend="aten", recompile_limit=2)

    def run(function: Any) -> list[Any]:
        torch.manual_seed(0)
        weight = torch.randn(4, 4, requires_grad=True)
        losses = [
            checkpoint(function, torch.randn(5, 4), weight, "a" * count, use_reentrant=False) for count in range(5)
        ]
        for loss in losses:
            loss.sum().backward()
        return [losses, weight.grad]

    same(run(scaled), run(compiled))
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Tanh(), torch.nn.LazyLinear(3))
    checkpoint(dovetail.compile(lazy, backend="aten"), torch.randn(5, 4), use_reentrant=False).sum().backward()
    assert all(item.grad is not None for item in lazy.parameters())


@pytest.mark.parametrize("around", ["checkpoint", "nested", "save_on_cpu"])
def test_derivatives_of_both_orders(around: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)).double()

    def call(function: Any, x: torch.Tensor) -> torch.Tensor:
        if around == "checkpoint":
            return checkpoint(function, x, use_reentrant=False)
        if around == "nested":
            inner = functools.partial(checkpoint, function, use_reentrant=False)
            return checkpoint(lambda x: inner(inner(x)), x, use_reentrant=False)
        with save_on_cpu():
            return function(x)

    def run(function: Any) -> list[Any]:
        found = []
        for _ in range(2):
            model.zero_grad()
            x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4).requires_grad_()
            y = call(function, x)
            y.sum().backward(retain_graph=True)
            (slope,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
            slope.square().sum().backward()
            found += [y, slope, x.grad, *[item.grad.clone() for item in model.parameters() if item.grad is not None]]
        return found

    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    same(run(model), run(compiled), exact=False)


def test_one_entry_with_and_without_hooks_that_keep_values() -> None:
    model = Noisy()
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)

    def run(function: Any) -> list[Any]:
        torch.manual_seed(0)
        model.zero_grad()
        x = torch.randn(5, 4, requires_grad=True)
        for number in range(4):
            with save_on_cpu() if number % 2 else contextlib.nullcontext():
                y = function(x)
            y.sum().backward()
        return [y, x.grad, *[item.grad for item in model.parameters()]]

    same(run(model), run(compiled))
    assert len(compiled.compiled_call.entries) == 1


def test_a_write_in_a_region_that_may_end_early_is_left_to_eager() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    with pytest.warns(EagerFallbackWarning, match="early_stop=False"):
        checkpoint(dovetail.compile(Normed(), backend="aten"), x, use_reentrant=False)
    strict = dovetail.compile(Normed(), backend="aten", fullgraph=True)
    for _ in range(2):
        with pytest.raises(GraphBreakError, match="early_stop=False"):
            checkpoint(strict, x, use_reentrant=False)
    assert dovetail.events_of(strict).count("graph break") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(strict, x, use_reentrant=False, early_stop=False).sum().backward()
        strict(x).sum().backward()


HOOKS = {
    "rounds": (torch.Tensor.half, torch.Tensor.float),
    "doubles": (lambda tensor: tensor * 2, lambda tensor: tensor),
    "torch's own functions": (torch.nn.functional.relu, torch.nn.functional.relu),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_change_values_get_what_eager_saves(name: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).exp()

    def run(function: Any) -> list[Any]:
        x = torch.linspace(-2, 2, 8).requires_grad_()
        function(x).sum().backward()
        with saved_tensors_hooks(*HOOKS[name]):
            y = function(x)
        y.sum().backward()
        return [y, x.grad]

    compiled = dovetail.compile(program, backend="aten")
    for _ in range(2):
        same(run(program), run(compiled))


def test_a_checkpoint_inside_where_hooks_are_refused() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.sin, x, use_reentrant=False) * 2

    compiled = dovetail.compile(program, backend="aten")
    x = torch.ones(3, requires_grad=True)
    for refused in (False, True, False, True):
        with disable_saved_tensors_hooks("not here") if refused else contextlib.nullcontext():
            with pytest.raises(RuntimeError, match="not here") if refused else contextlib.nullcontext():
                same(program(x), compiled(x))
            with pytest.raises(RuntimeError, match="not here") if refused else contextlib.nullcontext():
                compiled(x).sum().backward()


def test_regions_in_several_threads() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    inputs = [torch.randn(5, 4, requires_grad=True) for _ in range(6)]

    def work(x: torch.Tensor) -> None:
        for _ in range(3):
            checkpoint(compiled, x, use_reentrant=False).sum().backward(inputs=[x])

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x in inputs:
        expected = torch.autograd.grad(model(x).sum(), x)[0]
        same(expected + expected + expected, x.grad)
