"""Gradients through sparse tensors that the function makes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail

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
