"""Decompositions that are copied are those that torch would trace: nodes, names, facts, shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from dovetail.backends.inductor.decompositions import wanted_decompositions
from dovetail.passes import decomposed_again
from dovetail.passes.decompose import decompose_graph
from tests.backends.graphs import make_graph

Tensor = torch.Tensor


def layers(x: Tensor, weight: Tensor) -> list[Any]:
    found: list[Any] = []
    for _ in range(3):
        normal, mean, spread = torch.native_layer_norm(x @ weight, [4], weight[0], None, 1e-5)
        wanted = [True, True, False]
        found += torch.ops.aten.native_layer_norm_backward(normal, x, [4], mean, spread, weight[0], None, wanted)
        x = functional.gelu(normal)
        found.append(torch.ops.aten.gelu_backward(x, normal))
    return [*found, x]


def shared(x: Tensor, weight: Tensor) -> list[Any]:
    # One tensor twice, two views of one memory, a view that is returned.
    parts = [functional.silu(x * x + x * weight) + functional.softplus(x[0]) * functional.softplus(x[1]) for _ in "ab"]
    return [*parts, *parts[0].split(2), *x.split(2)]


def several(x: Tensor, weight: Tensor) -> list[Any]:
    found = [torch.var_mean(x.roll(1, 0), 1) for _ in "ab"]
    return [*found[0], *found[1], *torch.aminmax(x), *torch.aminmax(weight)]


def unequal(x: Tensor, weight: Tensor) -> list[Any]:
    # Equal but for a plain argument, its type, a dtype or strides.
    return [
        *(functional.leaky_relu(x, slope) for slope in (0.0, -0.0, 1, True)),
        *(functional.gelu(y) for y in (x, x.double(), x.t(), x.t().contiguous())),
        *(functional.gelu(x, approximate=how) for how in ("none", "tanh")),
    ]


def random(x: Tensor, weight: Tensor) -> list[Any]:
    return [functional.dropout(x, 0.5), functional.dropout(x, 0.5), torch.rand_like(x), torch.rand_like(x)]


def described(module: torch.fx.GraphModule) -> list[Any]:
    """All that is noted of a graph's nodes, memory by the number of the first value in it."""
    memories: dict[int, int] = {}

    def facts(value: Any) -> Any:
        if isinstance(value, Tensor):
            memory = memories.setdefault(value.untyped_storage()._cdata, len(memories))
            keys = torch._C._dispatch_keys(value).raw_repr()
            return value.dtype, value.shape, value.stride(), value.storage_offset(), keys, memory, value.requires_grad
        return [facts(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)

    return [
        (
            node.format_node(),
            repr(node.kwargs),
            facts(node.meta.get("val")),
            repr(node.meta.get("tensor_meta")),
            sorted(node.meta),
        )
        for node in module.graph.nodes
    ]


@pytest.mark.sampled(2)
@pytest.mark.skipif(not decomposed_again.private.IS_KNOWN, reason="fake tensors of another torch")
@pytest.mark.parametrize("program", [layers, shared, several, unequal, random])
def test_the_copied_graph_is_the_traced_one(program: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(4, 4), torch.randn(4, 4)
    graph, _, fake_mode = make_graph(program, *inputs)
    copied: list[Any] = []
    copy = decomposed_again.Repeats._copy
    monkeypatch.setattr(
        decomposed_again.Repeats, "_copy", lambda self, known, call: copied.append(call) or copy(self, known, call)
    )
    found = described(decompose_graph(graph, wanted_decompositions(), fake_mode))
    assert copied
    monkeypatch.setattr(decomposed_again.private, "IS_KNOWN", False)
    assert found == described(decompose_graph(graph, wanted_decompositions(), fake_mode))
