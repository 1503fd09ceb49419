"""Kernels that call operators which autocast casts: the tracer sees one operator, so the graph is broken there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import dovetail
from tests.differential import same

WEIGHT = torch.linspace(-1, 1, 30).sin().reshape(2, 3, 5)
PROGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "bilinear": lambda x, y: functional.bilinear(x, y, WEIGHT),
    "module": torch.nn.Bilinear(3, 5, 2),
    "pseudoinverse": lambda x, y: torch.linalg.pinv(x).float() @ x,
    "pinverse": lambda x, y: x.pinverse() @ torch.pinverse(y).t(),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.filterwarnings("ignore::dovetail.errors.GraphBreakWarning")
def test_parts_of_a_kernel_are_cast_as_in_eager(name: str, casts: bool) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
            result = PROGRAMS[name](x * 2, y)
        return result.exp()

    def outcome(function: Any) -> Any:
        x = torch.arange(12.0).sin().reshape(4, 3).requires_grad_(name in ("bilinear", "module"))
        result = function(x, torch.arange(20.0).cos().reshape(4, 5))
        return result.detach(), torch.autograd.grad(result.sum(), x) if x.requires_grad else None

    compiled = dovetail.compile(program, backend="aten")
    expected = outcome(program)
    for _ in range(2):
        same(expected, outcome(compiled))
    assert dovetail.events_of(compiled).count("graph break") == (2 if casts and name == "pinverse" else casts)
