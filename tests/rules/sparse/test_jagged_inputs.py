"""Jagged nested tensors as inputs and results: calls that are given one stay whole."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import DovetailError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def made(lengths: list[int], requires_grad: bool = True) -> torch.Tensor:
    """Sequences of these lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(length, 4, generator=generator) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=requires_grad)


class Block(torch.nn.Module):
    """Works on the last dimension."""

    def __init__(self, pads: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.pads = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), pads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x)).relu() * 2.0
        return torch.nested.to_padded_tensor(y, 0.0).sum(1) if self.pads else y


def numbers(value: Any) -> torch.Tensor:
    """The values of a tensor, jagged or not."""
    found: torch.Tensor = value.values() if value.is_nested else value
    return found.detach()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("pads", [True, False])
def test_a_block_of_modules_is_one_graph(pads: bool, requires_grad: bool) -> None:
    block = Block(pads)
    compiled = dovetail.compile(block, backend="aten", fullgraph=True)
    for lengths in ([2, 3], [2, 3], [3, 1], [5, 5], [1, 2, 3]):
        found = []
        for function in (block, compiled):
            block.zero_grad()
            x = made(lengths, requires_grad)
            result = function(x)
            (result.values() if result.is_nested else result).pow(2).sum().backward()
            gradients = [parameter.grad.clone() for parameter in block.parameters()]
            found.append([numbers(result), *gradients, *([numbers(x.grad)] if requires_grad else [])])
            if not pads:
                # Of the same structure, so that the two can be added.
                assert result.shape == x.shape and (result + x).is_nested
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def with_size(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sin().values() * x.shape[0] + y.sum() * x.size(2)


def its_values(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.values().sin() * y.sum()


def again(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nested.to_padded_tensor(x + x.sin(), 0.0).sum() * y


def rebuilt(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made_new = torch.nested.nested_tensor_from_jagged(x.values() * 2, x.offsets())
    return torch.nested.to_padded_tensor(made_new, 0.0).sum() * y


def rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return sum((row.sum() for row in x.unbind()), y.sum())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [with_size, its_values, again, rebuilt, rows])
def test_as_eager_or_refused(program: Any) -> None:
    compiled = dovetail.compile(program, backend="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for lengths in ([2, 3], [2, 3], [4, 1]):
            found = []
            for function in (program, compiled):
                x, y = made(lengths), torch.ones(2, requires_grad=True)
                try:
                    result = function(x, y)
                    gradients = torch.autograd.grad(result.sum(), [x, y])
                except DovetailError:
                    continue
                found.append([numbers(result), *map(numbers, gradients)])
            assert len(found) == 1 or all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_attributes_with_names_of_methods() -> None:
    """``_values`` is a tensor of a jagged tensor, and a method of a sparse one."""
    x = made([2, 3], requires_grad=False)
    compiled = dovetail.compile(lambda x: type(x._values).__name__, backend="aten")
    assert compiled(x) == "Tensor"


def _raises(size: Any, x: torch.Tensor) -> Any:
    try:
        return int(size)
    except AttributeError as error:
        return type(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "program",
    [
        lambda size, x: (isinstance(size, torch.SymInt), isinstance(size, int), x * 2),
        lambda size, x: (type(size), x * 2),
        lambda size, x: (str(size), x * 2),
        lambda size, x: (size == size, size >= 2, x * 2),
        _raises,
    ],
)
def test_a_ragged_size_is_a_value_of_the_program(program: Any) -> None:
    size, x = made([2, 3]).shape[1], torch.ones(2)
    assert str(dovetail.compile(program, backend="aten")(size, x)) == str(program(size, x))
