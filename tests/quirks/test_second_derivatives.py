"""Second derivatives of operators whose first one torch traces in another way than eager computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail


def eigh(x: torch.Tensor, y: torch.Tensor) -> Any:
    values, vectors = torch.linalg.eigh(x + x.mT, UPLO="U")
    return values, vectors.abs() * y


def eig(x: torch.Tensor, y: torch.Tensor) -> Any:
    values, vectors = torch.linalg.eig(x)
    return values, vectors.abs() * y


def scatter_prod(x: torch.Tensor, y: torch.Tensor) -> Any:
    index = torch.tensor([[0, 1, 1, 0], [2, 2, 3, 3], [0, 0, 0, 1], [3, 2, 1, 0]])
    return (x.sin().scatter_reduce(0, index, y, reduce="prod"),)


def index_prod(x: torch.Tensor, y: torch.Tensor) -> Any:
    return (torch.index_reduce(x, 0, torch.tensor([0, 1, 1, 3]), y, "prod", include_self=False),)


def derivatives(function: Callable[..., Any], order: int, holes: bool) -> list[torch.Tensor | None]:
    """The outputs' gradients of every order up to this one."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    if holes:
        y[1, 2] = 0
    leaves = [x.requires_grad_(), y.requires_grad_()]
    current = [item for item in function(*leaves) if item.requires_grad]
    found: list[torch.Tensor | None] = []
    for _ in range(order):
        tangents = [torch.randn(item.shape, dtype=item.dtype, generator=generator).requires_grad_() for item in current]
        given = torch.autograd.grad(current, leaves, tangents, create_graph=True, allow_unused=True)
        leaves += tangents
        found += given
        current = [item for item in given if item is not None and item.requires_grad]
    return found


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("order", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("program", [eigh, eig, scatter_prod, index_prod])
@pytest.mark.sampled(2)
def test_derivatives_are_eager_s(program: Any, holes: bool, order: int) -> None:
    expected = derivatives(program, order, holes)
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    for _ in range(2):
        for one, other in zip(derivatives(compiled, order, holes), expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                # Not to the last bit: autograd adds up what flows through two nodes in another order.
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("program", [eigh, eig])
def test_strides_of_a_second_derivative(program: Any) -> None:
    found = []
    for function in (program, dovetail.compile(program, backend="aten", fullgraph=True)):
        found.append([None if item is None else item.stride() for item in derivatives(function, 2, False)])
    assert found[0] == found[1]


def _eigenvectors(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eig(x)[1].sum().real


def _hermitian(x: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x, x.sin())
    return torch.linalg.eigh(z + z.mH)[1].sum().real


def _singular(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svd(torch.complex(x, x.sin()))[0].sum().real


def _inside(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(_eigenvectors(x), x)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("program", [_eigenvectors, _hermitian, _singular, _inside])
@pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")
def test_a_gradient_that_depends_on_the_phase_of_vectors_is_eager_s_error(program: Any, create_graph: bool) -> None:
    x = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    for function in (program, dovetail.compile(program, backend="aten")):
        with pytest.raises(RuntimeError, match="ill-defined"):
            torch.autograd.grad(function(x), x, create_graph=create_graph)


def _without_phase(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eig(torch.complex(x, x.sin()))[1].abs().pow(3).sum()


@pytest.mark.parametrize("order", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_parts_of_a_gradient_may_depend_on_the_phase_where_their_sum_does_not(order: int) -> None:
    x = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    found = []
    for function in (_without_phase, dovetail.compile(_without_phase, backend="aten", fullgraph=True)):
        value = function(x)
        for _ in range(order):
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = (gradient * gradient.detach().cos()).sum()
        found.append(gradient.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
