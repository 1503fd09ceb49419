"""What a graph calls by number lives exactly as long as anything can run the graph."""

from __future__ import annotations

import gc
from typing import Any

import torch

import dovetail
from dovetail.aot.entries import make_entry
from dovetail.whole_calls import operator
from tests.differential import same


def _known() -> int:
    make_entry.cache_clear()
    gc.collect()
    return len(operator._FUNCTIONS)


def _product(x: torch.Tensor) -> torch.Tensor:
    return x.prod() * 2


def _gradient(function: Any, leaf: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(function(leaf), leaf)
    return found


def test_whole_functions_die_with_the_compiled_function() -> None:
    before = _known()
    compiled = dovetail.compile(lambda x: _product(x), backend="aten", fullgraph=True)
    leaf = torch.rand(4, requires_grad=True)
    same(_gradient(_product, leaf), _gradient(compiled, leaf))
    assert _known() > before
    del compiled
    assert _known() == before


def test_a_backward_outlives_the_compiled_function() -> None:
    before = _known()
    leaf = torch.rand(4, requires_grad=True)
    compiled = dovetail.compile(lambda x: _product(x), backend="aten", fullgraph=True)
    result = compiled(leaf)
    del compiled
    gc.collect()
    (gradient,) = torch.autograd.grad(result, leaf)
    same(_gradient(_product, leaf), gradient)
    del result, gradient
    assert _known() == before


def test_whole_functions_of_a_second_order_die_too() -> None:
    before = _known()
    leaf = torch.rand(4, requires_grad=True)
    found = []
    for function in (lambda x: x.cumprod(0), dovetail.compile(lambda x: x.cumprod(0), backend="aten", fullgraph=True)):
        (gradient,) = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), leaf)[0])
    torch.testing.assert_close(*found)
    assert _known() > before
    del function, gradient, found
    assert _known() == before
