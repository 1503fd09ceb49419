"""Which entries end themselves, and what that saves: no kernels for a graph that is run once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import EagerFallbackWarning
from dovetail.passes.first_run import ended_assumption
from tests.differential import same


class Counter:
    """Something that a call changes."""

    def __init__(self) -> None:
        self.calls = 0
        self.is_ready = False
        self.kept: dict[Any, Any] = {}
        self.weight = torch.ones(3, requires_grad=True)


def _reason(function: Callable[..., Any], *args: Any) -> str:
    compiled = dovetail.compile(function, backend="aten")
    compiled(*args)
    entry = compiled.entries[0]
    ended = ended_assumption(entry.checker.guards.guards, entry.effects)
    return "" if ended is None else str(ended)


def test_a_flag_that_is_set_ends_its_own_entry() -> None:
    counter = Counter()

    def prepare(x: torch.Tensor) -> torch.Tensor:
        if not counter.is_ready:
            counter.is_ready = True
            return x * 2
        return x

    assert ".is_ready is False" in _reason(prepare, torch.ones(2))


def test_a_counter_that_is_counted_up_does_not() -> None:
    counter = Counter()

    def count(x: torch.Tensor) -> torch.Tensor:
        counter.calls += 1
        return x + counter.calls

    assert _reason(count, torch.ones(2)) == ""


def test_a_key_that_was_missing_ends_its_entry() -> None:
    counter = Counter()

    def remember(x: torch.Tensor) -> torch.Tensor:
        if "seen" not in counter.kept:
            counter.kept["seen"] = 1
            return x * 2
        return x

    assert "'seen' not in" in _reason(remember, torch.ones(2))


def test_a_gradient_that_was_missing_ends_its_entry() -> None:
    counter = Counter()

    def accumulate(x: torch.Tensor) -> torch.Tensor:
        loss = (counter.weight * x).sum()
        loss.backward()
        return loss

    assert ".grad is None" in _reason(accumulate, torch.ones(3))


@pytest.mark.parametrize("value", [0, "text", None])
def test_what_is_written_as_it_was_ends_nothing(value: Any) -> None:
    counter = Counter()
    counter.kept["same"] = value

    def write(x: torch.Tensor) -> torch.Tensor:
        if counter.kept["same"] == value:
            counter.kept["same"] = value
        counter.kept["last"] = x
        return x + 1

    assert _reason(write, torch.ones(2)) == ""


def _training(backend: str) -> tuple[Any, list[Any], torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = step if backend == "eager" else dovetail.compile(step, backend=backend, fullgraph=True)
    return compiled, [torch.randn(5, 4) for _ in range(3)], model


@pytest.mark.slow
def test_the_first_step_of_an_optimizer_is_not_compiled_to_kernels() -> None:
    step, batches, model = _training("inductor")
    twin, _, plain = _training("eager")
    for number, batch in enumerate(batches):
        assert torch.allclose(step(batch), twin(batch), rtol=1e-5, atol=1e-6)
        if number == 0:
            # Eager's own operators.
            assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5)
    notes = [event for event in dovetail.events_of(step).events if event.name == "kernels put off"]
    assert len(notes) == 1 and "grad is None" in notes[0].details["reason"]


@pytest.mark.slow
def test_an_entry_that_is_needed_again_after_all_gets_its_kernels() -> None:
    class Switch:
        on = False

    switch = Switch()
    switch.on = False

    def toggle(x: torch.Tensor) -> torch.Tensor:
        switch.on = not switch.on
        return (x * 2 if switch.on else x * 3).sin()

    compiled = dovetail.compile(toggle, backend="inductor", fullgraph=True)
    x = torch.randn(7)
    for factor in (2, 3, 2, 3, 2):
        assert torch.allclose(compiled(x), (x * factor).sin())
    assert len(compiled.entries) == 2


def test_a_backend_that_fails_at_the_second_run() -> None:
    """The call had begun, with gradients dropped, when the backend was asked: its error left a step half done."""

    def refuse(graph: torch.fx.GraphModule, inputs: Any, **context: Any) -> Any:
        raise RuntimeError("no kernels today")

    backend = dovetail.backends.Backend("refusing", refuse, slow_to_compile=True)
    outcomes = []
    for compiles in (False, True):
        weight = torch.nn.Parameter(torch.ones(3))

        def step(weight: torch.nn.Parameter = weight) -> torch.Tensor:
            weight.grad = None
            loss = (weight * weight).sum()
            loss.backward()
            return loss.detach()

        run = dovetail.compile(step, backend=backend, fullgraph=True) if compiles else step
        run()
        weight.grad = None
        with pytest.warns(EagerFallbackWarning, match="no kernels today") if compiles else contextlib.nullcontext():
            outcomes.append((run(), weight.grad))
    same(*outcomes)


@pytest.mark.slow
def test_differentiation_through_an_entry_that_ends_itself() -> None:
    counter = Counter()

    def count(x: torch.Tensor) -> torch.Tensor:
        counter.kept.setdefault("calls", 0)
        counter.kept["calls"] += 1
        return (x * counter.weight).sin()

    compiled = dovetail.compile(count, backend="inductor", fullgraph=True)
    for _ in range(3):
        counter.kept.clear()
        results = []
        for function in (count, compiled):
            counter.kept.clear()
            x = torch.arange(3.0, requires_grad=True)
            (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            results.append((first.detach(), second))
        for mine, other in zip(*results, strict=True):
            assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)
    assert len(compiled.entries) == 1
    assert counter.kept == {"calls": 1}


def test_random_numbers_of_a_first_run_are_eagers() -> None:
    counter = Counter()

    def drop(x: torch.Tensor) -> torch.Tensor:
        counter.calls += 1
        return torch.nn.functional.dropout(x, 0.5)

    compiled = dovetail.compile(drop, backend="inductor", fullgraph=True)
    x = torch.ones(20)
    torch.manual_seed(3)
    expected = drop(x)
    counter.calls = 0
    torch.manual_seed(3)
    same(compiled(x), expected)
