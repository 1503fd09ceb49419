"""Gradients through sparse tensors that the function makes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from tests.differential import same

PLACES = torch.tensor([[0, 1, 2], [0, 1, 2]])
PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to_dense": lambda x, w: x.to_sparse().to_dense(),
    "to_dense of a result": lambda x, w: (x * 2).to_sparse().to_dense(),
    "to_dense of values": lambda x, w: torch.sparse_coo_tensor(PLACES, x.diagonal(), (3, 3)).to_dense(),
    "sum": lambda x, w: torch.sparse.sum(x.to_sparse(), 0).to_dense(),
    "mm": lambda x, w: torch.sparse.mm(x.to_sparse(), w),
    "matmul": lambda x, w: x.to_sparse() @ w,
    "mm of values": lambda x, w: torch.sparse.mm(torch.sparse_coo_tensor(PLACES, x.diagonal(), (3, 3)), w),
    "compressed": lambda x, w: x.to_sparse_csr().to_dense(),
    "without a gradient": lambda x, w: x.detach().to_sparse().to_dense() + x,
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_gradients_are_those_of_eager(name: str) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return PROGRAMS[name](x, w) * w + w

    def run(call: Callable[..., Any]) -> list[Tensor]:
        found = []
        for _ in range(2):
            x, w = torch.eye(3).requires_grad_(), torch.full((3, 3), 2.0, requires_grad=True)
            result = call(x, w)
            result.sum().backward()
            assert x.grad is not None and w.grad is not None
            found += [result.detach(), x.grad.to_dense(), w.grad]
        return found

    assert all(map(torch.equal, run(dovetail.compile(program, backend="aten")), run(program)))


ENTRIES: dict[str, Callable[[Tensor], Any]] = {
    "_values": lambda x: x.to_sparse()._values() * 2,
    "_indices": lambda x: x.to_sparse()._indices() + 1,
    "values": lambda x: x.to_sparse().coalesce().values().sum(),
    "indices of a sum": lambda x: (x.to_sparse() + x.T.to_sparse()).coalesce().indices(),
    "_nnz": lambda x: x.to_sparse()._nnz() * x,
    "unbound": lambda x: torch.Tensor.values(x.to_sparse()) + 1,
    "merged places": lambda x: torch.sparse_coo_tensor(PLACES * 0, x.diagonal(), (3, 3)).coalesce()._values(),
    "of values": lambda x: torch.sparse_coo_tensor(PLACES, x.diagonal(), (3, 3))._values() * 2,
    "in the middle": lambda x: torch.mm(x.to_sparse(), x) * x.to_sparse()._nnz(),
}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.filterwarnings("ignore")
def test_how_many_entries_there_are_is_asked_of_the_data(name: str) -> None:
    compiled = dovetail.compile(ENTRIES[name], backend="aten")
    for x in (torch.eye(3), torch.tensor([[0.0, 1, 0], [2, 0, 3], [0, 0, 4]]), torch.zeros(3, 3)):
        same(ENTRIES[name](x), compiled(x))
