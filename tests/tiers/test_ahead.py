"""``compiled.precompile(*args)`` and ``dovetail.wait``: what they compile and wait for, and that the function does not run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import dovetail
from dovetail.errors import NotCallableError
from tests.differential import compare_modules
from tests.tiers.fakes import FakeWorker, SlowBackend
from tests.tiers.test_swap import NAME, layers, notes, train
from tests.tiers.test_swap import background as background
from tests.tiers.test_swap import slow as slow


def test_the_first_call_hits() -> None:
    eager = layers()
    model = copy.deepcopy(eager)
    compiled = dovetail.compile(model, backend="aten", fullgraph=True)
    x = torch.randn(5, 6)
    state = torch.get_rng_state()
    assert compiled.precompile(x) is True
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    log = dovetail.events_of(compiled)
    assert log.count("capture") == log.count("compile backward") == 1
    for step in range(2):
        assert torch.equal(train(eager, step), train(compiled, step))
        compare_modules(eager, model, "model")
    assert log.count("capture") == 1


def test_effects_wait_for_the_call() -> None:
    seen: list[int] = []
    state = {"calls": 0}

    @dovetail.compile(backend="aten")
    def program(x: Tensor) -> Tensor:
        seen.append(len(seen))
        state["calls"] += 1
        return x.add_(torch.rand(3))

    x = torch.zeros(3)
    version = x._version
    assert program.precompile(x) and program.precompile(x)
    assert (seen, state, x._version) == ([], {"calls": 0}, version) and not x.any()
    program(x)
    assert (seen, state) == ([0], {"calls": 1}) and x.all()


def test_fake_tensors_stand_for_real_ones() -> None:
    compiled = dovetail.compile(lambda pair, scale: (pair[0] @ pair[1]) * scale["by"], backend="aten")
    with FakeTensorMode():
        one, two = torch.ones(3, 4).t(), torch.ones(3, 5, dtype=torch.float32, requires_grad=True)
    assert compiled.precompile((one, two), {"by": 2.0})
    log = dovetail.events_of(compiled)
    real = torch.ones(3, 5, requires_grad=True)
    compiled((torch.ones(3, 4).t(), real), {"by": 2.0}).sum().backward()
    assert real.grad is not None and log.count("capture") == 1
    assert torch.equal(real.grad, torch.full((3, 5), 8.0))


def test_one_graph_for_a_range_of_sizes() -> None:
    compiled = dovetail.compile(lambda x: x.sin().sum(0), backend="aten", fullgraph=True)
    with FakeTensorMode():
        x = dovetail.mark_dynamic(torch.ones(8, 3), 0, minimum=2, maximum=64)
    assert compiled.precompile(x)
    for size in (2, 5, 64):
        value = torch.randn(size, 3)
        assert torch.equal(compiled(value), value.sin().sum(0))
    assert dovetail.events_of(compiled).count("capture") == 1


def test_what_cannot_be_compiled_as_a_whole_says_so(quiet: None) -> None:
    def broken(x: Tensor) -> Tensor:
        print(x.sum().item())
        return x * 2

    compiled = dovetail.compile(broken, backend="aten")
    assert compiled.precompile(torch.ones(2)) is False
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


@pytest.fixture
def quiet() -> Iterator[None]:
    """No warnings of graph breaks."""
    with pytest.warns(UserWarning):
        yield


def test_a_method_of_the_program_wins() -> None:
    class Own(nn.Module):
        def precompile(self) -> str:
            return "mine"

        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    assert dovetail.compile(Own(), backend="aten").precompile() == "mine"


def test_kernels_are_waited_for(background: FakeWorker, slow: SlowBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dovetail.compile(layers(), backend=NAME)
    submit = background.submit

    def answered(data: dict[str, Any]) -> Any:
        job = submit(data)
        background.answer_all()
        return job

    monkeypatch.setattr(background, "submit", answered)
    assert model.precompile(torch.randn(5, 6))
    assert notes(model)[-1] == "tier 1"
    train(model, 0)
    assert dovetail.events_of(model).count("capture") == 1


class Block(nn.Module):
    """A block with parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x).sin()
        return result


class Blocks(nn.Module):
    """Three equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("how", ["regional", "wrapped", "forward"])
def test_wait_sees_all_parts_of_a_model(how: str, background: FakeWorker, slow: SlowBackend) -> None:
    model = Blocks()
    if how == "regional":
        model = dovetail.compile(model, regional=True, backend=NAME)
    for place, block in enumerate(model.blocks):
        if how == "wrapped":
            model.blocks[place] = dovetail.compile(block, backend=NAME)
        elif how == "forward":
            block.forward = dovetail.compile(block.forward, backend=NAME)
    x = torch.randn(5, 6)
    for _ in range(2):
        model(x).sum().backward()
    assert dovetail.wait(model, 0) is False
    background.answer_all()
    assert dovetail.wait(model, 20) is True


def test_wait_sees_entries_of_equal_modules(background: FakeWorker, slow: SlowBackend) -> None:
    first, second = (dovetail.compile(layers(seed), backend=NAME) for seed in range(2))
    train(first, 0)
    train(second, 0)
    assert dovetail.events_of(second).count("entry of an equal module") == 1
    assert dovetail.wait(second, 0) is False
    background.answer_all()
    assert dovetail.wait(second, 20) is True


def test_wait_refuses_what_nobody_has_compiled() -> None:
    with pytest.raises(NotCallableError, match="was not made by"):
        dovetail.wait(layers())
    with pytest.raises(NotCallableError, match="was not made by"):
        dovetail.wait(len)
