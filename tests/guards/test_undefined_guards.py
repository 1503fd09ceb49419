"""Guards whose arithmetic is not defined at some sizes."""

from __future__ import annotations

import torch

import dovetail


def test_a_remainder_by_a_size_that_is_zero_at_another_call() -> None:
    def blocks(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        width = y.shape[0] // 3
        if width and x.shape[0] % width == 0:
            return x.view(-1, width).sum(0).sum() * y.sum()
        return x.sum() - y.sum()

    compiled = dovetail.compile(blocks, backend="aten", fullgraph=True)
    for rows, others in ((12, 6), (20, 12), (24, 9), (8, 2), (9, 2), (7, 6), (25, 15), (0, 2)):
        x, y = torch.randn(rows), torch.randn(others)
        assert torch.equal(compiled(x, y), blocks(x, y)), (rows, others)


def test_a_check_that_divides_by_zero_does_not_hold() -> None:
    def by_blocks(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.view(-1, y.shape[0] // 3).sum() * y.sum()

    compiled = dovetail.compile(by_blocks, backend="aten")
    for rows, others in ((12, 6), (20, 12)):
        compiled(torch.ones(rows), torch.ones(others))
    x, y = torch.ones(8), torch.ones(2)
    checker = compiled.entries[0].checker
    assert checker.check(by_blocks, (x, y), {}) is None
    assert checker.explain(by_blocks, (x, y), {})
