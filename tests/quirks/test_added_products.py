"""Products that are added to their own result: ``torch.addmm(total, a, b, out=total)``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dovetail

pytestmark = pytest.mark.usefixtures("quiet")
A, B = torch.arange(12.0).reshape(3, 4), torch.arange(20.0).reshape(4, 5)
BATCH = A.expand(2, 3, 4), B.expand(2, 4, 5)


@pytest.mark.parametrize(
    ("function", "operands", "shape"),
    [
        (torch.addmm, (A, B), (3, 5)),
        (torch.addmv, (A, B[:, 0]), (3,)),
        (torch.addr, (A[:, 0], B[0]), (3, 5)),
        (torch.addbmm, BATCH, (3, 5)),
        (torch.baddbmm, BATCH, (2, 3, 5)),
    ],
)
def test_the_sum_is_eagers(function: Any, operands: tuple[torch.Tensor, ...], shape: tuple[int, ...]) -> None:
    def program(total: torch.Tensor) -> torch.Tensor:
        function(total, *operands, beta=0.5, alpha=2, out=total)
        return total

    compiled, eager = torch.ones(shape), torch.ones(shape)
    for _ in range(2):
        assert dovetail.compile(program, backend="aten", fullgraph=True)(compiled) is compiled
        assert torch.equal(compiled, program(eager)) and compiled._version == eager._version


def test_a_factor_is_not_written_to() -> None:
    def program(total: torch.Tensor) -> torch.Tensor:
        return torch.addmm(torch.ones(3, 3), total, total, out=total)

    with pytest.raises(dovetail.errors.DovetailError, match="memory that it also reads"):
        dovetail.compile(program, backend="aten", fullgraph=True)(torch.ones(3, 3))
