"""What autograd outside of a loaded graph sees of its results: the same as of a compiled function, or of eager."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.artefacts.files import read_artefact, write_artefact
from dovetail.errors import ArtefactError, PartialGradientError
from tests.aot.test_independent_outputs import (
    ORDERS,
    disjoint,
    equal,
    one_of_the_other,
    outcome,
    shared_with_saving,
    views,
)


def loaded(function: Callable[..., Any], example: list[torch.Tensor], path: Path) -> Callable[..., Any]:
    """The function by way of a file."""
    dovetail.capture(function, tuple(example)).export(path / "step")
    return dovetail.load(path / "step")


def vectors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize("program", [disjoint, shared_with_saving, one_of_the_other, views], ids=lambda it: it.__name__)
def test_backwards_one_after_the_other(program: Any, tmp_path: Path) -> None:
    call = loaded(program, vectors(3), tmp_path)
    for order in ORDERS:
        assert equal(outcome(call, order), outcome(program, order))


def chain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.sin()
    return y, y.exp()


def test_a_gradient_between_two_results_is_refused_and_not_none(tmp_path: Path) -> None:
    call = loaded(chain, vectors(1), tmp_path)
    for asked in (lambda y, z: torch.autograd.grad(z.sum(), y, allow_unused=True), _by_a_hook, _by_retain_grad):
        y, z = call(*vectors(1))
        with pytest.raises(PartialGradientError):
            asked(y, z)
    # What leads to the input is not touched.
    (x,) = vectors(1)
    y, z = call(x)
    (found,) = torch.autograd.grad(y.sum() + z.sum(), x)
    (expected,) = torch.autograd.grad(sum(item.sum() for item in chain(x)), x)
    assert torch.equal(found, expected)


def _by_a_hook(y: torch.Tensor, z: torch.Tensor) -> None:
    y.register_hook(lambda gradient: gradient * 2)
    z.sum().backward()


def _by_retain_grad(y: torch.Tensor, z: torch.Tensor) -> None:
    y.retain_grad()
    z.sum().backward()


def test_a_write_through_data_leaves_the_version(tmp_path: Path) -> None:
    def write(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.data.add_(1)
        return x * total

    (x,) = vectors(1)
    call = loaded(write, [x, torch.zeros(3, dtype=torch.float64)], tmp_path)
    for function in (write, call):
        total = torch.zeros(3, dtype=torch.float64)
        before = total._version
        result = function(x, total)
        assert total._version == before
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert torch.equal(gradient, torch.ones(3, dtype=torch.float64))


def test_a_result_whose_graph_is_freed(tmp_path: Path) -> None:
    def freed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return y, gradient

    call = loaded(freed, vectors(1), tmp_path)
    for function in (freed, call):
        y, gradient = function(*vectors(1))
        assert y.requires_grad and not gradient.requires_grad
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ties", [{"output": 9, "results": [], "inputs": []}]),
        ("ties", [{"output": 1, "results": [9], "inputs": []}]),
        ("ties", [{"output": 1, "results": [0], "inputs": [0]}]),
        ("ties", [{"output": 1, "results": [1], "inputs": []}]),
        ("ties", [{"output": 1, "results": [0], "inputs": []}, {"output": 0, "results": [1], "inputs": []}]),
        ("freed_together", [[0]]),
        ("freed_together", [[0], [7]]),
    ],
)
def test_made_up_ties_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    dovetail.capture(chain, tuple(vectors(1))).export(tmp_path / "good")
    payload, tensors = read_artefact(tmp_path / "good")
    changed = json.loads(json.dumps(payload))
    changed["spec"][field] = value
    write_artefact(tmp_path / "bad", changed, tensors)
    with pytest.raises(ArtefactError):
        dovetail.load(tmp_path / "bad")


def branches(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
    return (second.sin() * third).sum() + (first * second.exp()).sum() + third.sum()


def _order_of_hooks(call: Callable[..., Any]) -> list[int]:
    inputs, found = vectors(3), []
    for number, item in enumerate(inputs):
        item.register_hook(lambda gradient, number=number: found.append(number))
    call(*inputs).backward()
    return found


def test_leaves_get_their_gradients_in_the_order_of_eager(tmp_path: Path) -> None:
    assert _order_of_hooks(loaded(branches, vectors(3), tmp_path)) == _order_of_hooks(branches)


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3]])
def test_a_made_up_order_is_refused(order: list[int], tmp_path: Path) -> None:
    dovetail.capture(branches, tuple(vectors(3))).export(tmp_path / "step")
    document, tensors = read_artefact(tmp_path / "step")
    document["spec"]["arrangement"] = order
    write_artefact(tmp_path / "changed", document, tensors)
    with pytest.raises(ArtefactError, match="in which order"):
        dovetail.load(tmp_path / "changed")
