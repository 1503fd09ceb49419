"""Functions of torch whose C++ asks for plain sizes, as formulas or as one call: two graphs, and eager's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import dovetail
from tests.differential import check_calls, check_entries, compilations, same
from tests.whole_calls.test_sized_calls import step

SIZES = ((3, 16), (4, 18), (6, 21))
Make = Callable[[int, int], tuple[torch.Tensor, ...]]


def table(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, columns, requires_grad=True),)


def spectrum(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, 5, columns, 2, requires_grad=True),)


def two_tables(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    return (*table(rows, columns), torch.randn(3, 2, requires_grad=True))


def images(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, 2, 3, requires_grad=True), torch.randn(rows, 1, columns, columns + 1)


def transformed(x: torch.Tensor, **options: Any) -> torch.Tensor:
    window = torch.hann_window(8)
    return torch.view_as_real(torch.stft(x, 8, window=window, return_complex=True, **options))


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(8)
    frames = torch.stft(x, 8, 2, window=window, return_complex=True)
    return torch.istft(frames * 2, 8, 2, window=window, length=x.shape[-1])


CALLS: dict[str, tuple[Make, Callable[..., Any]]] = {
    "cov": (table, torch.cov),
    "cov of one variable": (table, lambda x: x[0].cov(correction=0)),
    "cov of complex numbers": (spectrum, lambda x: torch.view_as_real(torch.cov(torch.view_as_complex(x)[:, 0]))),
    "corrcoef": (table, lambda x: x.corrcoef()),
    "largest": (table, lambda x: x.max() * x + x.t().min()),
    "median": (table, lambda x: torch.median(x) + x.nanmedian() * x),
    "prod": (table, lambda x: x.prod() + x.prod(1)),
    "masked_fill": (two_tables, lambda x, y: x.masked_fill(x > 0, y.sum())),
    "nearest": (spectrum, lambda x: functional.interpolate(x[..., 0], size=7)),
    "nearest in three dimensions": (spectrum, lambda x: functional.interpolate(x[None], scale_factor=2)),
    "nearest-exact": (spectrum, lambda x: functional.interpolate(x[..., 0], size=7, mode="nearest-exact")),
    "tensor_split": (table, lambda x: torch.cat([part.cumsum(1) for part in x.tensor_split(3, -1)], 1)),
    "linspace": (table, lambda x: x * torch.linspace(0, 1, x.shape[1]) + torch.linspace(-1.0, 2, steps=x.shape[1])),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sampled(6)
def test_one_graph_for_all_sizes(name: str) -> None:
    make, function = CALLS[name]
    torch.manual_seed(0)

    def program(*tensors: torch.Tensor) -> Any:
        return function(*tensors)

    assert check_entries(program, [make(*size) for size in SIZES]) == 2


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_plain_cells(nonlinearity: str) -> None:
    check_calls(torch.nn.RNNCell(21, 5, nonlinearity=nonlinearity), [(torch.randn(rows, 21),) for rows, _ in SIZES])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", [{"dim": -1}, {"spacing": 0.3}, {"spacing": 2.5, "edge_order": 2}])
def test_finite_differences(settings: dict[str, Any]) -> None:
    check_calls(lambda x: torch.gradient(x, **settings), [table(*size) for size in SIZES])


class Steps(torch.nn.Module):
    """Three steps of a recurrent cell."""

    def __init__(self, cell: torch.nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> Any:
        states = [self.cell(x[0])]
        for at in range(1, 3):
            states.append(self.cell(x[at], states[-1]))
        return states


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.GRUCell(4, 5),
        lambda: torch.nn.GRUCell(4, 5, bias=False),
        lambda: torch.nn.GRUCell(4, 5, dtype=torch.float64),
        lambda: torch.nn.LSTMCell(4, 5, dtype=torch.float64),
        lambda: torch.nn.LSTMCell(4, 5),
        lambda: torch.nn.LSTMCell(4, 5, bias=False),
    ],
)
@pytest.mark.sampled(6)
def test_a_recurrent_cell_has_one_graph_for_all_sizes(make: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    module = Steps(make())
    twin = copy.deepcopy(module)
    compiled = dovetail.compile(twin, backend="aten", fullgraph=True)
    for rows, _ in SIZES:
        x = torch.randn(3, rows, 4, dtype=next(module.parameters()).dtype)
        same(step(module, module, x), step(compiled, twin, x))
    assert compilations(compiled) == 2


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (table, lambda x: x.sgn() * x),
        (table, lambda x: torch.masked_select(x, x > 0).square().sum() + x.masked_select(x[0] < 0.5).sum()),
        (two_tables, torch.kron),
        (two_tables, lambda x, y: torch.kron(y, x[0])),
        (two_tables, lambda x, y: torch.block_diag(x, y, x * 2)),
        (images, lambda x, y: functional.affine_grid(x, y.shape, align_corners=False)),
        (images, lambda x, y: functional.affine_grid(x, list(y.size()), align_corners=True)),
        (table, lambda x: torch.take_along_dim(x, x.detach()[:1, :2].argsort(1), 1)),
        (table, lambda x: x.take_along_dim(x.detach().argmax(0))),
        (table, lambda x: functional.hardshrink(x.t()) * 2),
        (table, functional.softshrink),
        (table, lambda x: functional.multi_margin_loss(x, torch.arange(x.shape[0]) % 3)),
        (table, lambda x: functional.multilabel_margin_loss(x, torch.arange(x.shape[0])[:, None].expand(x.shape) % 3)),
        (table, lambda x: x * torch.logspace(0, 1, x.shape[1], base=2.0, dtype=torch.float64)),
        (table, transformed),
        (table, lambda x: transformed(x[0], hop_length=3, normalized=True, pad_mode="constant")),
        (spectrum, lambda x: torch.istft(torch.view_as_complex(x), 8, window=torch.hann_window(8))),
        (table, there_and_back),
        (table, lambda x: (x * 1).renorm_(2, 0, 0.5) + (x * 2).polygamma_(2)),
    ],
)
@pytest.mark.sampled(12)
def test_functions_with_a_graph_for_each_size(make: Make, function: Callable[..., Any]) -> None:
    def program(*tensors: torch.Tensor) -> Any:
        return function(*tensors)

    check_calls(program, [make(*size) for size in SIZES])


def test_what_eager_refuses_is_refused_at_symbolic_sizes() -> None:
    def program(x: torch.Tensor) -> Any:
        return torch.stft(x, 8, return_complex=True)

    compiled = dovetail.compile(program, backend="aten", dynamic=True)
    same(program(x := torch.randn(2, 9)), compiled(x))
    for function in (program, compiled):
        with pytest.raises(RuntimeError, match=r"[Pp]adding size"):
            function(torch.randn(2, 3))


def test_rows_between_complex_numbers() -> None:
    def function(x: torch.Tensor) -> Any:
        rows = [torch.linspace(-1 + 1j, 1, 3), torch.linspace(0, 2j, 4), torch.logspace(0, 1j, 3)]
        return *rows, torch.linspace(torch.tensor(1j), 2, 3), torch.linspace(0, torch.tensor(2.0), 3) + x

    x = torch.ones(3)
    same(function(x), dovetail.compile(function, backend="aten", fullgraph=True)(x))
