"""A flat graph as data is the same graph on the other side: operators, values in memory, results; or it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.backends.protocol import Backend, Kind
from dovetail.cache.unportable import UnportableError
from dovetail.tiers.flat_graph import DecodedGraph, encode
from tests.differential import same

Given = tuple[torch.fx.GraphModule, Kind, dict[str, Any]]


def graphs_of(function: Callable[..., Any], *args: Any, **options: Any) -> list[Given]:
    """The graphs that a backend is given for one training step."""
    found: list[Given] = []

    def note(graph: torch.fx.GraphModule, inputs: Sequence[Any], *, kind: Kind, options: dict[str, Any]) -> Any:
        found.append((graph, kind, options))
        return lambda values: list(graph(*values))

    compiled = dovetail.compile(function, backend=Backend("noting", note), **options)  # type: ignore[arg-type]
    result = compiled(*args)
    if isinstance(result, Tensor) and result.requires_grad:
        result.sum().backward()
    return found


def decoded(given: Given) -> DecodedGraph:
    return DecodedGraph(json.loads(json.dumps(encode(*given))))


def facts(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [facts(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    place = (value.storage_offset(), value.untyped_storage().nbytes())
    return (value.shape, value.stride(), value.dtype, value.device, value.is_inference(), *place)


def shapes(value: Any) -> list[Any]:
    items = value if isinstance(value, (list, tuple)) else [value]
    return [(item.shape, item.stride(), item.dtype) if isinstance(item, Tensor) else item for item in items]


def attention(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).view(2, 4, 3, 8).transpose(1, 2).unbind(1)
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).softmax(-1)


def masked(x: Tensor) -> Tensor:
    # Of the operators that no artefact may name.
    index = torch.tensor([0, 2, 1])
    return torch.ops.aten._unsafe_masked_index(x, torch.tensor([True, False, True]), [index], 0.0) * 2


def constants(x: Tensor) -> Tensor:
    return x * torch.tensor([1.5, float("inf"), -2.0]) + x.new_tensor(3)


def numbers(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan")) + x.to(torch.bfloat16).to(torch.complex64).real * 1e-300


PROGRAMS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (attention, (torch.randn(2, 4, 6), torch.randn(6, 24, requires_grad=True))),
    (constants, (torch.randn(3, requires_grad=True),)),
    (masked, (torch.randn(3, requires_grad=True),)),
    (numbers, (torch.randn(2, 3, requires_grad=True),)),
    (lambda x: x[:, 1:].t() * torch.rand(3, 1), (torch.randn(2, 4, requires_grad=True),)),
    (lambda x: (x.topk(2).values, x.argmax(), x > 0), (torch.randn(4, 4),)),
    (lambda x: nn.functional.batch_norm(x, None, None, training=True), (torch.randn(4, 3, 2, requires_grad=True),)),
]


@pytest.mark.parametrize(("function", "args"), PROGRAMS)
def test_the_same_graph_on_the_other_side(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    given = graphs_of(function, *args)
    assert given
    for graph, kind, options in given:
        other = decoded((graph, kind, options))
        assert (other.kind, other.options) == (kind, json.loads(json.dumps(options)))
        assert other.graph.code == graph.code
        for one, two in zip(graph.graph.nodes, other.graph.graph.nodes, strict=True):
            if one.op == "placeholder":
                assert facts(two.meta["val"]) == facts(one.meta["val"])
            elif one.op != "output":
                # Where it lies in its memory is said of inputs alone: views get theirs by running.
                assert shapes(two.meta["val"]) == shapes(one.meta["val"])
        inputs = [_real(value) for value in other.examples]
        torch.manual_seed(0)
        expected = graph(*inputs)
        torch.manual_seed(0)
        same(list(expected), list(other.graph(*inputs)))


def _real(value: Tensor) -> Tensor:
    new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return new.fill_(1)


def test_options_and_write_backs() -> None:
    ((graph, kind, options),) = graphs_of(lambda x: x + 1, torch.ones(2))
    other = decoded((graph, kind, {**options, "write_backs": {0: 0}, "max_autotune": True}))
    assert other.options["write_backs"] == {0: 0}
    assert other.options["max_autotune"] is True
    with pytest.raises(UnportableError, match="no plain value"):
        encode(graph, kind, {"hook": print})


def test_what_cannot_travel_is_refused() -> None:
    @torch.library.custom_op("tiers::tripled", mutates_args=())
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    tripled.register_fake(torch.empty_like)
    programs: list[tuple[Callable[..., Any], dict[str, Any]]] = [(tripled, {}), (lambda x: x.sum(0), {"dynamic": True})]
    for function, options in programs:
        (given,) = graphs_of(function, torch.ones(3, 4), **options)
        with pytest.raises(UnportableError):
            encode(*given)


def test_a_large_constant_stays_here() -> None:
    ((graph, kind, options),) = graphs_of(constants, torch.randn(3))
    for node in graph.graph.find_nodes(op="get_attr"):
        setattr(graph, str(node.target), torch.ones(1 << 20))
    with pytest.raises(UnportableError, match="a constant is large"):
        encode(graph, kind, options)
