"""Inductor computes in the memory of what nobody reads any more, though an input is still to be written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import dovetail
from dovetail.versions import parse
from tests.differential import same


def trained(backend_options: dict[str, Any] | None) -> tuple[Any, list[str]]:
    torch.manual_seed(4)
    first, second = (torch.nn.Linear(32, 32, bias=False) for _ in range(2))
    parameters = [first.weight, second.weight]
    optimizer = torch.optim.SGD(parameters, lr=0.001)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = second(torch.nn.functional.gelu(first(x))).sin().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(64, 32)
    if backend_options is None:
        step(x)
        return (step(x), parameters, [item.grad for item in parameters]), []
    options = {"fx_graph_cache": False, **backend_options}
    compiled = dovetail.compile(step, backend="inductor", backend_options=options, fullgraph=True)
    # The first call finds no gradients: its entry is used once, and gets no kernels.
    compiled(x)
    loss, code = run_and_get_code(compiled, x)
    return (loss, parameters, [item.grad for item in parameters]), code


@pytest.mark.skipif(
    parse(torch.__version__) < (2, 13), reason="Inductor before torch 2.13 computes nothing here in place"
)
def test_results_of_products_with_weights_are_computed_in_place() -> None:
    expected, _ = trained(None)
    plain, kept = trained({"_pre_fusion_custom_pass": None})
    actual, reused = trained({})
    same(expected, plain, "without the pass", exact=False)
    same(expected, actual, "with the pass", exact=False)
    assert len(kept) == len(reused) == 1
    # So Inductor calls the argument of a kernel that reads and writes one buffer.
    assert "in_out_ptr" not in kept[0]
    assert "in_out_ptr" in reused[0]
