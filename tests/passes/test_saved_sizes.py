"""A compiler of the backward reads each symbolic size off an input: sizes that make others are saved where they are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dovetail
from dovetail.aot.partition import PartitionedGraph, partition
from dovetail.passes.recompute import saved_by
from dovetail.passes.saved_sizes import saving_sizes
from dovetail.torch_private import sizes as private_sizes
from tests.differential import same


def half(x: Tensor) -> Tensor:
    return x.chunk(2)[0].sin()


def every_other(x: Tensor) -> Tensor:
    return F.pad(x.t(), (1, 2))[:, ::2].cos()


def both(x: Tensor) -> Tensor:
    one, two = x.exp().tensor_split(2)
    return one.sum(0) * two.sum(0)


def squared(x: Tensor) -> Tensor:
    return (x[: x.shape[0] // 3 + 1].sin() * x.shape[0]).square()


PROGRAMS: list[Callable[[Tensor], Tensor]] = [half, every_other, both, squared]


def parts_of(program: Callable[[Tensor], Tensor], choose: Callable[..., Any] = saving_sizes) -> PartitionedGraph:
    x = dovetail.mark_dynamic(torch.randn(9, 4, requires_grad=True), 0)
    return partition(dovetail.capture(program, (x,)), choose(saved_by("minimum_cut")))


def missing(parts: PartitionedGraph) -> set[Any]:
    assert parts.backward is not None
    values = [node.meta["val"] for node in parts.backward.graph.find_nodes(op="placeholder")]
    sizes = [item for value in values for item in ([value] if isinstance(value, torch.SymInt) else value.shape)]
    expressions = {private_sizes.expression_of(size) for size in sizes if private_sizes.is_symbolic(size)}
    return {symbol for item in expressions for symbol in private_sizes.symbols_of(item)} - expressions


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_missing(program: Callable[[Tensor], Tensor]) -> None:
    parts = parts_of(program)
    assert missing(parts) == set()
    parts.forward.graph.lint()


def test_without_it_something_would_be() -> None:
    assert missing(parts_of(half, lambda choose: choose))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_kernels_for_every_size(program: Callable[[Tensor], Tensor]) -> None:
    compiled = dovetail.compile(program, backend="inductor", dynamic=True, fullgraph=True, tiers="wait")
    for size in (9, 4, 21):
        x = torch.randn(size, 4, requires_grad=True)
        expected, found = program(x), compiled(x)
        same(expected, found, exact=False)
        same(*(torch.autograd.grad(value.square().sum(), x) for value in (expected, found)), exact=False)
    assert dovetail.events_of(compiled).count("static shapes") == 0
