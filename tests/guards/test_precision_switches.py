"""torch's newer switches of float32 precision: the older ones cannot be read beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dovetail
from dovetail.guards import AmbientState
from dovetail.torch_private import state as private_state
from tests.differential import same

SWITCHES = ("", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn", "cuda.matmul", "cudnn.conv", "cudnn.rnn", "cudnn")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # torch's own test helpers freeze the switches for the process that imports them.
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    precisions = private_state.every_precision()
    yield
    private_state.set_every_precision(precisions)


def _owner(name: str) -> Any:
    found: Any = torch.backends
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", SWITCHES)
def test_a_call_before_and_after_each_switch(name: str) -> None:
    module, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    compiled, owner = dovetail.compile(module, backend="aten", fullgraph=True), _owner(name)
    for value in ("none", "tf32", "ieee", "tf32"):
        owner.fp32_precision = value
        same(module(x), compiled(x))


def test_a_state_that_torch_refuses_to_read_is_a_state() -> None:
    before = AmbientState.snapshot()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    mixed, state = AmbientState.snapshot(), private_state.StateOfTorch.now()
    assert mixed.matches() and "reduced_precision" in before.differing(mixed)
    assert any("float32 matmul precision was highest" in item for item in before.differences())
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    state.restore()
    assert torch.backends.cuda.matmul.fp32_precision == "tf32" and mixed.matches()


@pytest.mark.parametrize("name", SWITCHES)
def test_a_program_that_reads_a_switch(name: str) -> None:
    owner, x = _owner(name), torch.ones(2)
    scope: dict[str, Any] = {"torch": torch}
    place = f"torch.backends{name and '.'}{name}"
    exec(f"def function(x):\n    return x * 2 if {place}.fp32_precision == 'tf32' else x + 10", scope)
    compiled = dovetail.compile(scope["function"], backend="aten", fullgraph=True)
    for value in ("none", "tf32", "ieee", "tf32"):
        owner.fp32_precision = value
        same(scope["function"](x), compiled(x))


def test_one_switch_follows_another() -> None:
    """Without one of its own, a kind of operator takes the precision of its backend, and that the precision of all."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.backends.mkldnn.rnn.fp32_precision == "tf32" else x - 1

    compiled = dovetail.compile(function, backend="aten", fullgraph=True)
    for value in ("none", "tf32", "none"):
        torch.backends.fp32_precision = value
        same(function(torch.ones(2)), compiled(torch.ones(2)))


def test_a_switch_set_in_the_function() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        y = x * 2
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        return y + 1

    compiled = dovetail.compile(function, backend="aten")
    for _ in range(2):
        same(function(torch.ones(2)), compiled(torch.ones(2)))
