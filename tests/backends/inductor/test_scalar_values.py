"""Numbers in tensors without dimensions, which Inductor would compute again for each element."""

from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail.backends.inductor.scalar_values import compute_scalars_once
from dovetail.torch_private import inductor as private_inductor
from tests.differential import same


def scaled(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return x * (1 - torch.pow(0.9, step)) + x / torch.sqrt(step)


def captured(dtype: torch.dtype) -> torch.fx.GraphModule:
    joint = dovetail.capture(scaled, (torch.ones(4, dtype=dtype), torch.tensor(3.0, dtype=torch.float64)))
    return joint.graph_module


def test_each_number_is_kept_once() -> None:
    for dtype in (torch.float32, torch.float64):
        graph = captured(dtype)
        compute_scalars_once(graph)
        kept = [node for node in graph.graph.nodes if node.target is private_inductor.inductor_realize()]
        assert len(kept) == 2
        assert {node.meta["val"].dtype for node in kept} == {dtype}
        graph.graph.lint()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64])
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
@pytest.mark.sampled(5)
def test_results_are_those_of_eager(dtype: torch.dtype, precision: torch.dtype) -> None:
    compiled = dovetail.compile(scaled, backend="inductor", fullgraph=True)
    x, step = torch.arange(1, 9).to(dtype), torch.tensor(3.0, dtype=precision)
    expected, actual = scaled(x, step), compiled(x, step)
    assert expected.dtype == actual.dtype
    if dtype is torch.bfloat16:
        assert torch.allclose(expected.float(), actual.float(), rtol=0.02)
    else:
        same(expected, actual, str(dtype), False)
