"""Sparse tensors as arguments, closures and results: calls that are given one stay whole, all else is as in eager or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import DovetailError, GraphBreakError, HigherOrderGradientError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta:UserWarning")
LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def made(layout: torch.layout, requires_grad: bool = True, seed: int = 0) -> torch.Tensor:
    """A square sparse matrix."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(4, 4, dtype=torch.float64, generator=generator)
    dense = dense * (torch.rand(4, 4, generator=generator) > 0.4)
    sparse = dense.to_sparse(layout=layout)
    if layout is torch.sparse_coo:
        sparse = sparse.coalesce()
    return sparse.requires_grad_(requires_grad)


def dense(value: Any) -> Any:
    """The numbers of a result, with its layout."""
    if isinstance(value, torch.Tensor):
        return str(value.layout), value.requires_grad, value.detach().to_dense()
    if isinstance(value, (tuple, list)):
        return [dense(item) for item in value]
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two results agree to the last bit."""
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def seen(function: Callable[..., Any], layout: torch.layout, requires_grad: bool = True, seed: int = 0) -> Any:
    """The results, and all gradients."""
    x = made(layout, requires_grad, seed)
    y = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    result = function(x, y)
    roots = [item for item in (result if isinstance(result, tuple) else (result,)) if isinstance(item, torch.Tensor)]
    roots = [item for item in roots if item.requires_grad and item.grad_fn is not None]
    gradients: tuple[Any, ...] = ()
    if roots:
        tangents = [torch.ones_like(item) for item in roots]
        gradients = torch.autograd.grad(roots, [x, y] if requires_grad else [y], tangents, allow_unused=True)
    return dense([result, gradients, x])


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(x, y.sin()).exp()


def method(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.to_dense() @ y + x.shape[0]


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scaled = x.mul(2.0)
    assert isinstance(x, torch.Tensor) and scaled.layout is x.layout
    return torch.mm(scaled, y * y)


def sparse_result(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.mul(x, 3.0), y.cos()


def untouched(x: torch.Tensor, y: torch.Tensor) -> Any:
    return [x, y.sin().detach()]


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("program", [product, method, chain, sparse_result, untouched])
def test_as_eager_in_one_graph(program: Any, layout: torch.layout, requires_grad: bool) -> None:
    try:
        expected = [seen(program, layout, requires_grad, seed) for seed in (0, 5)]
    except RuntimeError as error:
        pytest.skip(f"eager cannot: {str(error)[:80]}")
    compiled = dovetail.compile(program, backend="aten", fullgraph=True)
    # Another number of elements is no other entry.
    assert same([seen(compiled, layout, requires_grad, seed) for seed in (0, 5)], expected)
    assert len(compiled.entries) == 1


def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, y) + torch.mm(x, y.sin())


def bound(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.mT.matmul(x)


def operators(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y) * 2


def its_values(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.values() * y.sum()


def counted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y * x._nnz()


def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.detach().mul_(2.0)
    return torch.mm(x, y)


def used_and_returned(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = torch.mul(x, 2.0)
    return torch.mm(scaled, y), scaled


def after_a_break(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scaled = torch.mul(x, 2.0)
    print(end="")
    return torch.mm(scaled, y)


def caught(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    try:
        return torch.mm(x, y[:2])
    except RuntimeError:
        return y.sin()


def compared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, y) if x is not None and hasattr(x, "to_dense") and type(x) is torch.Tensor else y


def itself(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    moved = x.to(torch.float64)
    return moved, moved is x, y.sin()


def detached(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    return x.detach(), y * x.size(0) * x.dim()


def required(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    x.requires_grad_()
    return torch.mm(x, y), x.requires_grad


def attribute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.note = "kept"  # type: ignore[attr-defined]
    return torch.mm(x, y)


def as_key(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return {x: y}[x].sin()


def as_text(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    return y.sin(), f"{x.shape} {len(str(x)) > 80}"


def inside_gradient(x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.autograd.grad(torch.mm(x, y).sum(), [x, y], allow_unused=True)[1]


def listed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return sum((torch.mm(item, y) for item in [x, x.clone()][:1]), torch.zeros(4, 3, dtype=torch.float64))


def transposed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.t(), y)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "program",
    [
        bound,
        itself,
        detached,
        required,
        attribute,
        as_key,
        as_text,
        inside_gradient,
        listed,
        transposed,
        twice,
        operators,
        its_values,
        counted,
        written,
        used_and_returned,
        after_a_break,
        caught,
        compared,
    ],
)
@pytest.mark.sampled(8)
def test_as_eager_or_refused(program: Any, layout: torch.layout, requires_grad: bool) -> None:
    try:
        expected = seen(program, layout, requires_grad)
    except RuntimeError as error:
        pytest.skip(f"eager cannot: {str(error)[:80]}")
    compiled = dovetail.compile(program, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            try:
                found = seen(compiled, layout, requires_grad)
            except DovetailError:
                continue
            assert same(found, expected)


def test_a_graph_network_trains_on_a_sparse_adjacency_matrix() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", made(torch.sparse_csr, False))
            self.linear = torch.nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.adjacency, self.linear(torch.sparse.mm(self.adjacency, x)).relu())

    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = Layer()
        model = dovetail.compile(layer, backend="aten", fullgraph=True) if compiled else layer
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(torch.ones(4, 3, dtype=torch.float64)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append((loss.detach(), *[parameter.detach().clone() for parameter in layer.parameters()]))
    assert all(map(torch.equal, *found))


def test_a_sparse_parameter_gets_a_sparse_gradient() -> None:
    found = []
    for wrap in (lambda item: item, lambda item: dovetail.compile(item, backend="aten", fullgraph=True)):
        weight = torch.nn.Parameter(made(torch.sparse_coo, False))
        step = wrap(lambda y, weight=weight: torch.sparse.mm(weight, y).sum())
        for _ in range(2):
            step(torch.ones(4, 3, dtype=torch.float64)).backward()
        found.append(weight.grad)
    assert found[0].layout is found[1].layout is torch.sparse_coo
    assert torch.equal(found[0].to_dense(), found[1].to_dense())


def test_a_dense_gradient_of_a_sparse_result() -> None:
    def sampled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sparse.sampled_addmm(x, y, y.mT, beta=0.5)

    found = []
    for function in (sampled, dovetail.compile(sampled, backend="aten", fullgraph=True)):
        x, y = made(torch.sparse_csr), torch.ones(4, 3, dtype=torch.float64)
        result = function(x, y)
        found.append(torch.autograd.grad(result, x, torch.ones_like(result).to_dense()))
    assert same(dense(found[0]), dense(found[1]))


def test_a_write_between_forward_and_backward_is_eager_s_error() -> None:
    for function in (product, dovetail.compile(product, backend="aten", fullgraph=True)):
        x, y = made(torch.sparse_coo, False), torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
        result = function(x, y)
        x.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_the_second_derivative_is_refused_by_name() -> None:
    compiled = dovetail.compile(product, backend="aten", fullgraph=True)
    x, y = made(torch.sparse_coo), torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(x, y).sum(), y, create_graph=True)
    with pytest.raises(HigherOrderGradientError, match="sparse"):
        gradient.sum().backward()


def test_another_layout_is_another_entry() -> None:
    compiled = dovetail.compile(product, backend="aten", fullgraph=True)
    for layout in (*LAYOUTS[:2], *LAYOUTS[:2]):
        assert same(seen(compiled, layout), seen(product, layout))
    assert len(compiled.entries) == 2


def test_two_gradients_of_one_sparse_tensor_are_refused_by_name() -> None:
    with pytest.raises(GraphBreakError, match="used more than once"):
        seen(dovetail.compile(twice, backend="aten", fullgraph=True), torch.sparse_coo)


def test_a_dense_tensor_in_the_memory_of_a_sparse_one_is_written_to() -> None:
    def written(x: torch.Tensor, values: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values.mul_(2.0)
        return torch.mm(x, y)

    for together_first in (True, False):
        compiled = dovetail.compile(written, backend="aten")
        for together in (together_first, not together_first):
            found = []
            for function in (written, compiled):
                x, y = made(torch.sparse_csr, False), torch.ones(4, 3, dtype=torch.float64)
                values = x.values() if together else x.values().clone()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found.append([function(x, values, y), values, x.to_dense()])
            assert all(map(torch.equal, *found))


def test_a_step_that_writes_to_parameters_is_one_graph_beside_a_sparse_input() -> None:
    """Whether an input shares the memory that a graph writes to is asked while it is captured."""
    adjacency, x = made(torch.sparse_coo, requires_grad=False), torch.randn(4, 3, dtype=torch.float64)

    def trained(compiler: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2, dtype=torch.float64)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step() -> tuple[float, torch.Tensor]:
            optimizer.zero_grad()
            loss = torch.spmm(adjacency, layer(x)).square().sum()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                return loss.item(), torch.spmm(adjacency, layer(x))

        call = compiler(step)
        return [*(call() for _ in range(3)), layer.weight.detach(), layer.weight.grad]

    compiled = trained(lambda step: dovetail.compile(step, backend="aten", fullgraph=True))
    assert same(compiled, trained(lambda step: step))


def test_sparse_gradients_are_read_and_set() -> None:
    """A sparse ``.grad`` of an input breaks the graph; the program saw a TypeError of the capture."""

    def read(weight: torch.Tensor, gradient: torch.Tensor) -> Any:
        try:
            return weight.grad
        except TypeError as error:
            return error

    def write(weight: torch.Tensor, gradient: torch.Tensor) -> Any:
        try:
            weight.grad = gradient
        except TypeError as error:
            return error
        weight.backward(torch.ones(4, 4, dtype=torch.float64))
        return weight.grad

    for function in (read, write):
        results = []
        for one in (function, dovetail.compile(function, backend="aten")):
            weight = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
            weight.grad = made(torch.sparse_coo, requires_grad=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results.append(one(weight, made(torch.sparse_coo, requires_grad=False, seed=1)))
        assert same(*map(dense, results))
