"""Results that are written to before a backward from another one: eager asks only the nodes that the backward comes to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail
from dovetail.backends import register_backend
from dovetail.backends.registry import unregister_backend
from dovetail.versions import parse

Tensor = torch.Tensor

PROGRAMS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "one from the other": lambda x: ((y := x * 2), y.exp()),
    "a square": lambda x: ((y := x.exp()), y * y),
    "one result in both": lambda x: ((y := x.sigmoid()), y + 1, y.relu()),
    "features": lambda x: ((h := x * 2), h.relu(), h @ h.t()),
    "probabilities and a loss": lambda x: (x.softmax(-1), x.log_softmax(-1)[:, 0].mean()),
    "a root": lambda x: ((y := x.sqrt()), y.exp()),
    "a view and its base": lambda x: ((y := x.exp()), y.t(), (y[0] * y[1]).sum()),
    "two layers": lambda x: ((h := (x @ x.t()).relu()), (h @ x).relu()),
    "a quotient": lambda x: ((y := x * 2), y / (y + 2)),
    "a product with a copy": lambda x: ((y := x.exp()), y.clone().mul_(y)),
    "results of results": lambda x: ((y := x.sin()), (z := y + 2), (z * y).sum(), z.t() / y.t()),
    "an input": lambda x: (x, x / (x + 2)),
    "a view of an input": lambda x: (x.t(), (x / (x + 2)).sum()),
}
HOW = ("without recording", "recorded", "past a detach", "past autograd")


def write(tensor: Tensor, how: str) -> None:
    if how == "without recording":
        with torch.no_grad():
            tensor.mul_(2)
    elif how == "recorded":
        tensor.mul_(2)
    elif how == "past a detach":
        tensor.detach().zero_()
    else:
        tensor.data.mul_(3)


def outcome(run: Callable[[Tensor], tuple[Tensor, ...]], written: int, how: str, root: int) -> Any:
    x = torch.linspace(0.1, 1, 6).reshape(2, 3).requires_grad_()
    given = x * 1
    results = run(given)
    try:
        write(results[written] if written >= 0 else given, how)
        results[root].sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return "refused"
    assert x.grad is not None
    return x.grad


#: Programs of which Inductor would rather compute again what eager has saved, or whose results share memory.
ON_INDUCTOR = ("a square", "one result in both", "a view and its base", "two layers", "a quotient")
BACKENDS = {"aten": PROGRAMS, "computes again": PROGRAMS, "inductor": ON_INDUCTOR}


@pytest.fixture(autouse=True)
def _computes_again() -> Iterator[None]:
    """A backend that computes again what is cheap, like one that fuses, with eager's kernels."""

    def keep(graph: torch.fx.GraphModule, inputs: Any, *, kind: str, options: Any) -> Callable[[list[Any]], list[Any]]:
        return lambda values: list(graph(*values))

    register_backend("computes again", keep, tolerances=(1e-6, 1e-6))
    yield
    unregister_backend("computes again")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("backend", "name"), [(backend, name) for backend, names in BACKENDS.items() for name in names]
)
@pytest.mark.once("inductor")
def test_a_result_is_written_to_before_a_backward(name: str, backend: str) -> None:
    program = PROGRAMS[name]
    compiled = dovetail.compile(program, backend=backend, fullgraph=True, tiers="wait")
    places = range(len(program(torch.ones(2, 3))))
    # -1 is the input. What a backend that computes values again reads of one after a write past autograd is a limit.
    for written, root, how in itertools.product([*places, -1] if backend == "aten" else places, places, HOW):
        found, expected = outcome(compiled, written, how, root), outcome(program, written, how, root)
        if found == "refused" and parse(torch.__version__) < (2, 12):
            continue  # there, a node's saved values can only be read, and checked, together
        if backend == "aten" or isinstance(expected, str) or isinstance(found, str):
            assert same(found, expected), (written, root, how)
        else:
            torch.testing.assert_close(found, expected)


def same(one: Tensor | str, other: Tensor | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return isinstance(one, str) and isinstance(other, str) and one == other
    return torch.equal(one, other)


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_no_write_to_a_result_has_been_counted(backend: str) -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        return x @ x, (x @ x).relu(), x.t() + 1

    compiled = dovetail.compile(program, backend=backend, fullgraph=True, tiers="wait")
    for requires_grad in (False, True, True):
        x = torch.linspace(0, 1, 9).reshape(3, 3).requires_grad_(requires_grad)
        assert [result._version for result in compiled(x)] == [0, 0, 0]


def test_a_write_is_still_seen_by_a_second_derivative() -> None:
    compiled = dovetail.compile(PROGRAMS["one result in both"], backend="aten", fullgraph=True)
    x = torch.linspace(0.1, 1, 6).reshape(2, 3).requires_grad_()
    first, _, last = compiled(x * 1)
    write(last, "without recording")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(first.sum(), x, create_graph=True)
