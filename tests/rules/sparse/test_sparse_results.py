"""Sparse results: a graph has compressed ones only; a call that returns one in coordinates runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import dovetail
from dovetail.errors import GraphBreakError


def of_an_input(x: torch.Tensor) -> torch.Tensor:
    return x.to_sparse()


def of_a_result(x: torch.Tensor) -> torch.Tensor:
    return x.sin().to_sparse(1)


def beside_others(x: torch.Tensor) -> dict[str, torch.Tensor]:
    doubled = x * 2
    return {"sparse": doubled.to_sparse(), "sum": doubled.sum(), "input": x}


def under_no_grad(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        found = x.to_sparse()
    return found, x.exp()


def of_a_view(x: torch.Tensor) -> torch.Tensor:
    return x.t().to_sparse()


def seen(function: Callable[..., Any]) -> list[Any]:
    """Results, first and second derivatives."""
    x = torch.tensor([[0.0, 1.5, 0.0], [2.5, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    leaves = tree_leaves(function(x))
    found: list[Any] = [(value.layout, value.requires_grad, value.shape) for value in leaves]
    dense = [value if value.layout is torch.strided else value.to_dense() for value in leaves]
    roots = [value.square().sum() for value in dense if value.requires_grad]
    (first,) = torch.autograd.grad(sum(roots), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return [found, *dense, first, second]


PROGRAMS = [of_an_input, of_a_result, beside_others, under_no_grad, of_a_view]


@pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda it: it.__name__)
def test_as_eager(program: Any) -> None:
    compiled = dovetail.compile(program, backend="aten")
    for _ in range(2):
        (facts, *expected), (others, *found) = seen(program), seen(compiled)
        assert facts == others
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)


def written_afterwards(x: torch.Tensor) -> torch.Tensor:
    doubled = x * 2
    found = doubled.to_sparse()
    doubled.zero_()
    return found


def beside_what_it_was_made_from(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    doubled = x * 2
    return doubled.view(-1), doubled.to_sparse()


def from_two(x: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0], [1]]), x[0, :1], (2, 2))


def compressed(x: torch.Tensor) -> torch.Tensor:
    return x.to_sparse_csr()


def compressed_by_its_layout(x: torch.Tensor) -> torch.Tensor:
    return x.to_sparse(layout=torch.sparse_csc)


@pytest.mark.parametrize(
    "program", [*PROGRAMS, written_afterwards, beside_what_it_was_made_from, from_two], ids=lambda it: it.__name__
)
def test_one_graph_is_refused(program: Any) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(GraphBreakError):
        dovetail.compile(program, backend="aten", fullgraph=True)(x)
    with pytest.warns(dovetail.errors.EagerFallbackWarning):
        results = dovetail.compile(program, backend="aten")(x)
    for one, other in zip(*map(tree_leaves, (results, program(x))), strict=True):
        assert torch.equal(one.to_dense(), other.to_dense())


def used(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.sin().to_sparse_csr(), x.mT)


@pytest.mark.parametrize("program", [compressed, compressed_by_its_layout, used])
def test_compressed_layouts_are_made_inside_of_the_graph(program: Any) -> None:
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for shift in (0.0, 1.0):
        found = []
        for function in (program, compiled):
            x = (torch.arange(6.0).view(2, 3) - shift).requires_grad_()
            result = function(x)
            (gradient,) = torch.autograd.grad(result.to_dense().exp().sum(), x)
            found.append((str(result.layout), result.detach().to_dense(), gradient.to_dense()))
        assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1:], found[1][1:]))
