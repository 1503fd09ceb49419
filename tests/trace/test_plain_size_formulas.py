"""Functions of torch whose C++ asks for plain sizes, as formulas or as one call: two graphs, and eager's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import dovetail
from tests.differential import same
from tests.trace.test_shapes import run
from tests.trace.test_sized_calls import captures, step

SIZES = ((3, 16), (4, 18), (5, 21), (6, 30))
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
    "kron": (two_tables, torch.kron),
    "kron of other ranks": (two_tables, lambda x, y: torch.kron(y, x[0])),
    "block_diag": (two_tables, lambda x, y: torch.block_diag(x, y, x * 2)),
    "affine_grid": (images, lambda x, y: functional.affine_grid(x, y.shape, align_corners=False)),
    "affine_grid to the corners": (images, lambda x, y: functional.affine_grid(x, list(y.size()), align_corners=True)),
    "gradient": (table, lambda x: torch.gradient(x, dim=-1)),
    "gradient of two dimensions": (table, lambda x: torch.gradient(x, spacing=0.3)),
    "gradient with better edges": (table, lambda x: torch.gradient(x, spacing=2.5, edge_order=2)),
    "linspace": (table, lambda x: x * torch.linspace(0, 1, x.shape[1]) + torch.linspace(-1.0, 2, steps=x.shape[1])),
    "logspace": (table, lambda x: x * torch.logspace(0, 1, x.shape[1], base=2.0, dtype=torch.float64)),
    "stft": (table, transformed),
    "stft of one signal": (table, lambda x: transformed(x[0], hop_length=3, normalized=True, pad_mode="constant")),
    "stft without borders": (table, lambda x: transformed(x, center=False, onesided=False)),
    "istft": (
        spectrum,
        lambda x: torch.istft(torch.view_as_complex(x), 8, window=torch.hann_window(8)),
    ),
    "stft and istft": (table, there_and_back),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_for_all_sizes(name: str) -> None:
    make, function = CALLS[name]
    torch.manual_seed(0)

    def program(*tensors: torch.Tensor) -> Any:
        return function(*tensors)

    assert run(program, [make(*size) for size in SIZES]) == 2


class Steps(torch.nn.Module):
    """Three steps of a recurrent cell."""

    def __init__(self, cell: torch.nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> Any:
        state = None
        for at in range(3):
            state = self.cell(x[at], state)
        return state


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.GRUCell(4, 5),
        lambda: torch.nn.GRUCell(4, 5, bias=False),
        lambda: torch.nn.LSTMCell(4, 5),
        lambda: torch.nn.LSTMCell(4, 5, bias=False),
        lambda: torch.nn.RNNCell(4, 5),
        lambda: torch.nn.RNNCell(4, 5, nonlinearity="relu"),
    ],
)
def test_a_recurrent_cell_has_one_graph_for_all_sizes(make: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    module = Steps(make())
    twin = copy.deepcopy(module)
    compiled = dovetail.compile(twin, backend="aten", fullgraph=True)
    for rows, _ in SIZES:
        x = torch.randn(3, rows, 4)
        same(step(module, module, x), step(compiled, twin, x))
    assert captures(compiled) == 2


def test_what_eager_refuses_is_refused_at_symbolic_sizes() -> None:
    def program(x: torch.Tensor) -> Any:
        return torch.stft(x, 8, return_complex=True)

    compiled = dovetail.compile(program, backend="aten", dynamic=True)
    same(program(x := torch.randn(2, 9)), compiled(x))
    for function in (program, compiled):
        with pytest.raises(RuntimeError, match=r"[Pp]adding size"):
            function(torch.randn(2, 3))
