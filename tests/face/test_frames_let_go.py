"""A capture that fails leaves torch's dispatcher as it was, also later, when its exception is collected."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import dovetail


def _keys() -> list[Any]:
    return [
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        torch._C._dispatch_tls_local_include_set().raw_repr(),
    ]


@pytest.mark.filterwarnings("ignore::dovetail.errors.EagerFallbackWarning")
def test_eager_goes_on_after_captures_that_fail_inside_of_the_dispatcher() -> None:
    """Torch prints the tensors of ``lerp_`` there, which it cannot for dual numbers."""

    def program(x: torch.Tensor) -> Any:
        return torch.func.jvp(lambda y: torch.quantile(y, 0.3, dim=0), (x,), (torch.ones_like(x),))

    x = torch.arange(15.0).sin().reshape(5, 3)
    before, expected = _keys(), program(x)
    for _ in range(3):
        found = dovetail.compile(program, backend="aten")(x)
        gc.collect()
        assert _keys() == before
        assert all(map(torch.equal, found, expected))
