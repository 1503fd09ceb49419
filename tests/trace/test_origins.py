"""Assumptions about sizes that are made below the frontend must reach the guards; without them an answer would be wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail
from dovetail.backends import Backend
from dovetail.backends.aten import compile_aten
from dovetail.reports.explanation import compiled_function
from tests.differential import entries_of, randn


class BackwardLooksAtSize(torch.autograd.Function):
    """The gradient of small batches is another one than that of large ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Twice the input."""
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Depends on the batch."""
        (x,) = ctx.saved_tensors
        return gradient * 2 if x.shape[0] > 10 else gradient * 3


def _gradient(function: Any, size: int) -> torch.Tensor:
    x = randn(size, 2, grad=True)
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad


def _assumptions(compiled: Any) -> str:
    shapes = [entry.checker.guards.shapes for entry in compiled_function(compiled).entries]
    return "\n".join(f"{text} {place}" for item in shapes if item is not None for text, place, _ in item.sentences)  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_backward_branches_on_a_size(backend: str) -> None:
    def run(x: Any) -> Any:
        return BackwardLooksAtSize.apply(x).sin()

    compiled = dovetail.compile(run, backend=backend, fullgraph=True)
    for size in (8, 6, 16, 20, 4, 11, 10):
        torch.testing.assert_close(_gradient(compiled, size), _gradient(run, size))
    assert entries_of(compiled) == 3
    assert "L['x'].shape[0] <= 10" in _assumptions(compiled) and "L['x'].shape[0] > 10" in _assumptions(compiled)
    assert "test_origins.py" in _assumptions(compiled)


def test_backward_branch_without_its_guard_would_be_wrong() -> None:
    def run(x: Any) -> Any:
        return BackwardLooksAtSize.apply(x)

    compiled = dovetail.compile(run, backend="aten", fullgraph=True)
    _gradient(compiled, 8)
    _gradient(compiled, 6)
    entry = compiled_function(compiled).entries[0]
    x = randn(16, 2, grad=True)
    assert entry.checker.check(run, (x,), {}) is None
    # The entry's own code, run past its guards, gives the gradient of a small batch.
    (result,) = entry.run([x])  # type: ignore[misc]
    result.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0)) and torch.equal(_gradient(run, 16), torch.full_like(x, 2.0))  # type: ignore[arg-type]


def test_decomposition_branches_on_a_size() -> None:
    seen: list[int] = []

    def decomposed(x: torch.Tensor) -> torch.Tensor:
        # Three rows at a time, written out: a graph for one number of rows is wrong for another one.
        rows = [torch.ops.aten.exp.default(x.select(0, index)) for index in range(int(x.shape[0] // 3))]
        seen.append(len(rows))
        return torch.ops.aten.cat.default(
            [torch.ops.aten.stack.default(rows), torch.ops.aten.slice.Tensor(x, 0, len(rows))]
        )

    backend = Backend("sized", compile_aten, decompositions=lambda: {torch.ops.aten.sigmoid.default: decomposed})

    def expected(x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0] // 3
        return torch.cat([x[:count].exp(), x[count:]])

    compiled = dovetail.compile(lambda x: torch.sigmoid(x), backend=backend, fullgraph=True)
    for size in (6, 9, 12, 10, 13, 9, 7):
        x = randn(size, 2)
        assert torch.equal(compiled(x), expected(x)), size
    assert sorted(seen) == [2, 2, 3, 4]


def test_backend_assumption_is_a_guard() -> None:
    """A backend that writes code for sizes on one side of a threshold."""

    def compile_for_small(graph: Any, example_inputs: Any, *, kind: str, options: Any) -> Any:
        run = compile_aten(graph, example_inputs, kind=kind, options=options)  # type: ignore[arg-type]
        (tensor,) = [item for item in example_inputs if isinstance(item, torch.Tensor)]
        is_small = bool(tensor.shape[0] <= 10)

        def call(values: list[Any]) -> list[Any]:
            (value,) = [item for item in values if isinstance(item, torch.Tensor)]
            assert (value.shape[0] <= 10) is is_small, "this code is for other sizes"
            return run(values)

        return call

    backend = Backend("thresholds", compile_for_small)
    compiled = dovetail.compile(lambda x: x * 2, backend=backend, fullgraph=True)
    for size in (8, 6, 16, 20, 4, 11, 10):
        assert torch.equal(compiled(randn(size)), randn(size) * 2)
    assert entries_of(compiled) == 3
    assert "at most 10" in _assumptions(compiled)


@pytest.mark.slow
def test_inductor_assumption_is_a_guard() -> None:
    """Inductor's kernel for a small reduction is for sizes below a bound; a call above it must not use that kernel."""

    def run(x: Any) -> Any:
        return x.exp().sum(0), x.softmax(0)

    compiled = dovetail.compile(run, backend="inductor", fullgraph=True)
    for size in (8, 6, 7):
        torch.testing.assert_close(compiled(randn(size, 3)), run(randn(size, 3)))
    before = entries_of(compiled)
    for size in (5000, 2**15 + 1, 3):
        torch.testing.assert_close(compiled(randn(size, 3)), run(randn(size, 3)), rtol=1e-4, atol=1e-4)
    assert entries_of(compiled) > before


@pytest.mark.slow
def test_inductor_assumption_survives_inductors_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code found in Inductor's cache brings its assumptions along: it was seen to be used for sizes it was not made for."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def run(x: Any) -> Any:
        return x.exp().sum(0), x.softmax(0)

    for attempt in range(2):
        compiled = dovetail.compile(run, backend="inductor", fullgraph=True)
        for size in (8, 6, 5000, 7):
            torch.testing.assert_close(compiled(randn(size, 3)), run(randn(size, 3)), rtol=1e-4, atol=1e-4)
        assert "at most 4096" in _assumptions(compiled), f"attempt {attempt}"
        assert entries_of(compiled) == 3
