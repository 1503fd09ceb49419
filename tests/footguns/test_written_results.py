"""Results that are written to before a backward from another one: eager asks only the nodes that the backward comes to."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

Tensor = torch.Tensor

PROGRAMS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "one from the other": lambda x: ((y := x * 2), y.exp()),
    "a square": lambda x: ((y := x.exp()), y * y),
    "one result in both": lambda x: ((y := x.sigmoid()), y + 1, y.relu()),
    "features": lambda x: ((h := x * 2), h.relu(), h @ h.t()),
    "probabilities and a loss": lambda x: (x.softmax(-1), x.log_softmax(-1)[:, 0].mean()),
}


def write(tensor: Tensor, how: str) -> None:
    if how == "without recording":
        with torch.no_grad():
            tensor.mul_(2)
    elif how == "recorded":
        tensor.mul_(2)
    else:
        tensor.detach().zero_()


def outcome(run: Callable[[Tensor], tuple[Tensor, ...]], written: int, how: str, root: int) -> Any:
    x = torch.linspace(0.1, 1, 6).reshape(2, 3).requires_grad_()
    results = run(x * 1)
    write(results[written], how)
    try:
        results[root].sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return "refused"
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_result_is_written_to_before_a_backward(name: str) -> None:
    program = PROGRAMS[name]
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    places = range(len(program(torch.ones(2, 3))))
    for written, root, how in itertools.product(places, places, ("without recording", "recorded", "past a detach")):
        assert outcome(compiled, written, how, root) == outcome(program, written, how, root), (written, root, how)


def test_a_write_is_still_seen_by_a_second_derivative() -> None:
    compiled = dovetail.compile(PROGRAMS["one result in both"], backend="aten", fullgraph=True)
    x = torch.linspace(0.1, 1, 6).reshape(2, 3).requires_grad_()
    first, _, last = compiled(x * 1)
    write(last, "without recording")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(first.sum(), x, create_graph=True)
